"""Tensor placement and step timing of a benchmark: on the processor, or on a CUDA device with events."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Protocol

import torch

__all__ = [
    "CPU",
    "DEVICES",
    "Accelerator",
    "Clock",
    "Cuda",
    "DeviceError",
    "EventClock",
    "WallClock",
    "calibrate",
    "check_device",
    "make_clock",
    "place_of",
]

CPU = torch.device("cpu")
DEVICES = ("cpu", "cuda")
_FIRST_CYCLES = 1_000_000  # Half a millisecond on a current device.
_LONG_ENOUGH_S = 0.005  # Makes the few microseconds of a kernel launch negligible.
_LOOKS = 3


class DeviceError(ValueError):
    """This machine lacks the device; the message says what is missing."""


class Accelerator(Protocol):
    """The required device operations; tests use a fake that only counts."""

    def spin(self, cycles: int) -> None:
        """Queue a kernel that keeps the device busy for `cycles` cycles of its clock."""
        ...

    def mark(self) -> Any:
        """Queue an event."""
        ...

    def between_s(self, begin: Any, end: Any) -> float:
        """Return the device time between two completed events."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...


class Cuda:
    """The current CUDA device, on its current stream."""

    def spin(self, cycles: int) -> None:
        """See `Accelerator`."""
        torch.cuda._sleep(cycles)

    def mark(self) -> Any:
        """See `Accelerator`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, begin: Any, end: Any) -> float:
        """See `Accelerator`."""
        return float(begin.elapsed_time(end)) / 1000.0

    def synchronize(self) -> None:
        """See `Accelerator`."""
        torch.cuda.synchronize()


def calibrate(accelerator: Accelerator) -> float:
    """Return the cycles per second of spin kernels: the fastest of a few tries, as other work can only slow one."""
    accelerator.spin(_FIRST_CYCLES)  # The first launch in a process also loads the kernel.
    cycles = _FIRST_CYCLES
    while (took_s := _spin_s(accelerator, cycles)) < _LONG_ENOUGH_S:
        cycles *= 2
    return cycles / min(took_s, *(_spin_s(accelerator, cycles) for _ in range(_LOOKS)))


def _spin_s(accelerator: Accelerator, cycles: int) -> float:
    begin = accelerator.mark()
    accelerator.spin(cycles)
    end = accelerator.mark()
    accelerator.synchronize()
    return accelerator.between_s(begin, end)


class Clock(Protocol):
    """Times consecutive steps."""

    def tick(self) -> None:
        """Mark the start of a step or the end of the last one."""
        ...

    def steps_s(self) -> list[float]:
        """Return the times between the ticks so far and clear them."""
        ...


class WallClock:
    """Clock for steps that are complete when their last call returns."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """See `Clock`."""
        self._ticks.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        """See `Clock`."""
        ticks, self._ticks = self._ticks, []
        return [end - begin for begin, end in itertools.pairwise(ticks)]


class EventClock:
    """Clock for steps whose kernels still run when their last call returns; times are those of the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._marks: list[Any] = []

    def tick(self) -> None:
        """See `Clock`."""
        self._marks.append(self._accelerator.mark())

    def steps_s(self) -> list[float]:
        """See `Clock`; waits for the device."""
        self._accelerator.synchronize()
        marks, self._marks = self._marks, []
        return [self._accelerator.between_s(a, b) for a, b in itertools.pairwise(marks)]


def make_clock(kind: str, accelerator: Accelerator | None = None) -> Clock:
    """Make the clock that fits a device."""
    return WallClock() if kind == "cpu" else EventClock(accelerator or Cuda())


def check_device(kind: str) -> None:
    """Check that this machine has such a device.

    Raises:
        DeviceError: It does not.
    """
    if kind not in DEVICES:
        raise DeviceError(f"--device is {kind!r}; expected one of {', '.join(DEVICES)}")
    if kind == "cuda" and not torch.cuda.is_available():
        built = f"this torch ({torch.__version__}) was built without CUDA"
        reason = built if torch.version.cuda is None else "torch finds no CUDA device (see nvidia-smi)"
        raise DeviceError(f"--device cuda: {reason}")


def place_of(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank's tensors and make it current; ranks share devices if there are fewer than ranks.

    Raises:
        DeviceError: This machine has no such device.
    """
    check_device(kind)
    if kind == "cpu":
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")) > devices:
        # NCCL refuses two ranks on one device of one host, so each rank counts as a host of its own.
        os.environ.setdefault("NCCL_HOSTID", f"rank{local_rank}")
    place = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(place)
    return place
