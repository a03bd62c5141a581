"""`star-hvd sync-logs` and `star-hvd report`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from star_hvd.run_log import layout

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add both subcommands to what `argparse.ArgumentParser.add_subparsers` gave."""
    sync = subparsers.add_parser(
        "sync-logs",
        help="send runs to MLflow that are not there yet",
        description="Send what is in training_logs/ and not in MLflow yet. May be repeated: nothing is sent twice.",
    )
    sync.add_argument("runs", nargs="*", type=Path, help="folders of runs; all runs of the log folder if left out")
    _add_places(sync)
    sync.add_argument("--again", action="store_true", help="also runs that are complete")
    sync.set_defaults(run=run, command="sync-logs")
    report = subparsers.add_parser(
        "report",
        help="one HTML page on a run",
        description="Write one self-contained HTML page: modes, stragglers and causes, curves, every decision.",
    )
    report.add_argument("what", metavar="RUN", help="folder of a run, its name, or the id of its MLflow run")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (default: report.html)")
    _add_places(report)
    report.set_defaults(run=run, command="report")


def run(args: argparse.Namespace) -> int:
    """Carry out what was parsed; the exit status."""
    return _report(args) if args.command == "report" else _sync(args)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=Path, default=None, help="log folder (default: STAR_LOG_DIR or training_logs)")
    parser.add_argument("--to", default=None, metavar="URI", help="MLflow (default: MLFLOW_TRACKING_URI or its SQLite)")


def _sync(args: argparse.Namespace) -> int:
    root = (args.logs or layout.default_root()).resolve()
    chosen = [path.resolve() for path in args.runs] or layout.run_directories(root)
    if not chosen:
        sys.stdout.write(f"no runs in {root}\n")
        return 0
    outcomes = [_sync_one(path, args.to or layout.tracking_uri(path.parent.parent), args.again) for path in chosen]
    done, failed = outcomes.count("sent"), outcomes.count("failed")
    sys.stdout.write(f"{done} sent, {failed} failed, {len(outcomes) - done - failed} skipped\n")
    return 1 if failed else 0


def _sync_one(directory: Path, uri: str, again: bool) -> str:
    """`sent`, `failed` or `skipped`; says which and why."""
    from star_hvd.run_log.sender import Sender

    name = directory.name
    if layout.is_live(directory):
        sys.stdout.write(f"{name}: its job is running; skipped\n")
        return "skipped"
    lock = layout.RunLock(directory, sending=True)
    try:
        sender = Sender(directory, uri)
        if sender.complete and not again:
            return "skipped"
        if not lock.take():
            sys.stdout.write(f"{name}: another process is sending it; skipped\n")
            return "skipped"
        sender.finish("KILLED")
    except Exception as error:
        sys.stderr.write(f"{name}: not sent: {type(error).__name__}: {str(error)[:300]}\n")
        return "failed"
    finally:
        lock.free()
    sys.stdout.write(f"{name}: sent to {uri}\n")
    return "sent"


def _report(args: argparse.Namespace) -> int:
    from star_hvd.run_log.page import write_page

    root = (args.logs or layout.default_root()).resolve()
    for directory in (Path(args.what), root / "runs" / args.what):
        if (directory / layout.RUN).is_file():
            break
    else:
        return _report_from_mlflow(args, root)
    sys.stdout.write(f"{write_page(directory, args.out)}\n")
    return 0


def _report_from_mlflow(args: argparse.Namespace, root: Path) -> int:
    from star_hvd.run_log.page import write_page
    from star_hvd.run_log.sender import connect

    uri = args.to or layout.tracking_uri(root)
    try:
        with tempfile.TemporaryDirectory(prefix="star-report-") as folder:
            found = connect(uri).download_artifacts(args.what, "star", folder)
            page = write_page(Path(found), args.out)
    except Exception as error:
        sys.stderr.write(
            f"error: {args.what} is no run folder, none of {root / 'runs'}, and MLflow at {uri} has no run with its "
            f"files: {str(error)[:200]}\n"
        )
        return 2
    sys.stdout.write(f"{page}\n")
    return 0
