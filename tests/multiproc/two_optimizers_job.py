"""A loop with two optimizers on ranks of unequal speed, the second made before the first step or in mid-training.

Arguments: the modes of the two, `before` or `later`, and how many steps of the first are made in each pass (1 if none).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import star_hvd as hvd
from tests.support.attempts import agreed
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S

STEPS = 40
CONFIG = hvd.Config(step_deadline_s=100.0)  # A rank that waits crosswise ends the job within it.


def make(mode: str) -> tuple[torch.nn.Module, Any]:
    net = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    return net, hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=CONFIG)


def step(number: int, net: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    net(torch.ones(2)).sum().backward()
    time.sleep(0.02 * (1 + number % 4) if hvd.rank() == 1 else 0.004)
    optimizer.step()


def main() -> None:
    first, second, when, *more = sys.argv[1:]
    steps_per_pass = (int(more[0]) if more else 1, 1)
    hvd.init()
    both, alone = [make(first)], ""
    if when == "later":
        limit_s, number = time.monotonic() + PATIENCE_S, 0
        while not agreed(both[0][1].mode != "sync", limit_s):
            step(number, *both[0])
            number += 1
        for further in range(30):  # Ranks are at different steps now, the fast one further.
            step(number + further, *both[0])
        alone = both[0][1].mode
    both.append(make(second))
    modes = set()
    for number in range(STEPS):
        for index, pair in enumerate(both):
            for _ in range(steps_per_pass[index]):
                modes.add(f"{index} {pair[1].mode}")
                step(number + index, *pair)
    said = hvd.explain()
    weights = [net.weight.tolist() for net, _ in both]
    write_result({"alone": alone, "modes": sorted(modes), "explain": said, "weights": weights})
    hvd.shutdown()


if __name__ == "__main__":
    main()
