"""The command `star-scheduler`: the learned scheduler, from data to a model in use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from scheduler.commands import run_command

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("collect", "scheduler.cli.collect", "make a training table from simulated jobs and logged runs"),
    ("train", "scheduler.cli.train", "fit a predictor, log it to MLflow and register it as challenger"),
    ("evaluate", "scheduler.cli.evaluate", "compare a predictor with champion, cost model and fixed modes"),
    ("promote", "scheduler.cli.promote", "make the challenger champion, if it passes the gate"),
    ("simulate", "scheduler.cli.simulate", "replay a logged run: the cost of every mode, and of every rank's slowness"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        Exit status: 0 success, 1 a gate or a comparison failed, 2 wrong arguments or missing input.
    """
    return run_command("star-scheduler", "Train, evaluate and use the learned scheduler.", SUBCOMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
