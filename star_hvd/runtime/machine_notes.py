"""Sends readings of a rank's machine to the coordinator, the run logs, and this user's other jobs on the host."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import MachineNote
from star_hvd.modes.driver import StepDriver
from star_hvd.telemetry.headroom import CpuHeadroom, usable_cpus
from star_hvd.telemetry.neighbours import Registry, ranks_near
from star_hvd.telemetry.resources import Resources, ResourceSampler, cgroup_directory

__all__ = ["MachineNotes"]

_START_S = 0.05  # Shortest interval of the first reading: processor time is counted in units of 10 ms.


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
        self._send(self._note(self._at_start(), 0), True)
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
        near = 0
        if self._registry is not None:
            cpus = usable_cpus()
            self._registry.write(cpus=cpus)
            near = ranks_near(self._registry.others(), cpus)
        self._send(self._note(readings, near), False)
        for driver in list(self._drivers.values()):
            if driver.reporter.log is not None:
                driver.reporter.log.resources(readings)

    def _note(self, readings: Resources, near: int) -> MachineNote:
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
            neighbour_ranks=float(near),
        )
