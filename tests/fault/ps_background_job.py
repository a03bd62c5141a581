"""Pushes that begin within backward, and something is killed: `python -m tests.fault.ps_background_job WHAT`.

WHAT is `server` (a static job of four ranks in ps(4), whose servers die at named places) or `worker` (an elastic one in
ps(1), of which a rank dies inside a backward pass, with half of its gradients on their way).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.errors import RankLostError
from star_hvd.ps.owner.server_process import ServerProcess
from star_hvd.runtime import server_sessions
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, await_marks, mark, marked

STEPS, WIDTH, LAYERS, RATE = 40, 24, 6, 0.02
FAULTS: list[dict[str, Any]] = [
    {"at": "in_push", "update": 9}, {"at": "after_reply", "update": 20}, {"at": "in_push", "update": 31}
]  # fmt: skip
VICTIM, STRIKES_AT, AFTER_DEATH = 3, 12, 30
SURVIVORS = (0, 1)  # Horovod gives up the whole host of a rank that dies.
# Every layer is a bucket, of several chunks.
CONFIG = hvd.Config(
    control_deadline_s=240.0, plan_deadline_s=240.0, background=True, bucket_bytes=3 * 1024, server_chunk_bytes=1024
)


def _net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [each for _ in range(LAYERS) for each in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).double()


def _sgd(net: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)


def _loss(net: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    inputs = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return (net(inputs) - inputs.sin()).square().mean()


def _vector(net: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def _reference(numbers: list[int]) -> torch.Tensor:
    """One process with the mean gradient of four ranks."""
    net = _net()
    optimizer = _sgd(net)
    for number in numbers:
        optimizer.zero_grad()
        (sum(_loss(net, rank, number) for rank in range(4)) / 4.0).backward()  # type: ignore[union-attr]
        optimizer.step()
    return _vector(net)


def server() -> None:
    """Every server that rank 0 starts dies at the next place of the list."""

    def faults() -> Iterator[dict[str, Any]]:
        """Of one start after the other; the next one is made when a process starts."""
        for fault in FAULTS:
            # By the version of the parameters, not by the rank's own count of pushes.
            early = numbers.count(0) if fault["at"] != "in_push" else 0
            yield fault | {"update": fault["update"] + early}

    setattr(server_sessions, "ServerProcess", functools.partial(ServerProcess, faults=faults()))  # noqa: B010
    net, numbers = _net(), list[int]()
    optimizer = hvd.DistributedOptimizer(_sgd(net), net.named_parameters(), mode="ps(4)", config=CONFIG)

    def step(number: int) -> None:
        numbers.append(number)
        optimizer.zero_grad()
        _loss(net, int(hvd.rank()), number).backward()
        optimizer.step()
        time.sleep(0.0 if number else 0.05)  # The server has to start meanwhile.

    while optimizer.mode == "sync":  # All ranks make the same number of steps until the servers are there.
        step(0)
    for number in range(1, STEPS + 1):
        step(number)
    optimizer.close()
    found, expected = _vector(net), _reference(numbers)
    error = float((found - expected).abs().max() / expected.abs().max())
    write_result({"error": error, "steps": optimizer.stats()["steps"] - len(numbers)})


class Blocks(torch.nn.Module):
    """Layers, one bucket each, in which every rank has elements of its own: what its gradients come to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4, 90)) for _ in range(LAYERS))

    def moved(self) -> list[list[list[float]]]:
        """Least and most of what has come of each rank's gradients, by layer."""
        return [[[float(row.min()), float(row.max())] for row in layer.detach()] for layer in self.layers]


def _asked(loader: Any) -> dict[str, Any]:
    """What follows if all ranks are asked which samples they have consumed, as at a commit, and one is dead."""
    began_s = time.monotonic()
    try:
        loader.state_dict()
    except RankLostError as error:
        return {"lost": str(error), "waited_s": time.monotonic() - began_s}
    return {"lost": "", "waited_s": time.monotonic() - began_s}


def worker() -> None:
    """The gradient of a rank is -1 in its own elements of all layers; a half push would move those of some layers."""
    net = Blocks()
    inner, rank = torch.optim.SGD(net.parameters(), lr=1.0), int(hvd.rank())
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), mode="ps(1)", config=CONFIG)
    state = hvd.elastic.TorchState(net, optimizer)
    loader = hvd.shard(range(1_000_000), batch_size=1)  # type: ignore[arg-type]
    served, after, dies = 0, 0, [False]

    def strike(param: torch.Tensor) -> None:
        if dies[0]:
            time.sleep(0.2)  # What was given is sent.
            mark("dead")
            os.kill(os.getpid(), signal.SIGKILL)

    net.layers[LAYERS // 2].register_post_accumulate_grad_hook(strike)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        nonlocal served, after
        limit_s = time.monotonic() + PATIENCE_S
        before: list[list[list[float]]] = []
        for _ in loader:
            if after >= AFTER_DEATH or time.monotonic() > limit_s:
                break
            if not before and optimizer.mode != "sync":
                before = net.moved()
            served += bool(before)
            dies[0] = rank == VICTIM and served == STRIKES_AT
            optimizer.zero_grad()
            torch.stack([-layer[rank].sum() for layer in net.layers]).sum().backward()
            optimizer.step()
            time.sleep(0.005 if before else 0.05)  # The server has to start meanwhile.
            after += marked("dead")
        applied = optimizer.stats()["applied_weight"]
        facts = {"rank": rank, "before": before, "moved": net.moved(), "applied": applied, "after": after}
        write_result(facts | _asked(loader))
        mark("done")
        await_marks("done", SURVIVORS, 60.0)
        os._exit(0)  # Horovod's recovery is another test's.

    train(state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    {"server": server, "worker": worker}[sys.argv[1]]()
    hvd.shutdown()
