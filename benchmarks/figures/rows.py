"""The catalogue: one row per measurement, with the part of its result that goes into the documents.

Most trainings are of scikit-learn's digits, so that all of it can be measured again for a version; Fashion-MNIST, with
ten times the steps, is the check that they are not a special case.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.lab.options import star_hvd_takes
from scheduler.plan.mode_names import parse_mode

__all__ = ["LINK_FIGURES", "ROWS", "Row", "supported_modes"]

Figures = dict[str, Any]
RANKS = 4
TTA = "benchmarks.tta"
SHOWN = ("straggler_free", "plain", "star")
QUICK_TTA = ("--seeds=1", "--epochs=1", "--device-ms=5", "--dataset=digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        name: Its key.
        part: The table it belongs to.
        module: The benchmark.
        options: Its command line, without `--json`.
        quick: Options appended for a smoke test; if an option is given twice, the last one counts.
        pick: Maps the benchmark's JSON to the recorded figures.
        modes: Fixed modes trained beside the variants; modes that the code does not know are left out.
        trace_seed: Seed of the synthetic trace that the row replays.
        results_of: Rows whose JSON files come first on the command line.
        mode: The mode of `star`; the row is skipped if the version lacks it.
        exact: Whether the row needs `accuracy="exact"`.
    """

    name: str
    part: str
    module: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    pick: Callable[[Figures], Figures]
    modes: tuple[str, ...] = ()
    trace_seed: int | None = None
    results_of: tuple[str, ...] = ()
    mode: str = ""
    exact: bool = False

    def missing(self) -> str | None:
        """Return what the row needs and this version lacks, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"this version has no {self.module}"
        if self.mode and not supported_modes((self.mode,)):
            return f"this version has no mode {self.mode}"
        if self.exact and not star_hvd_takes("DistributedOptimizer", "accuracy"):
            return "DistributedOptimizer of this version takes no accuracy"
        return None


def supported_modes(modes: tuple[str, ...], ranks: int = RANKS) -> tuple[str, ...]:
    """Return those of `modes` that this version supports."""
    found = []
    for mode in modes:
        try:
            parse_mode(mode, ranks)
        except ValueError:
            continue
        found.append(mode)
    return tuple(found)


def of_tta(result: Figures) -> Figures:
    """Return the figures of a training row: per variant and fixed mode the time, its ratios, accuracy and feeding."""
    modes = result["modes"].items()
    fixed = {name: {**one, "median_s": one["seconds"], "seeds": one["per_seed"]} for name, one in modes}
    rows = {**result["variants"], **fixed}
    common = ("scenario", "dataset", "network", "ranks", "cores", "target_accuracy", "model_bytes")
    return {
        **{name: result[name] for name in common},
        "seeds": len(result["spec"]["seeds"]),
        "trained": {name: _trained(values, result["plain_s"]) for name, values in rows.items()},
        **{name: result[name] for name in OF_DEATHS if name in result},
    }


def _trained(values: Figures, plain_s: float | None) -> Figures:
    reached = [seed["time_to_accuracy_s"] for seed in values["seeds"]]
    known = [time_s for time_s in reached if time_s is not None]
    median_s = values["median_s"]
    return {
        "seconds": median_s,
        "least_s": min(known, default=None),
        "most_s": max(known, default=None) if len(known) == len(reached) else None,
        "ratio": median_s / plain_s if median_s is not None and plain_s else None,
        "bound_ratio": values["bound_ratio"],
        "final_accuracy": values["final_accuracy"],
        "max_staleness": values["max_staleness"],
        "feeding": values["feeding"],
    }


def keys(*names: str) -> Callable[[Figures], Figures]:
    """Return a function that copies these keys of a result, leaving out those that a version lacks."""
    return lambda result: {name: result[name] for name in names if name in result}


def of_policy(result: Figures) -> Figures:
    """Return the mean regret of the learned policy and of the others."""
    return {"scenarios": result["scenarios"], "auto": result["mean_regret"], **result["baselines"]}


def of_fidelity(result: Figures) -> Figures:
    """Return how well the simulator and the predictions agree with real trainings."""
    return {
        "kendall_tau": result["kendall_tau"]["mean"],
        "median_step_error": result["fidelity"]["median_error"],
        "real_regret": result["real_regret"]["mean"],
    }


def of_harm(result: Figures) -> Figures:
    """Return the figures of `auto` against `sync` on a busy machine."""
    ratios = [job["ratio"] for job in result["jobs"]]
    return {"cores": result["cores"], "jobs": len(ratios), "median": statistics.median(ratios), "worst": max(ratios)}


def of_neighbours(result: Figures) -> Figures:
    """Return how often servers avoided a busy host, and the step time of another job beside them."""
    busy, neighbour = result["busy"], result["neighbour"]
    return {"avoided": busy["avoided"], "of": busy["of"], "neighbour_ratio": neighbour["ratio"]["placed"]}


def _training(name: str, part: str, *options: str, modes: tuple[str, ...] = ()) -> Row:
    """Return a row of trainings, all its variants in one run. Of an option given twice the last counts."""
    return Row(
        name=name,
        part=part,
        module=TTA,
        options=("--seeds=3", f"--variants={','.join(SHOWN)}", *options),
        quick=QUICK_TTA,
        pick=of_tta,
        modes=modes,
    )


def _scenario(name: str, *modes: str, options: tuple[str, ...] = ()) -> Row:
    return _training(name, "scenarios", f"--scenario={name}", *options, modes=modes)


def _trace(seed: int) -> Row:
    row = _training(f"trace-{seed}", "scenarios", "--scenario=trace", "--seeds=1", modes=("partial(2)",))
    return replace(row, trace_seed=seed)


def _exact(scenario: str, *options: str, modes: tuple[str, ...] = ()) -> Row:
    """Return a row in which `auto` may choose only among modes without stale gradients."""
    row = _training(f"exact-{scenario}", "exact", f"--scenario={scenario}", "--accuracy=exact", *options, modes=modes)
    return replace(row, exact=True)


BALANCED = ("sync(balanced)",)
LINK_FIGURES = (
    "sync_lossless", "sync_lossless_bound", "sync_auto", "sync_auto_fp16", "sync_auto_long",
    "sync_auto_long_bound", "compute_bound", "ps_bound", "ps_background_bound", "ps_least_bound",
    "ps_wire_bound", "ps_auto", "local_exposed",
)  # fmt: skip
OF_DEATHS = ("killed", "recovery_s", "rebuild_s", "lost_steps", "failed_attempts")
STEP_FIGURES = ("ranks", "cores", "network", "mode", "ratio", "block_ratio_quartiles", "folds")
ROWS: tuple[Row, ...] = (
    _scenario("none", "partial(3)", *BALANCED),
    # Five seeds, for the accuracy. `sync` is plain Horovod's lockstep fed by `hvd.shard`; in the next row star_hvd is
    # fed the way plain Horovod is.
    _scenario("one-slow", "ps(backup=1)", "sync", *BALANCED, options=("--seeds=5",)),
    _training("one-slow-sampler", "scenarios", "--scenario=one-slow", "--feeding=sampler"),
    _scenario("two-slow", "subgroup(0,1)", *BALANCED),
    _scenario("rotating", "partial(2)"),
    _trace(1),
    _trace(2),
    _trace(3),
    _scenario("slow-link", "subgroup(0,1,2)", options=("--seeds=2",)),
    _scenario("slow-input", *BALANCED),
    _scenario("frozen", "ps(grace=1)", options=("--seeds=1",)),
    _training("one-slow-fashion", "scenarios", "--scenario=one-slow", "--dataset=fashion", "--seeds=1", modes=BALANCED),
    _training(
        "frozen-fashion", "scenarios", "--scenario=frozen", "--dataset=fashion", "--epochs=2", "--target=0.85",
        "--seeds=1",
    ),
    _training("conv", "networks", "--scenario=one-slow", "--network=conv", "--seeds=2", modes=BALANCED),
    _training("slow-link-conv", "networks", "--scenario=slow-link", "--network=conv", "--seeds=1"),
    _training("transformer", "networks", "--scenario=one-slow", "--network=transformer", "--seeds=1"),
    _training("killed-server", "faults", "--scenario=killed-server", "--seeds=1", modes=("ps(3)",)),
    _training("killed-worker", "faults", "--scenario=killed-worker", "--seeds=1", modes=("ps(2)",)),
    _exact("none"),
    _exact("one-slow"),
    _exact("two-slow"),
    _exact("rotating", "--microbatches=4"),
    replace(_exact("trace", "--microbatches=4", "--seeds=1"), trace_seed=1),
    _exact("slow-input"),
    replace(
        _training("rotating-steal", "exact", "--scenario=rotating", "--mode=sync(steal)", "--microbatches=4"),
        mode="sync(steal)",
    ),
    Row(
        name="overhead-2", part="costs", module="benchmarks.overhead", options=("--ranks=2",),
        quick=("--blocks=2", "--steps=5", "--device-ms=5"), pick=keys(*STEP_FIGURES),
    ),
    Row(
        name="overhead-4", part="costs", module="benchmarks.overhead", options=("--ranks=4",),
        quick=("--blocks=2", "--steps=5", "--device-ms=5"), pick=keys(*STEP_FIGURES),
    ),
    Row(
        name="overhead-loader", part="costs", module="benchmarks.overhead",
        options=("--ranks=2", "--feed=loader", "--workers=2", "--input-ms-per-sample=2", "--mode=sync"),
        quick=("--blocks=2", "--steps=5", "--device-ms=5"), pick=keys(*STEP_FIGURES),
    ),
    Row(
        name="overhead-work", part="costs", module="benchmarks.overhead",
        options=("--ranks=2", "--work-after-backward-ms=60", "--blocks=8"),
        quick=("--blocks=2", "--steps=5", "--device-ms=5"), pick=keys(*STEP_FIGURES),
    ),
    Row(
        name="loader", part="costs", module="benchmarks.loader", quick=("--epochs=1", "--samples=160"),
        pick=keys("cores", "ratio_5ms", "ratio_jpeg"),
    ),
    Row(
        name="startup", part="costs", module="benchmarks.startup", options=("--optimizers=50",),
        quick=("--runs=1", "--steps=3", "--optimizers=2"),
        pick=keys("ranks", "first_step_extra_s", "end_extra_s", "wall_extra_s", "helper_processes", "helper_memory_mb"),
    ),
    Row(
        name="run-log", part="costs", module="benchmarks.run_log", quick=("--blocks=4", "--steps=5"),
        pick=keys("ranks", "ratio", "ratio_up", "ratio_killed", "complete"),
    ),
    Row(
        name="switches", part="costs", module="benchmarks.switches", quick=("--modes=sync;partial(3)",),
        pick=keys("ranks", "switches", "median_steps", "p90_steps"),
    ),
    Row(
        name="harm", part="costs", module="benchmarks.harm", quick=("--jobs=1", "--steps=30"), pick=of_harm,
    ),
    Row(
        name="ps", part="costs", module="benchmarks.ps", quick=("--blocks=2", "--exchanges=2", "--mbytes=4"),
        pick=keys("model_bytes", "ps_bytes_per_s", "ratio", "ps_server_cpu_s"),
    ),
    Row(
        name="ps-clear", part="costs", module="benchmarks.ps", options=("--no-encryption",),
        quick=("--blocks=2", "--exchanges=2", "--mbytes=4"),
        pick=keys("model_bytes", "ps_bytes_per_s", "ratio", "ps_server_cpu_s"),
    ),
    Row(
        name="transmission", part="costs", module="benchmarks.transmission",
        quick=("--mbytes=0.1", "--mbit=200", "--parts=0.8", "--steps=2", "--warm=1", "--variants=horovod,star"),
        pick=keys("ranks", *LINK_FIGURES),
    ),
    Row(
        name="compression", part="costs", module="benchmarks.compression",
        quick=("--seeds=1", "--epochs=1", "--networks=usual"), pick=keys("ranks", "seeds", "worst_difference"),
    ),
    Row(
        name="neighbours", part="costs", module="benchmarks.neighbours", options=("--placed-only",),
        quick=("--total=1", "--jobs=1", "--turns=1", "--phase-s=3"), pick=of_neighbours,
    ),
    Row(
        name="decision", part="decisions", module="benchmarks.decision", quick=("--ranks", "8", "--repeats", "2"),
        pick=keys("ranks", "decision_ms", "decision_cpu_ms", "coordinator_share"),
    ),
    Row(
        name="policy", part="decisions", module="benchmarks.policy", options=("--scenarios=30",),
        quick=("--scenarios=1",), pick=of_policy,
    ),
    Row(
        name="fidelity", part="decisions", module="benchmarks.fidelity", pick=of_fidelity,
        results_of=("none", "one-slow", "two-slow", "rotating"),
    ),
)  # fmt: skip
