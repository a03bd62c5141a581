"""What a machine's readings say about a slow rank, against those of the others."""

from __future__ import annotations

import pytest

from scheduler.diagnosis.machine import MachineStats, machine_evidence, throttled_shares

CALM = MachineStats(throttled_share=0.0, pressure_share=0.1, gpu_clock_share=0.98, gpu_throttled=0.0)


def _said(**own: float) -> str:
    return machine_evidence(1, [CALM, MachineStats(**own), CALM])


@pytest.mark.parametrize(
    ("own", "phrase"),
    [
        ({"throttled_share": 0.62}, "a CPU quota throttles it 62 % of the time"),
        ({"pressure_share": 0.8}, "tasks of its host wait for a CPU 80 % of the time"),
        (
            {"gpu_clock_share": 0.45, "gpu_throttled": 1.0, "gpu_temperature_c": 93.0},
            "its GPU is clocked down to 45 % for power or heat at 93 C",
        ),
        ({"gpu_clock_share": 0.45, "gpu_throttled": 0.0}, "its GPU is clocked down to 45 %"),
        ({"nic_drops_per_s": 200.0}, "its network interface loses 200 packets per second"),
    ],
)
def test_what_stands_out_is_said(own: dict[str, float], phrase: str) -> None:
    assert _said(**own) == phrase


@pytest.mark.parametrize(
    "own", [{}, {"throttled_share": 0.05}, {"pressure_share": 0.3}, {"gpu_clock_share": 0.9}, {"nic_drops_per_s": 1.0}]
)
def test_what_is_usual_or_unknown_is_not(own: dict[str, float]) -> None:
    assert _said(**own) == ""


def test_what_all_share_explains_nobody() -> None:
    pressed = MachineStats(pressure_share=0.9, gpu_clock_share=0.5)
    assert machine_evidence(1, [pressed, pressed, pressed]) == ""


def test_several_reasons_are_joined() -> None:
    assert _said(throttled_share=0.5, nic_drops_per_s=50.0).count("; ") == 1


def test_a_quota_of_one_rank_starves_it_and_one_of_all_starves_nobody() -> None:
    held, free, unknown = MachineStats(throttled_share=0.7), MachineStats(throttled_share=0.0), MachineStats()
    assert throttled_shares([free, held, unknown]) == [0.0, 0.7, 0.0]
    assert throttled_shares([held, held, held]) == [0.0, 0.0, 0.0]
