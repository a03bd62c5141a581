"""Starts one job under `horovodrun` for a test, waits for it with a deadline, and collects what its ranks report.

A rank reports with `write_result({...})`, any number of times; the last report counts. A rank that died before its
first report has the empty report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support import forkserver

__all__ = ["JOB_LIMIT_S", "DeadlineMissed", "JobResult", "run_job", "write_result"]

REPOSITORY = Path(__file__).resolve().parents[2]
FORKED = (sys.executable, "-S", str(Path(__file__).with_name("stub.py")))
"""The words before a module that the fork server is to run, whose address has to be in the environment."""
RESULTS = "TEST_JOB_RESULTS"  # Environment variable: the folder that the ranks write to.
JOB_LIMIT_S = 600.0
"""Within this every job of the tests ends, on the busiest machine; only one that hangs is ended by it."""
SHOWN_LINES = 60
FRAME = re.compile(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)')
STACK_DEPTH = 8
STACK_LINES = 500  # What the threads of a job's ranks are doing, shortly before its time is over.
TERMINATE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job.

    Attributes:
        returncode: Exit status of `horovodrun`.
        output: Standard output and error of all processes together.
        results: The last report of every rank, in rank order; empty where there is none.
        elapsed_s: From start to end.
    """

    returncode: int
    output: str
    results: list[dict[str, Any]]
    elapsed_s: float

    @property
    def tail(self) -> str:
        """Return the last lines of the output: enough to see what the threads were doing, if ranks printed that."""
        return "\n".join(self.output.splitlines()[-(STACK_LINES if self.stuck else SHOWN_LINES) :])

    @property
    def stuck(self) -> str:
        """Return where the main thread of each rank was, in one line, if ranks printed their stacks; else empty."""
        stacks: dict[str, list[str]] = {}
        for line in self.output.splitlines():
            rank, _, text = line.rpartition("<stderr>:")
            if text.startswith("Thread 0x"):
                stacks[rank] = []  # That of the main thread is the last one.
            elif (frame := FRAME.search(text)) and rank in stacks:
                stacks[rank].append("{}:{} {}".format(*frame.groups()))
        return "; ".join(f"{rank} {' < '.join(frames[:STACK_DEPTH])}" for rank, frames in sorted(stacks.items()))

    def check(self) -> JobResult:
        """Return this result if the job succeeded.

        Raises:
            AssertionError: The job ended with an error; the message holds the last lines of its output.
        """
        assert self.returncode == 0, f"the job ended with exit status {self.returncode}:\n{self.tail}"
        return self


class DeadlineMissed(AssertionError):
    """A job was killed because it took too long.

    Attributes:
        result: What it had reported so far.
    """

    def __init__(self, text: str, result: JobResult) -> None:
        super().__init__(text)
        self.result = result


def run_job(
    module_or_script: str,
    *args: str,
    ranks: int,
    env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_LIMIT_S,
    horovodrun_args: Sequence[str] = (),
    fresh: bool = False,
) -> JobResult:
    """Run a Python module, or a script whose name ends in `.py`, on `ranks` ranks of this machine.

    Args:
        module_or_script: What every rank runs.
        args: Its arguments.
        ranks: Number of ranks (`-np`).
        env: Added to the environment. `STAR_*` variables of the caller are not passed on, so that a test does not
            depend on where it runs.
        timeout_s: The job must end within this time. It only catches hangs: a busy machine may need many times as long
            as an idle one.
        horovodrun_args: Further options of `horovodrun`, `("--stall-check-warning-time-seconds", "5")` for example.
        fresh: Whether every rank starts an interpreter of its own, as for a user; see `forkserver.py`.

    Raises:
        AssertionError: Horovod is not installed.
        DeadlineMissed: The job did not end in time; the message holds the last lines of its output. No process of the
            job is left running.
    """
    program = Path(sys.executable).parent / forkserver.LAUNCHER
    assert program.is_file(), f"{program} does not exist: Horovod is not installed for {sys.executable}"
    options, forked = ["-np", str(ranks), "--gloo", *horovodrun_args], FORKED
    if fresh:
        how = [] if module_or_script.endswith(".py") else ["-m"]
        command = [str(program), *options, sys.executable, *how, module_or_script, *args]
    else:
        command = [*forked, forkserver.LAUNCHER, *options, *forked, module_or_script, *args]
    environment = dict(env or {}) if fresh else {forkserver.ADDRESS: forkserver.server_address(), **(env or {})}
    # Early enough to be read before the job is killed.
    environment.setdefault(forkserver.STACKS_AFTER_S, str(max(timeout_s - 120.0, 0.6 * timeout_s)))
    with tempfile.TemporaryDirectory(prefix="star-job-") as folder:
        log, began_s = Path(folder) / "output.txt", time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=_environment(folder, environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            in_time = _wait(process, timeout_s)
        results = [_read(Path(folder) / f"rank{rank}.json") for rank in range(ranks)]
        output = log.read_text(encoding="utf-8", errors="replace")
    result = JobResult(process.returncode, output, results, time.monotonic() - began_s)
    if not in_time:
        shown = "\n".join(output.splitlines()[-STACK_LINES:])
        wrote = [rank for rank, found in enumerate(results) if found]
        missed = f"{' '.join(command)} did not end within {timeout_s:g} s; ranks {wrote} had written their results"
        raise DeadlineMissed(f"{missed}:\n{shown}", result)
    return result


def write_result(result: Mapping[str, Any]) -> None:
    """Write this rank's report, replacing an earlier one; does nothing outside `run_job`."""
    folder = os.environ.get(RESULTS)
    if folder is None:
        return
    path = Path(folder) / f"rank{os.environ.get('HOROVOD_RANK', '0')}.json"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.replace(path)  # Atomic, since a rank may be killed at any moment.


def _environment(folder: str, added: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STAR_", "HOROVOD_"))}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", STAR_RUN_LOG="0")
    environment["STAR_CHECK_LOCKS"] = "1"
    # Horovod's own timeouts for late ranks: its half a minute is too short where many ranks share a core.
    environment.update(HOROVOD_GLOO_TIMEOUT_SECONDS="180", HOROVOD_START_TIMEOUT="300")
    environment["STAR_NEIGHBOURS_DIR"] = str(Path(folder) / "neighbours")  # Where a host's jobs meet: alone here.
    environment.update({RESULTS: folder}, **added)
    return environment


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Return whether the job ended in time; if it did not, or the wait is interrupted, kill it."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(process)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group that was started here, and the ranks: `horovodrun` gives each a group of its own."""
    if process.poll() is not None:
        return
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(TERMINATE_GRACE_S)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()
    _, stubborn = psutil.wait_procs(started, timeout=TERMINATE_GRACE_S)
    for each in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(stubborn, timeout=TERMINATE_GRACE_S)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
