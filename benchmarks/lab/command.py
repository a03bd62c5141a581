"""Shared code of the benchmark commands: range checks, and one measurement whose figures are saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from benchmarks.lab.launch import JobFailed
from benchmarks.lab.spec import write_json

__all__ = ["measured", "out_of_range", "say_error"]


def say_error(text: object) -> None:
    """Print why a command fails."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {text}", markup=False)


def out_of_range(args: argparse.Namespace, least: Iterable[tuple[str, float]]) -> str | None:
    """Return an error message for the first number below its minimum or from 1e6 on; None if all are in range.

    Numbers that were not given are None and are passed over.
    """
    for name, low in least:
        value = getattr(args, name)
        if value is not None and not low <= value < 1e6:
            return f"--{name.replace('_', '-')} is {value}; expected at least {low}"
    return None


def measured(
    measure: Callable[[argparse.Namespace, Console], dict[str, Any]],
    args: argparse.Namespace,
    console: Console,
    *failures: type[Exception],
) -> dict[str, Any] | None:
    """Return the figures of `measure`, and write them to `args.json` if it is given.

    Args:
        measure: Runs the jobs.
        args: Its command line.
        console: Where it shows its progress.
        failures: Exceptions it may raise beside `JobFailed`.

    Returns:
        None if it failed; the reason was printed.
    """
    try:
        summary = measure(args, console)
    except (JobFailed, *failures) as error:
        say_error(error)
        return None
    if args.json is not None:
        write_json(args.json, summary)
    return summary
