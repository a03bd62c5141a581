"""Ranks in `join`: what the others describe to them, and what they add to it; in real jobs: `test_scenarios.py`."""

from __future__ import annotations

import collections
import itertools
import types
from typing import Any

import pytest
import torch
from horovod.torch import mpi_ops

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.joins import JoinCalled, JoinedRanks, ProgramCollective
from star_hvd.errors import DeadlineError, StarError
from star_hvd.input import joined as subject
from star_hvd.input.joined import Joined, described
from star_hvd.telemetry import wait_time


class Rank:
    """A rank whose messages and submissions are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        self.submitted: list[tuple[Any, dict[str, Any]]] = []
        self.met: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.steps = lambda: 7
        self.joined = Joined(
            self.sent.append, lambda: None, self.met.append, self.calls, lambda: self.steps(), look_s=0.001
        )  # fmt: skip

        def submit(tensors: Any, **options: Any) -> int:
            self.submitted.append((tensors, options))
            return len(self.submitted)

        monkeypatch.setattr(mpi_ops, "allreduce_async_", submit)
        monkeypatch.setattr(mpi_ops, "grouped_allreduce_async_", submit)
        self.collected: list[int] = []
        self.ended: set[int] = set()
        collective = types.SimpleNamespace(poll=lambda handle: handle in self.ended, finish=self.collected.append)
        monkeypatch.setattr(subject, "HorovodCollective", lambda: collective)
        monkeypatch.setattr(
            subject, "wait_all", lambda collective, handles, deadline_s, what: self.collected.extend(handles)
        )


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def reduction(number: int, **given: Any) -> ProgramCollective:
    return described("allreduce", {"tensor": torch.ones(2, 3), "name": "loss", **given}, "named", number)


def test_a_collective_is_described_to_ranks_that_have_joined_and_to_those_that_join_during_it(rank: Rank) -> None:
    with rank.joined.during(reduction(1)):
        assert rank.sent == []
        rank.joined.on_message(JoinedRanks([2]))
        rank.joined.on_message(JoinedRanks([2, 1]))
    assert rank.sent == [reduction(1)] * 2
    rank.joined.begin(reduction(2))
    rank.joined.submitted(17, reduction(2))
    assert rank.sent[2:] == [reduction(2)]
    rank.joined.on_message(JoinedRanks([2, 1, 3]))
    assert rank.sent[3:] == [reduction(2)], "still in progress"
    rank.joined.ended(17)
    rank.joined.on_message(JoinedRanks([2, 1, 3, 4]))
    assert len(rank.sent) == 4


@pytest.mark.parametrize("operation", ["allgather", "broadcast_parameters", "barrier", "alltoall"])
def test_what_joined_ranks_cannot_add_zeros_to_is_refused_on_either_side(rank: Rank, operation: str) -> None:
    collective = described(operation, {"tensor": torch.ones(2)}, operation, 1)
    with rank.joined.during(collective):  # Begun before this rank could know.
        rank.joined.on_message(JoinedRanks([1]))
    assert rank.sent == [collective]
    with pytest.raises(StarError, match=rf"hvd.{operation} was called while ranks \[1\] are in hvd.join"):
        rank.joined.begin(collective)
    assert len(rank.sent) == 1
    rank.joined.on_message(collective)
    with pytest.raises(StarError, match=f"another rank called hvd.{operation} while this rank is in hvd.join"):
        rank.joined.wait(3, 60.0)


def test_zeros_are_added_once_for_each_operation(rank: Rank) -> None:
    rank.calls["named"] = 4  # As on the other ranks when this one joined.
    half = described(
        "grouped_allreduce",
        {"tensors": [torch.ones(3), torch.ones(())], "name": "g", "average": False, "postscale_factor": 0.5},
        "named",
        6,
        meets=True,
    )
    for message in (reduction(5), half, reduction(5), half, reduction(4), JoinedRanks([0, 2, 1])):
        rank.joined.on_message(message)
    assert rank.joined.wait(3, 60.0) == 1, "the last to join"
    assert rank.sent == [JoinCalled()] and rank.met == ["grouped_allreduce"]
    (first, options), (pair, others) = rank.submitted
    assert torch.equal(first, torch.zeros(2, 3)) and options["name"] == "loss" and options["op"] == mpi_ops.Average
    assert [each.shape for each in pair] == [(3,), ()] and others["op"] == mpi_ops.Sum
    assert others["postscale_factor"] == 0.5 and rank.calls["named"] == 6
    rank.joined.begin(reduction(7))
    assert rank.sent == [JoinCalled()], "all ranks have data again"


def test_zeros_that_were_added_are_collected_during_the_wait(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod keeps them until then: those of an optimizer's gradients are as large as the model, in every step."""
    kept: list[int] = []

    def submit(tensor: torch.Tensor, **options: Any) -> int:
        kept.append(len(kept) - len(rank.collected))
        rank.ended.update({len(kept)} - {5})
        return len(kept)

    monkeypatch.setattr(mpi_ops, "allreduce_async_", submit)
    for number in range(1, 7):
        rank.joined.on_message(reduction(number))
    rank.joined.on_message(JoinedRanks([0, 1]))
    rank.joined.wait(2, 60.0)
    assert kept == [0, 0, 0, 0, 0, 1] and rank.collected == [1, 2, 3, 4, 5, 6]


def test_waiting_for_a_rank_that_never_joins_has_a_deadline(rank: Rank) -> None:
    rank.joined.on_message(JoinedRanks([0]))
    with pytest.raises(DeadlineError, match=r"ranks \[1, 2\] did not call hvd.join\(\) within 0.2 s"):
        rank.joined.wait(3, 0.2)


@pytest.mark.parametrize("sign", ["steps", "collectives"])
def test_a_rank_that_trains_on_for_longer_than_the_deadline_is_waited_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """It only has many more batches; a job whose other ranks make steps is healthy."""
    now_s = itertools.count(0.0, 0.9)
    monkeypatch.setattr(wait_time, "time", types.SimpleNamespace(monotonic=lambda: next(now_s)))
    looks = itertools.count(1)

    def made() -> int:
        if (number := next(looks)) == 40:
            rank.joined.on_message(JoinedRanks([0, 1]))
        if sign == "collectives":
            rank.joined.on_message(reduction(number))
        return number if sign == "steps" else 0

    rank.steps = made
    assert rank.joined.wait(2, 3.0) == 1
    assert next(now_s) > 30.0
    rank.steps = lambda: 7
    rank.joined.on_message(JoinedRanks([0]))
    with pytest.raises(DeadlineError):
        rank.joined.wait(2, 3.0)


def test_tensors_are_described_as_they_are_sent() -> None:
    from horovod.torch import Compression

    given = {"tensor": torch.ones(4), "name": "x", "compression": Compression.fp16, "op": mpi_ops.Max}
    found = described("allreduce", given, "named", 1)
    assert (found.dtypes, found.shapes, found.op, found.device) == (["float16"], [1, 4], mpi_ops.Max, "cpu")
    assert described("allreduce", {"tensor": torch.ones(2).to_sparse(), "name": "x"}, "named", 1).dtypes == []
