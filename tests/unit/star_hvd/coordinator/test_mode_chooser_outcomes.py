"""Who is told what became of a switch: the coordinator's state, the report, the run log and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.diagnosis.stragglers import find_stragglers
from scheduler.plan.plan import Plan
from scheduler.policy.switch_outcome import SwitchOutcome
from star_hvd import env, job_report
from star_hvd.config import Config
from star_hvd.coordinator.mode_chooser import Choice
from star_hvd.run_log import RunLog
from star_hvd.run_log.convert import RunState
from star_hvd.run_log.page import write_page
from star_hvd.run_log.spool import read_events
from star_hvd.runtime import runtime
from tests.support.job_states import Job, runtime_of
from tests.support.windows import steady, window

BAD = SwitchOutcome(
    plan_id=1, label="partial(2)", step=64, against="sync", predicted=1.1, measured=0.83, steps=31.4, harmful=True
)
SAID = "partial(2) was predicted 1.1x faster than sync, was 0.83x over 31 steps"


def test_the_coordinator_keeps_it_and_the_report_tells_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(3)
    job.register(None)
    predicting = job.engine.choice.policy
    predicting.outcomes.append(BAD)
    job.now_s += 1.0
    job.tick()
    assert job.engine.outcomes == [BAD] and predicting.outcomes == []
    assert f"step 64: {SAID}" in caplog.text
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state, malformed=1, lost=2, repeated=4))
    report = job_report.report()
    assert report is not None
    assert (report.dropped_messages, report.denied_connections, report.repeated_messages) == (3, 0, 4)
    assert report.to_dict()["outcomes"][0]["sentence"] == SAID
    assert str(report).endswith(f"step 64: {SAID}")


def test_windows_of_decisions_have_a_clock() -> None:
    job = Job(3)
    job.register(None)
    seen = []
    job.engine.choice.decide = lambda window, *_: seen.append(window.now_s)
    job.now_s += 1.0
    job.tick()
    assert seen == [job.now_s]


def test_the_run_log_and_its_page_tell_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, ship=False)
    log.plan(0, Plan.sync(2))
    log.plan(20, Plan.partial(2, 1, plan_id=1, reason="rank 1 is slow"))
    log.outcome(BAD)
    log.plan(64, Plan.sync(2, plan_id=2, reason=f"{SAID}: sync"))
    log.close()
    state = RunState()
    for _, event in read_events(tmp_path / "runs" / "one" / "events.jsonl"):
        state.take(event)
    summaries = [segment.summary() for segment in state.segments]
    assert (summaries[1]["predicted_speed"], summaries[1]["measured_speed"]) == (1.1, 0.83)
    assert "measured_speed" not in summaries[0] and "measured_speed" not in summaries[2]
    page = write_page(tmp_path / "runs" / "one", tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("Predicted 1.1x faster than sync, measured 0.83x over 31 steps; the mode was left.") == 1
    assert f"because {SAID}: sync" in page


def _least_quorum(config: Config) -> int:
    """Of the plans that are considered while two of four ranks are slow."""
    choice = Choice(4, config, ["localhost"] * 4)
    found = window(steady(4, slow={2: 4.0, 3: 4.0}))
    choice.decide(found, Plan.sync(4), find_stragglers(found), 0.0)
    assert choice.policy is not None
    return min(p.plan.quorum for p in choice.policy.last if p.plan.mode == "partial")


def test_the_least_quorum_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _least_quorum(Config()) == 2
    assert _least_quorum(Config(least_quorum=0.75)) == 3
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match="least_quorum"):
            Config(least_quorum=value)
    assert env.least_quorum() is None
    monkeypatch.setenv("STAR_LEAST_QUORUM", "0.75")
    assert env.least_quorum() == 0.75
    monkeypatch.setenv("STAR_LEAST_QUORUM", "half")
    with pytest.raises(ValueError, match="STAR_LEAST_QUORUM is 'half'"):
        env.least_quorum()
