"""Pacing of a transfer over a link that carries other ranks' messages at the same time: below the link's rate.

At full rate a transfer fills the queue in front of the link, and all other messages wait behind it: tens of
milliseconds in every negotiation of a subgroup's members while a child sends or receives. A transfer shorter than such
a queue takes to drain is not paced.

    pace = SHARE * the faster of the last two transfers that were not paced

Now and then a transfer is not paced, to measure the link; less often the longer nothing changes: after 1, 8, 16, ...,
256 paced ones, and at once when a paced transfer shows that the link has become slower.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from scheduler.transmission.decision import Decision

__all__ = ["SHARE", "Pace", "chunk_bytes", "paced_s"]

SHARE = 0.8
"""Fraction of the link's rate: the rest is for other messages, and for errors of the measured rate."""

_WORTH_S = 0.03  # Transfers shorter than this are not paced: about the queue that one leaves, and the delay of threads.
_LEAST_BYTES = 1 << 16  # Smaller transfers measure the rate only if they are long enough to be paced.
_CHUNK_S, _LEAST_CHUNK_BYTES = 0.008, 4096  # Longest wait of other messages; each chunk wakes threads at both ends.
_SOONEST, _RAREST = 8, 256
_OTHER = 0.25  # A pace that differs by this fraction from the last one that was logged is logged, too.
_SLOWER = 0.75  # Fraction of the pace: a paced transfer below it was slowed by the link, not by a thread.


def chunk_bytes(bytes_per_s: float, most: int) -> int:
    """Size of a paced transfer's messages, at most `most`; `most` if the transfer is not paced (rate 0)."""
    if not bytes_per_s:
        return most
    return min(most, max(_LEAST_CHUNK_BYTES, round(_CHUNK_S * bytes_per_s)))


def paced_s(size_bytes: npt.ArrayLike, link_bytes_per_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return how long transfers take over links of these rates if every long enough transfer is paced.

    The few unpaced transfers that measure the link are ignored.

    Args:
        size_bytes: Size of each transfer.
        link_bytes_per_s: Rate of each link, infinite if unknown.
    """
    whole_s = np.divide(size_bytes, link_bytes_per_s)
    return np.asarray(np.where(whole_s > _WORTH_S, whole_s / SHARE, whole_s))


class Pace:
    """The pace of one direction of a link, from the times of its transfers.

    Args:
        known_bytes_per_s: The link's rate from another measurement, 0 if unknown.
    """

    def __init__(self, known_bytes_per_s: float = 0.0) -> None:
        self._rates: deque[float] = deque([known_bytes_per_s] if known_bytes_per_s > 0.0 else [], maxlen=2)
        self._left = len(self._rates)  # Paced transfers until the next one that is not.
        self._rest = _SOONEST
        self._told = 0.0  # The pace of the last decision that was told.

    def bytes_per_s(self, size_bytes: float) -> float:
        """The pace of the next transfer, of about `size_bytes`; 0 if it is not paced."""
        return SHARE * max(self._rates) if self._left and self._worth(size_bytes) else 0.0

    def measures(self, size_bytes: float) -> bool:
        """Whether the next transfer is left unpaced to measure the link although others of its size are paced."""
        return not self._left and self._worth(size_bytes)

    def _worth(self, size_bytes: float) -> bool:
        return bool(self._rates) and size_bytes > _WORTH_S * max(self._rates)

    def took(self, size_bytes: int, time_s: float, paced_bytes_per_s: float) -> None:
        """Record the end of a transfer.

        Args:
            size_bytes: Its size.
            time_s: Its duration; ignored if not above 0.
            paced_bytes_per_s: Its pace, 0 if it was not paced.
        """
        if time_s <= 0.0 or (size_bytes < _LEAST_BYTES and not self._worth(size_bytes)):
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

    def news(self, what: str, size_bytes: float) -> Decision | None:
        """Return the pace of transfers of about `size_bytes` if it is clearly another one than the last time.

        Args:
            what: What it is about, see `Decision`.
            size_bytes: Size of a transfer.
        """
        pace = SHARE * max(self._rates) if self._worth(size_bytes) else 0.0
        if abs(pace - self._told) <= _OTHER * self._told:
            return None
        self._told = pace
        if not pace:
            return Decision(what, "full", f"{what}: full speed, as a transfer takes at most {1e3 * _WORTH_S:.0f} ms")
        chosen, rate = f"{pace / 1e6:.3g} MB/s", max(self._rates) / 1e6
        return Decision(what, chosen, f"{what}: {chosen}, {SHARE:g} of the {rate:.3g} MB/s measured")
