"""What belongs on the host and what on the parameters' device, whatever the user's defaults are."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.channel.messages import base as messages
from star_hvd.config import Config
from star_hvd.engine.applier import place_state
from star_hvd.engine.buckets import Wire
from star_hvd.engine.device import CUDA, DONE, GRADIENT, Streams
from star_hvd.engine.records import Snapshot
from star_hvd.modes import driver as driver_module
from star_hvd.modes.driver import StepDriver
from star_hvd.wrapper.restrictions import lockstep_only
from tests.support.device_world import DeviceWorld, running
from tests.support.fake_device import CUDA0, FakeDevice
from tests.support.world import World

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = [
    (torch.optim.Adam, {}, "cpu"),
    (torch.optim.Adam, {"capturable": True}, "cuda"),
    (torch.optim.AdamW, {"fused": True}, "cuda"),
    (torch.optim.AdamW, {"foreach": True}, "cpu"),
    (torch.optim.ASGD, {}, "cuda"),
    (torch.optim.NAdam, {}, "cpu"),
]


@pytest.mark.parametrize("base, options, place", OPTIMIZERS)
def test_fetched_state_goes_where_the_optimizer_wants_it(base: Any, options: dict[str, Any], place: str) -> None:
    with running():
        param = torch.nn.Parameter(torch.zeros(3, device=CUDA0))
        optimizer = base([torch.zeros(3, requires_grad=True)], lr=0.1)
        optimizer.param_groups[0].update(options, params=[param])
        placed = place_state(optimizer, param, {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "kind": "x"})
        assert placed["exp_avg"].device == CUDA0 and placed["step"].device.type == place and placed["kind"] == "x"


def test_a_scalar_stays_where_the_optimizer_has_it_already() -> None:
    with running():
        param = torch.nn.Parameter(torch.zeros(3, device=CUDA0))
        optimizer = torch.optim.Adam([torch.zeros(3, requires_grad=True)])
        optimizer.param_groups[0]["params"] = [param]
        optimizer.state[param] = {"step": torch.zeros((), device=CUDA0)}
        assert place_state(optimizer, param, {"step": torch.tensor(3.0)})["step"].device == CUDA0


def test_a_rank_goes_on_with_a_fetched_state_on_its_device() -> None:
    """An Adam whose moments were left on the host could not make another step."""
    with running() as device:
        world = DeviceWorld(1, device, world_size=2, steps=2, optimizer="adam")
        engine = world.engines[0]
        params = [torch.ones(5) for _ in range(3)]
        state: list[dict[str, object]] = [
            {"step": torch.tensor(4.0), "exp_avg": torch.zeros(5), "exp_avg_sq": torch.ones(5)} for _ in params
        ]
        with device.on("T0"):
            engine.replica.cannot_replay(0)
            assert engine.adopt(Snapshot(0, params, state))
            for bucket in world.backward(engine):
                assert bucket.params
            engine.applier.step(None)
            for bucket in engine.applier.buckets:
                own = engine.applier.optimizer.state[bucket.params[0]]
                assert own["exp_avg"].device == CUDA0 and own["step"].device.type == "cpu"


def test_headers_are_the_hosts_whatever_the_defaults() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            world = World(0, world_size=2, steps=2)  # Of float64: the header travels as a tensor of its own.
        for engine in world.engines:
            for bucket in engine.applier.buckets:
                bucket.flat.fill_(1.0)
                engine.gradient_ready(bucket.index)
            assert engine.arrive()
            header = engine.own_step().header
            assert header is not None and header.device.type == "cpu" and header.dtype == torch.float32
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def on(kind: str, **group: Any) -> str | None:
    bucket = SimpleNamespace(flat=SimpleNamespace(device=torch.device(kind)))
    return lockstep_only([cast(Any, bucket)], [group])


def test_devices_on_which_relaxed_modes_are_possible() -> None:
    assert on("cpu") is None and on("cuda") is None
    assert "xpu" in str(on("xpu")), "fences know CUDA only"
    with running():
        assert "hyperparameter" in str(on("cuda", lr=torch.zeros((), device=CUDA0)))


@pytest.mark.parametrize("name", ["HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"])
def test_where_horovod_does_not_wait_for_the_device_helpers_are_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod reads a variable by `strtol`, and it is on if that is positive."""
    for value, counts in (("1", True), (" +2x", True), ("0", False), ("-1", False), ("true", False), ("", False)):
        monkeypatch.setenv(name, value)
        assert (on("cuda") is not None) == counts and on("cpu") is None
        assert not counts or name in str(on("cuda"))


class Heard:
    """Messages of a driver."""

    def __init__(self) -> None:
        self.compute_s: list[float] = []

    def __call__(self, message: Any, *, urgent: bool = True) -> None:
        if isinstance(message, messages.Arrive):
            self.compute_s.append(message.times.compute_s)


def timed(device: FakeDevice, plan: Plan, heard: Heard) -> tuple[DeviceWorld, StepDriver]:
    """Rank 0 of two with its driver; the other rank's helper has submitted nothing but zeros."""
    made = StepDriver(0, Config(), heard, cast(Any, None), str, lambda task: None)

    class Reporting(DeviceWorld):
        def listener(self, rank: int) -> Any:
            return made.reporter if rank == 0 else super().listener(rank)

    world = Reporting(1, device, world_size=2, steps=2, lazy="T")
    for engine in world.engines:
        engine.agreement.plan = plan
    engine = world.engines[0]
    made.engine, made.switcher = engine, cast(Any, SimpleNamespace(active_mode=None))
    made.reporter.start(engine)
    world.engines[1].set_inactive(True)
    world.engines[1].close(0)
    with device.on("H1"):
        world.engines[1].helper_tick()
    return world, made


class _Waits(Wire):
    """Notes from when on the training thread waits for the others."""

    def arrived(self) -> None:
        self.arrived_s = time.monotonic()

    def computed(self, ago_s: float) -> None:
        self.computed_s = time.monotonic() - ago_s


@pytest.mark.parametrize("plan", [Plan.sync(2), Plan.partial(2, 1, plan_id=1)])
def test_compute_time_ends_when_the_device_is_done(plan: Plan) -> None:
    """In `sync` the step is submitted before that, and nothing waits for the device; a relaxed step must not be."""
    heard = Heard()
    submitted_before: list[bool] = []
    with running() as device:
        world, made = timed(device, plan, heard)

        def kernels_end(seconds: float = 0.0) -> None:
            """50 ms after the training thread has begun to wait for them, or for the reduction."""
            if device.stream("T0").queue and not submitted_before:
                time.sleep(0.05)
                submitted_before.append(made.engine.under_way()[2])
            device.finish()
            for name in world.network.ready():
                world.network.end(name)

        wire = made.engine.wire = _Waits()
        poll = world.engines[0].collective.poll
        made.engine.collective.poll = lambda handle: (kernels_end(), poll(handle))[1]  # type: ignore[method-assign]
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=kernels_end)
        with mock.patch.object(driver_module, "time", clock), device.on("T0"):
            made.timer.start()
            for bucket in world.backward(made.engine):
                made.give(bucket)
            assert made.arrive(manual=False)
            made.complete()
    assert submitted_before == [not plan.relaxed]
    assert len(heard.compute_s) == 1 and heard.compute_s[0] >= 0.05
    assert plan.relaxed or wire.computed_s - wire.arrived_s >= 0.05, "the wait for kernels counts as one for the others"


def test_on_a_cpu_there_is_nothing_to_make_or_to_wait_for() -> None:
    world = World(1, world_size=2, steps=2)
    streams = world.engines[0].streams
    assert streams.devices == () and streams.give(GRADIENT) is DONE and DONE.done()
    began_s = time.thread_time()  # Of the processor: other processes may have it for seconds.
    for _ in range(1000):
        streams.give(GRADIENT).order()
        streams.await_host()
    assert time.thread_time() - began_s < 1.0  # Microseconds each.


def test_streams_know_the_devices_of_buckets_that_come_later() -> None:
    with running() as device:
        world = DeviceWorld(1, device, world_size=1, steps=2)
        buckets = list(world.engines[0].applier.buckets)
        some: list[Any] = []
        streams = Streams(some, device)
        assert streams.devices == ()
        some.extend(buckets)
        streams.renew()
        assert streams.devices == (CUDA0,)


def test_a_thread_with_streams_of_its_own_uses_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of torch's C++ part: setting a device creates a CUDA context there, except by `maybe`."""
    present, contexts = [0], set()

    def exchange(index: int) -> int:
        before, present[0] = present[0], index
        contexts.add(index)
        return before

    def maybe(index: int) -> int:
        return exchange(index) if index in contexts else present[0]

    def stream_of(device: Any = None, priority: int = 0) -> Any:
        return SimpleNamespace(device=torch.device("cuda", present[0]) if device is None else device)

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", maybe)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: present[0])
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: exchange(stream.device.index))
    monkeypatch.setattr(torch.cuda, "Stream", stream_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    inside = []

    def work() -> None:
        for _ in range(2):
            with CUDA.own_streams([torch.device("cuda:1")]):
                inside.append(present[0])

    thread = threading.Thread(target=work)  # Streams stay with their thread.
    thread.start()
    thread.join()
    assert inside == [1, 1] and contexts == {1}
