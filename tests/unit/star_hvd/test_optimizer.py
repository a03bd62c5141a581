"""Optimizers that run as in Horovod, without a run log."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import horovod.torch.optimizer
import pytest
import torch
from horovod.torch import mpi_ops

from star_hvd.job_report import explain
from star_hvd.optimizer import DistributedOptimizer
from star_hvd.runtime import job_log, runtime
from star_hvd.wrapper.lockstep_core import NativeCore
from tests.support.inside import inside


@pytest.fixture(autouse=True)
def _no_other_optimizers() -> Iterator[None]:
    """Those of other tests may be alive until the garbage collector runs."""
    job_log.forget_unlogged()
    yield
    job_log.forget_unlogged()


class _Set:
    """A process set without this rank, so that nothing is reduced."""

    def included(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("size", "arguments", "expected"),
    [(1, {}, "1 rank"), (1, {"groups": 1}, "1 rank"), (2, {"process_set": _Set()}, "the argument process_set")],
)
def test_what_runs_as_in_horovod_is_explained(
    size: int, arguments: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_ops, "size", lambda: size)
    monkeypatch.setattr(mpi_ops, "rank", lambda: 0)
    monkeypatch.setattr(mpi_ops.global_process_set, "included", lambda: True)
    monkeypatch.setattr(runtime, "current", lambda: None)
    net = torch.nn.Linear(3, 2)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), named_parameters=net.named_parameters(), **arguments
    )
    assert explain() == f"{expected}: runs as in Horovod, no run log"
    assert optimizer.mode == "sync"


@pytest.mark.parametrize("arguments", [{"op": mpi_ops.Adasum}, {"gradient_predivide_factor": 2.0}])
def test_a_second_optimizer_that_reduces_without_weights_pins_the_first(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is at another step of the first would leave the others alone in a reduction of the second."""
    monkeypatch.setattr(mpi_ops, "size", lambda: 2)
    monkeypatch.setattr(mpi_ops, "rank", lambda: 0)
    monkeypatch.setattr(mpi_ops.global_process_set, "included", lambda: True)
    monkeypatch.setattr(horovod.torch.optimizer, "DistributedOptimizer", lambda optimizer, *given, **named: optimizer)
    pins: list[tuple[str, bool]] = []
    first = SimpleNamespace(pin=lambda reason, *, equal_batches: pins.append((reason, equal_batches)))
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(drivers={0: first}, in_hand=None))
    net = torch.nn.Linear(3, 2)
    second = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **arguments)
    assert second is not None
    assert pins == [("an optimizer's gradients are reduced by Horovod itself, without weights", True)]


def _wrapped(monkeypatch: pytest.MonkeyPatch, inner: torch.optim.Optimizer, net: torch.nn.Module) -> Any:
    monkeypatch.setattr(mpi_ops, "size", lambda: 1)
    monkeypatch.setattr(mpi_ops, "rank", lambda: 0)
    monkeypatch.setattr(mpi_ops.global_process_set, "included", lambda: True)
    monkeypatch.setattr(runtime, "current", lambda: None)
    return DistributedOptimizer(inner, named_parameters=net.named_parameters())


def test_an_optimizer_that_is_wrapped_again_ends_though_the_program_refers_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a learning-rate scheduler does; the former object is the same optimizer as the new one from then on."""
    net = torch.nn.Linear(3, 2)
    first = _wrapped(monkeypatch, torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9), net)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    dropped: list[NativeCore] = []
    monkeypatch.setattr(NativeCore, "drop", lambda core: dropped.append(core))
    second = _wrapped(monkeypatch, first, net)
    assert len(dropped) == 1 and scheduler.optimizer is first
    net(torch.ones(1, 3)).sum().backward()
    first.step()
    scheduler.step()
    assert second.stepped and second.param_groups[0]["lr"] == 0.5
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys() == {0, 1}


def test_the_core_of_an_optimizer_that_is_wrapped_again_is_released_though_the_program_refers_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buckets are as large as the gradients of the model."""
    net = torch.nn.Linear(3, 2)
    first = _wrapped(monkeypatch, torch.optim.SGD(net.parameters(), lr=1.0), net)
    core = weakref.ref(inside(first).core)
    second = _wrapped(monkeypatch, first, net)
    gc.collect()
    assert core() is None and second is not first
