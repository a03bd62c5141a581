"""Training on parameter servers with something killed: `python -m tests.fault.ps_job WHAT`.

WHAT is `nothing`, `server` (a static job of four ranks in ps(4)), `worker` (an elastic one in ps(2)) or
`unstartable PROGRAM` (servers are started with this program, which ends at once).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, mark, marked

STEPS, KILL_AT, COMMIT_EVERY, VICTIM = 60, 20, 400, 3
# A server that is started again imports torch; on a core that many share that takes its time.
CONFIG = hvd.Config(control_deadline_s=240.0, plan_deadline_s=240.0)


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def step(net: torch.nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 * int(hvd.rank()) + number)
    inputs = torch.randn(4, 8, generator=generator)
    optimizer.zero_grad()
    time.sleep(0.005)
    (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def digest(net: torch.nn.Module) -> str:
    raw = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    return hashlib.sha256(raw).hexdigest()[:16]


def server(kill: bool) -> None:
    net, inner = model()
    named = net.named_parameters()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode="ps(4)", config=CONFIG)
    number = 0
    while optimizer.mode == "sync":  # All ranks compute the same number of steps until the servers are there.
        step(net, optimizer, 0)
        number += 1
    before = digest(net)
    for again in range(STEPS):
        step(net, optimizer, again)
        run = runtime.current()
        if kill and again in (KILL_AT, 2 * KILL_AT) and run is not None and run.services.sessions.server.pid:
            os.kill(run.services.sessions.server.pid, signal.SIGKILL)
    optimizer.close()
    steps = optimizer.stats()["steps"] - number
    write_result({"digest": digest(net), "before": before, "sync_steps": number, "steps": steps})


def unstartable(program: str) -> None:
    """Train in `ps(2)` until it is known that its servers cannot start, then some steps more."""
    sys.executable = program
    net, inner = model()
    # The plan is abandoned because the servers end, not because of its deadline.
    config = hvd.Config(plan_deadline_s=10.0 * PATIENCE_S)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="ps(2)", config=config)
    number, said, known, limit_s = 0, "", False, time.monotonic() + PATIENCE_S
    while not known:
        step(net, optimizer, number)
        number += 1
        said = hvd.explain()
        known = "could not be prepared" in said or time.monotonic() > limit_s
        said, known = hvd.broadcast_object((said, known), 0, name="explain")
    for again in range(STEPS):
        step(net, optimizer, number + again)
    write_result({"digest": digest(net), "mode": optimizer.mode, "explain": said, "steps": number})
    optimizer.close()


def worker() -> None:
    net, inner = model()
    named = net.named_parameters()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode="ps(2)", config=CONFIG)
    state = hvd.elastic.TorchState(net, optimizer, step=0, ready=0)
    facts: dict[str, Any] = {"resumed": [], "after_death": 0}

    @hvd.elastic.run
    def train(state: Any) -> None:
        facts["resumed"].append(state.step)
        alone, limit_s = int(hvd.size()) < 4, time.monotonic() + PATIENCE_S
        end = state.step + 5 * STEPS if alone else sys.maxsize  # Nobody ends before the world is rebuilt.
        while state.step < end and (alone or time.monotonic() < limit_s):
            served = optimizer.mode != "sync"
            # Well before the next commit, so that there are steps in between.
            strikes = state.ready >= KILL_AT and state.step % COMMIT_EVERY == COMMIT_EVERY // 4
            if served and not alone and int(hvd.rank()) == VICTIM and strikes:
                mark("dead")
                os.kill(os.getpid(), signal.SIGKILL)
            step(net, optimizer, state.step)
            if served and not alone:
                state.ready += 1
                facts["after_death"] += marked("dead")
            state.step += 1
            enough = alone or not marked("dead") or facts["after_death"] > KILL_AT
            if state.ready and state.step % COMMIT_EVERY == 0 and enough:
                facts["committed"] = state.step
                write_result({"digest": digest(net), "size": int(hvd.size()), "step": state.step, **facts})
                state.commit()

    train(state)
    optimizer.close()
    write_result({"digest": digest(net), "size": int(hvd.size()), "step": state.step, **facts})


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    if sys.argv[1] == "worker":
        worker()
    elif sys.argv[1] == "unstartable":
        unstartable(sys.argv[2])
    else:
        server(sys.argv[1] == "server")
