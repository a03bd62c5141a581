"""The timelines of single steps: from the log to the page, and which parts of a way are hidden."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scheduler.run_events import read_line
from star_hvd.run_log import RunLog, layout
from star_hvd.run_log.page import write_page
from star_hvd.run_log.spool import line_of
from star_hvd.run_log.story import read_story
from star_hvd.run_log.timeline_figure import chosen_samples, hidden_and_exposed
from star_hvd.telemetry.step_timeline import BucketTimes, StepSample


def sample(mode: str, exposed_s: float, means: str = "") -> StepSample:
    buckets = [BucketTimes(0, 4000, 0.01, 0.02, 0.06), BucketTimes(1, 4000, 0.02, 0.03, None), BucketTimes(-1, 8)]
    return StepSample(
        8, mode, means, 5.0, interval_s=0.05, exposed_s=exposed_s, buckets=buckets,
        waits=[(0, 0.05 - exposed_s, 0.05)],
    )  # fmt: skip


def test_from_the_log_to_the_page(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False, background=False)
    for exposed_s in (0.01, 0.02, 0.04):
        log.timeline(sample("sync", exposed_s).as_record())
    log.timeline(sample("local(4)", 0.0, "background").as_record())
    log.close()
    found = chosen_samples(read_story(log.directory).samples)
    assert [(rank, event["mode"], event["exposed_us"]) for rank, event in found] == [
        (0, "sync", 20_000), (0, "local(4)", 0)
    ]  # fmt: skip
    text = write_page(log.directory, tmp_path / "page.html").read_text()
    assert "<h2>One step</h2>" in text and "hidden behind compute" in text


def test_a_log_without_samples_has_a_page_without_them(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False, background=False)
    log.close()
    assert layout.read_about(log.directory)
    assert "One step" not in write_page(log.directory, tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "damage",
    [
        {"buckets": [[0, 1, 2]]}, {"buckets": None}, {"buckets": [[0, "x", 1, 1, 1, 1]]}, {"waits": [[0, 1]]},
        {"interval_us": None}, {"steps": 1.5}, {"mode": 3}, {"waits": [[0, None, 1]]}, {"waits": [[0, 1, None]]},
        {"buckets": [[0, 1, 1, 1, 1, 1e300]]}, {"interval_us": 1 << 60}, {"interval_us": True},
    ],
)  # fmt: skip
def test_damaged_samples_are_skipped(damage: dict[str, object]) -> None:
    event = {"kind": "timeline", "time_s": 1.0, **sample("sync", 0.01).as_record()}
    assert read_line(line_of(event)) == event
    assert read_line(line_of({**event, **damage})) is None


def test_hidden_and_exposed_parts_make_up_the_way() -> None:
    """Against a look at every millisecond."""
    draw = random.Random(5)
    for _ in range(300):
        points = sorted(draw.sample(range(100), 2 * draw.randrange(6)))
        waits = [(float(a), float(b)) for a, b in zip(points[::2], points[1::2], strict=True)]
        begin = draw.randrange(99)
        way = (float(begin), float(draw.randrange(begin + 1, 101)))
        hidden, exposed = hidden_and_exposed(way, waits)
        for at in range(100):
            middle = at + 0.5
            inside = way[0] < middle < way[1]
            waiting = any(a < middle < b for a, b in waits)
            assert any(a < middle < b for a, b in exposed) == (inside and waiting)
            assert any(a < middle < b for a, b in hidden) == (inside and not waiting)
