"""How the user's program ended: finished, or by an error that has to end the job as under plain Horovod.

A rank that has finished waits for the others and helps them; one that failed must not. An exception tells
`sys.excepthook`. A `SystemExit` calls none, so `sys.exit`, `exit` and `quit` are watched, and for one that was raised
by hand the place is looked at where the main module was left: an exception out of a call is an exit in the middle,
while a module that ends with `raise SystemExit(main())` has come to its end.
"""

from __future__ import annotations

import builtins
import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["failed", "forget", "watch"]

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RESUME")

_failed: bool | None = None  # None as long as nothing was said.
_module: FrameType | None = None  # Of the main program.


def watch() -> None:
    """Begin to watch; on the main thread, from inside the user's program."""
    global _module
    if threading.current_thread() is threading.main_thread():
        _module = _main_frame() or _module
    if _before:  # Once: a hook that replaced it calls it.
        return
    _before["hook"], sys.excepthook = sys.excepthook, _on_error
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(place, name):
            setattr(place, name, _noting(getattr(place, name)))


def failed() -> bool:
    """Whether the program has ended by an error; asked at the interpreter's end, or by `shutdown` before that."""
    if _failed is not None:
        return _failed
    return _module is not None and _left(_module) and dis.opname[_module.f_code.co_code[_module.f_lasti]] not in _ENDS


def forget() -> None:
    """Whatever was seen was of another process, of which this is a copy."""
    global _failed, _module
    _failed, _module = None, None


_before: dict[str, Any] = {}


def _on_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    global _failed
    _failed = True
    _before["hook"](kind, error, trace)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises SystemExit, but with its status noted."""

    def leave(status: Any = None) -> Any:
        global _failed
        if threading.current_thread() is threading.main_thread():
            _failed = status not in (None, 0)
        return function(status)

    return leave


def _main_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None


def _left(module: FrameType) -> bool:
    """Whether the main module runs no more."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame is module:
            return False
        frame = frame.f_back
    return True
