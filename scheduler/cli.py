"""The command `star-scheduler`: the learned scheduler, from data to a model in use.

One subcommand per module that has `add_arguments(parser) -> None` and `run(options) -> int`, the exit status. A module
is imported when it is asked for: LightGBM, MLflow and pandas take their time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: Final[tuple[tuple[str, str, str], ...]] = (
    ("collect", "scheduler.cli_collect", "make the table to train on, from simulated jobs and logged runs"),
    ("train", "scheduler.cli_train", "fit a predictor, log it to MLflow and register it as challenger"),
    ("evaluate", "scheduler.cli_evaluate", "compare a predictor with champion, cost model and fixed modes"),
    ("promote", "scheduler.cli_promote", "make the challenger champion, if it passes the gate"),
    ("simulate", "scheduler.replay_run", "replay a logged run: what each mode would have cost, and each rank costs"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        Exit status: 0 all is well, 1 a gate or a comparison says no, 2 wrong arguments or nothing to work with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="star-scheduler", description="Train, judge and use the learned scheduler.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in SUBCOMMANDS:
        if importlib.util.find_spec(module) is None:
            continue
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in given[:1]:
            importlib.import_module(module).add_arguments(command)
        command.set_defaults(module=module)
    options = parser.parse_args(given)
    try:
        status: int = importlib.import_module(options.module).run(options)
    except (ValueError, OSError) as error:
        # What a person can put right comes as one of these; the text says what to do.
        sys.stderr.write(f"star-scheduler {options.command}: error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"star-scheduler {options.command}: stopped\n")
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
