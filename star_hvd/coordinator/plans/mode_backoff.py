"""Exponential backoff for modes whose preparation failed. Pure: no clock.

Some reasons are permanent (a Horovod without process sets), some temporary (a rank froze while a set was made), and the
rank that reports one cannot always tell which. So a mode is blocked for 60 s, then twice as long each time, up to an
hour.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

__all__ = ["PreparationBackoff"]

_FIRST_S, _MOST_S = 60.0, 3600.0


class PreparationBackoff(Collection[str]):
    """The currently blocked modes, as a collection of their names."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def __contains__(self, mode: object) -> bool:
        return mode in self._until_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._until_s)

    def __len__(self) -> int:
        return len(self._until_s)

    def block(self, mode: str, now_s: float) -> bool:
        """Block a mode; return whether this is the first time since it last succeeded."""
        first = mode not in self._last_s
        self._last_s[mode] = _FIRST_S if first else min(_MOST_S, 2.0 * self._last_s[mode])
        self._until_s[mode] = now_s + self._last_s[mode]
        return first

    def succeeded(self, mode: str) -> None:
        """Reset a mode's backoff: its plan became active."""
        self._until_s.pop(mode, None)
        self._last_s.pop(mode, None)

    def expire(self, now_s: float) -> None:
        """Unblock modes whose time has expired."""
        self._until_s = {mode: until_s for mode, until_s in self._until_s.items() if until_s > now_s}
