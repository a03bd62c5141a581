"""How a rank's runtime ends, and what it notes of the program's loops."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from horovod.common.exceptions import HorovodInternalError

from star_hvd import threads
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages.shares import Feeds
from star_hvd.channel.messages.waits import Deadlock
from star_hvd.config import Config
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.input.program_waits import ProgramWaits
from star_hvd.runtime import runtime
from star_hvd.runtime.runtime import Runtime


class Parts(dict[str, list[str]]):
    """The parts of a runtime, and what was called of them."""

    def part(self, name: str, *calls: str) -> Any:
        called = self[name] = list[str]()
        return SimpleNamespace(**{call: lambda *given, each=call, **named: called.append(each) for call in calls})


class Leaving(Runtime):
    """The runtime of a rank whose servers do not confirm that it has finished."""

    trains = True

    def __init__(self, parts: Parts) -> None:
        def unconfirmed() -> None:
            raise RankLostError("rank 1 has left the job")

        self.config, self.rank, self.drivers = Config(), 0, {}
        self._pid, self._stopped, self._folder, self._next_optimizer_id = os.getpid(), False, None, 0
        self._meetings = cast(Any, SimpleNamespace(finished=unconfirmed))
        self._unwatch_threads = lambda: None
        self._machine = parts.part("machine", "stop")
        self.services = parts.part("services", "stop")
        self.agent, self.tensors = parts.part("agent", "stop", "send"), parts.part("tensors", "stop")
        self.coordinator, self.keyring = parts.part("coordinator", "stop"), parts.part("keyring", "close")

    def start(self) -> None:
        pass

    def finish_steps(self) -> None:
        pass

    def found(self, loader: int) -> None:
        """Do what follows when `Feeding` has found the loader that feeds the training."""
        self._feeds(loader)


def test_a_rank_whose_servers_are_gone_at_its_end_closes_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    Leaving(parts).stop(drain=True)
    for name in ("services", "agent", "tensors", "coordinator"):
        assert parts[name] == ["stop"], name
    assert parts["keyring"] == ["close"] and "rank 1 has left" in caplog.text


class Draining(Leaving):
    """The runtime of a rank that has finished while another one trains, and whose coordinator is silent."""

    left: RankLostError | None = None  # What is found when silent ranks are looked for.

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.rank, self._bye, self.thread_failure = 1, threading.Event(), None
        self.program_waits, self._deadlock = ProgramWaits(lambda message, *, urgent=True: None), ""
        self._meetings = cast(Any, parts.part("meetings", "finished", "meet"))
        self.agent.last_heard_s = time.monotonic() - 60.0
        self.agent.coordinator_ended = False
        self._departures = cast(Any, SimpleNamespace(check=self.look))
        self.looks = list[tuple[int, ...]]()

    def look(self, silent: tuple[int, ...]) -> None:
        if self.left is not None:
            raise self.left
        self.looks.append(silent)
        if len(self.looks) == 2:  # All thaw and finish.
            self._on_message(messages.Bye())

    def hear_of_deadlock(self) -> None:
        self._on_message(Deadlock("ranks [0] wait"))
        self.looks.clear()

    def wait_in_loop(self) -> None:
        self._raise_what_ends_loops()

    def meet(self, meet: Callable[..., None]) -> None:
        """Have meetings do this."""
        self._meetings = cast(Any, SimpleNamespace(finished=lambda: None, meet=meet))

    def drain(self) -> bool:
        self._bye.clear()
        return self._drain(60.0)


def test_a_rank_that_has_finished_waits_for_silent_ranks_that_have_not_left() -> None:
    """They may be frozen, as it may have been itself; leaving, it would shut Horovod down under them."""
    parts = Parts()
    draining = Draining(parts)
    assert draining.drain() and draining.looks == [(0,), (0,)]
    assert parts["meetings"] == ["finished", "meet", "meet"]


def test_before_the_first_rank_shuts_horovod_down_what_that_ends_is_no_failure_any_more() -> None:
    """As the step of a group's members that make none, which would be logged with a traceback at the end of the job."""
    draining, ended = Draining(Parts()), list[bool]()
    engine = SimpleNamespace(ended=False, failure=None)
    draining.drivers[0] = cast(Any, SimpleNamespace(engine=engine, failure=None, state_is_remote=False))
    draining.meet(lambda *unused, **named: ended.append(engine.ended))
    assert draining.drain() and ended == [False, True]


def test_at_the_end_a_rank_on_a_slow_link_has_as_long_as_for_a_step() -> None:
    """The others would leave, and stop their servers, while it gets the last parameters or the optimizer's state."""
    draining, deadlines_s = Draining(Parts()), list[float]()
    draining.meet(lambda reason, deadline_s, **named: deadlines_s.append(deadline_s))
    assert draining.drain() and deadlines_s == 2 * [draining.config.step_deadline_s]


def test_that_a_loop_cannot_go_on_is_raised_once_in_the_thread_that_waits_in_it() -> None:
    """A program that catches it has other waits later, and its end is none of a loop."""
    draining = Draining(Parts())
    draining.hear_of_deadlock()
    thread = threading.Thread(target=draining.wait_in_loop)
    thread.start()
    thread.join()
    with pytest.raises(StarError, match="wait"):
        draining.wait_in_loop()
    draining.wait_in_loop()
    draining.hear_of_deadlock()
    assert draining.drain() and draining.looks


def test_a_rank_that_has_finished_leaves_once_a_rank_that_still_trains_has_left() -> None:
    draining = Draining(Parts())
    draining.left = RankLostError("rank 2 has left the job")
    with pytest.raises(RankLostError, match="rank 2"):
        draining.drain()


def test_a_rank_that_has_finished_leaves_once_the_coordinator_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    draining = Draining(Parts())
    draining.agent.coordinator_ended = True
    assert not draining.drain() and "the coordinator has ended" in caplog.text


@pytest.mark.parametrize(("drain", "failure", "status"), [
    (True, None, "FINISHED"), (False, None, "KILLED"), (False, RankLostError("gone"), "FAILED"),
])  # fmt: skip
def test_a_run_that_a_reset_ends_has_not_finished(drain: bool, failure: Exception | None, status: str) -> None:
    """Its training goes on in another run: as FINISHED it would count as one that missed its target."""
    closed: list[str] = []
    leaving = Leaving(Parts())
    engine = SimpleNamespace(failure=failure)
    reporter = SimpleNamespace(log=SimpleNamespace(close=closed.append))
    driver = SimpleNamespace(engine=engine, failure=failure, reporter=reporter, stop=lambda: None)
    leaving.drivers[0] = cast(Any, driver)
    leaving.stop(drain=drain)
    assert closed == [status]


def test_a_rank_that_leaves_because_its_engine_failed_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The failure may have been found behind the program's last call, which would have raised it."""
    leaving = Leaving(Parts())
    failure = StarError("the reduction of step 7 failed")
    driver = SimpleNamespace(
        engine=SimpleNamespace(failure=failure), failure=failure, reporter=SimpleNamespace(log=None), stop=lambda: None
    )
    leaving.drivers[0] = cast(Any, driver)
    leaving.stop(drain=True)
    assert caplog.messages == ["rank 0 leaves without waiting for the others: the reduction of step 7 failed"]


@pytest.mark.parametrize("all_end", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("diverged"), SystemExit(0)])
def test_a_shutdown_within_the_handling_of_an_error_waits_for_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, all_end: bool
) -> None:
    """The others would train on for long without a rank that crashed, and its log would say that it had finished.

    If they end too, the error was only the program's way to end its training early.
    """
    closed, waited_s = list[str](), list[float]()

    class Waiting(Leaving):
        def _drain(self, longest_s: float) -> bool:
            waited_s.append(longest_s)
            return all_end

    leaving = Waiting(Parts())
    reporter = SimpleNamespace(log=SimpleNamespace(close=closed.append))
    engine = SimpleNamespace(failure=None)
    leaving.drivers[0] = cast(Any, SimpleNamespace(engine=engine, failure=None, reporter=reporter, stop=lambda: None))
    monkeypatch.setattr(runtime, "Runtime", lambda config: leaving)
    monkeypatch.setattr(runtime.mpi_ops, "is_initialized", lambda: True)
    runtime.ensure(leaving.config)
    with contextlib.suppress(ValueError, SystemExit):
        try:
            if error is not None:
                raise error
        finally:
            runtime.shutdown()
    within = isinstance(error, ValueError)
    assert closed == ["FAILED" if within and not all_end else "FINISHED"]
    assert waited_s == [60.0 if within else leaving.config.shutdown_deadline_s]


# ---- settings that come late ----------------------------------------------------------------------------------------


class Begun(Runtime):
    """A runtime that meets no other ranks."""

    def start(self) -> None:
        pass

    def stop(self, drain: bool = True, longest_s: float | None = None) -> None:
        self._unwatch_threads()
        self.keyring.close()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the rank of this process, one of two."""
    monkeypatch.setattr(runtime, "Runtime", Begun)
    for name, value in (("is_initialized", True), ("size", 2), ("rank", 0)):
        monkeypatch.setattr(runtime.mpi_ops, name, lambda value=value: value)
    yield lambda number: monkeypatch.setattr(runtime.mpi_ops, "rank", lambda: number)
    runtime.shutdown()


@pytest.mark.parametrize("first", [None, Config(bucket_bytes=4096)])
def test_settings_of_the_job_that_come_too_late_are_named_once(
    first: Config | None, rank: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A loader comes first, without them; the optimizer's `Config` would be ignored without a word."""
    runtime.ensure(first)
    late = Config(max_batch=64, policy="cost", bucket_bytes=2048, replica_mismatch="raise")
    run = runtime.ensure(late)
    runtime.ensure(late)
    assert run.config.max_batch == 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Config(policy='cost', max_batch=64) has no effect") and "the same config=" in said


@pytest.mark.parametrize("late", [
    None, Config(max_batch=64), Config(max_batch=64, bucket_bytes=2048, damping="none", replica_mismatch="raise"),
    Config(max_batch=64, policy="rule"),
])  # fmt: skip
def test_settings_that_are_the_jobs_or_an_optimizers_own_are_no_reason_to_warn(
    late: Config | None, rank: Callable[[int], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAR_POLICY", "rule")
    runtime.ensure(Config(max_batch=64))
    runtime.ensure(late)
    assert caplog.records == []


def test_one_rank_speaks_for_all(rank: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    rank(1)
    runtime.ensure()
    runtime.ensure(Config(max_batch=64))
    assert caplog.records == []


# ---- the program's loops ---------------------------------------------------------------------------------------------


class Optimizer:
    """An optimizer under `auto`, as far as the program's loops concern it."""

    auto, dropped, equal_batches = True, False, ""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pinned: list[bool] = []

    def pin(self, reason: str, *, equal_batches: bool = False) -> None:
        self.pinned.append(equal_batches)


@pytest.mark.parametrize("first", [0, 1])
def test_the_programs_loops_know_of_its_steps_and_of_the_optimizer_whose_steps_count(
    first: int, rank: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    run, made = runtime.ensure(), [Optimizer(number) for number in range(2)]
    made[0].dropped = first == 1
    run.drivers.update(enumerate(cast(Any, made)))
    with run.loops.inside(parts=True, trains=True):
        for _ in range(64):
            run.note_step(1)
        run.loops.note_collective("allreduce")
    assert [optimizer.pinned for optimizer in made] == [[True], [True]]
    told = [record.getMessage() for record in caplog.records]
    assert ["counted by the steps of optimizer 0, which made none" in each for each in told] == [True] * (first == 0)


# ---- the end of an optimizer -----------------------------------------------------------------------------------------


class Closing(Leaving):
    """The runtime of a rank whose optimizer ends, and what it does then."""

    def __init__(self) -> None:
        super().__init__(Parts())
        self.did = list[str]()
        self._meetings = cast(Any, SimpleNamespace(meeting=lambda *given, **named: contextlib.nullcontext()))
        self.client = cast(Any, SimpleNamespace(await_all=lambda what, deadline_s: self.did.append("await all")))
        self.asked = cast(Any, SimpleNamespace(forget=lambda number: None))
        self.services = cast(Any, SimpleNamespace(forget=lambda number: None))
        self._had_dropped = self._had_mixed = False


def test_a_rank_that_cannot_get_the_state_at_a_close_goes_to_where_the_others_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They would wait there for `step_deadline_s`, and fail though they have the state."""
    run = Closing()

    def refresh_state() -> None:
        raise DeadlineError("no answer of server 1")

    driver: Any = SimpleNamespace(
        number=0, dropped=False, state_is_remote=True, refresh_state=refresh_state, reporter=SimpleNamespace(log=None),
        engine=SimpleNamespace(agreement=SimpleNamespace(mixed=True)),
        shutdown=lambda: run.did.append("shutdown"), stop=lambda: run.did.append("stop"),
    )  # fmt: skip
    run.drivers[0] = driver
    run.detach(driver)
    assert run.did == ["shutdown", "await all", "stop"] and run.drivers == {}
    assert "rank 0 closes with the optimizer state it has: no answer of server 1" in caplog.text


# ---- the end of a thread ---------------------------------------------------------------------------------------------


class Driven:
    """An optimizer's driver, and its engine, which keeps its first failure."""

    active_mode = None

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.engine = self

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error


class Watching(Leaving):
    """A runtime with two optimizers that notes how threads end."""

    def __init__(self) -> None:
        super().__init__(Parts())
        self.thread_failure = None
        self.optimizers = [Driven(), Driven()]
        self.drivers.update(enumerate(cast(Any, self.optimizers)))

    def end_thread(self, error: Exception) -> None:
        """Have a thread end by an error."""

        def broken() -> None:
            raise error

        undo = threads.on_death(self._thread_died)
        thread = threads.supervised(broken, "star-late-0")
        thread.start()
        thread.join()
        undo()


@pytest.mark.parametrize(("error", "kind"), [
    (RankLostError("rank 1 has left"), RankLostError), (HorovodInternalError("gone"), RankLostError),
    (DeadlineError("slow"), DeadlineError), (OSError("reset"), ChannelError), (KeyError("x"), StarError),
])  # fmt: skip
def test_what_ended_a_thread_is_raised_as_what_an_elastic_job_recovers_from(
    error: Exception, kind: type[Exception]
) -> None:
    """As a `StarError` the loss of a rank would end the others, too."""
    rank = Watching()
    rank.end_thread(error)
    with pytest.raises(kind, match=f"star-late-0 ended by {type(error).__name__}") as raised:
        rank.raise_failure()
    assert type(raised.value) is kind
    assert all(optimizer.failure is raised.value for optimizer in rank.optimizers)


def test_a_lost_rank_is_raised_before_the_end_of_a_thread_that_it_led_to() -> None:
    rank = Watching()
    lost = RankLostError("rank 1 has left")
    rank.optimizers[1].fail(lost)
    rank.end_thread(StarError("no answer"))
    with pytest.raises(RankLostError) as raised:
        rank.raise_failure()
    assert raised.value is lost


def test_a_loader_feeds_the_training_from_the_same_step_for_the_coordinator_and_the_run_log() -> None:
    """It is known at its second gradient, when the first one's step is over."""
    told: list[Any] = []
    reporter = SimpleNamespace(feeds=lambda loader, step: told.append((loader, step)))
    run = Leaving(Parts())
    drivers = (SimpleNamespace(reporter=reporter, steps=steps, dropped=False) for steps in (21, 5))
    run.drivers = cast(Any, dict(enumerate(drivers)))
    run.agent = cast(Any, SimpleNamespace(send=told.append))
    run.found(3)
    assert told == [(3, 20), (3, 4), Feeds(3, 20)]
