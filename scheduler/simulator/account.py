"""Progress of the simulated training: steps, drift, and the probability that the target accuracy is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.cost.progress import alignment, iterations, update_progress
from scheduler.simulator.machines import Array, Replicas
from scheduler.simulator.scenario import Scenario

__all__ = ["Account"]

_HARM = 4.0
"""Exponent of `reach`: harm 1 (twice the drift limit throughout) leaves a probability of exp(-4), 2 %. In Sync-Switch's
runs ASP reached 0.90 in one of four and 0.915 in none."""

_LATE_WEIGHT = 0.1
"""Weight of drift after the early phase. Sync-Switch: 5 % BSP, then ASP, reaches the target in 6 of 8 runs; ASP first
does not."""


class Account(Replicas):
    """Accumulates updates. All arrays have shape (replicas,).

    Attributes:
        progress: Fraction of the way to the target; may exceed 1.
        reached_s: Time at which the target was reached; infinite before.
        harm: Accumulated excess of drift and noise over the network's limits; lowers `reach`.
        updates: Updates made.
        gradients: Gradients in them.
        drift: Sum over updates of their mean drift, in synchronous steps.
        gain: Sum of the progress of updates, in synchronous steps.
    """

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        networks = [scenario.network for scenario in scenarios]
        self.world = np.array([float(scenario.world_size) for scenario in scenarios])
        self._noise = np.array([network.noise for network in networks])
        self._growth = np.array([network.noise_growth for network in networks])
        self._rho = np.array([network.lr_ratio for network in networks])
        self.price = np.array([network.price for network in networks])
        self._steps = np.array([network.target_steps for network in networks])
        self._drift_limit = np.array([network.drift_limit for network in networks])
        self._noise_limit = np.array([network.noise_limit for network in networks])
        self._early = np.array([network.early_part for network in networks])
        count = len(scenarios)
        self.progress, self.harm, self.updates = np.zeros(count), np.zeros(count), np.zeros(count)
        self.gradients, self.drift, self.gain = np.zeros(count), np.zeros(count), np.zeros(count)
        self.reached_s = np.full(count, math.inf)

    @property
    def noise(self) -> Array:
        """Current noise scale phi, in gradients of one rank."""
        return self._noise * (1.0 + self._growth * np.clip(self.progress, 0.0, 1.0))

    @property
    def reach(self) -> Array:
        """Probability of reaching the target if no further harm is done."""
        return np.exp(-_HARM * self.harm)

    def add(
        self,
        now_s: Array,
        *,
        length: Array,
        signal: Array,
        effective: Array,
        drift: Array,
        gradients: Array,
        times: Array | float = 1.0,
    ) -> None:
        """Add one update per replica; `scheduler.cost.progress` defines the terms.

        Args:
            now_s: Completion time; infinite for a replica without an update.
            length: L, the length of the update in synchronous steps.
            signal: L times the mean alignment of its gradients (what is left after staleness).
            effective: m, the effective number of gradients averaged.
            drift: Mean drift of its gradients.
            gradients: Gradients in it.
            times: Number of equal consecutive updates, as between two averagings of `local`.
        """
        made = np.isfinite(now_s) * np.asarray(times)
        noise, early = self.noise, self.progress < self._early
        gain = made * update_progress(length, signal, effective, noise, self.world, self._rho)
        share = gain / self._steps
        weight = np.where(early, 1.0, _LATE_WEIGHT) / (self._early + _LATE_WEIGHT * (1.0 - self._early))
        drifted = np.maximum(0.0, drift / self._drift_limit - 1.0)
        louder = length * length / np.maximum(signal, 1e-9) * iterations(noise, effective)
        louder /= iterations(noise, self.world)
        noisy = np.where(self.progress > 0.5, 2.0, 0.0) * np.maximum(0.0, louder / self._noise_limit - 1.0)
        self.harm += np.maximum(share, 0.0) * np.minimum(weight * drifted + noisy, 1e3)
        self.progress = np.maximum(0.0, self.progress + share)
        done = (self.progress >= 1.0) & np.isinf(self.reached_s)
        self.reached_s = np.where(done, now_s, self.reached_s)
        self.gain += gain
        self.updates += made
        self.gradients += made * gradients
        self.drift += made * drift

    def add_series(
        self, now_s: Array, *, length: Array, signal: Array, effective: Array, drift: Array, gradients: float
    ) -> None:
        """Add many updates of a single replica, all at the noise scale before the first. Arguments as in `add`.

        `now_s` is ascending; arrays have shape (updates,); `gradients` counts those of each update.
        """
        noise = self.noise[0]
        gain = np.asarray(update_progress(length, signal, effective, noise, self.world[0], self._rho[0]))
        share = gain / self._steps[0]
        after = np.maximum(0.0, self.progress[0] + np.cumsum(share))
        before = np.concatenate([self.progress, after[:-1]])
        weight = np.where(before < self._early[0], 1.0, _LATE_WEIGHT)
        weight /= self._early[0] + _LATE_WEIGHT * (1.0 - self._early[0])
        drifted = np.maximum(0.0, drift / self._drift_limit[0] - 1.0)
        louder = length * length / np.maximum(signal, 1e-9) * iterations(noise, effective)
        louder /= iterations(noise, self.world[0])
        noisy = np.where(before > 0.5, 2.0, 0.0) * np.maximum(0.0, louder / self._noise_limit[0] - 1.0)
        self.harm += (np.maximum(share, 0.0) * np.minimum(weight * drifted + noisy, 1e3)).sum()
        self.progress = after[-1:].copy()
        done = np.flatnonzero(after >= 1.0)
        if len(done) and np.isinf(self.reached_s[0]):
            self.reached_s = now_s[done[:1]].copy()
        self.gain += gain.sum()
        self.updates += len(now_s)
        self.gradients += gradients * len(now_s)
        self.drift += drift.sum()

    def add_mean(self, now_s: Array, weights: Array, stale: Array) -> None:
        """Add an update of length 1 that is a weighted mean of gradients.

        Args:
            now_s: Completion time.
            weights: Weights of the gradients, 0 for none, shape (replicas, k).
            stale: Their staleness in steps, same shape; as each step has length 1 this is their drift too.
        """
        total = weights.sum(axis=1)
        # A step without any gradient is no update.
        now_s = np.where(total > 0.0, now_s, math.inf)
        total = np.maximum(total, 1e-12)
        signal = (weights * alignment(stale, self.price[:, None])).sum(axis=1) / total
        effective = np.maximum(total * total / np.maximum((weights * weights).sum(axis=1), 1e-24), 1e-9)
        self.add(
            now_s,
            length=np.ones_like(total),
            signal=signal,
            effective=effective,
            drift=(weights * stale).sum(axis=1) / total,
            gradients=(weights > 0.0).sum(axis=1).astype(np.float64),
        )
