"""What was set around one call of torch is in force again, and nothing else, and afterwards all is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from star_hvd.engine.surroundings import Surroundings

SET: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "other autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
}


def computed() -> tuple[torch.dtype, str, bool, type]:
    ones = torch.ones(2, 2, device="cpu")
    product, made = ones @ ones, torch.tensor(0.0)
    return product.dtype, made.device.type, torch.is_autocast_cache_enabled(), type(made)


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("at_step", [name for name in SET if name != "fake tensors"])
def test_what_is_computed_is_that_of_the_step(at_step: str, name: str) -> None:
    with SET[at_step]():
        before, wanted = Surroundings.present(), computed()
    with SET[name]():
        unchanged = computed()
        with before.restored():
            assert computed() == wanted
        assert computed() == unchanged
        with pytest.raises(ValueError, match="raised"), before.restored():
            raise ValueError("raised")
        assert computed() == unchanged
    assert computed() == (torch.float32, "cpu", True, torch.Tensor)


def test_a_default_data_type_is_that_of_the_step() -> None:
    before = Surroundings.present()
    try:
        torch.set_default_dtype(torch.float64)
        with before.restored():
            assert torch.tensor(0.0).dtype == torch.float32
        assert torch.tensor(0.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(before.dtype)


def test_it_is_outside_transforms() -> None:
    before, weight = Surroundings.present(), torch.ones(3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with before.restored():
            weight.add_(1.0)
            weight.numpy()
        return (x * weight).sum()

    assert torch.equal(torch.func.grad(loss)(torch.ones(3)), weight) and float(weight[0]) == 2.0
