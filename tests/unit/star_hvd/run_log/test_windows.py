"""Windows of a job with many ranks: the loss of days finds room, although readings per rank are large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from star_hvd.run_log import RunLog
from star_hvd.run_log.spool import read_events
from star_hvd.run_log.windows import PerRankReadings


def window(ranks: int, step: int) -> dict[str, Any]:
    names = ("compute_s", "wait_s", "offset_s", "silent_s")
    return {"step": step, "loss": 1.0 / step, "ranks": {name: [0.123456] * ranks for name in names}, "stragglers": []}


def logged(tmp_path: Path, ranks: int, count: int) -> list[dict[str, Any]]:
    now_s = iter(range(10 * count + 100))
    log = RunLog(
        tmp_path / "runs" / "one", rank=0, world_size=ranks, ship=False, background=False, max_bytes=1 << 20,
        clock=lambda: float(next(now_s)),
    )  # fmt: skip
    for step in range(1, count + 1):
        log.window(window(ranks, step))
        if step % 50 == 0:
            log.flush()
    log.close()
    return [event for _, event in read_events(log.directory / "events.jsonl") if event["kind"] == "window"]


def test_with_many_ranks_most_windows_have_the_job_s_own_numbers_only(tmp_path: Path) -> None:
    found = logged(tmp_path, 512, 1500)
    steps = [event["step"] for event in found]
    assert steps == list(range(1, 1501)), "every loss; with all readings the file has room for 40 windows"
    per_rank = [event["step"] for event in found if "ranks" in event]
    assert per_rank[:3] == [1, 9, 17] and 10 < len(per_rank) < 20
    assert per_rank[-1] > 8 * len(per_rank) + 20, "far into the job, ever more sparsely"


def test_with_few_ranks_every_window_has_the_readings_of_each(tmp_path: Path) -> None:
    assert all(len(event["ranks"]["wait_s"]) == 64 for event in logged(tmp_path, 64, 50))


def test_the_readings_per_rank_do_not_pass_their_part_of_the_file() -> None:
    readings, spent_bytes, last = PerRankReadings(512, 40_000_000), 0, 0
    for step in range(1, 30_000):
        text = readings.line(lambda: window(512, 7), lambda event: "x" * (50_000 if "ranks" in event() else 500))
        spent_bytes += len(text) if len(text) > 500 else 0
        last = step if len(text) > 500 else last
    assert spent_bytes < 10_050_000 and last > 5000
