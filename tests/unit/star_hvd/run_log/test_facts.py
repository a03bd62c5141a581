"""What is logged of optimizers, and which have state from an earlier training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from star_hvd.run_log.facts import has_trained_state, note_initial_state, optimizer_facts

_MAKERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1),
    lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    lambda params: torch.optim.RMSprop(params, lr=0.1),
]


def _step(optimizer: torch.optim.Optimizer, *, zero: bool = False) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param) if zero else torch.randn_like(param)
    optimizer.step()


@pytest.mark.parametrize("make", _MAKERS)
def test_state_of_training_steps_is_told_from_initial_state(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = make(net.parameters())
    assert not has_trained_state(optimizer)
    _step(optimizer, zero=True)  # As Horovod's broadcast does with a new optimizer.
    note_initial_state(optimizer)
    loaded = copy.deepcopy(optimizer)
    assert not has_trained_state(optimizer)
    _step(optimizer)
    assert has_trained_state(optimizer), "wrapped again after steps"
    note_initial_state(loaded)
    loaded.load_state_dict(optimizer.state_dict())
    assert has_trained_state(loaded), "a checkpoint loaded over the initial state"


def test_an_optimizer_without_state_is_unknown() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    _step(optimizer)
    note_initial_state(optimizer)
    assert not has_trained_state(optimizer)


def test_hyperparameters_in_tensors_and_numpy_scalars_are_logged_as_numbers() -> None:
    """A learning rate in a tensor is that of a captured graph; without it jobs of other rates would be one job."""
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.5)
    betas = (torch.tensor(0.25), 0.5)
    values = {"lr": torch.tensor(0.125), "momentum": np.float32(0.5), "other": torch.zeros(2), "betas": betas}
    optimizer.param_groups[0].update(values)
    hyper = optimizer_facts(optimizer)["hyper"]
    assert (hyper["lr"], hyper["momentum"], hyper["betas"]) == (0.125, 0.5, (0.25, 0.5))
    assert {type(hyper["lr"]), type(hyper["momentum"]), type(hyper["betas"][0])} == {float}
    assert "other" not in hyper and "params" not in hyper
