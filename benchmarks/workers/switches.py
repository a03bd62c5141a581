"""Runs under horovodrun: walks through the modes and times every step, including those delayed by a switch."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import star_hvd as hvd
from benchmarks.lab.spec import write_json
from benchmarks.lab.worker import progress, register
from scheduler.plan.mode_names import parse_mode
from star_hvd.runtime import runtime

__all__ = ["main"]

STEPS_PER_MODE = 30
ASK_EVERY = 100  # Steps between requests; a plan may be abandoned because a rank was not ready in time.
STEP_LIMIT = 2000  # Steps within which a mode has to come into force.


def main(argv: list[str]) -> int:
    """Write this rank's step times, and the mode in force at the end of each step, to `switches-RANK.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--modes", required=True, help="the walk, separated by semicolons")
    parser.add_argument("--device-ms", type=float, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args(argv)
    register(args.run_dir)
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync")
    x, y = torch.randn(16, 64), torch.randint(0, 10, (16,))
    steps: list[tuple[str, float]] = []
    for mode in ["sync", *args.modes.split(";")]:
        since = 0
        for number in range(STEP_LIMIT):
            if number % ASK_EVERY == 0:
                _ask_for(mode)
            began_s = time.perf_counter()
            optimizer.zero_grad()
            time.sleep(args.device_ms / 1000.0)
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            steps.append((optimizer.mode, time.perf_counter() - began_s))
            since += optimizer.mode == mode
            if since >= STEPS_PER_MODE:
                break
        hvd.barrier()  # All ranks are in the mode, so the next switch starts from a common point.
        if hvd.rank() == 0:
            progress(text=f"{mode}: {since} steps", done=1)
    write_json(args.run_dir / f"switches-{hvd.rank()}.json", {"steps": steps})
    hvd.shutdown()
    return 0


def _ask_for(mode: str) -> None:
    """Make rank 0's coordinator publish a plan."""
    run: Any = runtime.current()
    if run.coordinator is None:
        return
    plan = parse_mode(mode, run.world_size)
    assert plan is not None
    with run.coordinator.job_state() as job:
        optimizer = job.optimizers.get(max(job.optimizers, default=-1))
        if optimizer is not None and optimizer.active.label != plan.label and not optimizer.switching:
            optimizer.publish(plan.replace(reason="asked for"), time.monotonic())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
