"""Every rank of a job that ends its optimizer in a mode in which servers or other ranks hold the state."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch

import star_hvd as hvd
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning
from tests.support.signals import PATIENCE_S

CONFIG = hvd.Config(
    plan_deadline_s=200.0, control_deadline_s=200.0, step_deadline_s=300.0, shutdown_deadline_s=400.0
)
MORE = 5  # Steps behind the last time that the state was here.


def step(net: torch.nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(100 * number + RANK)
    net(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()


def updates(state: dict[str, Any]) -> int:
    """How many updates a state of Adam has had."""
    return int(state["state"][0]["step"])


def digest(net: torch.nn.Module, state: dict[str, Any]) -> str:
    """Of the parameters and the moments."""
    found = hashlib.sha256()
    for tensor in [*net.state_dict().values(), *(each["exp_avg"] for each in state["state"].values())]:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def main(mode: str, end: str) -> None:
    torch.set_num_threads(1)
    wait_without_spinning()
    hvd.init()
    global RANK
    RANK = int(hvd.rank())
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 8)
    inner = torch.optim.Adam(net.parameters(), 1e-2)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    number, limit_s = 0, time.monotonic() + PATIENCE_S
    while optimizer.mode == "sync" and time.monotonic() < limit_s:
        step(net, optimizer, number)
        number += 1
    hvd.barrier()
    reached, before = optimizer.mode, updates(optimizer.state_dict())
    hvd.barrier()
    for more in range(MORE):
        step(net, optimizer, number + more)
    if end == "close":
        optimizer.close()
    else:
        hvd.shutdown()
    state = optimizer.state_dict()
    facts = {"mode": reached, "more": updates(state) - before, "digest": digest(net, state)}
    if end == "close":
        optimizer.load_state_dict(state)
    else:
        hvd.init()
        step(net, optimizer, 0)  # In sync.
    write_result({**facts, "later": digest(net, optimizer.state_dict())})
    hvd.barrier()


RANK = 0

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
