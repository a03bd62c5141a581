"""Every rank of a job in which optimizers are made and closed one after another, all under servers."""

from __future__ import annotations

import sys
import time
from typing import Any

import psutil
import torch

import star_hvd as hvd
from star_hvd.ps.common.forking import SERVER_NAME
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning
from tests.support.signals import PATIENCE_S

OPTIMIZERS = 4
CONFIG = hvd.Config(plan_deadline_s=200.0, control_deadline_s=200.0)


def one(mode: str) -> str:
    """Make an optimizer, train until its mode is in force, close it; the mode."""
    net = torch.nn.Linear(64, 64)
    hvd.broadcast_parameters(net.state_dict(), 0)
    inner = torch.optim.Adam(net.parameters(), 1e-3)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    limit_s = time.monotonic() + PATIENCE_S
    while optimizer.mode == "sync" and time.monotonic() < limit_s:
        optimizer.zero_grad()
        net(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    reached = str(optimizer.mode)
    optimizer.close()
    return reached


def open_files() -> dict[str, int]:
    """Descriptors of this process and of its parameter server; threads and sessions here."""
    me, run = psutil.Process(), runtime.current()
    assert run is not None
    servers = [child for child in me.children(recursive=True) if child.name() == SERVER_NAME]
    return {
        "own": me.num_fds(),
        "server": sum(child.num_fds() for child in servers),
        "servers": len(servers),
        "threads": me.num_threads(),
        "sessions": sum(len(run.services.sessions.open_sessions(number)) for number in range(OPTIMIZERS)),
    }


def main(mode: str) -> None:
    torch.set_num_threads(1)
    wait_without_spinning()
    hvd.init()
    facts: list[dict[str, Any]] = []
    for _ in range(OPTIMIZERS):
        reached = one(mode)
        hvd.barrier()
        facts.append({"mode": reached, **open_files()})
    write_result({"facts": facts})
    hvd.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
