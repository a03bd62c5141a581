"""Decisions on how something is sent: from the rank that makes them to the run log, MLflow's metrics and the page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from scheduler.run_events import read_line
from scheduler.transmission.decision import GRADIENTS, LATE, OVERLAP, PACE_UP, Decision
from star_hvd.run_log import RunLog
from star_hvd.run_log.convert import RunState, transmission_metric
from star_hvd.run_log.page import write_page
from star_hvd.run_log.spool import line_of, read_events
from star_hvd.run_log.story import read_story

FORM = Decision(GRADIENTS, "fp16", "gradients travel as fp16: reductions are 80% of a step", 0.4)
INT8 = Decision(LATE, "int8", "late gradients travel as int8: a push took <400 ms", 0.75)
PACE = Decision(PACE_UP, "2 MB/s", "pace of late gradients: 2 MB/s, 0.8 of the 2.5 MB/s measured")


def logged(tmp_path: Path) -> Path:
    logs = [RunLog(tmp_path / "runs" / "one", rank=r, world_size=2, ship=False, background=False) for r in (0, 1)]
    logs[0].transmission(8, FORM)
    logs[1].transmission(20, INT8)
    logs[1].transmission(4, PACE)
    for log in reversed(logs):
        log.close()
    return logs[0].directory


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for _, event in read_events(path) if event["kind"] == "transmission"]


def test_each_rank_logs_what_it_decides(tmp_path: Path) -> None:
    directory = logged(tmp_path)
    (common,) = events_of(directory / "events.jsonl")
    assert common.pop("time_s") >= 0.0
    assert common == {"kind": "transmission", "step": 8, **FORM.as_record()}
    assert (common["what"], common["chosen"], common["gain"]) == ("gradients", "fp16", 0.4)
    own = events_of(directory / "rank1.jsonl")
    assert [(one["step"], one["what"], one["chosen"], one["gain"]) for one in own] == [
        (20, "late gradients", "int8", 0.75), (4, "pace of late gradients", "2 MB/s", None)
    ]  # fmt: skip
    assert not events_of(directory / "rank0.jsonl")


def test_the_page_says_what_was_sent_how(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    directory = logged(tmp_path)
    assert [rank for rank, _ in read_story(directory).transmissions] == [0, 1, 1]
    raw = write_page(directory, tmp_path / "page.html").read_text()
    assert "<h2>What was sent how</h2>" in raw and "&lt;400 ms" in raw
    text = html.unescape(raw)
    cells = ["pace of late gradients", "1", "4", "2 MB/s", "", PACE.text]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert f"<td>gradients</td><td>0</td><td>8</td><td>fp16</td><td>40.0%</td><td>{FORM.text}</td>" in text
    assert text.index(PACE.text) < text.index(FORM.text) < text.index(INT8.text), "in the order of steps"


def test_a_run_without_decisions_has_a_page_without_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False, background=False)
    log.close()
    assert "What was sent how" not in write_page(log.directory, tmp_path / "page.html").read_text()


def test_a_known_gain_is_a_metric(tmp_path: Path) -> None:
    event = {"kind": "transmission", "time_s": 2.0, "step": 9, **Decision(OVERLAP, "kept", "x", 0.12).as_record()}
    state = RunState()
    state.take(event)
    assert state.last_step == 9 and state.last_s == 2.0
    assert list(transmission_metric(event, 1000.0)) == [("gain/overlap", 0.12, 1_002_000, 9)]
    assert not list(transmission_metric({**event, "gain": None}, 1000.0))


@pytest.mark.parametrize("damage", [{"gain": "much"}, {"text": None}, {"what": 3}, {"step": -1}, {"chosen": []}])
def test_damaged_decisions_are_skipped(damage: dict[str, Any]) -> None:
    event = {"kind": "transmission", "time_s": 2.0, "step": 9, **FORM.as_record()}
    assert read_line(line_of(event)) == event
    assert read_line(line_of({**event, **damage})) is None
