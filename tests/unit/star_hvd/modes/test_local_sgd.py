"""Averagings of local steps: what the host waits for, and under which locks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scheduler.records import Plan
from star_hvd.engine.replica import ReplicaState
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.local_sgd import LocalSteps
from tests.support.world import World


def alone() -> tuple[World, StepEngine, LocalSteps]:
    """The only rank of a job, which has entered `local(1)`."""
    world = World(1, world_size=1, steps=2)
    world.run()
    engine = world.engines[0]

    def end_reductions() -> None:
        for name in world.network.ready():
            world.network.end(name)
        for handle in engine.own_handles():
            engine.collective.finish(handle)

    steps = LocalSteps(engine, end_reductions)
    engine.averaging = steps
    with engine.lock:
        engine.agreement.plan = Plan.local(1, steps=1, plan_id=1)
    return world, engine, steps.begin()


def watch_waits(engine: StepEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether another thread could have `apply_lock`, at every wait of the host for the device."""
    free: list[bool] = []

    def try_lock() -> bool:
        taken = engine.replica.apply_lock.acquire(blocking=False)
        if taken:
            engine.replica.apply_lock.release()
        return taken

    def await_host(deadline_s: float = 0.0) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(try_lock).result())

    monkeypatch.setattr(engine.streams, "await_host", await_host)
    return free


def test_an_averaging_of_the_training_thread_waits_for_the_device_without_a_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, engine, steps = alone()
    before = [param.detach().clone() for bucket in engine.applier.buckets for param in bucket.params]
    free, step = watch_waits(engine, monkeypatch), engine.step
    steps.average()
    assert free and all(free), "the helper and the tensor server wait for a device here"
    after = [param for bucket in engine.applier.buckets for param in bucket.params]
    assert engine.step == step + 1
    assert all(torch.allclose(a, b) for a, b in zip(before, after, strict=True)), "the mean of one rank is its own"


def averaging_without_the_training_thread(world: World, engine: StepEngine) -> None:
    engine.set_inactive(True)
    engine.close(engine.next_step)
    while engine.helper_has_work() and engine.replica.state is not ReplicaState.AVERAGE_PENDING:
        engine.helper_tick()
        for name in world.network.ready():
            world.network.end(name)
    engine.set_inactive(False)


@pytest.mark.parametrize("by_helper", [True, False])
def test_an_averaging_that_ended_without_it_waits_for_the_device_without_a_lock(
    monkeypatch: pytest.MonkeyPatch, by_helper: bool
) -> None:
    world, engine, steps = alone()
    averaging_without_the_training_thread(world, engine)
    assert steps.waiting and engine.replica.snapshot() is None
    free = watch_waits(engine, monkeypatch)
    if by_helper:
        assert steps.absorb() and not steps.waiting
        assert engine.replica.snapshot() is not None, "what the helper has on its shadow may be fetched"
    steps.take_over()
    assert engine.replica.state is ReplicaState.CURRENT and engine.step == engine.next_step
    assert free and free[0], "the other threads wait for a device here"
