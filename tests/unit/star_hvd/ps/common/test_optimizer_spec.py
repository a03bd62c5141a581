"""Which classes of optimizers servers construct as they are on the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.ps.common.layout import LayoutError
from star_hvd.ps.common.optimizer_spec import OptimizerSpec


class Decoupled(torch.optim.SGD):
    """Keeps a setting as an attribute."""

    def __init__(self, params: Any, lr: float = 0.1, decouple: bool = False, bounds: tuple[float, ...] = ()) -> None:
        super().__init__(params, lr=lr)
        self.decouple = decouple
        self._bounds = bounds
        self.cache: dict[str, torch.Tensor] = {}


class Sharpness(torch.optim.Optimizer):
    """Needs another class, which is in no group."""

    def __init__(self, params: Any, inner: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.inner = inner(self.param_groups, lr=0.1)


class Matrices(torch.optim.Optimizer):
    """Takes matrices alone."""

    def __init__(self, params: Any, lr: float = 0.1, floor: float = float("nan")) -> None:
        super().__init__(params, {"lr": lr})
        assert all(param.dim() == 2 for group in self.param_groups for param in group["params"])
        self.floor = floor


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape))


def check(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    OptimizerSpec.of(type(optimizer), groups, HyperRow(groups)).check_rebuilt(optimizer)


def test_a_setting_that_is_no_entry_of_the_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match="with decouple = False, but here it is True"):
        check(Decoupled([parameter(3)], decouple=True))
    with pytest.raises(LayoutError, match=r"with _bounds = \(\), but here it is \(0.1, 0.9\)"):
        check(Decoupled([parameter(3)], bounds=(0.1, 0.9)))


def test_a_required_argument_that_is_no_entry_of_the_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match="a server cannot construct .*Sharpness: TypeError.*'inner'"):
        check(Sharpness([parameter(3)], torch.optim.SGD))


def test_classes_with_the_same_settings_there_are_taken() -> None:
    plain = Decoupled([{"params": [parameter(3), parameter(2)]}, {"params": [parameter(4)], "lr": 0.5}, {"params": []}])
    torch.optim.lr_scheduler.StepLR(plain, 3)  # It adds attributes.
    sum(param.sum() for group in plain.param_groups for param in group["params"]).backward()
    plain.step()
    plain.cache["seen"] = torch.ones(1)
    check(plain)
    check(Matrices([parameter(2, 3)]))


def test_a_class_of_torch_is_not_constructed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.Adam([parameter(3)])
    monkeypatch.setattr(OptimizerSpec, "build", None)
    check(optimizer)
