"""Pushes in parts, whole and as int8, at one shard."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from star_hvd.compression import int8
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.common.record import make_record
from star_hvd.ps.common.wire import PART_BYTES, parts
from star_hvd.ps.server.shard import Shard

NUMEL = PART_BYTES + 5  # Two parts as int8, five as they are.


class Arrivals:
    """What the shard reports to its primary."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[int, int]] = []

    def arrived(self, rank: int, step: int, products: Any) -> None:
        self.arrivals.append((rank, step))

    def done(self, seq: int) -> None:
        pass


def shard() -> tuple[Shard, Arrivals]:
    param = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([param], lr=1.0)
    layout = Layout.build(pack([param], 1 << 30), optimizer.param_groups, torch.optim.SGD, 1, 1 << 30)
    spec = OptimizerSpec.of(torch.optim.SGD, optimizer.param_groups, HyperRow(optimizer.param_groups))
    outlet = Arrivals()
    made = Shard(0, layout, spec, None, cast(Any, outlet))
    record = make_record(param.detach(), [{}], 0)
    data = torch.zeros(record.nbytes, dtype=torch.uint8)
    record.write(data)
    made.seed(0, data)
    return made, outlet


def send(to: Shard, step: int, data: bytes) -> None:
    for begin, end in reversed(list(parts(len(data)))):
        to.part(0, step, 0, begin, len(data), bytearray(data[begin:end]))


def applied(to: Shard, step: int) -> torch.Tensor:
    """The parameters behind an update with the push of a step, at a learning rate of 1."""
    update = {"op": "update", "version": step - 1, "parts": [[0, step, 1.0]], "lr_factor": 1.0, "row": None, "send": []}
    to.order({"seq": step, **update})
    return to.stores[0].params.detach().clone()


def test_a_push_is_known_by_its_size_whole_or_as_int8() -> None:
    to, outlet = shard()
    gradient = torch.randn(NUMEL)
    send(to, 1, gradient.numpy().tobytes())
    assert torch.equal(applied(to, 1), -gradient)
    payload = int8.encode(gradient)
    send(to, 2, payload)
    assert torch.equal(applied(to, 2), -gradient - int8.decode(payload, NUMEL, torch.float32))
    assert outlet.arrivals == [(0, 1), (0, 2)]


def test_parts_of_two_forms_make_no_push() -> None:
    to, outlet = shard()
    small, whole = int8.encode(torch.zeros(NUMEL)), bytes(4 * NUMEL)
    to.part(0, 1, 0, 0, len(small), bytearray(small[:PART_BYTES]))
    with pytest.raises(ChannelError, match="as 1052681 bytes and as 4194324"):
        to.part(0, 1, 0, PART_BYTES, len(whole), bytearray(PART_BYTES))
    with pytest.raises(ChannelError, match="or 1052681 as int8"):
        to.part(0, 1, 0, 0, 17, bytearray(17))
    assert outlet.arrivals == []
