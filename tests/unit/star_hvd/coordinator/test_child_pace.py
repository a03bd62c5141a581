"""A rank outside the subgroup waits for its parent between two batches: what it gets of an epoch takes that in."""

from __future__ import annotations

import math

import pytest

from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk
from star_hvd.channel.messages.switch import StepNote
from tests.support.job_states import Job, only

BATCH, SAMPLES, PUSH_S = 16, 640, 0.8


def job_of_a_child(comm_s: float) -> Job:
    """All ranks compute alike; rank 3 is a child whose exchange with its parent takes `comm_s`,."""
    job = Job(4)
    job.register(Plan.subgroup(4, [0, 1, 2]))
    for rank in range(4):
        assert only(ask(job, rank, 0), Lease)
    for step in range(6):
        job.now_s += 0.03
        for rank in range(3):
            job.arrive(rank, step, plan_id=1, compute_s=0.03)
    for version in range(4):
        job.say(3, StepNote(0, version, 1, StepTimes(0.03, 0.0, 0.03), comm_s, math.nan, 1))
    return job


def ask(job: Job, rank: int, epoch: int) -> list[Message]:
    return job.say(rank, LeaseAsk(0, epoch, SAMPLES, BATCH, False, 0))


@pytest.mark.parametrize(("comm_s", "of_child", "of_member"), [(PUSH_S, 1, 6), (0.001, 4, 4)])
def test_a_child_gets_of_an_epoch_what_it_ends_in_time(comm_s: float, of_child: int, of_member: int) -> None:
    job = job_of_a_child(comm_s)
    (lease,) = only(ask(job, 0, 1), Lease)
    assert lease.stop - lease.start >= of_member * BATCH, "by what is known of the child before it asks"
    (lease,) = only(ask(job, 3, 1), Lease)
    assert 1 <= (lease.stop - lease.start) / BATCH <= of_child
