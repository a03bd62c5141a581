"""Buckets: every parameter exactly once, gradients that are views, types that travel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from star_hvd.engine.buckets import in_format_of, memory_format_of, pack
from tests.support.effort import cases

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=12)


@settings(max_examples=cases(50), deadline=None)
@given(SHAPES, st.integers(1, 100), st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))
def test_pack(shapes: list[list[int]], capacity: int, dtypes: list[torch.dtype]) -> None:
    dtypes = dtypes or [torch.float32]
    params = [torch.nn.Parameter(torch.zeros(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    buckets = pack(params, capacity, first_index=3)
    assert [b.index for b in buckets] == list(range(3, 3 + len(buckets)))
    packed = [p for b in buckets for p in b.params]
    assert len(packed) == len(params) and {id(p) for p in packed} == {id(p) for p in params}
    for bucket in buckets:
        assert {p.dtype for p in bucket.params} == {bucket.flat.dtype}
        assert bucket.wire.dtype != torch.bfloat16, "Horovod rejects it"
        bucket.flat[:-1] = 7
        bucket.flat[-1] = 1
        assert all(bool((view == 7).all()) for view in bucket.views)
        assert bucket.numel == sum(p.numel() for p in bucket.params)


def test_a_gradient_that_is_taken_out_is_independent_of_the_buffer() -> None:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (2,), (1,))]
    (bucket,) = pack(params, 1000)
    bucket.show_all()
    params[1].grad, own = None, torch.ones(1)
    params[2].grad = own
    for position in range(3):
        bucket.take_out(position)
    assert params[0].grad is not None and params[0].grad.stride() == bucket.views[2].stride()
    params[0].grad.fill_(5.0)
    assert not bucket.flat.any() and params[1].grad is None and params[2].grad is own


def test_reverse_order() -> None:
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)]
    (bucket,) = pack(params, 1000)
    assert [p.numel() for p in bucket.params] == [3, 2, 1]


def test_adopt() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    (bucket,) = pack([param], 1000)
    bucket.flat.fill_(9)
    bucket.adopt(0)
    assert bucket.shows(0) and float(param.grad.abs().sum()) == 0, "no gradient counts as zero"
    param.grad = torch.arange(6.0).view(3, 2).t()  # Not contiguous.
    expected = param.grad.clone()
    bucket.adopt(0)
    assert bucket.shows(0) and torch.equal(param.grad, expected)
    assert torch.equal(bucket.flat[:-1].view(2, 3), expected)


@pytest.mark.parametrize(("dtype", "fp16"), [(torch.bfloat16, False), (torch.float32, True), (torch.float64, True)])
def test_types_that_change_on_the_wire(dtype: torch.dtype, fp16: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    (bucket,) = pack([param], 1000, fp16=fp16)
    assert not bucket.can_carry
    bucket.flat.copy_(torch.tensor([1.0, 2.0, -3.0, 0.5, 1.0]))
    wire = bucket.to_wire(bucket.flat)
    assert wire is bucket.wire and wire.dtype == (torch.float16 if fp16 else torch.float32)
    wire.mul_(2)
    bucket.from_wire(wire, bucket.flat)
    assert bucket.flat.tolist() == [2.0, 4.0, -6.0, 1.0, 2.0]
    proxy = bucket.to_wire(bucket.new_flat())
    assert proxy is not bucket.wire, "a stand-in must not touch the training thread's buffer"


def test_a_header_behind_the_weight() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    (bucket,) = pack([param], 1000)
    assert bucket.can_carry
    bucket.carry(5)
    for flat in (bucket.flat, bucket.new_flat()):
        assert flat.numel() == 4
        wire = bucket.to_wire(flat)
        assert wire.numel() == 9 and wire.data_ptr() == flat.data_ptr()
    bucket.adopt(0)
    assert bucket.shows(0) and param.grad.data_ptr() == bucket.flat.data_ptr()


@settings(max_examples=cases(50), deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 20))
def test_the_header_and_the_gradients_share_memory_and_nothing_else(sizes: list[int], tail: int) -> None:
    params = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    (bucket,) = pack(params, 1 << 20)
    bucket.carry(tail)
    numel = sum(sizes)
    for flat, views in ((bucket.flat, bucket.views), ((other := bucket.new_flat()), bucket.split(other))):
        wire = bucket.to_wire(flat)
        assert not wire.any(), "a new buffer is zero, its tail too"
        wire.copy_(torch.arange(float(numel + 1 + tail)) + 1)
        assert flat.tolist() == [float(i) + 1 for i in range(numel + 1)]
        offset = 0
        for view, param in zip(views, bucket.params, strict=True):
            assert view.shape == param.shape
            assert view.tolist() == [float(i) + 1 for i in range(offset, offset + param.numel())]
            offset += param.numel()
        for view in views:
            view.fill_(-1.0)
        assert wire[numel:].tolist() == [float(numel + 1 + i) for i in range(tail + 1)], "weight and header are kept"
        bucket.from_wire(wire, flat)
        assert flat[:-1].tolist() == [-1.0] * numel
    assert other.data_ptr() != bucket.flat.data_ptr()


def test_gradients_move_over_when_a_bucket_makes_room_for_a_header() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    (bucket,) = pack([param], 1000)
    bucket.adopt(0)
    assert param.grad is not None
    param.grad.copy_(torch.tensor([1.0, 2.0, 3.0]))
    before = param.grad
    bucket.carry(4)
    bucket.adopt(0)
    assert bucket.shows(0) and param.grad is not before
    assert bucket.to_wire(bucket.flat).tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type_comes_back_from_the_wire(dtype: torch.dtype, fp16: bool) -> None:
    shapes = [(3,), (2, 2), (), (0,)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    (bucket,) = pack(params, 1 << 20, fp16=fp16)
    values = {(): 0.5, (3,): [1.0, -2.0, 1024.0], (2, 2): [[0.25, 0.0], [-0.125, 8.0]], (0,): []}
    for position, param in enumerate(bucket.params):
        param.grad = torch.tensor(values[tuple(param.shape)], dtype=dtype)
        bucket.adopt(position)
    wire = bucket.to_wire(bucket.flat)
    assert wire.dtype != torch.bfloat16 and wire.dtype.itemsize <= max(4, dtype.itemsize)
    wire.mul_(2)
    bucket.from_wire(wire, bucket.flat)
    for param in params:
        assert param.grad is not None and param.grad.dtype == dtype
        expected = torch.tensor(values[tuple(param.shape)], dtype=dtype) * 2
        assert torch.equal(param.grad, expected)


def test_parameters_of_several_types_are_never_in_one_bucket() -> None:
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float16, torch.float64]
    params = [torch.nn.Parameter(torch.full((2,), float(i), dtype=d)) for i, d in enumerate(dtypes)]
    buckets = pack(params, 1 << 20)
    assert [[float(p.detach()[0]) for p in b.params] for b in buckets] == [[4.0, 1.0], [3.0], [2.0, 0.0]]
    assert [b.can_carry for b in buckets] == [False, False, True], "the header needs float32"


def test_the_gradient_of_a_transposed_parameter_keeps_its_values() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 2).t())
    (bucket,) = pack([param], 1000)
    param.grad = torch.arange(6.0).view(3, 2).t()
    bucket.adopt(0)
    assert param.grad.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert bucket.flat[:-1].tolist() == list(range(6)), "not in the memory format of its parameter"


# ---- memory formats ---------------------------------------------------------------------------------------------


def _formats() -> list[torch.nn.Parameter]:
    values = [
        torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 2).t(),
        torch.randn(3, 3),
        torch.randn(8, 8)[::2, ::2],  # Not dense: a gradient of its own has the usual format.
        torch.randn(2, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d),
        torch.tensor(1.0),
    ]
    return [torch.nn.Parameter(value) for value in values]


def test_a_gradient_has_its_parameters_memory_format() -> None:
    params = _formats()
    for bucket in pack(params, 1 << 20):
        bucket.carry(5)
        for position, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
            assert view.shape == param.shape and view.stride() == torch.zeros_like(param).stride()
            param.grad = grad = torch.randn(param.shape).contiguous()
            bucket.adopt(position)
            assert bucket.shows(position) and torch.equal(view, grad)
        assert bucket.flat.numel() == sum(p.numel() for p in bucket.params) + 1
        assert bucket.flat[-1] == 0.0, "a view reaches into the weight"
        total = torch.stack([param.grad.abs().sum() for param in bucket.params]).sum()  # type: ignore[union-attr]
        torch.testing.assert_close(bucket.flat[:-1].abs().sum(), total)


def test_buffers_of_a_bucket_are_split_alike() -> None:
    (bucket,) = pack(_formats(), 1 << 20)
    flat = torch.arange(bucket.flat.numel(), dtype=torch.float32)
    bucket.flat.copy_(flat)
    for ours, theirs in zip(bucket.views, bucket.split(flat), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize("gradient", [True, False])
def test_a_rank_without_a_gradient_follows_a_new_memory_format_too(gradient: bool) -> None:
    """Else the sum of all ranks, in the new format, would be taken for one in the old format here."""
    param = torch.nn.Parameter(torch.randn(4, 3, 5, 5))
    (bucket,) = pack([param], 1 << 20)
    param.data = param.data.to(memory_format=torch.channels_last)
    param.grad = torch.randn(4, 3, 5, 5) if gradient else None
    bucket.adopt(0)
    assert bucket.views[0].stride() == param.stride() == param.grad.stride()  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_fused_step_is_that_of_the_usual_format() -> None:
    """Fused kernels pair elements by their place in memory and say nothing where the formats differ."""
    torch.manual_seed(2)
    start, grad = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    found = []
    usual, last = torch.contiguous_format, torch.channels_last
    for memory_format, later in ((usual, None), (last, None), (usual, last)):
        param = torch.nn.Parameter(start.clone(memory_format=torch.contiguous_format).to(memory_format=memory_format))
        (bucket,) = pack([param], 1 << 20)
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
        if later is not None:  # `model.to(memory_format=...)` behind the wrapping.
            param.data = param.data.to(memory_format=later)
        for _ in range(2):
            param.grad = grad.clone()
            bucket.adopt(0)
            optimizer.step()
        found.append(param.detach().contiguous())
    assert all(torch.allclose(each, found[0]) for each in found[1:])


def test_a_state_that_travelled_gets_its_format_back() -> None:
    param = torch.nn.Parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
    value = torch.randn(4, 3, 5, 5)
    back = in_format_of(param, value)
    assert back.stride() == param.stride() == memory_format_of(param) and torch.equal(back, value)
    step = torch.tensor(3.0)
    assert in_format_of(param, step) is step and in_format_of(param, back) is back


@pytest.mark.parametrize(
    "exchange",
    [
        lambda param: setattr(param.grad, "data", param.grad.data.clone()),
        lambda param: setattr(param.grad, "data", param.grad.data.double().float()),  # As `model.double().float()`.
        lambda param: setattr(param, "grad", param.grad.clone()),
    ],
)
def test_a_gradient_whose_memory_was_exchanged_is_found_again(exchange: Callable[[torch.nn.Parameter], None]) -> None:
    """The reduction would send what was in the buffer before, in every later step."""
    param = torch.nn.Parameter(torch.zeros(3))
    (bucket,) = pack([param], 1000)
    param.grad = torch.ones(3)
    bucket.adopt(0)
    exchange(param)
    assert param.grad is not None and not bucket.shows(0)
    param.grad.fill_(5.0)  # The next backward pass adds to what is there, or replaces it.
    bucket.adopt(0)
    assert bucket.flat[:-1].tolist() == [5.0] * 3 and bucket.shows(0)
    bucket.flat[:-1].fill_(2.0)  # The mean.
    exchange(param)
    param.grad.fill_(7.0)
    bucket.show(0)
    assert param.grad is not None and param.grad.tolist() == [2.0] * 3
