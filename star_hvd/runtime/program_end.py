"""How the user's program ended: finished, or with an error that must end the job as under plain Horovod.

A rank that has finished waits for the others and contributes to their steps; one that failed must not. Exceptions reach
`sys.excepthook`, and `threading.excepthook` those that end a thread: if it is the one that trains, the training has
failed, though the main module may come to its end. A `SystemExit` does not reach `sys.excepthook`, so the instruction
at which the main module was left is examined: an exception out of a call is an exit in the middle, while a module that
ends with `raise SystemExit(main())` has finished. Whether an exit in the middle is an error is known from `sys.exit`,
`exit` and `quit`, which are wrapped to note the status, also where modules have imported them by name; of a
`SystemExit` raised by hand it is assumed. A program may catch its exit and go on.
"""

from __future__ import annotations

import builtins
import dis
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

__all__ = ["ended", "failed", "forget", "handling_error", "note_step", "watch"]

_NO_ERRORS = (StopIteration, StopAsyncIteration, GeneratorExit)  # The end of the data, or of a generator.
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RESUME")

_failed = False  # Whether an exception has left the program.
_exit_failed: bool | None = None  # Whether the last `sys.exit` had the status of an error; None if there was none.
_module: FrameType | None = None  # Frame of the main module.
_handled_before: int | None = None  # Id of the error within whose `except` the program trains, as if without it.
_trainer: weakref.ref[threading.Thread] | None = None  # The thread that trains.
_trainer_failed = False  # Whether an exception has ended that thread, and none has trained since.


def watch() -> None:
    """Start watching; call it on the main thread, from inside the user's program."""
    global _module
    note_step()
    if threading.current_thread() is threading.main_thread():
        _module = _main_frame() or _module
    if _before:  # Only once; a hook set later calls ours.
        return
    _before["hook"], sys.excepthook = sys.excepthook, _on_error
    _before["thread_hook"], threading.excepthook = threading.excepthook, _on_thread_error
    noting: dict[int, tuple[Any, Callable[..., Any]]] = {}
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(place, name):
            function = getattr(place, name)
            noting[id(function)] = function, _noting(function)
            setattr(place, name, noting[id(function)][1])
    _rebind_imported(noting)


def note_step() -> None:
    """Note that the program trains, in the calling thread: within an `except`, it goes on in spite of that error."""
    global _handled_before, _trainer, _trainer_failed
    _trainer, _trainer_failed = weakref.ref(threading.current_thread()), False
    error = sys.exc_info()[1]
    _handled_before = None if error is None else id(error)  # Not the error, which would keep its frames' tensors.


def failed() -> bool:
    """Whether the program ended with an error; called at interpreter exit, or earlier by `shutdown`."""
    if _failed or _trainer_failed:
        return True
    if _module is None:  # Not known, as star_hvd was started by another thread.
        return bool(_exit_failed)
    return _left(_module) and _in_the_middle(_module) and _exit_failed is not False


def ended() -> bool:
    """Whether the main module is no longer running, so that only exit handlers follow."""
    return _module is not None and _left(_module)


def handling_error() -> bool:
    """Whether the caller is in a `finally`, `except` or `__exit__` because of an error; one handled before is over.

    The main module is still running there, and whether it will be left by the error is not known yet.
    """
    error = sys.exc_info()[1]
    if id(error) == _handled_before:
        return False
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, _NO_ERRORS)


def forget() -> None:
    """Forget what was noted, in a forked child: it concerns the parent."""
    global _failed, _exit_failed, _module, _handled_before, _trainer, _trainer_failed
    _failed, _exit_failed, _module, _handled_before = False, None, None, None
    _trainer, _trainer_failed = None, False


_before: dict[str, Any] = {}


def _on_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    global _failed
    _failed = True
    _before["hook"](kind, error, trace)


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    global _trainer_failed
    thread, error = args.thread, args.exc_value
    left = isinstance(error, SystemExit) and error.code in (None, 0)
    if thread is not None and _trainer is not None and _trainer() is thread and not left:
        _trainer_failed = True
    _before["thread_hook"](args)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, which raises SystemExit, so that its status is noted."""

    def leave(*args: Any, **named: Any) -> Any:
        global _exit_failed
        if threading.current_thread() is threading.main_thread():
            status = args[0] if args else named.get("code")  # `exit` and `quit` have that name for it.
            _exit_failed = status not in (None, 0)
        return function(*args, **named)

    return leave


def _rebind_imported(noting: dict[int, tuple[Any, Callable[..., Any]]]) -> None:
    """Put the wrappers where modules hold the functions as global names, as after `from sys import exit`.

    Args:
        noting: Each function and its wrapper, by the function's id: objects of a program may not be comparable.
    """
    # Read without the imports that a lazy module would make; `sys.modules` may hold what is no module.
    modules = [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
    scopes = [object.__getattribute__(module, "__dict__") for module in modules]
    for scope in [*scopes, *([] if _module is None else [_module.f_globals])]:
        for name, value in list(scope.items()):
            if id(value) in noting:
                scope[name] = noting[id(value)][1]


def _main_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None


def _left(module: FrameType) -> bool:
    """Whether the main module is no longer running."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame is module:
            return False
        frame = frame.f_back
    return True


def _in_the_middle(module: FrameType) -> bool:
    """Whether an exception left the main module elsewhere than at a statement that raises it as the module's end."""
    operation, argument = module.f_code.co_code[module.f_lasti : module.f_lasti + 2]
    reraises = dis.opname[operation] == "RAISE_VARARGS" and argument == 0  # A `raise` alone, in an `except`.
    return reraises or dis.opname[operation] not in _ENDS
