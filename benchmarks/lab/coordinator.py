"""The processor time that a coordinator needs to decode and handle a job's messages and to decide."""

from __future__ import annotations

import time

import numpy as np

from scheduler.plan.plan import Plan
from scheduler.records import StepTimes
from star_hvd.channel.messages.base import (
    Arrive,
    HeaderNote,
    Join,
    Late,
    Message,
    PlanMessage,
    Register,
    decode,
    encode,
)
from star_hvd.channel.messages.switch import LinkRate, Prepared, PrepareFailed, Probe
from star_hvd.config import Config
from star_hvd.coordinator.job_state import JobState

__all__ = ["coordinator_share"]

_COMPUTE_S, _JITTER, _SLOW = 0.03, 0.03, 3
_DIMENSION_BYTES = 25_000_000


class _Job:
    """Simulated ranks that answer a coordinator's state as agents do, and count its processor time."""

    def __init__(self, n: int, *, slow: bool) -> None:
        self.board = JobState(n, Config(), 0.0)
        self.cpu_s = 0.0
        self.plans: list[str] = []
        self._n, self._slow = n, slow
        self._random = np.random.default_rng(0)
        self._plan_id = 0
        plan = Plan.sync(n).to_dict()
        for rank in range(n):
            self._say(rank, Register(0, plan, {}, _DIMENSION_BYTES), 0.0)

    def step(self, number: int, begin_s: float) -> None:
        """Make one step of all ranks; once modes differ, a slow rank is late and delivers once in `_SLOW` steps."""
        work = _COMPUTE_S * np.exp(_JITTER * self._random.standard_normal(self._n))
        late = self._slow and self._plan_id > 0
        order = np.argsort(work).tolist()
        for rank in order:
            own_s, at_s = float(work[rank]), begin_s + float(work[rank])
            if self._slow and rank == 0:
                own_s *= _SLOW
                if late:
                    if number % _SLOW == 0:
                        self._say(rank, Late(0, number - _SLOW + 1, self._plan_id, StepTimes(own_s, 0.0, own_s)), at_s)
                        self._say(rank, Join(0, number, ), at_s)
                    continue
            self._say(rank, Arrive(0, number, self._plan_id, StepTimes(own_s, 0.001, own_s), 0.005), at_s)
        note = HeaderNote(
            0, number, self._plan_id, [1] * self._n, 2.0 / (1.0 + 0.001 * number), float(self._n), float(self._n),
            4.0, self._n, 1.0, 0.0,
        )
        self._say(1, note, begin_s + float(work.max()) + 1e-3)

    def _say(self, rank: int, message: Message, now_s: float) -> None:
        data = encode(message)
        begin_s = time.thread_time()
        self.board.handle(rank, decode(data), now_s)
        self.board.tick(now_s)
        outbox, self.board.outbox = self.board.outbox, []
        for _, order in outbox:
            encode(order)
        self.cpu_s += time.thread_time() - begin_s
        for destination, order in outbox:
            self._answer(destination, order, now_s)

    def _answer(self, destination: int, order: Message, now_s: float) -> None:
        if isinstance(order, Probe):
            self._say(destination, LinkRate(1e9), now_s)
        if isinstance(order, PlanMessage):
            plan = Plan.from_dict(order.plan)
            if plan.mode not in ("sync", "partial"):
                self._say(0, PrepareFailed(0, plan.plan_id, "not in this benchmark"), now_s)
                return
            for rank in range(self._n):
                self._say(rank, Prepared(0, plan.plan_id), now_s)
            self._plan_id = plan.plan_id
            self.plans.append(plan.label)


def coordinator_share(n: int = 8, *, slow: bool, steps_per_s: float = 30.0, length_s: float = 30.0) -> float:
    """Return the share of a core that the coordinator of `n` ranks uses, with windows read ten times a second.

    Every message is decoded and handled separately, as if no two arrived together; network costs are excluded.

    Args:
        n: Number of ranks.
        slow: Whether rank 0 takes three times as long, so that modes are predicted twice a second.
        steps_per_s: Step rate of the fast ranks.
        length_s: Simulated time; the first quarter is not counted.

    Raises:
        RuntimeError: The coordinator made an unexpected decision.
    """
    job = _Job(n, slow=slow)
    steps, counted_from_s = int(steps_per_s * length_s), 0.25 * length_s
    before_s = 0.0
    for number in range(steps):
        begin_s = number / steps_per_s
        if begin_s <= counted_from_s:
            before_s = job.cpu_s
        job.step(number, begin_s)
    if bool(job.plans) is not slow:
        raise RuntimeError(f"the board chose {job.plans or 'nothing'}; expected {'a plan' if slow else 'nothing'}")
    return (job.cpu_s - before_s) / (length_s - counted_from_s)
