"""Late gradients as int8: what was sent and what is left are together what was given, for any type and any values."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.transmission.decision import Decision
from scheduler.transmission.push_form import PushChoice
from scheduler.transmission.wire import HALF, NONE
from star_hvd.compression import int8
from star_hvd.compression.lossy_wire import LossyWire
from star_hvd.compression.pushes import PushCodec, unpack
from star_hvd.compression.server_pushes import ServerPushes
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.device import Streams
from star_hvd.errors import ChannelError
from tests.support.effort import cases
from tests.support.residuals import left_of


def wire_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[LossyWire, list[Bucket]]:
    buckets = pack([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes], 1 << 14)
    wire = LossyWire(buckets)
    wire.begin(Streams(buckets), 0, 2)
    return wire, buckets


def gradient(bucket: Bucket, weight: float, scale: float = 1.0) -> torch.Tensor:
    flat = bucket.new_flat()
    flat[:-1] = weight * scale * torch.randn(bucket.numel)
    flat[-1] = weight
    return flat


def packed(wire: LossyWire, flats: list[torch.Tensor], *, small: bool) -> bytes:
    body = wire.pack(flats, small=small)
    assert body is not None
    return body


@settings(max_examples=cases(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    smalls=st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_what_was_sent_and_what_is_left_are_what_was_given(seed: int, dtype: torch.dtype, smalls: list[bool]) -> None:
    torch.manual_seed(seed)
    wire, buckets = wire_of((40, 30), (700,), (64, 64), (9,), dtype=dtype)
    wanted = [torch.zeros(bucket.numel, dtype=torch.float64) for bucket in buckets]
    got = [torch.zeros_like(each) for each in wanted]
    for small in smalls:
        weight, scale = random.Random(seed).choice([0.25, 1.0, 17 / 48]), 10.0 ** random.Random(seed).randint(-3, 2)
        flats = [gradient(bucket, weight, scale) for bucket in buckets]
        body = packed(wire, flats, small=small)
        for total, bucket, flat, came in zip(wanted, buckets, flats, unpack(body, buckets), strict=True):
            total += flat[:-1].double()
            assert came.dtype == bucket.flat.dtype and float(came[-1]) == float(flat[-1]), "weights travel whole"
            got[bucket.index] += came[:-1].double()
    for bucket, total, came in zip(buckets, wanted, got, strict=True):
        rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)  # Of whole pushes in the narrow types.
        limit = rounding * max(1e-9, float(total.abs().max())) * len(smalls)
        assert float((came + left_of(wire, bucket) - total).abs().max()) <= limit


@settings(max_examples=cases(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    smalls=st.lists(st.booleans(), min_size=1, max_size=6),
    bad=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_servers_get_and_the_rank_keeps_what_was_given(
    seed: int, dtype: torch.dtype, smalls: list[bool], bad: float | None
) -> None:
    torch.manual_seed(seed)
    wire, (bucket,) = wire_of((40, 60), dtype=dtype)
    cuts = sorted({0, 2400, *random.Random(seed).sample(range(2400), 3)})
    ranges = list(itertools.pairwise(cuts))
    total, got = torch.zeros(2400, dtype=torch.float64), torch.zeros(2400, dtype=torch.float64)
    if bad is not None:  # Of a step before: it is in that step's push alone.
        bucket.flat[7] = bad
        wire.shrink(bucket, ranges, small=True)
        assert not bool(bucket.flat.isfinite().all()) and bool(left_of(wire, bucket).isfinite().all())
        total += left_of(wire, bucket)
    for small in smalls:
        bucket.flat.copy_(gradient(bucket, 0.25))
        total += bucket.flat[:-1].double()
        payloads = wire.shrink(bucket, ranges, small=small)
        assert float(bucket.flat[-1]) == 0.25 and (small or not any(payloads))
        for (start, stop), payload in zip(ranges, payloads, strict=True):
            if payload is not None:
                decoded = int8.decode(payload, stop - start, bucket.average_dtype).to(dtype)
                assert torch.equal(decoded, bucket.flat[start:stop]), "the buffer is what servers make of it"
        got += bucket.flat[:-1].double()
    rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    limit = rounding * max(1e-9, float(total.abs().max())) * len(smalls)
    assert float((got + left_of(wire, bucket) - total).abs().max()) <= limit
    assert smalls[-1] or not bool(left_of(wire, bucket).any())


@pytest.mark.parametrize("small", [False, True])
def test_a_push_of_little_weight_to_servers_takes_a_part_of_the_residual_with_it(small: bool) -> None:
    """A push is divided by its weight where it is alone in an update, as at the end of an epoch."""
    wire, (bucket,) = wire_of((64, 64))
    ranges = [(0, 4096)]
    bucket.flat.copy_(gradient(bucket, 1.0))
    wire.shrink(bucket, ranges, small=True)
    wire.load({"rank": 0, "world_size": 2, "residuals": {0: torch.ones(64, 64)}}, {bucket.params[0]: 0})
    total = left_of(wire, bucket).double()
    for weight in (1 / 32, 0.0, 1 / 32):
        given = gradient(bucket, weight)
        bucket.flat.copy_(given)
        total += given[:-1].double()
        wire.shrink(bucket, ranges, small=small)
        sent, left = bucket.flat[:-1].double(), left_of(wire, bucket).double()
        assert float((sent - given[:-1]).abs().max()) < 3 * weight + 1e-9 and 0.8 < float(left.mean()) < 1.01
        total -= sent
        assert torch.allclose(total, left, atol=1e-5), "something is lost"


def test_int8_for_servers_is_kept_where_steps_become_shorter() -> None:
    wire, (bucket,) = wire_of((64, 64))
    for small_s, kept in ((0.2, True), (0.39, False), (0.5, False)):
        now_s, forms, told = 0.0, list[bool](), list[Decision]()
        pushes = ServerPushes(wire, 0, clock=lambda: now_s, note=told.append)  # noqa: B023
        pushes.ended()
        for _ in range(400):
            bucket.flat.copy_(gradient(bucket, 1.0))
            forms.append(pushes.shrink(bucket, [(0, 4096)]) != [None])
            now_s += small_s if forms[-1] else 0.4
            pushes.ended()
        assert forms[-1] is kept and any(forms) and not forms[0], small_s
        assert [one.chosen for one in told] == ["int8" if kept else "whole"]
        assert ("is kept" in pushes.explain()) is kept and "int8 for pushes to servers" in pushes.explain()
    wire.forbid("they are: a GradScaler decides")
    assert pushes.shrink(bucket, [(0, 4096)]) == [None]


def test_a_push_is_a_quarter_of_the_gradient_and_wrong_by_half_a_step_at_most() -> None:
    vector = torch.randn(10_000)
    payload = int8.encode(vector)
    assert len(payload) == int8.size_bytes(10_000) < 0.26 * 4 * 10_000
    steps = torch.nn.functional.pad(vector, (0, -len(vector) % int8.BLOCK)).view(-1, int8.BLOCK).abs().amax(1) / 127
    wrong = (int8.decode(payload, 10_000, torch.float32) - vector).abs()
    assert bool((wrong <= 0.501 * steps.repeat_interleave(int8.BLOCK)[:10_000]).all())


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e-43, 1e30, -3e38])
def test_any_magnitude_and_any_length(value: float) -> None:
    for numel in (0, 1, int8.BLOCK - 1, int8.BLOCK, int8.BLOCK + 1):
        vector = torch.full((numel,), value)
        found = int8.decode(int8.encode(vector), numel, torch.float32)
        assert found.shape == (numel,) and torch.allclose(found, vector, rtol=0.01, atol=3e-43)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_travels_whole_and_leaves_nothing_behind(bad: float) -> None:
    wire, buckets = wire_of((50, 40))
    packed(wire, [gradient(buckets[0], 1.0)], small=True)
    flat = gradient(buckets[0], 1.0)
    flat[3] = bad
    assert wire.pack([flat], small=True) is None
    codec = PushCodec(wire, 1)
    codec.choice.small = True
    (came,) = unpack(codec.pack([flat]), buckets)
    assert not bool(came.isfinite().all()) and not bool(left_of(wire, buckets[0]).any())
    (after,) = unpack(packed(wire, [gradient(buckets[0], 1.0)], small=True), buckets)
    assert bool(after.isfinite().all())


def test_what_overflows_the_buckets_type_travels_whole() -> None:
    wire, buckets = wire_of((64, 64), dtype=torch.float16)
    flat = gradient(buckets[0], 1.0)
    flat[5] = 65_504.0
    left = {"rank": 0, "world_size": 2, "residuals": {0: torch.full((64, 64), 100.0)}}
    wire.load(left, {buckets[0].params[0]: 0})
    assert wire.pack([flat], small=True) is None
    assert float(left_of(wire, buckets[0])[0]) == 100.0, "nothing is changed where a push is impossible"


def test_small_buckets_travel_whole() -> None:
    wire, buckets = wire_of((1,))
    assert wire.pack([gradient(buckets[0], 1.0)], small=True) is None
    assert wire.pushed_part == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_bucket_of_one_element_does_not_keep_the_others_from_int8(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((), (64, 64))]
    buckets = pack(params, 4096 * dtype.itemsize)
    assert [bucket.numel for bucket in buckets] == [4096, 1]
    wire = LossyWire(buckets)
    wire.begin(Streams(buckets), 0, 2)
    flats = [gradient(bucket, 0.75) for bucket in buckets]
    body = packed(wire, flats, small=True)
    assert len(body) == round(wire.pushed_part * sum(flat.nbytes for flat in flats))
    for bucket, flat, came in zip(buckets, flats, unpack(body, buckets), strict=True):
        left = left_of(wire, bucket)
        assert bucket.numel > 1 or torch.equal(came[:-1].double() + left, flat[:-1].double())
        assert torch.allclose(came.double(), flat.double(), atol=0.05) and float(came[-1]) == 0.75
    flats[1][0] = float("nan")
    assert wire.pack(flats, small=True) is None


def test_what_a_push_left_is_in_the_next_reduction_and_in_the_state() -> None:
    wire, buckets = wire_of((40, 30))
    flat = gradient(buckets[0], 1.0)
    (came,) = unpack(packed(wire, [flat], small=True), buckets)
    indices = {buckets[0].params[0]: 0}
    state = wire.state(indices)
    assert state is not None and torch.equal(state["residuals"][0].view(-1), (flat - came)[:-1])
    other, same = wire_of((40, 30))
    other.load(state, {same[0].params[0]: 0})
    assert torch.equal(left_of(other, same[0]), left_of(wire, buckets[0]))
    wire.restart()  # The rank reduces together with others again.
    sent = wire.encode(buckets[0], buckets[0].new_flat(), weight=1.0)
    assert torch.equal(sent[: buckets[0].numel], (flat - came)[:-1]) and wire.state(indices) is None


def test_a_state_of_other_shapes_is_not_taken() -> None:
    wire, buckets = wire_of((40, 30))
    wire.load({"rank": 0, "world_size": 2, "residuals": {0: torch.ones(1)}}, {buckets[0].params[0]: 0})
    assert not bool(left_of(wire, buckets[0]).any())


def test_a_push_of_no_possible_size_is_refused() -> None:
    _, buckets = wire_of((40, 30))
    with pytest.raises(ChannelError, match="7 bytes"):
        unpack(bytearray(7), buckets)


def pushes(codec: PushCodec, flats: list[torch.Tensor], whole_s: float, small_s: float, count: int) -> list[bool]:
    forms = []
    for _ in range(count):
        small = len(codec.pack(flats)) < sum(flat.nbytes for flat in flats) / 2
        forms.append(small)
        codec.took(small_s if small else whole_s)
    return forms


def test_int8_is_taken_where_pushes_become_shorter() -> None:
    wire, buckets = wire_of((64, 64))
    told = list[Decision]()
    codec = PushCodec(wire, 3, note=told.append)
    flats = [gradient(buckets[0], 1.0)]
    assert pushes(codec, flats, 0.4, 0.1, 40) == [False, False, True] + 37 * [True]
    assert "int8: a push took 400.0 ms, 100.0 ms as int8" in codec.choice.reason
    assert told[0].chosen == "int8" and told[0].gain == pytest.approx(0.75) and codec.choice.reason in told[0].text
    assert pushes(codec, flats, 0.1, 0.4, 200).count(True) < 110, "tried again after a while"


@pytest.mark.parametrize("small_s", [0.098, 0.1, 0.3])
def test_int8_is_not_taken_for_less_than_three_percent(small_s: float) -> None:
    wire, buckets = wire_of((64, 64))
    codec = PushCodec(wire, 3)
    assert pushes(codec, [gradient(buckets[0], 1.0)], 0.1, small_s, 60).count(True) <= 3
    assert not codec.choice.small and "they are" in codec.choice.reason


def test_who_forbids_loss_gets_whole_pushes() -> None:
    wire, buckets = wire_of((64, 64))
    wire.forbid("they are: a GradScaler decides")
    codec = PushCodec(wire, 3)
    assert not any(pushes(codec, [gradient(buckets[0], 1.0)], 0.4, 0.1, 20))


def test_a_trial_ends_where_values_do_not_allow_int8() -> None:
    choice = PushChoice()
    encoded = 0
    for _ in range(400):
        encoded += choice.small
        choice.observe(False, 0.1)
    assert encoded == 9, "three trials, after 64 and 128 pushes, of three refusals each"
    assert choice.reason == "they are: their values do not allow int8"
    for _ in range(1000):
        choice.observe(choice.small, 0.1 if choice.small else 0.4)
    assert choice.small, "a later trial finds that they do"


def test_trials_become_rare_where_they_change_nothing() -> None:
    choice, trials, small_run = PushChoice(), 0, 0
    for _ in range(3000):
        choice.observe(choice.small, 0.1 if choice.small else 0.4)
        trials += not choice.small and small_run > 8  # A trial takes the two forms in turn.
        small_run = small_run + 1 if choice.small else 0
    assert choice.small and 4 <= trials <= 6


def test_a_residual_of_a_reduction_goes_with_a_push() -> None:
    wire, buckets = wire_of((40, 30))
    wire.ended(HALF)
    flat = gradient(buckets[0], 1.0)
    given = flat.clone()
    sent = wire.encode(buckets[0], flat, weight=1.0)
    wire.ended(NONE)
    zero = buckets[0].new_flat()
    (came,) = unpack(packed(wire, [zero], small=False), buckets)
    assert torch.allclose(came[:-1] + sent[:-1].float(), given[:-1], atol=1e-6)
