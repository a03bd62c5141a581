"""The replay for a few ranks and the one for many say the same."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost import replay
from scheduler.cost.replay import Flow, partial_flow, server_flow
from scheduler.plan.plan import Plan


def _table(seed: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], np.random.Generator]:
    """Times of ranks of which some are slow, and some now and then."""
    random = np.random.default_rng(seed)
    n, rows = int(random.integers(2, 24)), int(random.integers(1, 25))
    times = 0.1 * np.exp(random.choice([0.01, 0.1, 0.5]) * random.standard_normal((rows, n)))
    times[:, : int(random.integers(0, n))] *= random.choice([1.0, 2.0, 4.3])
    times[random.random(times.shape) < 0.1] *= 3.0
    return times, random


def _equal(one: Flow, other: Flow) -> None:
    for item in dataclasses.fields(Flow):
        np.testing.assert_allclose(getattr(one, item.name), getattr(other, item.name), rtol=1e-9, err_msg=item.name)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_few_and_many_agree(seed: int) -> None:
    times, random = _table(seed)
    n = times.shape[1]
    quorums = [int(x) for x in random.integers(1, n + 1, 3)]
    plans = [plan for x in quorums for plan in (Plan.ps(n, x), Plan.ps(n, x, rule="backup", lr_rule="none"))]
    found = []
    for few in (0, n):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "FEW", few)
            flows = partial_flow(times, quorums, 0.005, scales=[1.0, 8 / 7, math.inf])
            found.append([*flows, *(server_flow(plan, times, plan.quorum, 0.003) for plan in plans)])
    for one, other in zip(*found, strict=True):
        _equal(one, other)
