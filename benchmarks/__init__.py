"""The straggler laboratory: real Horovod training with ranks slowed down by a known amount.

Commands (each has `--help`; `README.md` beside this file explains every figure they print):

    python -m benchmarks.report_all every figure of the documents, for one version of the code
    python -m benchmarks.tta        time to accuracy of plain Horovod, backup workers and star_hvd
    python -m benchmarks.overhead   step time of star_hvd against plain Horovod with no straggler
    python -m benchmarks.demo       a small `tta` run with a plot
    python -m benchmarks.plot       plots of result files of `tta`
    python -m benchmarks.traces     writes a synthetic slowdown trace

Every module directly in this package is a command. Shared code is in subpackages: `lab` (training with stragglers),
`machine` (slow, stopped or remote resources), `workers` (ranks of the other commands), `figures` (for `report_all`).
"""
