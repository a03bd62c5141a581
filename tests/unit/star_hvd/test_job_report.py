"""What `hvd.explain()` says, and on which ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from scheduler.records import Plan
from scheduler.transmission.decision import LATE, PACE_UP, Decision
from star_hvd.channel.messages import base as m
from star_hvd.job_report import explain, record_metric, report
from star_hvd.modes.step_reporter import StepReporter
from star_hvd.runtime import job_log, runtime
from star_hvd.telemetry.step_timeline import StepSample
from tests.support.job_states import Job, runtime_of


@pytest.fixture(autouse=True)
def _no_other_optimizers() -> Iterator[None]:
    """Those of other tests may be alive until the garbage collector runs."""
    job_log.forget_unlogged()
    yield
    job_log.forget_unlogged()


def test_a_sentence_of_an_old_decision_says_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3)
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state))
    assert explain() == "no mode is active: no optimizer was made yet"
    job.register(None)
    assert explain() == "step 0: no window was evaluated yet"
    job.engine.steps = 207
    assert explain().startswith("step 207: ")
    plan = Plan.partial(3, 2, plan_id=1, reason="rank 2 computes 4.0x slower since step 1")
    job.engine.active = plan
    job.engine.plans.append((5, plan))
    job.engine.explain = lambda: f"{plan.reason}; no rank is slow since step 90"
    assert explain() == f"step 5: partial(2): {plan.reason}; no rank is slow since step 90"
    job.engine.explain = lambda: f"partial(2): {plan.reason}"
    assert explain() == f"step 5: partial(2): {plan.reason}"
    with pytest.raises(ValueError, match="no optimizer 7"):
        explain(7)


def test_the_table_says_since_when_its_reason_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3)
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state))
    job.register(None)
    job.engine.steps = 207
    assert str(report()).startswith("step 207: sync since step 0 ")
    plan = Plan.partial(3, 2, plan_id=1, reason="rank 2 is slow")
    job.engine.active = plan
    job.engine.plans.append((5, plan))
    assert str(report()).startswith("step 207: partial(2) since step 5 (rank 2 is slow)")


@pytest.mark.parametrize("asks, refused, said", [
    (False, "", "which overlap='auto' may hide"),
    (False, "parameters are on a GPU", "which is left as it is"),
    (True, "parameters are on a GPU", "which is left as it is; overlap is off: parameters are on a GPU"),
])  # fmt: skip
def test_overlap_is_advised_where_it_is_not_refused(
    asks: bool, refused: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(3)
    job.register(None)
    run = runtime_of(job.state)
    sample = StepSample(0, "sync", "", 0.0, interval_s=0.4, steps=4, exposed_s=0.2)
    engine = SimpleNamespace(plan=Plan.sync(3), wire=SimpleNamespace(explain=str))
    run.drivers[0] = SimpleNamespace(
        overlapped=None, asks_overlap=asks, no_overlap=refused, engine=engine,
        timeline=SimpleNamespace(latest=[sample]), reporter=SimpleNamespace(decisions={}),
    )  # fmt: skip
    monkeypatch.setattr(runtime, "current", lambda: run)
    assert explain().endswith(f" is exposed communication, {said}")


def test_who_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(None, rank=2))
    assert explain() == "only rank 0 can explain; this is rank 2"
    monkeypatch.setattr(runtime, "current", lambda: None)
    assert explain().startswith("no mode is active: ")


PUSH = Decision(LATE, "int8", "late gradients travel as int8: a push took 400 ms", 0.5)
PACE = Decision(PACE_UP, "2 MB/s", "pace of late gradients: 2 MB/s")


def _reporter(rank: int, said: list[m.Message]) -> StepReporter:
    found = StepReporter(0, lambda message, urgent=True: said.append(message), lambda plan: None)
    found.engine = SimpleNamespace(rank=rank, step=7)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_how_a_child_sends_is_explained_on_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is rank 0 itself."""
    job, said = Job(3), list[m.Message]()
    job.register(None)
    run, reporter = runtime_of(job.state), _reporter(rank, said)
    for decision in (PUSH, PACE):
        reporter.note_transmission(decision)
    assert [type(message) for message in said] == [m.TransmissionNote] * 2 * rank
    for message in said:
        job.say(rank, message)
    engine = SimpleNamespace(plan=Plan.sync(3), wire=SimpleNamespace(explain=str))
    run.drivers[0] = SimpleNamespace(
        overlapped=None, asks_overlap=False, no_overlap="", engine=engine, timeline=SimpleNamespace(latest=[]),
        reporter=reporter if rank == 0 else SimpleNamespace(decisions={}),
    )  # fmt: skip
    monkeypatch.setattr(runtime, "current", lambda: run)
    assert explain().endswith("".join(f"; {'rank 1: ' * rank}{one.text}" for one in (PUSH, PACE)))
    there = runtime_of(None, rank=1)
    there.drivers[0] = SimpleNamespace(reporter=reporter)
    monkeypatch.setattr(runtime, "current", lambda: there)
    assert explain() == f"only rank 0 can explain; this is rank 1; {PUSH.text}; {PACE.text}"
    reporter.log = None
    reporter.engine.plan = Plan.sync(3)
    reporter.on_switch(9, Plan.sync(3))
    assert explain() == "only rank 0 can explain; this is rank 1", "they were of the plan before"


class _Optimizer:
    """One that runs as in Horovod."""


def test_an_optimizer_that_runs_as_in_horovod_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: None)
    alone, grouped = _Optimizer(), _Optimizer()
    job_log.note_unlogged(alone, "1 rank", 0)
    assert explain() == "1 rank: runs as in Horovod, no run log" and report() is None
    job = Job(3)
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state))  # There is a loader, which started it.
    job_log.note_unlogged(grouped, "the argument groups", 0)
    assert explain() == "the argument groups: runs as in Horovod, no run log"
    job.register(None)
    assert explain() == "step 0: no window was evaluated yet", "an optimizer with modes goes first"
    monkeypatch.setattr(runtime, "current", lambda: None)
    del grouped
    gc.collect()
    assert explain().startswith("1 rank: ")
    runtime.shutdown()
    assert explain().startswith("no mode is active: ")


@pytest.mark.parametrize(("rank", "log", "warns"), [(0, "1", True), (0, "0", False), (1, "1", False)])
def test_what_has_no_effect_without_a_run_log_is_told_once(
    rank: int, log: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAR_RUN_LOG", log)
    monkeypatch.setenv("STAR_TARGET", "accuracy>=0.9")
    monkeypatch.setattr(runtime, "current", lambda: None)
    record_metric("accuracy", 0.5)
    optimizers = [_Optimizer(), _Optimizer()]
    for optimizer in optimizers:
        job_log.note_unlogged(optimizer, "1 rank", rank)
        record_metric("accuracy", 0.5)
    said = [record.getMessage() for record in caplog.records if record.name == "star_hvd"]
    text = "has no effect for an optimizer without a run log (1 rank: runs as in Horovod, no run log)"
    assert said == [f"STAR_TARGET {text}", f"hvd.record_metric {text}"] * warns
