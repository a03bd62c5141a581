"""GradScalers that part from each other in relaxed modes: which steps count, and that the scales are equal there."""

from __future__ import annotations

import torch

from star_hvd.engine.exchange.scaled_steps import ScaledSteps


def used(scaler: torch.amp.GradScaler, *, infinite: bool = False) -> None:
    """One step with a scaler, whose gradient may be infinite."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale((param * (float("inf") if infinite else 1.0)).sum()).backward()
    scaler.step(optimizer)


def test_from_the_first_step_on_every_step_counts() -> None:
    steps, scaler = ScaledSteps(), torch.amp.GradScaler("cpu", init_scale=64.0)
    assert not steps.skips(scaler, 0, whole=True, mixed=False)
    assert not steps.skips(scaler, 1, whole=False, mixed=True)
    assert not steps.skips(scaler, 5, whole=True, mixed=True)


def test_later_a_step_counts_if_it_and_the_one_before_have_all_ranks() -> None:
    steps, scaler = ScaledSteps(), torch.amp.GradScaler("cpu", init_scale=64.0)
    wholes = {10: False, 11: True, 12: True, 13: True, 14: False, 15: True, 16: True, 18: True, 19: True}
    skipped = [step for step, whole in wholes.items() if steps.skips(scaler, step, whole=whole, mixed=True)]
    assert skipped == [10, 11, 14, 15, 18], "this rank was not in step 17"


def test_scales_that_differ_are_equal_behind_the_first_such_step() -> None:
    ranks = [(ScaledSteps(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)) for _ in range(2)]
    for index, (steps, scaler) in enumerate(ranks):
        for step in range(index + 1):
            used(scaler, infinite=True)
            assert steps.skips(scaler, step, whole=False, mixed=True)
            scaler.update()
    assert [scaler.get_scale() for _, scaler in ranks] == [32.0, 16.0]
    for steps, scaler in ranks:
        used(scaler)
        assert steps.skips(scaler, 2, whole=True, mixed=True)
        assert scaler.get_scale() < 64.0, "the gradients of this step have the former scale"
        scaler.update()
        assert scaler.get_scale() == 64.0
    for number in range(3, 6):
        for steps, scaler in ranks:
            used(scaler)
            assert not steps.skips(scaler, number, whole=True, mixed=True)
            scaler.update()
    assert [scaler.get_scale() for _, scaler in ranks] == [128.0, 128.0], "and they grow in the same step"
