"""What happens between autograd's hooks and the engine: parts of a bucket on several streams, errors on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from star_hvd.engine.buckets import pack
from star_hvd.engine.device import PARTS, Streams
from star_hvd.wrapper.accumulation import Accumulation
from star_hvd.wrapper.bucket_core import BucketCore
from star_hvd.wrapper.sparse import SparseGradients
from tests.support.device_world import running
from tests.support.fake_device import CUDA0, FakeDevice


def core_over(params: list[torch.nn.Parameter], give: Any, streams: Any = None) -> Any:
    """The part of a `BucketCore` that takes gradients in, over one bucket of `params`."""
    (bucket,) = pack(params, 1 << 10)
    engine = SimpleNamespace(streams=Streams([bucket], *((streams,) if streams else ())), weight=1.0, prefix="star.0")
    core: Any = object.__new__(BucketCore)
    core.__dict__.update(
        passes=1, looks_at_every_gradient="", _dropped=False, _given=set(), _giving=False, _buckets=[bucket],
        _where={param: (bucket, i) for i, param in enumerate(bucket.params)}, _unready=[len(params)],
        _sparse=SparseGradients(False), _accumulation=Accumulation(False), _outcome="", _result=None, _writes=None,
        _attached=(
            SimpleNamespace(in_hand=None, batch_weight=lambda passes: 1.0),
            SimpleNamespace(engine=engine, give=give, active_mode=None),
        ),
    )  # fmt: skip
    return core


def given_on_two_streams(device: FakeDevice) -> list[float]:
    """What a reduction finds of a bucket whose parameters are of parts of a model that run on streams of their own."""
    found: list[torch.Tensor] = []
    first, second = (torch.nn.Parameter(torch.zeros(3, device=CUDA0)) for _ in range(2))
    core = core_over([first, second], lambda bucket: found.append(bucket.flat.clone()), device)
    device.finish()
    for name, param in (("tower 1", first), ("tower 2", second)):
        with device.on(name):
            param.grad = torch.ones(3, device=CUDA0)
            core._give(param)
    device.finish(device.stream("tower 2"))  # What the submission is behind, and nothing else.
    return found[0].inner.tolist()[:-1]  # type: ignore[attr-defined, no-any-return]


def test_a_bucket_is_given_when_the_gradients_of_all_streams_are_in_it() -> None:
    with running() as device:
        assert given_on_two_streams(device) == [1.0] * 6
        assert PARTS in device.ordered
    with running(PARTS) as device:
        assert given_on_two_streams(device) != [1.0] * 6


def test_a_batch_is_not_repeated_where_memory_ran_out_on_the_way_to_a_reduction() -> None:
    """Some of that bucket may be on its way: it must neither be given again nor be left out."""

    def give(bucket: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    first, second = params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    core = core_over(params, give)
    core._give(first)
    assert core._whole_only() == ""
    with pytest.raises(torch.OutOfMemoryError):
        core._give(second)
    assert "handed to its reduction" in core._whole_only()
