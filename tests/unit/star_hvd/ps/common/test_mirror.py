"""Where a mirror's records lie in its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from star_hvd.ps.common.mirror import Mirror, new_memory
from star_hvd.ps.common.record import Record

DESCRIPTORS = Path("/proc/self/fd")
MIB = 1 << 20


def record(value: int, size: int) -> Record:
    return Record(b"", [torch.full((size,), value, dtype=torch.uint8)])


def values(mirror: Mirror, entry: int) -> tuple[int, int]:
    """The first byte of a record, and one in its middle."""
    found = mirror.read(entry)
    assert found is not None
    return int(found[16]), int(found[found.numel() // 2])


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc")
def test_a_mirror_of_many_records_holds_few_descriptors() -> None:
    """A process may have as few as 4096, and a model of some GB has thousands of chunks."""
    memory, entries = new_memory(), 300
    before = len(list(DESCRIPTORS.iterdir()))
    mirror = Mirror(os.dup(memory), entries)
    for value in (1, 2):
        for entry in range(entries):
            mirror.write(entry, record(value + entry % 100, 5000))
    assert len(list(DESCRIPTORS.iterdir())) <= before + 8
    again = Mirror(os.dup(memory), entries)  # Another process.
    assert [values(again, entry)[0] for entry in range(entries)] == [2 + entry % 100 for entry in range(entries)]
    assert len(list(DESCRIPTORS.iterdir())) <= before + 16
    size = again.size_bytes
    again.write(0, record(7, 5000))
    assert again.size_bytes == size == mirror.size_bytes, "the older place of a record is used again"
    again.write(0, record(8, 9000))
    assert values(again, 0) == (8, 8) and values(again, 1) == (3, 3), "a new place is behind all that are in use"
    for each in (mirror, again):
        each.close()
    assert len(list(DESCRIPTORS.iterdir())) <= before
    os.close(memory)


def test_records_of_all_sizes_lie_apart() -> None:
    memory = new_memory()
    sizes = [24 * MIB, 24 * MIB, 24 * MIB, 70 * MIB, 96, 40 * MIB]
    mirror = Mirror(os.dup(memory), len(sizes))
    for entry, size in enumerate(sizes):
        mirror.write(entry, record(10 + entry, size))
    for opened in (mirror, Mirror(os.dup(memory), len(sizes))):
        for entry, size in enumerate(sizes):
            found = opened.read(entry)
            assert found is not None and found.numel() == size + 16
            assert bool((found[16:] == 10 + entry).all())
        opened.close()
    os.close(memory)
