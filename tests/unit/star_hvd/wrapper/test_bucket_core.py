"""What happens between autograd's hooks and the engine: parts of a bucket on several streams, errors on the way."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.records import Plan
from star_hvd.config import Config
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import PARTS, Streams
from star_hvd.engine.step_engine import StepEngine
from star_hvd.input.feeding import Feeding
from star_hvd.modes.driver import StepDriver
from star_hvd.wrapper import bucket_core
from star_hvd.wrapper.bucket_core import BucketCore
from tests.support.device_world import running
from tests.support.fake_device import CUDA0, FakeDevice

Hook = Callable[[torch.nn.Parameter], None]


class Run:
    """As much of a rank's runtime as an optimizer that makes no step asks for."""

    world_size, rank, in_hand = 1, 0, None
    feeding = Feeding(lambda loader: None)

    def __init__(self, give: Callable[[Bucket], None]) -> None:
        none: Any = None
        self.driver = StepDriver(0, Config(), lambda message, urgent=True: None, none, str, lambda task: None)
        self.driver.give = give  # type: ignore[method-assign, assignment]

    def new_driver(self) -> StepDriver:
        return self.driver

    def attach(self, driver: StepDriver, engine: StepEngine, initial: Plan, plan: Plan | None, *, exact: bool) -> None:
        driver.engine, driver.switcher = engine, SimpleNamespace(active_mode=None)  # type: ignore[assignment]


class Hooked:
    """An optimizer's core, and the hooks with which autograd gives it gradients.

    Args:
        monkeypatch: Of the test.
        give: Gets a bucket that is full.
        device: The device of the parameters, None for the host.

    Attributes:
        pair: The two parameters of the first bucket.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, give: Callable[[Bucket], None], device: FakeDevice | None = None
    ) -> None:
        place = torch.device("cpu") if device is None else CUDA0
        params = [torch.nn.Parameter(torch.zeros(3, device=place)) for _ in range(8)]  # Four buckets.
        self.hooks: list[tuple[torch.Tensor, Hook]] = []
        monkeypatch.setattr(bucket_core, "same_on_all_ranks", lambda params, names: params)
        monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", lambda p, hook: self.register(p, hook))
        if device is not None:
            streams_of = functools.partial(Streams, backend=device)
            monkeypatch.setattr(
                bucket_core, "Applier", lambda *given, **named: Applier(*given, streams=streams_of(given[2]), **named)
            )
        self.inner = torch.optim.SGD(params, lr=0.1)
        run: Any = Run(give)
        self.core = BucketCore(
            self.inner, torch.optim.SGD, wrapped=weakref.ref(self.inner), passes=1, scale_by_ranks=False, fp16=False,
            sparse_as_dense=False, plan=None, run=run, config=Config(), names={}, max_grad_norm=None,
        )  # fmt: skip
        self.pair = self.core.buckets[0].params
        assert len(self.pair) == 2

    def register(self, param: torch.Tensor, hook: Hook) -> Any:
        self.hooks.append((param, hook))
        return SimpleNamespace(remove=lambda: None)

    def gradient(self, param: torch.nn.Parameter) -> None:
        """Autograd has accumulated a gradient of ones."""
        param.grad = torch.ones_like(param)
        (hook,) = [hook for each, hook in self.hooks if each is param]
        hook(param)


def given_on_two_streams(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a reduction finds of a bucket whose parameters are of parts of a model that run on streams of their own."""
    found: list[Any] = []
    hooked = Hooked(monkeypatch, lambda bucket: found.append(bucket.flat.clone()), device)
    device.finish()
    for name, param in zip(("tower 1", "tower 2"), hooked.pair, strict=True):
        with device.on(name):
            hooked.gradient(param)
    device.finish(device.stream("tower 2"))  # What the submission is behind, and nothing else.
    return found[0].inner.tolist()[:-1]  # type: ignore[no-any-return]


def test_a_bucket_is_given_when_the_gradients_of_all_streams_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as device:
        assert given_on_two_streams(device, monkeypatch) == [1.0] * 6
        assert PARTS in device.ordered
    with running(PARTS) as device:
        assert given_on_two_streams(device, monkeypatch) != [1.0] * 6


def test_a_batch_is_not_repeated_where_memory_ran_out_on_the_way_to_a_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of that bucket may be on its way: it must neither be given again nor be left out."""

    def give(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hooked = Hooked(monkeypatch, give)
    first, second = hooked.pair
    hooked.gradient(first)
    assert hooked.core.driver.whole_only() == ""
    with pytest.raises(torch.OutOfMemoryError):
        hooked.gradient(second)
    assert "handed to its reduction" in hooked.core.driver.whole_only()
