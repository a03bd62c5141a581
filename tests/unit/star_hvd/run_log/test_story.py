"""A run read from its files: that of a job of days costs bounded memory, and its reader tells that it is at work."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from scheduler.records import StepReport, StepTimes
from star_hvd.run_log import RunLog, layout
from star_hvd.run_log.figures import ranks_svg
from star_hvd.run_log.page import rank_table
from star_hvd.run_log.spool import line_of
from star_hvd.run_log.story import read_story


def a_run(tmp_path: Path, lines: dict[str, list[dict[str, Any]]]) -> Path:
    """A run's folder whose files have these lines after those of an empty run."""
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False, background=False)
    log.close()
    for name, events in lines.items():
        with (log.directory / name).open("a", encoding="utf-8") as file:
            file.writelines(map(line_of, events))
    return log.directory


def reports(count: int, rank: int = 0) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "time_s": 0.1 * step}
        | StepReport(rank=rank, step=step, times=StepTimes(0.01 * (1 + step % 3)), wait_s=0.002).as_record()
        | {"late": step % 4 == 0}
        for step in range(count)
    ]


def timeline(mode: str, number: int) -> dict[str, Any]:
    about = {"kind": "timeline", "time_s": float(number), "step": number, "mode": mode, "means": "", "steps": 1}
    return {**about, "interval_us": 1000, "exposed_us": number, "buckets": [[0, 1, 2, 3, 4, 5]] * 20, "waits": []}


def test_a_long_file_is_read_in_bounded_memory_with_signs_of_progress(tmp_path: Path) -> None:
    folder = a_run(tmp_path, {"rank0.jsonl": reports(20_000), "rank1.jsonl": reports(9000, 1)})
    seen: list[int] = []
    tracemalloc.start()
    try:
        story = read_story(folder, lambda: seen.append(1))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) >= 2 + 20_000 // 4096 + 9000 // 4096, "within files, and after each"
    size_bytes = (folder / layout.EVENTS).stat().st_size + (folder / "rank0.jsonl").stat().st_size
    assert most_bytes < 1.2 * size_bytes, "as mappings the reports take several bytes per byte of file"
    assert story.steps[0] == pytest.approx((20_000, 0.02, 0.002, 0.25))
    assert story.steps[1][0] == 9000


def test_of_thousands_of_windows_the_page_keeps_an_even_part(tmp_path: Path) -> None:
    ranks = {"compute_s": [0.1, 0.2], "wait_s": [0.0, 0.1]}
    windows = [{"kind": "window", "time_s": float(n), "step": n, "loss": 1.0, "ranks": ranks} for n in range(10_000)]
    story = read_story(a_run(tmp_path, {"events.jsonl": windows}))
    steps = [window["step"] for window in story.windows]
    assert 2000 <= len(steps) <= 4000 and len({b - a for a, b in itertools.pairwise(steps)}) == 1
    assert steps[-1] > 9990 and story.windows[0]["ranks"] == {"compute_s": [0.1, 0.2]}
    assert story.state.last_step == 9999, "the run's figures are those of all windows"
    assert any(pace > 0.0 for pace in story.pace[1]), "of a rank whose file is elsewhere the windows tell the pace"


def test_timelines_are_kept_of_each_mode_s_first_rank_and_few_of_each(tmp_path: Path) -> None:
    own = [timeline("sync", n) for n in range(1000)] + [timeline("local(4)", n) for n in range(3)]
    other = [timeline("sync", 5), timeline("partial(1)", 7)]
    story = read_story(a_run(tmp_path, {"rank0.jsonl": own, "rank1.jsonl": other}))
    assert [(rank, event["mode"]) for rank, event in story.samples if event["mode"] != "sync"] == [
        (0, "local(4)"), (0, "local(4)"), (0, "local(4)"), (1, "partial(1)")
    ]  # fmt: skip
    exposed_us = [event["exposed_us"] for rank, event in story.samples if (rank, event["mode"]) == (0, "sync")]
    assert 100 <= len(exposed_us) <= 200 and exposed_us[-1] > 980
    assert sorted(exposed_us)[len(exposed_us) // 2] == pytest.approx(500, abs=10), "the median stays"


def test_a_window_counts_for_the_time_it_stands_for_and_its_bar_is_short(tmp_path: Path) -> None:
    """Late in a long job windows are hours apart."""
    pytest.importorskip("matplotlib")
    slow = [{"rank": 1, "cause": "compute"}]
    times_s = [*range(1, 101), 1100, 2100]
    windows = [
        {"kind": "window", "time_s": float(at), "step": at, "stragglers": slow if at in (50, 2100) else []}
        for at in times_s
    ]
    story = read_story(a_run(tmp_path, {"events.jsonl": windows}))
    assert sum(story.spans_s()) == 2100.0 and story.spans_s()[-1] == 1000.0
    assert f"<td>{1001 / 2100:.0%}</td><td>compute</td>" in rank_table(story)
    bars: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.broken_barh", lambda axes, spans, *_, **more: bars.extend(spans))
        ranks_svg(story)
    assert bars == [(49.0, 1.0), (2097.0, 3.0)]


def test_adjacent_windows_of_a_straggler_are_one_bar_and_one_artist_has_all_its_bars(tmp_path: Path) -> None:
    """A bar for each window made the page of a long job with stragglers take minutes."""
    pytest.importorskip("matplotlib")

    def stragglers(at: int) -> list[dict[str, Any]]:
        slow = [(0, "link", range(1, 40)), (1, "compute", [*range(3, 20), *range(25, 30)]), (1, "input", range(20, 25))]
        return [{"rank": rank, "cause": cause} for rank, cause, when in slow if at in when]

    windows = [
        {"kind": "window", "time_s": round(0.7 * at, 6), "step": at, "stragglers": stragglers(at)}
        for at in range(1, 51)
    ]
    story = read_story(a_run(tmp_path, {"events.jsonl": windows}))
    drawn: dict[float, list[list[tuple[float, float]]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "matplotlib.axes.Axes.broken_barh",
            lambda axes, spans, place, **more: drawn.setdefault(place[0], []).append(list(spans)),
        )
        ranks_svg(story)
    assert [[pytest.approx(bar) for bar in bars] for bars in drawn[0.25]] == [[(0.0, 27.3)]]
    assert drawn[1.25] == [
        [pytest.approx((1.4, 11.9)), pytest.approx((16.8, 3.5))], [pytest.approx((13.3, 3.5))]
    ]  # fmt: skip
