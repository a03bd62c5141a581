"""Hyperparameters as a row: applied inside a step, put back after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from star_hvd.execute.hyper import HyperRow


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Rprop])
def test_the_optimizers_of_torch(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    row = HyperRow(optimizer.param_groups)
    own = row.read(optimizer.param_groups)
    with row.applied(optimizer.param_groups, own):
        assert row.read(optimizer.param_groups) == own
