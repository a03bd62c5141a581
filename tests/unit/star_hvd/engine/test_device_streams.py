"""Every hand-over of a tensor between threads, on a stand-in device whose kernels run when the test says so."""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.plan.plan import Plan
from star_hvd.channel.state_transfer import pack_snapshot, unpack_snapshot
from star_hvd.config import Config
from star_hvd.engine import step_engine
from star_hvd.engine.device import BUCKET, COPIED, GRADIENT, HOST, KEPT, MEANS, NORM, PARAMS, SHADOW, SHADOW_READ
from star_hvd.engine.records import Counters, Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.grouped import GroupSteps
from star_hvd.modes.local_sgd import LocalSteps
from star_hvd.modes.ps_worker import ServerSteps
from star_hvd.modes.subgroup_child import ChildSteps
from star_hvd.ps.worker.exchange import Reply
from tests.support.device_world import LR, SIZE, WEIGHT, DeviceWorld, Poisoned, running
from tests.support.effort import cases
from tests.support.fake_device import CUDA0, FakeDevice
from tests.support.world import Port, collected


def job(seed: int, device: FakeDevice, lazy: str = "") -> DeviceWorld:
    """`sync`, then `partial`, for some seeds `sync` again; two or three ranks, kernels in any order."""
    world_size = 2 + seed % 2
    plans = [Plan.partial(world_size, 1, plan_id=1)]
    if seed % 3 == 2:
        plans.append(Plan.sync(world_size, plan_id=2))
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


@pytest.mark.slow
@settings(max_examples=cases(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), lazy=st.sampled_from(["", "HS", "T", "S", "THS"]))
def test_nothing_is_read_or_overwritten_too_early_in_any_order_of_threads_and_kernels(seed: int, lazy: str) -> None:
    with running() as device:
        job(seed, device, lazy).run()
        assert not device.faults


# Per hand-over, schedules in which its fence alone stands between the job and poison: whose kernels run as late as they
# may, and a seed. `bucket` and `host` have tests of their own below.
MUTATIONS: dict[str, list[tuple[str, int]]] = {
    GRADIENT: [("T", 0), ("T", 1), ("", 0)],
    MEANS: [("T", 0), ("T", 1)],
    SHADOW: [("T", 0), ("T", 1)],
    COPIED: [("S", 0), ("S", 1)],
    PARAMS: [("T", 0), ("T", 1)],
    SHADOW_READ: [("S", 5)],
    KEPT: [("T", 9)],
    NORM: [("HS", 0)],
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_its_fence_a_hand_over_delivers_poison(name: str) -> None:
    for lazy, seed in MUTATIONS[name]:
        with running(name) as device:
            world = job(seed, device, lazy)
            try:
                world.run()
            except Poisoned:
                return
    pytest.fail(f"no schedule of {MUTATIONS[name]} shows that the fence of {name!r} is needed")


# ---- modes outside the rounds -------------------------------------------------------------------------------------


def relaxed_pair(device: FakeDevice, plan: Plan) -> DeviceWorld:
    """Two ranks at step 0 of a plan; nothing runs on the device by itself."""
    world = DeviceWorld(1, device, world_size=2, steps=2, lazy="THS")
    for engine in world.engines:
        engine.agreement.plan = plan
    return world


def backward(world: DeviceWorld, rank: int) -> None:
    with world.device.on(f"T{rank}"):
        for _ in world.backward(world.engines[rank]):
            world.engines[rank].outside_gradient()


def host_values(device: FakeDevice, param: torch.nn.Parameter) -> list[float]:
    device.finish()
    values: list[float] = param.inner.tolist()  # type: ignore[attr-defined]
    return values


def fold_of_a_childs_gradient(device: FakeDevice) -> float:
    """What a parent's helper submits after the tensor server has taken over a child's gradient."""
    world = relaxed_pair(device, Plan.partial(2, 1, plan_id=1))
    engine = world.engines[0]
    made = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
    made.engine = engine
    body = b"".join(torch.ones(bucket.numel + 1).numpy().tobytes() for bucket in engine.applier.buckets)
    body += struct.pack(f"<{len(engine.applier.buckets)}d", *[1.0] * len(engine.applier.buckets))
    with device.on("S0"):
        made.accept_late(1, 0, bytearray(body))
    engine.close(0)
    with device.on("H0"):
        engine.helper_tick()
    device.finish(device.stream("H0"))
    submitted = cast(Any, world.network.queues["star.b0"][0][0][1])
    return float(submitted.inner[0])


def test_a_childs_gradient_is_folded_once_it_is_on_the_device() -> None:
    with running() as device:
        assert fold_of_a_childs_gradient(device) == 1.0 and not device.faults
    with running(KEPT) as device:
        assert math.isnan(fold_of_a_childs_gradient(device))


def kept_while_the_next_pass_begins(device: FakeDevice) -> float:
    """What a helper keeps of a gradient that lost its step, where the next backward pass begins at once."""
    world = relaxed_pair(device, Plan.partial(2, 1, plan_id=1))
    engine = world.engines[0]
    with device.on("T0"):
        for bucket in world.backward(engine):
            world.give(engine, bucket)
    engine.close(0)
    with device.on("H0"):
        engine.helper_tick()  # The step goes on without it.
        device.finish(device.stream("T0"))
        assert engine.flush_deferred()
    with device.on("T0"):
        engine.replica.reuse_buckets()
        for bucket in engine.applier.buckets:
            bucket.flat.fill_(math.nan)
        folded = engine.applier.buckets[0].new_flat()
        assert engine.fold_late(engine.applier.buckets[0], folded)
    device.finish(device.stream("T0"))
    device.finish()
    return float(cast(Any, folded).inner[0])


def test_a_bucket_is_not_overwritten_while_the_helper_copies_it() -> None:
    with running() as device:
        assert kept_while_the_next_pass_begins(device) == WEIGHT and not device.faults
    with running(BUCKET) as device:
        assert math.isnan(kept_while_the_next_pass_begins(device))


def served_while_the_shadow_is_taken_over(device: FakeDevice) -> list[float]:
    """Momentum that a tensor server sends of step 1, if the training thread makes step 2 before the copy has run."""
    world = relaxed_pair(device, Plan.partial(2, 1, plan_id=1))
    late, other = world.engines
    with device.on("T1"):
        for bucket in world.backward(other):
            world.give(other, bucket)
        device.finish(device.stream("T1"))
        assert other.flush_deferred() and other.arrive()
    late.close(0)
    with device.on("H0"):
        late.helper_tick()
        device.finish()
        for name in world.network.ready():
            world.network.end(name)
        while late.helper_tick():  # It replays the step on a shadow.
            device.finish()
    with device.on("S0"):
        snapshot = late.replica.queue_snapshot(1, state_too=True)
    with device.on("T0"):
        late.catch_up(late.next_step)
        assert late.step == 1
        for bucket in late.applier.buckets:
            bucket.flat[:-1].fill_(1.0)
            bucket.show_all()
        with late.replica.writing():
            late.applier.step(None)
    device.finish(device.stream("T0"))
    device.finish()
    assert snapshot is not None and snapshot.step == 1
    buffers = cast(list[Any], [state["momentum_buffer"] for state in snapshot.state])
    return [float(value) for buffer in buffers for value in buffer.inner]


def test_a_shadow_is_not_changed_while_the_server_copies_it_although_it_is_taken_over() -> None:
    with running() as device:
        assert set(served_while_the_shadow_is_taken_over(device)) == {1.0} and not device.faults
    with running(SHADOW_READ) as device:
        assert set(served_while_the_shadow_is_taken_over(device)) != {1.0}


def test_a_server_s_answer_does_not_wait_for_the_training_thread_s_kernels() -> None:
    """Every thread's current stream is the program's, unless it takes another."""
    with running() as device:
        world = relaxed_pair(device, Plan.partial(2, 1, plan_id=1))
        made = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
        made.engine = world.engines[0]
        device.finish()
        kernel = torch.zeros(SIZE, device=CUDA0)
        snapshot = made.snapshot(0, state_too=True)
        assert snapshot is not None
        sent = unpack_snapshot(*pack_snapshot(snapshot))
        assert device.current.queue and not device.faults, "the server waited for the kernel"
        world.check_snapshot(sent, 0)
        del kernel


class HostClient:
    """Servers that answer at once; they read what is pushed in host memory, as the real client does."""

    def __init__(self) -> None:
        self.pushed: list[torch.Tensor] = []
        self.version = 0

    def push(self, *, flats: Sequence[torch.Tensor], **given: Any) -> None:
        self.pushed = [flat.detach().cpu() for flat in flats]

    def wait(self, deadline_s: float, *, whole: bool = True) -> Any:
        self.version += 1
        params = [torch.full((len(flat) - 1,), float(self.version)) for flat in self.pushed]
        return Reply("params", self.version, 1, applied=True, params=params)


def pushed_to_servers(device: FakeDevice) -> list[float]:
    world = relaxed_pair(device, Plan.ps(2, 1, servers=(0,)).replace(plan_id=1))
    engine, client = world.engines[0], HostClient()
    with device.on("T0"):
        engine.leave_common_steps()
        steps = ServerSteps(
            engine,
            engine.plan,
            cast(Any, client),
            deadline_s=5.0,
            on_step=lambda info: None,
            on_notes=lambda notes: None,
            plan_of=lambda plan_id: None,
            same_session=lambda one, other: True,
        )
        for _ in range(3):
            backward(world, 0)
            steps.step(skip=False)
    assert all(float(flat.min()) == float(flat.max()) == WEIGHT for flat in client.pushed)
    return host_values(device, engine.applier.buckets[0].params[0])


def test_servers_get_whole_gradients_and_the_host_waits_with_a_deadline() -> None:
    with running() as device:
        assert set(pushed_to_servers(device)) == {3.0} and not device.faults
    with running(HOST) as device:
        pushed_to_servers(device)
        assert "the host waits for the device without a deadline" in device.faults


class HostLink:
    """A parent that has made one step more whenever it is asked."""

    def __init__(self) -> None:
        self.pushed: list[torch.Tensor] = []

    def push(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int:
        self.pushed = [flat.detach().cpu() for flat in flats]
        return version + 1

    def close(self) -> None:
        """Nothing to let go of."""

    def state(self, min_step: int, *, state_too: bool, awaited: bool = False) -> Snapshot:
        return Snapshot(min_step, [torch.full((SIZE,), float(min_step)) for _ in range(3)], [{}, {}, {}])


def pushed_to_a_parent(device: FakeDevice, *, background: bool = False) -> list[float]:
    world = relaxed_pair(device, Plan.subgroup(2, (0,)).replace(plan_id=1))
    engine, link = world.engines[1], HostLink()
    with device.on("T1"):
        engine.leave_common_steps()
        steps = ChildSteps(
            engine,
            engine.plan,
            cast(Any, link),
            ranks=cast(Any, None),
            deadline_s=5.0,
            state_deadline_s=5.0,
            on_step=lambda info: None,
            background=background,
        )
        for _ in range(3):
            backward(world, 1)
            steps.step(skip=False)
            if background:
                steps.catch_up()
        if background:
            steps.exit()
    assert all(float(flat.min()) == float(flat.max()) == WEIGHT for flat in link.pushed)
    return host_values(device, engine.applier.buckets[0].params[0])


def test_a_parent_gets_whole_gradients_and_the_host_waits_with_a_deadline() -> None:
    for background in (False, True):
        with running() as device:
            assert set(pushed_to_a_parent(device, background=background)) == {3.0} and not device.faults
    with running(HOST) as device:
        pushed_to_a_parent(device)
        assert "the host waits for the device without a deadline" in device.faults


def is_held(lock: threading.Condition) -> bool:
    """Whether a thread holds the lock: another one cannot take it."""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return not found[0]


class GuardedCounters(Counters):
    """Counters whose weights are changed under the engine's lock alone: other ranks' gradients arrive at any time."""

    lock: threading.Condition | None = None
    changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if self.lock is not None and name.endswith("_weight"):
            assert is_held(self.lock), name
            super().__setattr__("changes", self.changes + 1)
        super().__setattr__(name, value)


@pytest.mark.parametrize("background", [False, True])
def test_weights_are_counted_under_the_lock(monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    made: list[StepEngine] = []

    def guarded() -> Counters:
        return GuardedCounters()

    def note(engine: StepEngine, *args: Any, **options: Any) -> None:
        init(engine, *args, **options)
        made.append(engine)
        engine.counters.lock = engine.lock  # type: ignore[attr-defined]

    init = StepEngine.__init__
    monkeypatch.setattr(step_engine, "Counters", guarded)
    monkeypatch.setattr(StepEngine, "__init__", note)
    with running() as device:
        pushed_to_a_parent(device, background=background)
        fold_of_a_childs_gradient(device)
    assert any(engine.counters.changes for engine in made)  # type: ignore[attr-defined]


def shared_in_a_group(device: FakeDevice) -> list[float]:
    """A group of two: rank 1 is away, and its proxy in a thread of its own takes part with nothing."""
    world = relaxed_pair(device, Plan.grouped(2, [(0, 1)]).replace(plan_id=1))
    client, engine = HostClient(), world.engines[0]
    member = GroupSteps(
        engine,
        engine.plan,
        cast(Any, client),
        PumpedPort(world),
        (0, 1),
        deadline_s=5.0,
        on_step=lambda info: None,
        on_notes=lambda notes: None,
        plan_of=lambda plan_id: None,
        same_session=lambda one, other: True,
    )
    for _ in range(3):
        backward(world, 0)
        with device.on("T0"):
            member.step(skip=False)
    assert all(float(flat[0]) == WEIGHT for flat in client.pushed)
    return host_values(device, world.engines[0].applier.buckets[0].params[0])


class PumpedPort(Port):
    """Rank 0's collective in a group of two; where it waits, the proxy of rank 1 runs."""

    def __init__(self, world: DeviceWorld) -> None:
        super().__init__(world.network, 0)
        self.world = world
        self.items: list[tuple[str, torch.Tensor]] = []  # Which the proxy has not submitted yet.

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        self.items.append((name, tensor))
        return super().submit(name, tensor)

    def wait(self, handle: int, longest_s: float) -> bool:
        """The proxy, which holds nothing but zeros and its own head, submits the same names."""
        network, device = self.world.network, self.world.device
        items, self.items = self.items, []
        with device.on("G1"), self.world.engines[0].streams.own():
            zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for _, t in items]
            theirs = [network.submit(1, name, zero) for (name, _), zero in zip(items, zeros, strict=True)]
        for name, _ in items:
            for event in self.world.wanted():
                device.finish_event(event)
            network.end(name)
        network.ended -= {*theirs}
        return super().wait(handle, longest_s)


def test_a_group_sums_whole_gradients_and_hands_parameters_out() -> None:
    with running() as device:
        assert set(shared_in_a_group(device)) == {3.0} and not device.faults


class LocalWorld(DeviceWorld):
    """`local(2)`: ranks make different numbers of steps; helpers average for those that have ended theirs."""

    def __init__(self, *given: Any, background: bool = False, **options: Any) -> None:
        self.busy: set[int] = set()
        self.background = background
        super().__init__(*given, **options)

    def _engine(self, rank: int, seed: int, optimizer: str) -> StepEngine:
        engine = super()._engine(rank, seed, optimizer)
        engine.agreement.plan = self.known[1] = Plan.local(self.world_size, steps=2).replace(plan_id=1)
        engine.averaging = LocalSteps(engine, functools.partial(self.wait, engine), background=self.background)
        return engine

    def wait(self, engine: StepEngine) -> None:
        """The training thread waits for an averaging; everybody else goes on."""
        stream = self.device.current
        for _ in collected(engine):
            self.device.current = stream
            self.now_s += 1.0
            self._tick()
            self.device.current = stream

    def _advance(self, rank: int) -> None:
        if rank not in self.busy:
            self.busy.add(rank)
            super()._advance(rank)
            self.busy.discard(rank)

    def _train(self, rank: int) -> Iterator[None]:
        engine = self.engines[rank]
        steps = cast(LocalSteps, engine.averaging).begin()
        for _ in range(2 * max(1, self.lengths[rank] // 2)):
            yield
            for bucket in self.backward(engine):
                steps.give(bucket)
            yield
            engine.streams.await_host()  # As `StepDriver.step_in_mode` does.
            steps.step(skip=False)
            engine.replica.reuse_buckets()
        engine.set_inactive(True)
        self.inbox.append(("leave", rank, ()))

    def check_params(self, params: Sequence[torch.Tensor], version: int, where: str) -> None:
        """Between two averagings a rank's parameters are its own: of a snapshot only poison is known to be wrong."""
        if where.startswith("a snapshot"):
            if not all(bool(torch.isfinite(param).all()) for param in params):
                raise Poisoned(f"{where}: {params}")
        else:
            super().check_params(params, version, where)

    def check_snapshot(self, sent: Snapshot, rank: int) -> None:
        self.check_params(sent.params, sent.step, f"a snapshot of rank {rank}")

    def expected(self, version: int) -> float:
        return super().expected(2 * version)  # Steps that are averagings.

    def _settle(self) -> None:
        for engine in self.engines:
            with self.device.on(f"T{engine.rank}"):
                cast(LocalSteps, engine.averaging).refresh_state()
        self.device.finish()
        self.check()

    def _check_norms(self, ears: Any) -> None:
        """Nothing is sampled: the buffers hold parameters."""


def averaged_job(seed: int, device: FakeDevice, lazy: str, *, background: bool = False) -> LocalWorld:
    return LocalWorld(seed, device, kernels=0.4, lazy=lazy, world_size=2 + seed % 2, steps=6, background=background)


@settings(max_examples=cases(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), lazy=st.sampled_from(["", "HS", "T"]), background=st.booleans())
def test_averagings_of_local_steps_hold_no_poison(seed: int, lazy: str, background: bool) -> None:
    with running() as device:
        averaged_job(seed, device, lazy, background=background).run()
        assert not device.faults


def test_a_local_step_looks_at_the_device_for_late_gradients_alone() -> None:
    """A look for each bucket in each step would cost more than the step's arithmetic."""
    with running() as device:
        world = relaxed_pair(device, Plan.local(2, steps=9).replace(plan_id=1))
        engine = world.engines[0]
        steps = LocalSteps(engine, lambda: None).begin()
        backward(world, 0)
        device.used.clear()
        with device.on("T0"):
            steps.step(skip=False)
            assert HOST not in device.used
            late = [bucket.new_flat().fill_(1.0) for bucket in engine.applier.buckets]
            engine.keep_late(late, 0, weights=[1.0] * len(late))
            backward(world, 0)
            steps.step(skip=False)
        assert HOST in device.used and not device.faults
        velocity = 0.5 * 1.0 + 1.0  # The mean of two gradients of 1.
        assert set(host_values(device, engine.applier.buckets[0].params[0])) == {-(LR + LR * velocity)}
