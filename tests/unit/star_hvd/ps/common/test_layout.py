"""Cutting a model into chunks and pieces, and optimizer state with it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.ps.common.layout import Layout, LayoutError, class_path
from star_hvd.ps.common.optimizer_spec import OptimizerSpec

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


def build(
    shapes: list[tuple[int, ...]], base: Any, servers: int, chunk_bytes: int, bucket_bytes: int = 400, **keywords: Any
) -> tuple[list[Any], torch.optim.Optimizer, Layout]:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.3}] if half else params
    optimizer = base(groups, lr=0.1, **keywords)
    buckets = pack(params, bucket_bytes)
    return buckets, optimizer, Layout.build(buckets, optimizer.param_groups, base, servers, chunk_bytes)


class Whole(torch.optim.SGD):
    """A subclass: nobody knows whether it treats every element by itself."""


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.sampled_from([torch.optim.SGD, torch.optim.Adam, Whole]), st.integers(1, 4), st.integers(1, 900))
def test_every_element_is_in_exactly_one_piece(
    shapes: list[tuple[int, ...]], base: Any, servers: int, chunk_bytes: int
) -> None:
    buckets, optimizer, layout = build(shapes, base, servers, chunk_bytes)
    ordered = [param for bucket in buckets for param in bucket.params]
    seen = [torch.zeros(param.numel(), dtype=torch.int64) for param in ordered]
    ends = dict.fromkeys(range(len(buckets)), 0)
    for number, chunk in enumerate(layout.chunks):
        assert chunk.index == number and chunk.start == ends[chunk.bucket] and 0 <= chunk.server < servers
        assert chunk.numel == sum(piece.numel for piece in chunk.pieces) > 0
        ends[chunk.bucket] = chunk.stop
        position = chunk.start
        for piece in chunk.pieces:
            seen[piece.param][piece.start : piece.stop] += 1
            assert any(ordered[piece.param] is p for p in optimizer.param_groups[piece.group]["params"])
            if base is Whole:
                assert piece.numel == ordered[piece.param].numel() and piece.shape == tuple(ordered[piece.param].shape)
            else:
                assert piece.start % 64 == 0
            # A chunk is a range of the bucket: its pieces are where the bucket has them.
            bucket = buckets[chunk.bucket]
            bucket.flat.zero_()
            bucket.views[[p is ordered[piece.param] for p in bucket.params].index(True)].view(-1)[piece.start] = 7.0
            assert bucket.flat[position] == 7.0
            position += piece.numel
        limit = max(chunk_bytes, 64 * 4)
        assert layout.nbytes(chunk) <= limit or (base is Whole and len(chunk.pieces) == 1)
    assert all(bool((count == 1).all()) for count in seen)
    assert [ends[i] for i in range(len(buckets))] == [bucket.numel for bucket in buckets]
    assert Layout.from_dict(msgpack.unpackb(msgpack.packb(layout.to_dict()))) == layout


def test_chunks_are_spread_by_bytes() -> None:
    layout = build([(100,)] * 37, torch.optim.SGD, 3, 400, bucket_bytes=4000)[2]
    loads = [sum(layout.nbytes(chunk) for chunk in layout.of_server(index)) for index in range(3)]
    assert max(loads) - min(loads) <= 400 and sum(loads) == 37 * 400
    assert layout.holders == {0, 1, 2}
    assert build([(3,)], torch.optim.SGD, 3, 400)[2].holders == {0}


@pytest.mark.parametrize("base", [torch.optim.SGD, Whole])
def test_every_bucket_by_itself_is_spread_over_the_servers(base: Any) -> None:
    """Cut where the optimizer allows it, down to parts that are worth a message."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (800_000, 600_000, 600_000, 50_000, 50_000, 1_000)]
    optimizer, buckets = base(params, lr=0.1), pack(params, 3_300_000)
    layout = Layout.build(buckets, optimizer.param_groups, base, 4, 10**7, each_spread=True)
    assert [bucket.numel for bucket in buckets] == [701_000, 600_000, 800_000]
    of_bucket = [[c for c in layout.chunks if c.bucket == index] for index in range(3)]
    if base is Whole:  # Each bucket is one chunk or, in the first, as many as its tensors.
        assert len({chunk.server for chunk in layout.chunks}) == 4
        return
    for bucket, chunks in zip(buckets, of_bucket, strict=True):
        assert len(chunks) == 4 and {chunk.server for chunk in chunks} == {0, 1, 2, 3}
        assert max(chunk.numel for chunk in chunks) <= bucket.numel / 4 + 65
    loads = [sum(layout.nbytes(chunk) for chunk in layout.of_server(index)) for index in range(4)]
    assert max(loads) - min(loads) <= 4 * 4 * 64 * 3
    one = params[3:4]  # Not worth four messages.
    small = Layout.build(pack(one, 10**6), [{"params": one}], base, 4, 10**6, each_spread=True)
    assert len({chunk.server for chunk in small.chunks}) == len(small.chunks) == 2


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (Whole, {"momentum": 0.5}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("base", "keywords"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
def test_parameters_and_state_come_back_as_they_were(base: Any, keywords: dict[str, Any]) -> None:
    shapes = [(30, 20), (), (1,), (7,), (500,), (2, 3, 4)]
    buckets, optimizer, layout = build(shapes, base, 2, 300, bucket_bytes=1500, **keywords)
    ordered = [param for bucket in buckets for param in bucket.params]
    for param in ordered[1:]:  # The first has no state yet.
        param.grad = torch.randn(param.shape)
    optimizer.step()
    states = [dict(optimizer.state.get(param, {})) for param in ordered]
    params = layout.join_params({chunk.index: layout.cut_params(ordered, chunk) for chunk in layout.chunks})
    joined = layout.join_state({chunk.index: layout.cut_state(states, chunk) for chunk in layout.chunks})
    assert all(torch.equal(a, b.detach()) and a.shape == b.shape for a, b in zip(params, ordered, strict=True))
    for mine, theirs in zip(joined, states, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].shape == value.shape and mine[key].dtype == value.dtype
                assert torch.equal(mine[key], value)
            else:
                assert mine[key] == value


def test_channels_last_state_is_cut_in_the_order_of_the_bucket() -> None:
    param = torch.nn.Parameter(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    layout = Layout.build(pack([param], 10**6), optimizer.param_groups, torch.optim.SGD, 1, 256)
    param.grad = torch.randn_like(param)
    optimizer.step()
    states = [dict(optimizer.state[param])]
    joined = layout.join_state({chunk.index: layout.cut_state(states, chunk) for chunk in layout.chunks})
    assert torch.equal(joined[0]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])
    flats = {chunk.index: layout.cut_params([param], chunk) for chunk in layout.chunks}
    assert torch.equal(layout.join_params(flats)[0], param.detach())
    (bucket,) = pack([param], 10**6)
    bucket.adopt(0)
    gradient = torch.cat([layout.cut_params([param.grad], chunk) for chunk in layout.chunks])
    assert torch.equal(bucket.flat[:-1], gradient), "parameters are not cut in the order of the gradients"


def test_what_servers_cannot_do_is_refused_with_a_reason() -> None:
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(LayoutError, match="cannot import it"):
        class_path(Local)
    with pytest.raises(LayoutError, match="LBFGS evaluates the loss several times"):
        class_path(torch.optim.LBFGS)
    Main = type("Main", (torch.optim.SGD,), {"__module__": "__main__"})
    with pytest.raises(LayoutError, match="defined in __main__"):
        class_path(Main)
    Elsewhere = type("SGD", (torch.optim.SGD,), {"__module__": "torch.optim.sgd"})
    with pytest.raises(LayoutError, match="another class"):
        class_path(Elsewhere)
    complex_ = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(LayoutError, match="complex64"):
        Layout.build(pack([complex_], 99), [{"params": [complex_]}], torch.optim.SGD, 1, 99)
    last = torch.nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    with pytest.raises(LayoutError, match="channels_last"):
        Layout.build(pack([last], 9999), [{"params": [last]}], torch.optim.Adafactor, 1, 99)
    stray = torch.nn.Parameter(torch.zeros(3))
    wide = torch.nn.Parameter(torch.empty(300 << 20, device="meta"))
    with pytest.raises(LayoutError, match="a tensor of 1200 MiB is more than servers take of Adafactor"):
        Layout.build(pack([wide], 1 << 40), [{"params": [wide]}], torch.optim.Adafactor, 2, 1 << 20)
    with pytest.raises(LayoutError, match="in no parameter group"):
        Layout.build(pack([stray], 99), [{"params": []}], torch.optim.SGD, 1, 99)
    with pytest.raises(ValueError, match="n_servers is 0"):
        Layout.build([], [], torch.optim.SGD, 0, 99)


def test_hyperparameters_travel_and_later_entries_do_not() -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.Adam(params, lr=0.1, betas=(0.8, 0.9))
    hyper = HyperRow(optimizer.param_groups)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert "initial_lr" in optimizer.param_groups[0]
    spec = OptimizerSpec.of(torch.optim.Adam, optimizer.param_groups, hyper)
    again = OptimizerSpec.from_dict(msgpack.unpackb(msgpack.packb(spec.to_dict())))
    assert again == spec and again.groups[0]["betas"] == (0.8, 0.9) and "initial_lr" not in again.groups[0]
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    optimizer.param_groups[0]["own_number"] = 3.0  # Of a scheduler outside torch.
    assert "swa_lr" in optimizer.param_groups[0]
    assert OptimizerSpec.of(torch.optim.Adam, optimizer.param_groups, hyper) == spec
    assert HyperRow([{**optimizer.param_groups[0], "own_number": None}]).size == hyper.size, "loaded on rank 0, say"
    optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(LayoutError, match="'schedule' of group 0 is a function"):
        OptimizerSpec.of(torch.optim.Adam, optimizer.param_groups, hyper)


def test_shapes_and_orders_are_collected_once() -> None:
    """They are needed for each chunk, and a model may have thousands of chunks and of parameters."""
    param = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    buckets = pack([param], 1 << 20)
    layout = Layout.build(buckets, [{"params": [param]}], torch.optim.SGD, 1, 1024)
    assert layout.shapes == ((4, 3, 2, 2),) and layout.orders == ((0, 2, 3, 1),)
    assert layout.shapes is layout.shapes and layout.orders is layout.orders
