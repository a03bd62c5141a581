"""A job of engines (`world.py`) on fake devices: kernels run when the scheduler picks their stream.

Every step starts with kernels that fill the buckets with NaN, and every gradient is exactly 1. So every mean is 1, for
any members and weights, and the parameters of a step are known: any other number in a replica, a snapshot or a header
comes from memory that was read or overwritten too early.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.channel.state_transfer import pack_snapshot, unpack_snapshot
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, Wire, pack
from star_hvd.engine.device import GRADIENT, Streams
from star_hvd.engine.header import Header
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from tests.support.fake_device import CUDA0, FakeDevice, FakeEvent, Lazy
from tests.support.world import Ears, Network, Port, World, collected, plain_optimizer

__all__ = ["LR", "SIZE", "WEIGHT", "DeviceWorld", "Poisoned", "running"]

LR, MOMENTUM = 2.0**-6, 0.5
SIZE = 5
WEIGHT = 2.0  # Not 1: a sum that was not divided by its weights must differ from a mean.


class Poisoned(AssertionError):
    """A tensor has a value that no valid order of the requested operations can give."""


class DeviceNetwork(Network):
    """All-reduce on raw memory that starts, like Horovod, once the submitting streams have reached the submission."""

    def __init__(self, world_size: int, device: FakeDevice) -> None:
        super().__init__(world_size)
        self._device = device
        self._begin: dict[int, FakeEvent] = {}

    def submit(self, rank: int, name: str, tensor: torch.Tensor) -> int:
        handle = super().submit(rank, name, tensor)
        event = FakeEvent("horovod", self._device, happened=not isinstance(tensor, Lazy))
        if not event.happened:
            self._device.current.queue.append(("record", event))
        self._begin[handle] = event
        return handle

    def ready(self) -> list[str]:
        return [name for name in super().ready() if all(self._begin[q[0][0]].happened for q in self.queues[name])]

    def wanted(self) -> list[FakeEvent]:
        """Return the events that reductions submitted by all ranks still wait for."""
        names = super().ready()
        events = (self._begin[queue[0][0]] for name in names for queue in self.queues[name])
        return [event for event in events if not event.happened]

    def end(self, name: str) -> None:
        items = [queue.popleft() for queue in self.queues[name]]
        raw = [tensor.inner if isinstance(tensor, Lazy) else tensor for _, tensor in items]
        total = torch.stack([tensor.double() for tensor in raw]).sum(0)
        for (handle, _), tensor in zip(items, raw, strict=True):
            tensor.copy_(total)
            self.ended.add(handle)


class DeviceEars(Ears):
    """Listener that also keeps the norms of the means."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.norms: list[tuple[int, Header, float]] = []

    def on_step_end(self, step: int, header: Header, plan: Plan, mean_sqr: float, sent_bytes: int) -> None:
        super().on_step_end(step, header, plan, mean_sqr, sent_bytes)
        self.norms.append((step, header, mean_sqr))


class DeviceWorld(World):
    """See the module's docstring.

    Args:
        seed: Determines speeds and interleaving.
        device: The fake device; `device.running()` must be active.
        kernels: Probability that a tick runs kernels instead of a thread.
        lazy: Roles (T training thread, H helper, S tensor server) whose kernels run only when something waits for
            them; kernels of other roles overtake them wherever no fence prevents it.
        optimizer: `sgd` or `adam`; for `adam` only the absence of NaN and equality of the replicas are checked.
        **options: See `World`.
    """

    shape: tuple[int, ...] = (SIZE,)

    def __init__(
        self,
        seed: int,
        device: FakeDevice,
        *,
        kernels: float = 0.4,
        lazy: str = "",
        optimizer: str = "sgd",
        **options: Any,
    ) -> None:
        self.device = device
        self._lazy = lazy
        self._optimizer = optimizer
        super().__init__(seed, optimizer=optimizer, **options)
        self._kernels = kernels
        self.snapshots, self._most_snapshots = 0, 30
        self._copies: dict[int, Snapshot] = {}
        for engine in self.engines:
            device.locks.append(engine.lock)
        self.hurry = {name: self.random.choice([1.0, 1.0, 0.2, 0.1]) for name in device.streams}

    def _engine(self, rank: int, seed: int, optimizer: str) -> StepEngine:
        if rank == 0:
            self.network = DeviceNetwork(self.world_size, self.device)
            self.ears = [DeviceEars(self, number) for number in range(self.world_size)]
        for name in (f"H{rank}", f"S{rank}", f"T{rank}'s own"):
            self.device.stream(name)
        with self.device.on(f"T{rank}"):
            params = [torch.nn.Parameter(torch.zeros(self.shape, device=CUDA0)) for _ in range(3)]
            base, opt = plain_optimizer(optimizer, params, lr=LR, momentum=MOMENTUM)
            buckets = pack(params, 4 * params[0].numel())
            streams = Streams(buckets, self.device)
            applier = Applier(opt, base, buckets, HyperRow(opt.param_groups), streams=streams)
            engine = StepEngine(
                rank=rank,
                plan=self.first,
                applier=applier,
                collective=Port(self.network, rank),
                listener=self.listener(rank),
                replay_queue=4,
                noise_interval_steps=2,
                wire=self.wire(buckets, rank, seed),
            )
            engine.own.weight = WEIGHT
            return engine

    def wire(self, buckets: list[Bucket], rank: int, seed: int) -> Wire | None:
        """Return how the gradients of a rank are encoded; None here."""
        return None

    # ---- actors ---------------------------------------------------------------------------------------------

    def backward(self, engine: StepEngine) -> Iterator[Bucket]:
        """Queue a backward pass; each bucket is yielded once its last kernel is queued."""
        buckets = engine.applier.buckets
        for bucket in buckets:
            bucket.flat.fill_(math.nan)
        for bucket in self.random.sample(buckets, len(buckets)):
            bucket.flat[:-1].fill_(1.0)
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
            yield bucket

    def give(self, engine: StepEngine, bucket: Bucket) -> None:
        """Hand a bucket to the engine as `StepDriver.give` does."""
        if engine.plan.relaxed:
            engine.defer(bucket.index, engine.streams.give_one(GRADIENT, bucket.flat))
        else:
            engine.gradient_ready(bucket.index)

    def _train(self, rank: int) -> Iterator[None]:
        engine = self.engines[rank]
        for _ in range(self.lengths[rank]):
            manual = self.random.random() < self.manual_share
            yield
            for bucket in self.backward(engine):
                self.give(engine, bucket)
                yield
            while not self._flush(engine):
                yield
            engine.replica.reuse_buckets()
            member = engine.arrive(manual=manual)
            if member:
                yield from self._own_step(engine)
            yield from self._catch_up(engine)
            engine.replica.reuse_buckets()
            if not member:
                engine.note_joined()
        engine.set_inactive(True)
        self.inbox.append(("leave", rank, ()))

    @staticmethod
    def _flush(engine: StepEngine) -> bool:
        """Submit what is complete as `StepDriver.arrive` does."""
        with engine.streams.own():
            return engine.flush_deferred()

    def _own_step(self, engine: StepEngine) -> Iterator[None]:
        yield from collected(engine)
        result = engine.finish_own()
        yield
        engine.apply_own(result)
        yield

    def _catch_up(self, engine: StepEngine) -> Iterator[None]:
        target = engine.next_step
        while not engine.catch_up(target):
            yield
            if engine.needs_fetch:
                snapshot = self.snapshot(self.random.choice([e for e in self.engines if e is not engine]))
                if snapshot is not None:
                    engine.adopt(snapshot)

    def snapshot(self, engine: StepEngine) -> Snapshot | None:
        """Return the snapshot that the tensor server of a rank sends."""
        with self.device.on(f"S{engine.rank}"):
            snapshot = engine.replica.snapshot()
            if snapshot is None:
                return None
            self.snapshots += 1
            on_host = snapshot.on_host()
        sent = unpack_snapshot(*pack_snapshot(on_host))
        self.check_snapshot(sent, engine.rank)
        return sent

    def _advance(self, rank: int) -> None:
        with self.device.on(f"T{rank}"):
            super()._advance(rank)

    def _tick(self) -> None:
        pick, rank = self.random.random(), self.random.randrange(self.world_size)
        if pick < self._kernels:
            self._run_kernels()
            return
        pick = (pick - self._kernels) / (1.0 - self._kernels)
        if pick < 0.4:
            if self.random.random() < self.speed[rank]:
                self._advance(rank)
        elif pick < 0.65:
            with self.device.on(f"H{rank}"):
                self.engines[rank].helper_tick()
        elif pick < 0.8:
            names = self.network.ready()
            if names:
                self.network.end(self.random.choice(names))
        elif pick < 0.9:
            self._coordinate()
        elif pick < 0.98:
            self._deliver(rank)
        elif rank in self._copies or self.snapshots < self._most_snapshots:
            self._serve(self.engines[rank])

    def _serve(self, engine: StepEngine) -> None:
        """Run half of the tensor server's work: queue its copy on one call, wait for it and send it on the next."""
        copy = self._copies.pop(engine.rank, None)
        with self.device.on(f"S{engine.rank}"):
            if copy is None:
                copy = engine.replica.queue_snapshot(0, state_too=True)
                if copy is not None:
                    self._copies[engine.rank] = copy
                    self.snapshots += 1
                return
            engine.streams.await_host()
            on_host = copy.on_host()
        sent = unpack_snapshot(*pack_snapshot(on_host))
        self.check_snapshot(sent, engine.rank)

    def _run_kernels(self) -> None:
        name = self.random.choice(list(self.hurry))
        if name[0] in self._lazy:
            wanted = [*self.wanted(), *([self.device.asked] if self.device.asked else [])]
            if wanted:
                self.device.finish_event(self.random.choice(wanted))
        elif self.random.random() < self.hurry[name]:
            for _ in range(self.random.choice([1, 3, 20])):
                if not self.device.streams[name].advance():
                    break

    def wanted(self) -> list[FakeEvent]:
        assert isinstance(self.network, DeviceNetwork)
        return self.network.wanted()

    def _quiet(self) -> bool:
        if not super()._quiet():
            return False
        busy = [stream for stream in self.device.streams.values() if stream.queue]
        for stream in busy:  # Only kernels are left, which end eventually.
            stream.advance()
        return not busy

    def _settle(self) -> None:
        for engine in self.engines:
            with self.device.on(f"T{engine.rank}"):
                for _ in self._catch_up(engine):
                    pass
        self.device.finish()
        self.check()

    # ---- what must hold -----------------------------------------------------------------------------------------

    def expected(self, version: int) -> float:
        """Return a parameter's value after `version` steps with a mean of 1."""
        return -LR * sum(self.expected_momentum(step) for step in range(1, version + 1))

    def expected_momentum(self, version: int) -> float:
        """Return a parameter's momentum after `version` steps with a mean of 1."""
        velocity = 0.0
        for _ in range(version):
            velocity = MOMENTUM * velocity + 1.0
        return velocity

    def check_snapshot(self, sent: Snapshot, rank: int) -> None:
        """Check that parameters and optimizer state that a rank's tensor server sends are those of their step.

        Raises:
            Poisoned: They are not.
        """
        where = f"a snapshot of rank {rank}"
        self.check_params(sent.params, sent.step, where)
        tensors = [value for state in sent.state for value in state.values() if isinstance(value, torch.Tensor)]
        for value in tensors:
            bad = not bool(torch.isfinite(value).all())
            if self._optimizer == "sgd":
                bad = bad or bool((value != self.expected_momentum(sent.step)).any())
            if bad:
                raise Poisoned(f"{where}, state at step {sent.step}: {value.tolist()}")

    def check_params(self, params: Sequence[torch.Tensor], version: int, where: str) -> None:
        """Check that parameters in host memory are those of step `version`.

        Raises:
            Poisoned: They are not.
        """
        for param in params:
            bad = not bool(torch.isfinite(param).all())
            if self._optimizer == "sgd":
                bad = bad or bool((param != self.expected(version)).any())
            if bad:
                raise Poisoned(f"{where} at step {version}: {param.tolist()}, expected {self.expected(version)}")

    def check(self) -> None:
        """Check everything that must hold at the end.

        Raises:
            Poisoned: A replica, a norm or a counter is wrong.
        """
        for engine in self.engines:
            params = [p.inner for bucket in engine.applier.buckets for p in bucket.params]  # type: ignore[attr-defined]
            self.check_params(params, engine.step, f"the replica of rank {engine.rank}")
        first = self.engines[0]
        for engine, ears in zip(self.engines, self.ears, strict=True):
            assert engine.step == engine.next_step == first.step and ears.mismatches == []
            assert isinstance(ears, DeviceEars)
            self._check_norms(ears)

    def _check_norms(self, ears: DeviceEars) -> None:
        whole = 3.0 * SIZE  # Squared norm of a gradient.
        told = self.world_size * WEIGHT * whole
        for step, header, mean_sqr in ears.norms:
            if step % 2 == 0 and all(header.fresh):
                local_ok = header.local_count == self.world_size and math.isclose(header.local_sqr, told, rel_tol=1e-5)
                if not local_ok or not math.isclose(mean_sqr, whole, rel_tol=1e-5):
                    raise Poisoned(
                        f"norms of step {step}: {header.local_count} of {self.world_size} ranks told "
                        f"{header.local_sqr:g}, expected {told:g}; the mean's is {mean_sqr:g}"
                    )


@contextlib.contextmanager
def running(*disabled: str) -> Iterator[FakeDevice]:
    """Activate a fake device, with the fences of some hand-overs disabled."""
    with FakeDevice(disabled).running() as device:
        yield device
