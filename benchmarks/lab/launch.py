"""Starts one job, follows its progress, and ends exactly the processes it started if the job dies or hangs."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lab.worker import PROGRESS_MARK

__all__ = ["JobFailed", "horovodrun_command", "run_job"]

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT_LOG_LINES = 40
_OVERRIDES = (
    "STAR_MODE", "STAR_ACCURACY", "STAR_OVERLAP", "STAR_POLICY", "STAR_MODEL", "STAR_LEAST_QUORUM", "STAR_ENCRYPTION",
)  # fmt: skip
"""Variables that override what a benchmark asks for: a job would not be what its figures are named."""
TERMINATE_GRACE_S = 5.0
POLL_S = 0.2


class JobFailed(RuntimeError):
    """The job died, hung or took too long; the message holds the last lines of its log."""


def horovodrun_command(ranks: int, module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `python -m module arguments` on `ranks` ranks of this machine.

    Args:
        ranks: Number of ranks.
        module: The module that every rank runs.
        arguments: Its arguments.
        options: Further options of `horovodrun`.

    Raises:
        JobFailed: There is no horovodrun beside this Python.
    """
    program = Path(sys.executable).parent / "horovodrun"
    if not program.is_file():
        raise JobFailed(f"{program} does not exist: Horovod is not installed for {sys.executable}; run `make setup`")
    return [str(program), "-np", str(ranks), "--gloo", *options, sys.executable, "-m", module, *arguments]


def run_job(
    command: Sequence[str],
    run_dir: Path,
    *,
    deadline_s: float,
    stall_s: float,
    on_progress: Callable[[dict[str, Any]], None],
    added_environment: Mapping[str, str] | None = None,
) -> None:
    """Run `command` until it ends.

    Args:
        command: Command line. Output lines with `PROGRESS_MARK` are progress; all lines go to `log.txt`.
        run_dir: Folder of the run; processes of the job write `<pid>.pid` there.
        deadline_s: The job must end within this time.
        stall_s: Longest time without a line of output.
        on_progress: Called with the fields of every progress line.
        added_environment: Variables added to this process's environment, without those of `_OVERRIDES`.

    Raises:
        JobFailed: It ended with an error or missed a deadline. No process of the job is left running.
        SystemExit: This process got SIGTERM meanwhile; the job is ended as well.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OVERRIDES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["STAR_RUN_LOG"] = "0"  # A log sender per training would use the cores that are measured.
    environment.update(added_environment or {})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    tail: collections.deque[str] = collections.deque(maxlen=KEPT_LOG_LINES)
    try:
        with _ended_by_sigterm():
            problem = _follow(process, run_dir / "log.txt", tail, deadline_s, stall_s, on_progress)
    finally:
        _end(process, run_dir)
    if problem is None and process.returncode != 0:
        problem = f"the job ended with exit status {process.returncode}"
    if problem is not None:
        lines = "\n".join(f"    {line}" for line in tail) or "    (nothing)"
        raise JobFailed(f"{problem}; the last lines of {run_dir / 'log.txt'}:\n{lines}")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit inside the block: by default it would end this process and leave the job running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _follow(
    process: subprocess.Popen[str],
    log_path: Path,
    tail: collections.deque[str],
    deadline_s: float,
    stall_s: float,
    on_progress: Callable[[dict[str, Any]], None],
) -> str | None:
    """Read the output until it ends; return a message if a time limit was exceeded."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    start_s = last_line_s = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log:
        while True:
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                line = ""
            now_s = time.monotonic()
            if line is None:
                process.wait(timeout=stall_s)
                return None
            if line:
                last_line_s = now_s
                log.write(line)
                log.flush()
                _take_line(line.rstrip("\n"), tail, on_progress)
            if now_s - start_s > deadline_s:
                return f"the job did not end within {deadline_s:.0f} s"
            if now_s - last_line_s > stall_s:
                return f"the job printed nothing for {stall_s:.0f} s and is taken to hang"


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _take_line(line: str, tail: collections.deque[str], on_progress: Callable[[dict[str, Any]], None]) -> None:
    _, mark, text = line.partition(PROGRESS_MARK)
    if not mark:
        tail.append(line)
        return
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:  # Two ranks wrote into the same line.
        tail.append(line)
        return
    on_progress(fields)


def _end(process: subprocess.Popen[str], run_dir: Path) -> None:
    """End the job's remaining processes: descendants of the command and processes registered in its folder."""
    left = _alive(process, run_dir)
    for each in left:
        _signal(each.terminate)
    _, stubborn = psutil.wait_procs(left, timeout=TERMINATE_GRACE_S)
    stubborn = list({*stubborn, *_alive(process, run_dir)})
    for each in stubborn:
        _signal(each.kill)
    psutil.wait_procs(stubborn, timeout=TERMINATE_GRACE_S)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _alive(process: subprocess.Popen[str], run_dir: Path) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    if process.poll() is None:
        try:
            command = psutil.Process(process.pid)
            found.update({each.pid: each for each in [command, *command.children(recursive=True)]})
        except psutil.NoSuchProcess:
            pass
    for path in run_dir.glob("*.pid"):
        try:
            worker = psutil.Process(int(path.stem))
            # Process ids are reused after a process has ended; ours was created before its file.
            if worker.create_time() <= path.stat().st_mtime + 0.1:
                found[worker.pid] = worker
        except (psutil.NoSuchProcess, ValueError):
            pass
    return list(found.values())


def _signal(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        pass
