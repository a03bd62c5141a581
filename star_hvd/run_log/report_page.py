"""`star-hvd report`: write the HTML page of a run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scheduler.redact import redacted
from star_hvd.run_log import layout
from star_hvd.run_log.sync_logs import add_places

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments."""
    parser.add_argument("what", metavar="RUN", help="folder of a run, its name, or the id of its MLflow run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (default: report.html)")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Write the page; return the exit status, 2 if there is no such run."""
    from star_hvd.run_log.page import write_page

    root = (options.logs or layout.default_root()).resolve()
    for directory in (Path(options.what), root / "runs" / options.what):
        if (directory / layout.RUN).is_file():
            sys.stdout.write(f"{write_page(directory, options.out)}\n")
            return 0
    uri, database = options.to or layout.tracking_uri(root), root / "mlflow.db"
    if uri == f"sqlite:///{database}" and not database.exists():  # MLflow would make one, with nothing in it.
        sys.stderr.write(
            f"error: {options.what} is no run folder and not in {root / 'runs'}, and there is no MLflow in {root}; "
            "give a run's folder, or the log folder by --logs or STAR_LOG_DIR\n"
        )
        return 2
    return _from_mlflow(options.what, uri, root, options.out)


def _from_mlflow(run_id: str, uri: str, root: Path, out: Path) -> int:
    from star_hvd.run_log.page import write_page
    from star_hvd.run_log.sender import connect

    try:
        with tempfile.TemporaryDirectory(prefix="star-report-") as folder:
            page = write_page(Path(connect(uri).download_artifacts(run_id, "star", folder)), out)
    except Exception as error:
        sys.stderr.write(
            f"error: {run_id} is no run folder, not in {root / 'runs'}, and MLflow at {redacted(uri)} has no such run "
            f"with its files: {redacted(str(error))[:200]}\n"
        )
        return 2
    sys.stdout.write(f"{page}\n")
    return 0
