"""What one optimizer's log is told: samples, folds of all ranks, the model that decides, targets that are none."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.learning.predictor import SHIPPED, load
from scheduler.plan.plan import Plan
from scheduler.records import StepReport, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.job_report import record_loss
from star_hvd.loader import shard
from star_hvd.modes.step_reporter import StepReporter
from star_hvd.run_log import new_run_name
from star_hvd.run_log.spool import read_events
from star_hvd.runtime import runtime
from star_hvd.runtime.job_log import JobLog, Pace, check_curves
from star_hvd.runtime.model_loader import ModelLoader, digest
from tests.support.job_states import Job
from tests.support.loaders import World
from tests.support.threads import await_end


@pytest.fixture
def teller() -> StepReporter:
    """Rank 0's, with an engine that stands still."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
    found = StepReporter(0, lambda message, urgent=True: None, lambda plan: None)
    applier = SimpleNamespace(optimizer=optimizer, buckets=[])
    found.engine = SimpleNamespace(rank=0, applier=applier, plan=Plan.sync(3))  # type: ignore[assignment]
    found.stats = lambda: {"drops": 2, "folds": 0}  # type: ignore[method-assign]
    return found


class _Coordinator:
    def __init__(self, job: Job) -> None:
        self._job = job

    @contextlib.contextmanager
    def job_state(self) -> Iterator[Any]:
        yield self._job.state


@pytest.fixture
def job_log(teller: StepReporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a log, closes it and gives its events."""
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("STAR_RUN_LOG", "1")
    monkeypatch.setattr("star_hvd.run_log.dispatch.send", lambda directory: None)
    job = Job(3)
    job.register(Plan.sync(3))
    made: list[JobLog] = []

    def make(ranker: Any = None, curves: set[str] | None = None) -> SimpleNamespace:
        name, coordinator = new_run_name(), _Coordinator(job)
        log = JobLog(name, teller, ["a"] * 3, coordinator, {}, ranker, curves)  # type: ignore[arg-type]
        made.append(log)
        log.start()

        def end() -> list[dict[str, Any]]:
            log.close()
            limit_s = time.monotonic() + 120.0  # On a busy machine its thread ends after the deadline of `close`.
            while True:
                events = [event for _, event in read_events(log.directory / "events.jsonl")]
                if time.monotonic() > limit_s or any(event["kind"] == "end" for event in events):
                    return events
                time.sleep(0.02)

        return SimpleNamespace(log=log, job=job, end=end)

    yield make
    for log in made:
        log.close()


def _facts(events: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for event in events:
        found.update(event["values"] if event["kind"] == "facts" else {})
    return found


# ---- samples --------------------------------------------------------------------------------------------------------


def test_a_step_tells_the_samples_behind_it(teller: StepReporter) -> None:
    told: list[StepReport] = []
    teller.log = SimpleNamespace(step=told.append)  # type: ignore[assignment]
    teller.note_samples(1, 16, 16, 16.0)
    teller.note_samples(1, 9, 16, 16.0)  # Two passes per step, and the end of an epoch.
    teller.note_samples(2, 500, 500, 16.0)  # A loader for evaluation.
    teller.log_step(1, 0.5, 0.0, late=False)
    teller.log_step(2, 0.5, 0.0, late=True)
    assert [report.samples for report in told] == [25.0, 0.0]
    assert teller.batch == 16


def test_shard_tells_what_it_hands_out(teller: StepReporter, monkeypatch: pytest.MonkeyPatch) -> None:
    run = World(1, monkeypatch).runs[0]
    run.drivers[0] = SimpleNamespace(reporter=teller, equal_batches="")
    told: list[StepReport] = []
    teller.log = SimpleNamespace(step=told.append)  # type: ignore[assignment]
    for step, _ in enumerate(shard(torch.utils.data.TensorDataset(torch.arange(7.0)), batch_size=4)):
        teller.log_step(step, 0.5, 0.0, late=False)
    assert [report.samples for report in told] == [4.0, 3.0]
    assert (teller.batch, teller.reference_samples) == (4, 4.0)


def test_samples_behind_an_update_are_those_of_the_mode_in_force(teller: StepReporter) -> None:
    def led(mode: str, *weights: float) -> None:
        teller.timeline.extend({"mode": mode, "weight": weight} for weight in weights)

    assert math.isnan(teller.update_samples("sync"))
    led("sync", 3.0, 3.0)
    assert math.isnan(teller.update_samples("sync")), "without shard nobody knows the size of a batch"
    teller.note_samples(0, 16, 16, 16.0)
    assert teller.update_samples("sync") == 48.0
    led("partial(2)", 2.0, 2.0, 3.0)
    assert teller.update_samples("partial(2)") == pytest.approx(16 * 7 / 3)
    assert math.isnan(teller.update_samples("local(4)"))


# ---- the job's events -----------------------------------------------------------------------------------------------


def test_windows_have_all_ranks_folds_the_pace_and_the_batch(teller: StepReporter, job_log: Any) -> None:
    made = job_log()
    teller.note_samples(0, 16, 16, 16.0)
    teller.timeline.append({"mode": "sync", "weight": 3.0})
    for step in range(3):
        made.job.say(0, m.HeaderNote(0, step, 0, [0, 1], 1.0, 2.0, 2.0, 0.0, 0, 0.0, 1.0))
    limit_s = time.monotonic() + 120.0  # The pace is taken from one window to the next.
    path = made.log.directory / "events.jsonl"


    def folds() -> list[float]:
        return [event["folds"] for _, event in read_events(path) if event["kind"] == "window"]

    while not folds() and time.monotonic() < limit_s:
        time.sleep(0.02)
    made.job.say(0, m.HeaderNote(0, 99, 0, [0, 1], 1.0, 2.0, 2.0, 0.0, 0, 0.0, 0.5))
    while 3.5 not in folds() and time.monotonic() < limit_s:  # One per second is kept.
        time.sleep(0.02)
    events = made.end()
    window = [event for event in events if event["kind"] == "window"][-1]
    assert window["folds"] == 3.5, "rank 0 itself folded nothing"
    assert window["rank0_drops"] == 2.0 and "drops" not in window
    assert window["steps_per_s"] > 0.0 and window["effective_batch"] == 48.0
    assert _facts(events)["batch"] == 16


def test_the_batch_of_another_loader_is_logged_with_its_first_step(teller: StepReporter, job_log: Any) -> None:
    made = job_log()
    path, limit_s = made.log.directory / "events.jsonl", time.monotonic() + 120.0

    def batches() -> list[tuple[int, int]]:
        events = [event for _, event in read_events(path) if event["kind"] == "facts" and "batch" in event["values"]]
        return [(event["step"], event["values"]["batch"]) for event in events]

    teller.note_samples(0, 16, 16, 16.0)
    while not batches() and time.monotonic() < limit_s:
        time.sleep(0.02)
    teller.log_step(7, 0.5, 0.0, late=False)
    teller.note_samples(1, 16, 16, 16.0)
    teller.feeds(1, 7)  # The same size is no news.
    teller.log_step(8, 0.5, 0.0, late=False)
    teller.note_samples(2, 32, 32, 32.0)
    teller.feeds(2, 8)  # Known at its second gradient.
    events = made.end()
    assert batches() == [(0, 16), (8, 32)] and _facts(events)["batch"] == 32


def test_the_pace_is_of_the_last_seconds() -> None:
    pace = Pace()
    assert math.isnan(pace.note(0.0, 0))
    assert pace.note(1.0, 10) == 10.0
    for second in range(2, 20):
        rate = pace.note(float(second), 10 + 2 * (second - 1))
    assert rate == pytest.approx(2.0)


def test_hyperparameters_are_those_the_job_began_with(teller: StepReporter, job_log: Any, monkeypatch: Any) -> None:
    start = JobLog.start

    def late(self: JobLog) -> None:
        teller.engine.applier.optimizer.param_groups[0]["lr"] = 0.001
        start(self)

    monkeypatch.setattr(JobLog, "start", late)
    assert _facts(job_log().end())["optimizer"]["hyper"]["lr"] == 0.4


def test_an_environment_that_cannot_be_read_costs_only_its_facts(
    job_log: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(hosts: Any) -> None:
        raise RuntimeError("no /proc")

    monkeypatch.setattr("star_hvd.runtime.job_log.environment", broken)
    events = job_log().end()
    assert "optimizer" in _facts(events) and any(event["kind"] == "window" for event in events)
    assert "has no facts about this machine" in caplog.text


# ---- the target -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("abc", ["STAR_TARGET is 'abc'; expected NAME>=NUMBER"]),
        ("accuracy>=abc", ["STAR_TARGET is 'accuracy>=abc'; expected"]),
        ("accuracy>0.5", []),
        ("acc<=1", ["STAR_TARGET is 'acc<=1', but acc was not recorded by hvd.record_metric (got: accuracy, loss);"]),
        ("", []),
    ],
)
def test_a_target_without_effect_is_told_in_one_line(
    target: str, expected: list[str], job_log: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAR_TARGET", target)
    with caplog.at_level(logging.WARNING, "star_hvd"):
        curves = {"loss"}  # Of another optimizer of the job.
        made = job_log(curves=curves)
        made.log.metric("accuracy", 0.6, 3)
        made.end()
        check_curves(curves)
    said = [record.getMessage() for record in caplog.records if "STAR_TARGET" in record.getMessage()]
    assert len(said) == len(expected) and all(one.startswith(text) for one, text in zip(said, expected, strict=True))


@pytest.mark.parametrize(
    ("target", "recorded", "warns"),
    [("loss<=0.9", "accuracy", True), ("loss<=0.9", "loss", False), ("accuracy>=0.9", "accuracy", False)],
)
def test_a_target_that_record_loss_cannot_reach_is_told_at_its_first_call(
    target: str, recorded: str, warns: bool, teller: StepReporter, job_log: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("STAR_TARGET", target)
    made = job_log()
    made.log.metric(recorded, 0.5, 1)
    teller.log = made.log
    engine = SimpleNamespace(own=SimpleNamespace(loss=0.0))
    running = SimpleNamespace(drivers={0: SimpleNamespace(engine=engine, reporter=teller)})
    monkeypatch.setattr(runtime, "current", lambda: running)
    for loss in (2.0, 1.0):
        record_loss(loss)
    assert engine.own.loss == 1.0
    said = [record.getMessage() for record in caplog.records if "STAR_TARGET" in record.getMessage()]
    assert len(said) == warns
    assert all("hvd.record_loss gives no time to target; call hvd.record_metric('loss', value)" in one for one in said)


# ---- the model ------------------------------------------------------------------------------------------------------


def _loaded(monkeypatch: pytest.MonkeyPatch, wanted: str) -> ModelLoader:
    monkeypatch.setenv("STAR_MODEL", wanted)
    ranker = ModelLoader(8)
    ranker.load_after(lambda: True)
    await_end("star-model")
    return ranker


def test_the_log_says_which_model_decides(monkeypatch: pytest.MonkeyPatch, job_log: Any) -> None:
    pytest.importorskip("lightgbm")
    found = _facts(job_log(_loaded(monkeypatch, "")).end())["model"]
    assert found == {"source": "shipped", "sha256": digest(load(SHIPPED).about)}
    own = _loaded(monkeypatch, str(SHIPPED)).facts
    assert own == {"source": str(SHIPPED), "sha256": found["sha256"]}
    assert digest({**json.loads((SHIPPED / "model.json").read_text()), "heads": {}}) != found["sha256"]


def test_the_log_says_why_the_cost_model_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _loaded(monkeypatch, "cost_model").facts == {"source": "cost_model"}
    facts = _loaded(monkeypatch, str(tmp_path)).facts
    assert facts is not None and facts["source"] == str(tmp_path) and "sha256" not in facts
    assert facts["fallback"].startswith("cost_model: STAR_MODEL") and "no model in" in facts["fallback"]


# ---- an earlier training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "loaded", "after a step", "never"])
def test_a_run_that_goes_on_from_a_checkpoint_says_so(teller: StepReporter, job_log: Any, when: str) -> None:
    """Before the first step only: later ones may go back to the best parameters so far."""
    optimizer = teller.engine.applier.optimizer
    state = {next(iter(optimizer.param_groups[0]["params"])): {"momentum_buffer": torch.tensor([1.0, 2.0])}}
    if when == "before":
        optimizer.state.update(state)
    made = job_log()
    if when == "after a step":
        made.log.step(StepReport(rank=0, step=0, times=StepTimes(0.1)))
    if when in ("loaded", "after a step"):
        optimizer.state.update(state)
        made.log.state_loaded()
    told = {"before": "optimizer state", "loaded": "optimizer state"}
    assert _facts(made.end()).get("continues") == told.get(when)


# ---- batch shares ---------------------------------------------------------------------------------------------------


def test_a_plan_has_the_time_at_which_it_became_active(job_log: Any) -> None:
    """The log looks twice a second: two plans of one look had equal times, and the first one's steps took no time."""
    made = job_log()
    made.job.engine.publish(Plan.partial(3, 2, reason="asked for"), made.job.now_s)
    made.job.now_s = time.monotonic() + 1000.0
    for rank in range(3):
        made.job.arrive(rank, 5, plan_id=1)
    path, limit_s = made.log.directory / "events.jsonl", time.monotonic() + 120.0

    def begun_s() -> list[float]:
        return [event["time_s"] for _, event in read_events(path) if event["kind"] == "plan"]

    while len(begun_s()) < 2 and time.monotonic() < limit_s:
        time.sleep(0.02)
    made.end()
    assert begun_s()[0] == 0.0 and 1000.0 <= begun_s()[1] < 1120.0


def test_other_batch_shares_are_logged_as_such_and_are_no_plan(job_log: Any) -> None:
    made = job_log()
    made.job.engine.publish(Plan.sync(3, balanced=True, reason="shares follow the speed"), made.job.now_s)
    for rank in range(3):
        made.job.arrive(rank, 5, plan_id=1)
    path, limit_s = made.log.directory / "events.jsonl", time.monotonic() + 120.0

    def of_kind(kind: str) -> list[dict[str, Any]]:
        return [event for _, event in read_events(path) if event["kind"] == kind]

    while len(of_kind("plan")) < 2 and time.monotonic() < limit_s:
        time.sleep(0.02)
    made.job.engine.shares_changed(9, (4, 10, 10), "rank 0 gets 4 of 24 samples")
    while not of_kind("shares") and time.monotonic() < limit_s:
        time.sleep(0.02)
    made.end()
    assert [event["label"] for event in of_kind("plan")] == ["sync", "sync(balanced)"]
    (shares,) = of_kind("shares")
    assert (shares["step"], shares["epoch"], shares["batch_shares"]) == (9, 1, [4, 10, 10])
    assert shares["reason"].endswith("; now rank 0 gets 4 of 24 samples")
