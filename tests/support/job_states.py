"""A coordinator's state driven by scripted jobs, for tests."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.config import Config
from star_hvd.coordinator.job_state import JobState

CONFIG = Config(lost_after_s=10.0, plan_deadline_s=60.0)


PLAN = Plan.sync(3).to_dict()


class Job:
    """A coordinator's state, a clock, and the messages it sent."""

    def __init__(self, world_size: int = 3, config: Config = CONFIG) -> None:
        self.world_size = world_size
        self.now_s = 100.0
        self.state = JobState(world_size, config, self.now_s)

    def say(self, rank: int, message: m.Message) -> list[m.Message]:
        self.state.handle(rank, message, self.now_s)
        return self.sent()

    def pass_time(self, seconds: float, alive: tuple[int, ...] | None = None) -> list[m.Message]:
        """Advance time in small steps in which ranks send signs of life."""
        end_s, heard = self.now_s + seconds, []
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + 0.5)
            for rank in range(self.world_size) if alive is None else alive:
                self.state.handle(rank, m.Heartbeat(rank), self.now_s)
            assert self.state.tick(self.now_s) > self.now_s
            heard += self.sent()
        return heard

    def sent(self) -> list[m.Message]:
        outbox, self.state.outbox = self.state.outbox, []
        self.destinations = [destination for destination, _ in outbox]
        return [message for _, message in outbox]

    def register(self, plan: Plan | None, optimizer_id: int = 0) -> list[m.Message]:
        first = Plan.sync(self.world_size).to_dict()
        wanted = plan.to_dict() if plan is not None else {}
        return [x for r in range(self.world_size) for x in self.say(r, m.Register(optimizer_id, first, wanted))]

    def arrive(self, rank: int, step: int, plan_id: int = 0, compute_s: float = 0.1) -> None:
        self.say(rank, m.Arrive(0, step, plan_id, StepTimes(compute_s, 0.0, 0.05), 0.01))

    def tick(self) -> list[m.Message]:
        self.state.tick(self.now_s)
        return self.sent()

    @property
    def engine(self) -> Any:
        return self.state.optimizers[0]


def runtime_of(state: JobState | None, rank: int = 0, **counts: int) -> SimpleNamespace:
    """As much of a rank's runtime as explanations and reports ask for; rank 0 has the coordinator's state.

    Args:
        state: The coordinator's state, None on a rank without a coordinator.
        rank: The rank.
        counts: Messages that the coordinator has counted as `malformed`, `lost` or `repeated`.
    """

    @contextlib.contextmanager
    def look() -> Iterator[JobState | None]:
        yield state

    counted = {"malformed": 0, "lost": 0, "repeated": 0} | counts
    coordinator = None if state is None else SimpleNamespace(job_state=look, **counted)
    return SimpleNamespace(rank=rank, coordinator=coordinator, drivers={}, keyring=SimpleNamespace(denied=0))


def only(heard: list[m.Message], kind: type[m.Message]) -> list[Any]:
    return [message for message in heard if isinstance(message, kind)]


def relaxed_job(world_size: int = 3) -> Job:
    job = Job(world_size)
    job.register(Plan.partial(world_size, world_size - 1))
    for rank in range(world_size):
        job.arrive(rank, 5, plan_id=1)
    assert job.engine.active.relaxed
    return job


def state_of(thing: Any) -> Any:
    """Everything an object holds, down to plain values."""
    if isinstance(thing, dict):
        return {key: state_of(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, deque)):
        return [state_of(value) for value in thing]
    if not type(thing).__module__.startswith(("star_hvd", "scheduler")):
        return "a call" if callable(thing) else repr(thing)
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name: state_of(getattr(thing, name)) for name in [*names, *getattr(thing, "__dict__", ())]}
