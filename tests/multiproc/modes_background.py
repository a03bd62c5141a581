"""What every rank runs to test transfers behind compute (`Config.background`): scenarios of `modes.py`, with them."""

from __future__ import annotations

import dataclasses
import sys

from tests.multiproc import modes

if __name__ == "__main__":
    modes.CONFIG = dataclasses.replace(modes.CONFIG, background=True)
    modes.main(sys.argv[1:])
