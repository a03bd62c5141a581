"""A run read from its files, for its page and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.balance.usual_batches import UsualBatches
from star_hvd.run_log import layout
from star_hvd.run_log.convert import RunState
from star_hvd.run_log.spool import read_events

__all__ = ["BINS", "RunStory", "read_story"]

BINS = 150  # Equal parts of a run; the page shows one colour per part and rank.
_MOST_POINTS = 4000  # Maximum per curve; more are not visible in a browser.


class RunStory:
    """The data of a run's page.

    Attributes:
        name: The run's name.
        world_size: Number of ranks.
        state: The state after all events.
        windows: Window events, thinned evenly if there are thousands.
        curves: Name to (time_s, step, value) points, thinned likewise.
        steps: Per rank, the number of step reports, their median compute and wait time in seconds, and the part that
            was late. Compute times are those of batches of the usual size.
        pace: Per rank, its compute time in seconds, likewise, in each of `BINS` equal parts of the run, NaN if unknown.
        samples: Rank and event of every sampled step's timeline, rank by rank.
        recorded: Smallest and largest value of every curve of `hvd.record_metric`.
    """

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.state = RunState()
        self.windows: list[dict[str, Any]] = []
        self.curves: dict[str, list[tuple[float, int, float]]] = {}
        self.steps: dict[int, tuple[int, float, float, float]] = {}
        self.pace: dict[int, list[float]] = {}
        self.samples: list[tuple[int, dict[str, Any]]] = []
        self.recorded: dict[str, tuple[float, float]] = {}

    @property
    def end_s(self) -> float:
        """End of the time axes, seconds since the start of the log."""
        return max(self.state.last_s, 1e-3)


def read_story(directory: Path) -> RunStory:
    """Read a run's folder.

    Raises:
        ValueError: The folder contains no run, a damaged one, or one of another version.
    """
    about = layout.read_about(directory)
    story, usual = RunStory(about["name"], about["world_size"]), UsualBatches()
    for _, event in read_events(directory / layout.EVENTS):
        story.state.take(event)
        usual.take(event)
        if event.get("kind") == "window":
            story.windows.append(event)
            value = event.get("loss")
            if isinstance(value, float):
                story.curves.setdefault("loss", []).append((event["time_s"], event["step"], value))
        elif event.get("kind") == "metric" and isinstance(event.get("value"), (int, float)):
            name, value = str(event.get("name")), float(event["value"])
            at = (event.get("time_s") or 0.0, event.get("step") or 0)
            story.curves.setdefault(name, []).append((*at, value))
            least, most = story.recorded.get(name, (math.inf, -math.inf))
            story.recorded[name] = (min(least, value), max(most, value))
    story.windows = _thinned(story.windows)
    story.curves = {name: _thinned(points) for name, points in story.curves.items()}
    for rank in range(story.world_size):
        reports, samples = _of_rank(directory / f"rank{rank}.jsonl", usual)
        story.samples += [(rank, event) for event in samples]
        if reports:
            story.steps[rank] = _summary_of(reports)
        paces = [(float(r.get("time_s") or 0.0), float(r.get("compute_s") or 0.0)) for r in reports]
        story.pace[rank] = binned(paces or slow_points(story.windows, rank), story.end_s)
    return story


def _of_rank(path: Path, usual: UsualBatches) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a rank's reports, with times of usual batches, and the timelines of its sampled steps.

    There are none if its file is on another host.
    """
    found: dict[str, list[dict[str, Any]]] = {"step": [], "timeline": []}
    for _, event in read_events(path) if path.exists() else ():
        if (same := found.get(str(event.get("kind")))) is not None:
            same.append(event)
    reports = found["step"]
    steps, times_s, samples = (
        [report.get(name) or 0 for report in reports] for name in ("step", "compute_s", "samples")
    )
    for report, compute_s in zip(reports, usual.usual_s(steps, times_s, samples), strict=True):
        report["compute_s"] = compute_s
    return reports, found["timeline"]


def slow_points(windows: Sequence[Mapping[str, Any]], rank: int) -> list[tuple[float, float]]:
    """Return times and compute times of a rank in the windows; they lag, being medians of the last reports."""
    found = []
    for window in windows:
        values = (window.get("ranks") or {}).get("compute_s") or []
        if rank < len(values) and isinstance(values[rank], (int, float)):
            found.append((float(window["time_s"]), float(values[rank])))
    return found


def binned(points: Iterable[tuple[float, float]], end_s: float) -> list[float]:
    """Return the median compute time in each part of the run; without a report, that of the step in progress."""
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for time_s, compute_s in points:
        if time_s >= 0.0 and compute_s > 0.0:
            bins[min(BINS - 1, int(BINS * time_s / end_s))].append(compute_s)
    found = [statistics.median(values) if values else math.nan for values in bins]
    # A report is made at the end of its step.
    for index in range(BINS - 2, -1, -1):
        if math.isnan(found[index]):
            found[index] = found[index + 1]
    return found


def _summary_of(reports: Sequence[Mapping[str, Any]]) -> tuple[int, float, float, float]:
    compute, wait = ([float(r.get(name) or 0.0) for r in reports] for name in ("compute_s", "wait_s"))
    late = sum(bool(report.get("late")) for report in reports) / len(reports)
    return len(reports), statistics.median(compute), statistics.median(wait), late


def _thinned(points: list[Any]) -> list[Any]:
    stride = -(-len(points) // _MOST_POINTS)
    return points[::stride] if stride > 1 else points
