"""Finds ranks that have left the job for good: their process has ended, or works in another world (elastic).

A silent rank may be frozen or cut off, and come back: then its kernel still accepts connections, or nothing answers at
all. If the kernel goes on refusing connections to the rank's tensor socket, no process has that socket open any more; a
single refusal may be that of a host or a filter on the way that has just come up, for example.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence

from star_hvd.channel.keys import Peer
from star_hvd.errors import RankLostError

__all__ = ["Departures"]

_CONNECT_S = 0.5
_FIRST_S, _LAST_S = 0.5, 30.0  # First and longest interval of probes: a frozen rank's connection queue is finite.
_SURE_S, _SURE = 5.0, 3  # For how long, and at least how often, connections are refused before the rank has left.
_AGAIN_S = 1.0  # Longest interval of probes after a refusal, which nothing queues.


class Departures:
    """Probes silent ranks; see the module docstring.

    Args:
        peers: All ranks, in order.
        first_s: Interval between the first two probes of a rank; further ones are doubled.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, peers: Sequence[Peer], first_s: float = _FIRST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers, self._first_s, self._clock = peers, first_s, clock
        self._silent: frozenset[int] = frozenset()
        self._looks: dict[int, tuple[float, float]] = {}  # Time of a rank's next probe, and the interval after it.
        self._refused: dict[int, list[float]] = {}  # Times of a rank's refusals since it last did not refuse.

    def note(self, rank: int, present: bool) -> None:
        """Note that the coordinator hears a rank again, or has not for some time; called in the agent's thread."""
        self._silent = self._silent - {rank} if present else self._silent | {rank}

    def check(self, also: Sequence[int] = ()) -> None:
        """Probe silent ranks whose probe is due; call repeatedly while waiting for other ranks.

        Args:
            also: Ranks that are silent towards this rank.

        Raises:
            RankLostError: A silent rank has left.
        """
        silent = self._silent.union(also)
        self._looks = {rank: look for rank, look in list(self._looks.items()) if rank in silent}
        self._refused = {rank: times_s for rank, times_s in list(self._refused.items()) if rank in silent}
        for rank in sorted(silent):
            at_s, pause_s = self._looks.get(rank, (-math.inf, self._first_s))
            if self._clock() >= at_s:
                self._looks[rank] = (self._clock() + pause_s, min(_LAST_S, 2.0 * pause_s))
                if self._has_left(rank):
                    raise RankLostError(
                        f"rank {rank} has left the job: it is silent, and nothing listens at its address any more"
                    )

    def _has_left(self, rank: int) -> bool:
        """Probe a rank; return whether it has refused for long enough."""
        if not self._refuses(self._peers[rank]):
            self._refused.pop(rank, None)
            return False
        now_s = self._clock()
        refused_s = self._refused.setdefault(rank, [])
        refused_s.append(now_s)
        self._looks[rank] = (now_s + min(_AGAIN_S, self._first_s), self._first_s)
        return len(refused_s) >= _SURE and now_s - refused_s[0] >= _SURE_S

    def _refuses(self, peer: Peer) -> bool:
        kind = socket.AF_UNIX if peer.tensor_path else socket.AF_INET
        address = peer.tensor_path or (peer.host, peer.tensor_port)
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            try:
                probe.connect(address)
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:  # No answer: unknown.
                return False
            with contextlib.suppress(OSError):
                probe.shutdown(socket.SHUT_RDWR)
            return False
