"""Who steps by itself waits for a parent or servers between two batches: what it gets of an epoch takes that in."""

from __future__ import annotations

import math

import pytest

from scheduler.records import Plan, StepTimes
from scheduler.rules.runs import samples
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk, runs_of
from star_hvd.channel.messages.switch import StepNote
from tests.support.job_states import Job, only

BATCH, SAMPLES, PUSH_S = 16, 640, 0.8


def job_of(plan: Plan, comm_s: float) -> Job:
    """All ranks compute alike; rank 3's exchange with its parent, or with servers, takes `comm_s`."""
    job = Job(4)
    job.register(plan)
    for rank in range(4):
        assert only(ask(job, rank, 0), Lease)
    for step in range(6):
        job.now_s += 0.03
        for rank in range(3):
            if plan.mode == "subgroup":
                job.arrive(rank, step, plan_id=1, compute_s=0.03)
            else:
                note(job, rank, step, 0.001)
    for version in range(4):
        note(job, 3, version, comm_s)
    assert job.engine.active.mode == plan.mode
    return job


def note(job: Job, rank: int, version: int, comm_s: float) -> None:
    job.say(rank, StepNote(0, version, 1, StepTimes(0.03, 0.0, 0.03), comm_s, math.nan, 1))


def ask(job: Job, rank: int, epoch: int) -> list[Message]:
    return job.say(rank, LeaseAsk(0, epoch, SAMPLES, BATCH, False, 0))


@pytest.mark.parametrize(("comm_s", "of_child", "of_member"), [(PUSH_S, 1, 6), (0.001, 5, 4)])
@pytest.mark.parametrize("plan", [Plan.subgroup(4, [0, 1, 2]), Plan.ps(4, 3, servers=(0,))], ids=lambda plan: plan.mode)
def test_a_rank_on_its_own_gets_of_an_epoch_what_it_ends_in_time(
    plan: Plan, comm_s: float, of_child: int, of_member: int
) -> None:
    job = job_of(plan, comm_s)
    (lease,) = only(ask(job, 0, 1), Lease)
    assert samples(runs_of(lease.runs)) >= of_member * BATCH, "by what is known of the slow one before it asks"
    (lease,) = only(ask(job, 3, 1), Lease)
    assert 1 <= samples(runs_of(lease.runs)) / BATCH <= of_child
