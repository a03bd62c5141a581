"""Messages for sessions that are not open on this server yet, kept until they are."""

from __future__ import annotations

from typing import Any

__all__ = ["EarlyMessages"]

_MESSAGES, _BYTES, _SESSIONS = 4096, 256 << 20, 64
Key = tuple[int, int]


class EarlyMessages:
    """Bounded queues of messages, one per session (optimizer, session number)."""

    def __init__(self) -> None:
        self._queues: dict[Key, list[list[Any]]] = {}
        self._messages = self._bytes = 0

    def __len__(self) -> int:
        """Return the number of sessions with messages."""
        return len(self._queues)

    def add(self, key: Key, frames: list[Any]) -> bool:
        """Keep a message; return False, and keep nothing, if there is no room for it."""
        nbytes = sum(map(len, frames))
        if self._messages >= _MESSAGES or (self._bytes and self._bytes + nbytes > _BYTES):
            return False
        self._messages += 1
        self._bytes += nbytes
        self._queues.setdefault(key, []).append(frames)
        return True

    def pop(self, key: Key) -> list[list[Any]]:
        """Remove and return a session's messages in their order."""
        messages = self._queues.pop(key, [])
        self._messages -= len(messages)
        self._bytes -= sum(len(frame) for frames in messages for frame in frames)
        return messages

    def surplus(self, key: Key) -> Key | None:
        """Return the oldest session if a first message for `key` would make them too many, else None."""
        return next(iter(self._queues)) if key not in self._queues and len(self._queues) >= _SESSIONS else None

    def older(self, key: Key) -> list[Key]:
        """Return the optimizer's sessions before `key`, which will not be opened any more."""
        return [each for each in self._queues if each[0] == key[0] and each[1] < key[1]]
