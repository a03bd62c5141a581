"""Append-only files of JSON lines that survive a full disk and a killed writer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scheduler.run_events import read_line
from star_hvd.run_log.layout import clean

__all__ = ["SpoolWriter", "line_of", "read_events"]


def line_of(event: dict[str, Any]) -> str:
    """Return an event as one line of JSON, with its newline."""
    with contextlib.suppress(TypeError, ValueError):
        text = _encode(event)
        if _SURROGATE not in text:
            return f"{text}\n"
    return f"{_encode(clean(event))}\n"  # NaN, numpy objects, lone surrogates: rare; this takes five times as long.


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SURROGATE = "\\ud"  # As the encoder writes one, also as half of a character that is valid.


_ROOM = {
    "step": (0.25, 0.75),
    "resources": (0.25, 0.75),
    "timeline": (0.25, 0.75),
    "window": (0.25, 0.75),
    "shares": (0.25, 0.75),
    "transmission": (0.25, 0.75),
    "metric": (0.75, 0.97),
}
"""Fractions (first, last) of a file's limit between which entries of a kind are thinned out: one in
((last - first) / left)^2 is written, where `left` is the room up to `last`, so that some are written however long the
job is. Other kinds, mostly plans and the end, are few and get the rest of the file."""


class SpoolWriter:
    """Appends complete lines, or nothing. Used by one thread.

    Args:
        path: The file; created when the first line is written.
        max_bytes: Limit of the file's size; lines beyond it are counted in `dropped`.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.dropped = 0
        self._path = path
        self.max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0
        self._seen: dict[str, int] = {}

    def keeps(self, kind: str, coming: int = 0) -> bool:
        """Whether the next entry of a kind should be written, depending on how full the file is.

        Args:
            kind: Kind of the entry.
            coming: Bytes that will be appended before it.
        """
        if kind not in _ROOM:
            return True
        first, last = (part * self.max_bytes for part in _ROOM[kind])
        left = last - self._size - coming
        if left <= 0.0:
            return False
        every = max(1, int(((last - first) / left) ** 2))
        self._seen[kind] = self._seen.get(kind, -1) + 1
        return self._seen[kind] % every == 0

    def append(self, events: list[dict[str, Any]]) -> None:
        """Append one line per event.

        Raises:
            OSError: The disk is full, for example; the file is unchanged.
        """
        self.append_lines([line_of(event) for event in events])

    def append_lines(self, lines: list[str]) -> None:
        """Append lines made by `line_of`; see `append`."""
        data = "".join(lines).encode()
        if self._fd is None:
            self._open()
        assert self._fd is not None
        if self._size + len(data) > self.max_bytes:
            self.dropped += len(lines)
            return
        try:
            written = 0
            while written < len(data):  # A disk that is nearly full accepts only a part at first.
                written += os.write(self._fd, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._fd, self._size = fd, os.fstat(fd).st_size


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the events of a file from byte `offset` on, each with the offset of the next line.

    An incomplete last line is not read: its writer may still be writing it, or was killed. A damaged line, or one that
    is not an event (`scheduler.run_events`), is skipped.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            event = read_line(line)
            if event is not None:
                yield offset, event
