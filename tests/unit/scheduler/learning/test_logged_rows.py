"""Windows made from the log of a run are those that the coordinator saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.cost.conditions import CYCLE_S, Conditions
from scheduler.diagnosis.window_stats import MIN_REPORTS
from scheduler.learning.logged_rows import LoggedRun, read_run, windows
from scheduler.plan.plan import Plan
from scheduler.records import StepReport, StepTimes
from star_hvd.channel.messages.base import Arrive
from tests.support.job_states import Job

_STEPS, _RANKS = 40, 4


def _report(rank: int, step: int, queued: tuple[float, ...]) -> StepReport:
    compute_s = 5.0 if step == 0 else 0.1 + 0.01 * rank + 0.0001 * step
    times = StepTimes(compute_s, 0.0, compute_s, runqueue_s=queued[rank] * compute_s)
    return StepReport(rank=rank, step=step, times=times, wait_s=0.0, late=False, loss=1.0)


def _logged(folder: Path, queued: tuple[float, ...], **window: object) -> LoggedRun:
    events: list[dict[str, object]] = [
        {"kind": "facts", "time_s": 0.0, "values": {"world_size": _RANKS, "target": "accuracy>=0.9"}},
        {"kind": "plan", "time_s": 1.0, "step": 0, "plan": Plan.sync(_RANKS).to_dict()},
        {"kind": "window", "time_s": 2.0, "step": 5, "noise_scale": 3.5, "ranks": {}, **window},
        {"kind": "metric", "time_s": 9.0, "name": "accuracy", "value": 0.93, "step": 39},
    ]
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for rank in range(_RANKS):
        reports = (_report(rank, step, queued).as_record() for step in range(_STEPS))
        lines = (json.dumps({"kind": "step", "time_s": 0.1 * step, **one}) for step, one in enumerate(reports))
        (folder / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("queued", [(0.0,) * 4, (0.0, 0.0, 0.4, 0.0), (0.4, 0.3, 0.4, 0.2)])
def test_times_are_those_of_the_coordinator(queued: tuple[float, ...], tmp_path: Path) -> None:
    """The first step is not typical, and waits for processors count only where few ranks have them."""
    job = Job(_RANKS)
    job.register(None)
    for step in range(_STEPS):
        for rank in range(_RANKS):
            job.say(rank, Arrive(0, step, 0, _report(rank, step, queued).times, 0.0))
    last = windows(_logged(tmp_path / "run", queued))[-1]
    for live, logged in zip(job.engine.window().ranks, last.ranks, strict=True):
        assert logged.steps == live.steps and logged.compute_s == pytest.approx(live.compute_s)


def test_communication_is_what_the_log_says(tmp_path: Path) -> None:
    wire_s = 0.05
    ranks = {"link_bytes_per_s": [1e8] * _RANKS}
    known = windows(_logged(tmp_path / "a", (0.0,) * 4, comm_s=wire_s, ranks=ranks))[-1]
    assert all(stats.comm_s == (wire_s,) * MIN_REPORTS for stats in known.ranks)
    conditions = Conditions.from_window(known)
    assert conditions is not None and conditions.beyond_s == pytest.approx(wire_s - CYCLE_S)
    for name, unknown in (("b", {}), ("c", {"comm_s": None}), ("d", {"comm_s": -1.0}), ("e", {"comm_s": 10**400})):
        found = windows(_logged(tmp_path / name, (0.0,) * 4, **unknown))[-1]  # type: ignore[arg-type]
        assert all(stats.comm_s == () for stats in found.ranks)
