"""Changes of parameters by the program are told from those of steps, and a habit from one event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.wrapper.program_writes import ProgramWrites


def made() -> tuple[torch.nn.Parameter, ProgramWrites]:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([param], lr=0.1)
    applier = Applier(optimizer, torch.optim.SGD, pack([param], 1024), HyperRow(optimizer.param_groups))
    return param, ProgramWrites(applier)


def trained(param: torch.nn.Parameter, writes: ProgramWrites, steps: int) -> None:
    for number in range(steps):
        with torch.no_grad():
            param.sub_(0.01)
        writes.step_ended(number)
        assert not writes.found(number), "only the step wrote"


@pytest.mark.parametrize("seen", [True, False])
def test_a_change_in_the_first_steps_is_found(seen: bool) -> None:
    param, writes = made()
    trained(param, writes, 1)
    writes.step_ended(7)
    with torch.no_grad():
        (param if seen else param.data).clamp_(-0.5, 0.5)  # The count of changes does not know of the second.
    assert writes.found(7)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("changed", [True, False])
def test_a_change_before_the_rest_of_the_step_is_applied_is_found(seen: bool, changed: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    applier = Applier(optimizer, torch.optim.SGD, pack(params, [32]), HyperRow(optimizer.param_groups))
    assert len(applier.buckets) == 2
    writes = ProgramWrites(applier)
    for bucket in reversed(applier.buckets):
        with torch.no_grad():
            bucket.params[0].sub_(0.01)
            writes.applied([bucket])
            if changed and bucket.index:
                (bucket.params[0] if seen else bucket.params[0].data).clamp_(-0.5, 0.5)
    writes.step_ended(7)
    assert writes.found(7) is changed


@pytest.mark.parametrize("steps", [1, 10])
def test_weights_that_were_put_in_for_an_evaluation_and_taken_out_again_are_no_change(steps: int) -> None:
    param, writes = made()
    trained(param, writes, steps)
    found = []
    for number in range(3):
        writes.step_ended(7)
        kept = param.detach().clone()
        with torch.no_grad():
            param.fill_(5.0)
            param.copy_(kept)
        found.append(writes.found(7))
        trained(param, writes, 1 + number)
    assert found == [False] * 3


@pytest.mark.parametrize(
    "change", [torch.neg, lambda values: values * 0.5, lambda values: values.flip(0)], ids=["signs", "halved", "order"]
)
@pytest.mark.parametrize("steps", [1, 10])
def test_a_change_that_leaves_the_sum_of_bits_is_found(steps: int, change: Callable[..., torch.Tensor]) -> None:
    param, writes = made()
    with torch.no_grad():
        param.copy_(torch.linspace(-1.0, 1.0, 8))
    trained(param, writes, steps)
    found = []
    for _ in range(2):
        writes.step_ended(7)
        with torch.no_grad():
            param.copy_(change(param))
        found.append(writes.found(7))
    assert found[-1]


@pytest.mark.parametrize("steps", [0, 10])
def test_a_bound_that_is_not_reached_yet_is_found(steps: int) -> None:
    param, writes = made()
    trained(param, writes, steps)
    found = []
    for number in range(4):
        writes.step_ended(number)
        with torch.no_grad():
            param.clamp_(-10.0, 10.0)
        found.append(writes.found(number))
        if found[-1]:
            break
    assert found == [False, False, True]


def test_parameters_that_were_added_are_no_change() -> None:
    param, writes = made()
    writes.step_ended(0)
    with torch.no_grad():
        param.mul_(0.5)
    writes.discard()
    assert not writes.found(0)


def test_what_this_package_writes_is_not_the_programs() -> None:
    param, writes = made()
    writes.step_ended(0)
    with torch.no_grad():
        param.mul_(0.5)
    assert not writes.found(1)


def test_a_state_loaded_later_is_no_habit_and_a_change_in_every_step_is() -> None:
    param, writes = made()
    trained(param, writes, 10)
    found = []
    for number in (3, 4):
        writes.step_ended(number)
        with torch.no_grad():
            param.mul_(0.5)
        found.append(writes.found(number))
    assert found == [False, True]


def test_changes_far_apart_are_no_habit() -> None:
    param, writes = made()
    for _ in range(2):
        trained(param, writes, 100)
        writes.step_ended(0)
        with torch.no_grad():
            param.mul_(0.5)
        assert not writes.found(0)
