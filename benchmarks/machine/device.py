"""Device time: the part of a step in which a real job's accelerator computes. Emulated, or spent on a real one.

A step of b samples takes `fixed + per sample * b` at normal speed and `slowdown` times as long on a slow rank. A
`LayerClock` spends it layer by layer: a layer's share of the forward pass after the layer was called, its share of the
backward pass just before its gradients are computed. So gradients of the last layers are ready and sent while the
first layers still compute, and a smaller batch or a micro-batch costs less.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from benchmarks.lab.networks import first_tensor
from benchmarks.machine.accelerator import Accelerator, Cuda, calibrate

__all__ = ["BurnDevice", "Device", "DeviceTime", "LayerClock", "SleepDevice", "SpinDevice", "make_device"]

BURN_SIZE = 96  # A product of two 96 x 96 matrices takes about 0.05 ms and releases the interpreter lock.
FORWARD_PART = 1.0 / 3.0  # Backward computes two products per layer, for inputs and for weights; forward one.
LONGEST_CREDIT_S = 0.002  # Longest overshoot of a sleep that is subtracted from the next one.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """What a step costs at normal speed.

    Attributes:
        fixed_s: Time of every forward and backward pass, independent of the batch.
        per_sample_s: Additional time per sample.
    """

    fixed_s: float
    per_sample_s: float

    def of(self, samples: int) -> float:
        """Return the seconds of one forward and backward pass over `samples` samples."""
        return self.fixed_s + self.per_sample_s * samples


class Device(ABC):
    """Spends time as a busy device does."""

    #: Whether a slowdown multiplies the time; False if the device is slowed by other means.
    slowed_by_factor = True

    @abstractmethod
    def spend(self, time_s: float) -> None:
        """Be busy for `time_s` seconds."""


class SleepDevice(Device):
    """Sleeps, so that many ranks fit on few cores and the time does not depend on other load.

    If a sleep overshoots slightly, the excess is subtracted from the next one, so many short sleeps add up to the time
    asked for; longer interruptions are not compensated.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0

    def spend(self, time_s: float) -> None:
        """Sleep `time_s` seconds."""
        self._owed_s += time_s
        if self._owed_s > 0.0:
            began_s = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s = max(self._owed_s - (time.perf_counter() - began_s), -LONGEST_CREDIT_S)


class BurnDevice(Device):
    """Computes until this thread has used a fixed amount of CPU time, so that a CPU quota slows it."""

    slowed_by_factor = False

    def __init__(self) -> None:
        self._matrix = torch.ones(BURN_SIZE, BURN_SIZE)

    def spend(self, time_s: float) -> None:
        """Use `time_s` seconds of CPU."""
        end_s = time.thread_time() + time_s
        while time.thread_time() < end_s:
            torch.mm(self._matrix, self._matrix)


class SpinDevice(Device):
    """Queues a kernel that keeps the accelerator busy, between the network's own.

    It returns at once, as a kernel launch does: a rank's slowness shows only on its device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._cycles_per_s = calibrate(accelerator)

    def spend(self, time_s: float) -> None:
        """Queue `time_s` seconds of the device's time."""
        cycles = round(time_s * self._cycles_per_s)
        if cycles:
            self._accelerator.spin(cycles)


def make_device(kind: str, *, burns: bool = False, accelerator: Accelerator | None = None) -> Device:
    """Make the device that spends the device time.

    Args:
        kind: `cpu`, where device time is emulated, or `cuda`.
        burns: Whether it uses the processor instead of sleeping; on `cpu` only.
        accelerator: Used instead of the current CUDA device.
    """
    if kind == "cuda":
        return SpinDevice(accelerator or Cuda())
    return BurnDevice() if burns else SleepDevice()


class LayerClock:
    """Spends device time in the layers of one model, from its construction to `close`.

    Args:
        model: The first dimension of its input is the batch. A forward pass without gradients spends nothing.
        device: Spends the time.
        device_time: Device time of a step.
        shares: Each layer's share of a pass, adding up to 1.
    """

    def __init__(
        self, model: nn.Module, device: Device, device_time: DeviceTime, shares: Mapping[nn.Module, float]
    ) -> None:
        self.slowdown = 1.0
        self._device, self._time = device, device_time
        self._samples = 0
        self._hooks = [model.register_forward_pre_hook(self._note_samples)]
        self._hooks += [layer.register_forward_hook(self._hook(share)) for layer, share in shares.items()]

    def __enter__(self) -> LayerClock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note_samples(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._samples = len(inputs[0])

    def _hook(self, share: float) -> Any:
        """Return the forward hook of a layer that has this share of the passes."""

        def called(_: nn.Module, inputs: object, returned: Any) -> None:
            output = first_tensor(returned)
            if not output.requires_grad:
                return
            pass_s = share * self._time.of(self._samples) * (self.slowdown if self._device.slowed_by_factor else 1.0)
            self._device.spend(FORWARD_PART * pass_s)

            def arrived(_: torch.Tensor) -> None:  # Gradient of the output; the layer's own gradients follow.
                self._device.spend((1.0 - FORWARD_PART) * pass_s)

            output.register_hook(arrived)

        return called
