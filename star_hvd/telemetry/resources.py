"""Resource readings of a rank's process and machine: CPU, pressure, throttling, network, GPU; sampled once per second.

Every reading is optional and NaN if not available: an old kernel, a container without cgroup files, no GPU or a virtual
one. Counters become rates over the time since the last sample. Nothing here is on the step path, and a sample costs
some hundred microseconds of one core per second (measured; see the tests).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from star_hvd import env
from star_hvd.telemetry.headroom import CpuHeadroom
from star_hvd.threads import supervised

__all__ = ["Gpu", "ResourceSampler", "Resources", "cgroup_directory", "gpu_identity", "open_gpu", "samples_in_memory"]

logger = logging.getLogger("star_hvd")

_NAN = math.nan
_USABLE = 0.85  # Usable part of a GPU's memory: the rest is lost to fragmentation and the context.
_SLOWING_REASONS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """One sample. Shares are fractions of the time since the last sample; NaN if unknown.

    Attributes:
        interval_s: Time the rates are taken over.
        cpu_share: CPU time of this process over wall time; 2.0 is two cores.
        runqueue_share: Time threads of this process were runnable without a core, over wall time.
        throttled_share: Time the process's cgroup was throttled by its quota.
        throttled_periods: Part of the quota's periods in which that happened.
        psi_host_share: Part of the time some task of the host waited for a core (pressure stall information).
        psi_cgroup_share: The same for the tasks of this process's cgroup.
        load: Runnable and waiting tasks per usable core, mean of the last minute.
        free_cpu_cores: Idle processors among those this process may use, within its quota (`telemetry.headroom`).
        nic_in_bytes_per_s, nic_out_bytes_per_s: Traffic of the channel's network interface, or of all but the loopback.
        nic_link_bytes_per_s: Speed of that interface's link, of the fastest if there are several.
        nic_drops_per_s: Packets dropped or damaged, in and out.
        gpu_sm_mhz, gpu_sm_max_mhz, gpu_memory_mhz: Current and maximum SM clock, and the memory clock.
        gpu_power_w, gpu_power_limit_w: Power drawn and allowed.
        gpu_temperature_c: Degrees Celsius.
        gpu_busy_share: Part of the last second in which some kernel ran; a duty cycle, not utilization.
        gpu_throttled: 1 while power, temperature or a hardware brake reduces the clocks, else 0.
        gpu_throttle_reasons: NVML's bit mask of clock event reasons, as a number.
        gpu_pcie_in_bytes_per_s, gpu_pcie_out_bytes_per_s: Traffic over PCIe, into and out of the GPU.
        gpu_pcie_generation, gpu_pcie_width: Of the link as currently negotiated; a downgraded link is slow.
    """

    interval_s: float = _NAN
    cpu_share: float = _NAN
    runqueue_share: float = _NAN
    throttled_share: float = _NAN
    throttled_periods: float = _NAN
    psi_host_share: float = _NAN
    psi_cgroup_share: float = _NAN
    load: float = _NAN
    free_cpu_cores: float = _NAN
    nic_in_bytes_per_s: float = _NAN
    nic_out_bytes_per_s: float = _NAN
    nic_link_bytes_per_s: float = _NAN
    nic_drops_per_s: float = _NAN
    gpu_sm_mhz: float = _NAN
    gpu_sm_max_mhz: float = _NAN
    gpu_memory_mhz: float = _NAN
    gpu_power_w: float = _NAN
    gpu_power_limit_w: float = _NAN
    gpu_temperature_c: float = _NAN
    gpu_busy_share: float = _NAN
    gpu_throttled: float = _NAN
    gpu_throttle_reasons: float = _NAN
    gpu_pcie_in_bytes_per_s: float = _NAN
    gpu_pcie_out_bytes_per_s: float = _NAN
    gpu_pcie_generation: float = _NAN
    gpu_pcie_width: float = _NAN

    def known(self) -> dict[str, float]:
        """Return the available readings by name."""
        return {f.name: v for f in fields(self) if math.isfinite(v := getattr(self, f.name))}


class ResourceSampler:
    """A thread that samples this process once per `interval_s` and keeps the latest sample.

    Args:
        interval_s: Time between samples in seconds.
        on_sample: Called with every sample on the sampler's thread, `RunLog.resources` for example.
        interface: Network interface of the channel; if None and `STAR_INTERFACE` is unset, all but the loopback.
        gpu: Identity of this rank's GPU, a UUID or a PCI bus id (`open_gpu`); None for no GPU.

    Raises:
        ValueError: The interval is not above 0.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        on_sample: Callable[[Resources], object] | None = None,
        interface: str | None = None,
        gpu: str | None = None,
    ) -> None:
        if not interval_s > 0.0:
            raise ValueError(f"interval_s is {interval_s}; expected a number above 0")
        self.latest = Resources()
        self._interval_s = interval_s
        self._on_sample = on_sample
        self._interface = interface or env.interface()
        self._identity = gpu
        self._gpu: Gpu | None = None
        self._cgroup = cgroup_directory()
        self._headroom = CpuHeadroom(self._cgroup)
        self._cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._link_bytes_per_s = _NAN
        self._counters: dict[str, float] = {}
        self._at_s = _NAN
        self._stop = threading.Event()
        self._thread = supervised(self._run, "star-resources", critical=False)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the thread and wait at most `deadline_s` for it: a GPU driver may hang."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    def sample(self) -> Resources:
        """Take a sample now; the first one has no rates. Must not be called while the thread runs."""
        now_s = time.monotonic()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        values = {"interval_s": elapsed_s, "load": self._load()}
        counters: dict[str, float] = {}
        sources = (
            _read_cpu,
            _read_schedstat,
            self._read_pressure,
            self._read_throttling,
            self._read_network,
            self._headroom.counters,
        )
        for read in sources:
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError, psutil.Error):
                counters |= read()
        before, self._counters = self._counters, counters
        if elapsed_s > 0.0:
            # A counter decreases when threads end or when it is reset; it then gives no rate.
            rates = {n: (v - before[n]) / elapsed_s for n, v in counters.items() if n in before and v >= before[n]}
            periods = rates.pop("periods", 0.0)
            throttled = rates.pop("throttled_periods", _NAN)
            values["free_cpu_cores"] = self._headroom.free_cores(rates)
            values |= rates | {"throttled_periods": throttled / periods if periods > 0.0 else _NAN}
        values["nic_link_bytes_per_s"] = self._link_bytes_per_s
        if self._gpu is not None:
            values |= self._gpu.read()
        return Resources(**values)

    def _run(self) -> None:
        if self._identity is not None:
            self._gpu = open_gpu(self._identity)
        self._link_bytes_per_s = self._link_speed()
        self.sample()
        while not self._stop.wait(self._interval_s):
            try:
                self.latest = self.sample()
                if self._on_sample is not None:
                    self._on_sample(self.latest)
            except Exception:
                logger.exception("resource readings (CPU, network, GPU) stop; training goes on")
                return

    def _load(self) -> float:
        with contextlib.suppress(OSError, AttributeError):
            return os.getloadavg()[0] / self._cpus
        return _NAN

    def _read_pressure(self) -> dict[str, float]:
        found = {}
        places = {"psi_host_share": Path("/proc/pressure/cpu")}
        if self._cgroup is not None:
            places["psi_cgroup_share"] = self._cgroup / "cpu.pressure"
        for name, path in places.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # some avg10=0.00 avg60=0.00 avg300=0.00 total=<us>
                line = path.read_text(encoding="ascii").splitlines()[0]
                found[name] = 1e-6 * float(line.rsplit("total=", 1)[1])
        return found

    def _read_throttling(self) -> dict[str, float]:
        if self._cgroup is None:
            return {}
        lines = (self._cgroup / "cpu.stat").read_text(encoding="ascii").split("\n")
        stat = dict(line.split(" ", 1) for line in lines if " " in line)
        # Version 1 counts nanoseconds under another name.
        throttled_s = (
            1e-6 * float(stat["throttled_usec"]) if "throttled_usec" in stat else 1e-9 * float(stat["throttled_time"])
        )
        return {
            "throttled_share": throttled_s,
            "throttled_periods": float(stat["nr_throttled"]),
            "periods": float(stat["nr_periods"]),
        }

    def _read_network(self) -> dict[str, float]:
        cards = psutil.net_io_counters(pernic=True)
        chosen = [card for name, card in cards.items() if self._uses(name)]
        if not chosen:
            return {}
        return {
            "nic_in_bytes_per_s": float(sum(card.bytes_recv for card in chosen)),
            "nic_out_bytes_per_s": float(sum(card.bytes_sent for card in chosen)),
            "nic_drops_per_s": float(sum(c.dropin + c.dropout + c.errin + c.errout for c in chosen)),
        }

    def _link_speed(self) -> float:
        """Return the link speed; read only once, as it takes a system call per interface and hardly ever changes."""
        with contextlib.suppress(OSError, psutil.Error):
            cards = psutil.net_if_stats().items()
            speeds = [card.speed for name, card in cards if self._uses(name) and card.isup and card.speed > 0]
            return max(speeds) * 1e6 / 8.0 if speeds else _NAN  # Mbit/s
        return _NAN

    def _uses(self, name: str) -> bool:
        return name == self._interface if self._interface else name != "lo"


def gpu_identity(optimizer: Any) -> str | None:
    """Return the UUID of the GPU that holds an optimizer's first parameter; None on a CPU, and before torch 2.4."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.is_cuda:
            import torch

            uuid = getattr(torch.cuda.get_device_properties(param.device), "uuid", None)
            return None if uuid is None else str(uuid)
        return None
    return None


def samples_in_memory(batch: int, peak_bytes: int, device: Any) -> int:
    """Return the batch size that would fill a GPU, as if all memory use were proportional to it; 0 for a CPU.

    Memory that other processes use now, such as other ranks of the job, counts as unavailable.

    Args:
        batch: Samples of the largest batch so far.
        peak_bytes: Peak of the memory allocated since then.
        device: Device of the parameters, a `torch.device`.
    """
    if min(batch, peak_bytes) < 1 or device.type != "cuda":
        return 0
    import torch

    within_reach = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return max(batch, int(batch * _USABLE * within_reach / peak_bytes))


class Gpu:
    """Readings of one GPU; any of them may be missing (MIG, virtual GPUs, WSL).

    Args:
        nvml: The module `pynvml`, initialized.
        handle: NVML's handle of the device.
    """

    def __init__(self, nvml: ModuleType | Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        # The older name is deprecated, the newer one is missing with older drivers.
        self._reasons: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        self._slowing = 0
        for name in _SLOWING_REASONS:
            for form in (f"nvmlClocksEventReason{name}", f"nvmlClocksThrottleReason{name}"):
                self._slowing |= int(getattr(nvml, form, 0))
        self._unsupported: set[str] = set()

    def read(self) -> dict[str, float]:
        """Return the available readings, under the names of `Resources`."""
        nvml, handle = self._nvml, self._handle
        found: dict[str, float] = {}
        sources: dict[str, Callable[[], float]] = {
            "gpu_sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_sm_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "gpu_power_w": lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(handle),
            "gpu_power_limit_w": lambda: 1e-3 * nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_busy_share": lambda: 0.01 * nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_throttle_reasons": lambda: self._reasons(handle),
            # NVML measures these for 20 ms each, in KB/s.
            "gpu_pcie_in_bytes_per_s": lambda: (
                1024.0 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            ),
            "gpu_pcie_out_bytes_per_s": lambda: (
                1024.0 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
            ),
            "gpu_pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "gpu_pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        }
        for name, source in sources.items():
            if name in self._unsupported:
                continue
            try:
                found[name] = float(source())
            except Exception:  # NVML has an error class per code; none of them may stop the sampler.
                self._unsupported.add(name)
        if "gpu_throttle_reasons" in found:
            found["gpu_throttled"] = float(bool(int(found["gpu_throttle_reasons"]) & self._slowing))
        return found


def open_gpu(identity: str, nvml: ModuleType | Any | None = None) -> Gpu | None:
    """Return the GPU with an identity, None if there is none or NVML is missing.

    NVML ignores CUDA_VISIBLE_DEVICES, so torch's device index may mean another GPU in NVML.

    Args:
        identity: A UUID (with or without the prefix `GPU-`, as in torch's `get_device_properties(i).uuid`) or a PCI bus
            id (`0000:3b:00.0`).
        nvml: The module `pynvml`; imported if None.
    """
    try:
        library: Any = nvml if nvml is not None else importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception as error:
        logger.debug("no GPU readings: %s", error)
        return None
    with contextlib.suppress(Exception):
        if identity.count(":") >= 1:
            return Gpu(library, library.nvmlDeviceGetHandleByPciBusId(identity))
        uuid = identity if identity.startswith(("GPU-", "MIG-")) else f"GPU-{identity}"
        return Gpu(library, library.nvmlDeviceGetHandleByUUID(uuid))
    logger.info("NVML has no GPU %s; its clocks and power are not read", identity)
    return None


def cgroup_directory(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the folder with `cpu.stat` of this process's cgroup, version 2 or 1; None if there is none.

    In a container `proc` may give a path of the host; the container's cgroup is then at the mount itself.
    """
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    places = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            places += [mount / path.lstrip("/"), mount]
        elif "cpu" in controllers.split(","):
            places += [mount / controllers / path.lstrip("/"), mount / "cpu" / path.lstrip("/"), mount / "cpu"]
    for place in places:
        if (place / "cpu.stat").is_file():
            return place
    return None


def _read_cpu() -> dict[str, float]:
    used = os.times()
    return {"cpu_share": used.user + used.system}


def _read_schedstat() -> dict[str, float]:
    """Return the run-queue waits of all threads of this process; `/proc/self/schedstat` has only the main thread's."""
    waited_ns = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # The thread may have ended.
            waited_ns += int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1])
    return {"runqueue_share": 1e-9 * waited_ns}
