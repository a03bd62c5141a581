"""Readings of a rank: the first one at its start, then with the number of ranks of other jobs beside it."""

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


DRIVER: Any = SimpleNamespace(reporter=SimpleNamespace(log=None))


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


def test_ranks_of_other_jobs_on_the_same_processors_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_notes, "ResourceSampler", Sampler)
    sent: list[Any] = []
    notes = MachineNotes(0, lambda message, urgent: sent.append(message), {0: DRIVER})
    notes.start("a", None)
    other = Registry("b", 0)
    other.file_name = "b.json"
    Sampler.made.on_sample(Resources(cpu_share=0.8))
    assert sent[-1].neighbour_ranks == 0.0
    (entry,) = other.others()
    assert (entry.job, entry.rank) == ("a", 0)
    other.write(cpus=entry.cpus)
    Sampler.made.on_sample(Resources(cpu_share=0.8))
    assert sent[-1].neighbour_ranks == 1.0
    other.write(cpus={max(entry.cpus) + 1})
    Sampler.made.on_sample(Resources(cpu_share=0.8))
    assert sent[-1].neighbour_ranks == 0.0
