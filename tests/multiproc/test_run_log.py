"""A real job with its run log: every rank's steps on disk, the run in MLflow, and sentences a person can read."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from star_hvd.run_log.sender import connect
from star_hvd.run_log.spool import read_events
from tests.support.extras import needs
from tests.support.launch import JobResult, run_job
from tests.support.reasons import names
from tests.support.senders import SENT_LIMIT_S, await_sent

pytestmark = [pytest.mark.multiproc, needs("mlflow")]

STEPS, RANKS = 60, 3


def _run(logs: Path, uri: str, **more: str) -> JobResult:
    env = {"MLFLOW_TRACKING_URI": uri, "STAR_LOG_DIR": str(logs), "STAR_RUN_LOG": "1", "STAR_TARGET": "accuracy>=0.95"}
    env |= {"STAR_RUN_TAGS": "cluster=here"}
    module = "tests.multiproc.run_log_job"
    return run_job(module, str(STEPS), ranks=RANKS, env=env | more).check()


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for _, event in read_events(path) if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(SENT_LIMIT_S)
def test_a_job_is_in_mlflow_soon_after_its_end(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    job = _run(tmp_path, uri)
    name = job.results[0]["name"]
    directory = tmp_path / "runs" / name
    for rank in range(RANKS):
        steps = _events(directory / f"rank{rank}.jsonl", "step")
        assert len(steps) == job.results[rank]["steps"] >= STEPS and job.results[rank]["dropped"] == 0
        assert all(step["compute_s"] > 0.0 for step in steps)
        # A step that was closed without this rank may have taken its loss along before the step was made.
        assert any(step["loss"] is not None for step in steps)
    plans = _events(directory / "events.jsonl", "plan")
    assert plans[0]["mode"] == "sync" and len(plans) >= 2
    named = [rank for rank in range(RANKS) if any(names(plan["reason"], rank) for plan in plans)]
    assert named, "a reason names the slow rank, or on a busy machine another one"
    assert any(plan["prediction"] for plan in plans), "a decision tells what it rested on"
    assert _events(directory / "events.jsonl", "end")[0]["status"] == "FINISHED"

    assert await_sent([directory])
    client = connect(uri)
    experiment = client.get_experiment_by_name("star-hvd")
    assert experiment is not None
    runs = {run.data.tags["star.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) >= {name, f"{name}/0", f"{name}/1"}, "the job, and a nested run for every segment"
    run = runs[name]
    assert run.info.status == "FINISHED" and run.data.params["optimizer.class"] == "SGD"
    assert run.data.params["versions.torch"] and run.data.params["policy"] == "learned"
    assert run.data.params["tags.cluster"] == "here" and run.data.params["mode"] == "auto"
    assert run.data.params["model.source"] == "shipped"
    assert run.data.metrics["time_to_target_s"] > 0.0
    assert len(client.get_metric_history(run.info.run_id, "accuracy")) >= STEPS
    files = {Path(item.path).name for item in client.list_artifacts(run.info.run_id, "star")}
    assert files >= {"rank0.jsonl", "rank2.jsonl", "events.jsonl", "report.html"}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("policy", ["learned", "rule"])
def test_the_choice_is_explained_on_rank_0_only(tmp_path: Path, policy: str) -> None:
    job = _run(tmp_path, "", STAR_RUN_LOG="0", STAR_POLICY=policy)
    first, last = job.results[0]["said"]
    assert first.startswith("step ") and "sync" in first
    # The slow rank, as a rule; but on a busy machine another may be slower, the guard of accuracy has acted, or a plan
    # was left again, since it was not as fast as predicted.
    words = ("rank", "nobody", "loss", "noise", "predicted")
    assert last.startswith("step ") and any(word in last for word in words), last
    for rank in (1, 2):
        said = job.results[rank]["said"]  # A rank outside a subgroup adds how it sends.
        assert [text.split("; ")[:2] for text in said] == [["only rank 0 can explain", f"this is rank {rank}"]] * 2
    assert not (tmp_path / "runs").exists(), "a log that is switched off leaves nothing"


@pytest.mark.slow
@pytest.mark.timeout(SENT_LIMIT_S)
def test_all_optimizers_of_a_job_go_through_one_sender(tmp_path: Path) -> None:
    """Two at once, then four one after another; the sender is killed in the middle; a child outlives the job."""
    count, uri = 6, f"sqlite:///{tmp_path / 'mlflow.db'}"
    connect(uri).search_experiments()  # Makes MLflow's tables, which the sender would be killed at.
    env = {"MLFLOW_TRACKING_URI": uri, "STAR_LOG_DIR": str(tmp_path), "STAR_RUN_LOG": "1"}
    job = run_job("tests.multiproc.run_log_many", str(count), ranks=2, env=env).check()
    found = job.results[0]
    assert len(found["first"]) == len(found["second"]) == 1 and found["first"] != found["second"]
    assert found["last"] == found["second"] and found["starts"] == 2, "one process at a time, and none for each"
    assert "the sender of the run log ended with 2 runs left; it is restarted" in job.output
    names = [found["name"], *(f"{found['name']}-{number}" for number in range(1, count))]
    folders = [tmp_path / "runs" / name for name in names]

    def ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(found["second"][0]).status() == psutil.STATUS_ZOMBIE
        return True

    try:
        assert await_sent(folders, ended), "it ends by itself"
        assert psutil.pid_exists(found["child"]), "although the job's child is alive"
    finally:
        os.kill(found["child"], signal.SIGKILL)
    client = connect(uri)
    experiment = client.get_experiment_by_name("star-hvd")
    assert experiment is not None
    runs = {run.data.tags["star.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert {name for name in runs if "/" not in name} == set(names)
    assert all(runs[name].info.status == "FINISHED" for name in names)
