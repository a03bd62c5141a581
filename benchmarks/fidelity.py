"""Real laboratory runs against their simulated twins, predicted orders of modes, and regret of `auto`.

    python -m benchmarks.fidelity FILES... --json FILE

FILES are written by `python -m benchmarks.tta --json`, one scenario each, with fixed modes beside `auto`. Figures:

* `fidelity`: real against simulated time per step, a step being as many batches as ranks; the median error over modes
  and scenarios. The machine constants come from a single run: the least disturbed straggler-free one of plain Horovod.
  Scenarios with another network, device time or link use a straggler-free run of their own. Times to accuracy are
  simulated with generic costs of noise and staleness, not with those of this network;
* `kendall_tau`: agreement between the predicted order of the modes (by the cost model, and by the trained predictor if
  there is one) and the order of their real times to accuracy; the mean over scenarios;
* `real_regret`: time to accuracy of `auto` over that of the best fixed mode, minus 1, and over plain Horovod's.

When a single run crosses its target is partly chance: an accuracy that dips at the wrong evaluation costs a fifth of
the time. So tau and regret are given twice: for the target itself, and for the geometric mean of the times to the
target and to five lower ones, each one point below the previous (`smooth`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lab.json_option import json_file
from benchmarks.lab.measures import time_to_accuracy_s
from benchmarks.lab.scenarios import FREEZE_EVERY_S, KILLED
from benchmarks.lab.spec import write_json
from benchmarks.lab.twin import (
    Constants,
    batches_of,
    calibrate,
    plan_of,
    ranks_of,
    simulated_s,
    simulated_tta_s,
    straggler_free_s,
    target_steps,
    twin,
    undisturbed_s,
)
from scheduler.cost.conditions import NOISE, Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from scheduler.simulator import Job

__all__ = ["compare", "kendall_tau", "main", "predictions", "regret"]

_TIE = 0.03
"""Two real times that differ by less are no order: seeds and the machine differ by as much."""

_LEARNED_STEPS = 40

_TARGETS, _POINT = 6, 0.01


def kendall_tau(predicted: Sequence[float], real: Sequence[float], tie: float = _TIE) -> float:
    """Return Kendall's tau, -1 to 1: concordant minus discordant pairs, over the pairs that are not tied.

    Args:
        predicted: Smaller is better.
        real: The same; infinite where a target was missed.
        tie: Relative difference below which two real values are tied.

    Returns:
        NaN if all pairs are tied.
    """
    agree = total = 0
    for i in range(len(real)):
        for j in range(i):
            if real[i] == real[j] or abs(real[i] - real[j]) <= tie * min(real[i], real[j]):
                continue
            total += 1
            difference = (predicted[i] - predicted[j]) * (1.0 if real[i] > real[j] else -1.0)
            agree += int(np.sign(difference)) if math.isfinite(difference) else 0
    return agree / total if total else math.nan


def _runs(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the trainings by name: `plain` and every fixed mode."""
    found = {"plain": record["variants"]["plain"]["seeds"]} if "plain" in record["variants"] else {}
    found.update({name: mode["per_seed"] for name, mode in record["modes"].items()})
    return {name: runs for name, runs in found.items() if runs}


def compare(record: dict[str, Any], found: Constants) -> list[dict[str, Any]]:
    """Return real and simulated time per step of every mode of one scenario.

    The least disturbed seed counts, since other load on the machine can only add time.
    """
    spec, rows = record["spec"], []
    n, longest = ranks_of(spec), max(map(max, spec["rows"]))
    for name, runs in _runs(record).items():
        plain = name == "plain"
        plan, scenario = plan_of(name, spec), twin(record, found, plain=plain)
        slow_s = longest * scenario.network.compute_s * max(1, plan.local_steps) + 0.05
        if spec["scenario"] == "frozen":
            slow_s += 4.0  # A freeze is part of the scenario.
        whole_s = min(undisturbed_s(run, slow_s) for run in runs)
        steps = batches_of(spec) / n
        simulated = simulated_s(scenario, plan, spec, found)
        aimed = twin(record, found, plain=plain, steps=target_steps(record))
        rows.append(
            {
                "scenario": spec["scenario"],
                "mode": name,
                "real_step_s": whole_s / steps,
                "simulated_step_s": simulated / steps,
                "error": simulated / whole_s - 1.0,
                "real_tta_s": _seconds(record, name),
                "simulated_tta_s": simulated_tta_s(aimed, plan, spec, found),
            }
        )
    return rows


def _seconds(record: Mapping[str, Any], name: str) -> float:
    """Return the real time to accuracy; infinite if it was not reached."""
    value = record["plain_s"] if name == "plain" else record["modes"][name]["seconds"]
    return math.inf if value is None else float(value)


def smooth_s(record: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the geometric mean, over runs and targets, of times to accuracy; infinite if a target was missed."""
    logs = []
    for run in runs:
        for below in range(_TARGETS):
            target = float(record["target_accuracy"]) - _POINT * below
            time_s = time_to_accuracy_s(run["times_s"], run["accuracies"], target)
            logs.append(math.log(time_s) if time_s else math.inf)
    return math.exp(statistics.fmean(logs)) if logs and math.isfinite(max(logs)) else math.inf


def predictions(record: dict[str, Any], found: Constants, ranker: Any = None) -> dict[str, float]:
    """Return each mode's time to accuracy relative to `sync`, as predicted by a job in `sync` on the simulated twin."""
    spec = record["spec"]
    names = [name for name in _runs(record) if name != "plain"]
    plans = {name: plan_of(name, spec) for name in names}
    active = Plan.sync(ranks_of(spec))
    watcher = _Watcher(active.world_size)
    job = Job(twin(record, found), active, watcher)
    # Long enough to see a rank freeze twice.
    while job.steps < _LEARNED_STEPS or (spec["scenario"] == "frozen" and job.now_s < 3.0 * FREEZE_EVERY_S):
        job.advance(4)
    noise = _noise(record)
    window = dataclasses.replace(job.window(), noise_scale=noise)
    conditions = watcher.conditions or Conditions.from_window(window)
    if conditions is None:
        return {}
    conditions = dataclasses.replace(conditions, noise=noise if math.isfinite(noise) else NOISE)
    offered = [active, *plans.values()]
    ranked = rank(offered, conditions) if ranker is None else ranker(offered, conditions, window, active)
    by_plan = {p.plan.label: p.relative for p in ranked}
    # Plain Horovod is not a star_hvd mode. Its waiting ranks spin; the cost of that is a constant of the machine.
    interval_s = next(p.interval_s for p in ranked if p.plan.label == active.label)
    values = {"plain": by_plan[active.label] * (1.0 + found.spin_s / interval_s)}
    values.update({name: by_plan[plan.label] for name, plan in plans.items() if plan.label in by_plan})
    return values


class _Watcher:
    """Policy that never switches and keeps the conditions of its latest decision."""

    def __init__(self, n: int) -> None:
        self.conditions: Conditions | None = None
        self._policy = CostPolicy(n, ranker=self._rank)

    def decide(self, window: Window, active: Plan) -> None:
        self._policy.decide(window, active)

    def _rank(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        self.conditions = conditions
        return rank(offered, conditions)


def _noise(record: Mapping[str, Any]) -> float:
    """Return the noise scale that a laboratory job measured; NaN if none did."""
    reports = [run.get("report", {}) for run in record["variants"].get("star", {}).get("seeds", [])]
    scales = [r["noise_scale"] for r in reports if isinstance(r.get("noise_scale"), float)]
    known = [scale for scale in scales if math.isfinite(scale) and scale > 0.0]
    return statistics.median(known) if known else math.nan


def regret(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the regret of `auto` against the best fixed mode, including plain Horovod; None if not measured."""
    auto = record.get("star_s")
    fixed = {name: _seconds(record, name) for name in _runs(record)}
    if "star" not in record["variants"] or not fixed or not math.isfinite(min(fixed.values())):
        return None
    best = min(fixed, key=lambda name: fixed[name])
    seconds = math.inf if auto is None else float(auto)
    smooth = {name: smooth_s(record, runs) for name, runs in _runs(record).items()}
    smooth_auto_s, smooth_best_s = smooth_s(record, record["variants"]["star"]["seeds"]), min(smooth.values())
    return {
        "scenario": record["scenario"],
        "auto_s": seconds,
        "best": best,
        "best_s": fixed[best],
        "regret": seconds / fixed[best] - 1.0,
        "smooth_best": min(smooth, key=lambda name: smooth[name]),
        "smooth_regret": smooth_auto_s / smooth_best_s - 1.0 if math.isfinite(smooth_best_s) else math.nan,
        "smooth_over_plain": smooth_auto_s / smooth["plain"] if "plain" in smooth else None,
        "over_plain": seconds / fixed["plain"] if "plain" in fixed else None,
    }


def _ranker(console: Console) -> Any:
    """Return the trained predictor, or None."""
    import os

    try:
        from scheduler.learning.model_choice import find_ranker
    except ImportError as error:
        console.print(f"no trained predictor: {error}", markup=False)
        return None
    return find_ranker(os.environ, lambda text: console.print(text, markup=False))


def _setting(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that the machine constants depend on."""
    spec = record["spec"]
    return tuple(
        spec.get(name)
        for name in (
            "dataset", "network", "device_s", "ranks", "batch_samples", "hidden_units", "link_bits_per_s",
            "input_s_per_sample", "workers", "feeding",
        )
    )


def _calibration(records: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], Constants]:
    """Return the constants of every setting, from its least disturbed straggler-free run."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        if "straggler_free" in record["variants"]:
            other = best.setdefault(_setting(record), record)
            best[_setting(record)] = min(record, other, key=straggler_free_s)
    return {setting: calibrate(record) for setting, record in best.items()}


def _report(
    records: Sequence[dict[str, Any]], console: Console, shared: Constants | None
) -> tuple[dict[str, Any], list[Table]]:
    ranker, measured = _ranker(console), _calibration(records)
    rows, taus, regrets, constants = [], [], [], {}
    for record in records:
        name = record["scenario"]
        found = shared or measured.get(_setting(record)) or calibrate(record)
        constants[name] = {"own_s": found.own_s, "cycle_s": found.cycle_s, "spin_s": found.spin_s,
                           "epoch_s": found.epoch_s}
        rows += compare(record, found)
        real = {mode: _seconds(record, mode) for mode in _runs(record)}
        for kind, one in (("cost_model", None), ("learned", ranker)):
            if kind == "learned" and ranker is None:
                continue
            predicted = predictions(record, found, one)
            modes = [mode for mode in real if mode in predicted]
            own = {mode: smooth_s(record, runs) for mode, runs in _runs(record).items()}
            tau, smooth = (kendall_tau([predicted[m] for m in modes], [by[m] for m in modes]) for by in (real, own))
            taus.append({"scenario": name, "by": kind, "tau": tau, "smooth_tau": smooth, "predicted": predicted,
                         "real_s": real})
        lost = regret(record)
        regrets += [lost] if lost is not None else []
    errors = [abs(row["error"]) for row in rows]
    means = _mean_taus(taus)
    smooth_regrets = [r["smooth_regret"] for r in regrets if not math.isnan(r["smooth_regret"])]
    summary = {
        "schema": 1,
        "fidelity": {"median_error": statistics.median(errors), "rows": rows, "constants": constants},
        "kendall_tau": {"mean": means.get("learned", means.get("cost_model")), **means, "rows": taus},
        "real_regret": {
            "mean": statistics.fmean(r["regret"] for r in regrets) if regrets else None,
            "smooth_mean": statistics.fmean(smooth_regrets) if smooth_regrets else None,
            "worst_over_plain": max((r["over_plain"] for r in regrets if r["over_plain"]), default=None),
            "rows": regrets,
        },
    }
    return summary, [_steps_table(rows), _tau_table(taus), _regret_table(regrets)]


def _mean_taus(taus: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean taus by what predicted, over the scenarios in which not all times are tied."""
    means = {}
    for prefix, key in (("", "tau"), ("smooth_", "smooth_tau")):
        for kind in ("cost_model", "learned"):
            if values := [one[key] for one in taus if one["by"] == kind and math.isfinite(one[key])]:
                means[f"{prefix}{kind}"] = statistics.fmean(values)
    return means


def _steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Time of a step of as many batches as ranks, ms, and time to accuracy")
    for column in ("scenario", "mode", "real", "simulated", "error", "real TTA s", "simulated"):
        table.add_column(column, justify="left" if column in ("scenario", "mode") else "right")
    for row in rows:
        table.add_row(
            row["scenario"], row["mode"], f"{1e3 * row['real_step_s']:.1f}", f"{1e3 * row['simulated_step_s']:.1f}",
            f"{100.0 * row['error']:+.0f} %", f"{row['real_tta_s']:.2f}",
            f"{row['simulated_tta_s']:.2f}",
        )  # fmt: skip
    return table


def _tau_table(taus: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Order of modes, predicted against real: Kendall's tau")
    for column in ("scenario", "by", "tau", "smooth", "predicted", "real"):
        table.add_column(column)
    for one in taus:
        known = [mode for mode in one["real_s"] if mode in one["predicted"]]
        orders = [" ".join(sorted(known, key=lambda m: values[m])) for values in (one["predicted"], one["real_s"])]
        table.add_row(one["scenario"], one["by"], f"{one['tau']:.2f}", f"{one['smooth_tau']:.2f}", *orders)
    return table


def _regret_table(regrets: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="auto against the best fixed mode and plain Horovod, real runs")
    for column in ("scenario", "auto s", "best mode", "its s", "regret", "over plain", "smooth regret", "over plain"):
        table.add_column(column, justify="left" if column in ("scenario", "best mode") else "right")
    for one in regrets:
        plain = f"{one['over_plain']:.2f}" if one["over_plain"] is not None else ""
        table.add_row(one["scenario"], f"{one['auto_s']:.2f}", one["best"], f"{one['best_s']:.2f}",
                      f"{100.0 * one['regret']:+.0f} %", plain, f"{100.0 * one['smooth_regret']:+.0f} %",
                      f"{one['smooth_over_plain']:.2f}" if one["smooth_over_plain"] is not None else "")
    return table


def read(path: Path) -> dict[str, Any]:
    """Read one scenario's file.

    Raises:
        ValueError: The file is missing, not JSON, or not written by `benchmarks.tta`.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}; expected what python -m benchmarks.tta --json wrote") from None
    missing = {"scenario", "spec", "variants", "modes"} - set(record if isinstance(record, dict) else {})
    if missing:
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}; expected what benchmarks.tta --json wrote")
    return dict(record)


def _comparable(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the scenarios to compare, without those with killed processes.

    Raises:
        ValueError: A file cannot be read or has no two modes to put in order, or no scenario is left.
    """
    records = []
    for path in paths:
        record = read(path)
        if record["scenario"] in KILLED:
            continue
        if len(found := _runs(record)) < 2:
            raise ValueError(
                f"{path} has {', '.join(found) or 'no fixed mode'} alone, which makes no order; expected two or more "
                "of plain Horovod and fixed modes, as by the options --variants straggler_free,plain,star --modes "
                '"partial(3)" of benchmarks.tta'
            )
        records.append(record)
    if not records:
        raise ValueError("no scenario to compare; those with killed processes are left out")
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print three tables, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of benchmarks.tta, one scenario each")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--calibrate-from", type=Path,
                        help="take the machine's constants from the straggler-free run of this file for all")
    args = parser.parse_args(argv)
    console = Console(width=160)
    try:
        records = _comparable(args.files)
        shared = calibrate(read(args.calibrate_from)) if args.calibrate_from is not None else None
        summary, tables = _report(records, console, shared)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if args.json is not None:
        write_json(args.json, summary)
    for table in tables:
        console.print(table)
    tau = summary["kendall_tau"]["mean"]  # None where all real times are tied.
    console.print(
        f"median error of the simulator {100.0 * summary['fidelity']['median_error']:.0f} %, "
        f"mean tau {'-' if tau is None else f'{tau:.2f}'}", highlight=False,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
