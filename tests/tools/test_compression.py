"""The benchmark of compression: what it compares."""

from __future__ import annotations

import pytest

from benchmarks.compression import VARIANTS, differences
from scheduler.transmission.wire import FORMS


def test_every_form_that_auto_may_choose_is_measured_beside_horovod() -> None:
    assert set(FORMS) < set(VARIANTS) and {"horovod", "horovod-fp16"} < set(VARIANTS)


def test_differences_are_of_the_means_over_the_seeds() -> None:
    found = differences({"horovod": [90.0, 92.0], "fp16": [90.5, 92.5], "low rank": [91.0, 89.0]})
    assert found == pytest.approx({"horovod": 0.0, "fp16": 0.5, "low rank": -1.0})
