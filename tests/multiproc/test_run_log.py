"""A real job with a run log: every rank's steps on disk and the run in MLflow, sent by the process beside rank 0."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from star_hvd.run_log import layout
from star_hvd.run_log.sender import connect
from star_hvd.run_log.spool import read_events
from tests.support.launch import run_job

pytestmark = pytest.mark.multiproc

STEPS = 200


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_is_in_mlflow_soon_after_its_end(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    job = run_job(
        "tests.multiproc.run_log_job", str(tmp_path), str(STEPS), ranks=2,
        env={"MLFLOW_TRACKING_URI": uri, "STAR_RUN_LOG": "0"}, timeout_s=120.0,
    ).check()  # fmt: skip
    name = job.results[0]["name"]
    directory = tmp_path / "runs" / name
    for rank in range(2):
        kinds = [event["kind"] for _, event in read_events(directory / f"rank{rank}.jsonl")]
        assert kinds.count("step") == STEPS and job.results[rank]["dropped"] == 0
    # A step takes 20 ms of sleep and more; three calls of the log must be nothing beside it.
    assert job.results[0]["call_s"] < 0.02 * 0.05
    limit_s = time.monotonic() + 100.0
    while not layout.read_json(directory / "sent.json").get("complete") and time.monotonic() < limit_s:
        time.sleep(0.5)
    client = connect(uri)
    experiment = client.get_experiment_by_name("star-hvd")
    runs = {run.data.tags["star.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == [name, f"{name}/0"]
    run = runs[name]
    assert run.info.status == "FINISHED" and run.data.params["optimizer.class"] == "SGD"
    assert run.data.metrics["steps"] == STEPS - 1 and run.data.params["versions.torch"]
    assert len(client.get_metric_history(run.info.run_id, "loss")) >= STEPS
    files = {Path(item.path).name for item in client.list_artifacts(run.info.run_id, "star")}
    assert files >= {"rank0.jsonl", "rank1.jsonl", "events.jsonl", "report.html"}
