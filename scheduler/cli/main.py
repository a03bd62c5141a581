"""The command `star-scheduler`: the learned scheduler, from data to a model in use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from scheduler.commands import run_command

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("collect", "scheduler.cli.collect", "make the table to train on, from simulated jobs and logged runs"),
    ("train", "scheduler.cli.train", "fit a predictor, log it to MLflow and register it as challenger"),
    ("evaluate", "scheduler.cli.evaluate", "compare a predictor with champion, cost model and fixed modes"),
    ("promote", "scheduler.cli.promote", "make the challenger champion, if it passes the gate"),
    ("simulate", "scheduler.cli.simulate", "replay a logged run: what each mode would have cost, and each rank costs"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        Exit status: 0 all is well, 1 a gate or a comparison says no, 2 wrong arguments or nothing to work with.
    """
    return run_command("star-scheduler", "Train, judge and use the learned scheduler.", SUBCOMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
