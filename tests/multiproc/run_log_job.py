"""What every rank of a run-log test runs: a small training in mode `auto` whose last rank is slow.

`python -m tests.multiproc.run_log_job STEPS [die]`: with `die`, rank 0 kills itself after half of the steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.reasons import names
from tests.support.signals import PATIENCE_S, mark, marked

STEP_S = 0.02


def main(steps: int, die: bool) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank, size = int(hvd.rank()), int(hvd.size())
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    run = runtime.current()
    assert run is not None
    log = next(iter(run.drivers.values())).reporter.log
    slowdown = 5.0 if rank == size - 1 else 1.0
    said: list[str] = []
    step, acted, limit_s = -1, False, time.monotonic() + PATIENCE_S
    # As many as asked for, and on until `auto` has acted on a slow rank.
    while step + 1 < steps or (not acted and time.monotonic() < limit_s):
        step += 1
        if die and rank == 0 and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slowdown * STEP_S)
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).square().mean()
        hvd.record_loss(loss)
        loss.backward()
        optimizer.step()
        hvd.record_metric("accuracy", 1.0 - 1.0 / (1.0 + step))
        if not said:
            said.append(hvd.explain())
        report = hvd.report()
        # On a busy machine another rank may be the slow one, rank 0 for example, which also coordinates.
        if report is not None and any(names(plan["reason"], each) for plan in report.plans for each in range(size)):
            mark("acted")
        acted = acted or marked("acted")
    said.append(hvd.explain())
    name, dropped = run.run_name, log.dropped if log is not None else -1
    began_s = time.monotonic()
    hvd.shutdown()
    facts = {"name": name, "steps": step + 1, "dropped": dropped, "said": said}
    write_result({**facts, "close_s": time.monotonic() - began_s})


if __name__ == "__main__":
    main(int(sys.argv[1]), "die" in sys.argv[2:])
