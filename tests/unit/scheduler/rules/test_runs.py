"""Runs against lists of positions, and rows against the batches of Horovod's usual sampler."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from scheduler.balance.batch_shares import divide
from scheduler.rules.runs import (
    Run,
    Span,
    append,
    behind,
    dealt,
    first,
    joined,
    positions,
    removed,
    run_of,
    samples,
    spans,
    without,
)
from star_hvd.input.sample_order import Permutation

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)))
RUN = st.builds(
    lambda start, size, gap, pieces: Run(start, size, size + gap, pieces),
    st.integers(0, 99), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9),
)  # fmt: skip


def listed(found: list[Span]) -> list[int]:
    return [position for start, stop in found for position in range(start, stop)]


@given(SPANS, SPANS)
def test_spans_are_sets_of_positions(one: list[Span], other: list[Span]) -> None:
    assert listed(joined(one)) == sorted(set(listed(one)))
    assert listed(without(one, other)) == sorted(set(listed(one)) - set(listed(other)))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined(one)))


@given(st.lists(RUN, max_size=4), st.integers(-1, 200))
def test_a_run_is_cut_anywhere(runs: list[Run], count: int) -> None:
    whole = listed(spans(runs))
    assert samples(runs) == len(whole)
    assert listed(spans(first(runs, count))) == whole[: max(0, count)]
    assert listed(spans(behind(runs, count))) == whole[max(0, count) :]


@given(st.lists(st.integers(1, 40), max_size=4), st.data())
def test_positions_are_removed_if_all_are_there(lengths: list[int], data: st.DataObject) -> None:
    runs, at = list[Run](), 0
    for length in lengths:
        size = data.draw(st.integers(1, 9))
        runs.append(Run(at, size, size + data.draw(st.integers(0, 3)), length))
        at = spans(runs)[-1][1] + data.draw(st.integers(0, 3))
    there = listed(spans(runs))
    gone = joined((p, p + 1) for p in data.draw(st.lists(st.integers(0, at + 9), max_size=9)))
    found = removed(runs, gone)
    if set(listed(gone)) <= set(there):
        assert found is not None and listed(spans(found)) == [p for p in there if p not in set(listed(gone))]
    else:
        assert found is None


def test_damaged_runs_take_no_memory() -> None:
    damaged = [Run(1, 1, 3, 1 << 50), Run(0, 1, 5, 1 << 50)]
    with pytest.raises(ValueError, match="do not fit together"):
        positions(damaged)
    assert removed(damaged, [((3 << 40) + 2, (3 << 40) + 4)]) is None
    left = removed(damaged, [((3 << 40) + 1, (3 << 40) + 2)])
    assert left is not None and samples(left) == (1 << 51) - 1


@given(st.lists(RUN, max_size=4))
def test_pieces_of_runs_are_put_together_again(runs: list[Run]) -> None:
    found: list[Run] = []
    for span in spans(runs):
        append(found, span)
    assert listed(spans(found)) == listed(spans(runs)) and len(found) <= len(spans(runs))
    assert all(len(spans([run])) == 1 or run.size < run.stride for run in found)
    rows: list[Run] = []
    for row in range(1000):
        append(rows, (10 * row + 3, 10 * row + 7))
    assert rows == [Run(3, 4, 10, 1000)]


@given(st.lists(st.integers(1, 40), max_size=5), st.lists(st.integers(0, 7), min_size=1, max_size=4), st.data())
def test_rows_of_a_pool_are_divided_among_the_ranks(lengths: list[int], shares: list[int], data: st.DataObject) -> None:
    shares[0] += 1
    pool, at = list[Span](), 0
    for length in lengths:
        at += data.draw(st.integers(1, 9))
        pool.append((at, at + length))
        at += length
    whole, row = listed(pool), sum(shares)
    last = divide(len(whole) % row, shares)
    parts = dealt(pool, shares, last)
    own = [listed(spans(part)) for part in parts]
    for begin in range(0, len(whole), row):
        sizes = shares if begin + row <= len(whole) else last
        assert [own[rank][:size] for rank, size in enumerate(sizes)] == [
            whole[begin + sum(sizes[:rank]) :][:size] for rank, size in enumerate(sizes)
        ]
        own = [each[size:] for each, size in zip(own, sizes, strict=True)]
    assert not any(own)
    # Put together again from any row on, some ranks further than others.
    taken = [data.draw(st.integers(0, samples(part))) for part in parts]
    rest = [run for part, count in zip(parts, taken, strict=True) for run in behind(part, count)]
    assert listed(positions(rest)) == sorted(listed(spans(rest)))


def test_the_rest_of_many_rows_is_found_without_looking_at_each() -> None:
    shares = (24, 12, 16, 24)
    parts = dealt([(0, 76 * 10**9)], shares, divide(0, shares))
    assert [len(part) for part in parts] == [1] * 4
    rest = [run for part, share in zip(parts, shares, strict=True) for run in behind(part, 1000 * share + share // 2)]
    found = positions(rest)
    assert found[-1] == (76 * 1001 - 12, 76 * 10**9) or found[-1] == (76 * 1001, 76 * 10**9)
    assert sum(stop - start for start, stop in found) == samples(rest) and len(found) <= 5


def test_deals_one_after_another_are_put_together_without_looking_at_each_row() -> None:
    """What ranks have consumed by the end of an epoch in which their shares have changed several times."""
    consumed: list[Run] = []
    at = 0
    for rows, shares in ((10**8, (19, 19, 19, 19)), (10**8 + 3, (24, 12, 16, 24)), (10**6, (19, 19, 19, 19))):
        whole = rows * sum(shares)
        for part in dealt([(at, at + whole)], shares, divide(0, shares)):
            consumed += part
        at += whole
    random.Random(1).shuffle(consumed)
    assert positions(consumed) == [(0, at)]


def test_rows_are_the_global_batches_of_a_distributed_sampler() -> None:
    """With any shares of the same sum, and the same seed and epoch."""
    data, ranks, batch = list(range(203)), 4, 8
    for seed, epoch in ((0, 0), (3, 5)):
        theirs = []
        for rank in range(ranks):
            sampler = DistributedSampler(data, ranks, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            theirs.append(list(sampler))
        order = Permutation(len(data), shuffle=True, seed=seed).of(epoch)
        shares = [11, 2, 9, 10]
        random.Random(seed).shuffle(shares)
        parts = dealt([(0, 200)], shares, divide(200 % 32, shares))
        own = [[i for span in spans(part) for i in order.indices(*span)] for part in parts]
        for step in range(200 // 32):
            ours = [i for rank, share in enumerate(shares) for i in own[rank][step * share :][:share]]
            assert sorted(ours) == sorted(i for rank in theirs for i in rank[step * batch :][:batch])
    assert torch.equal(order.items, torch.tensor(order.indices(0, 203)))


def test_a_span_is_a_run_of_one_piece() -> None:
    assert spans([run_of((3, 7))]) == [(3, 7)] and positions([run_of((3, 7)), run_of((7, 9))]) == [(3, 9)]
