"""The benchmark of strangers: what it computes from phases, and the ports of its control."""

from __future__ import annotations

import socket

import pytest

from benchmarks.machine.strangers import idle_listeners, strangers
from benchmarks.strangers import summarize


def phase(name: str, begin_s: float, beside: float, memory: float = 0.0) -> dict[str, float | str]:
    times: dict[str, float | str] = {"name": name, "begin_s": begin_s, "end_s": begin_s + 8.0}
    used = {"cores": 1.0, "beside_cores": beside, "stolen_cores": 0.0}
    return {**times, **used, "memory_bytes": memory, "connections_made": 9.0}


def test_phases_are_compared_with_the_quiet_one_before() -> None:
    ends_s = [0.1 * n for n in range(100)] + [10.0 + 0.2 * n for n in range(50)]
    phases = [phase("quiet", 1.0, 0.1), phase("flood", 11.0, 0.4, 5e6)]
    found = summarize(phases, ends_s, [(2.0, 0.5), (12.0, 1.0), (13.0, 3.0)])
    assert found["quiet"]["ratio"] == pytest.approx(1.0) and found["quiet"]["entry_s"] == 0.5
    flood = found["flood"]
    assert flood["ratio"] == pytest.approx(2.0) and flood["mean_ratio"] == pytest.approx(2.0, rel=0.05)
    assert flood["added_cores"] == pytest.approx(0.3) and flood["memory_bytes"] == 5e6
    assert (flood["entered"], flood["entry_s"], flood["longest_entry_s"]) == (2, 2.0, 3.0)


def test_the_control_lets_everybody_in_and_keeps_few() -> None:
    with idle_listeners(2) as addresses:
        assert len(set(addresses)) == 2
        with strangers("silent", 40, *addresses[0]) as made:
            first = socket.create_connection(addresses[1], timeout=30.0)
            others = [socket.create_connection(addresses[1], timeout=30.0) for _ in range(16)]
            assert first.recv(1) == b"", "the oldest of 17 is closed"
            for end in (first, *others):
                end.close()
    assert made[0] > 40, "who is closed comes again"
