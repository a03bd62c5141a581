"""On which stream the training thread hands over a bucket while the rest of its backward pass is still queued."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scheduler.records import Plan
from star_hvd.config import Config
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import BUCKET, GRADIENT
from star_hvd.modes import driver
from star_hvd.modes.driver import StepDriver
from tests.support.device_world import WEIGHT, DeviceWorld, running
from tests.support.fake_device import FakeDevice

PARTIAL = Plan.partial(2, 1, plan_id=1, damping="none")


class SlowBackward:
    """Rank 0 of two in `partial` arrives while its device has completed one bucket alone.

    Args:
        device: The device; nothing runs on it by itself.
        monkeypatch: Replaces the pause of the training thread between two looks at its device.
        meanwhile: Called in the first of these pauses.
    """

    def __init__(self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        self.device, self._meanwhile = device, meanwhile
        self.world = DeviceWorld(1, device, world_size=2, steps=4, lazy="THS")
        for engine in self.world.engines:
            engine.agreement.plan = PARTIAL
        self.engine = self.world.engines[0]
        self.driver = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
        self.driver.engine, self.driver.switcher = self.engine, cast(Any, SimpleNamespace(active_mode=None))
        self.driver.reporter.start(self.engine)
        clock = SimpleNamespace(monotonic=driver.time.monotonic, sleep=self._pause)
        monkeypatch.setattr(driver, "time", clock)
        device.finish()

    def queue_backward(self) -> Bucket:
        """Queue the whole pass; return the bucket that is complete first."""
        with self.device.on("T0"):
            given = list(self.world.backward(self.engine))
            for bucket in given:
                bucket.flat[:-1].mul_(1.0)
                self.world.give(self.engine, bucket)
        return given[0]

    def complete(self, bucket: Bucket) -> None:
        """Run the pass as far as this bucket."""
        assert not self.engine.own.deferred[bucket.index].done() and self.device.asked is not None
        self.device.finish_event(self.device.asked)
        assert self.engine.own.deferred[bucket.index].done() and self.backward_is_queued

    def miss_step(self) -> None:
        """Step 0 ends with zeros of both ranks."""
        self.proxies(0)
        self.reduce()
        for rank, engine in enumerate(self.world.engines):
            with self.device.on(f"H{rank}"):
                assert engine.helper_tick() and not engine.helper_owns()

    @property
    def backward_is_queued(self) -> bool:
        """Whether the program's stream has yet to reach the end of a bucket's gradient."""
        return any(kind == "record" and what.name == GRADIENT for kind, what in self.device.stream("T0").queue)

    def arrive(self) -> bool:
        """Arrive with what the device has completed, and wait for the rest."""
        with self.device.on("T0"):
            return self.driver.arrive(manual=False)

    def _pause(self, seconds: float) -> None:
        if self.backward_is_queued:
            self._meanwhile()
            self.device.finish(self.device.stream("T0"))

    def proxies(self, step: int) -> None:
        """Close a step, so that the helpers of both ranks submit what is missing."""
        for rank, engine in enumerate(self.world.engines):
            engine.close(step)
            with self.device.on(f"H{rank}"):
                engine.helper_tick()

    def reduce(self) -> list[str]:
        """Reduce what both ranks have submitted, running only what that needs; return the names."""
        for event in self.world.wanted():
            self.device.finish_event(event)
        names = self.world.network.ready()
        for name in names:
            self.world.network.end(name)
        return names


def submitted(world: DeviceWorld, bucket: Bucket) -> float:
    """First value of what rank 0 has submitted for a bucket."""
    return float(cast(Any, world.network.queues[f"star.b{bucket.index}"][0][0][1]).inner[0])


def test_a_complete_bucket_is_reduced_while_the_rest_of_backward_is_still_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def others_wait_for_it() -> None:
        job.proxies(0)
        job.reduce()
        assert job.backward_is_queued, "the step ended only when the whole backward pass had ended"
        assert float(cast(Any, first.flat).inner[0]) == WEIGHT
        seen.append(first.index)

    with running() as device:
        seen: list[int] = []
        job = SlowBackward(device, monkeypatch, others_wait_for_it)
        first = job.queue_backward()
        job.complete(first)
        assert not job.arrive() and seen and not device.faults


def test_a_kept_bucket_is_folded_while_the_rest_of_backward_is_still_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper_folds_it() -> None:
        job.proxies(1)
        for event in job.world.wanted():
            device.finish_event(event)
        assert job.backward_is_queued, "the fold waited for the whole backward pass"
        assert submitted(job.world, first) == WEIGHT
        seen.append(first.index)

    with running() as device:
        seen: list[int] = []
        job = SlowBackward(device, monkeypatch, helper_folds_it)
        first = job.queue_backward()
        job.miss_step()
        job.complete(first)
        assert not job.arrive() and seen and not device.faults


def test_a_bucket_is_reduced_in_another_type_from_memory_that_the_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as device:
        job = SlowBackward(device, monkeypatch, lambda: None)
        with device.on("T0"):
            for bucket in job.engine.applier.buckets:
                bucket.wire = torch.zeros_like(bucket.flat, dtype=torch.float16)  # As for `Compression.fp16`.
        job.queue_backward()
        assert job.arrive() and not device.faults


def kept_of_a_gradient_that_the_program_changes(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> float:
    """What is kept of a late gradient if the program clears its gradients as soon as it has arrived."""
    job = SlowBackward(device, monkeypatch, lambda: None)
    bucket = job.queue_backward()
    job.miss_step()
    job.complete(bucket)
    assert not job.arrive()
    with device.on("T0"):
        bucket.flat.zero_()
        device.finish(device.stream("T0"))
        folded = bucket.new_flat()
        assert job.engine.fold_late(bucket, folded)
    device.finish()
    assert not device.faults
    return float(cast(Any, folded).inner[0])


def test_a_program_changes_late_gradients_only_behind_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as device:
        assert kept_of_a_gradient_that_the_program_changes(device, monkeypatch) == WEIGHT
    with running(BUCKET) as device:
        assert kept_of_a_gradient_that_the_program_changes(device, monkeypatch) == 0.0
