"""Readiness by fences: a gradient counts once its device has produced it, not once its kernels are queued."""

from __future__ import annotations

from typing import cast

import torch

from scheduler.records import Plan
from star_hvd.engine.device import Fence
from star_hvd.engine.step_engine import StepEngine
from tests.support.world import World


class Kernels:
    """Work on a device: done when the test says so. Where nothing is queued there is nothing to order."""

    def __init__(self) -> None:
        self.finished = self.taken = False

    def done(self) -> bool:
        return self.finished

    def order(self, *tensors: torch.Tensor) -> None:
        self.taken = True


def fence(kernels: Kernels) -> Fence:
    return cast(Fence, kernels)


def relaxed_world() -> World:
    """Two ranks in partial(1) at step 0, nothing submitted."""
    world = World(0, world_size=2, steps=2)
    for engine in world.engines:
        engine.agreement.plan = Plan.partial(2, 1, plan_id=1)
    return world


def fill(engine: StepEngine, value: float) -> None:
    for bucket in engine.applier.buckets:
        bucket.flat.fill_(value)
        for param, view in zip(bucket.params, bucket.views, strict=True):
            param.grad = view


def end_all(world: World) -> None:
    while names := world.network.ready():
        world.network.end(names[0])


def test_a_deferred_bucket_is_submitted_when_its_event_has_happened() -> None:
    engine = relaxed_world().engines[0]
    fill(engine, 1.0)
    work = [Kernels() for _ in engine.applier.buckets]
    for bucket, kernels in zip(engine.applier.buckets, work, strict=True):
        engine.defer(bucket.index, fence(kernels))
    assert not engine.flush_deferred() and engine.counters.produced_weight == 0.0
    assert engine.must_poll(), "the helper has to look at the device: nobody announces an event"
    for kernels in work:
        kernels.finished = True
    assert engine.flush_deferred() and all(kernels.taken for kernels in work)
    assert engine.arrive() and engine.counters.fresh == 1


def test_a_slow_device_loses_its_step_although_its_kernels_were_queued_in_time() -> None:
    world = relaxed_world()
    fast, slow = world.engines
    for engine in (fast, slow):
        fill(engine, 1.0)
    work = [Kernels() for _ in slow.applier.buckets]
    for bucket, kernels in zip(slow.applier.buckets, work, strict=True):
        slow.defer(bucket.index, fence(kernels))
    for bucket in fast.applier.buckets:
        fast.gradient_ready(bucket.index)
    assert fast.arrive()
    slow.close(0)
    slow.helper_tick()
    end_all(world)
    for handle in fast.own_step().all_handles():
        assert fast.collective.poll(handle), "the step waits for the slow device"
        fast.collective.finish(handle)
    fast.apply_own(fast.finish_own())
    # The device's work is late now. What its buckets hold is no gradient yet, and must not be kept as one.
    assert not slow.flush_deferred() and slow.pending_weight == 0.0
    for kernels in work:
        kernels.finished = True
    assert slow.flush_deferred() and not slow.arrive()
    assert slow.counters.late == 1 and slow.pending_weight == 1.0
    slow.helper_tick()
    assert slow.catch_up(slow.next_step)
    for mine, theirs in zip(fast.applier.buckets, slow.applier.buckets, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.params, theirs.params, strict=True))


def test_the_helper_submits_a_deferred_bucket_by_itself() -> None:
    engine = relaxed_world().engines[0]
    fill(engine, 1.0)
    kernels = Kernels()
    engine.defer(0, fence(kernels))
    assert engine.helper_has_work()
    engine.helper_tick()
    assert engine.counters.produced_weight == 0.0
    kernels.finished = True
    engine.helper_tick()
    assert engine.counters.applied_weight > 0.0
