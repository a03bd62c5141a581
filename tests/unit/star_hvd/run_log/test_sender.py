"""The one sender of a job: when it starts, that it ends by itself, and what happens where it ends too early."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from star_hvd.run_log import RunLog, dispatch, layout, shipper
from star_hvd.run_log.dispatch import Dispatch
from star_hvd.run_log.shipper import Shipping

DEADLINE_S = 180.0  # Some wait for a process that imports torch first, on a busy machine.

# Notes its process id and what it is told; `complete` in its argument makes every run of which it is told complete.
RECORDER = (
    "import json, os, sys, time\n"
    "from pathlib import Path\n"
    "place, how = Path(sys.argv[1]), sys.argv[2]\n"
    "(place / f'{os.getpid()}.pid').touch()\n"
    "if 'dies' in how: sys.exit(3)\n"
    "for line in sys.stdin:\n"
    "    with open(place / f'{os.getpid()}.told', 'a') as file: file.write(line)\n"
    "    if 'complete' in how:\n"
    "        Path(json.loads(line)['directory'], 'sent.json').write_text('{\"complete\": true}')\n"
    "    if 'once' in how: sys.exit(0)\n"
)


def wait_for(what: Callable[[], Any]) -> Any:
    limit_s = time.monotonic() + DEADLINE_S
    while not (found := what()) and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert found
    return found


def is_over(pid: int) -> bool:
    """Whether a process has ended; somebody else may bury it while we look."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Recorder:
    """Stands for the sender's process."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.how = ""

    def start(self, label: Path, line: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", RECORDER, str(self.place), self.how], stdin=line.fileno())

    @property
    def pids(self) -> list[int]:
        return sorted(int(path.stem) for path in self.place.glob("*.pid"))

    def told(self, pid: int) -> list[str]:
        path = self.place / f"{pid}.told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Path(json.loads(line)["directory"]).name for line in lines]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(tmp_path)
    monkeypatch.setattr(dispatch, "start_sender", found.start)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    return found


@pytest.fixture
def sending(recorder: Recorder) -> Iterator[Dispatch]:
    found = Dispatch(after_s=0.1, first_pause_s=0.05, check_interval_s=0.05)
    yield found
    found.close(DEADLINE_S)


def a_run(tmp_path: Path, name: str) -> Path:
    directory = tmp_path / "runs" / name
    directory.mkdir(parents=True)
    return directory


# ---- rank 0's side --------------------------------------------------------------------------------------------------


def test_fifty_optimizers_one_after_another_have_one_sender(
    tmp_path: Path, recorder: Recorder, sending: Dispatch
) -> None:
    for number in range(50):
        sending.send(a_run(tmp_path, f"run-{number}"))
    (pid,) = wait_for(lambda: recorder.pids)
    wait_for(lambda: len(recorder.told(pid)) == 50)
    for number in range(50, 60):
        sending.send(a_run(tmp_path, f"run-{number}"))
    wait_for(lambda: len(recorder.told(pid)) == 60)
    assert recorder.told(pid) == [f"run-{number}" for number in range(60)]
    assert sending.starts == 1 and recorder.pids == [pid]
    sending.close(DEADLINE_S)
    wait_for(lambda: is_over(pid))


def test_a_job_of_a_moment_starts_it_at_its_end(tmp_path: Path, recorder: Recorder) -> None:
    sending = Dispatch(after_s=1e6, check_interval_s=0.05)
    sending.send(a_run(tmp_path, "one"))
    time.sleep(0.3)
    assert sending.starts == 0, "a job that fails at once does not pay for it"
    sending.close(DEADLINE_S)
    assert sending.starts == 1
    wait_for(lambda: recorder.pids and recorder.told(recorder.pids[0]) == ["one"])


def test_a_killed_sender_is_noticed_and_started_again(
    tmp_path: Path, recorder: Recorder, sending: Dispatch, caplog: pytest.LogCaptureFixture
) -> None:
    done, going_on = a_run(tmp_path, "done"), a_run(tmp_path, "going-on")
    sending.send(done)
    sending.send(going_on)
    (first,) = wait_for(lambda: recorder.pids)
    wait_for(lambda: len(recorder.told(first)) == 2)
    (done / "sent.json").write_text('{"complete": true}')
    psutil.Process(first).kill()
    wait_for(lambda: len(recorder.pids) == 2)
    second = next(pid for pid in recorder.pids if pid != first)
    wait_for(lambda: recorder.told(second) == ["going-on"])
    assert sending.starts == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ended with 1 runs left; it is restarted" in caplog.text


def test_one_that_ends_after_its_work_is_started_for_the_next_run(
    tmp_path: Path, recorder: Recorder, sending: Dispatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.how = "complete once"
    sending.send(a_run(tmp_path, "one"))
    wait_for(lambda: sending.starts == 1 and not sending.incomplete)
    time.sleep(0.3)
    assert sending.starts == 1 and sending.failures == 0, "there is nothing to start it for"
    sending.send(a_run(tmp_path, "two"))
    wait_for(lambda: sending.starts == 2 and not sending.incomplete)
    assert not caplog.records


def test_one_that_cannot_run_is_given_up(
    tmp_path: Path, recorder: Recorder, sending: Dispatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.how = "dies"
    sending.send(a_run(tmp_path, "one"))
    wait_for(lambda: "star-hvd sync-logs sends the rest" in caplog.text)
    assert sending.starts == dispatch.MOST_FAILURES == len(recorder.pids)
    sending.send(a_run(tmp_path, "two"))  # Without effect, and without an error.


def test_one_that_cannot_be_started_for_a_moment_is_started_later(
    tmp_path: Path, recorder: Recorder, sending: Dispatch, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    refusals = [OSError("cannot allocate memory")]

    def start(label: Path, line: socket.socket) -> subprocess.Popen[bytes]:
        if refusals:
            raise refusals.pop()
        return recorder.start(label, line)

    monkeypatch.setattr(dispatch, "start_sender", start)
    sending.send(a_run(tmp_path, "one"))
    wait_for(lambda: recorder.pids and recorder.told(recorder.pids[0]) == ["one"])
    assert sending.starts == 2 and "cannot be started: cannot allocate memory" in caplog.text


def test_without_mlflow_there_is_none(
    tmp_path: Path, recorder: Recorder, sending: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    sending.send(a_run(tmp_path, "one"))
    sending.close(DEADLINE_S)
    assert sending.starts == 0


@pytest.mark.slow
def test_a_child_made_by_fork_neither_holds_the_line_nor_sends(tmp_path: Path, recorder: Recorder) -> None:
    """In a process of its own, since a test's process has threads."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from star_hvd.run_log import dispatch\n"
        "from tests.unit.star_hvd.run_log.test_sender import Recorder\n"
        "place = Path(sys.argv[1])\n"
        "dispatch.start_sender = Recorder(place).start\n"
        "dispatch.send(place / 'runs' / 'one')\n"
        "while not list(place.glob('*.told')): time.sleep(0.02)\n"
        "if os.fork() == 0:\n"
        "    dispatch.close()\n"
        "    assert dispatch.starts() == 0\n"
        "    (place / 'child').touch()\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        "while not (place / 'child').exists(): time.sleep(0.02)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    a_run(tmp_path, "one")
    job = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], start_new_session=True)
    try:
        job.wait(DEADLINE_S)
        assert job.returncode == -9
        (pid,) = recorder.pids
        # The end of its input ends it, although the job's child is alive.
        wait_for(lambda: is_over(pid))
    finally:
        os.killpg(job.pid, 9)


# ---- the sender's side ----------------------------------------------------------------------------------------------


class FakeSender:
    """In place of `Sender`: a run has ended once its folder has a file `end`."""

    made: list[FakeSender] = []
    broken = False

    def __init__(self, directory: Path, uri: str, *, experiment: str | None, on_progress: Callable[[], None]) -> None:
        if not (directory / layout.RUN).exists():
            raise ValueError(f"{directory} holds no run")
        self.directory, self.uri, self.finished = directory, uri, ""
        self.looks = 0
        FakeSender.made.append(self)

    def send(self) -> bool:
        self.looks += 1
        if FakeSender.broken:
            raise ConnectionError("no server")
        return (self.directory / "end").exists()

    def finish(self, status: str) -> None:
        self.finished = status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSender]:
    monkeypatch.setattr(FakeSender, "made", [])
    monkeypatch.setattr(FakeSender, "broken", False)
    monkeypatch.setattr(shipper, "Sender", FakeSender)
    monkeypatch.setattr(shipper, "import_mlflow", lambda: None)
    return FakeSender


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sender's clock, which stands still until the test moves it, however long a thread is held up."""
    found = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: found[0], sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(shipper, "time", clock)
    monkeypatch.setattr(shipper, "core_wait_s", lambda: 0.0)
    return found


class Line:
    """What the sender reads, written by the test."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.lines, self._file = os.fdopen(read, encoding="utf-8"), os.fdopen(write, "w", encoding="utf-8")

    def tell(self, directory: Path) -> None:
        self._file.write(json.dumps({"directory": str(directory), "uri": "here"}) + "\n")
        self._file.flush()

    def end(self) -> None:
        self._file.close()


def noted(run: Path) -> str:
    """What the sender has written in a run's folder until now."""
    path = run / "shipper.log"
    return path.read_text() if path.exists() else ""


def started(lines: Any, job: int | None = None, **settings: float) -> threading.Thread:
    """A `Shipping` at work, which looks often."""
    thread = threading.Thread(target=Shipping(lines, job, poll_s=0.05, **settings).run, daemon=True)
    thread.start()
    return thread


def test_two_optimizers_at_once_go_through_one_sender(tmp_path: Path, fake: type[FakeSender]) -> None:
    runs = [a_run(tmp_path, name) for name in ("one", "two")]
    line = Line()
    thread = started(line.lines)
    for run in runs:
        (run / layout.RUN).touch()
        line.tell(run)
    wait_for(lambda: len(fake.made) == 2)
    (runs[1] / "end").touch()  # The younger one ends first.
    wait_for(lambda: fake.made[1].finished)
    assert not fake.made[0].finished
    wait_for(lambda: "complete: here; the sender took" in noted(runs[1]))
    line.end()  # The job was killed: the other one has no end.
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and fake.made[0].finished == "KILLED"


def test_it_ends_by_itself_when_it_has_nothing_to_do(tmp_path: Path, fake: type[FakeSender], now: list[float]) -> None:
    run, line = a_run(tmp_path, "one"), Line()
    (run / layout.RUN).touch()
    thread = started(line.lines, idle_s=30.0)
    line.tell(run)
    wait_for(lambda: fake.made)
    now[0] += 100.0
    looks = fake.made[0].looks
    wait_for(lambda: fake.made[0].looks > looks + 2)
    assert thread.is_alive(), "a run that goes on is something to do"
    (run / "end").touch()
    wait_for(lambda: "complete: here" in noted(run))
    assert thread.is_alive(), "a next run may come"
    now[0] += 31.0
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_server_that_is_down_is_asked_again_and_a_folder_that_is_none_is_left_out(
    tmp_path: Path, fake: type[FakeSender]
) -> None:
    runs, line = [a_run(tmp_path, f"run-{number}") for number in range(3)], Line()
    for run in runs[:2]:
        (run / layout.RUN).touch()
        (run / "end").touch()
    fake.broken = True
    thread = started(line.lines)
    for run in reversed(runs):
        line.tell(run)
    line.end()
    wait_for(lambda: all("not sent for now: ConnectionError: no server\n" in noted(run) for run in runs[:2]))
    assert thread.is_alive()
    fake.broken = False
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and len(fake.made) == 2 and all(one.finished for one in fake.made)


def test_a_job_that_is_gone_is_noticed_though_the_line_is_open(
    tmp_path: Path, fake: type[FakeSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of the job's, made by a library's own fork, may hold it open."""
    job = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    run, line = a_run(tmp_path, "one"), Line()
    (run / layout.RUN).touch()
    thread = started(line.lines, job.pid)
    line.tell(run)
    wait_for(lambda: fake.made)
    assert not fake.made[0].finished
    job.kill()
    job.wait(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and fake.made[0].finished == "KILLED"
    line.end()


@pytest.mark.parametrize("busy_for_hours", [False, True])
def test_a_server_that_hangs_is_given_up_but_not_while_the_machine_keeps_the_sender_from_working(
    busy_for_hours: bool, tmp_path: Path, fake: type[FakeSender], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, line, hangs, kept_s, looks, exits = a_run(tmp_path, "one"), Line(), threading.Event(), [0.0], [0], list[int]()

    def core_wait_s() -> float:
        looks[0] += 1
        return kept_s[0]

    monkeypatch.setattr(FakeSender, "send", lambda _: hangs.wait())
    monkeypatch.setattr(shipper, "core_wait_s", core_wait_s)
    monkeypatch.setattr(shipper, "os", SimpleNamespace(_exit=exits.append))
    (run / layout.RUN).touch()
    thread = started(line.lines, linger_s=0.1)
    line.tell(run)
    wait_for(lambda: fake.made)
    line.end()
    wait_for(lambda: looks[0] > 5)
    kept_s[0] += 1000.0
    now[0] += 1000.0
    seen = looks[0]
    wait_for(lambda: looks[0] > seen + 5)
    assert not exits and not noted(run)
    kept_s[0] += 3000.0 * busy_for_hours
    now[0] += 3000.0 if busy_for_hours else 1.0
    wait_for(lambda: exits)
    gave_up = f"gave up: MLflow took nothing for {now[0] - 1000.0:.0f} s after the job's end"
    assert f"{gave_up}; star-hvd sync-logs sends the rest" in noted(run)
    hangs.set()
    thread.join(DEADLINE_S)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell waits for a core")
def test_the_wait_for_a_core_is_that_of_the_system() -> None:
    def told_s() -> float:
        return 1e-9 * int(Path("/proc/self/schedstat").read_text().split()[1])

    before_s = told_s()
    assert before_s <= shipper.core_wait_s() <= told_s()


@pytest.mark.slow
def test_other_ranks_get_a_moment_to_end_their_files(
    tmp_path: Path, fake: type[FakeSender], now: list[float]
) -> None:
    run, line = a_run(tmp_path, "one"), Line()
    (run / layout.RUN).touch()
    (run / "end").touch()
    program = (
        "import sys; from pathlib import Path; from star_hvd.run_log.layout import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print(lock.take(), flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", program, str(run)]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None and rank.stdout.readline().strip() == "True"
        thread = started(line.lines)
        line.tell(run)
        wait_for(lambda: fake.made and fake.made[0].looks > 3)
        assert not fake.made[0].finished
        rank.communicate("", timeout=DEADLINE_S)
        wait_for(lambda: fake.made[0].finished)
        line.end()
        thread.join(DEADLINE_S)
    finally:
        rank.kill()
        rank.wait(10)


@pytest.mark.slow
def test_mlflow_is_imported_without_pandas() -> None:
    pytest.importorskip("mlflow")
    program = (
        "import sys; from star_hvd.run_log import shipper\n"
        "shipper.import_mlflow()\n"
        "print('mlflow' in sys.modules, 'pandas' in sys.modules)\n"
        "import pandas; print(pandas.Series([1]).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False", "1"], done.stderr


# ---- a run's own log ------------------------------------------------------------------------------------------------


def test_only_rank_0_has_its_run_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Path] = []
    monkeypatch.setattr(dispatch, "send", sent.append)
    monkeypatch.setattr(dispatch, "close", lambda: pytest.fail("nobody waits for the sender"))
    logs = [RunLog(tmp_path / "runs" / "one", rank=rank, world_size=2) for rank in (0, 1)]
    off = RunLog(tmp_path / "runs" / "two", rank=0, world_size=2, ship=False)
    for log in (*logs, off):
        log.close("FINISHED", DEADLINE_S)
    assert sent == [tmp_path / "runs" / "one"]


def test_lines_that_are_none_are_left_out(fake: type[FakeSender]) -> None:
    shipping = Shipping(io.StringIO('nonsense\n[1]\n{"directory": "x"}\n{"direct'))
    shipping.run()
    assert not fake.made
