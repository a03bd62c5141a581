"""Conversion of a run's events to MLflow's entries. Pure: no MLflow, no clock, no disk.

Equal events give equal entries with equal times, so sending them twice changes nothing: MLflow's stores keep one row
per (key, time, step, value).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.target import Target

__all__ = [
    "MetricRow",
    "RunState",
    "Segment",
    "flat",
    "metric_name",
    "point_metric",
    "transmission_metric",
    "window_metrics",
]

MetricRow = tuple[str, float, int, int]
"""Key, value, time in ms since 1970, step."""

_MANY_RANKS = 32  # With more ranks, MLflow gets only the spread over them; the event files have every rank.
_WINDOWS, _RANK_WINDOWS = 4000, 500  # Sent until every second one is, then as many until every fourth one is, ...
_PARAM_CHARS = 500  # Limit of the oldest servers; that of newer ones is 6,000.


@dataclass(slots=True)
class Segment:
    """The steps between two plans.

    Attributes:
        index: Position in the run, from 0.
        plan: The plan event that started it.
        first_s, last_s: Times of its first and its last event, seconds since the start of the log.
        first_step, last_step: Steps of its first and its last event.
        losses: Recorded losses.
        compute_s: Median compute time over the ranks, per window.
        slow: Number of windows in which some rank was slow.
        windows: Number of windows.
        outcome: The outcome event of the switch to it, empty before there is one.
    """

    index: int
    plan: dict[str, Any]
    first_s: float
    last_s: float
    first_step: int
    last_step: int
    losses: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    slow: int = 0
    windows: int = 0
    outcome: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Return the segment's figures: `duration_s`, `steps`, `step_s`, `compute_s`, `loss_first`, ..., `slow_share`.

        `predicted_speed` and `measured_speed` are relative to the previous plan, if they were compared.
        """
        steps, duration_s = self.last_step - self.first_step, self.last_s - self.first_s
        found = {
            "duration_s": duration_s,
            "steps": float(steps),
            "step_s": duration_s / steps if steps > 0 else math.nan,
            "compute_s": statistics.median(self.compute_s) if self.compute_s else math.nan,
            "noise_scale": self.noise[-1] if self.noise else math.nan,
            "loss_first": self.losses[0] if self.losses else math.nan,
            "loss_last": self.losses[-1] if self.losses else math.nan,
            "slow_share": self.slow / self.windows if self.windows else math.nan,
            "predicted_speed": _number(self.outcome.get("predicted"), math.nan),
            "measured_speed": _number(self.outcome.get("measured"), math.nan),
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


class RunState:
    """The state of a run after a number of events.

    Attributes:
        facts: Job facts, merged.
        segments: Segments so far; the last one is open.
        status: Status in the end event, None before it.
        windows: Number of windows.
        reached: `time_to_target_s` and `steps_to_target` once `facts["target"]`, `accuracy>=0.95` for example, has been
            reached.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.segments: list[Segment] = []
        self.status: str | None = None
        self.dropped = 0
        self.last_s = 0.0
        self.last_step = 0
        self.reached: dict[str, float] = {}
        self.windows = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event; damaged ones are ignored."""
        time_s, step = _number(event.get("time_s"), 0.0), int(_number(event.get("step"), self.last_step))
        self.last_s, self.last_step = max(self.last_s, time_s), max(self.last_step, step)
        kind = event.get("kind")
        if kind == "facts" and isinstance(event.get("values"), dict):
            self.facts.update(event["values"])
        elif kind == "plan" and not self._only_shares(event):
            self._advance(time_s, step)
            segment = Segment(len(self.segments), dict(event), time_s, time_s, step, step)
            self.segments.append(segment)
        elif kind == "window":
            self.windows += 1
            self._advance(time_s, step)
            self._add_window(event)
        elif kind == "outcome":
            self._advance(time_s, step)
            self._add_outcome(event)
        elif kind == "transmission":
            self._advance(time_s, step)
        elif kind == "metric":
            self._advance(time_s, step)
            self._add_point(str(event.get("name")), _number(event.get("value"), math.nan), time_s, step)
        elif kind == "end":
            self.status = str(event.get("status", "FINISHED"))
            self.dropped = int(_number(event.get("dropped"), 0.0))
            self._advance(time_s, step)

    def _only_shares(self, event: Mapping[str, Any]) -> bool:
        """Whether a plan is that of the last segment with other batch shares: logs once had a plan for each change."""
        old = self.segments[-1].plan.get("plan") if self.segments else None
        new = event.get("plan")
        if not isinstance(old, dict) or not isinstance(new, dict) or not (old.get("balanced") and new.get("balanced")):
            return False
        return type(new.get("epoch")) is int and old.get("epoch") == new["epoch"]

    def _add_outcome(self, event: Mapping[str, Any]) -> None:
        for segment in self.segments:
            if _number((segment.plan.get("plan") or {}).get("epoch"), 0.0) == _number(event.get("epoch"), -1.0):
                segment.outcome = dict(event)

    def totals(self) -> dict[str, float]:
        """Return the figures of the whole run."""
        found = {"duration_s": self.last_s, "steps": float(self.last_step), "segments": float(len(self.segments))}
        return {**found, "log_entries_dropped": float(self.dropped), **self.reached}

    def _advance(self, time_s: float, step: int) -> None:
        if self.segments:
            last = self.segments[-1]
            last.last_s, last.last_step = max(last.last_s, time_s), max(last.last_step, step)

    def _add_point(self, name: str, value: float, time_s: float, step: int) -> None:
        if name == "loss" and self.segments and math.isfinite(value):
            self.segments[-1].losses.append(value)
        target = Target.parse(self.facts.get("target", ""))
        if target is None or self.reached or name != target.name:
            return
        if target.reached(value):
            self.reached = {"time_to_target_s": time_s, "steps_to_target": float(step)}

    def _add_window(self, event: Mapping[str, Any]) -> None:
        if not self.segments:
            return
        last = self.segments[-1]
        last.windows += 1
        last.slow += bool(event.get("stragglers"))
        values = _finite((event.get("ranks") or {}).get("compute_s") or [])
        if values:
            last.compute_s.append(statistics.median(values))
        for name, target in (("loss", last.losses), ("noise_scale", last.noise)):
            value = _number(event.get(name), math.nan)
            if math.isfinite(value):
                target.append(value)


_NO_CURVES = ("step", "time_s", "batch", "microbatches")
"""Numbers of a window that are no metrics: what every row has, and what hardly ever changes."""


def window_metrics(event: Mapping[str, Any], began_unix_s: float, position: int = 0) -> Iterator[MetricRow]:
    """Yield a window as metrics: the job's numbers, and every reading's spread over the ranks and values per rank.

    In MLflow every value is a row of about 270 bytes, in a database that all runs share. So the longer a run is, the
    fewer of its windows are sent.

    Args:
        event: The window.
        began_unix_s: Start of the run.
        position: Number of windows before it in the event file, so that sending again chooses the same.
    """
    if not _is_sent(position, _WINDOWS):
        return
    at_ms, step = _at_ms(event, began_unix_s), int(_number(event.get("step"), 0.0))
    for name, value in event.items():
        number = _number(value, math.nan)
        if name not in _NO_CURVES and math.isfinite(number):
            yield metric_name(name), number, at_ms, step
    yield "stragglers", float(len(event.get("stragglers") or [])), at_ms, step
    for name, values in (event.get("ranks") or {}).items():
        known = _finite(values)
        if not known:
            continue
        for part, value in (("min", min(known)), ("median", statistics.median(known)), ("max", max(known))):
            yield metric_name(f"{name}/{part}"), value, at_ms, step
        if len(values) <= _MANY_RANKS and _is_sent(position, _RANK_WINDOWS):
            for rank, value in enumerate(values):
                if math.isfinite(_number(value, math.nan)):
                    yield metric_name(f"rank{rank}/{name}"), float(value), at_ms, step


def _is_sent(position: int, most: int) -> bool:
    """Whether an entry is one of those sent: all of the first `most`, and `most / 2` of each further doubling."""
    return position % (1 << (position // most).bit_length()) == 0


def point_metric(event: Mapping[str, Any], began_unix_s: float) -> Iterator[MetricRow]:
    """Yield a point of a curve as a metric; nothing if its value is not finite."""
    value = _number(event.get("value"), math.nan)
    if math.isfinite(value):
        step = int(_number(event.get("step"), 0.0))
        yield metric_name(str(event.get("name"))), value, _at_ms(event, began_unix_s), step


def transmission_metric(event: Mapping[str, Any], began_unix_s: float) -> Iterator[MetricRow]:
    """Yield what a decision on sending gains as a metric, `gain/overlap` for example; nothing if that is unknown."""
    yield from point_metric({**event, "name": f"gain/{event.get('what')}", "value": event.get("gain")}, began_unix_s)


def metric_name(name: str) -> str:
    """Return `name` as a name that MLflow accepts: its characters, no path that means another one, at most 250 long."""
    # One rejected name would keep the whole run from being sent.
    parts = (part.strip(". ") for part in re.sub(r"[^\w\-. /]", "_", name).split("/"))
    return "/".join(part for part in parts if part)[:250].strip("/. ") or "_"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested facts as MLflow's parameters: `hardware.cpus` -> `16`; lists are joined, long texts truncated."""
    found: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        elif isinstance(value, (list, tuple)):
            found[metric_name(key)] = ",".join(map(str, value))[:_PARAM_CHARS]
        elif value is not None:
            found[metric_name(key)] = str(value)[:_PARAM_CHARS]
    return found


def _at_ms(event: Mapping[str, Any], began_unix_s: float) -> int:
    return int(1e3 * (began_unix_s + _number(event.get("time_s"), 0.0)))


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def _finite(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
