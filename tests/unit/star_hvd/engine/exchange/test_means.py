"""The mean of a reduced bucket is that of the gradients with the weights the ranks have, whatever the type."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from scheduler.transmission.wire import HALF, LOW_RANK
from star_hvd.compression.bucket_codec import BucketCodec
from star_hvd.engine.buckets import Wire, pack, set_weight
from star_hvd.engine.device import Streams
from star_hvd.engine.exchange.means import divide

WEIGHTS = [[1.0] * 257, [1.1, 1.1], [0.3, 0.3, 0.3]]  # 257 and 1.1 have no exact bfloat16.


def gradients(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(4096, generator=generator)
    return [(common + 0.1 * torch.randn(4096, generator=generator)).to(torch.bfloat16) for _ in range(ranks)]


def common_factor(mean: torch.Tensor, expected: torch.Tensor) -> float:
    """By which all of `mean` is too large; roundings of single values cancel."""
    return float((mean * expected).sum() / (expected * expected).sum())


def expected_mean(given: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return sum(w * g.double() for w, g in zip(weights, given, strict=True)) / sum(weights)  # type: ignore[return-value]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)}x{weights[0]}")
def test_the_mean_of_bfloat16_gradients_has_no_common_factor(weights: list[float], fp16: bool) -> None:
    given = gradients(len(weights))
    (bucket,) = pack([torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))], 1 << 20, fp16=fp16)
    sent = []
    for gradient, weight in zip(given, weights, strict=True):
        bucket.flat[:-1] = gradient * weight
        set_weight(bucket.flat, weight)
        sent.append(Wire().encode(bucket, bucket.flat, weight=weight).clone())
    total = Wire().decode(bucket, torch.stack(sent).sum(0), bucket.flat)
    mean = divide(total, bucket.flat, Streams([bucket]), 1)
    assert mean is bucket.flat and mean.dtype == torch.bfloat16
    expected = expected_mean(given, weights)
    assert common_factor(mean[:-1].double(), expected) == pytest.approx(1.0, abs=1e-3 if fp16 else 1e-4)
    if not fp16 and weights[0] == 1.0:  # The only rounding is that of the mean.
        assert torch.equal(mean[:-1], (torch.stack(given).float().sum(0) / len(weights)).to(torch.bfloat16))


@pytest.mark.parametrize("form", [HALF, LOW_RANK])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)}x{weights[0]}")
def test_nor_has_that_of_compressed_ones(weights: list[float], form: int) -> None:
    given = [torch.outer(g[:64], g[64:128]).view(-1) for g in gradients(1)] * len(weights)  # Of rank 1.
    made = []
    for gradient, weight in zip(given, weights, strict=True):
        (bucket,) = pack([torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))], 1 << 20)
        made.append((bucket, BucketCodec(bucket, Streams([bucket]), len(weights))))
        bucket.flat[:-1] = gradient * weight
        set_weight(bucket.flat, weight)
    for _ in range(2):  # After two steps, the basis is that of the gradients.
        flats = [bucket.flat.clone() for bucket, _ in made]
        sent = [
            codec.encode(flat, form, weight=weight)
            for (_, codec), flat, weight in zip(made, flats, weights, strict=True)
        ]
        total = torch.stack(sent).sum(0)
        sums = [codec.decode(total, flat) for (_, codec), flat in zip(made, flats, strict=True)]
        mean = divide(sums[0], flats[0], Streams([bucket]), 1)
    assert float(sums[0][-1]) == pytest.approx(sum(weights), rel=1e-3)
    if form == HALF:
        assert common_factor(mean[:-1].double(), expected_mean(given, weights)) == pytest.approx(1.0, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_a_contribution_the_sum_stays_zero_and_weight_one_copies(dtype: torch.dtype) -> None:
    (bucket,) = pack([torch.nn.Parameter(torch.zeros(3, dtype=dtype))], 1 << 20)
    for values in ([0.0, 0.0, 0.0, 0.0], [2.0, -1.0, 0.5, 1.0]):
        reduced = Wire().encode(bucket, bucket.flat.copy_(torch.tensor(values)), weight=values[-1])
        total = Wire().decode(bucket, reduced, bucket.flat)
        assert divide(total, bucket.flat, Streams([bucket]), 1).tolist() == values
