"""The run log when MLflow is gone, hangs or is killed, when the disk is full, and when the job itself is killed."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from star_hvd.run_log import layout, sync_logs
from star_hvd.run_log.sender import connect
from star_hvd.run_log.spool import read_events
from tests.multiproc.run_log_raw import STEP_S, UNWRITTEN
from tests.support.extras import needs
from tests.support.launch import run_job
from tests.support.senders import SENT_LIMIT_S, await_sent

pytestmark = [pytest.mark.fault, needs("mlflow")]

STEPS = 150
CALL_S = 0.05 * STEP_S


@pytest.fixture
def hanging_server() -> Iterator[str]:
    """It takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def refusing_server() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.timeout(SENT_LIMIT_S)
@pytest.mark.parametrize("server", ["hanging_server", "refusing_server"])
def test_a_dead_server_costs_nothing_and_gets_the_log_later(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    env = {"MLFLOW_TRACKING_URI": request.getfixturevalue(server), "STAR_RUN_LOG": "0"}
    words = (str(tmp_path), str(STEPS))
    job = run_job("tests.multiproc.run_log_raw", *words, ranks=2, env=env).check()
    first = job.results[0]
    directory = tmp_path / "runs" / first["name"]
    assert [result["steps"] for result in job.results] == [STEPS, STEPS]
    assert first["dropped"] == 0 and first["used_s"] < CALL_S, first
    assert first["least_s"] < CALL_S, "every call waited"
    assert not layout.read_json(directory / "sent.json").get("complete")
    end_sender(directory)
    assert sync(tmp_path) == 0
    run = the_run(tmp_path, first["name"])
    assert run.info.status == "FINISHED" and run.data.metrics["steps"] == STEPS - 1


@pytest.mark.slow
@pytest.mark.timeout(SENT_LIMIT_S)
@pytest.mark.parametrize("sender_too", [False, True])
def test_a_killed_job_leaves_its_log(tmp_path: Path, sender_too: bool) -> None:
    env = {"MLFLOW_TRACKING_URI": database(tmp_path), "STAR_RUN_LOG": "0"}
    words = (str(tmp_path), "400", "die")
    job = run_job("tests.multiproc.run_log_raw", *words, ranks=2, env=env)
    assert job.returncode != 0
    name = job.results[0]["name"]
    directory = tmp_path / "runs" / name
    if sender_too:
        end_sender(directory)
        sync(tmp_path)
    assert await_sent([directory])
    run = the_run(tmp_path, name)
    assert run.info.status == "KILLED"
    # What was written in the last half second may be missing.
    assert run.data.metrics["steps"] >= 200 - 1 - UNWRITTEN


@pytest.mark.slow
@pytest.mark.timeout(SENT_LIMIT_S)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root; tests/unit has the limit of a process")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "star-test", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounting here: {mounted.stderr!r}")
    try:
        env = {"MLFLOW_TRACKING_URI": database(tmp_path), "STAR_RUN_LOG": "0"}
        job = run_job("tests.multiproc.run_log_raw", str(disk), "600", ranks=2, env=env).check()
        assert "the run log cannot be written for now" in job.output
        directory = disk / "runs" / job.results[0]["name"]
        end_sender(directory)
        steps = [event["step"] for _, event in read_events(directory / "rank1.jsonl") if event["kind"] == "step"]
        assert 0 < len(steps) < 600 and steps == list(range(len(steps))), "what fitted, in whole lines"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert sync(disk, database(tmp_path)) == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def database(root: Path) -> str:
    return f"sqlite:///{root / 'mlflow.db'}"


def sync(root: Path, uri: str | None = None) -> int:
    parser = argparse.ArgumentParser()
    sync_logs.add_arguments(parser)
    return int(sync_logs.run(parser.parse_args(["--logs", str(root), "--to", uri or database(root)])))


def the_run(root: Path, name: str) -> object:
    client = connect(database(root))
    experiment = client.get_experiment_by_name("star-hvd")
    found = client.search_runs([experiment.experiment_id], f"tags.`star.run` = '{name}'")
    assert len(found) == 1
    return found[0]


def end_sender(directory: Path) -> None:
    """Kill the process that sends this run, if it is still there."""
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-1:] == [str(directory)] and process.cmdline()[:1] == [sys.executable]:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
        except psutil.Error:
            continue
