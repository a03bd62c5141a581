"""Socket options of all the job's connections: detection of dead connections, and reconnection."""

from __future__ import annotations

from typing import Any

import zmq

__all__ = ["HEARTBEAT_INTERVAL_MS", "HEARTBEAT_TIMEOUT_MS", "UNTAKEN_TIMEOUT_MS", "keep_alive"]

HEARTBEAT_INTERVAL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Reset by each complete frame of the peer. Long enough for a frame of 4 MB at 4 Mbit/s, and for a machine so busy that
ZeroMQ's thread has to wait for a core. A false alarm costs a reconnection and resent messages, but loses none."""
UNTAKEN_TIMEOUT_MS = 5000
"""How long bytes may stay unacknowledged in TCP. Detects a path that drops everything even during a large frame, since
a slow link still acknowledges some bytes."""
_RECONNECT_MS, _MOST_RECONNECT_MS = 50, 400
_CONNECT_TIMEOUT_MS = 1500
"""After this time a connection attempt starts over. The system itself would retry only after 1, 2, 4, 8, ... more
seconds, if the host was cut off or drops a share of the requests (`connection_filter`)."""


_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 5, 2, 3
"""Detects a host that is gone or cut off at the listening side of an idle connection, by the system's probes."""


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Set the options, before the socket is bound or connected.

    A process that is frozen for longer than the timeouts loses its connections but no messages; see `reliable`.

    Only the connecting side sends ZeroMQ's heartbeats. If a rank reconnects, its new connection replaces the old one in
    the ROUTER. If data then still arrives on the old one, and it breaks, libzmq 4.3.5 ends the process at the next
    heartbeat (`Assertion failed: !_io_error`).
    """
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _PROBE_AFTER_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_EVERY_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    else:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNTAKEN_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
