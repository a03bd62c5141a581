"""Modes that could not be prepared in this job: not offered for a while, then tried again. Pure.

Some reasons last (a Horovod that has no process sets), some pass (a rank was frozen while a set was made), and a rank
that says why cannot always tell. So each mode is barred for a time that doubles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

__all__ = ["PreparationBackoff"]

_FIRST_S, _MOST_S = 60.0, 3600.0


class PreparationBackoff(Collection[str]):
    """The modes that are barred now."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def __contains__(self, mode: object) -> bool:
        return mode in self._until_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._until_s)

    def __len__(self) -> int:
        return len(self._until_s)

    def bar(self, mode: str, now_s: float) -> bool:
        """Bar a mode. Returns whether it is for the first time."""
        first = mode not in self._last_s
        self._last_s[mode] = _FIRST_S if first else min(_MOST_S, 2.0 * self._last_s[mode])
        self._until_s[mode] = now_s + self._last_s[mode]
        return first

    def succeeded(self, mode: str) -> None:
        """The mode came into force: what kept it out has passed."""
        self._until_s.pop(mode, None)
        self._last_s.pop(mode, None)

    def lift(self, now_s: float) -> None:
        """Let those go whose time is over."""
        self._until_s = {mode: until_s for mode, until_s in self._until_s.items() if until_s > now_s}
