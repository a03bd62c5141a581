"""Threads whose exceptions are always reported.

- star-agent, star-tensors, star-transmit-N, star-hosts-N, star-prepare, star-sets, star-group, star-ps-owner,
  star-ps-recover, star-ps-pipe: training cannot continue without them, so the optimizers fail and the training thread
  raises the reason.
- star-late-N: the same.
- star-helper-N and star-ps-client: the same, by handlers of their own.
- star-coordinator: logs an error; all steps run in lockstep from then on.
- star-model, star-handshakes, star-resources, star-probe, star-job-log, star-run-log, star-run-sender: log a warning;
  their data is missing from then on.
- star-close: logs a warning; what it closes stays open until the process ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["on_death", "supervised"]

logger = logging.getLogger("star_hvd")

Handler = Callable[[str, Exception], None]

_handlers: list[Handler] = []


def on_death(handler: Handler) -> Callable[[], None]:
    """Call `handler` with thread name and exception when a critical thread fails; return a function to undo this."""
    _handlers.append(handler)

    def undo() -> None:
        if handler in _handlers:
            _handlers.remove(handler)

    return undo


def supervised(
    target: Callable[..., None], name: str, *, args: tuple[Any, ...] = (), critical: bool = True
) -> threading.Thread:
    """Return a daemon thread that is not started yet.

    Args:
        target: The function it runs.
        name: Its name.
        args: Arguments of `target`.
        critical: Whether training cannot continue without it; otherwise an exception is only logged as a warning.
    """

    def run() -> None:
        try:
            target(*args)
        except Exception as error:
            if not critical:
                logger.warning("the thread %s ended by an exception; training goes on", name, exc_info=True)
                return
            logger.exception("the thread %s ended by an exception", name)
            for handler in list(_handlers):
                handler(name, error)

    return threading.Thread(target=run, name=name, daemon=True)
