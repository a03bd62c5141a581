"""The pace of a transfer beside others' messages, on links simulated with a queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.transmission.pace import SHARE, Pace, chunk_bytes

SIZE = 1_000_000
LINK = 2.5e6


def transfer(pace: Pace, link: float, size: int = SIZE, late_s: float = 0.0) -> float:
    """Make one transfer; the pace that it had."""
    rate = pace.bytes_per_s(size)
    pace.took(size, size / min(link, rate or link) + late_s, rate)
    return rate


def test_transfers_keep_below_a_slow_link_but_for_a_few_that_measure_it() -> None:
    pace = Pace()
    rates = [transfer(pace, LINK) for _ in range(600)]
    whole = [number for number, rate in enumerate(rates) if not rate]
    assert whole == [0, 2, 11, 28, 61, 126, 255, 512]
    assert {round(rate) for rate in rates if rate} == {round(SHARE * LINK)}


def test_a_rate_known_before_is_used_at_once_and_soon_measured() -> None:
    pace = Pace(2.0e6)
    assert [round(transfer(pace, LINK)) for _ in range(4)] == [1_600_000, 0, 2_000_000, 2_000_000]
    assert not pace.measures(SIZE)


@pytest.mark.parametrize(("size", "link"), [(SIZE, 1e9), (1000, LINK), (60_000, LINK)])
def test_what_is_over_at_once_is_not_paced(size: int, link: float) -> None:
    pace = Pace(link)
    assert [transfer(pace, link, size) for _ in range(20)] == [0.0] * 20
    assert not pace.measures(size), "its time is as good as the others'"


@pytest.mark.parametrize("size", [40_000, 60_000])
def test_whatever_is_paced_measures_the_link_however_small(size: int) -> None:
    slow = 0.4 * LINK
    pace = Pace(slow)
    rates = [transfer(pace, slow, size) for _ in range(20)]
    assert [number for number, rate in enumerate(rates) if not rate] == [1, 10]
    assert not pace.measures(size)
    for _ in range(20):  # No transfer takes long any more, which is seen from those that measure.
        transfer(pace, 10.0 * LINK, size)
    assert not pace.measures(size) and pace.bytes_per_s(size) == 0.0


def test_a_small_transfer_that_came_late_says_nothing_of_the_link() -> None:
    pace = Pace()
    assert [transfer(pace, LINK, 1000, late_s=0.05) for _ in range(4)] == [0.0] * 4
    pace = Pace(LINK)
    assert [transfer(pace, LINK, 1000, late_s=0.05) for _ in range(4)] == [0.0] * 4
    assert pace.bytes_per_s(SIZE) == pytest.approx(SHARE * LINK)


def test_a_link_that_was_cut_off_for_a_while_is_soon_used_again() -> None:
    pace = Pace()
    pace.took(SIZE, 100.0, 0.0)
    sent_s = 0.0
    for _ in range(4):
        rate = pace.bytes_per_s(SIZE)
        sent_s += SIZE / min(LINK, rate or LINK)
        transfer(pace, LINK)
    assert pace.bytes_per_s(SIZE) == pytest.approx(SHARE * LINK)


@given(st.lists(st.tuples(st.floats(1e5, 1e8), st.floats(0.0, 0.2)), min_size=1, max_size=80))
def test_a_pace_is_below_what_the_link_has_shown(links: list[tuple[float, float]]) -> None:
    """Whatever the link does: no pace above the faster of the last two measurements, and each is followed by others."""
    pace, shown, paced = Pace(), list[float](), 0
    for link, late_s in links:
        rate = transfer(pace, link, late_s=late_s)
        if rate:
            assert rate == pytest.approx(SHARE * max(shown[-2:]))
            paced += 1
            assert paced <= 256
        else:
            shown.append(SIZE / (SIZE / link + late_s))
            paced = 0


@given(st.floats(1e5, 1e7), st.floats(0.05, 0.55))
def test_a_link_that_becomes_slower_is_noticed_by_the_next_transfer(link: float, part: float) -> None:
    pace = Pace()
    for _ in range(20):
        transfer(pace, link)
    transfer(pace, part * link)
    assert pace.bytes_per_s(SIZE) == 0.0 and pace.measures(SIZE)
    for _ in range(4):
        transfer(pace, part * link)
    assert pace.bytes_per_s(SIZE) <= part * link


@given(st.floats(0.0, 1e12), st.integers(1024, 1 << 22))
def test_messages_are_short_where_paced(rate: float, most: int) -> None:
    size = chunk_bytes(rate, most)
    assert 1 <= size <= most and (not rate or size <= max(4096, 0.01 * rate))
