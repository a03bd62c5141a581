"""Which ranks have left the job for good: their process has ended, or works in another world (elastic).

A silent rank may be frozen, or cut off, and come back; its kernel still accepts connections, or nothing answers at all.
Where the kernel refuses a connection to the rank's tensor socket, no process has that socket open any more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from star_hvd.channel.keys import Peer
from star_hvd.errors import RankLostError

__all__ = ["Departures"]

_CONNECT_S = 0.5
_FIRST_S, _LAST_S = 0.5, 30.0  # Between two looks at a rank: the queue of connections of a frozen one is finite.


class Departures:
    """See the module's text.

    Args:
        peers: All ranks, in order.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._silent: frozenset[int] = frozenset()
        self._looks: dict[int, tuple[float, float]] = {}  # When to look at a rank again, and the pause after that.

    def note(self, rank: int, present: bool) -> None:
        """The coordinator hears a rank again, or has not heard it for some time; in the agent's thread."""
        self._silent = self._silent - {rank} if present else self._silent | {rank}

    def check(self, also: Sequence[int] = ()) -> None:
        """To be called now and then while other ranks are waited for.

        Args:
            also: Ranks that this one has not heard itself.

        Raises:
            RankLostError: A silent rank has left.
        """
        silent = self._silent.union(also)
        self._looks = {rank: look for rank, look in self._looks.items() if rank in silent}
        for rank in sorted(silent):
            at_s, pause_s = self._looks.get(rank, (0.0, _FIRST_S))
            if time.monotonic() >= at_s:
                self._looks[rank] = (time.monotonic() + pause_s, min(_LAST_S, 2.0 * pause_s))
                if self._has_left(self._peers[rank]):
                    raise RankLostError(
                        f"rank {rank} has left the job: it is silent, and nothing listens at its address any more"
                    )

    def _has_left(self, peer: Peer) -> bool:
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
