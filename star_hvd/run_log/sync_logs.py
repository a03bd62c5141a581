"""`star-hvd sync-logs`: send runs to MLflow that it does not have yet. Idempotent."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from scheduler.redact import redacted
from star_hvd.run_log import layout

__all__ = ["add_arguments", "add_places", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments."""
    parser.add_argument("runs", nargs="*", type=Path, help="run folders (default: all runs in the log folder)")
    add_places(parser)
    parser.add_argument("--again", action="store_true", help="send complete runs again, too")


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the locations of logs and MLflow."""
    parser.add_argument("--logs", type=Path, default=None, help="log folder (default: STAR_LOG_DIR or training_logs)")
    parser.add_argument("--to", default=None, metavar="URI", help="MLflow (default: MLFLOW_TRACKING_URI or its SQLite)")


def run(options: argparse.Namespace) -> int:
    """Send the runs; return the exit status, 1 if any failed.

    Raises:
        ImportError: MLflow is missing: no run can be sent, and one error is enough.
    """
    root = (options.logs or layout.default_root()).resolve()
    chosen = [path.resolve() for path in options.runs] or layout.run_directories(root)
    if not chosen:
        sys.stdout.write(f"no runs in {root}\n")
        return 0
    if importlib.util.find_spec("mlflow") is None:
        raise ImportError("MLflow is missing, so nothing is sent; install it with: pip install 'star-hvd[train]'")
    outcomes = []
    for path in chosen:
        outcomes.append(send_run(path, options.to or layout.tracking_uri(path.parent.parent), options.again))
    done, failed = outcomes.count("sent"), outcomes.count("failed")
    sys.stdout.write(f"{done} sent, {failed} failed, {len(outcomes) - done - failed} skipped\n")
    return 1 if failed else 0


def send_run(directory: Path, uri: str, again: bool) -> str:
    """Send a run; return `sent`, `failed` or `skipped`, and print it with the reason unless the run was complete."""
    from star_hvd.run_log.sender import Sender

    name = directory.name
    lock = layout.RunLock(directory, sending=True)
    try:
        sender = Sender(directory, uri)
        if sender.complete and not again:
            return "skipped"
        if layout.is_live(directory):
            sys.stdout.write(f"{name}: its job is running; skipped\n")
            return "skipped"
        if not lock.take():
            sys.stdout.write(f"{name}: another process is sending it; skipped\n")
            return "skipped"
        sender.finish("KILLED")
    except Exception as error:
        sys.stderr.write(f"{name}: not sent: {type(error).__name__}: {redacted(str(error))[:300]}\n")
        return "failed"
    finally:
        lock.free()
    sys.stdout.write(f"{name}: sent to {redacted(uri)}\n")
    return "sent"
