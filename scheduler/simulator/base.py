"""State and base classes of the simulated modes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from scheduler.plan.plan import Plan
from scheduler.rules.weights import damped, damping_scale
from scheduler.simulator.account import Account
from scheduler.simulator.machines import Array, Flags, Ints, Machines, Replicas

__all__ = ["Mode", "State", "StepMode"]

HISTORY = 64
"""Reports kept per rank, as in a live job's windows."""


class State(Replicas):
    """What persists across a switch of modes.

    Attributes:
        machines: Ranks and links.
        account: Progress of training.
        now_s: End of the last step, shape (replicas,).
        step: Number of ended steps, shape (replicas,).
        batch_step: Step that each rank's current batch is for, shape (replicas, ranks).
        history_s: Recent compute times, a ring buffer, shape (replicas, ranks, HISTORY).
        history_step: The steps of these times.
        history_late: Whether each missed its step.
        history_starved_s: Seconds of each without a processor.
        history_input_s: Seconds of each spent waiting for data.
        reported: Number of reports per rank.
    """

    def __init__(self, machines: Machines, account: Account) -> None:
        shape = (machines.replicas, machines.n)
        self.machines, self.account = machines, account
        self.now_s = np.zeros(shape[0])
        self.step = np.zeros(shape[0], dtype=np.int64)
        self.batch_step = np.zeros(shape, dtype=np.int64)
        self.reported = np.zeros(shape, dtype=np.int64)
        self.history_s = np.zeros((*shape, HISTORY))
        self.history_step = np.zeros((*shape, HISTORY), dtype=np.int64)
        self.history_late = np.zeros((*shape, HISTORY), dtype=np.bool_)
        self.history_starved_s, self.history_input_s = np.zeros((*shape, HISTORY)), np.zeros((*shape, HISTORY))
        all_ranks = np.arange(shape[0] * shape[1])
        machines.begin(all_ranks, np.zeros(len(all_ranks)), np.zeros(len(all_ranks), dtype=np.int64))

    def report(self, where: Ints, late: bool = False) -> None:
        """Record the compute times of ranks (indices replica * n + rank) whose batches have ended."""
        count = self.reported.reshape(-1)
        slot = count[where] % HISTORY
        machines = self.machines
        # Scaled to a usual batch, as the coordinator scales its reports.
        share = machines.share_factor.reshape(-1)[where]
        time_s = (machines.finish_s.reshape(-1)[where] - machines.start_s.reshape(-1)[where]) / share
        self.history_s.reshape(-1, HISTORY)[where, slot] = time_s
        self.history_step.reshape(-1, HISTORY)[where, slot] = self.batch_step.reshape(-1)[where]
        self.history_late.reshape(-1, HISTORY)[where, slot] = late
        starved, fed = machines.starved.reshape(-1)[where], machines.fed.reshape(-1)[where]
        self.history_starved_s.reshape(-1, HISTORY)[where, slot] = time_s * (1.0 - 1.0 / starved)
        self.history_input_s.reshape(-1, HISTORY)[where, slot] = time_s * (1.0 - 1.0 / fed)
        count[where] += 1

    def begin(self, where: Ints, start_s: Array, step: Ints) -> None:
        """Start a batch for `step` on these ranks."""
        self.batch_step.reshape(-1)[where] = step
        self.machines.begin(where, start_s, step)


class Mode(Replicas, ABC):
    """A mode that advances a state, usually by one update per `step`."""

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        self.state = state

    @abstractmethod
    def step(self) -> None:
        """Advance every replica by one update."""

    def leave_s(self) -> Array:
        """Time at which all ranks have ended their batches, shape (replicas,): the earliest end of the mode."""
        ended: Array = np.maximum(self.state.now_s, self.state.machines.finish_s.max(axis=1))
        return ended


class StepMode(Mode):
    """A mode that folds late gradients into a step of all ranks, damped by their staleness."""

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        self.scale = np.array([damping_scale(plan, float(plan.world_size)) for plan in plans])
        self.max_staleness = np.array([plan.max_staleness for plan in plans])

    def weights(self, staleness: Array, present: Flags) -> Array:
        """Weights of gradients by staleness, shape (replicas, ranks); 0 where absent or too stale."""
        counted = present & (staleness <= self.max_staleness[:, None])
        return np.where(counted, damped(self.scale[:, None], staleness), 0.0)
