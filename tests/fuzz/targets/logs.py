"""Run logs, and the tables and traces that a job or a person brings."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgpack

from scheduler.cli import simulate
from scheduler.learning import logged_rows
from scheduler.plan.plan import Plan
from scheduler.run_events import read_line
from star_hvd.run_log import layout
from star_hvd.run_log.convert import RunState, flat, point_metric, transmission_metric, window_metrics
from star_hvd.run_log.page import rank_table, segment_table, sent_table, sentence, summary_of
from star_hvd.run_log.spool import read_events
from star_hvd.run_log.story import read_story
from tests.fuzz.mutate import damaged, damaged_bytes, packed
from tests.fuzz.run import Target

_PLAN = Plan.partial(2, 1, reason="rank 1 is slow").to_dict()
_EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "facts", "time_s": 0.0, "values": {
        "world_size": 2, "batch": 32, "target": "accuracy>=0.9", "mode": "partial(1)", "program": "train.py --mode x",
        "tags": {"a": "b"}, "hosts": ["h"], "hardware": {"cpu": "c", "cpus": 4},
        "optimizer": {"class": "SGD", "hyper": {"lr": 0.1, "initial_lr": 0.2}, "parameter_bytes": 4000,
                      "parameters": 1000}}},
    {"kind": "plan", "time_s": 0.0, "step": 0, "label": "sync", "mode": "sync", "reason": "", "plan":
        Plan.sync(2).to_dict(), "prediction": {}},
    {"kind": "window", "time_s": 1.0, "step": 10, "mode": "sync", "noise_scale": 4.0, "loss": 1.5, "folds": 0.0,
     "ranks": {"compute_s": [0.1, 0.4], "wait_s": [0.3, None], "link_bytes_per_s": [1e9, None]},
     "stragglers": [{"rank": 1, "slowdown": 4.0, "cause": "compute", "since_step": 3, "evidence": "-"}]},
    {"kind": "plan", "time_s": 1.5, "step": 11, "label": "partial(1)", "mode": "partial", "reason": "rank 1 is slow",
     "plan": {**_PLAN, "epoch": 1}, "prediction": {"sync": {"relative": 1.0, "low": 1.0, "high": 1.0, "reach": 1.0}}},
    {"kind": "metric", "time_s": 2.0, "step": 20, "name": "accuracy", "value": 0.8},
    {"kind": "outcome", "time_s": 2.5, "step": 25, "epoch": 1, "predicted": 1.5, "measured": 1.4, "against": "sync",
     "steps": 10.0, "harmful": False, "sentence": "x"},
    {"kind": "transmission", "time_s": 2.7, "step": 27, "what": "overlap", "chosen": "kept", "gain": 0.1, "text": "x"},
    {"kind": "metric", "time_s": 3.0, "step": 30, "name": "accuracy", "value": 0.95},
    {"kind": "metric", "time_s": 3.0, "step": 30, "name": "loss", "value": 0.5},
    {"kind": "end", "time_s": 4.0, "status": "FINISHED", "dropped": 0, "thinned": 0},
)  # fmt: skip
_ABOUT = {"schema": 1, "name": "one", "world_size": 2, "began_unix_s": 1.7e9, "home": True}
_STEPS = 12


def _reports(rank: int) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "time_s": 0.2 * step, "rank": rank, "step": step, "compute_s": 0.1 * (1 + rank),
         "wait_s": 0.01, "input_s": 0.0, "cpu_s": 0.1, "runqueue_s": 0.0, "late": rank == 1, "samples": 0.0,
         "loss": None}
        for step in range(_STEPS)
    ]  # fmt: skip


def _lines(events: Any) -> bytes:
    return "".join(f"{json.dumps(event, default=repr)}\n" for event in events).encode()


def _event(draw: random.Random) -> bytes:
    event = draw.choice((*_EVENTS, *_reports(1)))
    if draw.random() < 0.6:
        return _lines([damaged(event, draw, draw.choice((1, 1, 2, 3)))])
    return damaged_bytes(_lines([event]), draw)


def _read_event(data: bytes) -> None:
    """What the sender to MLflow does with each line, behind a beginning that is in order."""
    state = RunState()
    state.take(_EVENTS[0])
    state.take(_EVENTS[1])
    for line in data.split(b"\n"):
        event = read_line(line)
        if event is None:
            continue
        state.take(event)
        flat(state.facts)
        rows = [*window_metrics(event, 1.7e9)] if event.get("kind") == "window" else []
        rows += point_metric(event, 1.7e9) if event.get("kind") == "metric" else []
        rows += transmission_metric(event, 1.7e9) if event.get("kind") == "transmission" else []
        assert all(isinstance(at_ms, int) and -(1 << 63) <= step < 1 << 63 for _, _, at_ms, step in rows)
        for segment in state.segments:
            segment.summary()
            sentence(segment.plan)
        state.totals()
        json.dumps(layout.clean(state.facts)).encode()


def _folder(draw: random.Random) -> bytes:
    files: dict[str, Any] = {
        "run.json": dict(_ABOUT), "events.jsonl": list(_EVENTS), "rank0.jsonl": _reports(0), "rank1.jsonl": _reports(1)
    }
    chosen = draw.choice(("run.json", "events.jsonl", "events.jsonl", "events.jsonl", "rank0.jsonl", "rank1.jsonl"))
    if draw.random() < 0.7:
        files[chosen] = damaged(files[chosen], draw, draw.choice((1, 2, 4)))
    made = {
        name: json.dumps(what, default=repr).encode() if name == "run.json" or not isinstance(what, list)
        else _lines(what)
        for name, what in files.items()
    }  # fmt: skip
    if draw.random() < 0.4:
        made[chosen] = damaged_bytes(made[chosen], draw)
    if draw.random() < 0.05:
        del made[chosen]
    return packed(made)


_scratch: list[Path] = []


def scratch_folder() -> Path:
    """A folder that is used again by every input."""
    if not _scratch:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        _scratch.append(Path(tempfile.mkdtemp(prefix="star-fuzz-", dir=memory)))
        atexit.register(shutil.rmtree, _scratch[0], ignore_errors=True)
    folder = _scratch[0] / "runs" / "one"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _read_folder(data: bytes) -> None:
    folder = scratch_folder()
    for name, content in msgpack.unpackb(data).items():
        (folder / name).write_bytes(content)
    for _, event in read_events(folder / "events.jsonl"):
        assert isinstance(event, dict)
    try:
        story = read_story(folder)
        texts = [summary_of(story), rank_table(story), segment_table(story), sent_table(story)]
        "\n".join(texts).encode()
    except ValueError as error:
        assert str(folder) in str(error), "a refusal names the run"
    try:
        simulate.read_run(folder)
    except ValueError:
        pass
    run = logged_rows.read_run(folder)
    if run is not None:
        assert run.key
        logged_rows.windows(run)
    logged_rows.real_rows(folder.parent, "1")


TARGETS = (
    Target("event", _event, _read_event, (), 8.0),
    Target("run-log", _folder, _read_folder, (), 0.2),
)
