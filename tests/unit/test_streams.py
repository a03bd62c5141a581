"""Every hand-over of a tensor between threads, on a stand-in device whose kernels run when the test says so."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.records import Plan
from tests.support.device_world import DeviceWorld, Poisoned, running
from tests.support.fake_device import FakeDevice


def job(seed: int, device: FakeDevice, lazy: str = "") -> DeviceWorld:
    """`sync`, then `partial`, for some seeds `sync` again; two or three ranks, kernels in any order."""
    world_size = 2 + seed % 2
    plans = [Plan.partial(world_size, 1, epoch=1)]
    if seed % 3 == 2:
        plans.append(Plan.sync(world_size, epoch=2))
    return DeviceWorld(
        seed,
        device,
        kernels=(0.15, 0.3, 0.5)[seed % 3],
        lazy=lazy,
        world_size=world_size,
        steps=6,
        plans=plans,
        manual_share=0.3 if seed % 4 == 3 else 0.0,
        optimizer="adam" if seed % 7 == 6 else "sgd",
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), lazy=st.sampled_from(["", "HS", "T", "S", "THS"]))
def test_nothing_is_read_or_overwritten_too_early_in_any_order_of_threads_and_kernels(seed: int, lazy: str) -> None:
    with running() as device:
        job(seed, device, lazy).run()
        assert not device.faults
