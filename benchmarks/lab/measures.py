"""From records to figures: accuracies of snapshots, time to accuracy, medians over seeds."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lab.networks import make_network
from benchmarks.lab.scenarios import KILLED, Scenario, bound_s, input_slowdown, link_slowdown
from benchmarks.lab.spec import ALL_VARIANTS, FREE_VARIANTS, PLAIN_VARIANTS, RunRecord, RunSpec
from benchmarks.lab.tasks import Task

__all__ = [
    "REQUIRED_KEYS",
    "SMOOTHED_EVALUATIONS",
    "accuracies",
    "accuracies_of",
    "in_force",
    "median_or_none",
    "model_bytes",
    "summarize",
    "time_to_accuracy_s",
]

SMOOTHED_EVALUATIONS = 3
CURVE_SAMPLES = 3000  # Of the held-out samples; with all of them, evaluation would take longer than training.
_OF_MODES = ("step_s", "reached", "folds", "drops", "max_staleness", "bound_ratio", "feeding")
REQUIRED_KEYS = (
    "scenario",
    "ranks",
    "target_accuracy",
    "straggler_free_s",
    "plain_s",
    "drop_s",
    "star_s",
    "ratio",
    "bound_s",
    "bound_ratio",
    "final_accuracy",
    "folds",
    "drops",
    "max_staleness",
    "modes",
)


def accuracies(snapshots: Path, spec: RunSpec, task: Task) -> list[float]:
    """Return the accuracy of every snapshot in the file `snapshots`; see `accuracies_of`."""
    with np.load(snapshots) as arrays:
        return accuracies_of(arrays["vectors"], spec, task)


def accuracies_of(vectors: Sequence[np.ndarray], spec: RunSpec, task: Task) -> list[float]:
    """Return the accuracy of every parameter vector: the last on all held-out samples, the others on a subset."""
    model = make_network(spec.dataset, spec.hidden_units, spec.network)
    values = []
    with torch.no_grad():
        for index, vector in enumerate(vectors):
            samples = slice(None if index + 1 == len(vectors) else CURVE_SAMPLES)
            x, y = task.test_x[samples], task.test_y[samples]
            nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())
            values.append(float((model(x).argmax(1) == y).float().mean()))
    return values


def time_to_accuracy_s(
    times_s: Sequence[float], accuracy: Sequence[float], target: float, smoothed: int = SMOOTHED_EVALUATIONS
) -> float | None:
    """Return when a running median of the evaluations first reaches the target.

    Args:
        times_s: Time of each evaluation.
        accuracy: Its accuracy, same length.
        target: Accuracy to reach.
        smoothed: Evaluations in the running median; the time is that of the last of them.

    Returns:
        Seconds, or None if the target is never reached.
    """
    if len(times_s) != len(accuracy):
        raise ValueError(f"{len(times_s)} times and {len(accuracy)} accuracies; expected as many")
    for end in range(smoothed, len(accuracy) + 1):
        if statistics.median(accuracy[end - smoothed : end]) >= target:
            return float(times_s[end - 1])
    return None


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median over seeds, counting None as infinitely late; None if that is the median."""
    if not values:
        return None
    median = statistics.median(float("inf") if value is None else value for value in values)
    return median if median < float("inf") else None


def summarize(spec: RunSpec, target: float, records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the figures of a run: `REQUIRED_KEYS` and, per variant and seed, the data behind them.

    Args:
        spec: The run's specification.
        target: Accuracy to reach.
        records: One per variant and seed, with accuracies.
    """
    variants = {name: _variant(name, target, records) for name in ALL_VARIANTS if name in spec.variants}
    modes = {name: _variant(name, target, records) for name in spec.modes}
    medians = {name: variants[name]["median_s"] if name in variants else None for name in ALL_VARIANTS}
    scenario = Scenario(name=spec.scenario, rows=spec.rows)
    free_s = medians["straggler_free"]
    capacity = _capacity(spec, scenario, variants)
    bound = None if free_s is None else bound_s(free_s, capacity, spec.ranks)
    star = variants.get("star", {})
    for name, values in (*variants.items(), *modes.items()):
        values["bound_ratio"] = _ratio(values["median_s"], free_s if name in FREE_VARIANTS else bound)
        values["feeding"] = spec.feeding_of(name)
    return {
        "scenario": spec.scenario,
        "network": spec.network,
        "ranks": spec.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "dataset": spec.dataset,
        "mode": spec.mode,
        "slowdown": max(map(max, spec.rows)),
        "quota_cores": spec.quota_cores,
        "link_bits_per_s": spec.link_bits_per_s,
        "model_bytes": model_bytes(spec),
        "target_accuracy": target,
        **{f"{name}_s": medians[name] for name in ALL_VARIANTS},
        "ratio": _ratio(medians["star"], medians["plain"]),
        "drop_ratio": _ratio(medians["drop"], medians["plain"]),
        "bound_s": bound,
        "bound_ratio": _ratio(medians["star"], bound),
        "own_bound_ratio": _own_bound_ratio(medians, capacity, spec.ranks),
        "final_accuracy": {name: values["final_accuracy"] for name, values in variants.items()},
        "folds": star.get("folds"),
        "drops": star.get("drops"),
        "max_staleness": star.get("max_staleness"),
        "train_s": {name: values["train_median_s"] for name, values in variants.items()},
        "train_ratio": _ratio(*(variants.get(name, {}).get("train_median_s") for name in ("star", "plain"))),
        "train_bound_ratio": _train_bound_ratio(variants, capacity, spec.ranks),
        "mode_timeline": [_plans(record) for record in records if record.variant == "star"],
        "modes": {name: _mode(values, medians["plain"]) for name, values in modes.items()},
        **(_recovery(variants, modes) if spec.scenario in KILLED else {}),
        "variants": variants,
    }


def model_bytes(spec: RunSpec) -> int:
    """Return the size of the parameters, which is also that of a gradient."""
    model = make_network(spec.dataset, spec.hidden_units, spec.network)
    return sum(4 * parameter.numel() for parameter in model.parameters())


def _capacity(spec: RunSpec, scenario: Scenario, variants: dict[str, Any]) -> float:
    """Return the speed of all ranks in units of a normal rank; link and input factors count by the step they cause."""
    free = variants.get("straggler_free")
    if scenario.means not in ("link", "input") or free is None:
        return scenario.capacity(spec.device_fixed_s / spec.device_s if spec.device_s else 0.0)
    factor, step_s = scenario.slowdown(spec.ranks - 1, 0), free["step_s"]
    if scenario.means == "link":
        last = link_slowdown(step_s, model_bytes(spec), spec.link_bits_per_s, spec.link_bits_per_s / factor)
    else:
        last = input_slowdown(step_s, spec.input_s_per_sample * spec.batch_samples, spec.workers, factor)
    return spec.ranks - 1 + 1.0 / last


def _mode(values: dict[str, Any], plain_s: float | None) -> dict[str, Any]:
    """Return the figures of a fixed mode, with the same keys as those of `auto`."""
    return {
        "seconds": values["median_s"],
        "ratio": _ratio(values["median_s"], plain_s),
        "train_s": values["train_median_s"],
        "global_steps": statistics.median(run["global_steps"] for run in values["seeds"]),
        "final_accuracy": values["final_accuracy"],
        "in_force": statistics.fmean(in_force(run["timeline"]) for run in values["seeds"]),
        **{name: values[name] for name in _OF_MODES},
        "per_seed": values["seeds"],
    }


def in_force(timeline: Sequence[dict[str, Any]]) -> float:
    """Return the share of steps not made in `sync`; below 1 if the mode came into force late or was refused."""
    return statistics.fmean(entry["mode"] != "sync" for entry in timeline) if timeline else 0.0


def _recovery(variants: dict[str, Any], modes: dict[str, Any]) -> dict[str, Any]:
    """Return what the death of a process cost star_hvd: the worst over all seeds, variants and modes with a kill.

    `failed_attempts` counts jobs that failed and were retried, by variant and mode, plain Horovod's included.
    """
    trained = {**variants, **modes}
    of_star = [values for name, values in trained.items() if name not in PLAIN_VARIANTS]
    runs = [run for values in of_star for run in values["seeds"]]
    struck = [run for run in runs if run["killed"]]
    return {
        "killed": len(struck),
        "recovery_s": max((run["recovery_s"] for run in struck), default=None),
        "lost_steps": max((run["lost_steps"] for run in struck), default=None),
        "rebuild_s": max((run["rebuild_s"] for run in struck), default=None),
        "failed_attempts": {
            name: sum(run["failed_attempts"] for run in values["seeds"]) for name, values in trained.items()
        },
    }


def _variant(name: str, target: float, records: Sequence[RunRecord]) -> dict[str, Any]:
    runs = sorted((record for record in records if record.variant == name), key=lambda record: record.seed)
    reached = [time_to_accuracy_s(run.times_s, run.accuracies, target) for run in runs]
    return {
        "median_s": median_or_none(reached),
        "reached": sum(value is not None for value in reached),
        "final_accuracy": statistics.fmean(run.accuracies[-1] for run in runs),
        "train_median_s": statistics.median(run.train_s for run in runs),
        "step_s": statistics.median(run.train_s / run.global_steps for run in runs),
        "folds": _over_runs(sum, [run.folds for run in runs]),
        "drops": _over_runs(sum, [run.drops for run in runs]),
        "max_staleness": _over_runs(max, [run.max_staleness for run in runs]),
        "seeds": [{"time_to_accuracy_s": time_s, **run.to_dict()} for time_s, run in zip(reached, runs, strict=True)],
    }


def _over_runs(total: Callable[[list[int]], int], counts: Sequence[int | None]) -> int | None:
    """Return the total of a counter; None if a training did not measure it."""
    known = [count for count in counts if count is not None]
    return total(known) if len(known) == len(counts) else None


def _own_bound_ratio(medians: dict[str, float | None], capacity: float, ranks: int) -> float | None:
    """Return the time over the bound from star_hvd's own straggler-free time: the loss due to the straggler alone."""
    free_s = medians["star_free"]
    if free_s is None:
        return None
    return _ratio(medians["star"], bound_s(free_s, capacity, ranks))


def _train_bound_ratio(variants: dict[str, Any], capacity: float, ranks: int) -> float | None:
    if "star" not in variants or "straggler_free" not in variants:
        return None
    bound = bound_s(variants["straggler_free"]["train_median_s"], capacity, ranks)
    return _ratio(variants["star"]["train_median_s"], bound)


def _plans(record: RunRecord) -> dict[str, Any]:
    return {"seed": record.seed, "plans": record.report.get("plans", [])}


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
