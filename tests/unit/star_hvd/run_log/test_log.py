"""The run log while the disk takes nothing: what is held, how often it is tried, and what is written afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from star_hvd.run_log import RunLog
from star_hvd.run_log.spool import SpoolWriter, read_events

MIB = 1 << 20


class Disk:
    """In place of `SpoolWriter.append_lines`; takes nothing while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.attempts: list[int] = []  # Bytes of each.
        append_lines = SpoolWriter.append_lines

        def append(writer: SpoolWriter, lines: list[str]) -> None:
            self.attempts.append(sum(map(len, lines)))
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append_lines(writer, lines)

        monkeypatch.setattr(SpoolWriter, "append_lines", append)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def a_log(tmp_path: Path, clock: Clock) -> RunLog:
    return RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False, background=False, clock=clock)


def test_a_full_disk_costs_bounded_memory_and_small_writes_and_the_newest_entries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = Disk(monkeypatch), Clock()
    log = a_log(tmp_path, clock)
    for step in range(600):  # Of 350 kB each, 200 MiB in all: above the part of a file at which metrics are thinned.
        log.metric("a" * 350_000, 1.0, step)
        log.flush()
    assert log.thinned == 0 and "gets full" not in caplog.text, "what is held is in no file"
    assert log.dropped > 500, "the oldest ones, which were more than 16 MiB"
    disk.full, disk.attempts = False, []
    clock.now_s += 31.0
    log.flush()
    assert len(disk.attempts) > 10 and max(disk.attempts) < 1.5 * MIB, "each holds the interpreter lock"
    assert 15 * MIB < sum(disk.attempts) <= 16 * MIB
    log.metric("b", 1.0, 600)
    log.close()
    events = [event for _, event in read_events(log.directory / "events.jsonl")]
    steps = [event["step"] for event in events if event["kind"] == "metric"]
    assert steps == list(range(steps[0], 601)) and events[-1]["kind"] == "end"
    assert events[-1]["dropped"] == log.dropped == steps[0] + 1, "with the facts, the oldest entry of all"


def test_a_disk_that_stays_full_is_tried_ever_less_often_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock = Disk(monkeypatch), Clock()
    log = a_log(tmp_path, clock)
    for _ in range(2 * 600):  # Ten minutes.
        log.flush()
        clock.now_s += 0.5
    assert 20 <= len(disk.attempts) <= 28, "at first after half a second, then every 30 s"
    disk.full, disk.attempts = False, []
    log.close()
    assert disk.attempts, "also shortly after a failure"
    assert [event["kind"] for _, event in read_events(log.directory / "events.jsonl")] == ["facts", "end"]


def test_the_rest_of_what_is_held_is_written_once_after_a_failure_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock = Disk(monkeypatch), Clock()
    log = a_log(tmp_path, clock)
    for step in range(30):
        log.metric("a" * 350_000, 1.0, step)
    append, taken = SpoolWriter.append_lines, list[int]()

    def full_after_three(writer: SpoolWriter, lines: list[str]) -> None:
        disk.full = len(taken) >= 3
        append(writer, lines)
        taken.append(len(lines))

    with monkeypatch.context() as patch:
        patch.setattr(SpoolWriter, "append_lines", full_after_three)
        log.flush()
    disk.full = False
    log.close()
    events = [event for _, event in read_events(log.directory / "events.jsonl")]
    assert [event["step"] for event in events if event["kind"] == "metric"] == list(range(30))
    assert len(taken) == 3 and log.dropped == 0
