"""Optimizers that reduce as Horovod does: what they tell ranks in `join`; in real jobs: `test_even.py`."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from horovod.torch import mpi_ops

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.joins import JoinedRanks, ProgramCollective
from star_hvd.compression import Compression
from star_hvd.errors import StarError
from star_hvd.input.joined import Joined
from star_hvd.runtime import runtime
from star_hvd.wrapper import lockstep_core
from star_hvd.wrapper.lockstep_core import NativeCore


class Rank:
    """A rank with an optimizer of two parameters in lockstep, beside another optimizer.

    Attributes:
        sent: What it tells ranks in `join`.
        reduced: Horovod's operations, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, trains: bool = True) -> None:
        self.sent: list[Message] = []
        self.reduced: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.joined = Joined(self.sent.append, lambda: None, lambda what: None, self.calls)
        self.run = types.SimpleNamespace(trains=trains, user_calls=self.calls, joined=self.joined, steps_ended=0)
        monkeypatch.setattr(runtime, "current", lambda: self.run)
        monkeypatch.setattr(mpi_ops, "size", lambda: 2)
        monkeypatch.setattr(mpi_ops.global_process_set, "included", lambda: True)
        results: list[Any] = []

        def start(key: str) -> Callable[..., int]:
            def operation(*, name: str, **given: Any) -> int:
                results.append(given[key])
                self.reduced.append(name)
                return len(results) - 1

            return operation

        monkeypatch.setattr(mpi_ops, "allreduce_async_", start("tensor"))
        monkeypatch.setattr(mpi_ops, "grouped_allreduce_async_", start("tensors"))
        monkeypatch.setattr(mpi_ops, "sparse_allreduce_async", start("tensor"))
        monkeypatch.setattr(mpi_ops, "synchronize", results.__getitem__)

    def core(self, process_set: Any = mpi_ops.global_process_set, **given: Any) -> NativeCore:
        self.params = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
        self.inner = torch.optim.SGD(self.params, lr=0.1)
        options: dict[str, Any] = {"compression": Compression.none, "predivide": 1.0, "groups": None, **given}
        return NativeCore(
            self.inner, torch.optim.SGD, wrapped=weakref.ref(self.inner),
            names={param: f"p{i}" for i, param in enumerate(self.params)}, passes=1, op=mpi_ops.Average,
            sparse_as_dense=False, process_set=process_set, max_grad_norm=None, **options,
        )  # fmt: skip

    def backward(self, *order: int) -> None:
        sum(self.params[i].sum() for i in order).backward()  # type: ignore[union-attr]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def told(rank: Rank) -> list[tuple[str, str, int]]:
    return [(m.operation, m.name, m.number) for m in rank.sent if isinstance(m, ProgramCollective)]


def test_reductions_of_gradients_are_described_to_ranks_in_join(rank: Rank) -> None:
    """Those submit nothing by themselves: their `join` is not Horovod's."""
    core = rank.core(predivide=2.0, compression=Compression.fp16)
    rank.backward(0, 1)
    core.synchronize(manual=False)
    assert rank.sent == [] and sorted(rank.reduced) == ["p0", "p1"]
    rank.joined.on_message(JoinedRanks([1]))
    assert rank.sent == [], "the first step has ended"
    rank.backward(1)
    core.synchronize(manual=False)
    assert told(rank) == [("allreduce_async_", "p1", 2), ("allreduce_async_", "p0", 2)]
    first = rank.sent[0]
    assert isinstance(first, ProgramCollective) and (first.prescale, first.postscale) == (0.5, 2.0)
    assert (first.dtypes, first.shapes, first.op) == (["float16"], [1, 4], mpi_ops.Average)
    assert first.counter != rank.sent[1].counter, "another rank may begin them in another order"  # type: ignore[attr-defined]


def test_what_is_in_progress_when_a_rank_joins_is_described_then(rank: Rank) -> None:
    core = rank.core()
    rank.backward(0)
    rank.joined.on_message(JoinedRanks([1]))
    assert told(rank) == [("allreduce_async_", "p0", 1)]
    core.forget()  # A state is loaded.
    rank.joined.on_message(JoinedRanks([1, 2]))
    assert len(rank.sent) == 1


def test_groups_are_described_as_they_are_reduced(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_core, "broadcast_object", lambda names, **given: names)
    core = rank.core(groups=1)
    rank.joined.on_message(JoinedRanks([1]))
    rank.backward(0, 1)
    core.synchronize(manual=False)
    assert told(rank) == [("grouped_allreduce_async_", "p0", 1)]
    (message,) = rank.sent
    assert isinstance(message, ProgramCollective) and message.shapes == [2, 2, 3, 1, 4]


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_added_by_a_rank_that_reduces_with_no_other_is_not_reduced(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """A rank that is alone, or no member of the process set, makes as many backward passes as it likes."""
    monkeypatch.setattr(mpi_ops, "size", lambda: 1 if alone else 2)
    core = rank.core(types.SimpleNamespace(included=lambda: alone))
    core.add_params([added := torch.nn.Parameter(torch.zeros(2))])
    for _ in range(2):
        added.sum().backward()
    core.synchronize(manual=False)
    assert rank.reduced == [] and not core.reduces and added not in core.requires_update


def test_sparse_gradients_are_refused_while_ranks_are_in_join(rank: Rank) -> None:
    core = rank.core()
    rank.joined.on_message(JoinedRanks([1]))
    for param in rank.params:
        param.grad = torch.zeros_like(param).to_sparse()
    with pytest.raises(StarError, match=r"while ranks \[1\] are in hvd.join"):
        core.synchronize(manual=False)
    assert rank.reduced == []


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_described_where_join_is_horovods(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    rank = Rank(monkeypatch, trains=not alone)
    core = rank.core() if alone else rank.core(types.SimpleNamespace(included=lambda: True))
    rank.joined.on_message(JoinedRanks([1]))
    rank.backward(0, 1)
    core.synchronize(manual=False)
    assert rank.sent == [] and sorted(rank.reduced) == ["p0", "p1"] and not rank.calls
