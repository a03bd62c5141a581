"""The option `--json` of all benchmarks: a file that cannot be written is refused before anything is measured."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["json_file"]


def json_file(text: str) -> Path:
    """Return the path of a file to write, as the `type` of an option.

    Nothing is made yet; folders that do not exist are made when the file is written.

    Raises:
        ArgumentTypeError: It is a folder, or no file can be made there.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a folder; expected a file")
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    if not usable:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {folder} is no folder, or not writable")
    return path
