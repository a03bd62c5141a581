"""Readings of a rank: the first one at its start, then with what other jobs of the host can give up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from star_hvd.channel.messages.switch import MachineNote
from star_hvd.runtime import machine_notes
from star_hvd.runtime.machine_notes import MachineNotes
from star_hvd.telemetry.neighbours import Registry
from star_hvd.telemetry.resources import Resources


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAR_NEIGHBOURS_DIR", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def driver(compute_s: float, wait_s: float) -> Any:
    times = SimpleNamespace(compute_s=compute_s)
    engine = SimpleNamespace(plan=SimpleNamespace(plan_id=0))
    reporter = SimpleNamespace(times=times, wait_s=wait_s, steps_logged=0, engine=engine, log=None, number=0)
    return SimpleNamespace(reporter=reporter)


def test_the_first_note_comes_before_the_first_step(folder: Path) -> None:
    sent: list[tuple[Any, bool]] = []
    notes = MachineNotes(0, lambda message, urgent: sent.append((message, urgent)), {})
    time.sleep(0.2)
    notes.start("job", None)
    notes.start("job", None)
    try:
        assert [(type(message), urgent) for message, urgent in sent[:1]] == [(MachineNote, True)]
        assert sent[0][0].free_cpu_cores >= 0.0 or not Path("/proc/stat").exists()
        limit_s = time.monotonic() + 60.0
        while not list(folder.glob("*.json")):
            assert time.monotonic() < limit_s
            time.sleep(0.05)
    finally:
        notes.stop(60.0)
    assert not list(folder.glob("*.json"))


class Sampler:
    """Samples when it is told to."""

    made: Sampler

    def __init__(self, on_sample: Callable[[Resources], None], gpu: str | None) -> None:
        self.on_sample = on_sample

    def start(self) -> None:
        Sampler.made = self


def test_a_start_too_short_to_measure_is_unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_notes, "time", SimpleNamespace(monotonic=lambda: 7.0))
    monkeypatch.setattr(machine_notes, "ResourceSampler", Sampler)
    sent: list[Any] = []
    notes = MachineNotes(0, lambda message, urgent: sent.append(message), {})
    notes.start("job", None)
    assert math.isnan(sent[0].free_cpu_cores)


def test_waits_beyond_the_least_one_are_slack_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_notes, "ResourceSampler", Sampler)
    sent: list[Any] = []
    own = driver(0.1, 0.01)
    notes = MachineNotes(0, lambda message, urgent: sent.append(message), {0: own})
    notes.start("a", None)
    other = Registry("b", 0)
    other.file_name = "b.json"
    seen = []
    for wait_s in (0.01, 0.01, 0.01, *[0.06] * 12):  # A rank elsewhere became slow; the collective takes 10 ms.
        own.reporter.wait_s = wait_s
        own.reporter.steps_logged += 1
        Sampler.made.on_sample(Resources(cpu_share=0.8))
        (entry,) = other.others()
        seen.append(entry.slack_s)
    assert seen[0] == 0.0 and seen[-1] == pytest.approx(0.05) and seen == sorted(seen)
    assert entry.step_s == pytest.approx(0.16) and entry.cores == 0.8
    assert sent[-1].neighbour_ranks == 0.0
    cpus = entry.cpus
    other.write(cpus=cpus, cores=2.0, step_s=0.2, slack_s=0.1)
    Sampler.made.on_sample(Resources(cpu_share=0.8))
    assert (sent[-1].neighbour_ranks, sent[-1].neighbour_slack_cores) == (1.0, pytest.approx(1.0))
    own.reporter.wait_s = 0.01
    Sampler.made.on_sample(Resources(cpu_share=0.8))
    assert other.others()[0].slack_s == 0.0, "one step without a wait is enough"


def test_only_recent_waits_of_the_active_plan_count_as_communication(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_notes, "ResourceSampler", Sampler)
    own, other = driver(0.0, 0.0), Registry("b", 0)
    other.file_name = "b.json"
    MachineNotes(0, lambda message, urgent: None, {0: own}).start("a", None)
    reporter = own.reporter

    def slack_s(wait_s: float, samples: int) -> float:
        reporter.wait_s = wait_s
        for _ in range(samples):
            reporter.steps_logged += 1
            Sampler.made.on_sample(Resources(cpu_share=0.8))
        return other.others()[0].slack_s

    assert slack_s(0.0, 1) == 0.0
    assert slack_s(0.05, 20) == 0.0, "the wait before the first step is none"
    reporter.engine.plan.plan_id = 1
    assert slack_s(0.05, 1) == 0.0, "of the step under way when the plan came"
    assert slack_s(0.08, 20) == 0.0, "the communication of another plan takes longer"
    assert slack_s(0.1, 20) == pytest.approx(0.02)
    assert slack_s(0.1, 600) == 0.0, "the network became slower"
