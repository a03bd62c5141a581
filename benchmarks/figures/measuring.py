"""Measures the rows one after another and stores the results per version."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.figures.rows import Row, supported_modes
from benchmarks.lab.spec import write_json
from benchmarks.traces import synthetic_trace, write_trace

__all__ = ["SCHEMA", "Ledger", "arguments_of", "measure_row", "restrict_to_cores"]

SCHEMA = 1
EXIT_SKIPPED = 77
EXIT_SIGNALLED = 128  # Above this by so much as the signal's number.
TRACE_STEPS = 400
TRACE_RANKS = 4
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"


class Ledger:
    """The figures of one version, saved to disk after every row.

    Args:
        folder: Folder of this version, with results and logs of the rows and `figures.json`.
        version: Version of the code.
        quick: Whether rows are measured in their short form; such figures mean nothing.
    """

    def __init__(self, folder: Path, version: str, quick: bool) -> None:
        self.folder, self.path = folder, folder / "figures.json"
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "version": version,
            "quick": quick,
            "system": platform.platform(),
            "python": platform.python_version(),
            "rows": {},
        }
        if self.path.is_file():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if (found.get("schema"), found.get("version"), found.get("quick")) == (SCHEMA, version, quick):
                self.document = found

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the entry of every row, by name."""
        rows: dict[str, dict[str, Any]] = self.document["rows"]
        return rows

    def has(self, name: str) -> bool:
        """Return whether a row was measured."""
        return self.rows.get(name, {}).get("state") == MEASURED

    def put(self, name: str, entry: dict[str, Any]) -> None:
        """Record a row's entry."""
        self.rows[name] = entry
        self.document["date"] = datetime.now(timezone.utc).date().isoformat()
        write_json(self.path, self.document)

    def forget(self, name: str) -> None:
        """Delete a row's entry."""
        self.rows.pop(name, None)
        write_json(self.path, self.document)

    def result_path(self, name: str) -> Path:
        """Return the path of a row's full result."""
        return self.folder / f"{name}.json"


def arguments_of(row: Row, ledger: Ledger, quick: bool) -> list[str]:
    """Return the command line of a row; write its synthetic trace if it has one."""
    arguments = [str(ledger.result_path(name)) for name in row.results_of] + list(row.options)
    modes = supported_modes(row.modes)
    if modes:
        arguments.append(f"--modes={';'.join(modes)}")
    if row.trace_seed is not None:
        path = ledger.folder / f"trace-{row.trace_seed}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(path, synthetic_trace(ranks=TRACE_RANKS, steps=TRACE_STEPS, seed=row.trace_seed))
        arguments.append(f"--trace={path}")
    if quick:
        arguments += row.quick
    return [*arguments, "--json", str(ledger.result_path(row.name))]


def measure_row(row: Row, ledger: Ledger, *, quick: bool) -> dict[str, Any]:
    """Measure a row now and record it.

    Returns:
        Its entry: `state`, `command`, `cores`, `at`, `took_s`, and `figures` or `reason`.
    """
    entry = _entry(row, ledger, quick)
    ledger.put(row.name, entry)
    return entry


def _entry(row: Row, ledger: Ledger, quick: bool) -> dict[str, Any]:
    lacking = row.missing()
    if lacking is not None:
        return {"state": SKIPPED, "reason": lacking}
    missing = [name for name in row.results_of if not ledger.has(name)]
    if missing:
        return {"state": SKIPPED, "reason": f"needs {', '.join(missing)}"}
    path, log = ledger.result_path(row.name), ledger.folder / f"{row.name}.log"
    arguments = arguments_of(row, ledger, quick)
    path.unlink(missing_ok=True)
    began_s = time.monotonic()
    with _written_to(log):
        status = _call(row.module, arguments)
    entry = {
        "command": " ".join(["python -m", row.module, *_shown(arguments[:-2], ledger.folder)]),
        "cores": len(os.sched_getaffinity(0)),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - began_s, 1),
    }
    if path.is_file():  # A benchmark that exceeds its limit also writes figures.
        result = json.loads(path.read_text(encoding="utf-8"))
        return {"state": MEASURED, **entry, "status": status, "figures": row.pick(result)}
    reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
    return {"state": SKIPPED if status == EXIT_SKIPPED else FAILED, **entry, "status": status, "reason": reason}


def _reason(log: str) -> str:
    """Return the log line in which a benchmark explains why it has no figures, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error: ", "skipped: "))]
    return (said or lines or ["no output"])[-1]


def _shown(arguments: Sequence[str], folder: Path) -> list[str]:
    return [argument.replace(f"{folder}{os.sep}", "") for argument in arguments]


def _call(module: str, arguments: Sequence[str]) -> int:
    """Run a benchmark's `main`; an exception fails only this row and goes into its log. A signal ends the whole run.

    Variables that it sets, such as Horovod's, are gone for the next row.
    """
    before = dict(os.environ)
    try:
        return int(importlib.import_module(module).main(arguments))
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > EXIT_SIGNALLED:
            raise
        return end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _written_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield


def restrict_to_cores(count: int) -> None:
    """Restrict this process and its children to `count` of its cores.

    Raises:
        ValueError: It has fewer.
    """
    there = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(there):
        raise ValueError(f"--cores is {count}; expected 1 to {len(there)}")
    os.sched_setaffinity(0, there[:count])
