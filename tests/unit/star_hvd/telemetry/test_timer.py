"""A step's own time: what is waited for, what is left out, and the loading beside it."""

from __future__ import annotations

import pytest

from star_hvd.telemetry import timer
from star_hvd.telemetry.timer import StepTimer


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [100.0]
    monkeypatch.setattr(timer.time, "monotonic", lambda: found[0])
    return found


@pytest.mark.parametrize(
    ("waited_s", "load_s"),
    [(0.0, 0.0), (0.1, 0.2), (0.0, 0.5)],
)
def test_loading_is_reported_beside_what_was_waited_for(now: list[float], waited_s: float, load_s: float) -> None:
    clock = StepTimer()
    for _ in range(2):  # The second step knows nothing of the first one.
        clock.start()
        for _ in range(2):  # Two batches in a step.
            clock.add_input(0.5 * waited_s, 0.5 * load_s)
        clock.add_outside(0.2)
        now[0] += 0.5
        times = clock.stop()
        assert times.compute_s == pytest.approx(0.3)
        assert (times.input_s, times.load_s) == pytest.approx((waited_s, load_s))
    clock.close()
