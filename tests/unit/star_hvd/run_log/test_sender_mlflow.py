"""The run log against a real MLflow on SQLite: what a run contains, and that sending again changes nothing."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.plan.plan import Plan
from scheduler.policy.switch_outcome import SwitchOutcome
from scheduler.records import StepReport, StepTimes
from star_hvd.run_log import RunLog, dispatch, layout, page, report_page, sync_logs
from star_hvd.run_log import sender as sender_module
from star_hvd.run_log.sender import Sender, connect
from tests.support.extras import needs

pytestmark = [pytest.mark.slow, needs("mlflow")]

RUN = "20260101-000000-abcdef"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database made once: its first migration takes seconds."""
    place = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    connect(uri).search_experiments()
    return uri


@pytest.fixture
def root(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"test-{tmp_path.name}-{os.getpid()}")
    yield tmp_path


def write_run(root: Path, *, end: bool = True, name: str = RUN) -> Path:
    directory = root / "runs" / name
    if end:
        _write_run(directory, end=True)
        return directory
    child = os.fork()  # One that is killed: written so far, and nothing more.
    if child == 0:
        try:
            _write_run(directory, end=False)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return directory


def _write_run(directory: Path, *, end: bool) -> None:
    began_s, seconds = time.monotonic(), itertools.count()
    job = {"batch": 32, "target": "accuracy>=0.9"}
    log = RunLog(
        directory, rank=0, world_size=2, job=job, ship=False, background=False, clock=lambda: began_s + next(seconds)
    )
    other = RunLog(directory, rank=1, world_size=2, ship=False, background=False)
    log.facts({"optimizer": {"class": "SGD"}})
    log.plan(0, Plan.sync(2, reason="the start"), None)
    for step in range(1, 6):
        ranks = {"compute_s": [0.1, 0.1 * step], "wait_s": [0.1, None]}
        log.window({"step": step, "mode": "sync", "loss": 1.0 / step, "noise_scale": float("nan"), "ranks": ranks})
        log.step(StepReport(rank=0, step=step, times=StepTimes(0.1)))
        other.step(StepReport(rank=1, step=step, times=StepTimes(0.1 * step)))
    log.plan(5, Plan.partial(2, 1, reason="rank 1 is slow"), {"step_s": 0.1})
    log.metric("accuracy", 0.95, 7, 60.0)
    other.close("FINISHED", 60.0)
    log.flush()
    if end:
        log.close("FINISHED", 60.0)


def contents(client: Any, experiment: str) -> dict[str, Any]:
    """Everything MLflow has of an experiment, by `star.run`."""
    found = {}
    for run in client.search_runs([experiment]):
        history = {
            key: [(m.timestamp, m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        info = (run.info.status, run.info.start_time, run.info.end_time, run.info.run_name)
        files = sorted(item.path for item in client.list_artifacts(run.info.run_id, "star"))
        tags = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.user")}
        found[run.data.tags["star.run"]] = (dict(run.data.params), tags, history, info, files, run.info.run_id)
    return found


def everything(root: Path, store: str) -> dict[str, Any]:
    client = connect(store)
    experiment = client.get_experiment_by_name(layout.experiment_name())
    return contents(client, experiment.experiment_id)


def test_what_a_run_contains(root: Path, store: str) -> None:
    directory = write_run(root)
    sender = Sender(directory, store)
    assert sender.send(), "its end was among the events"
    sender.finish("KILLED")
    runs = everything(root, store)
    assert sorted(runs) == [RUN, f"{RUN}/0", f"{RUN}/1"]
    params, tags, metrics, info, files, run_id = runs[RUN]
    assert params["batch"] == "32" and params["world_size"] == "2" and params["optimizer.class"] == "SGD"
    assert tags["star.schema"] == "1" and tags["star.kind"] == "job"
    assert [step for _, step, _ in metrics["loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, _, value in metrics["rank1/compute_s"]] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert "noise_scale" not in metrics and "rank1/wait_s" not in metrics, "unknown numbers are left out"
    assert [value for _, _, value in metrics["time_to_target_s"]] == [60.0]
    assert info[0] == "FINISHED" and info[2] - info[1] >= 60_000
    names = {Path(path).name for path in files}
    assert names >= {"events.jsonl", "run.json", "rank0.jsonl", "rank1.jsonl", "report.html"}
    params, tags, metrics, info, _, _ = runs[f"{RUN}/0"]
    assert tags["mlflow.parentRunId"] == run_id and tags["star.reason"] == "the start"
    assert params["label"] == "sync" and params["plan.world_size"] == "2"
    assert metrics["steps"][0][2] == 5.0 and metrics["loss_last"][0][2] == 0.2 and info[0] == "FINISHED"
    params, *_ = runs[f"{RUN}/1"]
    assert params["label"] == "partial_1_" or params["label"] == "partial(1)"
    assert params["prediction.step_s"] == "0.1"


def test_an_outcome_reaches_its_segment_after_the_next_plan(root: Path, store: str) -> None:
    """The log's thread takes plans first, then outcomes."""
    directory = root / "runs" / RUN
    log = RunLog(directory, rank=0, world_size=2, ship=False, background=False)
    for number in range(3):
        log.plan(10 * number, dataclasses.replace(Plan.sync(2), plan_id=number), None)
    measured = {"predicted": 1.2, "measured": 1.1, "steps": 10.0}
    log.outcome(SwitchOutcome(plan_id=1, label="sync", step=20, against="sync", harmful=False, **measured))
    log.close("FINISHED", 60.0)
    Sender(directory, store).finish("KILLED")
    runs = everything(root, store)
    assert [value for _, _, value in runs[f"{RUN}/1"][2]["measured_speed"]] == [1.1]
    assert [value for _, _, value in runs[f"{RUN}/1"][2]["steps"]] == [10.0], "sent twice, stored once"
    assert "measured_speed" not in runs[f"{RUN}/0"][2] and "measured_speed" not in runs[f"{RUN}/2"][2]


def test_sending_again_changes_nothing(root: Path, store: str) -> None:
    directory = write_run(root)
    Sender(directory, store).finish("KILLED")
    before = everything(root, store)
    Sender(directory, store).finish("KILLED")
    assert everything(root, store) == before, "from where it was"
    (directory / "sent.json").unlink()
    Sender(directory, store).finish("KILLED")
    assert everything(root, store) == before, "all over again"


@pytest.mark.parametrize("calls", [1, 3, 5, 8])
def test_a_sender_that_dies_anywhere_is_continued(
    root: Path, store: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fails after the n-th request: a sender goes on; nothing is missing or double."""
    reference = write_run(root / "reference")
    Sender(reference, store, batch=6).finish("KILLED")
    whole = everything(root, store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{layout.experiment_name()}-broken-{calls}")
    directory = root / "runs" / RUN
    directory.parent.mkdir(parents=True)
    (root / "reference" / "runs" / RUN).rename(directory)
    (directory / "sent.json").unlink()

    left = calls
    real = connect(store)

    class Failing:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal left
                result = getattr(real, name)(*args, **more)
                left -= 1
                if left == 0:  # It took the request; the answer was lost.
                    raise ConnectionError("gone")
                return result

            return call

    monkeypatch.setattr(sender_module, "connect", lambda uri: Failing())
    broken = layout.experiment_name()
    sender, failures = Sender(directory, store, experiment=broken, batch=6), 0
    for _ in range(200):
        try:
            sender.finish("KILLED")
            break
        except ConnectionError:
            failures += 1
            left = calls + failures  # Ever later, so that every place is hit once.
            if failures % 2:
                sender = Sender(directory, store, experiment=broken, batch=6)  # The process died with it.
    assert failures > 2
    sent = everything(root, store)
    assert sorted(sent) == sorted(whole)
    for key in whole:
        assert sent[key][0] == whole[key][0] and sent[key][2:5] == whole[key][2:5], key


class FileClient:
    """MLflow's client, which refuses one file."""

    def __init__(self, store: str, refused: str) -> None:
        self.refused = refused
        self.sent: list[str] = []
        self._real = connect(store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def log_artifact(self, run_id: str, path: str, place: str) -> None:
        if Path(path).name == self.refused:
            raise ConnectionError("gone")
        self._real.log_artifact(run_id, path, place)
        self.sent.append(Path(path).name)


class FailingOnce:
    """MLflow's client, of which the first request of one kind does not reach the server."""

    def __init__(self, store: str, kind: str) -> None:
        self._real, self._kind = connect(store), kind

    def __getattr__(self, name: str) -> Any:
        if name == self._kind:
            self._kind = ""
            raise ConnectionError("a slow server")
        return getattr(self._real, name)


@pytest.mark.parametrize("kind", ["get_experiment_by_name", "search_runs", "create_run", "get_run"])
def test_a_sender_goes_on_after_a_request_failed_while_its_run_was_made(
    root: Path, store: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process beside a job keeps its sender: one slow answer must not end the sending for the rest of the job."""
    client = FailingOnce(store, kind)
    monkeypatch.setattr(sender_module, "connect", lambda uri: client)
    sender = Sender(write_run(root), store)
    with pytest.raises(ConnectionError, match="a slow server"):
        sender.send()
    sender.finish("KILLED")
    assert sender.complete and sorted(everything(root, store)) == [RUN, f"{RUN}/0", f"{RUN}/1"]


def test_parameters_that_mlflow_has_are_read_though_that_failed_once(
    root: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_run(root)
    Sender(directory, store).finish("KILLED")
    (directory / "sent.json").unlink()
    events = directory / "events.jsonl"
    events.write_text(events.read_text().replace('"batch":32', '"batch":64'))
    client = FailingOnce(store, "get_run")
    monkeypatch.setattr(sender_module, "connect", lambda uri: client)
    sender = Sender(directory, store)
    with pytest.raises(ConnectionError, match="a slow server"):
        sender.send()
    sender.finish("KILLED")
    params, tags, *_ = everything(root, store)[RUN]
    assert params["batch"] == "32" and tags["star.changed.batch"] == "64", "MLflow refuses another value of a parameter"


def test_every_accepted_file_is_progress_and_is_sent_once(
    root: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's process ends after five minutes without progress."""
    directory, client, seen = write_run(root), FileClient(store, "rank1.jsonl"), list[list[str]]()
    monkeypatch.setattr(sender_module, "connect", lambda uri: client)
    with pytest.raises(ConnectionError):
        Sender(directory, store, on_progress=lambda: seen.append(client.sent[:])).finish("KILLED")
    assert seen[-1] == ["rank0.jsonl"], "noted after the last accepted file"
    client.refused = ""
    Sender(directory, store, on_progress=lambda: seen.append(client.sent[:])).finish("KILLED")
    files = ["rank0.jsonl", "rank1.jsonl", "run.json", "events.jsonl", "report.html"]
    assert client.sent == files and all(files[:count] in seen for count in range(1, 6))
    Sender(directory, store).finish("KILLED")
    assert client.sent == 2 * files, "a complete run is sent again as a whole"


@pytest.mark.parametrize("refused", ["rank0.jsonl", "report.html"])
def test_what_a_repeated_attempt_sends_again_is_no_progress(
    root: Path, store: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store of files is out of reach, the sender's process would never end."""
    directory, client, seen = write_run(root), FileClient(store, refused), list[int]()
    monkeypatch.setattr(sender_module, "connect", lambda uri: client)
    sender = Sender(directory, store, on_progress=lambda: seen.append(1))
    with pytest.raises(ConnectionError):
        sender.finish("KILLED")
    first = len(seen)
    assert first, "what MLflow took is progress"
    for _ in range(3):
        with pytest.raises(ConnectionError):
            sender.finish("KILLED")
    assert len(seen) == first
    client.refused = ""
    sender.finish("KILLED")
    assert sender.complete and len(seen) > first


def test_a_look_without_new_events_is_no_progress(root: Path, store: str) -> None:
    """Nothing is asked of MLflow then: it may be gone since its last answer."""
    directory, seen = write_run(root), list[int]()
    sender = Sender(directory, store, on_progress=lambda: seen.append(1))
    assert sender.send()
    first = len(seen)
    assert sender.send() and len(seen) == first
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"metric","name":"loss","value":0.5,"step":9,"time_s":61.0}\n')
    sender.send()
    assert len(seen) == first + 1


def test_a_run_has_ended_before_its_page_is_made(root: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a job of days takes minutes; a sender killed meanwhile must not leave a run that goes on for ever."""

    def killed(*args: Any) -> Path:
        raise KeyboardInterrupt

    directory = write_run(root)
    monkeypatch.setattr(page, "write_page", killed)
    with pytest.raises(KeyboardInterrupt):
        Sender(directory, store).finish("KILLED")
    _, _, metrics, info, files, _ = everything(root, store)[RUN]
    assert info[0] == "FINISHED" and [value for _, _, value in metrics["steps"]] == [7.0]
    assert {Path(path).name for path in files} == {"events.jsonl", "run.json", "rank0.jsonl", "rank1.jsonl"}
    assert not Sender(directory, store).complete, "a later call makes the page"


def test_a_file_that_grew_is_sent_again(root: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, client = write_run(root), FileClient(store, "run.json")
    monkeypatch.setattr(sender_module, "connect", lambda uri: client)
    with pytest.raises(ConnectionError):
        Sender(directory, store).finish("KILLED")
    client.refused = ""
    with (directory / "rank1.jsonl").open("ab") as file:
        file.write(b'{"kind":"step"}\n')
    Sender(directory, store).finish("KILLED")
    assert client.sent[:4] == ["rank0.jsonl", "rank1.jsonl", "rank1.jsonl", "run.json"]


def test_a_killed_run_is_sent_by_the_command_and_marked(
    root: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(root, end=False)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"metric","na')  # The kill came in the middle of a line.
    assert command_line(["sync-logs", "--logs", str(root)]) == 0
    assert "1 sent, 0 failed, 0 skipped" in capsys.readouterr().out
    assert everything(root, store)[RUN][3][0] == "KILLED"
    assert command_line(["sync-logs", "--logs", str(root)]) == 0
    assert "0 sent, 0 failed, 1 skipped" in capsys.readouterr().out


def test_a_run_is_sent_to_the_experiment_of_its_job(root: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = layout.experiment_name()
    directory = write_run(root)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{experiment}-of-another-shell")
    assert command_line(["sync-logs", "--logs", str(root)]) == 0
    client = connect(store)
    assert client.get_experiment_by_name(f"{experiment}-of-another-shell") is None
    found = contents(client, client.get_experiment_by_name(experiment).experiment_id)
    assert sorted(found) == [RUN, f"{RUN}/0", f"{RUN}/1"]
    # A run that was begun stays where it is, with its segments.
    layout.write_json(directory / "sent.json", {"uri": store, "run_id": found[RUN][5]})
    Sender(directory, store, experiment=f"{experiment}-of-another-shell").finish("KILLED")
    assert client.get_experiment_by_name(f"{experiment}-of-another-shell") is None
    assert contents(client, client.get_experiment_by_name(experiment).experiment_id) == found


def test_a_deleted_experiment_is_told_and_not_restored(
    root: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = connect(store)
    experiment = client.create_experiment(layout.experiment_name(), artifact_location=str(root / "artifacts"))
    client.delete_experiment(experiment)
    write_run(root)
    assert command_line(["sync-logs", "--logs", str(root)]) == 1
    said = capsys.readouterr().err
    assert f"MLflow's experiment {layout.experiment_name()} was deleted" in said
    assert f"`mlflow experiments restore --experiment-id {experiment}`, or start jobs with another" in said
    assert client.get_experiment(experiment).lifecycle_stage == "deleted"
    client.restore_experiment(experiment)
    assert command_line(["sync-logs", "--logs", str(root)]) == 0
    assert sorted(everything(root, store)) == [RUN, f"{RUN}/0", f"{RUN}/1"]


def test_the_job_s_own_process_is_left_alone(root: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from pathlib import Path; from star_hvd.run_log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]), rank=0, world_size=1, ship=False); print('ready', flush=True)\n"
        "sys.stdin.read(); log.close()\n"
    )
    command_words = [sys.executable, "-c", program, str(root / "runs" / RUN)]
    job = subprocess.Popen(command_words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None and job.stdout.readline().strip() == "ready"
        assert command_line(["sync-logs", "--logs", str(root)]) == 0
        assert "its job is running" in capsys.readouterr().out
        job.communicate("", timeout=200)
        assert command_line(["sync-logs", "--logs", str(root)]) == 0
        assert "1 sent" in capsys.readouterr().out
    finally:
        job.kill()
        job.wait(120)


def test_another_host_s_ranks_join_the_same_run(root: Path, store: str) -> None:
    """Without a shared disk every host has a folder of the same name; the other one has no events."""
    Sender(write_run(root / "a"), store).finish("KILLED")
    log = RunLog(root / "b" / "runs" / RUN, rank=5, world_size=8, ship=False)
    log.step(StepReport(rank=5, step=1, times=StepTimes(0.1)))
    log.close("FINISHED", 60.0)
    Sender(log.directory, store).finish("KILLED")
    runs = everything(root, store)
    assert {Path(path).name for path in runs[RUN][4]} >= {"rank0.jsonl", "rank5.jsonl"}
    assert len(runs) == 3


def test_the_report_command(root: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(root)
    Sender(directory, store).finish("KILLED")
    run_id = everything(root, store)[RUN][5]
    for number, what in enumerate((str(directory), RUN, run_id)):
        out = root / f"page{number}.html"
        assert command_line(["report", what, "--logs", str(root), "--out", str(out)]) == 0
        assert "rank 1 is slow" in out.read_text()
    pages = [(root / f"page{number}.html").read_text() for number in range(3)]
    assert len(pages[0]) == len(pages[1])
    assert command_line(["report", "nothing", "--logs", str(root), "--out", str(root / "x.html")]) == 2
    assert "nothing is no run folder" in capsys.readouterr().err
    assert not (root / "x.html").exists()


def test_a_run_of_another_version_is_refused(root: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(root)
    values = layout.read_json(directory / "run.json")
    layout.write_json(directory / "run.json", {**values, "schema": 99})
    with pytest.raises(ValueError, match="version 99; expected 1"):
        Sender(directory, store)
    assert command_line(["sync-logs", "--logs", str(root)]) == 1
    assert "version 99" in capsys.readouterr().err


@pytest.mark.slow
def test_the_sender_gives_way_to_the_job_and_imports_no_torch_horovod_pandas(root: Path, store: str) -> None:
    directory = write_run(root)
    # Read at once, before the imports, since tests beside this one raise the priority of all senders (`await_sent`).
    check = dispatch.SHIPPER_PROGRAM.replace("if os.fork(): os._exit(0)\n", "nice = os.nice(0)\n").replace(
        "sys.exit(main(int(sys.argv[3])))",
        "main(int(sys.argv[3]))\nprint(nice, sorted({'torch', 'horovod', 'pandas'} & set(sys.modules)))",
    )
    assert "fork" not in check and "print" in check
    package = Path(dispatch.__file__).resolve().parents[1]
    words = [sys.executable, "-c", check, str(package), str(package.parent), str(os.getpid())]
    told = json.dumps({"directory": str(directory), "uri": layout.tracking_uri(root), "experiment": "elsewhere"})
    done = subprocess.run(words, input=f"{told}\nnonsense\n", capture_output=True, text=True, timeout=300, cwd=root)
    assert done.stdout.strip().endswith("19 []"), done.stderr
    assert Sender(directory, layout.tracking_uri(root)).complete
    assert "MiB of memory at most" in (directory / "shipper.log").read_text()
    experiment = connect(store).get_experiment_by_name("elsewhere")
    assert RUN in contents(connect(store), experiment.experiment_id), "as it was when the run began"


def command_line(words: list[str]) -> int:
    module: Any = {"sync-logs": sync_logs, "report": report_page}[words[0]]
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words[1:])))


def test_a_database_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """MLflow cannot open one again whose first migration was killed."""
    path = tmp_path / "mlflow.db"

    class Killed:
        def __init__(self, uri: str) -> None:
            Path(uri.removeprefix("sqlite:///")).write_bytes(b"half a database")

        def search_experiments(self, max_results: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender_module.make_database(path, Killed)
    assert list(tmp_path.iterdir()) == []
    assert [e.name for e in connect(f"sqlite:///{path}").search_experiments()] == ["Default"]
    assert path.is_file() and not list(tmp_path.glob(".mlflow.db*"))
    sender_module.make_database(path, Killed)  # What is there stays.
    assert [e.name for e in connect(f"sqlite:///{path}").search_experiments()] == ["Default"]
