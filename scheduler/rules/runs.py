"""Runs: equal pieces of an epoch at equal distances, such as one rank's part of every step.

Ranks that take one batch each per step take step k's samples from row k of the epoch: all positions in order, cut into
rows as long as the global batch. So the samples of a step do not depend on how the batch is divided among the ranks,
and are those of Horovod's usual `DistributedSampler` with the same seed. A rank's part of many rows is one run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Run", "Span", "append", "behind", "dealt", "first", "joined", "positions", "removed", "run_of", "samples",
    "spans", "without",
]  # fmt: skip

Span = tuple[int, int]


class Run(NamedTuple):
    """Positions `start + i * stride` to `start + i * stride + size` for i from 0 to `pieces` - 1."""

    start: int
    size: int
    stride: int
    pieces: int


def run_of(span: Span) -> Run:
    """Return a span as a run of one piece."""
    return Run(span[0], span[1] - span[0], span[1] - span[0], 1)


def samples(runs: Iterable[Run]) -> int:
    """Return the number of positions."""
    return sum(run.size * run.pieces for run in runs)


def spans(runs: Iterable[Run]) -> list[Span]:
    """Return all pieces, in order."""
    return [
        (start, start + run.size)
        for run in runs
        for start in range(run.start, run.start + run.pieces * run.stride, run.stride)
    ]


_MOST_PIECES = 1 << 22
"""Pieces that `positions` looks at one by one. Only runs that do not fit together have so many, as a damaged message
might claim."""


def append(runs: list[Run], span: Span) -> None:
    """Append a span, as part of the last run where it continues that."""
    start, size = span[0], span[1] - span[0]
    if runs:
        last = runs[-1]
        stride = last.stride if last.pieces > 1 else start - last.start
        if last.pieces == 1 and start == last.start + last.size:
            runs[-1] = run_of((last.start, span[1]))
            return
        if size == last.size < stride and start == last.start + last.pieces * stride:
            runs[-1] = Run(last.start, size, stride, last.pieces + 1)
            return
    runs.append(run_of(span))


def first(runs: Iterable[Run], count: int) -> list[Run]:
    """Return the first `count` positions."""
    found = []
    for run in runs:
        if count <= 0:
            break
        whole, rest = divmod(min(count, run.size * run.pieces), run.size)
        if whole:
            found.append(run._replace(pieces=whole))
        if rest:
            found.append(Run(run.start + whole * run.stride, rest, rest, 1))
        count -= run.size * run.pieces
    return found


def behind(runs: Iterable[Run], count: int) -> list[Run]:
    """Return all positions but the first `count`."""
    found = []
    for run in runs:
        whole, rest = divmod(min(max(0, count), run.size * run.pieces), run.size)
        count -= run.size * run.pieces
        at = run.start + whole * run.stride
        if rest:
            found.append(Run(at + rest, run.size - rest, run.size - rest, 1))
            whole, at = whole + 1, at + run.stride
        if whole < run.pieces:
            found.append(Run(at, run.size, run.stride, run.pieces - whole))
    return found


def dealt(pool: Sequence[Span], shares: Sequence[int], last: Sequence[int]) -> list[list[Run]]:
    """Deal positions to ranks in rows.

    Args:
        pool: The positions, in the order in which rows are made of them.
        shares: Positions of each rank in a row.
        last: The same for the last row, which is shorter: what is left of the pool behind the whole rows.

    Returns:
        Per rank its parts of all rows, in order.
    """
    row, total = sum(shares), sum(stop - start for start, stop in pool)
    whole = (total - sum(last)) // row
    found: list[list[Run]] = []
    offsets = itertools.accumulate(shares, initial=0)
    ends = itertools.accumulate(last, initial=whole * row)
    for share, offset, size, end in zip(shares, offsets, last, ends, strict=False):
        runs: list[Run] = []
        at = 0
        for start, stop in pool:
            runs += _pieces(start, at, stop - start, offset, share, row, whole)
            begin, until = max(at, end), min(at + stop - start, end + size)
            if begin < until:
                runs.append(run_of((start + begin - at, start + until - at)))
            at += stop - start
        found.append(runs)
    return found


def _pieces(start: int, at: int, length: int, offset: int, share: int, row: int, rows: int) -> list[Run]:
    """Return a rank's parts of the rows in one span of the pool, whose first position is the pool's `at`-th."""
    until, found = at + length, list[Run]()
    low = max(0, (at - offset - share) // row + 1)  # The first row whose part ends behind `at`.
    high = min(rows - 1, (until - offset - 1) // row)  # The last one whose part begins before the end.
    if not share or low > high:
        return found
    head, tail = low * row + offset, high * row + offset
    if head < at:  # It began in the span before.
        found.append(run_of((start, start + min(head + share, until) - at)))
        low, head = low + 1, head + row
    cut = tail + share > until and low <= high
    count = high - low + 1 - cut
    if count > 0:
        found.append(Run(start + head - at, share, row, count))
    if cut:
        found.append(run_of((start + tail - at, start + length)))
    return found


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the same positions in order, in as few spans as possible."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found


def positions(runs: Iterable[Run]) -> list[Span]:
    """Return the positions of runs in order, in as few spans as possible; they must not overlap.

    The parts of all ranks in many rows are found to be one span without looking at each piece.

    Raises:
        ValueError: Too many pieces do not fit together.
    """
    loose: list[Run] = []
    by_stride: dict[int, list[Run]] = {}
    for run in runs:
        (by_stride.setdefault(run.stride, []) if run.pieces > 1 else loose).append(run)
    found: list[Span] = []
    for stride, rows in _ending_together(by_stride):
        low = max(run.start for run in rows) - stride + 1  # From here on, each run begins one piece per stride.
        skips = [max(0, -(-(low - run.start) // stride)) for run in rows]
        common = min(run.pieces - skip for run, skip in zip(rows, skips, strict=True))
        parts = sorted((run.start + skip * stride, run.size) for run, skip in zip(rows, skips, strict=True))
        whole = all(start + size == after for (start, size), (after, _) in itertools.pairwise(parts))
        if common < 1 or not whole or sum(size for _, size in parts) != stride:
            loose += rows
            continue
        found.append((parts[0][0], parts[0][0] + common * stride))
        for run, skip in zip(rows, skips, strict=True):
            loose += first([run], skip * run.size) + behind([run], (skip + common) * run.size)
    if sum(run.pieces for run in loose) > _MOST_PIECES:
        raise ValueError(f"more than {_MOST_PIECES} pieces of samples do not fit together")
    return joined([*found, *spans(loose)])


def removed(runs: Sequence[Run], gone: Iterable[Span]) -> list[Run] | None:
    """Return the positions of `runs` without those of `gone`; None if some of these are not in `runs`."""
    found = list(runs)
    for start, stop in gone:
        while start < stop:
            at = next((i for i, run in enumerate(found) if _contains(run, start)), None)
            if at is None:
                return None
            run = found[at]
            before = (start - run.start) // run.stride * run.size + (start - run.start) % run.stride
            end = min(stop, start + run.size - (start - run.start) % run.stride)
            found[at : at + 1] = [*first([run], before), *behind([run], before + end - start)]
            start = end
    return found


def _contains(run: Run, position: int) -> bool:
    piece, offset = divmod(position - run.start, run.stride)
    return 0 <= piece < run.pieces and offset < run.size


def _ending_together(by_stride: dict[int, list[Run]]) -> Iterator[tuple[int, list[Run]]]:
    """Yield runs whose last pieces are in one row, as those of all ranks in one deal are."""
    for stride, runs in by_stride.items():
        found: list[Run] = []
        end = 0
        for last, run in sorted((run.start + (run.pieces - 1) * stride, run) for run in runs):
            if found and last >= end:
                yield stride, found
                found = []
            if not found:
                end = last + stride
            found.append(run)
        yield stride, found


def without(spans: Iterable[Span], gone: Iterable[Span]) -> list[Span]:
    """Return the positions of `spans` that are not in `gone`."""
    found, holes, at = list[Span](), joined(gone), 0
    for start, stop in joined(spans):
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        hole = at
        while hole < len(holes) and holes[hole][0] < stop:
            begin, end = holes[hole]
            if begin > start:
                found.append((start, begin))
            start = max(start, end)
            hole += 1
        if start < stop:
            found.append((start, stop))
    return found
