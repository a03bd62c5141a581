"""A rank of `benchmarks.background`: a network of equal layers, and its step times."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import star_hvd as hvd
from benchmarks.machine.device import DeviceTime, LayerClock, SleepDevice
from benchmarks.workers.warm_up import await_mode
from scheduler.records import Plan, parse_mode
from star_hvd.config import Config

__all__ = ["LAYERS", "main"]

LAYERS = 8
BATCH = 4
LONGEST_CHOICE_S = 30.0  # Until `auto` has chosen.
SETTLING = 10  # Untimed first steps of the mode, in which buffers and connections are made.


def make_model(mbytes: float) -> nn.Sequential:
    """Make linear layers without bias whose gradients have `mbytes` 10^6 bytes in float32."""
    width = round(math.sqrt(1e6 * mbytes / 4 / LAYERS))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def _mode(spec: dict[str, Any]) -> str | Plan:
    """Return the mode; `ps` gets servers on all hosts, since the link rates for their placement are still unknown."""
    plan = parse_mode(spec["mode"], int(hvd.size()))
    if plan is None or plan.family != "ps":
        return str(spec["mode"])
    return plan.replace(servers=tuple(range(int(hvd.size()))))


def _background(spec: dict[str, Any]) -> bool | None:
    """Return the compared setting: on or off in a fixed mode, the scheduler's choice (None) or off in `auto`."""
    return None if spec["background"] and spec["mode"] == "auto" else bool(spec["background"])


def _await_choice(step: Callable[[], object], engine: Any) -> None:
    """Make steps until `auto` has switched to servers, which it is expected to, if at all."""
    limit_s = time.monotonic() + LONGEST_CHOICE_S
    while engine.plan.family != "ps" and time.monotonic() < limit_s:
        step()


def _step(model: nn.Sequential, optimizer: Any, inputs: torch.Tensor) -> tuple[float, float]:
    """Make one step; return its time and the part spent in `step()`."""
    began_s = time.monotonic()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    computed_s = time.monotonic()
    optimizer.step()
    ended_s = time.monotonic()
    return ended_s - began_s, ended_s - computed_s


def main(folder: Path) -> None:
    """Train; one rank writes its step times into `folder`."""
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    if not spec["sets"]:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "0"
    hvd.init(process_sets=None if spec["sets"] else [])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model(spec["mbytes"])
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        named_parameters=model.named_parameters(),
        mode=_mode(spec),
        config=Config(background=_background(spec), bucket_bytes=round(1e6 * spec["mbytes"] / LAYERS) + 4096),
    )
    inputs = torch.randn(BATCH, model[0].in_features)
    engine = optimizer._star.core.driver.engine
    clock = LayerClock(model, SleepDevice(), DeviceTime(fixed_s=spec["compute_s"], per_sample_s=0.0),
                       dict.fromkeys(model, 1.0 / LAYERS))
    with clock:
        step, plan = partial(_step, model, optimizer, inputs), parse_mode(spec["mode"], int(hvd.size()))
        if plan is None:
            _await_choice(step, engine)
        else:
            await_mode(step, engine, plan)
        for _ in range(SETTLING):
            step()
        began_s, began = time.monotonic(), engine.step
        times = [step() for _ in range(spec["steps"])]
        total_s = time.monotonic() - began_s
        updates = engine.step - began
    if hvd.rank() == (hvd.size() - 1 if spec["mode"].startswith("subgroup") else 0):  # The last rank is a child there.
        report = hvd.report()
        found = {
            "mode": engine.plan.label,
            "plans": [[plan["mode"], plan["reason"]] for plan in report.plans] if report else [[engine.plan.label, ""]],
            "step_s": total_s / len(times),
            "update_s": total_s / max(1, updates),
            "median_step_s": statistics.median(step_s for step_s, _ in times),
            "in_step_s": statistics.fmean(inside_s for _, inside_s in times),
            "times_s": times,
        }
        (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
