"""Memory that outlives a server: the last consistent state of every chunk, in anonymous memory its owner holds open.

Every record has two slots. A write marks the older slot empty, fills it, and marks it with the next number, so one of
the two is complete whenever the server is killed. The memory has no name, so nothing is left behind, and the size of
/dev/shm (64 MB in a container) does not limit it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any

import torch

from star_hvd.ps.common.record import Record
from star_hvd.ps.common.wire import Lent

__all__ = ["Mirror", "new_memory"]

_SLOT = struct.Struct("<QQQQ")  # offset, capacity, length, number of the write; 0 while empty
_TAG = struct.Struct("<Q")
_TAG_AT = 24
_WINDOW_BYTES = 64 << 20
"""Regions are parts of mappings of this size; a larger one has a mapping of its own. Each mapping holds a descriptor,
and a process may be limited to 4096 descriptors and 65530 mappings: too few for one per region."""
_MOST_LENT = 2
"""Regions of a record that are being sent at once. With the current record and the next one that makes four at most."""


def new_memory() -> int:
    """Return a file descriptor of empty anonymous memory (memfd), or of an unlinked file if there is no memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("star-ps")
    descriptor, path = tempfile.mkstemp(prefix="star-ps-")
    os.unlink(path)
    return descriptor


class Mirror:
    """Records in memory from `new_memory`.

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
        self._windows: dict[int, torch.Tensor] = {}
        slots = [self._slot(entry, which) for entry in range(entries) for which in (0, 1)]
        self._end: int = max([size, *(slot[0] + slot[1] for slot in slots if self._is_region(slot[0], slot[1]))])
        self._regions: dict[int, torch.Tensor] = {}
        self._places: dict[int, dict[int, int]] = {}
        self._lent: dict[int, Lent] = {}

    @property
    def idle(self) -> bool:
        """Whether none of the written memory is still being sent."""
        return all(lent.free() for lent in self._lent.values())

    @property
    def size_bytes(self) -> int:
        """Size of the memory in bytes, without what is reserved for further records."""
        return self._end

    @property
    def most_places(self) -> int:
        """Number of regions of the record that has most: two, and those that are still being sent."""
        return max((len(places) for places in self._places.values()), default=0)

    def write(self, entry: int, record: Record) -> Lent | None:
        """Replace a record; a reader sees the old one or the new one, never a mixture.

        Returns:
            The bytes of the record's first tensor in this memory; they stay unchanged while being sent, and at least
            until the second further write of this record. None if too many older ones are still being sent: this one
            may be overwritten then, as memory never shrinks.
        """
        slots = [self._slot(entry, 0), self._slot(entry, 1)]
        which = 0 if slots[0][3] <= slots[1][3] else 1
        at, need = self._at(entry, which), record.nbytes
        _TAG.pack_into(self._table, at + _TAG_AT, 0)
        offset, capacity = self._free(entry, slots, slots[1 - which][0], need)
        _SLOT.pack_into(self._table, at, offset, capacity, need, 0)
        region = self._region(offset, capacity)
        record.write(region)
        _TAG.pack_into(self._table, at + _TAG_AT, slots[1 - which][3] + 1)
        self._lent.pop(offset, None)
        sending = [place for place in self._places[entry] if place in self._lent and not self._lent[place].free()]
        if len(sending) >= _MOST_LENT:
            return None
        self._lent[offset] = Lent(region[record.first])
        return self._lent[offset]

    def _free(self, entry: int, slots: list[Any], current: int, need: int) -> tuple[int, int]:
        """Return a region that neither holds the current record nor is being sent; allocate one if there is none."""
        known = self._places.setdefault(entry, {at: size for at, size, *_ in slots if self._is_region(at, size)})
        for offset, capacity in known.items():
            idle = offset not in self._lent or self._lent[offset].free()
            if offset != current and capacity >= need and idle:
                return offset, capacity
        offset, capacity = self._allocate(need)
        known[offset] = capacity
        return offset, capacity

    def read(self, entry: int) -> torch.Tensor | None:
        """Return the bytes of the last complete record, not copied; None if there is none."""
        which = 0 if self._slot(entry, 0)[3] > self._slot(entry, 1)[3] else 1
        offset, capacity, length, tag = self._slot(entry, which)
        if not tag:
            return None
        if not self._is_region(offset, capacity) or not 0 < length <= capacity:
            return None  # Not written completely; the shard is seeded again.
        return self._region(offset, capacity)[:length]

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self._regions.clear()
        self._windows.clear()
        self._lent.clear()
        self._table.close()
        os.close(self._fd)

    def _at(self, entry: int, which: int) -> int:
        return (2 * entry + which) * _SLOT.size

    def _slot(self, entry: int, which: int) -> Any:
        return _SLOT.unpack_from(self._table, self._at(entry, which))

    def _is_region(self, offset: int, capacity: int) -> bool:
        """Whether a slot, perhaps of a process that was killed while it wrote it, names a region that can be mapped."""
        whole = 0 < capacity <= os.fstat(self._fd).st_size - offset and not offset % mmap.ALLOCATIONGRANULARITY
        return whole and offset > 0 and not _crosses(offset, capacity)

    def _allocate(self, need: int) -> tuple[int, int]:
        offset, capacity = self._end, _pages(need)
        if _crosses(offset, capacity):
            offset = -(-offset // _WINDOW_BYTES) * _WINDOW_BYTES
        self._end = offset + capacity
        self._extend(self._end)
        return offset, capacity

    def _extend(self, end: int) -> None:
        """Make the memory reach to `end` at least; pages that are never written take no memory."""
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)

    def _region(self, offset: int, capacity: int) -> torch.Tensor:
        if offset not in self._regions:
            if capacity > _WINDOW_BYTES:
                self._regions[offset] = self._map(offset, capacity)
            else:
                number, begin = divmod(offset, _WINDOW_BYTES)
                if number not in self._windows:
                    self._extend((number + 1) * _WINDOW_BYTES)
                    self._windows[number] = self._map(number * _WINDOW_BYTES, _WINDOW_BYTES)
                self._regions[offset] = self._windows[number][begin : begin + capacity]
        return self._regions[offset]

    def _map(self, offset: int, size: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(self._fd, size, offset=offset), dtype=torch.uint8)


def _crosses(offset: int, capacity: int) -> bool:
    """Whether a region that is no larger than a window would lie in two."""
    return capacity <= _WINDOW_BYTES and offset % _WINDOW_BYTES + capacity > _WINDOW_BYTES


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
