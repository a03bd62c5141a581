"""A whole job in one thread: engines of all ranks, an all-reduce, a coordinator, and a random scheduler.

Every actor (training program, helper, network, coordinator) makes one small move when it is picked, so a seed fixes the
interleaving exactly. Gradients are one-hot: each gradient of a rank has its one at a different index, so the
reduced sums show for every single gradient how often and with which weight it was applied.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

from scheduler.records import Plan
from scheduler.rules.step_closing import ClosingRule
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.collective import poll_for
from star_hvd.engine.header import Header
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.step_engine import StepEngine

Event = tuple[str, int, tuple[Any, ...]]


class Network:
    """In-place sum all-reduce whose operations end one at a time, when the scheduler says so. For any thread."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.queues: dict[str, list[deque[tuple[int, torch.Tensor]]]] = {}
        self.ended: set[int] = set()
        self.sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._next = 0
        self._lock = threading.Lock()  # Collectives with a thread of their own submit beside the test's thread.

    def submit(self, rank: int, name: str, tensor: torch.Tensor) -> int:
        with self._lock:
            self._next += 1
            queues = self.queues.setdefault(name, [deque() for _ in range(self.world_size)])
            assert not queues[rank], f"rank {rank} submitted {name} twice: Horovod refuses a name that is in flight"
            queues[rank].append((self._next, tensor))
            return self._next

    def ready(self) -> list[str]:
        with self._lock:
            return [name for name, queues in self.queues.items() if all(queues)]

    def end(self, name: str) -> None:
        with self._lock:
            items = [queue.popleft() for queue in self.queues[name]]
            result = self.result(name, [tensor for _, tensor in items])
            for handle, tensor in items:
                tensor.copy_(result)
                self.ended.add(handle)

    def result(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return what all ranks get."""
        total = torch.stack(tensors).sum(0)
        self.sums[name].append(total.clone())
        return total


class Port:
    """One rank's view of the network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        return self._network.submit(self._rank, name, tensor)

    def hurry(self) -> None:
        pass

    def poll(self, handle: int) -> bool:
        return handle in self._network.ended

    def wait(self, handle: int, longest_s: float) -> bool:
        return poll_for(self, handle, longest_s)

    def finish(self, handle: int) -> None:
        self._network.ended.remove(handle)  # KeyError: collected twice, or before it ended.


class Ears:
    """Listener of one rank: forwards events to the coordinator and stores headers."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.headers: list[tuple[int, Header]] = []
        self.mean_sqrs: list[float] = []
        self.sent_bytes: list[int] = []
        self.switches: list[tuple[int, str]] = []
        self.mismatches: list[int] = []

    def on_arrive(self, step: int, plan_id: int) -> None:
        self.world.inbox.append(("arrive", self.rank, (step, plan_id)))

    def on_late(self, version: int, plan_id: int) -> None:
        self.world.inbox.append(("late", self.rank, (version, plan_id)))

    def on_join(self, version: int) -> None:
        self.world.inbox.append(("join", self.rank, (version,)))

    def on_step_end(self, step: int, header: Header, plan: Plan, mean_sqr: float, sent_bytes: int) -> None:
        self.headers.append((step, header))
        self.mean_sqrs.append(mean_sqr)
        self.sent_bytes.append(sent_bytes)

    def on_switch(self, step: int, plan: Plan) -> None:
        self.switches.append((step, plan.label))

    def on_mismatch(self, step: int) -> None:
        self.mismatches.append(step)


def plain_optimizer(
    kind: str, params: list[torch.nn.Parameter], lr: float, momentum: float
) -> tuple[type[torch.optim.Optimizer], torch.optim.Optimizer]:
    """Return class and instance of an optimizer: `sgd` with momentum, or Adam."""
    base: type[torch.optim.Optimizer] = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
    keywords: dict[str, Any] = {"momentum": momentum} if kind == "sgd" else {}
    return base, base(params, lr=lr, **keywords)


def collected(engine: StepEngine) -> Iterator[None]:
    """Wait, as the training thread, for its own step; other actors may run at every `yield`."""
    handles = engine.own_step().all_handles()
    while not all(engine.collective.poll(handle) for handle in handles):
        yield
    for handle in handles:
        engine.collective.finish(handle)


class World:
    """See the module's docstring.

    Args:
        seed: Determines model, speeds and interleaving.
        world_size: Number of ranks.
        steps: Gradients each rank computes; with `uneven`, drawn per rank between half of it and all of it.
        plans: Plans the coordinator publishes, in order, at random times.
        manual_share: Share of the steps in which a rank works between `synchronize` and `step`.
        abandon_share: Probability per coordinator turn that a published plan is abandoned.
        max_staleness: See `Plan`.
        uneven: Whether ranks make different numbers of steps.
        optimizer: `sgd` (momentum) or `adam`.
        early_after_steps, raise_on_mismatch: See `StepEngine`.
    """

    def __init__(
        self,
        seed: int,
        *,
        world_size: int = 3,
        steps: int = 10,
        plans: list[Plan] | None = None,
        manual_share: float = 0.0,
        abandon_share: float = 0.0,
        max_staleness: int = 16,
        uneven: bool = True,
        optimizer: str = "sgd",
        early_after_steps: int = 64,
        raise_on_mismatch: bool = False,
    ) -> None:
        self.raise_on_mismatch = raise_on_mismatch
        self.early_after_steps = early_after_steps
        self.seed, self.random = seed, random.Random(seed)
        self.world_size, self.max_steps = world_size, steps
        self.network = Network(world_size)
        self.inbox: deque[Event] = deque()
        self.mail: list[deque[Event]] = [deque() for _ in range(world_size)]
        self.first = Plan.sync(world_size, max_staleness=max_staleness)
        self.rule = ClosingRule(self.first, quorum_deadline_s=400.0)
        self.now_s = 0.0
        self.plans = deque(plans or [])
        self.published: Plan | None = None
        self.known: dict[int, Plan] = {}
        self.manual_share = manual_share
        self.abandon_share = abandon_share
        self.ears = [Ears(self, rank) for rank in range(world_size)]
        self.engines = [self._engine(rank, seed, optimizer) for rank in range(world_size)]
        low = steps // 2 if uneven else steps
        self.lengths = [self.random.randint(max(1, low), steps) for _ in range(world_size)]
        self.speed = [self.random.choice([1.0, 1.0, 0.3, 0.1]) for _ in range(world_size)]
        self.given: dict[tuple[int, int, int], int] = {}
        self.programs: list[Iterator[None] | None] = [self._train(rank) for rank in range(world_size)]

    def listener(self, rank: int) -> Any:
        """Return the listener of a rank's engine."""
        return self.ears[rank]

    def _engine(self, rank: int, seed: int, optimizer: str) -> StepEngine:
        torch.manual_seed(seed)
        gaps = random.Random(100 * seed + rank)
        size = self.world_size * self.max_steps
        # If the last bucket is not float32, the header travels as a separate tensor.
        dtype = torch.float64 if seed % 4 == 0 else torch.float32
        params = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for _ in range(3)]
        base, opt = plain_optimizer(optimizer, params, lr=0.1, momentum=0.9)
        applier = Applier(opt, base, pack(params, params[0].element_size() * size), HyperRow(opt.param_groups))
        return StepEngine(
            rank=rank,
            plan=self.first,
            applier=applier,
            collective=Port(self.network, rank),
            listener=self.listener(rank),
            replay_queue=4,
            noise_interval_steps=2,
            early_after_steps=self.early_after_steps,
            raise_on_mismatch=self.raise_on_mismatch,
            # In some steps the gap between the last gradient and the header is long; the header then travels alone.
            clock=lambda: gaps.uniform(0.0, 0.02),
        )

    # ---- actors ---------------------------------------------------------------------------------------------

    def _train(self, rank: int) -> Iterator[None]:
        """Run the training thread of one rank; other actors may run at every `yield`."""
        engine = self.engines[rank]
        for number in range(self.lengths[rank]):
            manual = self._works_on_mean(engine.step)
            for bucket in self.random.sample(engine.applier.buckets, len(engine.applier.buckets)):
                yield
                bucket.flat.zero_()
                place = rank * self.max_steps + number
                bucket.flat[place] = 1.0
                self.given[(bucket.index, rank, number)] = engine.step
                engine.gradient_ready(bucket.index)
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    param.grad = view
            yield
            member = engine.arrive(manual=manual)
            if member:
                yield from collected(engine)
                result = engine.finish_own()
                if manual:
                    for mean in result.means:
                        mean[:-1].mul_(0.5)
                yield
                engine.apply_own(result)
                yield
            yield from self._catch_up(engine)
            if not member:
                engine.note_joined()
            # A learning-rate schedule by the rank's own steps, so that ranks disagree unless the leader's is used.
            engine.applier.optimizer.param_groups[0]["lr"] = 0.1 / (2 + number)
        engine.set_inactive(True)
        self.inbox.append(("leave", rank, ()))

    def _works_on_mean(self, step: int) -> bool:
        """Whether programs work between `synchronize` and `step` in this step, the same on all ranks."""
        return random.Random(1000 * self.seed + step).random() < self.manual_share

    def _catch_up(self, engine: StepEngine) -> Iterator[None]:
        target = engine.next_step
        while not engine.catch_up(target):
            yield
            if engine.needs_fetch:
                others = [e for e in self.engines if e is not engine]
                snapshot = self.random.choice(others).replica.snapshot()
                if snapshot is not None:
                    engine.adopt(snapshot)

    def _coordinate(self) -> None:
        if self.inbox:
            kind, rank, values = self.inbox.popleft()
            if kind == "arrive":
                self._note_plan_id(values[1])
                self.rule.arrive(rank, values[0], 10.0 / self.speed[rank], self.now_s)
            elif kind == "late":
                self.rule.late(rank, 10.0 / self.speed[rank])
            elif kind == "join":
                self.rule.join(rank, values[0], self.now_s)
            else:
                self.rule.deactivate(rank)
        order, _ = self.rule.evaluate(self.now_s)
        if order is not None:
            for mail in self.mail:
                mail.append(("close", order.step, ()))
        if self.published is None and self.plans and self.random.random() < 0.3:
            self.published = self.plans.popleft()
            for mail in self.mail:
                mail.append(("plan", 0, (self.published,)))
            self.known[self.published.plan_id] = self.published
        elif self.published is not None and self.random.random() < self.abandon_share:
            for mail in self.mail:
                mail.append(("abandon", self.published.plan_id, ()))
            self.published = None

    def _note_plan_id(self, plan_id: int) -> None:
        if plan_id > self.rule.plan.plan_id:
            self.rule.plan = self.known[plan_id]
            if self.published is not None and self.published.plan_id <= plan_id:
                self.published = None

    def _deliver(self, rank: int) -> None:
        if self.mail[rank]:
            kind, number, values = self.mail[rank].popleft()
            if kind == "close":
                self.engines[rank].close(number)
            elif kind == "abandon":
                self.engines[rank].agreement.abandon(number)
            else:
                assert self.engines[rank].agreement.prepare(values[0]) is None

    def _advance(self, rank: int) -> None:
        program = self.programs[rank]
        if program is not None and next(program, "end") == "end":
            self.programs[rank] = None

    # ---- running --------------------------------------------------------------------------------------------

    def run(self, max_ticks: int = 60_000) -> None:
        """Pick actors at random until all programs have ended and nothing is left to do.

        Raises:
            AssertionError: It did not end: some actor waits forever.
        """
        for _ in range(max_ticks):
            self.now_s += 1.0
            self._tick()
            if not any(self.programs) and self._quiet():
                self._settle()
                return
        state = [(e.step, e.next_step, p is None) for e, p in zip(self.engines, self.programs, strict=True)]
        raise AssertionError(f"no end: (version, next round, finished) of the ranks is {state}")

    def _tick(self) -> None:
        rank = self.random.randrange(self.world_size)
        pick = self.random.random()
        if pick < 0.45:
            if self.random.random() < self.speed[rank]:
                self._advance(rank)
        elif pick < 0.65:
            self.engines[rank].helper_tick()
        elif pick < 0.8:
            names = self.network.ready()
            if names:
                self.network.end(self.random.choice(names))
        elif pick < 0.92:
            self._coordinate()
        else:
            self._deliver(rank)

    def _quiet(self) -> bool:
        """Whether no message, operation or helper has work left."""
        idle = not self.inbox and not any(self.mail) and not self.network.ready()
        return idle and not any(engine.helper_has_work() for engine in self.engines)

    def _settle(self) -> None:
        for step in [engine.unreported_manual for engine in self.engines if engine.unreported_manual is not None]:
            for engine in self.engines:
                engine.note_manual(step)
        for engine in self.engines:
            for _ in self._catch_up(engine):
                pass
