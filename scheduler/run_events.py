"""Reads the lines of a run's log; lines that are not valid events are skipped.

A log may end in the middle of a line, come from a full disk, or be arbitrary data. Readers rely on the checks here:
numbers are finite and fit 64 bits, times and steps are not negative, and fields of known kinds have their types. An
event with an invalid field is skipped as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "MAX_RANKS",
    "SCHEMA",
    "other_schema",
    "read_description",
    "read_line",
    "read_mapping",
    "read_run_file",
    "sound",
]

SCHEMA = 1
"""Version of a run's files and of its runs in MLflow (tag `star.schema`). Readers refuse unknown versions."""

MAX_RANKS = 1 << 16
"""Most ranks of a logged run; events with higher ranks are damaged."""

_MOST = 1 << 63  # Limit of integers: MLflow and numpy have 64 bits.
_MOST_COUNT = 1 << 53  # Limit of integers that floats represent exactly.
_MOST_S = 1e10  # Limit of times: three centuries.
_DEEPEST = 12
_LONGEST = 64 << 20  # Bytes of a line; a window of 65,536 ranks has 20 MB.


def read_line(line: str | bytes) -> dict[str, Any] | None:
    """Read the event of a line; None if it is invalid."""
    event = read_mapping(line)
    if event is None or not sound(event):
        return None
    check = _KINDS.get(str(event.get("kind")))
    fits = _is_time(event.get("time_s")) and _is_step(event.get("step")) and (check is None or check(event))
    return event if fits else None


def read_mapping(text: str | bytes) -> dict[str, Any] | None:
    """Read a JSON mapping; None if the text is not one. NaN and infinity, which JSON does not have, are invalid."""
    if len(text) > _LONGEST:
        return None
    try:
        found = json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reject(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_run_file(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a file; invalid lines, such as the last one of a killed run, are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                event = read_line(line.rstrip("\n"))
                if event is not None:
                    yield event
    except OSError:
        return


def read_description(folder: Path) -> dict[str, Any]:
    """Contents of `run.json` in a run's folder; empty if it is missing or damaged, as beside reports copied alone."""
    try:
        return read_mapping((folder / "run.json").read_bytes()) or {}
    except OSError:
        return {}


def other_schema(version: object) -> str:
    """Why a run of this version is not read; empty if it can be, or if its version is unknown (None)."""
    if version is None or str(version) == str(SCHEMA):
        return ""
    return f"it is of version {version!r} of the run log; expected {SCHEMA}: read it with the star_hvd that wrote it"


def sound(value: Any, depth: int = 0) -> bool:
    """Whether a JSON value can be used and written again: no number is too large, no string has a lone surrogate."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return -_MOST <= value < _MOST
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return value.isascii() or _is_text(value)
    if depth >= _DEEPEST:
        return False
    if isinstance(value, list):
        return all([sound(item, depth + 1) for item in value])
    return all([sound(name) and sound(item, depth + 1) for name, item in value.items()])


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # A lone surrogate.
        return False
    return True


# ---- fields ---------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or null, which the log writes for values that are not finite."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_time(value: Any) -> bool:
    return value is None or (_is_number(value) and 0.0 <= value < _MOST_S)


def _is_step(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < _MOST_COUNT)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_RANKS


def _is_mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _numbers_at(values: Mapping[str, Any], *names: str) -> bool:
    return all(_is_number(values.get(name)) for name in names)


def _facts(event: Mapping[str, Any]) -> bool:
    values = event.get("values")
    if not isinstance(values, dict):
        return False
    optimizer = values.get("optimizer")
    if not _is_mapping(optimizer) or not _is_mapping(values.get("hardware")):
        return False
    if optimizer and not (_is_mapping(optimizer.get("hyper")) and _numbers_at(optimizer, "parameter_bytes")):
        return False
    return all(values.get(name) is None or isinstance(values[name], str) for name in ("target", "mode", "program"))


def _plan(event: Mapping[str, Any]) -> bool:
    prediction = event.get("prediction")
    if not _is_mapping(event.get("plan")) or not _is_mapping(prediction):
        return False
    return _is_number((event.get("plan") or {}).get("epoch"))


def _window(event: Mapping[str, Any]) -> bool:
    ranks, slow = event.get("ranks"), event.get("stragglers")
    if not _is_mapping(ranks) or not (slow is None or isinstance(slow, list)):
        return False
    for values in (ranks or {}).values():
        if not isinstance(values, list) or len(values) > MAX_RANKS or not all([_is_number(value) for value in values]):
            return False
    if not all(isinstance(item, dict) and _is_rank(item.get("rank")) for item in slow or []):
        return False
    timed = event.get("time_s") is not None and event.get("step") is not None
    parts = ("edge_part", "reduced_part", "pushed_part", "fixed_part")
    return timed and _numbers_at(event, "loss", "noise_scale", "comm_s", "comm_bytes", *parts)


def _outcome(event: Mapping[str, Any]) -> bool:
    return _numbers_at(event, "epoch", "predicted", "measured", "steps")


def _metric(event: Mapping[str, Any]) -> bool:
    return _numbers_at(event, "value")


def _end(event: Mapping[str, Any]) -> bool:
    status = event.get("status")
    return _numbers_at(event, "dropped", "thinned") and (status is None or isinstance(status, str))


def _step(event: Mapping[str, Any]) -> bool:
    # Unknown times are null; old logs do not have a rank in every line.
    times = ("compute_s", "wait_s", "input_s", "cpu_s", "runqueue_s", "load_s")
    known = all(_is_number(event.get(name)) and not _is_absurd(event.get(name)) for name in times)
    return known and (event.get("rank") is None or _is_rank(event["rank"]))


def _timeline(event: Mapping[str, Any]) -> bool:
    """Every bucket has an index, bytes and four times, every wait an index and two."""
    for name, width, known in (("buckets", 6, 2), ("waits", 3, 3)):
        rows = event.get(name)
        if not isinstance(rows, list) or not all([isinstance(row, list) and len(row) == width for row in rows]):
            return False
        if not all([_is_count(value) for row in rows for value in row[:known]]):
            return False
        if not all([value is None or _is_count(value) for row in rows for value in row[known:]]):
            return False
    named = all(isinstance(event.get(name), str) for name in ("mode", "means"))
    return named and all(_is_count(event.get(name)) for name in ("interval_us", "exposed_us", "steps"))


def _transmission(event: Mapping[str, Any]) -> bool:
    return _numbers_at(event, "gain") and all(isinstance(event.get(name), str) for name in ("what", "chosen", "text"))


def _is_count(value: Any) -> bool:
    """Whether a value is an integer that floats represent exactly: an index, bytes, microseconds."""
    return type(value) is int and abs(value) < _MOST_COUNT


def _is_absurd(time_s: Any) -> bool:
    return time_s is not None and not abs(time_s) < _MOST_S


_KINDS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "facts": _facts, "plan": _plan, "window": _window, "outcome": _outcome, "metric": _metric, "end": _end,
    "step": _step, "timeline": _timeline, "transmission": _transmission,
}  # fmt: skip
