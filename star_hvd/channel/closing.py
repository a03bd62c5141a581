"""Closing of ZeroMQ contexts, which ZeroMQ itself may wait for without end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from star_hvd.threads import supervised

__all__ = ["CLOSE_S", "close_within"]

logger = logging.getLogger("star_hvd")

CLOSE_S = 10.0
"""A context is closed within a second of lingering, unless one of its threads or sockets does not end."""


def close_within(close: Callable[[], None], what: str, deadline_s: float = CLOSE_S) -> bool:
    """Close something, and go on without it if that does not end in time: the process may be about to end.

    `zmq_ctx_term` waits for sockets that a thread still uses, and pyzmq for its authenticator's thread, both without a
    limit.

    Args:
        close: Closes it; called once, by another thread.
        what: Its name in the warning.
        deadline_s: Longest wait.

    Returns:
        Whether it was closed in time.
    """
    thread = supervised(close, "star-close", critical=False)
    try:
        thread.start()
    except RuntimeError:  # From Python 3.12 on, exit handlers start no threads; what is still to be sent matters more.
        close()
        return True
    thread.join(deadline_s)
    if thread.is_alive():
        logger.warning("%s did not close within %g s; it is left open until this process ends", what, deadline_s)
    return not thread.is_alive()
