"""What a rank notes of the program's loops over `shard` loaders."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from star_hvd.runtime import program_end
from star_hvd.runtime.loops import ProgramLoops


class Optimizer:
    """An optimizer under `auto`, as far as the program's loops concern it."""

    auto, equal_batches = True, ""

    def __init__(self) -> None:
        self.pinned: list[bool] = []

    def pin(self, reason: str, *, equal_batches: bool = False) -> None:
        self.pinned.append(equal_batches)


class Program:
    """A rank's program with one optimizer, of which this thread makes the steps; other optimizers only make steps."""

    def __init__(self, rank: int = 0, world_size: int = 2) -> None:
        self.steps, self.optimizer, self.trains_here = 0, Optimizer(), True
        drivers = {0: cast(Any, self.optimizer)}
        self.loops = ProgramLoops(rank, world_size, drivers, lambda: self.steps, lambda: self.trains_here)

    def step(self, number: int = 0) -> None:
        self.steps += 1
        self.loops.note_step(number, 0)


def warned(caplog: pytest.LogCaptureFixture, of: str) -> int:
    return sum(of in record.message for record in caplog.records)


@pytest.mark.parametrize("trains", [False, True])
def test_the_thread_that_begins_a_training_loop_is_the_one_whose_errors_count(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step already: many programs fail in their first iteration."""
    noted: list[threading.Thread] = []
    monkeypatch.setattr(program_end, "note_step", lambda: noted.append(threading.current_thread()))
    with Program().loops.inside(parts=False, trains=trains):
        assert noted == [threading.current_thread()] * trains


@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives_in_the_iterations_of_an_evaluation_are_warned_of_once(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    program, found = Program(world_size=world_size), []
    for calls in (2, 2, 3, 5):
        with program.loops.inside(parts=False, trains=False):
            for _ in range(calls):
                program.step()  # A loop that was left open, while another one trains.
                program.loops.note_collective("allreduce")
        found.append(warned(caplog, "hvd.allreduce is called within a loop over an hvd.shard loader in which"))
    assert found == ([0, 0, 1, 1] if world_size > 1 else [0] * 4) and program.optimizer.pinned == []


def test_evaluations_with_equally_many_batches_on_all_ranks_may_hold_collectives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program()
    program.optimizer.equal_batches = "SyncBatchNorm"
    with program.loops.inside(parts=False, trains=False):
        for _ in range(5):
            program.loops.note_collective("allreduce")
    assert caplog.records == []


@pytest.mark.parametrize("parts", [False, True])
def test_a_collective_of_an_evaluation_within_the_training_loop_is_one_of_that_loop(parts: bool) -> None:
    program = Program()
    with program.loops.inside(parts=parts, trains=True):
        for _ in range(2):
            assert program.optimizer.pinned == []
            program.step()
            with program.loops.inside(parts=False, trains=False):
                program.loops.note_collective("allreduce")
    assert program.optimizer.pinned == [parts]


@pytest.mark.parametrize("within", [False, True])
def test_a_collective_of_another_thread_or_behind_the_loop_bars_nothing(within: bool) -> None:
    program = Program()
    with program.loops.inside(parts=False, trains=True):
        for _ in range(3):
            program.step()
        if within:
            program.trains_here = False
            program.loops.note_collective("allreduce")
    program.trains_here = True
    program.loops.note_collective("allreduce")
    assert program.optimizer.pinned == []


@pytest.mark.parametrize(("every", "bars"), [(1, True), (2, True), (4, True), (5, False), (10, False)])
def test_a_collective_in_every_few_iterations_of_a_plain_loop_bars_relaxed_modes(every: int, bars: bool) -> None:
    """Horovod's own examples average the loss of each batch: ranks that meet there cannot get apart."""
    program = Program()
    program.loops.note_collective("broadcast_parameters")
    for epoch in range(3):
        for step in range(40):
            program.step()
            if (step + 1) % every == 0:
                program.loops.note_collective("allreduce")
                program.loops.note_collective("allreduce")  # Loss and accuracy.
            assert epoch or step >= 19 or program.optimizer.pinned == [], "it may log more often in the beginning"
        for _ in range(5):
            program.loops.note_collective("allreduce")  # An evaluation.
    assert (False in program.optimizer.pinned) is bars and True not in program.optimizer.pinned


def test_collectives_of_a_process_set_of_the_programs_bar_nothing() -> None:
    """Ranks of other sets get ahead all the same."""
    program = Program()
    for _ in range(100):
        program.step()
        program.loops.note_collective("allreduce", of_all=False)
    assert program.optimizer.pinned == []


def test_an_evaluation_over_shard_hides_no_collectives_of_a_plain_loop() -> None:
    program = Program()
    for step in range(40):
        program.step()
        program.loops.note_collective("allreduce")
        if step % 10 == 0:
            with program.loops.inside(parts=False, trains=False):
                pass
    assert program.optimizer.pinned


def test_collectives_behind_short_loops_over_shard_bar_nothing() -> None:
    """Epochs of few steps, each followed by an evaluation: within them ranks take batches as they need them."""
    program = Program()
    for _ in range(100):
        with program.loops.inside(parts=False, trains=True):
            program.step()
        program.loops.note_collective("allreduce")
    assert program.optimizer.pinned == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_idle_first_optimizer_is_warned_of_once(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    program = Program(rank)
    for _ in range(100):
        program.step(1)  # Without a loader nothing counts by the first one.
    with program.loops.inside(parts=False, trains=True):
        for _ in range(40):
            for number in (0, 1, 1, 1, 1, 1):
                program.step(number)
        assert caplog.records == []
        for _ in range(200):
            program.step(1)
    assert warned(caplog, "batches are counted by the steps of optimizer 0, which made none") == (rank == 0)
