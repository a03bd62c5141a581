"""Whether a forward pass whose graph needs the parameters has begun since the last step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from star_hvd.input.forward_passes import ForwardPasses


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Leave a process that has compiled nothing: in one that has, no gates are closed (`ForwardGates.passed_by`)."""
    yield
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None:
        compiler.FRAME_COUNTER = 0  # type: ignore[attr-defined]


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pass_with_gradients_counts_until_the_step_has_ended(compiled: bool) -> None:
    net = network()
    called = torch.compile(net, backend="eager") if compiled else net
    passes = ForwardPasses(set(net.parameters()))
    called(torch.ones(1, 2))
    assert not passes.begun, "no rank can be behind yet"
    passes.step_ended(watch=True, compiled=compiled)
    with torch.no_grad():
        called(torch.ones(1, 2))
    called.eval()(torch.ones(1, 2))
    assert not passes.begun
    loss = called.train()(torch.ones(1, 2)).sum()
    assert passes.begun
    loss.backward()
    assert passes.begun
    passes.step_ended(watch=True, compiled=compiled)
    assert not passes.begun
    passes.step_ended(watch=False, compiled=compiled)
    called(torch.ones(1, 2))
    assert not passes.begun
    passes.remove()


def test_another_network_does_not_count() -> None:
    net, another = network(), network()
    passes = ForwardPasses(set(net.parameters()))
    passes.step_ended(watch=True, compiled=False)
    another(torch.ones(1, 2))
    assert not passes.begun
    net(torch.ones(1, 2))
    assert passes.begun
    passes.remove()


def test_a_dropped_optimizers_parameters_are_not_kept_alive_and_removed_is_removed() -> None:
    net = network()
    passes = ForwardPasses(set(net.parameters()))
    passes.step_ended(watch=True, compiled=False)
    passes.remove()
    net(torch.ones(1, 2))
    assert not passes.begun
    passes.step_ended(watch=True, compiled=False)
    param = weakref.ref(next(net.parameters()))
    del net, passes
    gc.collect()
    assert param() is None
    torch.nn.Linear(1, 1)(torch.ones(1, 1))
