"""Gradients of micro-batches add up, weighed, in the buckets; inside a step `param.grad` is None."""

from __future__ import annotations

import pytest
import torch

from star_hvd.engine.buckets import pack
from star_hvd.errors import StarError
from star_hvd.input.microbatches import MicrobatchInHand
from star_hvd.wrapper.accumulation import Accumulation


def _part(samples: int) -> MicrobatchInHand:
    return MicrobatchInHand(samples, 4.0, lambda: True, 2)


@pytest.mark.parametrize("to_none", [True, False])
def test_the_mean_is_that_of_all_samples(to_none: bool) -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    params = list(net.parameters())
    buckets = pack(params, 64)
    where = {param: (bucket, i) for bucket in buckets for i, param in enumerate(bucket.params)}
    sum_of, part = Accumulation(sparse_as_dense=False), _part(1)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: sum_of.add(p, *where[p], part))
    inputs = torch.randn(6, 3, dtype=torch.float64)
    for _ in range(2):  # In the second step gradients begin as views of the buckets, maybe zeroed ones.
        for rows in (inputs[:1], inputs[1:3], inputs[3:]):
            part = _part(len(rows))
            net.zero_grad(set_to_none=to_none)
            net(rows).square().mean().backward()
            assert all(param.grad is None for param in params)
            assert float(torch.nn.utils.clip_grad_norm_(params, 0.1)) == 0.0
        assert (sum_of.count, sum_of.weight) == (3, 1.5)
        sum_of.finish()
        sum_of.clear()
        expected = torch.autograd.grad(net(inputs).square().mean(), params)
        for param, wanted in zip(params, expected, strict=True):
            assert param.grad is not None and torch.allclose(param.grad, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("given_by_whole", [0, 1, 3, 4])
@pytest.mark.parametrize("taken_by_part", [0, 2, 4])
def test_passes_that_failed_are_repeated_in_parts_and_nothing_counts_twice(
    given_by_whole: int, taken_by_part: int
) -> None:
    """The whole batch fails behind some gradients, then its first part does; what was given is not written again."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    params, inputs, sum_of = list(net.parameters())[::-1], torch.randn(6, 3, dtype=torch.float64), Accumulation(False)
    where = {param: (bucket, i) for bucket in pack(params, 64) for i, param in enumerate(bucket.params)}
    views = {param: bucket.views[i] for param, (bucket, i) in where.items()}

    def gradients(rows: slice) -> list[torch.Tensor]:
        return list(torch.autograd.grad(net(inputs[rows]).square().mean(), params))

    def passes(rows: slice, covered: frozenset[torch.nn.Parameter], count: int) -> MicrobatchInHand:
        part = MicrobatchInHand(rows.stop - rows.start, 4.0, lambda: True, 3, covered)
        for param, grad in list(zip(params, gradients(rows), strict=True))[:count]:
            param.grad = grad
            sum_of.add(param, *where[param], part)
        return part

    whole = gradients(slice(0, 6))
    given = {param: views[param].copy_(grad) for param, grad in list(zip(params, whole, strict=True))[:given_by_whole]}
    for param, view in given.items():
        param.grad = view
    covered = sum_of.hold(None, given)
    failed = passes(slice(0, 3), covered, taken_by_part)
    inner = covered | sum_of.hold(failed, given)
    passes(slice(0, 1), inner, 4)
    passes(slice(1, 3), inner, 4)
    passes(slice(3, 6), covered, 4)
    for param, wanted in zip(params, whole, strict=True):
        assert param.grad is None
        assert param not in given or torch.equal(views[param], wanted), "it may be on its way to other ranks"
    assert (sum_of.count, sum_of.weight) == (3, 1.5)
    sum_of.finish()
    for param, wanted in zip(params, whole, strict=True):
        assert param.grad is not None and torch.allclose(param.grad, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_gradient_behind_step_with_the_same_micro_batch_is_refused(is_last: bool) -> None:
    """It would count again without its weight: two steps with each batch, as in the critic of a GAN or in SAM."""
    param = torch.nn.Parameter(torch.zeros(2))
    (bucket,), sum_of = pack([param], 1024), Accumulation(sparse_as_dense=False)
    first, second = _part(4), _part(4)

    def gradient(part: MicrobatchInHand) -> None:
        param.grad = torch.ones(2)
        sum_of.add(param, bucket, 0, part)

    sum_of.note_step(first)  # With the gradient of a batch before.
    for part in (first, first, second):  # Such as the losses of real and of generated samples.
        gradient(part)
    assert (sum_of.count, sum_of.weight) == (2, 2.0)
    sum_of.note_step(second)
    if is_last:
        sum_of.finish()
        sum_of.clear()
    with pytest.raises(StarError, match="leave microbatches out of hvd.shard"):
        gradient(second)
    gradient(_part(4))
    assert sum_of.count == (1 if is_last else 3)


def test_a_micro_batch_whose_gradient_was_discarded_may_give_it_again() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    (bucket,), sum_of, part = pack([param], 1024), Accumulation(sparse_as_dense=False), _part(8)
    for _ in range(2):
        sum_of.clear()
        param.grad = torch.ones(2)
        sum_of.add(param, bucket, 0, part)
    sum_of.finish()
    assert param.grad is not None and param.grad.tolist() == [1.0, 1.0]


def test_sparse_gradients_are_refused_or_made_dense() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    bucket = pack([table.weight], 1024)[0]
    for dense in (False, True):
        table.weight.grad = None
        table(torch.tensor([1, 1, 3])).sum().backward()
        sum_of = Accumulation(sparse_as_dense=dense)
        if not dense:
            with pytest.raises(StarError, match="sparse_as_dense=True"):
                sum_of.add(table.weight, bucket, 0, _part(4))
            continue
        sum_of.add(table.weight, bucket, 0, _part(4))
        sum_of.finish()
        assert table.weight.grad is not None and table.weight.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]
