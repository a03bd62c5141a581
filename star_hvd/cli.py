"""The command `star-hvd`: one subcommand per module that has `add_arguments` and `run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from scheduler.commands import run_command

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("doctor", "star_hvd.doctor", "show what is installed and which modes it allows"),
    ("sync-logs", "star_hvd.run_log.sync_logs", "send run logs that MLflow does not have yet"),
    ("report", "star_hvd.run_log.report_page", "write an HTML page of a run: modes, stragglers, accuracy over time"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        Exit status: 0 for success, 1 for failure, 2 for wrong arguments (raised as `SystemExit` by argparse).
    """
    return run_command("star-hvd", "Tools around star_hvd.", SUBCOMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
