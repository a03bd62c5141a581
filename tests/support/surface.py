"""What users and their stored data depend on: public names and signatures, settings, message kinds, columns, keys.

`python -m tests.support.surface` prints it; `tests/golden/public_surface.json` is its output at the last intended
change.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import star_hvd
from scheduler.learning import dataset, features, registry
from scheduler.plan import mode_names
from scheduler.plan.plan import MODES, RULES, Plan, PlanError
from scheduler.policy.switch_outcome import SwitchOutcome
from scheduler.records import StepReport, StepTimes
from star_hvd.channel import messages
from star_hvd.run_log.convert import RunState, flat, window_metrics
from star_hvd.telemetry.resources import Resources

__all__ = ["GOLDEN", "surface"]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "public_surface.json"


def surface() -> dict[str, Any]:
    """Return the whole surface as JSON values."""
    return {
        "names": {name: _described(getattr(star_hvd, name)) for name in sorted(star_hvd.__all__)},
        "config": {item.name: repr(item.default) for item in dataclasses.fields(star_hvd.Config)},
        "messages": sorted(_kinds()),
        "modes": {"families": list(MODES), "rules": list(RULES), "names": sorted(mode_names.NAMED)},
        "plan": sorted(_plan_keys()),
        "features": list(features.FEATURES),
        "columns": {"meta": list(dataset.META), "targets": list(dataset.TARGETS), "version": dataset.TABLE_VERSION},
        "registry": {"model": registry.MODEL_NAME, "experiment": registry.EXPERIMENT},
        "mlflow": _mlflow_keys(),
        "run_log": {
            "step": list(StepReport(rank=0, step=0, times=StepTimes(1.0)).as_record()),
            "resources": [item.name for item in dataclasses.fields(Resources)],
            "outcome": list(_outcome_record()),
        },
    }


def _described(value: Any) -> str:
    if isinstance(value, ModuleType):
        return "module"
    if not getattr(value, "__module__", "star_hvd").startswith(("star_hvd", "scheduler")):
        return "Horovod's"
    if inspect.isclass(value):
        try:
            return _without_addresses(f"class{inspect.signature(value)}")
        except (TypeError, ValueError):
            return "class"
    return _without_addresses(inspect.signature(value)) if inspect.isfunction(value) else type(value).__name__


def _without_addresses(signature: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(signature))


def _kinds() -> set[str]:
    for module in pkgutil.iter_modules(messages.__path__):
        import_module(f"{messages.__name__}.{module.name}")
    return set(import_module(f"{messages.__name__}.base").kinds())


def _plan_keys() -> set[str]:
    """Return the keys under which a plan's fields are stored."""
    try:
        Plan.from_dict({"mode": "sync", "world_size": 4, "quorum": 4, "no such field": 0})
    except PlanError as error:  # The message names all of them.
        return set(re.findall(r"'(\w+)'", str(error).partition("expected")[2]))
    raise AssertionError("an unknown field of a plan was taken")


def _outcome_record() -> list[str]:
    values: dict[str, Any] = {item.name: 1.0 for item in dataclasses.fields(SwitchOutcome)}
    return sorted(SwitchOutcome(**values).as_record())


def _mlflow_keys() -> dict[str, list[str]]:
    """Return the keys of metrics and parameters, from a made-up run that has all of them."""
    ranks = {name: [1.0, 2.0] for name in ("compute_s", "wait_s", "offset_s", "cpu_share", "input_share")}
    window = {
        "kind": "window", "time_s": 2.0, "step": 10, "mode": "sync", "noise_scale": 3.0, "loss": 0.5, "folds": 1.0,
        "closed_early": 1.0, "effective_batch": 64.0, "steps_per_s": 5.0, "ranks": ranks,
        "stragglers": [{"rank": 1, "slowdown": 2.0, "cause": "compute", "since_step": 3, "evidence": "x"}],
    }  # fmt: skip
    plan = {"kind": "plan", "time_s": 1.0, "step": 0, "plan": Plan.sync(2).to_dict(), "label": "sync", "reason": "x"}
    state = RunState()
    for event in (
        {"kind": "facts", "time_s": 0.0, "values": {"target": "accuracy>=0.9"}},
        plan,
        window,
        {"kind": "metric", "time_s": 3.0, "step": 12, "name": "accuracy", "value": 0.95},
        {**plan, "time_s": 4.0, "step": 20, "plan": Plan.partial(2, 1).to_dict(), "label": "partial(1)"},
    ):
        state.take(event)
    metrics = {key for key, *_ in window_metrics(window, 1.0)}
    summaries = [segment.summary() for segment in state.segments]
    return {
        "metrics": sorted(metrics),
        "totals": sorted(state.totals()),
        "segment": sorted({key for found in summaries for key, value in found.items() if math.isfinite(value)}),
        "plan_params": sorted(flat({"plan": plan["plan"]})),
    }


if __name__ == "__main__":
    json.dump(surface(), sys.stdout, indent=1, sort_keys=True)
    print()
