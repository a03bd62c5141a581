"""A server's memory that outlives it: the last whole state of every chunk, in anonymous memory its owner holds.

Every record has two slots. The older one is marked empty, filled, and marked with the next number, so whenever the
server is killed one of the two is whole. The memory has no name, so nothing is left behind and the size of /dev/shm,
64 MB in a container, does not matter.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any

import torch

from star_hvd.ps.store import Record

__all__ = ["Mirror", "new_memory"]

_SLOT = struct.Struct("<QQQQ")  # offset, capacity, length, number of the write; 0 while empty
_TAG = struct.Struct("<Q")
_TAG_AT = 24


def new_memory() -> int:
    """A file descriptor of an empty piece of memory, or of an unlinked file where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("star-ps")
    descriptor, path = tempfile.mkstemp(prefix="star-ps-")
    os.unlink(path)
    return descriptor


class Mirror:
    """Records in such a memory.

    Args:
        descriptor: From `new_memory`; closed by `close`.
        entries: Number of records; the same at every opening.
    """

    def __init__(self, descriptor: int, entries: int) -> None:
        self._fd = descriptor
        size = _pages(max(1, entries) * 2 * _SLOT.size)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._table = mmap.mmap(descriptor, size)
        self._regions: dict[int, torch.Tensor] = {}

    def write(self, entry: int, record: Record) -> None:
        """Replace a record; a reader sees the old one or the new one, never a mixture."""
        slots = [self._slot(entry, 0), self._slot(entry, 1)]
        which = 0 if slots[0][3] <= slots[1][3] else 1
        at = self._at(entry, which)
        offset, capacity, _, _ = slots[which]
        _TAG.pack_into(self._table, at + _TAG_AT, 0)
        need = record.nbytes
        if capacity < need:
            self._regions.pop(at, None)
            offset, capacity = self._allocate(need)
            _SLOT.pack_into(self._table, at, offset, capacity, 0, 0)
        record.write(self._region(at, offset, capacity))
        _SLOT.pack_into(self._table, at, offset, capacity, need, 0)
        _TAG.pack_into(self._table, at + _TAG_AT, slots[1 - which][3] + 1)

    def read(self, entry: int) -> torch.Tensor | None:
        """The bytes of the last whole record, not copied; None if there is none."""
        which = 0 if self._slot(entry, 0)[3] > self._slot(entry, 1)[3] else 1
        offset, capacity, length, tag = self._slot(entry, which)
        return self._region(self._at(entry, which), offset, capacity)[:length] if tag else None

    def close(self) -> None:
        """Give the memory up on this side."""
        self._regions.clear()
        self._table.close()
        os.close(self._fd)

    def _at(self, entry: int, which: int) -> int:
        return (2 * entry + which) * _SLOT.size

    def _slot(self, entry: int, which: int) -> Any:
        return _SLOT.unpack_from(self._table, self._at(entry, which))

    def _allocate(self, need: int) -> tuple[int, int]:
        offset = os.fstat(self._fd).st_size
        capacity = _pages(need)
        os.ftruncate(self._fd, offset + capacity)
        return offset, capacity

    def _region(self, at: int, offset: int, capacity: int) -> torch.Tensor:
        if at not in self._regions:
            self._regions[at] = torch.frombuffer(mmap.mmap(self._fd, capacity, offset=offset), dtype=torch.uint8)
        return self._regions[at]


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
