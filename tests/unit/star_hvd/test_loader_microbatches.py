"""Loops over micro-batches inside of each other, abandoned ones, and ones that evaluate: what they leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.rules.step_layout import StepLayout
from star_hvd.channel.messages.microbatches import MicrobatchesClosed, MicrobatchOpen, MicrobatchShares
from star_hvd.epochs.microbatches import LeasedMicrobatches
from star_hvd.errors import DeadlineError, StarError
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.telemetry.wait_time import WaitTime
from tests.support.loaders import ReadyBatches

PARTS = 4


class Run:
    """What a loop needs of a runtime."""

    def __init__(self) -> None:
        self.in_hand: Any = None
        self.reference_samples = 8.0
        self.forgotten = self.steps_of_parts = 0
        timer = SimpleNamespace(add_outside=lambda seconds: None)
        self.has_parts = False
        self.drivers = {0: SimpleNamespace(timer=timer, forget_parts=self._forget, has_parts=lambda: self.has_parts)}
        self.client = SimpleNamespace(await_microbatch=self._await_microbatch, check_wait=self._check_wait)

    def _await_microbatch(self, stock: MicrobatchStock, steps_made: int) -> bool:
        stock.decided(0.0)
        return bool(stock.reserve(steps_made))

    def _check_wait(self, wait: WaitTime, what: str) -> None:
        raise DeadlineError(what)

    def _forget(self) -> None:
        self.forgotten += 1

    def end_step_of_parts(self) -> None:
        self.steps_of_parts += 1

    def await_devices(self) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def steps_begun(self) -> list[int]:
        return [3]

    def steps_made(self) -> int:
        return 0

    @contextlib.contextmanager
    def inactive(self, reason: str) -> Iterator[None]:
        yield


def stock_of(loader: int) -> MicrobatchStock:
    """This rank's micro-batches of an epoch of one step."""
    opening = MicrobatchOpen(loader, 0, 8, 8, PARTS, False, 0, 7, [])
    stock = MicrobatchStock(0, StepLayout(8, 8, PARTS, 1), opening, send=lambda message: None)
    stock.on_message(MicrobatchShares(loader, 0, 0, [PARTS], [1] * PARTS))
    return stock


def loop(run: Any, loader: int) -> Any:
    order, feeder = cast(Any, SimpleNamespace(indices=None)), cast(Any, ReadyBatches())
    return iter(LeasedMicrobatches(run, stock_of(loader), order, feeder, 1, lambda *_: None))


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.mark.parametrize("whole", [True, False])
def test_the_step_around_an_evaluation_goes_on(run: Run, whole: bool) -> None:
    training = loop(run, 0)
    for taken in range(1, PARTS):
        next(training)
        run.has_parts = True
        outer, evaluation = run.in_hand, loop(run, 1)
        next(evaluation)
        assert run.in_hand is not outer
        assert not whole or len(list(evaluation)) == PARTS - 1
        evaluation.close()
        assert run.in_hand is outer and not run.forgotten and not run.steps_of_parts, f"behind {taken} micro-batches"
    training.close()
    assert run.in_hand is None and run.forgotten == 1


def test_a_loop_that_was_abandoned_and_is_closed_late_changes_nothing(run: Run) -> None:
    abandoned = loop(run, 0)
    next(abandoned)
    training = loop(run, 0)
    next(training)
    assert run.forgotten == 1, "what the abandoned one gave, before the first gradient of the other"
    present = run.in_hand
    abandoned.close()
    assert run.in_hand is present and run.forgotten == 1
    assert len(list(training)) == PARTS - 1
    assert run.in_hand is None and run.forgotten == 1


def test_an_evaluation_that_is_not_closed_before_the_next_one_or_before_the_training(run: Run) -> None:
    training = loop(run, 0)
    next(training)
    outer, kept = run.in_hand, loop(run, 1)
    next(kept)
    again = loop(run, 1)
    next(again)
    again.close()
    assert run.in_hand is outer and not run.forgotten
    next(training)
    outer = run.in_hand
    kept.close()
    assert run.in_hand is outer and not run.forgotten
    last = loop(run, 1)
    next(last)
    training.close()
    last.close()
    assert run.in_hand is None and run.forgotten == 1, "of the training's step, that nobody goes on with"


def test_an_evaluation_left_open_gives_back_what_the_training_has_in_hand_by_then(run: Run) -> None:
    training, evaluation = loop(run, 0), loop(run, 1)
    for _ in range(2):
        next(training)
        outer = run.in_hand
        next(evaluation)
    evaluation.close()
    assert run.in_hand is outer and not run.forgotten


def test_a_step_whose_last_micro_batch_was_skipped_is_an_error_at_once(run: Run) -> None:
    """The other ranks wait for its gradient in the reduction, and this one would wait for them in the next step."""
    training = loop(run, 0)
    for taken in range(1, PARTS + 1):
        next(training)
        if taken < PARTS:
            run.has_parts = True
            assert not run.in_hand.is_last  # As `step()` asks.
    with pytest.raises(StarError, match="the last micro-batch of a step gave no gradient.*`continue`"):
        next(training)


@pytest.mark.parametrize("trained", [False, True])
def test_a_loop_that_gives_no_gradient_or_calls_step_each_time_ends_as_ever(run: Run, trained: bool) -> None:
    """A gradient may be accumulated behind the step: of a second loss, for an optimizer whose step comes first."""
    run.has_parts = trained
    taken = 0
    for _ in loop(run, 0):
        taken += 1
        assert not trained or run.in_hand.is_last == (taken == PARTS)
    assert taken == PARTS and run.steps_of_parts == 1


def test_numbers_of_passes_that_differ_are_refused_before_a_rank_would_wait_in_one(run: Run) -> None:
    """In an epoch of one step before the first pass, else before the second; not where nothing is trained."""
    any_run, order = cast(Any, run), cast(Any, SimpleNamespace(indices=None))

    def uneven() -> None:
        raise StarError("different numbers")

    def begun(steps: int, *, trains: bool = True) -> Any:
        feeder = cast(Any, ReadyBatches())
        return iter(
            LeasedMicrobatches(
                any_run, stock_of(0), order, feeder, steps, lambda *_: None, trains=trains, uneven=uneven
            )
        )

    with pytest.raises(StarError, match="different numbers"):
        next(begun(1))
    training = begun(2)
    next(training)
    assert run.in_hand.weight, "of a gradient"
    with pytest.raises(StarError, match="different numbers"):
        next(training)
    assert len(list(begun(1, trains=False))) == PARTS


def without_part(loader: int) -> MicrobatchStock:
    """An epoch of one step that the other rank makes alone."""
    opening = MicrobatchOpen(loader, 0, 1, 8, PARTS, False, 0, 7, [])
    stock = MicrobatchStock(0, StepLayout(1, 8, PARTS, 2), opening, send=lambda message: None)
    stock.on_message(MicrobatchShares(loader, 0, 0, [0, 1], []))
    stock.on_message(MicrobatchesClosed(loader, 0, 0))
    return stock


def test_a_rank_without_a_part_waits_for_a_step_only_if_one_follows(run: Run) -> None:
    """That is of a training, and not inside of a step."""
    any_run, nothing = cast(Any, run), cast(Any, SimpleNamespace(indices=None))

    def whole(*, trains: bool) -> list[Any]:
        feeder = cast(Any, ReadyBatches())
        return list(LeasedMicrobatches(any_run, without_part(1), nothing, feeder, 1, lambda *_: None, trains=trains))

    assert whole(trains=False) == []
    with pytest.raises(DeadlineError, match="the other ranks' gradients"):
        whole(trains=True)
    training = loop(run, 0)
    next(training)
    assert whole(trains=True) == []


def test_an_evaluation_before_the_first_training_leaves_the_weights_to_it(run: Run) -> None:
    run.reference_samples = 0.0
    assert len(list(loop(run, 0))) == PARTS
    assert run.reference_samples == 0.0, "the training sets it"
