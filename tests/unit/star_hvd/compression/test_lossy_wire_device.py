"""`Compression.auto` on the stand-in device: what one thread encodes another decodes, on streams of their own."""

from __future__ import annotations

import pytest
import torch

from scheduler.plan.plan import Plan
from scheduler.transmission.wire import HALF, LOW_RANK, NONE
from star_hvd.compression.bucket_codec import BucketCodec
from star_hvd.compression.lossy_wire import LossyWire
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.device import KEPT, Streams
from tests.support.device_world import DeviceWorld, Poisoned, running
from tests.support.fake_device import CUDA0, FakeDevice
from tests.unit.star_hvd.compression.test_lossy_wire import SIDE, AnyForm


class LossyDeviceWorld(DeviceWorld):
    """The leader asks for forms at random; of parameters it is known only that they are numbers, equal on all ranks."""

    shape = (SIDE, SIDE)

    def wire(self, buckets: list[Bucket], rank: int, seed: int) -> LossyWire:
        return LossyWire(buckets, AnyForm(seed + rank, [NONE, HALF, LOW_RANK, LOW_RANK]))

    def check(self) -> None:
        super().check()
        params = [[p.inner for b in engine.applier.buckets for p in b.params] for engine in self.engines]  # type: ignore[attr-defined]
        for each in params[1:]:
            assert all(torch.equal(one, other) for one, other in zip(params[0], each, strict=True)), "replicas differ"
        assert all(float(param.abs().min()) > 0.0 for param in params[0]), "nothing was learned"

    def _check_norms(self, ears: object) -> None:
        """Residuals are in the means."""


def job(seed: int, device: FakeDevice, lazy: str) -> LossyDeviceWorld:
    world_size = 2 + seed % 2
    plans = [Plan.partial(world_size, 1, plan_id=1)] if seed % 4 else []
    return LossyDeviceWorld(
        seed, device, kernels=0.4, lazy=lazy, world_size=world_size, steps=6, plans=plans, optimizer="adam"
    )


@pytest.mark.slow
@pytest.mark.parametrize("lazy", ["", "HS", "T"])
def test_lossy_forms_in_any_order_of_threads_and_kernels(lazy: str) -> None:
    for seed in range(4):
        with running() as device:
            world = job(seed, device, lazy)
            world.run()
            assert not device.faults


def test_residuals_and_bases_are_handed_over_with_a_fence() -> None:
    for lazy, seed in (("T", 4), ("T", 7), ("T", 8), ("T", 9)):
        with running(KEPT) as device:
            world = job(seed, device, lazy)
            try:
                world.run()
            except (Poisoned, AssertionError):
                return
            if device.faults:
                return
    pytest.fail("no schedule shows that the fence is needed")


@pytest.mark.parametrize("form", [HALF, LOW_RANK])
def test_the_host_looks_at_the_device_once_for_all_buckets_of_a_step_and_never_where_a_plan_begins(
    form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as device:
        buckets = pack([torch.nn.Parameter(torch.zeros(SIDE, SIDE, device=CUDA0)) for _ in range(3)], 4 * SIDE**2)
        assert len(buckets) == 3
        wire = LossyWire(buckets, AnyForm(0, [form]))
        wire.begin(Streams(buckets, device), 0, 1)
        wire.ended(form)
        device.finish()
        for bucket in buckets:
            bucket.flat.fill_(1.0)
            wire.decode(bucket, wire.encode(bucket, bucket.flat, weight=1.0), bucket.flat)
        assert len(device.current.queue) > 3 and not device.faults, "the host waited for a bucket"
        wire.decoded()
        assert not device.faults
        buckets[0].flat.fill_(float("inf"))
        wire.decode(buckets[0], wire.encode(buckets[0], buckets[0].flat, weight=1.0), buckets[0].flat)
        wire.decoded()
        assert not device.faults
        device.finish()
        buckets[0].flat.fill_(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(device, "upload", None)  # It would wait for the device, and under locks in a job.
            wire.restart()
        wire.ended(form)
        wire.decode(buckets[0], wire.encode(buckets[0], buckets[0].flat, weight=1.0), buckets[0].flat)
        device.finish()
        assert bool(torch.isfinite(buckets[0].flat.inner).all())  # type: ignore[attr-defined]


def residual_of_a_checkpoint(device: FakeDevice) -> list[float]:
    """What the training thread saves while the helper already encodes the next contribution."""
    with device.on("T0"):
        [bucket] = pack([torch.nn.Parameter(torch.zeros(SIDE, device=CUDA0))], 1 << 20)
        codec = BucketCodec(bucket, Streams([bucket], device), 2)
        bucket.flat.fill_(1.0 + 2.0**-13)
        codec.encode(bucket.flat, HALF, weight=1.0)
        device.finish()
        residuals = codec.residuals()
    with device.on("H0"):
        codec.encode(bucket.new_flat().fill_(3.0 + 2.0**-10), HALF, weight=1.0)
        device.finish(device.stream("H0"))
    device.finish()
    assert residuals is not None
    saved: list[float] = residuals[0].inner.tolist()  # type: ignore[attr-defined]
    return saved


def test_a_residual_is_not_changed_while_a_checkpoint_copies_it() -> None:
    with running() as device:
        assert set(residual_of_a_checkpoint(device)) == {2.0**-13} and not device.faults
    with running(KEPT) as device:
        assert set(residual_of_a_checkpoint(device)) != {2.0**-13}
