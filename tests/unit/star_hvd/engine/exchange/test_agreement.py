"""What all ranks know after the same header: whether they may be at different steps from then on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.exchange.agreement import Agreement
from star_hvd.engine.header import Contribution, Header
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import OpenStep
from tests.support.world import Ears, World


def agreement(world_size: int) -> Agreement:
    params = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    applier = Applier(optimizer, torch.optim.SGD, pack(params, 1024), HyperRow(optimizer.param_groups))
    listener: Any = Ears(World(1, world_size=1), 0)
    return Agreement(0, Plan.sync(world_size), applier, listener, threading.Condition())


def header_of(made: Agreement, parts: list[Contribution]) -> Header:
    sums = np.zeros(made.codec.size, np.float32)
    for rank, part in enumerate(parts):
        one = np.zeros_like(sums)
        made.codec.write(rank, part, one)
        sums += one
    return made.codec.read(sums)


@pytest.mark.parametrize(
    ("plan", "mixed"),
    [
        (Plan.local(2, steps=4, plan_id=1), True),
        (Plan.local(2, seconds=2.0, plan_id=1), True),
        (Plan.ps(2, 1, servers=(0,)).replace(plan_id=1), True),
        (Plan.partial(2, 1).replace(plan_id=1), False),
    ],
    ids=lambda given: given.label if isinstance(given, Plan) else str(given),
)
def test_after_the_switch_to_steps_of_their_own_ranks_meet_before_any_collective(plan: Plan, mixed: bool) -> None:
    """The next header is that of the first averaging, which waits for a rank that is in a collective by then."""
    made = agreement(2)
    assert made.prepare(plan) is None
    step = OpenStep(3, [None], [None], [None])
    own = made.contribution(step, own_steps=5, fresh=True)
    other = Contribution(fresh=True, own_steps=5, flag_plan_id_delta=1)
    made.read(step, header_of(made, [own, other]), 0.0)
    assert made.plan == plan and made.mixed is mixed
