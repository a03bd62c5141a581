"""Waits do not count the time in which their own process was stopped: a suspended job goes on when it is resumed."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.records import Plan
from star_hvd.channel.messages.base import EpochEnd
from star_hvd.channel.messages.joins import JoinedRanks
from star_hvd.channel.messages.leases import Consumed
from star_hvd.config import Config
from star_hvd.engine import meeting
from star_hvd.engine.collective import wait_all
from star_hvd.engine.meeting import Position, gather_positions
from star_hvd.errors import DeadlineError
from star_hvd.input.joined import Joined
from star_hvd.input.lease_stock import LeaseStock
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.helper import Helper
from star_hvd.runtime import coordinator_client, meetings
from star_hvd.runtime.coordinator_client import CoordinatorClient
from star_hvd.runtime.meetings import Meetings
from star_hvd.telemetry import wait_time
from star_hvd.telemetry.wait_time import WaitTime, warn_after
from tests.support.leases import lease
from tests.support.sending import sending_to

DEADLINE_S = 60.0
SUSPENDED_S = 3600.0
REAL_S = time.monotonic


class Clock:
    """A clock that goes on while this process is stopped, which it is at the first look of a wait."""

    def __init__(self) -> None:
        self.passed_s, self.looks = 0.0, 0

    def now_s(self) -> float:
        return REAL_S() + self.passed_s

    def look(self) -> None:
        self.looks += 1
        if self.looks == 1:
            self.passed_s += SUSPENDED_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found.now_s)
    return found


def test_pauses_are_not_counted_and_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait, long = WaitTime(), WaitTime(5.0)
    for now_s in (0.5, 1.0, 1.9):
        assert wait.count() == now_s
    now_s = 100.0
    assert wait.count() == 2.9, "a second of the pause"
    assert long.count() == 10.0, "two slices of it"
    now_s = 130.0
    assert wait.count_work() == 32.9


def test_silence_does_not_grow_by_a_pause_and_ends_when_the_other_side_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, heard_s = 0.0, -3.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait = WaitTime()
    for now_s, silent_s in ((0.5, 3.5), (1000.5, 4.5), (1001.0, 5.0)):
        wait.count(now_s - heard_s)
        assert wait.silent_s == silent_s
    heard_s = 1001.0
    for now_s in (1001.5, 1002.0):
        wait.count(now_s - heard_s)
        assert wait.silent_s == now_s - heard_s


# ---- what it logs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of rank 3, whose waits warn after 10 s."""
    warn_after(10.0, 3)
    yield caplog
    warn_after()


def test_a_long_wait_says_what_it_is_for_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    now_s, asked_s = 0.0, list[float]()
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))

    def missing() -> str:
        asked_s.append(now_s)
        return f"ranks {[5] * len(asked_s)}"

    wait, unnamed = WaitTime(what=missing), WaitTime()
    for now_s in range(1, 71):  # noqa: B007  The clock.
        wait.count()
        unnamed.count()
    assert warned.messages == [
        "rank 3 has been waiting for ranks [5] for 10 s",
        "rank 3 has been waiting for ranks [5, 5] for 20 s",
        "rank 3 has been waiting for ranks [5, 5, 5] for 40 s",
    ]
    assert asked_s == [10.0, 20.0, 40.0], "nothing is formatted before"


def test_a_stop_is_no_long_wait(monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait = WaitTime(what="a step")
    for now_s in (1.0, 101.0, 102.0):  # noqa: B007  The clock.
        wait.count()
    assert warned.messages == []


def test_a_wait_that_an_evaluation_explains_is_first_logged_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait = WaitTime(what="the end of the epoch on all ranks", lasts=True)
    for now_s in range(1, 300):  # noqa: B007  The clock.
        wait.count()
    assert [text.rpartition(" for ")[2] for text in warned.messages] == ["60 s", "120 s", "240 s"]


def test_nothing_is_logged_before_a_runtime_starts_and_after_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait = WaitTime(what="a step")
    now_s = 1e6
    wait.count_work()
    assert caplog.messages == []


def test_who_has_joined_is_told_which_ranks_have_not(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """The deadline counts from the last step; the warning from the call, or a job would be silent for ever."""
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))

    def check() -> None:
        nonlocal now_s
        now_s += 1.0
        if now_s == 1.0:
            joined.on_message(JoinedRanks([0]))
        if now_s == 100.0:
            joined.on_message(JoinedRanks([0, 2, 1]))

    def steps() -> int:
        return int(now_s // 30.0)

    joined = Joined(lambda message: None, check, lambda name: None, collections.Counter(), steps, look_s=0.0001)
    assert joined.wait(3, 40.0) == 1
    assert warned.messages == ["rank 3 has been waiting for ranks [1, 2] to call hvd.join() for 60 s"]


def test_a_meeting_that_does_not_settle_says_who_is_where(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))

    def gather(own: Any, check: Any, deadline_s: float, what: str) -> list[Position]:
        nonlocal now_s
        now_s += 0.9
        check()
        step = 4 if now_s > 70.0 else 3
        return [Position(2, 0, step, 4, whole=True, out_of_common_steps=False, mid_step=False)]

    monkeypatch.setattr(meetings, "gather_positions", gather)
    Meetings({}, lambda message: None, lambda: None).meet("a barrier", 120.0, out_of_data=False)
    (text,) = warned.messages
    assert text.startswith("rank 3 has been waiting for all ranks to get to one step at a barrier: rank 2: step 3 of 4")


def test_a_reduction_that_does_not_end_though_all_ranks_are_there_is_logged(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """Horovod's check of stalled tensors and rank 0's alerts look for missing ranks only."""
    now_s = 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))

    def wait(handle: int, longest_s: float) -> bool:
        nonlocal now_s
        now_s += longest_s
        return now_s > 15.0

    operations: Any = SimpleNamespace(wait=wait, finish=lambda handle: None)
    wait_all(operations, [7], DEADLINE_S, "the reduction of step 5")
    assert warned.messages == ["rank 3 has been waiting for the reduction of step 5 for 10 s"]


# ---- the loops that use it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_reduction_is_waited_for(clock: Clock, ended: bool) -> None:
    class Operations:
        def wait(self, handle: int, longest_s: float) -> bool:
            clock.look()
            return ended and clock.looks == 4

        def finish(self, handle: int) -> None: ...

    operations: Any = Operations()
    with contextlib.nullcontext() if ended else pytest.raises(DeadlineError):
        wait_all(operations, [7], DEADLINE_S if ended else 1.2, "a step")
    assert ended or clock.looks > 2, "one look after the pause is not the end"


def test_positions_are_waited_for_and_the_meeting_goes_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.torch import mpi_ops

    caught_up: list[int] = []

    class Gathering:
        def hurry(self) -> None: ...

        def wait(self, handle: Any, longest_s: float) -> bool:
            return clock.looks >= 3

    class Driver:
        dropped, active_mode = False, object()

        def position(self) -> Position:
            step = 3 + len(caught_up)
            return Position(0, 0, step, 4, whole=True, out_of_common_steps=False, mid_step=False)

        def catch_up(self) -> None:
            caught_up.append(clock.looks)

        def set_inactive(self, inactive: bool) -> None: ...
        def confirm_inactive(self) -> None: ...

    monkeypatch.setattr(meeting, "HorovodCollective", Gathering)
    monkeypatch.setattr(mpi_ops, "allgather_async", lambda rows, name: rows)
    monkeypatch.setattr(mpi_ops, "synchronize", lambda rows: rows)
    drivers: Any = {0: Driver()}
    assert gather_positions([drivers[0].position()], clock.look, DEADLINE_S, "a barrier")[0].next_step == 4
    assert clock.passed_s == SUSPENDED_S
    clock.looks = 0
    Meetings(drivers, lambda message: None, clock.look).meet("a barrier", DEADLINE_S, out_of_data=False)
    assert caught_up == [3] and clock.passed_s == 2 * SUSPENDED_S


def test_samples_are_waited_for(clock: Clock) -> None:
    stock = LeaseStock(2, 0, 1, samples=100, batch=4, drop_last=False, send=sending_to([]))
    stock.open()

    def check() -> None:
        clock.look()
        if clock.looks == 2:
            stock.on_message(lease(0, 1, 0, 4))

    assert stock.wait(DEADLINE_S, check, lambda: clock.passed_s) and clock.looks == 2


def test_answers_of_the_coordinator_are_waited_for(clock: Clock) -> None:
    answers: list[Any] = [EpochEnd(0, 5), Consumed(0, 1, 1, [], 1)]

    def check() -> None:
        clock.look()
        if clock.looks == 2:
            client.on_message(answers.pop(0))

    agent: Any = SimpleNamespace(send=lambda message: None, last_heard_s=clock.now_s())
    client = CoordinatorClient(Config(step_deadline_s=DEADLINE_S), 0, agent, check)
    client.await_epoch_end(0, 5)
    clock.looks = 0
    assert client.consumed(0, 1, 1) == [] and clock.passed_s == 2 * SUSPENDED_S


def test_ranks_that_have_not_joined_are_waited_for(clock: Clock) -> None:
    def check() -> None:
        clock.look()
        if clock.looks == 3:
            joined.on_message(JoinedRanks([0, 1]))

    joined = Joined(lambda message: None, check, lambda name: None, collections.Counter(), look_s=0.001)
    assert joined.wait(2, DEADLINE_S) == 1 and clock.looks == 3


@pytest.mark.parametrize("plan", [Plan.ps(2, 1), Plan.local(2, steps=4)], ids=lambda plan: str(plan.mode))
def test_the_end_of_a_mode_is_waited_for(clock: Clock, plan: Plan) -> None:
    class Engine:
        rank, replica = 1, SimpleNamespace(state=SimpleNamespace(needs_fetch=False))

        @property
        def plan(self) -> Plan:
            clock.look()
            return plan if clock.looks < 4 else Plan.sync(2)

    idle: Any = SimpleNamespace(
        active_mode=None, needs_state=False, must_drain=False, leave=lambda: None, enter=lambda: None,
        take_over=lambda **how: None, copy=lambda: None, write=lambda values: None,
    )  # fmt: skip
    none: Any = None
    made = StepDriver(0, Config(), lambda message, urgent=True: None, none, str, lambda task: None)
    engine: Any = Engine()
    made.engine, made.switcher, made.local, made.loaded = engine, idle, idle, idle
    made.leave_local() if plan.mode == "local" else made.bring_state_home()
    assert clock.looks >= 4 and clock.passed_s == SUSPENDED_S


def test_a_coordinator_that_was_heard_until_a_pause_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    for module in (wait_time, coordinator_client):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent: Any = SimpleNamespace(send=lambda message: None, last_heard_s=0.0)
    client = CoordinatorClient(Config(), 0, agent, lambda: None)
    wait = WaitTime()

    def go_on(seconds: float, *, heard: bool) -> None:
        nonlocal now_s
        for _ in range(round(2 * seconds)):
            now_s += 0.5
            agent.last_heard_s = now_s if heard else agent.last_heard_s
            client.check_wait(wait, "micro-batches")

    go_on(2 * Config().control_deadline_s, heard=True)  # Another rank is slow.
    now_s += SUSPENDED_S
    go_on(0.4 * Config().control_deadline_s, heard=False)
    with pytest.raises(DeadlineError, match="last heard 3"):
        go_on(0.2 * Config().control_deadline_s, heard=False)


def test_a_step_in_flight_is_waited_for(clock: Clock) -> None:
    ended, failures = threading.Event(), list[BaseException]()

    class Engine:
        failure, next_step = None, 5

        def __init__(self) -> None:
            self.lock = self.helper_wake = threading.Condition()
            self.streams = SimpleNamespace(own=contextlib.nullcontext)

        def must_poll(self) -> bool:
            return not ended.is_set()

        def await_helpers_step(self, longest_s: float) -> None:
            clock.look()
            if clock.looks == 3:
                ended.set()

        def helper_tick(self) -> bool:
            return False

        def helper_owns(self) -> bool:
            return True

        def helper_has_work(self) -> bool:
            return not ended.is_set()

        def fail(self, error: BaseException, *, unseen: bool = False) -> None:
            failures.append(error)
            ended.set()

    engine: Any = Engine()
    helper = Helper(0, lambda message, **options: None, DEADLINE_S, lambda: None)
    helper.start(engine)
    try:
        assert ended.wait(60.0) and not failures
    finally:
        helper.stop(engine, 10.0)
