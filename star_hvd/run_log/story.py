"""A run read from its files, for its page and figures."""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.balance.usual_batches import UsualBatches
from star_hvd.run_log import layout
from star_hvd.run_log.convert import RunState
from star_hvd.run_log.spool import read_events

__all__ = ["BINS", "RunStory", "read_story"]

BINS = 150  # Equal parts of a run; the page shows one colour per part and rank.
_MOST_POINTS = 4000  # Maximum per curve; more are not visible in a browser.
_MOST_SAMPLES = 200  # Timelines kept per mode, of which the page draws one.
_FIRST_SPAN_S = 1.0  # The usual interval of windows.
_PROGRESS_EVENTS = 4096  # A few MB of a file.


class RunStory:
    """The data of a run's page.

    Attributes:
        name: The run's name.
        world_size: Number of ranks.
        state: The state after all events.
        windows: Window events, thinned evenly if there are thousands; of the readings per rank only `compute_s`.
        curves: Name to (time_s, step, value) points, thinned evenly.
        steps: Per rank, the number of step reports, their median compute and wait time in seconds, and the part that
            was late. Compute times are those of batches of the usual size.
        pace: Per rank, its compute time in seconds, likewise, in each of `BINS` equal parts of the run, NaN if unknown.
        samples: Rank and event of sampled steps' timelines: of every mode those of the first rank that has any, thinned
            evenly if there are hundreds.
        transmissions: Rank and event of decisions on how something was sent, of every rank thinned evenly if there are
            hundreds.
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
        self.transmissions: list[tuple[int, dict[str, Any]]] = []
        self.recorded: dict[str, tuple[float, float]] = {}

    def spans_s(self) -> list[float]:
        """Return the time since the previous window, of every window: what it stands for after thinning."""
        times = [float(window["time_s"]) for window in self.windows]
        first = [max(0.0, min(_FIRST_SPAN_S, times[0]))] if times else []
        return first + [max(0.0, end_s - begin_s) for begin_s, end_s in itertools.pairwise(times)]

    @property
    def end_s(self) -> float:
        """End of the time axes, seconds since the start of the log."""
        return max(self.state.last_s, 1e-3)


def read_story(directory: Path, on_progress: Callable[[], None] = lambda: None) -> RunStory:
    """Read a run's folder.

    Args:
        directory: The run's folder.
        on_progress: Called now and then: the files of a job of days have gigabytes.

    Raises:
        ValueError: The folder contains no run, a damaged one, or one of another version.
    """
    about = layout.read_about(directory)
    story, usual = RunStory(about["name"], about["world_size"]), UsualBatches()
    windows, decisions = _Thinned(_MOST_POINTS), _Thinned(_MOST_SAMPLES)
    for event in _events(directory / layout.EVENTS, on_progress):
        story.state.take(event)
        usual.take(event)
        if event.get("kind") == "window":
            own_s = (event.get("ranks") or {}).get("compute_s") or []
            windows.add({**event, "ranks": {"compute_s": own_s}})
            value = event.get("loss")
            if isinstance(value, float):
                story.curves.setdefault("loss", []).append((event["time_s"], event["step"], value))
        elif event.get("kind") == "transmission":
            decisions.add((0, event))
        elif event.get("kind") == "metric" and isinstance(event.get("value"), (int, float)):
            name, value = str(event.get("name")), float(event["value"])
            at = (event.get("time_s") or 0.0, event.get("step") or 0)
            story.curves.setdefault(name, []).append((*at, value))
            least, most = story.recorded.get(name, (math.inf, -math.inf))
            story.recorded[name] = (min(least, value), max(most, value))
    story.windows, story.transmissions = windows.items, decisions.items
    story.curves = {name: _thinned(points) for name, points in story.curves.items()}
    _read_ranks(story, directory, usual, on_progress)
    return story


def _read_ranks(story: RunStory, directory: Path, usual: UsualBatches, on_progress: Callable[[], None]) -> None:
    """Add the ranks' own files; those of other hosts' ranks are missing."""
    sampled: set[tuple[str, str]] = set()
    for rank in range(story.world_size):
        reports = _Reports()
        samples: dict[tuple[str, str], _Thinned] = {}
        decisions = _Thinned(_MOST_SAMPLES)
        for event in _events(directory / f"rank{rank}.jsonl", on_progress):
            if event.get("kind") == "step":
                reports.take(event)
            elif event.get("kind") == "timeline" and (mode := (event["mode"], event["means"])) not in sampled:
                samples.setdefault(mode, _Thinned(_MOST_SAMPLES)).add((rank, event))
            elif event.get("kind") == "transmission":
                decisions.add((rank, event))
        sampled |= samples.keys()
        story.samples += [sample for same in samples.values() for sample in same.items]
        story.transmissions += decisions.items
        compute_s = reports.usual_s(usual)
        if compute_s:
            late = reports.late / len(compute_s)
            story.steps[rank] = (len(compute_s), statistics.median(compute_s), statistics.median(reports.wait_s), late)
        paces = zip(reports.time_s, compute_s, strict=True) if compute_s else slow_points(story.windows, rank)
        story.pace[rank] = binned(paces, story.end_s)
        on_progress()


def _events(path: Path, on_progress: Callable[[], None]) -> Iterable[dict[str, Any]]:
    for number, (_, event) in enumerate(read_events(path), 1):
        yield event
        if number % _PROGRESS_EVENTS == 0:
            on_progress()


class _Reports:
    """One rank's step reports as columns. There may be a million, which as mappings take gigabytes."""

    def __init__(self) -> None:
        self.time_s, self.wait_s = array("d"), array("d")
        self.late = 0
        self._steps, self._compute_s, self._samples = array("q"), array("d"), array("d")

    def take(self, report: Mapping[str, Any]) -> None:
        """Add a report; unknown numbers count as 0."""
        self.time_s.append(report.get("time_s") or 0.0)
        self.wait_s.append(report.get("wait_s") or 0.0)
        self.late += bool(report.get("late"))
        self._steps.append(report.get("step") or 0)
        self._compute_s.append(report.get("compute_s") or 0.0)
        samples = report.get("samples")
        self._samples.append(samples if isinstance(samples, (int, float)) else 0.0)

    def usual_s(self, usual: UsualBatches) -> Sequence[float]:
        """Return the compute times as those of batches of the usual size."""
        return array("d", usual.usual_s(self._steps, self._compute_s, self._samples))


class _Thinned:
    """At most a number of items, evenly over all that were added.

    Args:
        most: The number.
    """

    def __init__(self, most: int) -> None:
        self.items: list[Any] = []
        self._most, self._seen, self._stride = most, 0, 1

    def add(self, item: Any) -> None:
        """Add an item; every second one is given up whenever there are too many."""
        if self._seen % self._stride == 0:
            self.items.append(item)
        self._seen += 1
        if len(self.items) > self._most:
            del self.items[1::2]
            self._stride *= 2


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
    bins = [array("d") for _ in range(BINS)]
    for time_s, compute_s in points:
        if time_s >= 0.0 and compute_s > 0.0:
            bins[min(BINS - 1, int(BINS * time_s / end_s))].append(compute_s)
    found = [statistics.median(values) if values else math.nan for values in bins]
    # A report is made at the end of its step.
    for index in range(BINS - 2, -1, -1):
        if math.isnan(found[index]):
            found[index] = found[index + 1]
    return found


def _thinned(points: list[Any]) -> list[Any]:
    stride = -(-len(points) // _MOST_POINTS)
    return points[::stride] if stride > 1 else points
