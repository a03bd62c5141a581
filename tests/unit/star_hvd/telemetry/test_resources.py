"""Readings of processor, pressure, throttling, network and GPU, against made-up machines and this one."""

from __future__ import annotations

import math
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from star_hvd.telemetry import resources
from star_hvd.telemetry.resources import (
    Gpu,
    Resources,
    ResourceSampler,
    cgroup_directory,
    gpu_identity,
    open_gpu,
    samples_in_memory,
)
from tests.support.threads import running


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_unknown_is_nan() -> None:
    assert all(math.isnan(getattr(Resources(), name)) for name in Resources.__dataclass_fields__)
    assert Resources().known() == {}
    assert Resources(load=0.5).known() == {"load": 0.5}


def test_a_busy_process_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ResourceSampler()
    first = sampler.sample()
    assert math.isnan(first.cpu_share), "the first sample has nothing to compare with"
    time.sleep(0.3)
    idle = sampler.sample()
    busy_s = time.thread_time() + 0.3
    while time.thread_time() < busy_s:
        pass
    busy = sampler.sample()
    used_s = [sample.cpu_share * sample.interval_s for sample in (idle, busy)]
    # The clock counts 10 ms at a time. Threads of other tests may still be ending, which takes time of its own.
    assert used_s[1] >= 0.25 and used_s[1] > used_s[0]
    began_s = time.process_time()
    sampler.sample()
    busy_s = time.thread_time() + 0.1
    while time.thread_time() < busy_s:
        pass
    again = sampler.sample()
    assert again.cpu_share * again.interval_s <= time.process_time() - began_s + 0.03, "no more than was used"


def test_a_sample_costs_less_than_some_thousandths_of_a_core() -> None:
    sampler = ResourceSampler(interval_s=1.0)
    sampler.sample()
    costs_s = []
    for _ in range(50):
        began_s = time.thread_time()
        sampler.sample()
        costs_s.append(time.thread_time() - began_s)
    # The least: what others do to the caches is no cost of the sampler's.
    assert min(costs_s) < 0.005 * 1.0  # About 0.001 on a slow, busy core.


@pytest.mark.parametrize(
    ("stat", "share"),
    [
        ("usage_usec 5\nnr_periods {p}\nnr_throttled {t}\nthrottled_usec {us}\n", 0.5),
        ("nr_periods {p}\nnr_throttled {t}\nthrottled_time {us}000\n", 0.5),
    ],
)
def test_throttling_and_pressure(stat: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(resources.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(resources, "cgroup_directory", lambda: tmp_path)
    _write(tmp_path / "cpu.stat", stat.format(p=100, t=10, us=2_000_000))
    _write(tmp_path / "cpu.pressure", "some avg10=1.00 avg60=1.00 avg300=1.00 total=1000000\nfull avg10=0.00 total=0\n")
    sampler = ResourceSampler()
    sampler.sample()
    now_s = 102.0
    _write(tmp_path / "cpu.stat", stat.format(p=120, t=15, us=3_000_000))
    _write(tmp_path / "cpu.pressure", "some avg10=1.00 avg60=1.00 avg300=1.00 total=1600000\n")
    found = sampler.sample()
    assert found.throttled_share == pytest.approx(share)
    assert found.throttled_periods == pytest.approx(0.25)
    assert found.psi_cgroup_share == pytest.approx(0.3)
    now_s = 103.0
    _write(tmp_path / "cpu.stat", "what is this")
    (tmp_path / "cpu.pressure").unlink()
    found = sampler.sample()
    assert math.isnan(found.throttled_share) and math.isnan(found.psi_cgroup_share)
    assert math.isfinite(found.cpu_share), "one missing reading leaves the others"


def test_counters_that_began_anew_give_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(bytes_recv=1000, bytes_sent=1000, dropin=0, dropout=0, errin=0, errout=0)
    cards = {"eth7": card, "lo": card}
    monkeypatch.setattr(resources.psutil, "net_io_counters", lambda pernic: cards)
    sampler = ResourceSampler(interface="eth7")
    sampler.sample()
    cards["eth7"] = SimpleNamespace(bytes_recv=10, bytes_sent=3000, dropin=0, dropout=0, errin=0, errout=0)
    found = sampler.sample()
    assert math.isnan(found.nic_in_bytes_per_s)
    assert found.nic_out_bytes_per_s * found.interval_s == pytest.approx(2000)


def link_bytes_per_s(interface: str | None) -> float:
    """The speed in the first reading of a sampler's thread."""
    seen: queue.SimpleQueue[Resources] = queue.SimpleQueue()
    sampler = ResourceSampler(0.01, interface=interface, on_sample=seen.put)
    sampler.start()
    try:
        return seen.get(timeout=60.0).nic_link_bytes_per_s
    finally:
        sampler.stop(60.0)


def test_the_link_of_the_channel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "lo": SimpleNamespace(speed=0, isup=True),
        "eth0": SimpleNamespace(speed=1000, isup=True),
        "ib0": SimpleNamespace(speed=100_000, isup=True),
        "ib1": SimpleNamespace(speed=400_000, isup=False),
    }
    monkeypatch.setattr(resources.psutil, "net_if_stats", lambda: cards)
    monkeypatch.delenv("STAR_INTERFACE", raising=False)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    assert link_bytes_per_s(None) == 12.5e9
    assert link_bytes_per_s("eth0") == 125e6
    assert math.isnan(link_bytes_per_s("none"))


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("0::/user.slice/job\n", "user.slice/job"),
        ("0::/of/the/host\n", ""),  # A container: the path is the host's, the mount its own.
        ("4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n", "cpu,cpuacct/docker/abc"),
        ("1:cpu:/\n", "cpu"),
    ],
)
def test_where_the_cgroup_is(lines: str, place: str, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    _write(mount / place / "cpu.stat", "nr_periods 0\n")
    assert cgroup_directory(_write(tmp_path / "cgroup", lines), mount) == mount / place


def test_no_cgroup(tmp_path: Path) -> None:
    assert cgroup_directory(tmp_path / "missing", tmp_path) is None
    assert cgroup_directory(_write(tmp_path / "cgroup", "0::/\n"), tmp_path) is None


class FakeNvml:
    """As much of NVML as is asked for; some of it is not supported."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonGpuIdle = 0x1

    def __init__(self) -> None:
        self.reasons = 0x1
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.asked.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-12-34":
            raise RuntimeError("not found")
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return bus

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1000 * kind

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.asked.append("power")
        raise RuntimeError("not supported")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 55

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPcieThroughput(self, handle: str, kind: int) -> int:
        return 10 + kind

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # The name before 12.535.
        return self.reasons


def test_gpu_readings_are_optional_one_by_one() -> None:
    nvml = FakeNvml()
    gpu = open_gpu("12-34", nvml)
    assert gpu is not None and nvml.asked == ["init"]
    found = Resources(**gpu.read())
    assert found.gpu_sm_mhz == 1000 and found.gpu_memory_mhz == 2000 and found.gpu_power_limit_w == 700
    assert found.gpu_busy_share == 0.5 and found.gpu_pcie_in_bytes_per_s == 11 * 1024
    assert found.gpu_throttle_reasons == 1 and found.gpu_throttled == 0, "an idle clock is no brake"
    assert math.isnan(found.gpu_power_w) and math.isnan(found.gpu_pcie_width)
    for reasons, slowed in ((0x4, 1), (0x8 | 0x1, 1), (0x0, 0), (0x100, 0)):
        nvml.reasons = reasons
        assert gpu.read()["gpu_throttled"] == slowed
    assert nvml.asked.count("power") == 1, "what is not supported is asked for once"


def test_the_newer_name_is_preferred() -> None:
    nvml = FakeNvml()
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x8  # type: ignore[attr-defined]
    assert Gpu(nvml, "h").read()["gpu_throttle_reasons"] == 8


def test_a_gpu_is_found_by_uuid_or_bus_and_never_guessed() -> None:
    assert open_gpu("GPU-12-34", FakeNvml()) is not None
    assert open_gpu("0000:3b:00.0", FakeNvml()) is not None
    assert open_gpu("99-99", FakeNvml()) is None

    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise OSError("no driver")

    assert open_gpu("12-34", Broken()) is None


def test_a_torch_without_uuids_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SimpleNamespace(param_groups=[{"params": [SimpleNamespace(is_cuda=True, device="cuda:0")]}])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a GPU"))
    assert gpu_identity(optimizer) is None, "before 2.4"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    assert gpu_identity(optimizer) == "12-34"


def test_the_thread_samples_and_ends() -> None:
    seen: list[Resources] = []
    enough = threading.Event()

    def take(sample: Resources) -> None:
        seen.append(sample)
        if len(seen) == 3:
            enough.set()

    others = running("star-resources")
    sampler = ResourceSampler(0.02, take)
    sampler.start()
    assert enough.wait(120.0)
    sampler.stop(120.0)
    assert not running("star-resources") - others
    assert all(math.isfinite(sample.cpu_share) for sample in seen) and sampler.latest in seen
    sampler.stop()


def test_a_callback_that_fails_ends_the_samples_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(sample: Resources) -> None:
        raise RuntimeError("full")

    others = running("star-resources")
    sampler = ResourceSampler(0.01, fail)
    sampler.start()
    for thread in running("star-resources") - others:
        thread.join(120.0)
    assert not running("star-resources") - others
    assert "training goes on" in caplog.text


def test_an_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="interval_s is 0"):
        ResourceSampler(0)


def test_memory_of_a_gpu_that_other_processes_have_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 100))
    assert samples_in_memory(10, 20, gpu) == 34, "80 of 100 are within reach: 50 free ones, and those held in reserve"
    assert samples_in_memory(10, 20, torch.device("cpu")) == 0
    assert samples_in_memory(0, 20, gpu) == samples_in_memory(10, 0, gpu) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
    assert samples_in_memory(30, 20, gpu) == 38
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert samples_in_memory(30, 20, gpu) == 30, "what was, was possible"
