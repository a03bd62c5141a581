"""The simulated twin of a laboratory run: machine constants from one run, then every mode.

The calibration uses only the straggler-free run of plain Horovod. What its step takes beyond the emulated device time
is processor time. Ranks that wait in a collective of plain Horovod spin, so work proceeds at `cores / ranks` of its
speed; star_hvd's ranks sleep while they wait. A part of the remainder is each rank's own (`_OWN`: data, forward,
backward, hooks), the rest is the collective's. These are the only assumptions, the same for all modes and scenarios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lab.scenarios import FREEZE_EVERY_S, FREEZE_S, MEANS, baseline, input_slowdown
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan
from scheduler.simulator import Cluster, Episode, Job, Network, Scenario

__all__ = [
    "Constants", "batches_of", "calibrate", "plan_of", "ranks_of", "simulated_s", "simulated_tta_s", "straggler_free_s",
    "target_steps", "twin",
    "undisturbed_s",
]  # fmt: skip

_OWN = 0.4
"""Part of the processor's time of a step that is every rank's own: local steps on the same machine take it alone."""

_STALL = 4.0
"""A pause of as many longest steps is the machine's, which others use too, and no mode's."""

_JITTER = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Machine constants from the straggler-free run.

    Attributes:
        own_s: Processor time of a batch.
        cycle_s: Processor time of a collective.
        spin_s: What plain Horovod's step takes in addition because waiting ranks spin.
        epoch_s: Time of the end of an epoch.
    """

    own_s: float
    cycle_s: float
    spin_s: float
    epoch_s: float


def _typical(run: dict[str, Any]) -> tuple[Any, Any]:
    """Return the times between successive snapshots in seconds, and the steps in each interval."""
    times, steps = np.asarray(run["times_s"], dtype=np.float64), np.asarray(run["steps"], dtype=np.float64)
    return np.diff(times), np.maximum(np.diff(steps), 0.0)


def undisturbed_s(run: dict[str, Any], step_s: float) -> float:
    """Return the training time of a run without pauses caused by other load on the machine.

    Args:
        run: `train_s`, `times_s` and `steps` of one training.
        step_s: Longest step that the scenario explains.
    """
    lengths, steps = _typical(run)
    stretch_s = _STALL * step_s * np.maximum(steps, 1.0)
    return float(run["train_s"] - np.maximum(lengths - stretch_s, 0.0).sum())


def straggler_free_s(record: dict[str, Any]) -> float:
    """Return the step time of a file's least disturbed straggler-free run in seconds; infinite without one."""
    runs = record.get("variants", {}).get("straggler_free", {}).get("seeds", [])
    return min((float(run["train_s"]) / float(run["global_steps"]) for run in runs), default=math.inf)


def calibrate(record: dict[str, Any]) -> Constants:
    """Return the constants from the least disturbed straggler-free training of plain Horovod in a file.

    Raises:
        ValueError: The file has none.
    """
    spec, runs = record["spec"], record.get("variants", {}).get("straggler_free", {}).get("seeds", [])
    if not runs:
        raise ValueError("there is no straggler-free run; measure with --variants straggler_free,plain,star")
    run = min(runs, key=lambda one: one["train_s"])
    lengths, steps = _typical(run)
    each = lengths[steps > 0] / steps[steps > 0]
    step_s = statistics.median(each.tolist())
    cores, ranks = float(record.get("versions", {}).get("cores", 0) or ranks_of(spec)), float(ranks_of(spec))
    work_s = max(step_s - spec["device_s"], 1e-4)
    passive_s = work_s * min(1.0, cores / ranks)
    # The time that the median step does not account for is attributed to the ends of epochs.
    whole_s = undisturbed_s(run, step_s)
    epoch_s = max(0.0, whole_s - step_s * run["global_steps"]) / spec["epochs"]
    return Constants(
        own_s=_OWN * passive_s,
        cycle_s=(1.0 - _OWN) * passive_s,
        spin_s=work_s - passive_s,
        epoch_s=epoch_s * min(1.0, cores / ranks),
    )


def ranks_of(spec: dict[str, Any]) -> int:
    """Return the number of ranks of the job."""
    return int(spec["ranks"])


def batches_of(spec: dict[str, Any]) -> float:
    """Return the batches of the whole training, of all ranks."""
    samples = float(spec["train_samples"]) * float(spec.get("passes") or 1)
    return float(spec["epochs"]) * samples / float(spec["batch_samples"])


def plan_of(name: str, spec: dict[str, Any]) -> Plan:
    """Return the plan of a mode's name; `plain` is `sync`."""
    n = ranks_of(spec)
    plan = Plan.sync(n) if name in ("plain", "straggler_free") else parse_mode(baseline(name, n - spec["quorum"]), n)
    if plan is None:
        raise ValueError(f"mode {name} is no fixed mode")
    return plan


def twin(record: dict[str, Any], found: Constants, *, plain: bool = False, steps: float = 1e9) -> Scenario:
    """Return the simulated scenario of a laboratory run.

    Args:
        record: The result that `benchmarks.tta` wrote.
        found: Constants of the machine.
        plain: For plain Horovod, whose waiting ranks spin.
        steps: Synchronous steps to the target.
    """
    spec = record["spec"]
    n, device_s = ranks_of(spec), float(spec["device_s"])
    compute_s = device_s + found.own_s
    means = MEANS[spec["scenario"]]
    rows = [[float(factor) for factor in row] for row in spec["rows"]]
    cycle_s = found.cycle_s + (found.spin_s if plain else 0.0)
    slowdowns = tuple(tuple((device_s * f + found.own_s) / compute_s for f in row) for row in rows)
    if means == "input":
        slowdowns = (_input_slowdowns(spec, rows[0], compute_s, cycle_s),)
    usual = float(spec.get("link_bits_per_s") or 0.0) / 8.0 or 1e10
    rates = tuple(usual / (rows[0][rank] if means == "link" else 1.0) for rank in range(n))
    return Scenario(
        cluster=Cluster(
            world_size=n,
            jitter=_JITTER,
            link_bytes_per_s=rates,
            common_jitter=0.0,
            cycle_s=cycle_s,
            overlap=0.2,
            server_s=1e-3,
        ),
        network=Network(
            name=spec["dataset"],
            comm_bytes=int(record.get("model_bytes") or 16_000),
            compute_s=compute_s,
            target_steps=steps,
        ),
        rows=slowdowns if means in ("device", "input") and any(f != 1.0 for row in rows for f in row) else (),
        episodes=_episodes(means, rows[0]),
    )


def _input_slowdowns(
    spec: dict[str, Any], factors: Sequence[float], compute_s: float, cycle_s: float
) -> tuple[float, ...]:
    """Return the factors on each rank's computation that lengthen its step as much as waiting for its samples does."""
    step_s = compute_s + cycle_s
    batch_input_s = float(spec["input_s_per_sample"]) * float(spec["batch_samples"])
    steps = [input_slowdown(step_s, batch_input_s, int(spec["workers"]), factor) for factor in factors]
    return tuple(1.0 + (step - 1.0) * step_s / compute_s for step in steps)


def _episodes(means: str, factors: Sequence[float]) -> tuple[Episode, ...]:
    slow = [rank for rank, factor in enumerate(factors) if factor > 1.0]
    if means == "freeze":
        begins = [FREEZE_EVERY_S - FREEZE_S + k * FREEZE_EVERY_S for k in range(500)]
        return tuple(Episode(rank=r, kind="frozen", start_s=t, end_s=t + FREEZE_S) for r in slow for t in begins)
    if means in ("starve", "quota"):
        return tuple(Episode(rank=r, kind="starved", start_s=0.0, end_s=math.inf, factor=factors[r]) for r in slow)
    return ()


def simulated_s(scenario: Scenario, plan: Plan, spec: dict[str, Any], found: Constants) -> float:
    """Return the time of the whole training; an epoch ends when every rank has finished its last batch of the queue."""
    n, job = scenario.world_size, Job(scenario, plan)
    batches = batches_of(spec) / float(spec["epochs"])
    in_hand = n * max(1, plan.local_steps)
    total_s, account = 0.0, job.state.account
    for _ in range(int(spec["epochs"])):
        begin_s, before, pace_s = job.now_s, float(account.gradients[0]), 0.0
        while float(account.gradients[0]) - before < batches - in_hand:
            last_s, last = job.now_s, float(account.gradients[0])
            job.advance()
            pace_s = (job.now_s - last_s) / max(1e-9, float(account.gradients[0]) - last)
        if plan.mode == "local":
            left = max(0.0, batches - float(account.gradients[0]) + before)
            total_s += job.now_s - begin_s + left * pace_s
            continue
        # Once the queue is empty, ranks finish the batches they have, and the others wait.
        _align(job)
        total_s += job.now_s - begin_s
    return total_s + found.epoch_s * spec["epochs"]


def target_steps(record: dict[str, Any]) -> float:
    """Return the synchronous steps to the target, from the straggler-free runs; infinite if it was not reached."""
    runs = record.get("variants", {}).get("straggler_free", {}).get("seeds", [])
    found = []
    for run in runs:
        reached_s = run.get("time_to_accuracy_s")
        if reached_s is not None:
            after = next((step for t, step in zip(run["times_s"], run["steps"], strict=True) if t >= reached_s), None)
            found.append(float(after if after is not None else run["global_steps"]))
    return statistics.median(found) if found else math.inf


def simulated_tta_s(scenario: Scenario, plan: Plan, spec: dict[str, Any], found: Constants) -> float:
    """Return the time to the target of a twin made with `steps`, infinite if it is not reached.

    The costs of noise and staleness are the generic ones (`Network`), not taken from the run.
    """
    if not math.isfinite(scenario.network.target_steps):
        return math.inf
    n, batches = scenario.world_size, batches_of(spec)
    limit_s = 20.0 * scenario.network.target_steps * max(1.0, max(map(max, scenario.rows), default=1.0))
    job = Job(scenario, plan)
    time_s = job.run(limit_s=limit_s * scenario.network.compute_s * n).time_s
    epochs = float(job.state.account.gradients[0]) / batches * float(spec["epochs"])
    return time_s + math.floor(epochs) * found.epoch_s


def _align(job: Job) -> None:
    """Let all ranks meet at the end of an epoch and start the next one together, in the same mode."""
    from scheduler.simulator.job import make_mode

    state, machines = job.state, job.state.machines
    end_s = job.mode.leave_s()
    state.now_s = end_s + machines.ring_s()
    state.step = np.maximum(state.step, state.batch_step.max(axis=1)) + 1
    all_ranks = np.arange(state.batch_step.size)
    state.report(all_ranks)
    state.begin(all_ranks, np.repeat(state.now_s, machines.n), np.repeat(state.step, machines.n))
    job.mode = make_mode(state, [job.plan])
