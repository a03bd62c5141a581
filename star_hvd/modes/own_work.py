"""Measure when the training thread's own work for a step is done, including on its devices.

Launching kernels takes a fraction of the time they run, so a fence behind the latest gradient on each device marks
their end. In `sync` the step's reduction runs meanwhile and nothing waits for this; the arrival is sent to the
coordinator once its time is known.
"""

from __future__ import annotations

import time

import torch

from star_hvd.engine.device import GRADIENT, Fence, Streams
from star_hvd.modes.step_reporter import StepReporter
from star_hvd.telemetry.timer import StepTimer

__all__ = ["OwnWork"]


class OwnWork:
    """Used by the training thread only.

    Args:
        timer: Measures the work.
        reporter: Reports its time once the devices are done.
        deadline_s: Longest wait for a device.
    """

    def __init__(self, timer: StepTimer, reporter: StepReporter, deadline_s: float) -> None:
        self._timer = timer
        self._reporter = reporter
        self._deadline_s = deadline_s
        self._behind: dict[torch.device, Fence] = {}  # The latest gradient on each device.
        self._done_s = 0.0

    def gradient_queued(self, streams: Streams, flat: torch.Tensor) -> Fence:
        """Return a fence; the gradient in `flat` is complete once its device has reached it."""
        fence = self._behind[flat.device] = streams.give_one(GRADIENT, flat)
        return fence

    def look(self, *, wait: bool = False) -> bool:
        """Stop the clock once the devices are done, if it still runs. Return whether it does.

        Args:
            wait: Whether to wait until they are done.
        """
        if not self._reporter.timing:
            return False
        for fence in self._behind.values():
            if wait:
                fence.wait(self._deadline_s)
            elif not fence.done():
                return True
        self._behind.clear()
        times, self._done_s = self._timer.stop(), time.monotonic()
        self._reporter.end_timing(times)
        return False

    @property
    def since_done_s(self) -> float:
        """Time since the devices were done."""
        return time.monotonic() - self._done_s
