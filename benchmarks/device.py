"""Device time: the part of a step in which a real job's accelerator works. Emulated, or spent on a real one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch

from benchmarks.accelerator import Accelerator, Cuda, calibrate

__all__ = ["BurnDevice", "Device", "SleepDevice", "SpinDevice", "make_device"]

BURN_SIZE = 96  # a product of two 96 x 96 matrices takes about 0.05 ms: fine steps, outside the interpreter lock


class Device(ABC):
    """Spends the time of one step's computation."""

    @abstractmethod
    def run(self, slowdown: float) -> None:
        """Spend one step's device time, `slowdown` times as long as normal."""


class SleepDevice(Device):
    """Sleeps, so that many ranks fit on few cores and the time does not depend on who else uses them."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def run(self, slowdown: float) -> None:
        """Sleep `step_s * slowdown` seconds."""
        time.sleep(self._step_s * slowdown)


class BurnDevice(Device):
    """Computes until this thread has used a fixed amount of CPU time, so that a CPU quota slows it."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._matrix = torch.ones(BURN_SIZE, BURN_SIZE)

    def run(self, slowdown: float) -> None:
        """Use `step_s` seconds of CPU; `slowdown` is ignored, the quota is what slows."""
        end_s = time.thread_time() + self._step_s
        while time.thread_time() < end_s:
            torch.mm(self._matrix, self._matrix)


class SpinDevice(Device):
    """Queues a kernel that keeps the accelerator busy, behind the network's own and before its backward pass.

    It returns at once, as a kernel's launch does: that a rank is slow shows on its device only.
    """

    def __init__(self, step_s: float, accelerator: Accelerator) -> None:
        self._step_s = step_s
        self._accelerator = accelerator
        self._cycles_per_s = calibrate(accelerator)

    def run(self, slowdown: float) -> None:
        """Queue `step_s * slowdown` seconds of the device's time."""
        cycles = round(self._step_s * slowdown * self._cycles_per_s)
        if cycles:
            self._accelerator.spin(cycles)


def make_device(kind: str, step_s: float, *, burns: bool, accelerator: Accelerator | None = None) -> Device:
    """What spends the device time of a step.

    Args:
        kind: `cpu`, where device time is emulated, or `cuda`.
        step_s: Device time of a step at normal speed.
        burns: Whether it uses the processor instead of sleeping; on `cpu` only.
        accelerator: Instead of the current CUDA device.
    """
    if kind == "cuda":
        return SpinDevice(step_s, accelerator or Cuda())
    return BurnDevice(step_s) if burns else SleepDevice(step_s)
