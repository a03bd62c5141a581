"""Every figure of the documents from one version of the code: measured, shown in a table, and put into the documents.

Rows already measured for this version are skipped, so an interrupted run can be continued. `--record` saves the
figures in benchmarks/figures.json and writes them between the markers of README.md and docs/; rows that were not
measured this time stay in docs/figures.md, under the version for which they were.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.figures.drawing import draw
from benchmarks.figures.measuring import Ledger, measure_row, restrict_to_cores
from benchmarks.figures.rows import ROWS, Row
from benchmarks.figures.tables import MarkerError, block_names, render, replace_blocks, with_earlier
from benchmarks.figures.version import ROOT, VersionError, code_version, is_clean
from benchmarks.lab.spec import write_json

__all__ = ["RECORDED", "main", "pages"]

OUT = Path(__file__).resolve().parent / "out" / "report_all"
RECORDED = Path(__file__).resolve().parent / "figures.json"
EXIT_FAILED, EXIT_USAGE = 1, 2


def pages(root: Path = ROOT) -> list[Path]:
    """Return the documents that have markers for figures.

    Raises:
        MarkerError: A marker is unpaired or names an unknown table.
    """
    candidates = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in candidates if block_names(page.read_text(encoding="utf-8"), page.name)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure missing rows; exit status 1 if a row failed."""
    args = _parser().parse_args(argv)
    # Bound to this standard output: while a row is measured, the process's own goes to the row's log.
    console, errors = Console(file=sys.stdout, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        rows = _chosen(args.only)
        if args.list:
            _list(rows, console)
            return 0
        if args.cores is not None:
            restrict_to_cores(args.cores)
        version = code_version()
        if args.record and (args.quick or not is_clean(version)):
            raise ValueError(f"--record takes figures of a whole run of a committed version; this is {version}"
                             f"{', --quick' if args.quick else ''}")  # fmt: skip
        pages()
    except (ValueError, VersionError, MarkerError) as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_USAGE
    ledger = Ledger(args.out / (f"{version}-quick" if args.quick else version), version, args.quick)
    try:
        failed = _measure(rows, ledger, args, console)
    except VersionError as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_FAILED
    _write(ledger, args.record, console)
    if failed:
        errors.print(f"error: {len(failed)} rows failed: {', '.join(failed)}; their logs are in {ledger.folder}")
    return EXIT_FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: every row in seconds, figures mean nothing")
    parser.add_argument("--only", help="comma-separated rows; default: all (see --list)")
    parser.add_argument("--list", action="store_true", help="show the rows and their commands")
    parser.add_argument("--again", action="store_true", help="measure also what is measured already")
    parser.add_argument("--cores", type=int, help="use only so many cores of this machine")
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {RECORDED.name} and the documents")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results, logs, tables and the plot")
    return parser


def _chosen(names: str | None) -> list[Row]:
    if names is None:
        return list(ROWS)
    wanted = [name.strip() for name in names.split(",")]
    unknown = sorted(set(wanted) - {row.name for row in ROWS})
    if unknown:
        raise ValueError(f"--only has {', '.join(unknown)}; expected some of {', '.join(row.name for row in ROWS)}")
    return [row for row in ROWS if row.name in wanted]


def _list(rows: Sequence[Row], console: Console) -> None:
    for row in rows:
        lacking = row.missing()
        text = f"{row.name} ({row.part}): python -m {row.module} {' '.join(row.options)}"
        console.print(text + (f"  [skipped: {lacking}]" if lacking else ""), markup=False, soft_wrap=True)


def _measure(rows: Sequence[Row], ledger: Ledger, args: argparse.Namespace, console: Console) -> list[str]:
    """Measure the rows, printing a line each; return the names of those that failed."""
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    failed = []
    # No redirection by the progress bar: standard output goes to the row's log.
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=len(rows))
        for row in rows:
            bar.update(task, description=row.name)
            if ledger.has(row.name) and not args.again:
                console.print(f"{row.name}: measured before", markup=False)
            else:
                entry = measure_row(row, ledger, quick=args.quick)
                _check_version(ledger, row.name)
                took = f" in {entry['took_s']:.0f} s" if "took_s" in entry else ""
                reason = f": {entry['reason']}" if "reason" in entry else ""
                console.print(f"{row.name}: {entry['state']}{took}{reason}", markup=False, soft_wrap=True)
                failed += [row.name] if entry["state"] == "failed" else []
            bar.advance(task)
    return failed


def _check_version(ledger: Ledger, name: str) -> None:
    """Delete a row's entry if the code changed while it was measured."""
    version = code_version()
    if version != ledger.document["version"]:
        ledger.forget(name)
        raise VersionError(f"the code changed while {name} was measured: it is {version} now; start again")


def _write(ledger: Ledger, record: bool, console: Console) -> None:
    """Write the table and the plot, and with `record` also the recorded figures and the documents."""
    if "date" not in ledger.document:
        return
    text = render("all", ledger.document)
    table = ledger.folder / "figures.md"
    table.write_text(f"# Figures\n\n{text}\n", encoding="utf-8")
    console.print(Markdown(text))
    drawn = draw(ledger.document, ledger.folder / "figures.png")
    console.print(f"Table: {table}", soft_wrap=True)
    console.print(f"Figures: {ledger.path}", soft_wrap=True)
    if drawn:
        console.print(f"Plot: {ledger.folder / 'figures.png'}", soft_wrap=True)
    if record:
        before = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else ledger.document
        document = with_earlier(ledger.document, before)
        write_json(RECORDED, document)
        changed = [page.name for page in pages() if replace_blocks(page, document)]
        console.print(f"Recorded in {RECORDED.name}; changed: {', '.join(changed) or 'no document'}")


if __name__ == "__main__":
    sys.exit(main())
