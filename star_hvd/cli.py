"""The command `star-hvd`: one subcommand per module that has `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["SUBCOMMANDS", "main"]

# Name, module, help. A module is imported when it is asked for: some need what others do without. It has
# `add_arguments(parser) -> None` and `run(options) -> int`, the exit status.
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="star-hvd", description="Tools around star_hvd.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in SUBCOMMANDS:
        if importlib.util.find_spec(module) is None:
            continue
        command = commands.add_parser(name, help=text, description=text)
        if name in given[:1]:
            importlib.import_module(module).add_arguments(command)
        command.set_defaults(module=module)
    options = parser.parse_args(given)
    status: int = importlib.import_module(options.module).run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
