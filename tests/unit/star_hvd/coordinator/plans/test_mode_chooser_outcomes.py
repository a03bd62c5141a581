"""Who is told what became of a switch: the coordinator's state, the report, the run log and its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler.diagnosis.stragglers import find_stragglers
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.policy.switch_outcome import SwitchOutcome
from star_hvd import env, job_report
from star_hvd.config import Config
from star_hvd.coordinator.plans.mode_chooser import Choice
from star_hvd.coordinator.reports import Pauses
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


def _harmful(every: int, later_s: float, seed: int, slow_share: float = 0.0) -> bool:
    """Whether `partial`, with steps of `later_s` and pauses of 0.3 s, is found harmful after `sync` with 50 ms.

    Windows and messages come every tenth of a second; in `slow_share` of the steps of `sync` a rank is 4x slower.
    """
    rng, policy, pauses = np.random.default_rng(seed), CostPolicy(4), Pauses(4)
    sync, partial = Plan.sync(4), Plan.partial(4, 3, plan_id=1)
    now_s, tick_s, step, reported, active, waiting = 0.0, 0.1, 0, 0, sync, []
    while step < 500:
        step_s = (0.05 if active is sync else later_s) * float(np.exp(0.05 * rng.standard_normal()))
        slow_s = 3.0 * step_s * float(active is sync and rng.random() < slow_share)
        now_s += step_s + (0.3 if active is partial and step % every == 0 else 0.0)
        waiting += [(now_s + (slow_s if rank == 3 else 0.0), rank, step) for rank in range(4)]
        now_s, step = now_s + slow_s, step + 1
        while tick_s < now_s:
            for _, rank, of in sorted(one for one in waiting if one[0] <= tick_s):
                pauses.reported(rank, of, 0.0, tick_s)
                reported = max(reported, of)
            waiting = [one for one in waiting if one[0] > tick_s]
            seen = window(
                steady(4, usual_s=0.05), end=reported, now_s=tick_s, pause_s=pauses.take_longest_s()
            )
            policy.decide(seen, active)
            tick_s += 0.1
        if step == 200:
            active = partial
            policy._check.expect(
                partial, sync, predicted=1.1, over_sync=1.1, replaced_s=0.05,
                normalized_step=policy._factors.normalized_step,
            )  # fmt: skip
    return any(one.harmful for one in policy.outcomes)


def test_an_evaluation_is_no_part_of_a_plans_steps() -> None:
    assert not any(_harmful(20, 0.05, seed) for seed in range(5))
    assert not any(_harmful(20, 0.08, seed, slow_share=0.2) for seed in range(5)), "a straggler's time is"
    assert all(_harmful(20, 0.06, seed) for seed in range(3))
    assert all(_harmful(2, 0.05, seed) for seed in range(3)), "pauses of nearly every block are"


def test_windows_of_decisions_know_pauses_of_all_ranks() -> None:
    job, seen = Job(3), []
    job.register(None)
    job.engine.choice.decide = lambda window, *_: seen.append(window.pause_s)
    for step, (pause_s, slow_s) in enumerate(((0.0, 0.0), (0.0, 0.0), (0.4, 0.0), (0.0, 0.7), (0.0, 0.0))):
        job.now_s += 0.1 + pause_s
        job.arrive(0, step), job.arrive(1, step)
        job.now_s += slow_s
        job.arrive(2, step)
        job.tick()
    assert seen == pytest.approx([0.0, 0.09, 0.49, 0.09, 0.09], abs=0.02)


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


def test_the_least_quorum_holds_for_the_rule() -> None:
    found, labels = window(steady(4, slow={2: 3.0, 3: 6.0})), []
    for least in (0.5, 0.75):
        choice = Choice(4, Config(policy="rule", least_quorum=least), ["localhost"] * 4)
        plan = choice.decide(found, Plan.sync(4), find_stragglers(found), 0.0)
        labels.append(plan.label if plan is not None else "")
    assert labels == ["partial(2)", "partial(3)"]
