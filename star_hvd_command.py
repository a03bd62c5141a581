"""Starts the command `star-hvd` without `star_hvd/__init__.py`, which needs a Horovod that can be imported.

`star-hvd doctor` is for the case that there is none, or one built for another torch; the other subcommands do not need
Horovod either. So this module is outside the package, and gives the command the package without its `__init__`.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line of the process; return its exit status, see `star_hvd.cli.main`."""
    if "star_hvd" not in sys.modules:
        spec = importlib.util.find_spec("star_hvd")
        assert spec is not None, "this module is installed together with the package"
        sys.modules["star_hvd"] = importlib.util.module_from_spec(spec)
    from star_hvd import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
