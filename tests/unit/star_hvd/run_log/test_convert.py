"""What of a long run becomes rows in MLflow."""

from __future__ import annotations

import itertools

from star_hvd.run_log.convert import RunState, window_metrics

DAYS_S = 3 * 86_400
READINGS = ("compute_s", "wait_s", "offset_s", "silent_s", "link_bytes_per_s", "input_share", "starved_share")


def test_the_rows_of_a_job_of_days_are_bounded() -> None:
    event = {"kind": "window", "time_s": 1.0, "step": 1, "loss": 1.0, "ranks": {name: [1.0] * 32 for name in READINGS}}
    rows = [sum(1 for _ in window_metrics(event, 0.0, number)) for number in range(DAYS_S)]
    per_window = 2 + len(READINGS) * (3 + 32)
    assert set(rows[:500]) == {per_window}, "of a short job everything"
    assert all(count >= 2 + 3 * len(READINGS) for count in rows[:4000])
    assert sum(rows) < 1_500_000, "not 64 million"
    sent = [number for number, count in enumerate(rows) if count]
    assert max(after - before for before, after in itertools.pairwise(sent)) <= 128, "a minute or two apart"


def test_windows_are_numbered_by_the_event_file_so_that_sending_again_chooses_the_same() -> None:
    state = RunState()
    for step in range(3):
        state.take({"kind": "window", "time_s": float(step), "step": step})
    assert state.windows == 3
