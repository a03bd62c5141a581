"""The helper's deadline is one of the steps that it has to complete."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.device import Fence
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.helper import Helper
from tests.support.world import Network, Port

DEADLINE_S = 0.3


class Listens:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Kernels:
    """A fence of a device that takes 5 ms for a gradient."""

    def __init__(self) -> None:
        self._done_s = time.monotonic() + 0.005

    def done(self) -> bool:
        return time.monotonic() > self._done_s

    def order(self, *tensors: torch.Tensor) -> None:
        pass


def test_a_device_that_is_always_at_work_is_no_step_that_does_not_end() -> None:
    """As with a relaxed mode on a GPU, on a rank that is never late."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    network = Network(1)
    engine = StepEngine(
        rank=0, plan=Plan.sync(1), applier=Applier(optimizer, torch.optim.SGD, pack(params, 1), HyperRow([])),
        collective=Port(network, 0), listener=cast(Any, Listens()),
    )  # fmt: skip
    helper = Helper(0, lambda message, **options: None, DEADLINE_S, lambda: None)
    helper.start(engine)
    try:
        began_s, steps = time.monotonic(), 0
        while time.monotonic() - began_s < 3 * DEADLINE_S or steps < 20:
            for bucket in engine.applier.buckets:
                engine.defer(bucket.index, cast(Fence, Kernels()))
            while not engine.flush_deferred():
                time.sleep(0.0003)
            assert engine.arrive()
            for name in network.ready():
                network.end(name)
            for handle in engine.own_step().all_handles():
                engine.collective.finish(handle)
            engine.apply_own(engine.finish_own())
            assert engine.catch_up(0)
            steps += 1
        assert engine.failure is None
    finally:
        helper.stop(engine, 10.0)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reduction_that_fails_in_the_helper_is_logged(stopped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The program may make no later call that raises it; a helper that is told to end is waited for by nobody."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    network = Network(1)
    port, failed = Port(network, 0), threading.Event()
    engine = StepEngine(
        rank=0, plan=Plan.sync(1), applier=Applier(optimizer, torch.optim.SGD, pack(params, 1), HyperRow([])),
        collective=port, listener=cast(Any, Listens()),
    )  # fmt: skip
    helper = Helper(0, lambda message, **options: None, 60.0, lambda: None)

    def finish(handle: int) -> None:
        if stopped:
            helper.end()
        failed.set()
        raise RuntimeError("the link is gone")

    port.finish = finish  # type: ignore[method-assign]
    helper.start(engine)
    try:
        engine.set_inactive(True)
        engine.close(0)
        while not failed.wait(0.01) and engine.failure is None:
            for name in network.ready():
                network.end(name)
    finally:
        helper.stop(engine, 10.0)
    assert str(engine.failure) == "the link is gone"
    assert ("rank 0: the link is gone" in caplog.text) is not stopped
