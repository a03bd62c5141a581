"""Nested absences of several threads: told in order, and confirmed without holding any other thread up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from star_hvd.errors import DeadlineError
from star_hvd.modes.mode_switcher import ModeSwitcher
from star_hvd.runtime.meetings import Inactivity
from tests.support.world import World

DEADLINE_S = 60.0


class Driver:
    def __init__(self, confirm: Callable[[], None] = lambda: None) -> None:
        self.told: list[bool] = []
        self._confirm = confirm

    def set_inactive(self, inactive: bool) -> None:
        self.told.append(inactive)

    def confirm_inactive(self) -> None:
        assert self.told[-1] is True
        self._confirm()


def test_only_the_outermost_absence_is_told() -> None:
    driver, sent = Driver(), list[Any]()
    made = Inactivity({0: driver}, sent.append)
    made.enter("end of epoch", out_of_data=True)
    made.enter("barrier", out_of_data=False)
    assert made.nested
    made.leave("barrier")
    assert not made.nested and driver.told == [True]
    made.leave("end of epoch")
    assert driver.told == [True, False]
    assert [(message.away, message.out_of_data) for message in sent] == [(True, True), (False, False)]


def test_whether_a_thread_meets_does_not_depend_on_another_one() -> None:
    """One rank's other thread may be in a collective at a moment at which the other ranks' are not."""
    driver, sent = Driver(), list[Any]()
    made = Inactivity({0: driver}, sent.append)
    entered, leaves = threading.Event(), threading.Event()

    def background() -> None:
        with made.during("allreduce", out_of_data=False):
            entered.set()
            assert leaves.wait(DEADLINE_S)

    other = threading.Thread(target=background)
    other.start()
    assert entered.wait(DEADLINE_S) and not made.inside
    with made.during("barrier", out_of_data=False):
        assert made.inside and not made.nested
    assert driver.told == [True], "the rank is still inside"
    leaves.set()
    other.join(DEADLINE_S)
    assert driver.told == [True, False] and [message.away for message in sent] == [True, False]


def test_nothing_is_sent_before_there_is_an_optimizer() -> None:
    sent = list[Any]()
    made = Inactivity({}, sent.append)
    made.enter("barrier", out_of_data=False)
    made.leave("barrier")
    assert sent == []


def test_a_thread_does_not_wait_for_the_servers_that_another_one_asks() -> None:
    asked, answered = threading.Event(), threading.Event()

    def confirm() -> None:
        asked.set()
        assert answered.wait(DEADLINE_S), "a server that does not answer for long"

    driver = Driver(confirm)
    made = Inactivity({0: driver}, lambda message: None)
    slow = threading.Thread(target=lambda: made.enter("barrier", out_of_data=False), daemon=True)
    slow.start()
    assert asked.wait(DEADLINE_S)

    def nested() -> None:
        made.enter("allreduce", out_of_data=False)
        made.leave("allreduce")

    other = threading.Thread(target=nested, daemon=True)
    other.start()
    other.join(DEADLINE_S / 2.0)
    assert not other.is_alive(), "it waits with the first thread"
    answered.set()
    slow.join(DEADLINE_S)
    assert driver.told == [True]


def test_an_absence_that_is_not_confirmed_ends_with_its_block() -> None:
    def confirm() -> None:
        raise DeadlineError("no answer")

    driver = Driver(confirm)
    made = Inactivity({0: driver}, lambda message: None)
    with pytest.raises(DeadlineError), made.during("barrier", out_of_data=False):
        pytest.fail("it has not begun")
    assert driver.told == [True, False]


def test_a_step_hook_may_call_a_collective() -> None:
    """It runs under the lock of the parameters, as in all modes with a common step."""
    engine = World(1, world_size=2).engines[0]
    services: Any = None
    switcher: Any = ModeSwitcher(
        0, engine, services, report=lambda *unused: None, unsupported=lambda *unused: None, ranks=services,
        local=services, later=lambda task: None, deadline_s=1.0, push_deadline_s=1.0,
    )  # fmt: skip
    sent: list[Any] = []
    with engine.replica.apply_lock, Inactivity({0: switcher}, sent.append).during("allreduce", out_of_data=False):
        assert len(sent) == 1
    assert len(sent) == 2
