"""Values of parameters that a program exchanges are noticed, and so are those that it puts back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from star_hvd.engine.swap_detector import SwapDetector


def _net(dtype: torch.dtype) -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3), *(nn.Linear(5, 5) for _ in range(30))]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_program_puts_in_the_parameters_place_is_noticed_until_it_puts_them_back(
    dtype: torch.dtype, replaced: bool
) -> None:
    params = list(_net(dtype).parameters())
    detector = SwapDetector([SimpleNamespace(params=params)])  # type: ignore[list-item]
    assert not detector.moved(), "nothing is remembered yet"
    detector.note()
    assert not detector.moved()
    own = [param.data if replaced else param.detach().clone() for param in params]
    for param in params:
        if replaced:
            param.data = 1.1 * param.data
        else:
            param.data.mul_(1.1)
    assert detector.moved()
    for param, value in zip(params, own, strict=True):
        if replaced:
            param.data = value
        else:
            param.data.copy_(value)
    assert not detector.moved()


def test_parameters_that_were_moved_or_have_another_type_are_chosen_anew() -> None:
    net = _net(torch.float32)
    detector = SwapDetector([SimpleNamespace(params=list(net.parameters()))])  # type: ignore[list-item]
    detector.note()
    net.half()
    assert detector.moved()
    detector.note()
    assert not detector.moved()
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1.0)
    assert detector.moved()


def test_a_parameter_of_one_value_and_one_without_any() -> None:
    params = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0))]
    detector = SwapDetector([SimpleNamespace(params=params)])  # type: ignore[list-item]
    detector.note()
    assert not detector.moved()
    params[0].data.add_(1.0)
    assert detector.moved()
