"""How large buckets are: four or more, and where steps overlap up to sixteen that are not small."""

from __future__ import annotations

import pytest

from star_hvd.wrapper.bucket_core import _capacity


@pytest.mark.parametrize(
    "size, plain, overlapped",
    [
        (0, 1, 1),
        (1000, 250, 250),
        (10**6, 250_000, 250_000),
        (2 * 10**6, 500_000, 262_144),
        (10**7, 2_500_000, 625_000),
    ],
)
def test_bytes_of_a_bucket(size: int, plain: int, overlapped: int) -> None:
    assert _capacity(size, overlapped=False) == plain
    assert _capacity(size, overlapped=True) == overlapped
