"""The run log without MLflow: files, queue, conversion, page."""

from __future__ import annotations

import errno
import fcntl
import html
import itertools
import json
import math
import os
import posixpath
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.diagnosis.stragglers import Straggler
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.records import RankStats, StepReport, StepTimes, Window
from star_hvd.run_log import RunLog, figures, layout, new_run_name, run_directory, story, sync_logs, window_values
from star_hvd.run_log.convert import RunState, flat, metric_name, window_metrics
from star_hvd.run_log.facts import environment, optimizer_facts
from star_hvd.run_log.page import sentence, write_page
from star_hvd.run_log.spool import SpoolWriter, read_events
from star_hvd.run_log.story import read_story

DEADLINE_S = 60.0  # Of a log's thread, whose files are read afterwards.


def _log(tmp_path: Path, rank: int = 0, **more: Any) -> RunLog:
    return RunLog(tmp_path / "runs" / "one", rank=rank, world_size=2, job={"batch": 32}, ship=False, **more)


def _seconds() -> Callable[[], float]:
    """A clock that is a second later each time: windows are kept, at most one per second."""
    return itertools.count(1000.0).__next__


def _report(step: int, rank: int = 0) -> StepReport:
    return StepReport(rank=rank, step=step, times=StepTimes(0.01 * (1 + rank)), wait_s=0.002)


def _events(path: Path) -> list[dict[str, Any]]:
    return [event for _, event in read_events(path)]


def _window(step: int, slow: bool = False) -> dict[str, Any]:
    ranks = tuple(RankStats(rank=r, compute_s=(0.01, 0.01 * (1 + 3 * r)), steps=(step - 1, step)) for r in (0, 1))
    found = [Straggler(rank=1, slowdown=4.0, since_step=step, cause="compute", evidence="-")] if slow else []
    window = Window(step=step, ranks=ranks)
    return window_values(window, mode="sync", stragglers=found, ranks={"wait_s": [0.3, 0.0]}, loss=1.0 / step)


def test_a_run_lands_in_files(tmp_path: Path) -> None:
    log, other = _log(tmp_path), _log(tmp_path, rank=1)
    for step in range(5):
        log.step(_report(step))
        other.step(_report(step, 1))
    log.plan(0, Plan.sync(2, reason="the start"), {"sync": 0.1})
    log.window(_window(3))
    log.metric("accuracy", 0.5, 4)
    other.metric("accuracy", 0.9, 4)  # Rank 0 alone speaks for the job.
    other.close("FINISHED", DEADLINE_S)
    log.close("FINISHED", DEADLINE_S)
    folder = tmp_path / "runs" / "one"
    assert [e["step"] for e in _events(folder / "rank1.jsonl") if e["kind"] == "step"] == list(range(5))
    events = _events(folder / "events.jsonl")
    assert [e["kind"] for e in events] == ["facts", "plan", "window", "metric", "end"]
    assert events[0]["values"] == {"world_size": 2, "batch": 32}
    assert events[1]["label"] == "sync" and events[1]["prediction"] == {"sync": 0.1}
    assert Plan.from_dict(events[1]["plan"]) == Plan.sync(2, reason="the start")
    assert events[2]["noise_scale"] is None, "unknown numbers are null: JSON has no NaN"
    assert events[4]["status"] == "FINISHED" and events[4]["dropped"] == 0
    assert layout.read_json(folder / "run.json")["home"] is True


def test_a_point_before_the_log_began_is_at_its_beginning(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.metric("accuracy", 0.1, -1, -3.0)
    log.metric("accuracy", 0.2, 2, 1.5)
    log.close("FINISHED", DEADLINE_S)
    points = [event for event in _events(log.directory / "events.jsonl") if event["kind"] == "metric"]
    assert [(one["value"], one["step"], one["time_s"]) for one in points] == [(0.1, 0, 0.0), (0.2, 2, 1.5)]


def test_only_rank_0_says_what_the_run_is(tmp_path: Path) -> None:
    other = _log(tmp_path, rank=1)
    assert layout.read_json(other.directory / "run.json")["home"] is False
    log = _log(tmp_path)
    third = _log(tmp_path, rank=1)
    assert layout.read_json(log.directory / "run.json")["home"] is True
    for one in (other, log, third):
        one.close()


def test_drafts_of_equal_process_ids_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in containers may share a folder and have the same process id."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "run.json"
    assert layout.draft_of(path) != layout.draft_of(path)
    replace, drafts = Path.replace, list[str]()

    def seen(draft: Path, target: Path) -> Path:
        drafts.append(draft.name)
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", seen)
    for number in range(2):
        layout.write_json(path, {"number": number})
    assert len(set(drafts)) == 2 and [one.name for one in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_is_made_once_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(draft: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "run.json"
    for number in range(2):
        layout.write_json(path, {"number": number}, replace=False)
        assert layout.read_json(path) == {"number": 0}, "what is there stays"
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    assert _log(tmp_path, rank=1).enabled


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    log = _log(tmp_path, enabled=False)
    log.step(_report(1))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_switches_it_off(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    log = _log(tmp_path)
    assert not log.enabled
    log.step(_report(1))
    log.close()


def test_a_removed_current_directory_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAR_LOG_DIR", raising=False)
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    log = RunLog(run_directory(new_run_name()), rank=0, world_size=2, ship=False)
    assert not log.enabled
    log.close()


def test_a_queue_that_overflows_loses_the_oldest_and_counts_them(tmp_path: Path) -> None:
    log = _log(tmp_path, rank=1, background=False, most_queued=100)  # Nothing is written before the end.
    for step in range(250):
        log.step(_report(step))
    log.flush()
    log.close("FINISHED", DEADLINE_S)
    steps = [e["step"] for e in _events(log.directory / "rank1.jsonl") if e["kind"] == "step"]
    assert steps[-1] == 249 and steps == sorted(steps)
    assert len(steps) + log.dropped == 250
    assert log.dropped == 150


def test_calls_from_many_threads_lose_nothing(tmp_path: Path) -> None:
    log = _log(tmp_path, rank=1)
    threads = [threading.Thread(target=lambda: [log.step(_report(s)) for s in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close("FINISHED", DEADLINE_S)
    assert sum(e["kind"] == "step" for e in _events(log.directory / "rank1.jsonl")) == 2000
    assert log.dropped == 0


@pytest.mark.slow
def test_a_full_disk_holds_entries_back_and_leaves_whole_lines(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the full disk; a process of its own, for the limit is the process's."""
    program = (
        "import json, logging, resource, signal, sys, time\n"
        "from pathlib import Path\n"
        "from scheduler.records import StepReport, StepTimes\n"
        "from star_hvd.run_log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]) / 'runs' / 'full', rank=1, world_size=2, ship=False)\n"
        "file = log.directory / 'rank1.jsonl'\n"
        "refused = []\n"
        "class Seen(logging.StreamHandler):\n"
        "    def emit(self, record):\n"
        "        super().emit(record)\n"
        "        if 'cannot be written for now' in record.getMessage(): refused.append(record)\n"
        "logging.getLogger('star_hvd').addHandler(Seen(sys.stderr))\n"
        "def lines():\n"
        "    return file.read_bytes().count(b'\"step\":') if file.exists() else 0\n"
        "def go(first, done):\n"
        "    for step in range(first, first + 200): log.step(StepReport(rank=1, step=step, times=StepTimes(0.1)))\n"
        "    limit_s = time.monotonic() + 60.0\n"
        "    while not done() and time.monotonic() < limit_s: time.sleep(0.02)\n"
        "    return file.stat().st_size if file.exists() else 0\n"
        "a = go(0, lambda: lines() == 200)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (a + 1000, resource.RLIM_INFINITY))\n"
        "b = go(200, lambda: refused)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "c = go(400, lambda: lines() == 600)\n"
        "log.close('FINISHED', 60.0)\n"
        "print(json.dumps([a, b, c, log.dropped]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, during, after, dropped = json.loads(done.stdout)
    assert before == during < after and dropped == 0
    assert "cannot be written for now" in done.stderr
    steps = [e["step"] for e in _events(tmp_path / "runs" / "full" / "rank1.jsonl") if e["kind"] == "step"]
    assert steps == list(range(600)), "nothing is lost while the queue has room, and no line is torn"


def test_a_torn_last_line_waits_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"a"}\n\xff\xfe junk\n[1]\n{"kind":"b"}\n{"kind":"c"')
    found = list(read_events(path))
    assert [event["kind"] for _, event in found] == ["a", "b"]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert [event["kind"] for _, event in read_events(path, found[-1][0])] == ["c"]
    assert list(read_events(tmp_path / "missing")) == []


def test_a_file_does_not_grow_past_its_limit(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "f", max_bytes=100)
    for number in range(100):
        writer.append([{"n": number}])
    writer.close()
    assert (tmp_path / "f").stat().st_size <= 100
    assert writer.dropped == 100 - len(_events(tmp_path / "f"))


def _fill(log: RunLog, steps: int) -> None:
    """A long job in little time: the log has no writer of its own."""
    for step in range(1, steps + 1):
        log.step(_report(step))
        log.window(_window(step))
        if step % 50 == 0:
            log.metric("accuracy", 0.1, step)
            log.plan(step, Plan.sync(2), None)
            log.flush()


def test_a_file_that_gets_full_thins_out_and_keeps_what_matters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = _log(tmp_path, background=False, clock=_seconds(), max_bytes=200_000, end_bytes=0)
    _fill(log, 3000)
    log.close()
    events = _events(log.directory / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert (log.directory / "events.jsonl").stat().st_size <= 200_000
    assert kinds.count("metric") == kinds.count("plan") == 60, "these all find room"
    assert events[-1]["kind"] == "end" and events[-1]["dropped"] == 0 and events[-1]["thinned"] == log.thinned
    for found in (events, _events(log.directory / "rank0.jsonl")):
        steps = [event["step"] for event in found if event["kind"] in ("window", "step")]
        assert steps[:100] == list(range(1, 101)), "nothing is left out while there is room"
        # Lines are as long as the times in them, so where the last one falls differs from run to run.
        assert steps[-1] > len(steps) + 500 and len(steps) < 2000, "far into the job, ever more sparsely"
    said = [record.getMessage() for record in caplog.records if "gets full" in record.getMessage()]
    assert len(said) == 1 and log.thinned > 2000


def test_curves_that_fill_a_file_leave_room_for_plans(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "f", max_bytes=20_000)
    for number in range(5000):
        if writer.keeps("metric"):
            writer.append([{"kind": "metric", "step": number}])
        if number % 1000 == 0 and writer.keeps("plan"):
            writer.append([{"kind": "plan", "step": number}])
    kept = _events(tmp_path / "f")
    assert sum(event["kind"] == "plan" for event in kept) == 5 and writer.dropped == 0
    metrics = [event["step"] for event in kept if event["kind"] == "metric"]
    assert metrics[:400] == list(range(400)) and metrics[-1] > 4000


LEAVES = st.none() | st.floats() | st.integers() | st.text()


@given(st.recursive(LEAVES, lambda s: st.lists(s) | st.dictionaries(st.text(), s), max_leaves=8))
def test_anything_becomes_json(value: Any) -> None:
    assert layout.clean(json.loads(json.dumps(layout.clean(value), allow_nan=False))) == layout.clean(value)


def test_a_call_costs_microseconds(tmp_path: Path) -> None:
    log = _log(tmp_path, rank=1)
    report = _report(3)
    costs = []
    for _ in range(2000):
        began = time.perf_counter()
        log.step(report)
        costs.append(time.perf_counter() - began)
    json_costs = []
    for _ in range(2000):
        began = time.perf_counter()
        json.dumps(layout.clean({"kind": "step", "step": 3, "compute_s": 0.01, "wait_s": 0.02, "input_s": 0.0}))
        json_costs.append(time.perf_counter() - began)
    log.close()
    assert sorted(costs)[200] < sorted(json_costs)[200], "a call does less than writing one short line of JSON"


@pytest.mark.slow
def test_a_run_is_live_while_its_writer_is(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from star_hvd.run_log.layout import RunLock\n"
        "a = RunLock(Path(sys.argv[1])); print(a.take(), flush=True); sys.stdin.read()\n"
    )
    assert not layout.is_live(tmp_path)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for holder in holders:
        assert holder.stdout is not None and holder.stdout.readline().strip() == "True", "the ranks share it"
    assert layout.is_live(tmp_path)
    holders[0].kill()
    holders[0].wait(120)
    assert layout.is_live(tmp_path)
    holders[1].kill()  # Even a killed one gives it back.
    holders[1].wait(120)
    assert not layout.is_live(tmp_path)


def _refusing(code: int) -> Callable[..., None]:
    def refused(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refused


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_run_is_live_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, "lockf", _refusing(code))
    log = _log(tmp_path, background=False)
    assert layout.RunLock(log.directory, sending=True).take(), "a run that cannot be locked can be sent"
    log.flush()
    assert layout.is_live(log.directory)
    old_s = time.time() - 100.0
    os.utime(log.directory / "events.jsonl", (old_s, old_s))
    assert not layout.is_live(log.directory), "its job was killed"
    log.plan(0, Plan.sync(2), None)
    log.flush()
    assert layout.is_live(log.directory)
    log.close()
    assert not layout.is_live(log.directory)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_is_held_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    _log(tmp_path).close()
    monkeypatch.setattr(fcntl, "lockf", _refusing(code))
    folder = tmp_path / "runs" / "one"
    assert not layout.RunLock(folder, sending=True).take() and layout.is_live(folder)


def test_a_lock_that_cannot_be_opened_is_told_by_sync_logs_and_tolerated_by_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_file = os.open

    def refused(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, flags, mode, **more)

    log = _log(tmp_path)
    log.close()
    monkeypatch.setattr(os, "open", refused)
    assert sync_logs.send_run(log.directory, "sqlite://", again=False) == "failed"
    assert "not sent: OSError: [Errno 30] Read-only file system" in capsys.readouterr().err
    layout.write_json(log.directory / "sent.json", {"uri": "sqlite://", "complete": True})
    assert sync_logs.send_run(log.directory, "sqlite://", again=False) == "skipped"
    other = _log(tmp_path, rank=1)
    assert other.enabled
    other.close()


def test_names_of_runs_are_checked(tmp_path: Path) -> None:
    assert run_directory(new_run_name(), tmp_path).parent == tmp_path / "runs"
    for name in ("", "..", "a/b", "a b"):
        with pytest.raises(ValueError, match="run name is"):
            run_directory(name, tmp_path)


def test_plans_that_differ_in_batch_shares_are_one_segment() -> None:
    """Older logs have a plan for every change of shares."""
    state = RunState()
    for step in range(50):
        plan = Plan.sync(2, balanced=True, batch_shares=(8 + step % 2, 8), plan_id=1)
        state.take({"kind": "plan", "time_s": float(step), "step": step, "label": plan.label, "plan": plan.to_dict()})
    assert len(state.segments) == 1
    again = Plan.sync(2, balanced=True, plan_id=2).to_dict()
    state.take({"kind": "plan", "time_s": 60.0, "step": 60, "label": "sync(balanced)", "plan": again})
    assert [(segment.first_step, segment.last_step) for segment in state.segments] == [(0, 60), (60, 60)]


def test_a_window_becomes_metrics() -> None:
    rows = {key: value for key, value, _, _ in window_metrics({**_window(10, slow=True), "time_s": 2.0}, 1000.0)}
    assert rows["loss"] == 0.1 and rows["stragglers"] == 1.0
    assert rows["rank1/wait_s"] == 0.0 and rows["wait_s/max"] == 0.3
    assert rows["rank1/compute_s"] == pytest.approx(0.025)
    assert "noise_scale" not in rows or not math.isnan(rows["noise_scale"])
    many = {"step": 1, "ranks": {"compute_s": [1.0] * 100}}
    assert "rank0/compute_s" not in {key for key, *_ in window_metrics(many, 0.0)}


def test_a_window_refuses_readings_of_another_size() -> None:
    with pytest.raises(ValueError, match="wait_s has 3 numbers; expected 2"):
        ranks = tuple(RankStats(rank=r, compute_s=(), steps=()) for r in (0, 1))
        window_values(Window(step=0, ranks=ranks), mode="sync", ranks={"wait_s": [1.0, 2.0, 3.0]})
    assert window_values(Window(step=0, ranks=ranks, fixed_part=0.2), mode="sync")["fixed_part"] == 0.2


def test_segments_and_target() -> None:
    state = RunState()
    events: list[dict[str, Any]] = [
        {"kind": "facts", "values": {"target": "accuracy >= 0.9"}},
        {"kind": "plan", "time_s": 0.0, "step": 0, "label": "sync"},
        {"kind": "window", "time_s": 1.0, "step": 10, "ranks": {"compute_s": [0.1, 0.3]}, "stragglers": [{}]},
        {"kind": "metric", "name": "loss", "value": 2.0, "step": 11, "time_s": 1.1},
        {"kind": "plan", "time_s": 2.0, "step": 20, "label": "partial(1)"},
        {"kind": "metric", "name": "accuracy", "value": 0.8, "step": 30, "time_s": 3.0},
        {"kind": "metric", "name": "accuracy", "value": 0.95, "step": 40, "time_s": 4.0},
        {"kind": "metric", "name": "accuracy", "value": 0.99, "step": 50, "time_s": 5.0},
        {"kind": "end", "time_s": 6.0, "status": "FINISHED"},
        {"kind": "from the future"},
        {"kind": "window", "time_s": "x", "step": None, "ranks": None},
    ]
    for event in events:
        state.take(event)
    first, second = state.segments
    assert first.summary() == {
        "duration_s": 2.0, "steps": 20.0, "step_s": 0.1, "compute_s": 0.2, "loss_first": 2.0, "loss_last": 2.0,
        "slow_share": 1.0,
    }  # fmt: skip
    assert second.last_step == 50
    assert state.totals()["time_to_target_s"] == 4.0 and state.totals()["steps_to_target"] == 40.0


@pytest.mark.parametrize("target", ["accuracy", ">=", "accuracy >= .", "accuracy == 3", "", None, 3])
def test_a_target_that_says_nothing_is_never_reached(target: Any) -> None:
    state = RunState()
    state.take({"kind": "facts", "values": {"target": target}})
    state.take({"kind": "metric", "name": "accuracy", "value": 3.0, "step": 1})
    assert "time_to_target_s" not in state.totals()


def test_facts_are_flat_and_short() -> None:
    found = flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": "x" * 9000, "we:ird": 3})
    assert found == {"a.b": "1", "a.c": "1,2", "e": "x" * 500, "we_ird": "3"}
    assert metric_name("../../etc") == "etc"


def test_names_of_metrics_are_normalized_paths_and_keep_their_letters() -> None:
    assert metric_name("train//loss") == "train/loss" and metric_name("a/./b") == "a/b"
    assert metric_name("val/../acc") == "val/acc" and metric_name("x" * 249 + "/y") == "x" * 249
    assert metric_name("précision") == "précision" and metric_name("精度") != metric_name("損失")
    assert metric_name("a:b") == "a_b" and metric_name("/ . /") == metric_name("") == "_"


@given(st.text("a./ é精", max_size=12) | st.builds(lambda a, b: "a" * a + b, st.integers(240, 252), st.text("a./ é精")))
def test_mlflow_accepts_names_of_metrics(name: str) -> None:
    found = metric_name(name)
    assert posixpath.normpath(found) == found and found not in (".", "")
    assert not found.startswith(("/", "..")) and len(found) <= 250
    assert metric_name(found) == found


def test_facts_of_a_job() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    facts = optimizer_facts(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), [4096, 1024])
    assert facts["class"] == "SGD" and facts["hyper"]["lr"] == 0.5
    assert facts["parameters"] == 8 and facts["parameter_bytes"] == 32 and facts["bucket_bytes"] == 4096
    found = environment(["a", "a", "b"])
    assert found["hosts"] == ["a", "b"] and found["ranks_per_host"] == [2, 1]
    assert found["hardware"]["cpus"] == os.cpu_count() and found["versions"]["torch"]
    json.dumps(layout.clean({**facts, **found}))


def test_arguments_and_folders_that_are_not_utf_8_cost_no_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", os.fsdecode(b"caf\xe9")])
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / ".git").write_text("no repository")
    monkeypatch.chdir(folder)
    log = _log(tmp_path)
    log.facts({**environment(), os.fsdecode(b"\xe9"): "\U0001f600"})
    log.close("FINISHED", DEADLINE_S)
    values = [event["values"] for event in _events(log.directory / "events.jsonl") if event["kind"] == "facts"][-1]
    assert values["program"] == "train.py --data caf?" and values["git_commit"] == ""
    assert values["?"] == "\U0001f600", "valid characters stay"


def test_the_page_tells_the_story(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log, other = _log(tmp_path, clock=_seconds()), _log(tmp_path, rank=1)
    log.plan(0, Plan.sync(2), None)
    for step in range(1, 20):
        log.window(_window(step, slow=step > 5))
        other.step(_report(step, 1))
    predicted = {"partial(1)": {"relative": 0.254, "low": 0.2, "high": 0.31, "reach": 0.99, "interval_s": 0.1}}
    log.plan(12, Plan.partial(2, 1, reason="rank 1 <computes> 4x slower"), predicted)
    log.metric("accuracy", 0.5, 19)
    other.close("FINISHED", DEADLINE_S)
    log.close("FINISHED", DEADLINE_S)
    text = write_page(log.directory, tmp_path / "page.html").read_text()
    assert text.count("<svg") == 3 and "http://" not in text.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons", "")
    assert "rank 1 &lt;computes&gt; 4x slower" in text and "partial(1)" in text
    story = read_story(log.directory)
    assert story.steps[1][0] == 19 and story.steps[1][1] == pytest.approx(0.02)
    assert sum(bool(w["stragglers"]) for w in story.windows) == 14
    assert sentence(story.state.segments[1].plan).endswith("partial(1), because rank 1 <computes> 4x slower")
    assert "<td>0.25 (0.20 to 0.31)</td><td>0.99</td>" in text, "what the decision rested on"


def test_the_page_shows_times_of_usual_batches_under_batch_shares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log, other = _log(tmp_path, clock=_seconds()), _log(tmp_path, rank=1, clock=_seconds())
    log.facts({"batch": 16})
    log.plan(0, Plan.sync(2, balanced=True, batch_shares=(24, 8)), None)
    for step in range(9):
        for rank, one, samples in ((0, log, 24), (1, other, 8)):
            one.step(StepReport(rank=rank, step=step, times=StepTimes(0.03), samples=samples))
    other.close("FINISHED", DEADLINE_S)
    log.close("FINISHED", DEADLINE_S)
    story = read_story(log.directory)
    assert [story.steps[rank][1] for rank in (0, 1)] == pytest.approx([0.02, 0.06]), "rank 1 is three times slower"
    assert {round(value, 9) for value in story.pace[1] if value > 0.0} == {0.06}
    assert "those of batches of the usual size" in write_page(log.directory, tmp_path / "page.html").read_text()


def test_log_and_page_say_how_a_plan_transmits(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = _log(tmp_path, clock=_seconds())
    plan = Plan.local(2, steps=4, transmission=Transmission(background=True), reason="averagings travel behind compute")
    log.plan(0, plan, None)
    for step in range(1, 10):
        log.window(_window(step))
    log.close("FINISHED", DEADLINE_S)
    story = read_story(log.directory)
    assert Plan.from_dict(story.state.segments[0].plan["plan"]) == plan
    text = write_page(log.directory, tmp_path / "page.html").read_text()
    assert "local(4,background), because averagings travel behind compute" in text


def _page(tmp_path: Path, target: str, **metrics: float) -> tuple[str, dict[str, Any]]:
    """A page of a run with a target, and the figures' axes, by their label."""
    log = _log(tmp_path)
    log.facts({"target": target})
    log.plan(0, Plan.sync(2), None)
    log.plan(4, Plan.partial(2, 1, reason="rank 1 is slow"), {})
    for name, value in metrics.items():
        log.metric(name, value / 2.0, 5)
        log.metric(name, value, 9)
    log.step(_report(3, 0))
    log.close("FINISHED", DEADLINE_S)
    found: dict[str, Any] = {}
    original = figures.svg_of

    def seen(draw: Callable[[Any], None], height_in: float) -> str:
        def drawn(figure: Any) -> None:
            draw(figure)
            found.update({axes.get_ylabel(): axes for axes in figure.axes})

        return original(drawn, height_in)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "svg_of", seen)
        return html.unescape(write_page(log.directory, tmp_path / "page.html").read_text()), found


@pytest.mark.slow
def test_the_page_says_what_became_of_the_target(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text, axes = _page(tmp_path / "a", "accuracy>=0.8", accuracy=0.83)
    assert "Target accuracy>=0.8 reached after " in text and "at step 9" in text
    labels = [line.get_label() for line in axes["accuracy"].get_lines()]
    assert "target >= 0.8" in labels and any(str(label).startswith("reached at ") for label in labels)
    text, axes = _page(tmp_path / "b", "accuracy>=0.9", accuracy=0.83)
    assert "Target accuracy>=0.9 not reached (best 0.83)." in text
    labels = [line.get_label() for line in axes["accuracy"].get_lines()]
    assert "target >= 0.9" in labels and not any(str(label).startswith("reached") for label in labels)
    assert "Target loss<=0.1 not reached (best 0.2)." in _page(tmp_path / "c", "loss<=0.1", loss=0.4)[0]
    assert "no metric `acc` was recorded" in _page(tmp_path / "d", "acc>=0.5", accuracy=0.83)[0]
    assert "Target accuracy=0.9 is invalid" in _page(tmp_path / "e", "accuracy=0.9", accuracy=0.83)[0]


def test_all_figures_have_one_time_axis_with_the_changes_of_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, axes = _page(tmp_path, "accuracy>=0.8", accuracy=0.83)
    shown = [axes[name] for name in ("steps per s", "rank", "accuracy")]
    assert len({one.get_xlim() for one in shown}) == 1
    assert len({(one.get_position().x0, one.get_position().x1) for one in shown}) == 1
    for one in shown:
        assert any(line.get_linestyle() == "--" and len(set(line.get_xdata())) == 1 for line in one.get_lines())
    names = [text.get_text() for text in axes["steps per s"].get_legend().get_texts()]
    assert names == ["sync", "partial"], "also of a segment too short for its name"


def test_the_pace_of_ranks_is_that_of_the_step_they_were_at() -> None:
    per_s = story.BINS // 10
    found = story.binned([(1.01, 0.5), (1.02, 0.7), (9.01, 4.0)], 10.0)
    assert found[0] == found[per_s] == pytest.approx(0.6)
    assert found[5 * per_s] == 4.0, "a long step ends with its report"
    assert math.isnan(found[-1])
    windows = [{"time_s": 2.0, "ranks": {"compute_s": [0.1, None]}}, {"time_s": 3.0}]
    assert story.slow_points(windows, 0) == [(2.0, 0.1)] and story.slow_points(windows, 1) == []


def test_a_page_of_an_empty_run_and_of_no_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = _log(tmp_path)
    log.close("FAILED", DEADLINE_S)
    assert "FAILED" in write_page(log.directory, tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="expected 1"):
        write_page(tmp_path, tmp_path / "other.html")




def test_the_folder_of_a_page_is_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = _log(tmp_path)
    log.close("FINISHED", DEADLINE_S)
    out = tmp_path / "pages" / "of-today" / "run.html"
    assert write_page(log.directory, out) == out and out.is_file()
