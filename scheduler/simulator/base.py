"""What the simulated modes have in common: whose batch is for which step, and what was measured of late."""

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
"""Reports of a rank that are kept, as in the live job's windows."""


class State(Replicas):
    """Everything of a job that outlives a change of mode.

    Attributes:
        machines: Ranks and links.
        account: What training has achieved.
        now_s: End of the last step, shape (replicas,).
        step: Steps ended, shape (replicas,).
        version: Step the batch of every rank is for, shape (replicas, ranks).
        history_s: Recent compute times, a ring, shape (replicas, ranks, HISTORY).
        history_step: Their steps.
        history_late: Whether they missed their step.
        history_starved_s: Part of them without a processor.
        history_input_s: Part of them waiting for data.
        reported: Reports of every rank.
    """

    def __init__(self, machines: Machines, account: Account) -> None:
        shape = (machines.replicas, machines.n)
        self.machines, self.account = machines, account
        self.now_s = np.zeros(shape[0])
        self.step = np.zeros(shape[0], dtype=np.int64)
        self.version = np.zeros(shape, dtype=np.int64)
        self.reported = np.zeros(shape, dtype=np.int64)
        self.history_s = np.zeros((*shape, HISTORY))
        self.history_step = np.zeros((*shape, HISTORY), dtype=np.int64)
        self.history_late = np.zeros((*shape, HISTORY), dtype=np.bool_)
        self.history_starved_s, self.history_input_s = np.zeros((*shape, HISTORY)), np.zeros((*shape, HISTORY))
        everybody = np.arange(shape[0] * shape[1])
        machines.begin(everybody, np.zeros(len(everybody)), np.zeros(len(everybody), dtype=np.int64))

    def report(self, where: Ints, late: bool = False) -> None:
        """Note the compute times of these ranks (replica * n + rank), whose batches have ended."""
        count = self.reported.reshape(-1)
        slot = count[where] % HISTORY
        machines = self.machines
        # As of a usual batch, which is what the coordinator makes of its reports.
        share = machines.share_factor.reshape(-1)[where]
        time_s = (machines.finish_s.reshape(-1)[where] - machines.start_s.reshape(-1)[where]) / share
        self.history_s.reshape(-1, HISTORY)[where, slot] = time_s
        self.history_step.reshape(-1, HISTORY)[where, slot] = self.version.reshape(-1)[where]
        self.history_late.reshape(-1, HISTORY)[where, slot] = late
        starved, fed = machines.starved.reshape(-1)[where], machines.fed.reshape(-1)[where]
        self.history_starved_s.reshape(-1, HISTORY)[where, slot] = time_s * (1.0 - 1.0 / starved)
        self.history_input_s.reshape(-1, HISTORY)[where, slot] = time_s * (1.0 - 1.0 / fed)
        count[where] += 1

    def begin(self, where: Ints, start_s: Array, version: Ints) -> None:
        """These ranks begin a batch with the parameters of `version`."""
        self.version.reshape(-1)[where] = version
        self.machines.begin(where, start_s, version)


class Mode(Replicas, ABC):
    """A mode at work on a state. One `step` is one update, or what comes closest to it."""

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        self.state = state

    @abstractmethod
    def step(self) -> None:
        """Go on by one update in every replica."""

    def leave_s(self) -> Array:
        """When all ranks have ended what they are on, shape (replicas,): the earliest end of the mode."""
        ended: Array = np.maximum(self.state.now_s, self.state.machines.finish_s.max(axis=1))
        return ended



class StepMode(Mode):
    """A mode whose late gradients join the step of all ranks, damped by their staleness."""

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        self.scale = np.array([damping_scale(plan, float(plan.world_size)) for plan in plans])
        self.max_staleness = np.array([plan.max_staleness for plan in plans])

    def weights(self, staleness: Array, present: Flags) -> Array:
        """Weights of gradients of that staleness, shape (replicas, ranks), 0 where not present or too stale."""
        counted = present & (staleness <= self.max_staleness[:, None])
        return np.where(counted, damped(self.scale[:, None], staleness), 0.0)
