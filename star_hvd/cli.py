"""The command `star-hvd`: one subcommand per module that has `add_arguments` and `run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from scheduler.commands import run_command

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("doctor", "star_hvd.doctor", "what is installed here and which modes it allows"),
    ("sync-logs", "star_hvd.run_log.sync_logs", "send what MLflow does not have yet of the runs logged here"),
    ("report", "star_hvd.run_log.report_page", "make a page of a run: modes, stragglers and accuracy over time"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        Exit status: 0 all is well, 1 it is not, 2 wrong arguments (raised as `SystemExit` by argparse).
    """
    return run_command("star-hvd", "Tools around star_hvd.", SUBCOMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
