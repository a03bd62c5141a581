"""What of an optimizer's state is averaged, and how it is written back."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from star_hvd.engine.buckets import pack
from star_hvd.modes.averaged_state import gather_rest, mean_of_rest, move_to_mean, put_rest, shaped_keys, unaveraged
from tests.support.device_world import running
from tests.support.fake_device import CUDA0


def one_parameter(**state: Any) -> tuple[Any, Any]:
    param = torch.nn.Parameter(torch.zeros(3))
    return pack([param], 1024), {param: state}


def test_what_has_the_parameters_shape_and_what_is_the_rest() -> None:
    buckets, state = one_parameter(
        moment=torch.zeros(3), step=torch.tensor(7.0), row=torch.tensor([1.0, 2.0]), count=5, scale=0.5, large=True,
        name="x", nothing=None, codes=torch.zeros(3, dtype=torch.uint8), ticks=torch.tensor(9),
    )  # fmt: skip
    assert shaped_keys(buckets[0], state) == ["moment"]
    assert gather_rest(buckets, state).tolist() == [5.0, 1.0, 2.0, 0.5, 7.0, 9.0, 1.0]  # count, row, scale, step, ticks


@pytest.mark.parametrize(("value", "reason"), [
    (torch.zeros(3, dtype=torch.uint8), r"is a torch.uint8 tensor of shape \[3\]; expected"),
    (torch.zeros(1, dtype=torch.int64), "torch.int64"), (torch.tensor(True), "torch.bool"),
    (torch.zeros(3, dtype=torch.bool), "torch.bool"), (torch.tensor(5), None), (torch.zeros(2), None),
    (torch.tensor(0.5), None), (3, None), (True, None), ("x", None), (None, None),
])  # fmt: skip
def test_what_stays_each_ranks_own(value: Any, reason: str | None) -> None:
    assert re.search(reason, unaveraged(value)) if reason else unaveraged(value) == ""
    if isinstance(value, torch.Tensor):
        buckets, state = one_parameter(kept=value)
        averaged = shaped_keys(buckets[0], state) or len(gather_rest(buckets, state)) > 1
        assert bool(averaged) == (reason is None)


def test_a_parameter_without_state_leaves_the_layout_as_it_is() -> None:
    params = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
    buckets = pack(params, 1024)  # In reverse order.
    assert gather_rest(buckets, {params[0]: {"step": 2}}).tolist() == [0.0, 2.0, 1.0]
    state: Any = {params[0]: {"step": 2}}
    put_rest(buckets, state, torch.tensor([8.0, 3.0, 1.0], dtype=torch.float64))
    assert state == {params[0]: {"step": 3}}
    assert gather_rest([], {}).tolist() == [1.0]


@pytest.mark.parametrize("weights", [(3.0, 2.0), (0.7, 0.1), (1e-3, 1 / 3)])
def test_a_number_that_is_equal_everywhere_keeps_its_value(weights: tuple[float, float]) -> None:
    buckets, state = one_parameter(step=torch.tensor(1234567.0), count=7)
    total = sum((gather_rest(buckets, state) * weight for weight in weights), torch.zeros(()))
    put_rest(buckets, state, mean_of_rest(total))
    (values,) = state.values()
    assert float(values["step"]) == 1234567.0 and values["count"] == 7 and type(values["count"]) is int


def test_a_tensor_is_written_in_place_and_a_difference_is_added() -> None:
    buckets, state = one_parameter(count=6, step=torch.tensor(6.0), ticks=torch.tensor(6))
    (values,) = state.values()
    step = values["step"]
    mean, before = (torch.tensor([x, x, x, 1.0], dtype=torch.float64) for x in (3.5, 4.0))
    put_rest(buckets, state, mean, before)
    assert values["step"] is step and float(step) == 5.5
    assert values["count"] == int(values["ticks"]) == round(5.5), "whole numbers stay whole"


def test_nothing_is_waited_for_where_state_is_gathered_under_an_engines_lock() -> None:
    with running() as device:
        param = torch.nn.Parameter(torch.zeros(3, device=CUDA0))
        state: Any = {param: {"kernel": torch.full((), 2.0, device=CUDA0), "row": torch.zeros(2, device=CUDA0),
                              "step": torch.tensor(4.0), "count": 4}}  # fmt: skip
        buckets, lock = pack([param], 1024), threading.Condition()
        device.locks.append(lock)
        with lock:
            rest = gather_rest(buckets, state)
        device.finish()
        values = rest.inner.tolist()  # type: ignore[attr-defined]
        assert values == [4.0, 2.0, 0.0, 0.0, 4.0, 1.0]
        put_rest(buckets, state, torch.tensor([6.0, 3.0, 1.0, 1.0, 5.0, 1.0], dtype=torch.float64))
        device.finish()
        (after,) = state.values()
        assert float(after["kernel"].inner) == 3.0 and after["row"].inner.tolist() == [1.0, 1.0]
        assert float(after["step"]) == 5.0 and after["count"] == 6 and not device.faults


def test_a_second_moment_stays_above_zero() -> None:
    before, mean = torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0])
    value = torch.tensor([2.0, 0.5])  # Both have shrunk since: 2 - 3 would be below zero.
    move_to_mean(value, before, mean)
    assert value.tolist() == [1.0, 0.5]
    signed = torch.tensor([2.0, -0.5])
    move_to_mean(signed, torch.tensor([4.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert signed.tolist() == [-1.0, 1.5], "what has a sign moves by the whole difference"
