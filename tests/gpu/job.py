"""What every rank of a GPU test runs. All ranks share the machine's GPUs, `cuda:(local rank % GPUs)`.

    horovodrun -np 4 python -m tests.gpu.job 'poison:partial(3):sgd' ...

and, where ranks share a GPU under NCCL, with NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

RANK = int(os.environ.get("HOROVOD_RANK", "0"))
if "HOROVOD_RANK" in os.environ:  # In a rank, not in the tests that import this.
    os.environ["NCCL_HOSTID"] = f"rank{RANK}"  # Else NCCL refuses two ranks on one GPU.

import torch  # noqa: E402

import star_hvd as hvd  # noqa: E402
from tests.multiproc import modes  # noqa: E402
from tests.support.inside import inside  # noqa: E402
from tests.support.launch import write_result  # noqa: E402
from tests.support.plain import horovod  # noqa: E402

Facts = dict[str, Any]
LIMIT_S = 90.0
LR = 2.0**-10  # A power of two, and gradients of 1: parameters are exact for thousands of steps.
NUMEL = 1 << 18
EPS = 1e-3  # Of Adam: by default it makes a step of lr out of the rounding of a gradient that is zero.
FAST_MS, SLOW_MS = 4.0, 40.0
SWITCHES = ["sync", "partial(3)", "partial(2)", "subgroup(0,1,2)", "subgroup(1,2)", "local(3)", "grouped(2)", "ps(4)"]
SWITCHES += ["ps(1)", "ps(2)"]


def device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("HOROVOD_LOCAL_RANK", "0")) % torch.cuda.device_count())


def digest(params: Sequence[torch.Tensor]) -> str:
    raw = b"".join(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in params)
    return hashlib.sha256(raw).hexdigest()[:16]


class Spin:
    """Kernels that take a given time."""

    def __init__(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)
        torch.cuda.synchronize()
        begin.record()
        torch.cuda._sleep(40_000_000)
        end.record()
        end.synchronize()
        self._cycles_per_ms = 40_000_000 / begin.elapsed_time(end)

    def __call__(self, ms: float) -> None:
        if ms > 0:
            torch.cuda._sleep(int(ms * self._cycles_per_ms))


class SlowBackward(torch.autograd.Function):
    """The identity; its gradient takes a while on the device."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spin: Spin, ms: float) -> torch.Tensor:
        ctx.spin, ctx.ms = spin, ms
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.spin(ctx.ms)
        return gradients[0], None, None


# ---- poison -----------------------------------------------------------------------------------------------------


class Poisoned:
    """A training whose buckets hold NaN until its kernels have written a gradient of exactly 1.

    Args:
        mode: Of the optimizer.
        kind: `sgd`, `momentum`, or `background`: transfers behind compute.
    """

    def __init__(self, mode: str, kind: str) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(NUMEL, device=device())) for _ in range(3)]
        inner = torch.optim.SGD(self.params, lr=LR, momentum=0.5 if kind == "momentum" else 0.0)
        self.optimizer = hvd.DistributedOptimizer(
            inner,
            named_parameters=[(f"p{i}", p) for i, p in enumerate(self.params)],
            mode=mode,
            config=hvd.Config(
                bucket_bytes=4 * NUMEL + 64,
                plan_deadline_s=30.0,
                control_deadline_s=40.0,
                background=True if kind == "background" else None,
            ),
        )
        self.spin = Spin()
        self.steps = 0
        self.times: list[tuple[float, float]] = []  # Compute time as measured and as the device spent it, in ms.

    def step(self, ms: float) -> None:
        """One step, with a backward pass that takes `ms` on the device."""
        core = inside(self.optimizer).core
        self.optimizer.zero_grad()
        for bucket in core.buckets:
            bucket.flat.fill_(math.nan)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.spin(ms / 4)
        total = torch.stack([SlowBackward.apply(p, self.spin, ms / 4).sum() for p in self.params]).sum()
        total.backward()
        end.record()
        self.optimizer.step()
        end.synchronize()
        self.steps += 1
        self.times.append((1e3 * core.driver.reporter.times.compute_s, begin.elapsed_time(end)))

    def finish(self) -> Facts:
        """Close, and what the parameters are against what they must be."""
        self.optimizer.close()
        torch.cuda.synchronize()
        stats = self.optimizer.stats()
        return {
            "digest": digest(self.params),
            "nan": any(bool(torch.isnan(p).any()) for p in self.params),
            "spread": max(float(p.max() - p.min()) for p in self.params),
            "value": float(self.params[0][0]),
            "stats": stats,
            "own_steps": self.steps,
            "told_ms": statistics.median(told for told, _ in self.times),
            "device_ms": statistics.median(spent for _, spent in self.times),
        }


def _until(training: Poisoned, mode: str) -> None:
    limit_s = time.monotonic() + 40.0
    while training.optimizer.mode != mode and time.monotonic() < limit_s:
        training.step(FAST_MS)


def poison(mode: str, kind: str = "sgd") -> Facts:
    """A fixed mode; the slow rank is another one every few steps."""
    training = Poisoned(mode, kind)
    _until(training, training.optimizer.mode if mode == "auto" else mode)
    reached = training.optimizer.mode
    for number in range(60):
        slow = number // 10 % int(hvd.size()) == RANK
        training.step(SLOW_MS if slow else FAST_MS)
    return {"mode": reached} | training.finish()


def switching(seed: str) -> Facts:
    """Random switches among all modes while the slow rank moves."""
    chosen, which = random.Random(int(seed)), random.Random(1000 + int(seed))
    training, seen, previous = Poisoned("sync", "sgd"), [], ""
    limit_s, rounds, done = time.monotonic() + 50.0, 0, torch.zeros(1, device=device())
    while not bool(done[0]):
        for _ in range(chosen.randint(1, 4)):
            slow = training.steps // 7 % int(hvd.size()) == RANK
            training.step(10.0 if slow else 1.0)
            if training.optimizer.mode != previous:
                previous = training.optimizer.mode
                seen.append(previous)
        if RANK == 0:
            modes.publish(training.optimizer, which.choice([m for m in SWITCHES if m != training.optimizer.mode]))
        rounds += 1
        if rounds % 8 == 0:
            done = hvd.broadcast(torch.tensor([float(time.monotonic() > limit_s)], device=device()), 0)
    return {"seen": seen} | training.finish()


# ---- against plain Horovod ----------------------------------------------------------------------------------------


def make_net(seed: int = 0) -> torch.nn.Module:
    """A small network, smooth: a ReLU would turn another order of summation into another gradient within 20 steps."""
    torch.manual_seed(seed)
    layers = (
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.SiLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 8 * 8, 128),
        torch.nn.SiLU(),
        torch.nn.Linear(128, 10),
    )
    return torch.nn.Sequential(*layers).to(device())


def made_batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(count):
        generator = torch.Generator().manual_seed(1000 * RANK + step)
        inputs = torch.randn(16, 3, 16, 16, generator=generator)
        yield inputs.to(device()), torch.randint(0, 10, (16,), generator=generator).to(device())


def _trained(library: Any, side: str, make: Callable[[Any], torch.optim.Optimizer], steps: int) -> list[torch.Tensor]:
    net = make_net()
    extra = {"mode": "sync"} if library is hvd else {}
    named = [(f"{side}.{name}", param) for name, param in net.named_parameters()]
    optimizer = library.DistributedOptimizer(make(net.parameters()), named_parameters=named, **extra)
    for inputs, labels in made_batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    if library is hvd:
        optimizer.close()
    return [param.detach().clone() for param in net.parameters()]


def equal(kind: str) -> Facts:
    """`sync` against plain Horovod, and plain Horovod against itself."""
    torch.backends.cudnn.deterministic = True
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=EPS),
        "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=EPS, fused=True),
        "capturable": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=EPS, capturable=True),
    }
    libraries = {"plain": horovod, "again": horovod, "star": hvd}
    nets = {side: _trained(library, f"{kind}.{side}", kinds[kind], 40) for side, library in libraries.items()}

    def distance(one: str, other: str) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(nets[one], nets[other], strict=True))

    return {"star": distance("plain", "star"), "again": distance("plain", "again"), "digest": digest(nets["star"])}


def fetched(kind: str) -> Facts:
    """A rank that is behind fetches the optimizer's state, and goes on with it: `manual` steps cannot be replayed."""
    net = make_net()
    options = {"fused": {"fused": True}, "capturable": {"capturable": True}, "plain": {}}[kind]
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3, **options)
    named = [(f"fetched.{name}", param) for name, param in net.named_parameters()]
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode="partial(3)")
    spin, limit_s = Spin(), time.monotonic() + 60.0
    for number, (inputs, labels) in enumerate(made_batches(4000)):
        optimizer.zero_grad()
        spin(SLOW_MS if int(hvd.size()) - 1 == RANK else FAST_MS)
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        if (number >= 60 and optimizer.mode == "partial(3)") or time.monotonic() > limit_s:
            break
    mode = optimizer.mode
    optimizer.close()
    states = [state for state in inside(optimizer).base.state_dict(optimizer)["state"].values()]
    places = sorted({f"{key}:{value.device.type}" for state in states for key, value in state.items()})
    params = list(net.parameters())
    nan = any(bool(torch.isnan(p).any()) for p in params)
    return {"mode": mode, "places": places, "digest": digest(params), "nan": nan, "stats": optimizer.stats()}


def default_device(mode: str) -> Facts:
    """A script that makes the GPU the default of everything."""
    torch.set_default_device(device())
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)  # Without one CUDA has another seed in every process.
        net = torch.nn.Linear(8, 4, dtype=torch.float32)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode)
        for _ in range(60):
            optimizer.zero_grad()
            net(torch.randn(4, 8, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return {"digest": digest(list(net.parameters()))}
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def no_wait(gradients: str) -> Facts:
    """In `sync` the host runs ahead of the device: backward only queues work. `gradients`: `none` or `zeros`."""
    net, spin, waits = make_net(), Spin(), []
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    named = [(f"no_wait.{gradients}.{name}", param) for name, param in net.named_parameters()]
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode="sync")
    host_ms, device_ms = [], []
    for number, (inputs, labels) in enumerate(made_batches(40)):
        optimizer.zero_grad(set_to_none=gradients == "none")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        spin(SLOW_MS / 2.0)
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        began_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number >= 10 else "default")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits += [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]
        host_ms.append(1e3 * (time.perf_counter() - began_s))
        end.record()
        optimizer.step()
        end.synchronize()
        device_ms.append(begin.elapsed_time(end))
    optimizer.close()
    return {
        "waits": waits[:3],
        "backward_ms": statistics.median(host_ms[10:]),
        "device_ms": statistics.median(device_ms[10:]),
        "digest": digest(list(net.parameters())),
    }


SCENARIOS: dict[str, Callable[..., Facts]] = {
    "poison": poison,
    "switching": switching,
    "equal": equal,
    "fetched": fetched,
    "default_device": default_device,
    "no_wait": no_wait,
}


def main(wanted: Sequence[str], scenarios: Mapping[str, Callable[..., Facts]]) -> None:
    """Make what a rank has found out known, scenario by scenario."""
    torch.set_num_threads(1)
    torch.cuda.set_device(device())
    hvd.init()
    facts: dict[str, Facts] = {}
    for name in wanted:
        write_result({"facts": facts, "running": name})
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        kind, *arguments = name.split(":")
        facts[name] = scenarios[kind](*arguments)
        torch.cuda.synchronize()  # An error of a kernel is this scenario's.
        horovod.barrier()
        faulthandler.cancel_dump_traceback_later()
    write_result({"facts": facts, "running": ""})


if __name__ == "__main__":
    main(sys.argv[1:], SCENARIOS)
