"""Modes whose preparation failed: for how long they are not tried."""

from __future__ import annotations

from scheduler.records import Plan
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.switch import PrepareFailed
from star_hvd.coordinator.plans.mode_backoff import PreparationBackoff
from tests.support.job_states import Job, only


def test_a_mode_that_was_not_possible_is_tried_again_later_and_later() -> None:
    blocked = PreparationBackoff()
    assert blocked.block("subgroup", 0.0) and list(blocked) == ["subgroup"] and len(blocked) == 1
    blocked.expire(59.9)
    assert "subgroup" in blocked
    blocked.expire(60.1)
    assert "subgroup" not in blocked and not blocked.block("subgroup", 100.0)
    blocked.expire(219.0)
    assert "subgroup" in blocked
    blocked.expire(221.0)
    assert list(blocked) == []
    for _ in range(20):
        blocked.block("ps", 0.0)
    blocked.expire(3601.0)
    assert "ps" not in blocked, "at least once an hour"


def test_a_mode_that_came_into_force_after_all_is_barred_for_a_minute_the_next_time() -> None:
    blocked = PreparationBackoff()
    for _ in range(5):
        blocked.block("ps", 0.0)
    blocked.succeeded("ps")
    assert "ps" not in blocked
    blocked.block("ps", 0.0)
    blocked.expire(61.0)
    assert "ps" not in blocked


def test_a_mode_is_offered_again_whose_preparation_failed_once() -> None:
    job = Job(3)
    job.register(None)
    job.engine.publish(Plan.subgroup(3, (0, 1)), job.now_s)
    assert only(job.say(2, PrepareFailed(0, 1, "process set [0, 1] was not made within 15 s")), m.Abandon)
    assert "subgroup" not in job.engine.window().allowed and "partial" in job.engine.window().allowed
    job.pass_time(61.0)
    assert "subgroup" in job.engine.window().allowed
