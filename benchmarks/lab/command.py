"""What the commands of the benchmarks have in common: numbers in range, and one measurement whose figures are kept."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from benchmarks.lab.launch import JobFailed
from benchmarks.lab.spec import write_json

__all__ = ["measured", "out_of_range", "say_error"]


def say_error(text: object) -> None:
    """Print why a command ends."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {text}", markup=False)


def out_of_range(args: argparse.Namespace, least: Iterable[tuple[str, float]]) -> str | None:
    """What is wrong with the first number that is below its least value, or beyond all sense; None where none is."""
    for name, low in least:
        value = getattr(args, name)
        if not low <= value < 1e6:
            return f"--{name.replace('_', '-')} is {value}; expected at least {low}"
    return None


def measured(
    measure: Callable[[argparse.Namespace, Console], dict[str, Any]],
    args: argparse.Namespace,
    console: Console,
    *failures: type[Exception],
) -> dict[str, Any] | None:
    """The figures of `measure`, written to `args.json` too where that is given.

    Args:
        measure: Runs the jobs.
        args: Its command line.
        console: Where it shows its progress.
        failures: What it may raise beside `JobFailed`.

    Returns:
        None where it failed; why was printed.
    """
    try:
        summary = measure(args, console)
    except (JobFailed, *failures) as error:
        say_error(error)
        return None
    if args.json is not None:
        write_json(args.json, summary)
    return summary
