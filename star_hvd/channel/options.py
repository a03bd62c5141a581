"""Socket options that every connection of the job has: how soon a dead connection is noticed and opened again."""

from __future__ import annotations

from typing import Any

import zmq

__all__ = ["HEARTBEAT_INTERVAL_MS", "HEARTBEAT_TIMEOUT_MS", "UNTAKEN_TIMEOUT_MS", "keep_alive"]

HEARTBEAT_INTERVAL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Any whole frame of the peer's resets it. Long enough for a frame of 4 MB at 4 Mbit/s, and for a machine so busy that
ZeroMQ's own thread waits for its turn; too short costs a connection and what has to be sent again, no message."""
UNTAKEN_TIMEOUT_MS = 5000
"""How long bytes may go unacknowledged in TCP: a path that swallows everything is noticed by it even while large frames
travel, because a slow link still takes bytes."""
_RECONNECT_MS, _MOST_RECONNECT_MS = 50, 400


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Set the options; before the socket is bound or connected.

    A process that stands still for longer than the timeouts loses its connections, not its messages: see `reliable`.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNTAKEN_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
