"""The header survives a sum in float32 bit for bit, and agreement is never found where there is none."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from star_hvd.engine.header import Contribution, Header, HeaderCodec
from tests.support.effort import cases


def reduced(items: list[Contribution], n_hyper: int = 0) -> Header:
    codec = HeaderCodec(len(items), n_hyper)
    total = np.zeros(codec.size, dtype=np.float32)
    for rank, item in enumerate(items):
        own = np.full(codec.size, np.nan, dtype=np.float32)  # What was there before must not matter.
        codec.write(rank, item, own)
        total += own
    return codec.read(total)


def bits(values: object) -> list[bytes]:
    return [struct.pack("<d", v) for v in values]  # type: ignore[attr-defined]


SPECIAL = [0.0, -0.0, 5e-324, -2.2250738585072009e-308, 2.2e-308, 1e308, -1e-300, 0.1, math.inf, -math.inf, math.nan]


@settings(max_examples=cases(200), deadline=None)
@given(
    st.lists(st.floats() | st.sampled_from(SPECIAL), min_size=1, max_size=12),
    st.integers(1, 64),
    st.data(),
)
def test_hyperparameters_survive_bit_for_bit(row: list[float], world_size: int, data: st.DataObject) -> None:
    leader = data.draw(st.integers(0, world_size - 1))
    items = [Contribution(True, 3, hyper=row if rank == leader else None) for rank in range(world_size)]
    got = reduced(items, len(row)).hyper
    assert got is not None and bits(got) == bits(row)


def test_no_leader_or_two_leaders_give_no_hyperparameters() -> None:
    assert reduced([Contribution(True, 1), Contribution(True, 1)], 1).hyper is None
    assert reduced([Contribution(True, 1, hyper=[1.0]), Contribution(True, 1, hyper=[1.0])], 1).hyper is None


@settings(max_examples=cases(200), deadline=None)
@given(st.integers(2, 64), st.integers(0, (1 << 24) - 1), st.data())
def test_checksums(world_size: int, checksum: int, data: st.DataObject) -> None:
    fresh = data.draw(st.lists(st.booleans(), min_size=world_size, max_size=world_size).filter(any))
    items = [Contribution(f, 1, checksum=checksum if f else None) for f in fresh]
    assert reduced(items).checksum_ok is True
    odd = data.draw(st.sampled_from([r for r, f in enumerate(fresh) if f]))
    items[odd].checksum = checksum ^ data.draw(st.integers(1, (1 << 24) - 1))
    assert reduced(items).checksum_ok is (sum(fresh) == 1)


@pytest.mark.parametrize("checksum", [0, 1, 0x7FFFFF, 0xABCDEF, 0xFFFFFF, 0xFBFBFB])
def test_checksums_of_many_ranks(checksum: int) -> None:
    """Sums in float32, one rank after the other, stay exact, so equal replicas are not reported as different."""
    for world_size in (258, 512, 4227):
        codec = HeaderCodec(world_size, 1)
        part, sums = np.zeros(codec.size, np.float32), np.zeros(codec.size, np.float32)
        for rank in range(world_size):
            codec.write(rank, Contribution(fresh=True, own_steps=1, checksum=checksum), part)
            sums += part
        assert codec.read(sums).checksum_ok is True, world_size
        codec.write(0, Contribution(fresh=True, own_steps=1, checksum=checksum ^ 1 << 17), sums)
        for rank in range(1, world_size):
            codec.write(rank, Contribution(fresh=True, own_steps=1, checksum=checksum), part)
            sums += part
        assert codec.read(sums).checksum_ok is False, world_size


@pytest.mark.parametrize("delta", [1, 63, 64, 183, 525, 1833, 4097, 0xFFFFFF])
def test_many_ranks_agree_on_a_plan_far_above_the_active_one(delta: int) -> None:
    """Abandoned plans raise the ids while the active plan stays; float32 has no exact sums of such squares."""
    for world_size in (8, 64, 512, 4227):
        codec = HeaderCodec(world_size, 1)
        part, sums = np.zeros(codec.size, np.float32), np.zeros(codec.size, np.float32)
        for rank in range(1, world_size):
            codec.write(rank, Contribution(True, 2, flag_plan_id_delta=delta), part)
            sums += part
        for own, expected in ((delta, delta), (delta ^ 64, None), (delta ^ 1, None)):
            codec.write(0, Contribution(True, 2, flag_plan_id_delta=own), part)
            assert codec.read(sums + part).agreed_plan_id_delta(world_size) == expected, (world_size, own)


def test_no_checksums() -> None:
    assert reduced([Contribution(True, 1)] * 3).checksum_ok is None


@pytest.mark.slow
@settings(max_examples=cases(300), deadline=None)
@given(st.integers(1, 64), st.data())
def test_epochs_agree_only_when_all_are_equal(world_size: int, data: st.DataObject) -> None:
    centre = data.draw(st.integers(1, 400))
    plan_id = st.none() | st.integers(max(1, centre - 2), centre + 2) | st.just(centre)
    epochs = data.draw(st.lists(plan_id, min_size=world_size, max_size=world_size) | st.just([centre] * world_size))
    header = reduced([Contribution(True, 2, flag_plan_id_delta=e) for e in epochs])
    expected = epochs[0] if len(set(epochs)) == 1 else None
    assert header.agreed_plan_id_delta(world_size) == expected


@settings(max_examples=cases(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100_000)), min_size=1, max_size=64))
def test_ranks(state: list[tuple[bool, int]]) -> None:
    header = reduced([Contribution(fresh, own) for fresh, own in state])
    assert header.fresh == tuple(f for f, _ in state)
    assert header.own_steps == tuple(n for _, n in state)
    assert header.complete(range(len(state))) is all(header.fresh)
    if any(header.fresh):
        most = max(n for f, n in state if f)
        assert header.leader_of(range(len(state))) == next(r for r, (f, n) in enumerate(state) if f and n == most)


def test_means_and_what_is_not_finite() -> None:
    items = [
        Contribution(True, 1, loss=1.0, weight=1.0, local_sqr=2.0, folds=0.5, manual=True),
        Contribution(True, 1, loss=math.nan, weight=0.5, local_sqr=math.inf),
        Contribution(True, 1, loss=3.0, weight=1.0),
    ]
    header = reduced(items)
    assert header.loss == 2.0 and header.weight == 2.5 and header.weight_sqr == 2.25
    assert (header.local_sqr, header.local_count, header.folds, header.manual) == (2.0, 1, 0.5, True)
    assert math.isnan(reduced([Contribution(True, 1)]).loss)
    assert reduced([Contribution(True, 1), Contribution(True, 1, no_overlap=True)]).no_overlap and not header.no_overlap
    assert reduced([Contribution(True, 1)]).local_sqr == pytest.approx(0.0)


@pytest.mark.slow
@settings(max_examples=cases(200), deadline=None)
@given(st.integers(1, 64), st.data())
def test_the_order_of_the_sum_does_not_matter(world_size: int, data: st.DataObject) -> None:
    """Horovod adds in rings and trees; flags, checksums and hyperparameters must come out alike on all of them."""
    delta, row = data.draw(st.integers(1, 400)), data.draw(st.lists(st.floats(), min_size=3, max_size=3))
    items = [Contribution(r % 3 != 1, 5 + r, flag_plan_id_delta=delta, checksum=0xABCDEF) for r in range(world_size)]
    items[data.draw(st.integers(0, world_size - 1))].hyper = row
    codec = HeaderCodec(world_size, 3)
    parts = [np.zeros(codec.size, dtype=np.float32) for _ in items]
    for rank, (item, part) in enumerate(zip(items, parts, strict=True)):
        codec.write(rank, item, part)
    while len(parts) > 1:  # Any two at a time.
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(first + second)
    header = codec.read(parts[0])
    assert header.agreed_plan_id_delta(world_size) == delta and header.checksum_ok is True
    assert header.hyper is not None and bits(header.hyper) == bits(row)
    assert header.own_steps == tuple(item.own_steps for item in items)
    assert header.fresh == tuple(item.fresh for item in items)


@pytest.mark.parametrize("nan_bits", [0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF1234, 0x7FFFFFFFFFFFFFFF])
def test_the_bits_of_a_nan_are_kept(nan_bits: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", nan_bits))
    row = np.frombuffer(struct.pack("<Q", nan_bits), dtype="<f8")
    codec = HeaderCodec(2, 1)
    parts = [np.zeros(codec.size, dtype=np.float32) for _ in range(2)]
    codec.write(0, Contribution(True, 1, hyper=row), parts[0])  # type: ignore[arg-type]
    codec.write(1, Contribution(True, 1), parts[1])
    got = codec.read(parts[0] + parts[1]).hyper
    assert got is not None and math.isnan(value)
    assert struct.unpack("<Q", struct.pack("<d", got[0]))[0] == nan_bits


@pytest.mark.parametrize(
    ("state", "leader"),
    [
        ([(True, 5), (True, 5), (True, 5)], 0),
        ([(True, 4), (True, 5), (True, 5)], 1),
        ([(False, 9), (True, 1), (True, 0)], 1),
        ([(False, 9), (False, 3), (True, 0)], 2),
        ([(True, 0)], 0),
    ],
)
def test_who_leads(state: list[tuple[bool, int]], leader: int) -> None:
    assert reduced([Contribution(fresh, own) for fresh, own in state]).leader_of(range(len(state))) == leader


def test_a_plan_not_raised_by_one_rank_is_not_agreed_on_however_the_sums_fall() -> None:
    """Three ranks at 4 add up like four at 3: only the count and the squares tell."""
    items = [Contribution(True, 2, flag_plan_id_delta=4) for _ in range(3)]
    assert reduced([*items, Contribution(True, 2)]).agreed_plan_id_delta(4) is None
    mixed = [Contribution(True, 2, flag_plan_id_delta=d) for d in (2, 4, 3, 3)]
    assert reduced(mixed).agreed_plan_id_delta(4) is None
    assert reduced([Contribution(True, 2) for _ in range(4)]).agreed_plan_id_delta(4) is None
