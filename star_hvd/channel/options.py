"""Socket options of every connection of the job: detection of dead connections, and reconnection."""

from __future__ import annotations

from typing import Any

import zmq

__all__ = ["HEARTBEAT_INTERVAL_MS", "HEARTBEAT_TIMEOUT_MS", "UNTAKEN_TIMEOUT_MS", "keep_alive"]

HEARTBEAT_INTERVAL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Reset by each complete frame of the peer. Long enough for a frame of 4 MB at 4 Mbit/s, and for a machine so busy that
ZeroMQ's thread has to wait for a core. A false alarm costs a reconnection and repeated messages, but loses none."""
UNTAKEN_TIMEOUT_MS = 5000
"""How long bytes may be unacknowledged in TCP. It detects a path that drops everything even during a large frame, as on
a slow link some bytes are still acknowledged."""
_RECONNECT_MS, _MOST_RECONNECT_MS = 50, 400
_CONNECT_TIMEOUT_MS = 1500
"""After it a connection is tried anew: the system would ask a host that was cut off, or that drops a share of what a
crowd asks (`gate`), only after 1, 2, 4, 8, ... seconds more."""


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Set the options, before the socket is bound or connected.

    A process that is frozen for longer than the timeouts loses its connections but no messages, see `reliable`.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNTAKEN_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
