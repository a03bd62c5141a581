"""What the run log costs a step, even while its MLflow server dies, and whether anything of the log is lost.

Both optimizers are in one process, so the log's threads and its sender run during the blocks of either. The comparison
therefore shows only the cost on the step path; any other load on the machine is in the step times of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import measured, out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.report import progress_view

__all__ = ["main", "measure"]

START_DEADLINE_S, SYNC_DEADLINE_S, JOB_ALLOWANCE_S = 90.0, 180.0, 120.0


class Server:
    """An MLflow tracking server on this machine that can be killed and restarted.

    Args:
        folder: Where its database and its log are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            JobFailed: It does not answer.
        """
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        store = ["--backend-store-uri", f"sqlite:///{self._folder / 'server.db'}"]
        artifacts = ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options, *store, *artifacts],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        limit_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < limit_s and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2.0):
                return
            time.sleep(0.3)
        raise JobFailed(f"the MLflow server does not answer; see {self._folder / 'server.log'}")

    def kill(self) -> None:
        """Kill it and all its descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


@contextlib.contextmanager
def _settings(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Train with the log off and on, kill the server halfway, send the rest, compare.

    Raises:
        JobFailed: The job, the server or the sending failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    server = Server(folder)
    killed_s: list[float] = []
    try:
        server.start()
        with _settings(MLFLOW_TRACKING_URI=server.uri, STAR_LOG_DIR=str(folder / "logs")):
            _train(args, console, folder, server, killed_s)
            found = json.loads((folder / "run_log.json").read_text(encoding="utf-8"))
            server.kill()
            server.start()
            complete = _sync(server.uri, folder / "logs", found)
    finally:
        server.kill()
    shutil.rmtree(folder)
    return {"ranks": args.ranks, **_figures(found["blocks"], killed_s[0]), **complete}


def _train(
    args: argparse.Namespace, console: Console, folder: Path, server: Server, killed_s: list[float]
) -> None:
    options = [f"--blocks={args.blocks}", f"--steps={args.steps}", f"--device-ms={args.device_ms}"]
    command = horovodrun_command(args.ranks, "benchmarks.workers.run_log", str(folder), *options)
    done = 0
    with progress_view(console, args.blocks) as view:

        def note(fields: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            if done == args.blocks // 2:
                server.kill()
                killed_s.append(time.time())
            view.update(fields)

        steps = 2 * (args.blocks * args.steps + 200)
        deadline_s = JOB_ALLOWANCE_S + steps * (args.device_ms / 1e3 + 0.05)
        run_job(command, folder, deadline_s=deadline_s, stall_s=JOB_ALLOWANCE_S, on_progress=note)


def _sync(uri: str, logs: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Send what the server lacks, and compare its contents with the log files."""
    from star_hvd.run_log import layout
    from star_hvd.run_log.sender import connect
    from star_hvd.run_log.spool import read_events

    directory = logs / "runs" / str(found["run"])
    limit_s = time.monotonic() + SYNC_DEADLINE_S
    while not layout.read_json(directory / "sent.json").get("complete") and time.monotonic() < limit_s:
        done = subprocess.run(
            [sys.executable, "-m", "star_hvd.cli", "sync-logs", "--logs", str(logs), "--to", uri],
            capture_output=True, text=True, timeout=SYNC_DEADLINE_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise JobFailed(f"sync-logs ended with {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
        time.sleep(0.5)  # The job's own sender may hold the log.
    client = connect(uri)
    experiment = client.get_experiment_by_name(layout.experiment_name())
    runs = client.search_runs([experiment.experiment_id]) if experiment is not None else []
    run = next((run for run in runs if run.data.tags.get("star.run") == directory.name), None)
    windows = [e for _, e in read_events(directory / layout.EVENTS) if e["kind"] == "window"]
    sent = client.get_metric_history(run.info.run_id, "stragglers") if run is not None else []
    steps = [e for _, e in read_events(directory / "rank0.jsonl") if e["kind"] == "step"]
    return {
        "steps": found["steps"],
        "steps_logged": len(steps),
        "windows": len(windows),
        "windows_in_mlflow": len(sent),
        "status": run.info.status if run is not None else "missing",
        "complete": run is not None and len(sent) == len(windows) and len(steps) == found["steps"],
    }


def _figures(blocks: dict[str, list[dict[str, Any]]], killed_unix_s: float) -> dict[str, Any]:
    def median_s(name: str, late: bool) -> float:
        chosen = [b for b in blocks[name] if (b["ended_unix_s"] > killed_unix_s) == late]
        return statistics.median(time_s for block in chosen for time_s in block["times_s"])

    figures: dict[str, Any] = {}
    for label, late in (("up", False), ("killed", True)):
        figures[f"off_step_s_{label}"] = median_s("off", late)
        figures[f"on_step_s_{label}"] = median_s("on", late)
        figures[f"ratio_{label}"] = figures[f"on_step_s_{label}"] / figures[f"off_step_s_{label}"]
    medians = {n: statistics.median(t for b in blocks[n] for t in b["times_s"]) for n in blocks}
    return {"ratio": medians["on"] / medians["off"], **figures}


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['ranks']} ranks, run log on against off", title_justify="left")
    for column in ("MLflow server", "off", "on", "ratio"):
        table.add_column(column, justify="left" if column.startswith("M") else "right")
    for label, text in (("up", "answers"), ("killed", "killed")):
        off_s, on_s = summary[f"off_step_s_{label}"], summary[f"on_step_s_{label}"]
        ratio = summary[f"ratio_{label}"]
        table.add_row(text, f"{1e3 * off_s:.2f} ms/step", f"{1e3 * on_s:.2f} ms/step", f"{ratio:.3f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once and print; exit status 1 if part of the log is missing afterwards."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_log", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per block")
    parser.add_argument("--device-ms", type=float, default=30.0, help="emulated device time per step")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    console = Console()
    problem = out_of_range(args, (("ranks", 1), ("steps", 1), ("blocks", 4), ("device_ms", 0)))
    if problem is not None:
        say_error(problem)
        return 2
    summary = measured(measure, args, console)
    if summary is None:
        return 1
    console.print(_table(summary))
    console.print(
        f"after sync-logs MLflow has {summary['windows_in_mlflow']} of {summary['windows']} windows; "
        f"{summary['steps_logged']} of {summary['steps']} steps are in the log",
        highlight=False,
    )
    return 0 if summary["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
