"""The command line of a child process that runs a module of ours.

`python -m MODULE` searches the current folder first, so a user's `scheduler.py` there would replace our package.
"""

from __future__ import annotations

import sys

__all__ = ["module_command"]

_PROGRAM = (
    "import sys; sys.path and not sys.path[0] and sys.path.pop(0); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""With `-c` the current folder is the empty entry at the front, which is absent with PYTHONSAFEPATH."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does, but without the current folder in `sys.path`.

    The child's working directory stays its parent's, because relative paths and URIs among the arguments and in the
    environment refer to it.

    Args:
        module: Dotted name of the module.
        *arguments: Its arguments.
    """
    return [sys.executable, "-c", _PROGRAM, module, *arguments]
