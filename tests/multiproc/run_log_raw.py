"""What every rank of a run-log test runs: a small training that feeds a `RunLog` itself, call by call.

`python -m tests.multiproc.run_log_raw ROOT STEPS [die]`: with `die`, rank 0 kills itself after half of the steps.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch

import star_hvd as hvd
from scheduler.plan.plan import Plan
from scheduler.records import RankStats, StepReport, StepTimes, Window
from star_hvd.run_log import RunLog, new_run_name, run_directory, window_values
from star_hvd.run_log.facts import environment, optimizer_facts
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S

STEP_S = 0.02
UNWRITTEN = 30  # Steps of the last half second, which the log may still have in memory.


def await_lines(path: Path, count: int) -> None:
    """Wait until a file has that many lines; a busy machine gives the writer its turn late."""
    limit_s = time.monotonic() + PATIENCE_S
    while (not path.exists() or path.read_bytes().count(b"\n") < count) and time.monotonic() < limit_s:
        time.sleep(0.02)


def main(root: str, steps: int, die: bool) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank, size = int(hvd.rank()), int(hvd.size())
    name = hvd.broadcast_object(new_run_name() if rank == 0 else None, root_rank=0, name="run")
    log = RunLog(run_directory(name, Path(root)), rank=rank, world_size=size, job=environment(["a"] * size))
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), mode="sync")
    log.facts({"optimizer": optimizer_facts(inner)})
    log.plan(0, Plan.sync(size, reason="asked for"), {})
    used_s, calls_s = [], []
    for step in range(steps):
        if die and rank == 0 and step == steps // 2:
            await_lines(log.directory / "rank0.jsonl", step - UNWRITTEN)
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.perf_counter()
        time.sleep(STEP_S)
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        ended_s, cpu_s = time.perf_counter(), time.thread_time()
        log.step(StepReport(rank=rank, step=step, times=StepTimes(ended_s - began_s), loss=loss.item()))
        ranks = tuple(RankStats(rank=r, compute_s=(ended_s - began_s,), steps=(step,)) for r in range(size))
        log.window(window_values(Window(step=step, ranks=ranks), mode="sync", loss=loss.item()))
        log.metric("loss", loss.item(), step)
        used_s.append(time.thread_time() - cpu_s)
        calls_s.append(time.perf_counter() - ended_s)
        write_result({"name": name, "steps": step + 1})
    optimizer.close()
    began_s = time.monotonic()
    log.close("FINISHED", 3.0)
    facts = {"close_s": time.monotonic() - began_s, "dropped": log.dropped}
    # Of the thread's own time the median; by the clock the least, since others may have the core or the interpreter.
    calls = {"used_s": statistics.median(used_s), "call_s": statistics.median(calls_s), "least_s": min(calls_s)}
    write_result({"name": name, "steps": steps, **facts, **calls})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "die" in sys.argv[3:])
