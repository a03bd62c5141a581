"""The order in which sources of a state are tried, their deadline, and how a search is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from star_hvd.engine.records import Snapshot
from star_hvd.engine.state_source import EndedServers, StateSources
from star_hvd.errors import DeadlineError
from star_hvd.telemetry import wait_time

DEADLINE_S = 3600.0  # Minutes are little of it, if the machine holds a test up.


class Source:
    """Gives the state of step 5 from the `after`th request on."""

    def __init__(self, name: str, log: list[str], after: float = 1, step: int = 5) -> None:
        self.name, self.log, self.after, self.step = name, log, after, step
        self.deadlines_s: list[float] = []

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        self.log.append(self.name)
        self.deadlines_s.append(deadline_s)
        found = len(self.deadlines_s) >= self.after and self.step >= min_step
        return Snapshot(self.step, [], []) if found else None


def until(turns: int) -> Callable[[], bool]:
    """True so many times."""
    left = iter([True] * turns)
    return lambda: next(left, False)


NEVER = float("inf")


def test_the_order_of_trial() -> None:
    log: list[str] = []
    servers, parent, ranks = Source("servers", log, NEVER), Source("parent", log, 2), Source("ranks", log, 2)
    found = StateSources(ended=servers, parent=parent, ranks=ranks).find(5, DEADLINE_S, lambda: True)
    assert found is not None and found.step == 5
    assert log == ["servers", "parent", "ranks", "servers", "parent"]


def test_no_source_uses_up_the_time_of_the_others() -> None:
    log: list[str] = []
    sources = [Source(name, log, NEVER) for name in ("servers", "parent", "ranks")]
    StateSources(*sources).find(5, DEADLINE_S, until(1))
    shares_s = [source.deadlines_s[0] for source in sources]
    assert all(share_s <= DEADLINE_S / (3 - number) for number, share_s in enumerate(shares_s))
    assert shares_s[0] > DEADLINE_S / 4 and shares_s[2] > DEADLINE_S / 2, "they took no time here"


def test_a_state_that_is_not_wanted_any_more_is_not_asked_for() -> None:
    log: list[str] = []
    sources = StateSources(ranks=Source("ranks", log, NEVER))
    assert sources.find(5, DEADLINE_S, lambda: False) is None and log == []
    assert sources.require(3, 5, DEADLINE_S, until(2)) is None and log == ["ranks"] * 2


def test_none_had_it_in_time() -> None:
    began_s = time.monotonic()
    sources = StateSources(parent=Source("parent", [], step=4))
    assert sources.find(5, 0.05, lambda: True) is None
    with pytest.raises(DeadlineError, match=r"rank 3 is behind: no source had the state of step 5 or later"):
        sources.require(3, 5, 0.05, lambda: True)
    assert time.monotonic() - began_s >= 0.1


def test_a_transfer_that_stops_after_minutes_does_not_use_up_the_time_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the time in which this process was stopped."""
    now_s = [0.0]
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Stops(Source):
        def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
            now_s[0] += 0.0 if self.deadlines_s else 1000.0
            return super().snapshot(min_step, deadline_s)

    ranks = Stops("ranks", [], after=2)
    assert StateSources(ranks=ranks).require(3, 5, 60.0, lambda: True) is not None
    assert ranks.deadlines_s == [60.0, 45.0]


def test_what_keeps_a_rank_from_going_on_ends_the_search() -> None:
    def wanted() -> bool:
        raise RuntimeError("the engine has failed")

    with pytest.raises(RuntimeError, match="the engine has failed"):
        StateSources(parent=Source("parent", [])).find(5, DEADLINE_S, wanted)


def test_servers_that_ended_before_are_not_asked() -> None:
    asked: list[float] = []

    def read(deadline_s: float) -> Snapshot | None:
        asked.append(deadline_s)
        return Snapshot(7, [], [])

    servers = EndedServers(7, read)
    assert servers.snapshot(8, 1.0) is None and asked == []
    found = servers.snapshot(7, 1.0)
    assert found is not None and found.step == 7 and asked == [1.0]
