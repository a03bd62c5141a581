"""Waiting for reductions: until they have ended, or until a deadline; and with a Horovod that can only be asked."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from star_hvd.engine.collective import HorovodCollective, poll_for, wait_all
from star_hvd.errors import DeadlineError


class Operations:
    """A collective whose operations end after so many questions each."""

    def __init__(self, questions: dict[int, int]) -> None:
        self.questions = questions
        self.collected: list[int] = []
        self.longest_s: list[float] = []

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        raise NotImplementedError

    def hurry(self) -> None:
        raise NotImplementedError

    def poll(self, handle: int) -> bool:
        self.questions[handle] -= 1
        return self.questions[handle] < 0

    def wait(self, handle: int, longest_s: float) -> bool:
        self.longest_s.append(longest_s)
        return self.poll(handle)

    def finish(self, handle: int) -> None:
        self.collected.append(handle)


def test_a_wait_by_asking_ends_with_the_operation_or_in_time() -> None:
    assert poll_for(Operations({7: 5}), 7, 60.0)
    assert not poll_for(Operations({7: 10**9}), 7, 0.01)
    assert poll_for(Operations({7: 0}), 7, 0.0), "asked at least once"


def test_all_are_collected_in_their_order() -> None:
    operations = Operations({1: 3, 2: 0, 3: 1})
    wait_all(operations, [3, 1, 2], 60.0, "a step")
    assert operations.collected == [3, 1, 2]


def test_a_look_is_taken_until_it_asks_for_no_more_and_then_waits_are_long() -> None:
    operations, looks = Operations({1: 6}), list[bool]()

    def look() -> bool:
        looks.append(len(looks) < 2)
        return looks[-1]

    wait_all(operations, [1], 60.0, "a step", look)
    assert looks == [True, True, False]
    assert max(operations.longest_s[:3]) < min(operations.longest_s[3:])


def test_the_error_of_a_deadline_says_what_was_waited_for() -> None:
    operations = Operations({1: 0, 2: 10**9})
    with pytest.raises(DeadlineError, match=r"step 5 did not end within 0 s.*step_deadline_s"):
        wait_all(operations, [1, 2], 0.0, "step 5")
    assert operations.collected == [1]


def test_a_horovod_without_our_patches_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.torch import mpi_ops

    ended = threading.Event()
    monkeypatch.setattr(mpi_ops, "mpi_lib", SimpleNamespace())
    monkeypatch.setattr(mpi_ops, "_handle_map", {4: (torch.ones(1), torch.ones(1))})
    monkeypatch.setattr(mpi_ops, "poll", lambda handle: ended.is_set())
    collective: Any = HorovodCollective()
    collective.hurry()
    assert not collective.wait(4, 0.01)
    threading.Timer(0.05, ended.set).start()
    assert collective.wait(4, 60.0)
    assert collective.wait(5, 60.0), "collected before"
