"""How fast a transfer goes over a link that other ranks' messages cross meanwhile: below the link's rate.

As fast as the link takes it a transfer fills the queue in front of the link, and whatever else crosses it waits behind:
tens of milliseconds, in every negotiation of the members of a subgroup while a child sends or receives. A transfer that
is over sooner than such a queue drains is not paced.

    pace = SHARE * the faster of the last two transfers that were not paced

One is not paced now and then, to measure the link, the rarer the longer nothing changes: after 1, 8, 16, ..., 256
others, and at once where a paced one shows that the link has become slower.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["SHARE", "Pace", "chunk_bytes", "paced_s"]

SHARE = 0.8
"""Part of the link's rate: the rest is for the others' messages, and for errors of the measured rate."""

_WORTH_S = 0.03  # Transfers that take less are not paced: about the queue that one leaves, and the delay of threads.
_LEAST_BYTES = 1 << 16  # A transfer of less says nothing of the rate.
_CHUNK_S, _LEAST_CHUNK_BYTES = 0.008, 4096  # What other messages wait for at most; a chunk wakes threads at both ends.
_SOONEST, _RAREST = 8, 256
_SLOWER = 0.75  # Of the pace: a paced transfer below this was held up by the link, and not by a thread.


def chunk_bytes(bytes_per_s: float, most: int) -> int:
    """Size of a paced transfer's messages, at most `most`; that where it is not paced (0)."""
    if not bytes_per_s:
        return most
    return min(most, max(_LEAST_CHUNK_BYTES, round(_CHUNK_S * bytes_per_s)))


def paced_s(size_bytes: npt.ArrayLike, link_bytes_per_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What transfers take over links of these rates, paced where they are worth it; most are, as none that measures is.

    Args:
        size_bytes: Of each transfer.
        link_bytes_per_s: Rate of each link, infinite where unknown.
    """
    whole_s = np.divide(size_bytes, link_bytes_per_s)
    return np.asarray(np.where(whole_s > _WORTH_S, whole_s / SHARE, whole_s))


class Pace:
    """The pace of one direction of a link, from what transfers took.

    Args:
        known_bytes_per_s: The link's rate as measured otherwise, 0 where unknown.
    """

    def __init__(self, known_bytes_per_s: float = 0.0) -> None:
        self._rates: deque[float] = deque([known_bytes_per_s] if known_bytes_per_s > 0.0 else [], maxlen=2)
        self._left = len(self._rates)  # Paced transfers until the next one that is not.
        self._rest = _SOONEST

    def bytes_per_s(self, size_bytes: float) -> float:
        """The pace of the next transfer, of about `size_bytes`; 0 where it is not paced."""
        return SHARE * max(self._rates) if self._left and self._worth(size_bytes) else 0.0

    def measures(self, size_bytes: float) -> bool:
        """Whether the next transfer measures the link: it is not paced, where others of its size are."""
        return not self._left and self._worth(size_bytes)

    def _worth(self, size_bytes: float) -> bool:
        return bool(self._rates) and size_bytes > _WORTH_S * max(self._rates)

    def took(self, size_bytes: int, time_s: float, paced_bytes_per_s: float) -> None:
        """A transfer has ended.

        Args:
            size_bytes: Its size.
            time_s: What it took; 0 or less says nothing.
            paced_bytes_per_s: Its pace, 0 where it had none.
        """
        if size_bytes < _LEAST_BYTES or time_s <= 0.0:
            return
        rate = size_bytes / time_s
        if not paced_bytes_per_s:
            self._rates.append(rate)
            if len(self._rates) < 2:
                self._left = 1
            else:
                self._left, self._rest = self._rest, min(_RAREST, 2 * self._rest)
        elif rate < _SLOWER * paced_bytes_per_s:
            self._left, self._rest = 0, _SOONEST
        else:
            self._left = max(0, self._left - 1)
