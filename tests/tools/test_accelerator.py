"""Benchmarks on a device: spin kernels of the asked length, times by events, a clear error where there is none."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.lab.options import build_spec, make_parser
from benchmarks.machine.accelerator import CPU, DeviceError, WallClock, calibrate, check_device, make_clock, place_of
from benchmarks.machine.device import BurnDevice, DeviceTime, LayerClock, SleepDevice, SpinDevice, make_device
from benchmarks.overhead import main as overhead
from benchmarks.workers.overhead import Side

LAUNCH_S = 10e-6


class Counting:
    """A device whose clock ticks only while kernels run: `speed` cycles per second, and a moment for each launch."""

    def __init__(self, speed: float = 1.5e9) -> None:
        self.speed, self.now_s, self.queued_s = speed, 0.0, 0.0
        self.kernels: list[int] = []

    def spin(self, cycles: int) -> None:
        self.kernels.append(cycles)
        self.queued_s += LAUNCH_S + cycles / self.speed

    def mark(self) -> Any:
        return self.now_s + self.queued_s

    def between_s(self, begin: Any, end: Any) -> float:
        assert end <= self.now_s, "an event was read before it happened"
        return float(end - begin)

    def synchronize(self) -> None:
        self.now_s, self.queued_s = self.now_s + self.queued_s, 0.0


@pytest.mark.parametrize("speed", [1e8, 1.5e9, 1e11])
def test_spin_kernels_are_calibrated(speed: float) -> None:
    assert calibrate(Counting(speed)) == pytest.approx(speed, rel=0.01)


def test_a_spin_device_queues_and_returns() -> None:
    device = Counting()
    spins = SpinDevice(device)
    begun_s, before = device.now_s, len(device.kernels)
    spins.spend(0.03)
    spins.spend(0.12)
    assert device.now_s == begun_s, "it waited for its kernel"
    lengths_s = [cycles / device.speed for cycles in device.kernels[before:]]
    assert lengths_s == pytest.approx([0.03, 0.12], rel=0.01)


def test_no_device_time_is_no_kernel() -> None:
    device = Counting()
    spins = SpinDevice(device)
    before = len(device.kernels)
    spins.spend(0.0)
    assert len(device.kernels) == before


def test_steps_are_timed_by_events() -> None:
    device = Counting()
    model = torch.nn.Linear(3, 2)
    side = Side(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    clock = make_clock("cuda", device)
    spins = make_device("cuda", accelerator=device)
    LayerClock(model, spins, DeviceTime(fixed_s=0.012, per_sample_s=0.002), {model: 1.0})
    clock.tick()
    for _ in range(3):
        side.step(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
        clock.tick()
    assert clock.steps_s() == pytest.approx([0.02] * 3, rel=0.01)
    assert clock.steps_s() == []


def test_without_an_accelerator_device_time_is_emulated() -> None:
    assert isinstance(make_device("cpu"), SleepDevice)
    assert isinstance(make_device("cpu", burns=True), BurnDevice)
    clock = make_clock("cpu")
    assert isinstance(clock, WallClock)
    clock.tick()
    make_device("cpu").spend(0.02)
    clock.tick()
    assert clock.steps_s()[0] >= 0.02


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("built", "reason"), [(None, "built without CUDA"), ("13.0", "finds no CUDA device")])
def test_a_missing_device_is_a_clear_error(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, built: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(DeviceError, match=reason):
        check_device("cuda")
    with pytest.raises(DeviceError, match=reason):
        build_spec(make_parser().parse_args(["--device", "cuda"]))


def test_overhead_says_so_too(no_cuda: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead(["--device", "cuda"]) == 2
    assert "--device cuda" in capsys.readouterr().err


def test_a_limit_of_the_processor_slows_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(DeviceError, match="limits the processor"):
        build_spec(make_parser().parse_args(["--device", "cuda", "--scenario", "quota"]))


def test_ranks_share_devices_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "3")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert [str(place_of("cuda", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert os.environ["NCCL_HOSTID"] == "rank0", "NCCL refuses two ranks of one host on one device"
    assert chosen == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert place_of("cpu", 3) == CPU


def test_the_spec_carries_the_device() -> None:
    assert build_spec(make_parser().parse_args([])).device == "cpu"
