"""A rank outside the subgroup whose parent does not get to the step that contains its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from scheduler.records import Plan
from star_hvd.modes.subgroup_child import ChildSteps

CONTAINED = 9


class Link:
    """A parent that is at a step and stays there, e.g. in a reduction of another optimizer that needs this rank."""

    parent = 0

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, list[int]()
        self.weights: list[float] = []

    def push(self, flats: list[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int:
        self.weights = list(weights)
        return CONTAINED

    def state(self, min_step: int, *, state_too: bool, awaited: bool = False) -> Any:
        self.asked.append(min_step)
        return SimpleNamespace(step=self.at) if self.at >= min_step else None

    def close(self) -> None:
        """Nothing is open."""


def child(link: Link, step: int, *, background: bool = False) -> tuple[ChildSteps, Any]:
    plan, engine = Plan.subgroup(3, [0, 1], plan_id=1), MagicMock()
    engine.plan, engine.rank, engine.step, engine.failure = plan, 2, step, None
    engine.applier.buckets = [SimpleNamespace(flat=torch.ones(2), params=[], index=0)]
    engine.own.weigh, engine.fold_late = lambda bucket, *, skip: 1.001, lambda bucket, flat: 0.25
    engine.replica.placed = lambda snapshot: snapshot
    steps = ChildSteps(
        engine, plan, cast(Any, link), ranks=cast(Any, None), deadline_s=5.0, state_deadline_s=5.0,
        on_step=lambda info: None, background=background,
    )  # fmt: skip
    return steps, engine


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("at", "loaded"), [(6, 6), (4, None), (CONTAINED, CONTAINED)])
def test_a_child_gets_newer_parameters_of_a_parent_that_does_not_get_to_its_gradients_step(
    at: int, loaded: int | None, background: bool
) -> None:
    link = Link(at)
    steps, engine = child(link, 4, background=background)
    steps.step(skip=False)
    if background:
        steps.catch_up()
        steps.exit()
    assert CONTAINED in link.asked
    got = [call.args[0].step for call in engine.replica.load.call_args_list]
    assert got == [loaded] * (loaded is not None) + [at] * background  # `catch_up` gets what the parent has.
    assert [call.args[0] for call in engine.note_step.call_args_list] == got


@pytest.mark.parametrize("background", [False, True])
def test_weights_are_those_that_the_gradient_has_and_not_those_that_its_buffer_rounds(background: bool) -> None:
    """The sum of weights is conserved; a buffer of bfloat16 has 8 bits of it."""
    link = Link(CONTAINED)
    steps, engine = child(link, 4, background=background)
    engine.applier.buckets[0].flat = torch.ones(2, dtype=torch.bfloat16)
    steps.step(skip=False)
    steps.catch_up()
    steps.exit()
    assert link.weights == [1.251]
    engine.sent_elsewhere.assert_called_once_with(1.251)
