"""Windows made from the log of a run are those that the coordinator saw."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.cost.conditions import CYCLE_S, Conditions
from scheduler.diagnosis.window_stats import MIN_REPORTS
from scheduler.learning import dataset
from scheduler.learning.features import FEATURES, rows
from scheduler.learning.logged_reports import HISTORY, Report, moments_until, newest
from scheduler.learning.logged_rows import LoggedRun, mlflow_rows, read_run, real_rows, windows
from scheduler.learning.simulated_rows import in_order
from scheduler.plan.plan import MODES, Plan
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import StepReport, StepTimes, Window
from scheduler.transmission.behind_compute import EDGE
from star_hvd.channel.messages.base import Arrive
from star_hvd.run_log import window_values
from tests.support.job_states import Job
from tests.unit.scheduler.cli.test_main import logged

_STEPS, _RANKS = 40, 4


def _report(rank: int, step: int, queued: tuple[float, ...], load_s: float = 0.0) -> StepReport:
    compute_s = 5.0 if step == 0 else 0.1 + 0.01 * rank + 0.0001 * step
    times = StepTimes(compute_s, 0.0, compute_s, runqueue_s=queued[rank] * compute_s, load_s=load_s)
    return StepReport(rank=rank, step=step, times=times, wait_s=0.0, late=False, loss=1.0)


def _logged(
    folder: Path, queued: tuple[float, ...] = (0.0,) * 4, *, facts: dict[str, object] | None = None,
    load_s: float = 0.0, **window: object,
) -> LoggedRun:
    values = {"world_size": _RANKS, "target": "accuracy>=0.9", **(facts or {})}
    events: list[dict[str, object]] = [
        {"kind": "facts", "time_s": 0.0, "values": values},
        {"kind": "plan", "time_s": 1.0, "step": 0, "plan": Plan.sync(_RANKS).to_dict()},
        {"kind": "window", "time_s": 2.0, "step": 5, "noise_scale": 3.5, "ranks": {}, **window},
        {"kind": "metric", "time_s": 9.0, "name": "accuracy", "value": 0.93, "step": 39},
    ]
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for rank in range(_RANKS):
        reports = (_report(rank, step, queued, load_s).as_record() for step in range(_STEPS))
        lines = (json.dumps({"kind": "step", "time_s": 0.1 * step, **one}) for step, one in enumerate(reports))
        (folder / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("load_s", [0.0, 0.115, 0.3])
@pytest.mark.parametrize("queued", [(0.0,) * 4, (0.0, 0.0, 0.4, 0.0), (0.4, 0.3, 0.4, 0.2), (0.05, 0.04, 0.8, 0.05)])
def test_times_are_those_of_the_coordinator(queued: tuple[float, ...], load_s: float, tmp_path: Path) -> None:
    """The first step is not typical, and waits for processors count only where few ranks have them.

    A rank is at most as fast as its workers load.
    """
    job = Job(_RANKS)
    job.register(None)
    for step in range(_STEPS):
        for rank in range(_RANKS):
            job.say(rank, Arrive(0, step, 0, _report(rank, step, queued, load_s).times, 0.0))
    last = windows(_logged(tmp_path / "run", queued, load_s=load_s))[-1]
    for live, known in zip(job.engine.window().ranks, last.ranks, strict=True):
        assert known.steps == live.steps and known.compute_s == pytest.approx(live.compute_s)


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


# ---- the start of the user's mode -----------------------------------------------------------------------------------


def _begun_late(root: Path, *plans: tuple[int, float, Plan], reached_s: float | None = 100.0, **facts: object) -> Path:
    """A run that begins in `sync`, and whose further plans become active at a step and a time."""
    logged(root, "run", Plan.sync(4), reached_s=reached_s, **facts)  # type: ignore[arg-type]
    taken = [json.dumps({"kind": "plan", "time_s": at_s, "step": step, "plan": plan.to_dict()})
             for step, at_s, plan in plans]  # fmt: skip
    path = root / "run" / "events.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], *taken, *lines[2:]]))
    return root / "run"


_SERVED = Plan.ps(4, 3, servers=(0,), plan_id=1)


@pytest.mark.parametrize(
    ("mode", "active_s", "reached_s", "given_s", "labels"),
    [
        ("ps(3)", 3.0, 100.0, None, ["ps(3)"]),  # 2 s of 100 s, 40 steps.
        ("ps(3)", 3.0, 30.0, None, ["sync", "ps(3)"]),  # Of 30 s they would distort the label.
        ("ps(3)", 3.0, None, 100.0, ["ps(3)"]),
        ("ps(3)", 3.0, None, 30.0, ["sync", "ps(3)"]),
        ("ps(3)", 3.0, None, None, ["ps(3)"]),  # It crashed, which is why it is left out.
        ("partial(3)", 3.0, 100.0, None, ["sync", "ps(3)"]),  # Not what was asked for.
        ("auto", 3.0, 100.0, None, ["sync", "ps(3)"]),
    ],
)
def test_a_short_start_in_sync_is_forgotten_whatever_its_steps(
    tmp_path: Path, mode: str, active_s: float, reached_s: float | None, given_s: float | None, labels: list[str]
) -> None:
    """Servers need about 2 s to start, in which a job makes tens of steps."""
    run = read_run(_begun_late(tmp_path, (40, active_s, _SERVED), reached_s=reached_s, given_s=given_s, mode=mode))
    assert run is not None and [plan.label for plan in run.plans] == labels


def test_a_mode_that_begins_late_is_not_told_as_a_change_of_mode(tmp_path: Path) -> None:
    """The user did ask for one fixed mode."""
    _begun_late(tmp_path, (40, 3.0, _SERVED), reached_s=30.0, mode="ps(3)")
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert told[1:] == [
        "run: its mode, ps(3), became active after more than 5 % of its time; expected a longer run, or a later target"
    ]


def test_grouped_without_a_number_is_what_was_asked_for(tmp_path: Path) -> None:
    plan = Plan.grouped(4, [(0, 1), (2, 3)], plan_id=1)
    run = read_run(_begun_late(tmp_path, (40, 3.0, plan), mode="grouped(0)"))
    assert run is not None and [plan.label for plan in run.plans] == ["grouped(2)"]


def test_a_run_with_several_modes_keeps_them_all(tmp_path: Path) -> None:
    later = (50, 9.0, Plan.partial(4, 3, plan_id=2))
    run = read_run(_begun_late(tmp_path, (3, 1.5, _SERVED), later, mode="partial(3)"))
    assert run is not None and [plan.label for plan in run.plans] == ["sync", "ps(3)", "partial(3)"]


def test_runs_with_servers_become_rows(tmp_path: Path) -> None:
    logged(tmp_path, "sync", Plan.sync(4), reached_s=200.0, mode="sync")
    _begun_late(tmp_path, (40, 3.0, _SERVED), mode="ps(3)")
    told: list[str] = []
    frame = dataset.frame_of(real_rows(tmp_path, "1", report=told.append))
    assert told == ["2 of 2 runs used"]
    assert frame.groupby("plan")["log_relative"].first()["ps(3)"] == pytest.approx(math.log(0.5))


# ---- features of the moment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [{}, {"hosts": ["a", "b"], "ranks_per_host": [2, 2]}, {"hosts": ["a"]}])
def test_features_of_all_candidates_are_those_of_a_live_decision(tmp_path: Path, hosts: dict[str, object]) -> None:
    """A decision offers many more plans than were logged, whose number and least time are features."""
    plan = Plan.partial(4, 3)
    for name, own, reached_s in (("a", Plan.sync(4), 10.0), ("b", plan, 5.0), ("c", Plan.partial(4, 1), 8.0)):
        logged(tmp_path, name, own, reached_s=reached_s, **hosts)  # type: ignore[arg-type]
    frame = dataset.frame_of(real_rows(tmp_path, "1"))
    run = read_run(tmp_path / "a")
    assert run is not None and set(frame["plan"]) == {"sync", "partial(3)", "partial(1)"}
    of_ranks = ["a", "a", "b", "b"] if "ranks_per_host" in hosts else None
    for window in windows(run):
        conditions, active = Conditions.from_window(window), run.plans[0]
        assert conditions is not None
        offered = candidates(conditions, active, hosts=of_ranks)
        live = rows(offered, conditions, window, active, in_order(offered, conditions))
        found = frame[frame["step"] == window.step].set_index("plan")
        for label in ("sync", "partial(3)"):
            index = [one.label for one in offered].index(label)
            assert found.loc[label, list(FEATURES)].to_numpy(float) == pytest.approx(live[index])
        # Too few ranks to be offered: a candidate of its own beside them.
        assert found.loc["partial(1)", "offered"] == len(offered) + 1 > 6


def test_the_share_of_the_last_bucket_is_logged(tmp_path: Path) -> None:
    """Whether compute hides a push to servers depends on it."""
    whole = window_values(Window(step=0, edge_part=1.0), mode="sync")
    assert whole["edge_part"] == 1.0
    assert windows(_logged(tmp_path / "a", (0.0,) * 4, edge_part=whole["edge_part"]))[-1].edge_part == 1.0
    assert windows(_logged(tmp_path / "b", (0.0,) * 4))[-1].edge_part == EDGE, "old logs do not have it"


def test_a_run_that_continues_an_earlier_training_is_left_out(tmp_path: Path) -> None:
    """The time of a rest counted as that of the whole training: a tenth of `sync`, though the mode was no faster."""
    logged(tmp_path, "sync", Plan.sync(4), reached_s=100.0)
    logged(tmp_path, "before", Plan.partial(4, 3), reached_s=None, given_s=90.0, status="KILLED")
    logged(tmp_path, "rest", Plan.partial(4, 3), reached_s=10.0, continues="reset")
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert "rest: it continues an earlier training" in told


def test_readings_of_each_rank_are_those_of_the_newest_window_that_has_them(tmp_path: Path) -> None:
    """With many ranks most windows have the job's own numbers only."""
    ranks = {"link_bytes_per_s": [1e8] * 4, "input_share": [0.0, 0.5, 0.0, 0.0]}
    _logged(tmp_path / "run", (0.0,) * 4, ranks=ranks)
    with (tmp_path / "run" / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "window", "time_s": 2.5, "step": 6, "edge_part": 0.5}) + "\n")
    run = read_run(tmp_path / "run")
    assert run is not None
    last = windows(run)[-1]
    assert last.edge_part == 0.5
    assert [(one.link_bytes_per_s, one.input_share) for one in last.ranks][:2] == [(1e8, 0.0), (1e8, 0.5)]


def test_of_several_loaders_the_first_one_s_batch_tells_jobs_apart(tmp_path: Path) -> None:
    """One run may have ended before its second loader."""
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.partial(4, 3), reached_s=5.0)
    path = tmp_path / "b" / "events.jsonl"
    later = {"kind": "facts", "time_s": 2.0, "step": 20, "values": {"batch": 32}}
    path.write_text(path.read_text().replace("\n", f"\n{json.dumps(later)}\n", 1))
    one, other = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    assert one is not None and other is not None and one.key == other.key
    assert other.facts["batch"] == 8


def test_a_deleted_experiment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow finds it by its name, and no run in it."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "10")  # So that what `mlflow_rows` sets is undone.
    deleted = SimpleNamespace(experiment_id="7", lifecycle_stage="deleted")
    client = SimpleNamespace(get_experiment_by_name=lambda name: deleted)
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: client)
    environ = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_EXPERIMENT_NAME": "some jobs"}
    with pytest.raises(ValueError, match="experiment some jobs was deleted; .* restore --experiment-id 7`"):
        mlflow_rows(environ, "1")


# ---- what a live window has -----------------------------------------------------------------------------------------


def test_frozen_parameters_are_not_communicated(tmp_path: Path) -> None:
    """Old logs know the parameters only."""
    facts = {"optimizer": {"class": "SGD", "parameter_bytes": 4_000_000}}
    found = windows(_logged(tmp_path / "a", facts=facts, comm_bytes=1_000_000.0))
    assert {window.comm_bytes for window in found} == {1_000_000}
    assert {window.comm_bytes for window in windows(_logged(tmp_path / "b", facts=facts))} == {4_000_000}


@pytest.mark.parametrize("fixed_part", [None, 0.2])
def test_a_run_of_shard_has_the_candidates_of_its_live_decisions(tmp_path: Path, fixed_part: float | None) -> None:
    """Without the batch `sync(balanced)` was not offered, which changes features of every row."""
    for name, plan in (("a", Plan.sync(4)), ("b", Plan.partial(4, 3))):
        logged(tmp_path, name, plan, reached_s=10.0, batch=32)
        path = tmp_path / name / "events.jsonl"
        path.write_text(path.read_text().replace('"noise_scale": 3.5', f'"fixed_part": {json.dumps(fixed_part)}'))
    run = read_run(tmp_path / "a")
    assert run is not None
    frame = dataset.frame_of(real_rows(tmp_path, "1"))
    for window in windows(run):
        live = Window(step=window.step, ranks=window.ranks, batch=32, fixed_part=fixed_part or math.nan)
        policy = CostPolicy(4)
        policy.decide(live, Plan.sync(4))
        assert any(prediction.plan.balanced for prediction in policy.last)
        assert set(frame[frame["step"] == window.step]["offered"]) == {len(policy.last)}
        assert window.fixed_part == live.fixed_part or fixed_part is None


def test_batches_and_micro_batches_are_those_of_the_window(tmp_path: Path) -> None:
    """The fact `batch` does not say whether `shard` may change the batches."""
    noted = window_values(Window(step=0, batch=0, microbatches=4), mode="sync")
    assert (noted["batch"], noted["microbatches"]) == (0, 4)
    facts: dict[str, object] = {"batch": 32}
    found = windows(_logged(tmp_path / "a", facts=facts, batch=noted["batch"], microbatches=noted["microbatches"]))
    assert {(window.batch, window.microbatches) for window in found} == {(0, 4)}
    assert {window.allowed for window in found} == {frozenset({"sync"})}, "nothing else is offered to such a job"
    old = windows(_logged(tmp_path / "b", facts=facts))
    assert {(window.batch, window.microbatches) for window in old} == {(32, 0)}
    assert {window.allowed for window in old} == {frozenset(MODES)}
    damaged = windows(_logged(tmp_path / "c", facts={"batch": -1}, batch="x", microbatches=1 << 40))
    assert {(window.batch, window.microbatches) for window in damaged} == {(0, 0)}


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_reports_of_the_moments_are_kept_and_no_others() -> None:
    draw = random.Random(3)
    steps = [step for step in range(5000) for _ in range(draw.choice((0, 1, 2)))]
    whole = [Report(step, draw.random(), False, 0.0, 0.0) for step in steps]
    draw.shuffle(whole)
    moments = moments_until(3000)
    kept = newest(whole, moments)
    assert len(kept) <= len(moments) * HISTORY and len(moments) == 6
    for moment in moments:
        expected = sorted(one for one in whole if one.step <= moment)[-HISTORY:]
        assert [one for one in kept if one.step <= moment][-HISTORY:] == expected


def test_no_report_is_read_of_a_run_in_auto_or_without_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files of a rank are the longest of all."""
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0, mode="auto")
    logged(tmp_path, "b", Plan.sync(4), reached_s=10.0, target=None)
    logged(tmp_path, "c", Plan.sync(4), reached_s=10.0)
    opened: list[str] = []
    real = Path.open

    def opens(self: Path, *arguments: Any, **options: Any) -> Any:
        assert not self.name.startswith("rank") or self.parent.name == "c"
        opened.append(self.name)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", opens)
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert told[1:3] == ["a: it ran in auto; expected one fixed mode", "b: it has no target; set STAR_TARGET"]
    assert "rank3.jsonl" in opened


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its fields may mean something else."""
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.partial(4, 3), reached_s=5.0)
    (tmp_path / "a" / "run.json").write_text('{"schema": 1}')
    assert real_rows(tmp_path, "1")
    (tmp_path / "b" / "run.json").write_text('{"schema": 2}')
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert "b: it is of version 2 of the run log; expected 1: read it with the star_hvd that wrote it" in told


@pytest.mark.parametrize("content", [b"", bytes(range(256)), b'{"kind": "fac'])
def test_a_damaged_log_is_not_told_as_one_without_a_target(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.jsonl").write_bytes(content)
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert told[1] == "a: its events.jsonl has no facts; expected those of a run, the file is empty or damaged"


class _Client:
    """An MLflow with these runs, whose files are in a folder; there must be one run at a time on the disk."""

    def __init__(self, files: Path, runs: dict[str, tuple[str, dict[str, str], dict[str, float]]]) -> None:
        self._files, self._runs = files, runs
        self.asked: list[str] = []
        self._before: Path | None = None

    def get_experiment_by_name(self, name: str) -> object:
        return SimpleNamespace(experiment_id="7", lifecycle_stage="active")

    def search_runs(self, *_: object, **__: object) -> Any:
        found = [
            SimpleNamespace(
                info=SimpleNamespace(run_id=name, status=status),
                data=SimpleNamespace(
                    params=params, metrics=metrics, tags={"star.schema": "2" if name == "newer" else "1"}
                ),
            )
            for name, (status, params, metrics) in self._runs.items()
        ]

        class Page(list[Any]):
            token = None

        return Page(found)

    def list_artifacts(self, run_id: str) -> list[object]:
        self.asked.append(run_id)
        return [SimpleNamespace(path="star")]

    def download_artifacts(self, run_id: str, path: str, target: str) -> None:
        assert self._before is None or not self._before.exists()
        self._before = Path(target)
        shutil.copytree(self._files / run_id, Path(target) / path)


def test_mlflow_is_asked_for_the_files_of_runs_that_can_be_used_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "10")
    known, ended = {"target": "accuracy>=0.9", "mode": "sync"}, {"duration_s": 9.0}
    client = _Client(tmp_path, {
        "z": ("FINISHED", known, ended),
        "no-target": ("FINISHED", {"mode": "sync"}, ended),
        "auto": ("FINISHED", {**known, "mode": "auto"}, ended),
        "rest": ("FINISHED", {**known, "continues": "reset"}, ended),
        "runs": ("RUNNING", known, {}),
        "killed": ("KILLED", known, ended),
        "late": ("KILLED", {**known, "mode": "partial(3)"}, {**ended, "time_to_target_s": 5.0}),
        "no-facts": ("FINISHED", {}, {}),
        "newer": ("FINISHED", known, ended),
    })  # fmt: skip
    logged(tmp_path, "z", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "late", Plan.partial(4, 3), reached_s=5.0)
    logged(tmp_path, "no-facts", Plan.local(4, steps=4), reached_s=8.0)
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: client)
    told: list[str] = []
    rows = mlflow_rows({"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}, "1", report=told.append)
    assert client.asked == ["z", "late", "no-facts"]
    assert {row[6] for row in rows} == {"sync", "partial(3)", "local(4)"} and {row[1] for row in rows} == {"z"}
    assert told == [
        "3 of 9 runs used",
        "auto: it ran in auto; expected one fixed mode",
        "killed: it ended without its target, but not as FINISHED: that is no miss",
        "newer: it is of version '2' of the run log; expected 1: read it with the star_hvd that wrote it",
        "no-target: it has no target; set STAR_TARGET",
        "rest: it continues an earlier training",
        "runs: it has not ended, and MLflow gets its files at the end; if it crashed, call `star-hvd sync-logs`",
    ]
