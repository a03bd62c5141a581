"""Runs under horovodrun: times steps with the run log off and on in alternating blocks, with no straggler."""

from __future__ import annotations

import argparse
import os
import sys

import torch

import star_hvd as hvd
from benchmarks.lab.spec import write_json
from benchmarks.lab.worker import register
from benchmarks.workers.overhead import add_arguments, alternate, make_side
from star_hvd.runtime import runtime

__all__ = ["main"]

WARM_UP_STEPS = 100  # The sender of the logged optimizer starts after 3 s; it is part of what is measured.


def main(argv: list[str]) -> int:
    """Write the step times of every block, with their end on this machine's clock, to `run_log.json`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(argv)
    register(args.run_dir)
    torch.set_num_threads(1)
    hvd.init()
    sides = {}
    for name, switch in (("off", "0"), ("on", "1")):
        os.environ["STAR_RUN_LOG"] = switch  # Read when an optimizer is constructed.
        sides[name] = make_side(hvd, "digits")
    rank = int(hvd.rank())
    found = alternate(args, sides, "digits", rank=rank, size=int(hvd.size()), warm_up=WARM_UP_STEPS)
    run = runtime.current()
    assert run is not None
    reporter = run.drivers[max(run.drivers)].reporter  # That of the logged optimizer, which was made last.
    assert reporter.log is not None
    name, steps = reporter.log.directory.name, int(reporter.stats()["steps"])
    hvd.shutdown()
    if rank == 0:
        write_json(args.run_dir / "run_log.json", {"blocks": found, "run": name, "steps": steps})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
