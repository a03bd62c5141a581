"""Lossy forms of a bucket: sums of weighted contributions stay sums, and what is not sent is sent later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler.transmission.wire import HALF, LOW_RANK, NONE
from star_hvd.compression.bucket_codec import RANK, BucketCodec
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.device import Streams
from tests.support.allocations import largest_allocation_bytes
from tests.support.effort import cases

FORMS = [HALF, LOW_RANK]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Matrices, a kernel in `channels_last`, and what is too small for factors."""
    kernel = torch.randn(32, 12, 3, 3).to(memory_format=torch.channels_last)
    shapes = [torch.randn(40, 30), torch.randn(7), kernel, torch.randn(3, 5), torch.randn(32, 64).T]
    return [torch.nn.Parameter(value.to(dtype)) for value in shapes]


def codecs(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Bucket, BucketCodec]]:
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        (bucket,) = pack(parameters(dtype), 1 << 20)
        made.append((bucket, BucketCodec(bucket, Streams([bucket]), count)))
    return made


def step(
    ranks: list[tuple[Bucket, BucketCodec]], flats: list[torch.Tensor], form: int, given: list[bool], unit: float = 1.0
) -> None:
    """One reduction; every flat becomes the sum."""
    weights = [float(flat[-1]) if gives else 0.0 for flat, gives in zip(flats, given, strict=True)]
    sent = [c.encode(flat, form, weight=w, unit=unit) for (_, c), flat, w in zip(ranks, flats, weights, strict=True)]
    assert len({codec.suffix(form) for _, codec in ranks}) == 1
    total = torch.stack([one.to(torch.float64) for one in sent]).sum(0).to(sent[0].dtype)
    for (_, codec), own, flat in zip(ranks, sent, flats, strict=True):
        flat.copy_(codec.decode(own.copy_(total), flat))
        found = codec.to_check()
        if found is not None and not math.isfinite(float(found)):
            codec.drop_infinite()


def residual(bucket: Bucket, codec: BucketCodec) -> torch.Tensor:
    found = codec.residuals()
    flat = torch.zeros(bucket.numel + 1, dtype=bucket.average_dtype)
    if found is not None:
        for view, value in zip(bucket.split(flat), found, strict=True):
            view.copy_(value)
    return flat[:-1]


@settings(max_examples=cases(40), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    world_size=st.integers(1, 4),
    forms=st.lists(st.sampled_from([NONE, HALF, LOW_RANK, LOW_RANK]), min_size=1, max_size=8),
)
def test_what_was_sent_and_what_is_left_are_all_gradients_with_their_weights(
    seed: int, world_size: int, forms: list[int]
) -> None:
    """Ranks contribute gradients of any weight, or nothing; the form changes at random."""
    torch.manual_seed(seed)
    ranks = codecs(world_size)
    torch.manual_seed(seed)
    wanted = torch.zeros(ranks[0][0].numel, dtype=torch.float64)
    got = torch.zeros_like(wanted)
    for form in forms:
        weights = [float(w) for w in torch.tensor([0.0, 1 / 32, 0.5, 1.0, 1.75])[torch.randint(5, (world_size,))]]
        flats = []
        for (bucket, _), weight in zip(ranks, weights, strict=True):
            flat = bucket.new_flat()
            flat[:-1] = weight * torch.randn(bucket.numel)
            flat[-1] = weight
            wanted += flat[:-1]
            flats.append(flat)
        before = [residual(*rank).clone() for rank in ranks]
        step(ranks, flats, form, [weight > 0 for weight in weights])
        assert all(torch.equal(flat, flats[0]) for flat in flats), "ranks have different sums"
        assert float(flats[0][-1]) == sum(weights), "weights are not exact"
        for rank, old, weight in zip(ranks, before, weights, strict=True):
            assert weight > 0 or torch.equal(residual(*rank), old), "a rank without a part lost what it has to send"
        got += flats[0][:-1]
    left = sum(residual(*rank).to(torch.float64) for rank in ranks)
    # float16 is added up in float16, as under `Compression.fp16`: what the sum rounds away is in no residual.
    limit = 1e-5 if HALF not in forms or world_size == 1 else 1e-3
    assert float((got + left - wanted).abs().max()) < limit * max(1.0, float(wanted.abs().max())) * len(forms)


@pytest.mark.parametrize("form", [NONE, HALF, LOW_RANK])
def test_the_short_last_batch_of_an_epoch_takes_a_part_of_the_residual_with_it(form: int) -> None:
    """Its sum is divided by its small weight: the whole residual would move the parameters by a multiple of itself."""
    ranks = codecs(2)
    for _ in range(20):
        flats = [torch.cat([torch.randn(bucket.numel), torch.ones(1)]) for bucket, _ in ranks]
        step(ranks, flats, LOW_RANK, [True, True])
    before = [residual(*rank).clone() for rank in ranks]
    usual = float(before[0].norm())
    for _ in range(3):  # Several in a row do it no more than one.
        gradient = torch.randn(ranks[0][0].numel)
        flats = [torch.cat([gradient / 32, torch.full((1,), 1 / 32)]), ranks[1][0].new_flat()]
        step(ranks, flats, form, [True, False])
        mean = flats[0][:-1] / flats[0][-1]
        assert float(mean.norm()) < 3.0 * usual + float(gradient.norm()), "the residual is amplified"
        assert torch.equal(residual(*ranks[1]), before[1])
    left = float(residual(*ranks[0]).norm())
    assert left > 0.7 * usual
    for _ in range(2):  # With its usual weight a rank sends all of it again.
        flats = [torch.cat([torch.zeros(bucket.numel), torch.ones(1)]) for bucket, _ in ranks]
        step(ranks, flats, NONE, [True, True])
    assert not bool(residual(*ranks[0]).any())


def test_a_rank_whose_weight_becomes_small_for_good_sends_its_residual() -> None:
    ((bucket, codec),) = ranks = codecs(1)
    step(ranks, [torch.cat([torch.randn(bucket.numel), torch.ones(1)])], LOW_RANK, [True])
    whole = float(residual(bucket, codec).norm())
    for _ in range(40):
        flat = bucket.new_flat()
        flat[-1] = 1 / 32
        step(ranks, [flat], NONE, [True])
        assert float(flat[:-1].norm()) * 32 < 3.0 * whole
    assert not bool(residual(bucket, codec).any())


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_a_usual_weight_takes_the_residual_without_another_pass(form: int) -> None:
    """Weights may differ somewhat, as those of balanced batches do."""
    counts = []
    for weights in ([1.0, 1.0, 1.0, 1.0], [1.0, 0.6, 1.4, 0.8], [1.0, 1.0, 1.0, 1 / 32]):
        ((bucket, codec),) = codecs(1)
        counts.append(list[int]())
        for weight in weights:
            flat = torch.cat([weight * torch.randn(bucket.numel), torch.full((1,), weight)])
            with Operations() as made:
                sent = codec.encode(flat, form, weight=weight)
            codec.decode(sent, flat)
            counts[-1].append(made.count)
    assert counts[1] == counts[0] and counts[2][:3] == counts[0][:3] and counts[2][3] > counts[0][3]


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_gradient_arrives_in_full_over_time(form: int) -> None:
    """Without error feedback a projection on a few columns would lose the rest of it in every step."""
    ranks = codecs(2)
    gradient = torch.randn(ranks[0][0].numel)
    total = torch.zeros_like(gradient)
    for _ in range(60):
        flats = [torch.cat([gradient, torch.ones(1)]) for _ in ranks]
        step(ranks, flats, form, [True, True])
        total += flats[0][:-1] / flats[0][-1]
    assert float((total / 60 - gradient).norm() / gradient.norm()) < 0.2


def test_of_a_low_rank_gradient_nothing_is_left_over_after_two_steps() -> None:
    """The basis follows the gradients: the first step's finds the column space of them, the second sends all."""
    ((bucket, codec),) = ranks = codecs(1)
    matrices = [torch.outer(torch.randn(view.shape[0]), torch.randn(view[0].numel())) for view in bucket.views]
    for number in range(4):
        flat = bucket.new_flat()
        for view, matrix in zip(bucket.split(flat), matrices, strict=True):
            view.copy_(matrix.reshape(view.shape))
        flat[-1] = 1.0
        step(ranks, [flat], LOW_RANK, [True])
        left = float(residual(bucket, codec).abs().max())
        assert left < 1e-4 if number % 2 else left > 0.1


def test_low_rank_travels_small_and_both_ways_in_turn() -> None:
    ((bucket, codec),) = codecs(1)
    sizes, names = [], []
    for _ in range(4):
        flat = torch.ones(bucket.numel + 1)
        names.append(codec.suffix(LOW_RANK))
        sent = codec.encode(flat, LOW_RANK, weight=1.0)
        sizes.append(sent.numel())
        codec.decode(sent, flat)
    assert names == ["p", "q", "p", "q"] and sizes[0] == sizes[2] and sizes[1] == sizes[3]
    rows, cols = 40 + 32 + 32, 30 + 108 + 64
    assert sizes[:2] == [RANK * n + 7 + 15 + 1 for n in (rows, cols)]


def test_a_header_has_its_place_behind_the_weight() -> None:
    ((bucket, codec),) = codecs(1)
    bucket.carry(5)
    bucket.flat[-1] = 1.0
    sent = codec.encode(bucket.flat, LOW_RANK, weight=1.0)
    assert sent[-6:].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    sent[-5:] = 3.0
    codec.decode(sent, bucket.flat)
    assert bucket.flat.numel() == bucket.numel + 1 and float(bucket.flat[-1]) == 1.0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_in_its_step_and_in_no_later_one(form: int, bad: float) -> None:
    ranks = codecs(2)
    flats = [torch.ones(bucket.numel + 1) for bucket, _ in ranks]
    flats[1][3] = bad
    step(ranks, flats, form, [True, True])
    assert not bool(flats[0].isfinite().all())
    for _ in range(3):
        flats = [torch.ones(bucket.numel + 1) for bucket, _ in ranks]
        step(ranks, flats, form, [True, True])
        assert bool(flats[0].isfinite().all()) and torch.equal(*flats)


def test_large_values_of_both_signs_are_no_reason_to_start_over() -> None:
    """Their sum, in float16, would be infinite, and so would be their difference."""
    ((bucket, codec),) = codecs(1)
    for signs in ([1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]):
        flat = torch.zeros(bucket.numel + 1)
        flat[:2], flat[-1] = 60_000.0 * torch.tensor(signs), 1.0
        codec.decode(codec.encode(flat, HALF, weight=1.0), flat)
        largest = codec.to_check()
        assert largest is not None and float(largest) == 60_000.0


def test_the_search_for_what_is_no_number_copies_no_bucket() -> None:
    (bucket,) = pack([torch.nn.Parameter(torch.zeros(100_000))], 1 << 20)
    codec = BucketCodec(bucket, Streams([bucket]), 1)
    reduced = codec.encode(bucket.flat, HALF, weight=1.0)
    assert largest_allocation_bytes(lambda: codec.decode(reduced, bucket.flat)) < 1000


def test_a_gradient_too_large_for_float16_is_sent_in_parts() -> None:
    ((bucket, codec),) = ranks = codecs(1)
    flat = torch.zeros(bucket.numel + 1)
    flat[0], flat[-1] = 100_000.0, 1.0
    step(ranks, [flat], HALF, [True])
    assert 50_000 < float(flat[0]) < 65_504
    assert float(flat[0]) + float(residual(bucket, codec)[0]) == 100_000.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_other_types(dtype: torch.dtype, form: int) -> None:
    ranks = codecs(2, dtype)
    gradients = [torch.randn(bucket.numel + 1).to(dtype) for bucket, _ in ranks]
    flats = [gradient.clone() for gradient in gradients]
    step(ranks, flats, form, [True, True])
    left = sum(residual(*rank) for rank in ranks)
    found = flats[0][:-1] + left
    assert torch.allclose(found.double(), sum(gradients)[:-1].double(), atol=0.05)


def test_a_residual_survives_a_round_trip_and_is_sent_whole_without_compression() -> None:
    (bucket, codec), (_, other) = codecs(2)
    flat = torch.randn(bucket.numel + 1)
    codec.encode(flat, LOW_RANK, weight=1.0)
    left = residual(bucket, codec).clone()
    assert float(left.abs().max()) > 0
    other.load(codec.residuals())
    assert torch.equal(residual(bucket, other), left)
    zero = bucket.new_flat()
    assert torch.equal(other.encode(zero, NONE, weight=1.0)[:-1], left)
    assert other.residuals() is None
    other.load(None)
    assert other.residuals() is None


def test_a_program_that_steps_under_autocast_or_with_another_default_device_loses_nothing_more() -> None:
    """`backward` and `step` within `autocast`, as many programs have them: products are those of the bucket's type."""
    found = []
    for enabled in (False, True):
        torch.set_default_device("meta" if enabled else "cpu")  # A GPU, in a program.
        try:
            with torch.device("cpu"):
                torch.manual_seed(3)
                (bucket,) = pack(parameters(), 1 << 20)
                flats = [torch.randn(bucket.numel + 1) for _ in range(3)]
            codec = BucketCodec(bucket, Streams([bucket]), 1)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                for flat in flats:
                    sent = codec.encode(flat, LOW_RANK, weight=1.0)
                    codec.decode(sent, flat)
            found.append(flats)
        finally:
            torch.set_default_device(None)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("weight", [1e-9, 3e-4, 1.0, 40_000.0, 5e6])
def test_weights_of_any_size_keep_their_gradients_in_float16(weight: float) -> None:
    """Weights may count tokens; the unit is near a usual one on all ranks, so that no sum overflows or vanishes."""
    unit = 2.0 ** math.floor(math.log2(weight))
    ranks = codecs(4)
    wanted, got = torch.zeros(ranks[0][0].numel, dtype=torch.float64), torch.zeros(ranks[0][0].numel)
    for form in (NONE, HALF, HALF, LOW_RANK, HALF, NONE):
        flats = []
        for rank, (bucket, _) in enumerate(ranks):
            flat = bucket.new_flat()
            flat[-1] = weight * (rank + 1) / 2
            flat[:-1] = flat[-1] * torch.randn(bucket.numel)
            wanted += flat[:-1]
            flats.append(flat)
        step(ranks, flats, form, 4 * [True], unit)
        assert float(flats[0][-1]) == pytest.approx(5 * weight, rel=2e-3)
        got += flats[0][:-1]
    assert float((got - wanted).abs().max()) < 0.05 * weight
