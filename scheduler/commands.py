"""A command with subcommands, each in its own module.

A module has `add_arguments(parser) -> None` and `run(options) -> int`, the exit status. It is imported only when its
subcommand runs, because the imports of some (LightGBM, MLflow, pandas) are optional and slow.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Subcommand", "check_output", "run_command", "seconds"]

Subcommand = tuple[str, str, str]
"""Name, module, help."""

_OWN = ("scheduler", "star_hvd", "star_hvd_command")  # A module of ours that is missing is an error of ours.
_INSTALL = "pip install 'star-hvd[train]'"


def run_command(
    program: str, description: str, subcommands: Sequence[Subcommand], arguments: Sequence[str] | None
) -> int:
    """Run a subcommand.

    Args:
        program: Name of the command.
        description: Description of the command.
        subcommands: The subcommands.
        arguments: The command line without the program's name; that of the process if None.

    Returns:
        Exit status: the subcommand's, 2 for wrong arguments (raised as `SystemExit` by argparse) or an error the user
        can fix, 130 if it was interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog=program, description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in subcommands:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in given[:1]:
            importlib.import_module(module).add_arguments(command)
        command.set_defaults(module=module)
    options = parser.parse_args(given)
    try:
        status: int = importlib.import_module(options.module).run(options)
    except (ValueError, OSError) as error:
        # Errors that the user can fix are of these types; the text says what to do.
        sys.stderr.write(f"{program} {options.command}: error: {' '.join(str(error).split())}\n")
        return 2
    except ImportError as error:  # Of an optional package; subcommands import these late.
        if (error.name or "").partition(".")[0] in _OWN:
            raise
        text = " ".join(str(error).split())
        advice = "" if "pip install" in text else f"; the optional packages are installed with: {_INSTALL}"
        sys.stderr.write(f"{program} {options.command}: error: {text}{advice}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{program} {options.command}: stopped\n")
        return 130
    return status


def check_output(path: Path, option: str, *, folder: bool = False) -> None:
    """Check that a command can write its result, before what takes minutes; makes nothing.

    Args:
        path: The file, or with `folder` the folder.
        option: The option that names it.
        folder: Whether it is a folder.

    Raises:
        ValueError: It cannot.
    """
    expected = "a folder" if folder else "a file"
    if path.exists() and path.is_dir() is not folder:
        raise ValueError(f"{option} is {path}, {'a file' if folder else 'a folder'}; expected {expected}")
    place = next(one for one in (path, *path.absolute().parents) if one.exists())
    if place != path and not place.is_dir():
        raise ValueError(f"{option} is {path}, but {place} is a file; expected a place where {expected} can be made")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{option} is {path}, but {place} may not be written; expected {expected} that can be written")


def seconds(text: str) -> float:
    """The value of an option that is a duration, for `argparse`.

    Raises:
        ArgumentTypeError: It is no finite number of at least 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0.0):
        raise argparse.ArgumentTypeError(f"it is {text!r}; expected seconds, at least 0")
    return value
