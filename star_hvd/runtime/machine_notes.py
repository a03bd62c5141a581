"""Sends readings of a rank's machine to the coordinator, the run logs, and this user's other jobs on the host."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import MachineNote
from star_hvd.modes.driver import StepDriver
from star_hvd.telemetry.headroom import CpuHeadroom, usable_cpus
from star_hvd.telemetry.neighbours import Neighbours, Registry, summarize
from star_hvd.telemetry.resources import Resources, ResourceSampler, cgroup_directory

__all__ = ["MachineNotes"]

_START_S = 0.05  # Shortest interval of the first reading: processor time is counted in units of 10 ms.
_LATEST = 10  # Latest wait readings, of which the minimum is taken.
_KEPT = 600  # Wait readings, one per second, whose minimum counts as communication.


class MachineNotes:
    """Sends this rank's readings once per second from the first optimizer on.

    Args:
        rank: This rank.
        send: Sends a control message; one that is not urgent may wait for others.
        drivers: Drivers of this process's optimizers.
    """

    def __init__(
        self, rank: int, send: Callable[[Message, bool], None], drivers: Mapping[int, StepDriver]
    ) -> None:
        self._rank, self._send, self._drivers = rank, send, drivers
        self._sampler: ResourceSampler | None = None
        self._registry: Registry | None = None
        self._waits: deque[float] = deque(maxlen=_KEPT)  # Under one plan.
        self._under, self._after = (-1, -1), 0  # Optimizer and plan.
        self._headroom = CpuHeadroom(cgroup_directory())
        self._first, self._first_s = self._counters()

    def start(self, job: str, gpu: str | None) -> None:
        """Send a first reading, over the time since this object was created, and start the thread; only once.

        Args:
            job: Name of the job's run.
            gpu: Identity of this rank's GPU, None without one.
        """
        if self._sampler is not None:
            return
        self._registry = Registry(job, self._rank)
        self._send(self._note(self._at_start(), Neighbours()), True)
        self._sampler = ResourceSampler(on_sample=self._on_sample, gpu=gpu)
        self._sampler.start()

    def stop(self, deadline_s: float) -> None:
        """End the thread, and remove this rank's entry for other jobs."""
        if self._sampler is not None:
            self._sampler.stop(deadline_s)
        if self._registry is not None:
            self._registry.close()

    def _counters(self) -> tuple[dict[str, float], float]:
        used = os.times()
        return {**self._headroom.counters(), "cpu_share": used.user + used.system}, time.monotonic()

    def _at_start(self) -> Resources:
        last, now_s = self._counters()
        elapsed_s = now_s - self._first_s
        if elapsed_s < _START_S:
            return Resources()
        rates = {name: (value - self._first[name]) / elapsed_s for name, value in last.items() if name in self._first}
        free = self._headroom.free_cores(rates)
        return Resources(interval_s=elapsed_s, free_cpu_cores=free, **rates)

    def _on_sample(self, readings: Resources) -> None:
        """Handle a sample; called once per second in the sampler's thread."""
        near = Neighbours()
        if self._registry is not None:
            cpus = usable_cpus()
            step_s, slack_s = self._slack()
            self._registry.write(cpus=cpus, cores=readings.cpu_share, step_s=step_s, slack_s=slack_s)
            near = summarize(self._registry.others(), cpus)
        self._send(self._note(readings, near), False)
        for driver in list(self._drivers.values()):
            if driver.reporter.log is not None:
                driver.reporter.log.resources(readings)

    def _slack(self) -> tuple[float, float]:
        """Return the time of this rank's steps, and the part of it that it certainly waits for slower ranks.

        The shortest wait of the last minutes under the active plan is taken as communication alone; any wait beyond it
        is for other ranks. Waits of another plan, or of long ago, say nothing about the communication of now.
        """
        drivers = list(self._drivers.values())
        if not drivers:
            return 0.0, 0.0
        reporter = drivers[0].reporter
        under = reporter.number, reporter.engine.plan.plan_id
        if under != self._under:
            self._under = under
            self._waits.clear()
            self._after = reporter.steps_logged + 1  # The step under way may still be one of the plan before.
        if reporter.steps_logged <= self._after:  # Before the first step the wait is 0.
            return reporter.times.compute_s + reporter.wait_s, 0.0
        self._waits.append(reporter.wait_s)
        slack_s = min(list(self._waits)[-_LATEST:]) - min(self._waits)
        return reporter.times.compute_s + reporter.wait_s, slack_s

    def _note(self, readings: Resources, near: Neighbours) -> MachineNote:
        return MachineNote(
            throttled_share=readings.throttled_share,
            pressure_share=readings.psi_host_share,
            gpu_clock_share=readings.gpu_sm_mhz / (readings.gpu_sm_max_mhz or math.nan),
            gpu_throttled=readings.gpu_throttled,
            gpu_temperature_c=readings.gpu_temperature_c,
            nic_drops_per_s=readings.nic_drops_per_s,
            free_cpu_cores=readings.free_cpu_cores,
            own_cpu_cores=readings.cpu_share,
            usable_cpu_cores=float(len(usable_cpus())),
            neighbour_ranks=float(near.ranks),
            neighbour_slack_cores=near.slack_cores,
        )
