"""Hyperparameters as a row: applied inside a step, put back after it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from star_hvd.engine.hyperparameters import HyperRow, StateInGroups
from tests.support.effort import cases


def groups() -> list[dict[str, Any]]:
    return [
        {
            "params": [torch.nn.Parameter(torch.zeros(2))],
            "lr": 0.1,
            "betas": (0.9, 0.999),
            "amsgrad": False,
            "foreach": None,
            "name": "first",
            "steps": 3,
        },
        {"params": [], "lr": torch.tensor(0.5), "rho": [0.1, 0.2], "table": torch.zeros(4), "mixed": (1.0, "x")},
    ]


def test_what_travels() -> None:
    row = HyperRow(groups())
    assert row.size == 1 + 2 + 1 + 1 + 1 + 2  # amsgrad, betas, lr, steps; lr, rho
    assert row.read(groups()) == [0.0, 0.9, 0.999, 0.1, 3.0, 0.5, pytest.approx(0.1), pytest.approx(0.2)]


def test_whether_an_entry_is_taken_is_found_without_a_search_among_all() -> None:
    """Servers' settings ask for every entry of every group, of which there may be one per parameter."""
    compared = [0]

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

    row = HyperRow([{Key(f"number{i}"): 0.1 for i in range(1000)}])
    compared[0] = 0
    assert row.takes(0, "number999", 0.1) and not row.takes(0, "other", 0.1) and not row.takes(1, "number999", 0.1)
    assert compared[0] < 20


def test_a_group_that_the_program_has_removed_is_left_out() -> None:
    row, left = HyperRow(groups()), groups()[:1]
    values = row.read(left)
    assert values[:5] == [0.0, 0.9, 0.999, 0.1, 3.0] and all(map(math.isnan, values[5:]))
    with row.applied(left, [1.0, 0.8, 0.99, 0.01, 4.0, 0.25, 0.3, 0.4]):
        assert left[0]["lr"] == 0.01
    assert left[0]["lr"] == 0.1
    with row.applied(groups(), values):
        pass


def test_applied_and_put_back() -> None:
    mine, row = groups(), HyperRow(groups())
    tensor = mine[1]["lr"]
    with row.applied(mine, [1.0, 0.8, 0.99, 0.01, 4.0, 0.25, 0.3, 0.4]):
        first, second = mine
        assert (first["amsgrad"], first["betas"], first["lr"], first["steps"]) == (True, (0.8, 0.99), 0.01, 4)
        assert type(first["amsgrad"]) is bool and type(first["steps"]) is int and type(first["betas"]) is tuple
        assert second["lr"] is tensor and float(tensor) == 0.25, "a tensor is changed in place: others may hold it"
        assert second["rho"] == [0.3, 0.4]
        assert first["name"] == "first" and first["foreach"] is None
    assert row.read(mine) == row.read(groups()) and mine[1]["lr"] is tensor


def test_put_back_after_an_error() -> None:
    mine, row = groups(), HyperRow(groups())
    with pytest.raises(ZeroDivisionError), row.applied(mine, [1.0] * row.size):
        raise ZeroDivisionError
    assert row.read(mine) == row.read(groups())


def test_a_loaded_state_may_have_other_kinds_of_values() -> None:
    """As one of a run without the option that this program sets, or of another version of the optimizer."""
    mine, row = groups(), HyperRow(groups())
    mine[0] |= {"amsgrad": None, "betas": (0.9, 0.99, 0.5)}
    del mine[0]["steps"]
    sent = row.read(mine)
    assert len(sent) == row.size and [math.isnan(value) for value in sent] == [True] * 3 + [False, True] + [False] * 3
    others = groups()
    with row.applied(others, [*sent[:3], 0.2, *sent[4:]]):
        own = row.read(groups())
        assert row.read(others) == [*own[:3], 0.2, *own[4:]], "what the leader does not have is each rank's own"
    with row.applied(mine, row.read(others)):
        assert mine[0]["amsgrad"] is None and mine[0]["betas"] == (0.9, 0.99, 0.5) and "steps" not in mine[0]


def test_how_a_step_is_executed_is_each_ranks_own() -> None:
    mine = [group | {"foreach": True, "fused": False, "capturable": True} for group in groups()]
    assert HyperRow(mine).read(mine) == HyperRow(groups()).read(groups())


def test_no_row_changes_nothing() -> None:
    mine, row = groups(), HyperRow(groups())
    betas = mine[0]["betas"]
    with row.applied(mine, None):
        assert mine[0]["betas"] is betas


def test_entries_that_appear_later_do_not_travel() -> None:
    mine = groups()
    row = HyperRow(mine)
    mine[0]["initial_lr"] = 0.1
    assert len(row.read(mine)) == row.size


def test_entries_of_schedulers_do_not_travel_whoever_has_them() -> None:
    """Rank 0 may have them from a checkpoint before the others make their scheduler."""
    mine, others = groups(), groups()
    mine[0] |= {"initial_lr": 0.1, "max_lr": 0.2, "min_lr": 0.01, "base_momentum": 0.8, "max_momentum": 0.9}
    assert HyperRow(mine).read(mine) == HyperRow(others).read(others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Rprop])
def test_the_optimizers_of_torch(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    row = HyperRow(optimizer.param_groups)
    own = row.read(optimizer.param_groups)
    with row.applied(optimizer.param_groups, own):
        assert row.read(optimizer.param_groups) == own


@settings(max_examples=cases(100), deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=5, max_size=5))
def test_any_row_is_applied_as_it_came_and_put_back(row: list[float]) -> None:
    mine: list[dict[str, Any]] = [
        {"params": [], "lr": 0.1, "betas": (0.9, 0.999), "weight": torch.tensor(2.0, dtype=torch.float64), "eps": 1e-8}
    ]
    own, subject = HyperRow(mine).read(mine), HyperRow(mine)
    with subject.applied(mine, row):
        assert subject.read(mine) == row
    assert subject.read(mine) == own and type(mine[0]["betas"]) is tuple


def test_what_a_step_really_uses_is_the_row() -> None:
    """Two ranks whose schedules differ make the same step with the same row, and keep their own schedules."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=lr, momentum=0.9) for p, lr in zip(params, (0.1, 0.7), strict=True)]
    row = HyperRow(optimizers[0].param_groups).read(optimizers[0].param_groups)
    for _ in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.full((3,), 0.5)
            with HyperRow(optimizer.param_groups).applied(optimizer.param_groups, row):
                optimizer.step()
    assert torch.equal(params[0], params[1])
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.1, 0.7]


def test_an_error_of_the_step_leaves_tensors_and_numbers_as_they_were() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([param], lr=torch.tensor(0.1), amsgrad=False)
    subject, rate = HyperRow(optimizer.param_groups), optimizer.param_groups[0]["lr"]
    own = subject.read(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="out of memory"), subject.applied(optimizer.param_groups, [1.0] * len(own)):
        assert optimizer.param_groups[0]["amsgrad"] is True and float(rate) == 1.0
        raise RuntimeError("out of memory")
    assert subject.read(optimizer.param_groups) == own
    assert optimizer.param_groups[0]["lr"] is rate and optimizer.param_groups[0]["amsgrad"] is False


def test_groups_that_share_one_tensor_get_their_own_value_back() -> None:
    """`torch.optim.Adam(groups, lr=torch.tensor(0.1))` gives all groups the same tensor."""
    rate = torch.tensor(0.125)
    mine: list[dict[str, Any]] = [{"params": [], "lr": rate}, {"params": [], "lr": rate}]
    subject = HyperRow(mine)
    with subject.applied(mine, [0.5, 0.5]):
        assert float(rate) == 0.5
    assert float(rate) == 0.125


def test_an_integer_takes_a_fraction_and_stays_an_integer_for_whole_numbers() -> None:
    """`lr=1` and SGD's defaults of 0 are integers; the leader, past a change of a schedule, sends fractions."""
    mine: list[dict[str, Any]] = [{"params": [], "lr": 1, "nesterov": False, "range": (0, 1), "weight_decay": 0}]
    subject = HyperRow(mine)
    with subject.applied(mine, [0.1, 1.0, 0.0, 0.5, 0.01]):
        assert mine[0] == {"params": [], "lr": 0.1, "nesterov": True, "range": (0, 0.5), "weight_decay": 0.01}
        assert type(mine[0]["nesterov"]) is bool and type(mine[0]["range"][0]) is int
    with subject.applied(mine, [3.0, 0.0, 0.0, float("inf"), float("nan")]):
        assert type(mine[0]["lr"]) is int and mine[0]["lr"] == 3
        assert mine[0]["range"] == (0, float("inf")) and mine[0]["weight_decay"] == 0
    assert mine == [{"params": [], "lr": 1, "nesterov": False, "range": (0, 1), "weight_decay": 0}]
    assert type(mine[0]["lr"]) is int and type(mine[0]["nesterov"]) is bool


@pytest.mark.parametrize("names", [("lr",), ("weight_decay", "momentum", "dampening")])
def test_a_late_rank_with_integers_makes_the_leaders_step(names: tuple[str, ...]) -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    leader, late = (torch.optim.SGD([param], lr=1) for param in params)
    leader.param_groups[0].update(dict.fromkeys(names, 0.25))
    row = HyperRow(leader.param_groups).read(leader.param_groups)
    for _ in range(3):
        for param, optimizer in zip(params, (leader, late), strict=True):
            param.grad = torch.full((3,), 0.5)
            with HyperRow(optimizer.param_groups).applied(optimizer.param_groups, row):
                optimizer.step()
    assert torch.equal(params[0], params[1])


def test_what_the_step_changes_itself_stays() -> None:
    """An optimizer that counts its steps there goes on from the leader's count, on every rank."""
    mine: list[dict[str, Any]] = [{"params": [], "lr": 0.5, "step": 3}]
    with HyperRow(mine).applied(mine, [0.1, 7.0]):
        mine[0]["step"] += 1
    assert mine == [{"params": [], "lr": 0.5, "step": 8}]
    count, rate = torch.tensor(3.0), torch.tensor(float("nan"))
    mine = [{"params": [], "lr": torch.tensor(0.5), "step": count, "warmup": rate}]
    with HyperRow(mine).applied(mine, [0.25, 7.0, float("nan")]):
        count += 1
    assert float(mine[0]["lr"]) == 0.5 and float(count) == 8.0 and rate.isnan()


class Counting(torch.optim.SGD):
    """Counts its steps in `param_groups`, as apex's `FusedAdam` does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Quiet(torch.optim.SGD):
    """A class outside torch without state there."""


@pytest.mark.parametrize(("kind", "found"), [(Counting, "count"), (Quiet, ""), (torch.optim.SGD, "")])
def test_state_in_groups_is_found_in_the_first_steps(kind: Any, found: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([param], lr=float("nan"))
    subject = StateInGroups(kind)
    with subject.watched(optimizer.param_groups):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1  # As schedulers do, between steps.
    with subject.watched(optimizer.param_groups):
        optimizer.step()
    assert subject.found == found


def test_what_programs_change_later_is_not_looked_for() -> None:
    optimizer = Quiet([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    subject = StateInGroups(Quiet)
    for number in range(4):
        with subject.watched(optimizer.param_groups):
            if number >= 2:
                optimizer.param_groups[0]["lr"] /= 2
    assert subject.found == ""
