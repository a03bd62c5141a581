"""Runs under horovodrun: times steps with the run log off and on in alternating blocks, nobody slow."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import star_hvd as hvd
from benchmarks.overhead_worker import BATCH_SAMPLES, SKIPPED_STEPS, make_side
from benchmarks.spec import write_json
from benchmarks.tasks import load_task
from benchmarks.worker import progress, register
from star_hvd import runtime

__all__ = ["main"]

WARM_UP_STEPS = 100  # The sender of the logged optimizer starts after 3 s; it is part of what is measured.


def main(argv: list[str]) -> int:
    """Write the step times of every block, with their end on this machine's clock, to `run_log.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    args = parser.parse_args(argv)
    register(args.run_dir)
    torch.set_num_threads(1)
    hvd.init()
    sides = {}
    for name, switch in (("off", "0"), ("on", "1")):
        os.environ["STAR_RUN_LOG"] = switch  # Read when an optimizer is made.
        sides[name] = make_side(hvd, "digits")
    rank = int(hvd.rank())
    x, y = load_task("digits", BATCH_SAMPLES * int(hvd.size())).train.tensors
    mine = slice(rank * BATCH_SAMPLES, (rank + 1) * BATCH_SAMPLES)
    for side in sides.values():
        for _ in range(WARM_UP_STEPS):
            side.step(x[mine], y[mine], args.device_ms / 1000.0)
    found: dict[str, list[dict[str, object]]] = {name: [] for name in sides}
    for block in range(args.blocks):
        for name in ("off", "on") if block % 2 == 0 else ("on", "off"):
            times_s = []
            for _ in range(SKIPPED_STEPS + args.steps):
                start_s = time.perf_counter()
                sides[name].step(x[mine], y[mine], args.device_ms / 1000.0)
                times_s.append(time.perf_counter() - start_s)
            found[name].append({"ended_unix_s": time.time(), "times_s": times_s[SKIPPED_STEPS:]})
        if rank == 0:
            progress(text=f"block {block + 1} of {args.blocks}", done=1)
    run = runtime.current()
    assert run is not None
    logged = max(run.drivers)  # The one made last.
    name, steps = f"{run._job}-{logged}", int(run.drivers[logged].stats()["steps"])
    hvd.shutdown()
    if rank == 0:
        write_json(args.run_dir / "run_log.json", {"blocks": found, "run": name, "steps": steps})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
