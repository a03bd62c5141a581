"""Servers that the user asks for wait a moment for the rates of the links between hosts: no server on a slow one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.plan.plan import Plan
from scheduler.records import StepTimes
from star_hvd.channel.messages.base import Message, PlanMessage
from star_hvd.channel.messages.switch import LinkRate, Probe, StepNote, WarmServers
from star_hvd.coordinator.job_state import JobState
from tests.support.job_states import CONFIG, Job, only

RATE = 25e6


def run(job: Job, seconds: float, rate_of: Callable[[int, int], float | None]) -> list[Message]:
    """Let the coordinator work and ranks answer probes of the links between two of them."""
    heard: list[Message] = []
    for _ in range(round(seconds / 0.05)):
        job.now_s += 0.05
        job.state.tick(job.now_s)
        outbox, job.state.outbox = job.state.outbox, []
        heard += [message for _, message in outbox]
        for rank, message in outbox:
            rate = rate_of(rank, message.target) if isinstance(message, Probe) else None
            if rate is not None:
                job.state.handle(rank, LinkRate(rate), job.now_s)
    return heard


def asked(hosts: tuple[str, ...]) -> tuple[Job, list[Message]]:
    job = Job(4)
    job.state = JobState(4, CONFIG, job.now_s, hosts)
    return job, job.register(Plan.ps(4, 3))


@pytest.mark.parametrize("slow", range(4))
def test_no_server_is_on_a_slow_link(slow: int) -> None:
    job, at_once = asked(("a", "b", "c", "d"))
    assert not only(at_once, PlanMessage)
    assert only(at_once, WarmServers), "they start meanwhile"
    heard = run(job, 2.5, lambda rank, target: RATE / 10.0 if slow in (rank, target) else RATE)
    (message,) = only(heard, PlanMessage)
    servers = Plan.from_dict(message.plan).servers
    assert servers and slow not in servers


def test_rates_that_do_not_come_are_not_waited_for() -> None:
    job, at_once = asked(("a", "b", "c", "d"))
    assert not only(at_once, PlanMessage)
    assert len(only(run(job, 5.0, lambda rank, target: None), PlanMessage)) == 1


def test_on_one_host_there_is_nothing_to_measure() -> None:
    job, at_once = asked(("a",) * 4)
    assert len(only(at_once, PlanMessage)) == 1
    assert not only(run(job, 5.0, lambda rank, target: RATE), Probe)


def test_as_many_pushes_as_ranks_are_one_loss() -> None:
    job = Job(3)
    job.register(Plan.ps(3, 1))

    def push(rank: int, version: int, plan_id: int, loss: float) -> None:
        job.say(rank, StepNote(0, version, plan_id, StepTimes(0.03, 0.0, 0.03), 0.001, loss, 1))

    for version in range(8):
        push(version % 3, version, 1, float(version))
    assert job.engine.window().losses == (1.0, 4.0) and job.engine.window().loss_steps == (2, 5)
    job.engine.publish(Plan.ps(3, 2), job.now_s)
    for version in range(8, 12):
        push(version % 3, version, 2, 100.0)
        push(0, 7, 1, 7.0)  # One of a slower rank, which comes late.
    assert job.engine.window().losses == (1.0, 4.0, 100.0), "no mean of losses of two plans"
