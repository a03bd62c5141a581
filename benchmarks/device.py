"""Emulated device time: the part of a step in which a real job's accelerator would work."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch

__all__ = ["BurnDevice", "Device", "SleepDevice"]

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
