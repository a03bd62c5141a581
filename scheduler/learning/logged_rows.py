"""Training rows from logged runs of the same job in several modes, each to its target.

A single run has no information on other modes. If the same job (equal program, sizes, optimizer with its
hyperparameters, batch, target, tags, machine and placement) was run in `sync` and in other modes to the target, moments
of the `sync` runs get the times of the others as labels. Runs in mode `auto`, without a target, or without a `sync` run
of the same job are skipped and reported with the reason, as are runs that continue an earlier training (after an
elastic reset, or from a checkpoint), whose times are those of its rest.

A run that did not reach the target counts as a miss only if it finished, after at least the time that `sync` needed: a
crash says nothing about a mode. The label of its relative time is the time that it was given, a lower bound, because
the probability of reaching the target has a label of its own, as in simulated rows.

Input: files of the run log (`training_logs/README.md`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scheduler.cost.conditions import Array, Conditions
from scheduler.diagnosis.window_stats import MIN_REPORTS, queueing
from scheduler.learning.features import speed
from scheduler.learning.simulated_rows import in_order, moment_rows
from scheduler.mlflow_limits import limit_requests
from scheduler.plan.plan import Plan, PlanError
from scheduler.policy.candidates import candidates, same_plan
from scheduler.records import RankStats, Window
from scheduler.redact import redacted
from scheduler.run_events import read_run_file
from scheduler.target import Target
from scheduler.transmission.behind_compute import EDGE

__all__ = ["LoggedRun", "mlflow_rows", "read_run", "real_rows", "windows"]

_MODE_ARGUMENT = re.compile(r"(?<!\S)(?:--?(?:\w+[-_])*mode(?:=|\s+(?!-))|(?:\w+[-_])*mode=)(?:\w+\([^)]*\)|\S+)")
"""`--mode partial(3)`, `--star-mode=sync`, `mode=ssp(3)`."""

_HISTORY, _MOMENTS = 64, 6
_FIRST_STEP = 8
"""Least number of reports of a rank at a moment."""

_START_SHARE = 0.05
"""Greatest part of a run's time that the `sync` before the user's mode may take. Servers need about 2 s to start."""

_ACTIVE_STEP = 12
"""Step by which the user's mode is active, in old logs, which do not say what the user asked for."""

_LEAST_RATE, _MOST_RATE = 1.0, 1e15  # Bytes per second; a link that is not between them was not measured.
_MOST_COMM_S = 1e6  # As long as no communication of a step takes.
_CLIP = 3.5  # As in `simulated_rows`.


class _Begun(NamedTuple):
    """A plan and when it became active."""

    plan: Plan
    step: int
    time_s: float


class _Report(NamedTuple):
    step: int
    compute_s: float
    late: bool
    runqueue_s: float


@dataclass(slots=True, kw_only=True)
class LoggedRun:
    """One run of the log.

    Attributes:
        name: Name of its folder.
        facts: The job's logged facts.
        plans: Active plans in order, without repetition and without a short `sync` that precedes the user's mode.
        target_s: When the target was reached, seconds since the first plan; infinite if it was not.
        given_s: When it finished, seconds since the first plan; NaN if it failed, was killed, or runs.
        reports: Per rank its reports, in order of step, without the first.
        noise: (step, noise scale) of its windows.
        readings: (step, `window` event), in order.
    """

    name: str
    facts: dict[str, Any]
    plans: list[Plan]
    target_s: float
    given_s: float
    reports: dict[int, list[_Report]]
    noise: list[tuple[int, float]] = field(default_factory=list)
    readings: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Identity of the job; equal for runs of the same job."""
        optimizer, hardware = self.facts.get("optimizer") or {}, self.facts.get("hardware") or {}
        tags = self.facts.get("tags")
        parts = [
            self.facts.get("world_size"), self.facts.get("batch"), str(Target.parse(self.facts.get("target"))),
            tags, _program(str(self.facts.get("program") or ""), tagged=bool(tags)), optimizer.get("class"),
            _first_hyper(optimizer.get("hyper") or {}), optimizer.get("parameters"), hardware.get("cpu"),
            # Absent from old logs, which are compared with each other only.
            hardware.get("gpu"), hardware.get("usable_cpus"), self.facts.get("ranks_per_host"),
        ]
        return json.dumps(parts, sort_keys=True)


def _program(text: str, *, tagged: bool) -> str:
    """The command line without mode arguments; of a tagged job only the program.

    The laboratory tags every measurement and passes it an individual folder as an argument.
    """
    return text.partition(" ")[0] if tagged else " ".join(_MODE_ARGUMENT.sub("", text).split())


def _first_hyper(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Initial hyperparameters: a schedule keeps its initial rate beside the current one."""
    found = dict(hyper)
    if "initial_lr" in found:
        found["lr"] = found.pop("initial_lr")
    return found


class _UnusableRun(ValueError):
    """A run that gives no rows; the message is the reason."""


def read_run(folder: Path) -> LoggedRun | None:
    """Read a run's folder; None if it has no plan, no target, or no reports of some rank."""
    try:
        return _read(folder)
    except _UnusableRun:
        return None


def _read(folder: Path) -> LoggedRun:
    """As `read_run`.

    Raises:
        _UnusableRun: The run cannot be used.
    """
    facts: dict[str, Any] = {}
    plans: list[_Begun] = []
    points: list[tuple[str, float, float]] = []
    noise: list[tuple[int, float]] = []
    readings: list[tuple[int, Mapping[str, Any]]] = []
    end_s, first_batch = math.nan, None
    for event in read_run_file(folder / "events.jsonl"):
        kind = event.get("kind")
        if kind == "facts" and isinstance(event.get("values"), dict):
            facts.update(event["values"])
            # Of several loaders the first one's batch tells jobs apart, as the initial hyperparameters do: a run that
            # ends early is the same job.
            first_batch = first_batch or facts.get("batch")
        elif kind == "plan":
            begun = _Begun(_plan(event), int(event.get("step") or 0), float(event.get("time_s") or 0.0))
            plans += [begun] if not plans or plans[-1].plan != begun.plan else []
        elif kind == "metric" and isinstance(event.get("value"), (int, float)):
            points.append((str(event.get("name")), float(event["value"]), float(event.get("time_s") or 0.0)))
        elif kind == "window":
            if not event.get("ranks") and readings:  # With many ranks, few windows have the readings of each.
                event = {**event, "ranks": readings[-1][1].get("ranks")}
            readings.append((int(event.get("step") or 0), event))
            if isinstance(event.get("noise_scale"), (int, float)):
                noise.append((readings[-1][0], float(event["noise_scale"])))
        elif kind == "end" and event.get("status") == "FINISHED":
            end_s = float(event.get("time_s") or 0.0)
    if first_batch:
        facts["batch"] = first_batch
    if facts.get("continues"):
        raise _UnusableRun("it continues an earlier training")
    target = _target(facts)
    if not plans:
        raise _UnusableRun("it has no plan")
    reached = [time_s for name, value, time_s in points if name == target.name and target.reached(value)]
    begin_s = plans[0].time_s
    target_s = min(reached) - begin_s if reached else math.inf
    if target_s <= 0.0:
        raise _UnusableRun("it reached its target before its first plan, so no time says anything")
    given_s = end_s - begin_s
    modes = _without_start(plans, facts.get("mode"), target_s if reached else given_s)
    reports = _all_reports(folder, modes[0].world_size)
    return LoggedRun(
        name=folder.name, facts=facts, plans=modes, target_s=target_s, given_s=given_s, reports=reports,
        noise=noise, readings=readings,
    )  # fmt: skip


def _without_start(plans: Sequence[_Begun], asked: object, took_s: float) -> list[Plan]:
    """The plans without the `sync` in which a run waits for the user's mode, if it took little of the run's time.

    Args:
        plans: The plans, without repetition.
        asked: The mode that the user asked for; None in old logs.
        took_s: Time to the target, or else to the end; NaN if there is neither.
    """
    modes = [begun.plan for begun in plans]
    if len(modes) < 2 or not modes[0].plain:
        return modes
    if asked is None:
        return modes[1:] if plans[1].step <= _ACTIVE_STEP else modes
    # `grouped` without a number, `grouped(0)` as a label, gets the number of its groups when it becomes active.
    starts = len(modes) == 2 and asked in (modes[1].label, f"{modes[1].mode}(0)")
    # A run without an end is not used: what it lacks, not the start of its mode, is the reason.
    long = plans[1].time_s - plans[0].time_s > _START_SHARE * took_s
    return modes[1:] if starts and not long else modes


def _plan(event: Mapping[str, Any]) -> Plan:
    """The plan of an event, without what differs between events of the same mode."""
    try:
        plan = Plan.from_dict(event.get("plan") or {}).replace(plan_id=0, reason="")
        # In older logs every change of these shares is a plan; shares that the user has set belong to the mode.
        return plan.replace(batch_shares=()) if plan.balanced else plan
    except (PlanError, TypeError) as error:
        raise _UnusableRun(f"it has an invalid plan: {error}") from None


def _target(facts: Mapping[str, Any]) -> Target:
    if not facts.get("target"):
        raise _UnusableRun("it has no target; set STAR_TARGET")
    target = Target.parse(facts["target"])
    if target is None:
        raise _UnusableRun(f"its target is {facts['target']!r}; expected NAME>=NUMBER")
    return target


def _all_reports(folder: Path, world_size: int) -> dict[int, list[_Report]]:
    reports = {}
    for rank in range(world_size):
        reports[rank] = _reports(folder / f"rank{rank}.jsonl")
        if len(reports[rank]) < _FIRST_STEP:
            raise _UnusableRun(f"rank {rank} has {len(reports[rank])} step reports; expected {_FIRST_STEP} or more")
    return reports


def _reports(path: Path) -> list[_Report]:
    """The reports of a rank, without its first, which the coordinator ignores: a first step allocates and compiles."""
    found, steps = [], (item for item in read_run_file(path) if item.get("kind") == "step")
    for item in itertools.islice(steps, 1, None):
        step, time_s, queued_s = item.get("step"), item.get("compute_s"), item.get("runqueue_s")
        if isinstance(step, int) and isinstance(time_s, float) and time_s > 0.0:
            queued_s = max(0.0, float(queued_s or 0.0))  # Not in old logs.
            found.append(_Report(step, time_s, bool(item.get("late")), queued_s))
    return sorted(found)


def windows(run: LoggedRun) -> list[Window]:
    """Windows of the coordinator at some moments of the run, evenly spaced over its steps."""
    last = min(own[-1].step for own in run.reports.values())
    steps = [round(_FIRST_STEP + (last - _FIRST_STEP) * (i + 1) / _MOMENTS) for i in range(_MOMENTS)]
    sizes = run.facts.get("optimizer") or {}
    found = []
    for step in dict.fromkeys(max(_FIRST_STEP, one) for one in steps):
        noise = [value for at, value in run.noise if at <= step]
        event: Mapping[str, Any] = next((event for at, event in reversed(run.readings) if at <= step), {})
        found.append(
            Window(
                step=step, ranks=tuple(_rank_stats(run, step, event)), noise_scale=noise[-1] if noise else math.nan,
                comm_bytes=int(sizes.get("parameter_bytes") or 0), edge_part=_part(event, "edge_part", EDGE),
                reduced_part=_part(event, "reduced_part"), pushed_part=_part(event, "pushed_part"),
            )
        )
    return found


def _rank_stats(run: LoggedRun, step: int, event: Mapping[str, Any]) -> Iterator[RankStats]:
    """The ranks at a step: their reports so far, and the readings of the newest window."""
    kept = {rank: [one for one in own if one.step <= step][-_HISTORY:] for rank, own in sorted(run.reports.items())}
    queued_s, computed_s = (
        np.array([sum(getattr(one, name) for one in own) for own in kept.values()])
        for name in ("runqueue_s", "compute_s")
    )
    _, waits_out = queueing(queued_s, computed_s, np.array([len(own) for own in kept.values()]))
    for waits, (rank, own) in zip(waits_out.tolist(), kept.items(), strict=True):
        times_s = [one.compute_s - waits * one.runqueue_s for one in own]
        rate = _reading(event, "link_bytes_per_s", rank)
        yield RankStats(
            rank=rank, compute_s=tuple(times_s), steps=tuple(one.step for one in own),
            late_share=sum(one.late for one in own) / max(1, len(own)),
            input_share=min(1.0, _reading(event, "input_share", rank)),
            starved_share=min(1.0, _reading(event, "starved_share", rank)),
            link_bytes_per_s=rate if _LEAST_RATE <= rate <= _MOST_RATE else math.nan,
            silent_s=_reading(event, "silent_s", rank),
            comm_s=_comm_s(event),
        )  # fmt: skip


def _reading(event: Mapping[str, Any], name: str, rank: int) -> float:
    """A rank's reading of a window, 0 where it is unknown (older logs have fewer) or negative."""
    values = (event.get("ranks") or {}).get(name) or []
    value = values[rank] if rank < len(values) else None
    return 0.0 if value is None else max(0.0, float(value))


def _comm_s(event: Mapping[str, Any]) -> tuple[float, ...]:
    """Times of communication of a window: its median, the only one logged, as often as makes it known."""
    value = event.get("comm_s")
    known = isinstance(value, (int, float)) and 0.0 <= value < _MOST_COMM_S
    return (float(value or 0.0),) * MIN_REPORTS if known else ()


def _part(event: Mapping[str, Any], name: str, unknown: float = 1.0) -> float:
    """A fraction of the gradient bytes that a window notes; `unknown` in old logs."""
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) and 0.0 < value <= 1.0 else unknown


def real_rows(
    root: Path,
    project: str,
    *,
    missing: Mapping[str, str] | None = None,
    report: Callable[[str], None] | None = None,
) -> list[list[Any]]:
    """Rows of all runs under a folder, in the order of `dataset.columns()`.

    Args:
        root: `training_logs/runs`, or another folder of run folders.
        project: Version of the project, for the rows.
        missing: Runs that exist, but not in the folder, with the reason; they are reported as skipped.
        report: Called with a sentence on how many runs were used, then with one on every skipped run.

    Raises:
        ValueError: The folder does not exist.
    """
    if not root.is_dir():
        raise ValueError(f"--runs is {root}; expected a folder of logged runs")
    folders = sorted(path.parent for path in root.glob("*/events.jsonl"))
    jobs: dict[str, list[LoggedRun]] = {}
    skipped = dict(missing or {})
    count = len(folders) + len(skipped)
    for folder in folders:
        try:
            run = _read(folder)
            _check_mode(run)
            jobs.setdefault(run.key, []).append(run)
        except _UnusableRun as why:
            skipped[folder.name] = str(why)
    found: list[list[Any]] = []
    for runs in jobs.values():
        skipped |= (apart := _no_outcome(runs))
        kept = [run for run in runs if run.name not in apart]
        own = _job_rows(kept, project)
        found += own
        if not own:
            skipped |= {run.name: _why_alone(kept) for run in kept}
    if report is not None:
        report(f"{count - len(skipped)} of {count} runs used")
        for name, reason in sorted(skipped.items()):
            report(f"{name}: {reason}")
    return found


def _check_mode(run: LoggedRun) -> None:
    if run.facts.get("mode") == "auto":
        raise _UnusableRun("it ran in auto; expected one fixed mode")
    if len(run.plans) > 1:  # Mode auto, which older logs do not record, or a mode that became active late.
        labels = ", ".join(dict.fromkeys(plan.label for plan in run.plans))
        raise _UnusableRun(f"it changed its mode ({labels[:80]}); expected one fixed mode")


def _no_outcome(runs: Sequence[LoggedRun]) -> dict[str, str]:
    """Runs of one job that neither reached the target nor show that their mode misses it, with the reason."""
    sync_s = _sync_s(runs)
    if math.isnan(sync_s):
        return {}  # None of them is used: `_why_alone`.
    found = {}
    for run in runs:
        if math.isfinite(run.target_s):
            continue
        if math.isnan(run.given_s):
            found[run.name] = "it ended without its target, but not as FINISHED: that is no miss"
        elif run.given_s < sync_s:
            took = f"{run.given_s:.4g} s, less than the {sync_s:.4g} s that sync needed"
            found[run.name] = f"it ended without its target after {took}: that is no miss"
        elif run.plans[0].label == "sync":
            found[run.name] = "it is in sync and missed the target, which other runs in sync reached"
    return found


def _sync_s(runs: Sequence[LoggedRun]) -> float:
    """Median time to the target of the runs in `sync` that reached it, NaN if none did."""
    times = [run.target_s for run in runs if run.plans[0].label == "sync" and math.isfinite(run.target_s)]
    return statistics.median(times) if times else math.nan


def _why_alone(runs: Sequence[LoggedRun]) -> str:
    """Why runs of one job, each usable by itself, give no rows together."""
    basis = [run for run in runs if run.plans[0].label == "sync"]
    if not basis:
        return "no run of the same job in sync"
    if not any(math.isfinite(run.target_s) for run in basis):
        return "no run of the same job in sync reached the target"
    if len(basis) == len(runs):
        return "no run of the same job in another mode than sync"
    return "no moment of its sync runs has reports of all ranks"


def mlflow_rows(
    environ: Mapping[str, str], project: str, *, report: Callable[[str], None] | None = None
) -> list[list[Any]]:
    """Rows of all jobs that the run log has sent to MLflow, from their artifacts; as `real_rows`.

    Args:
        environ: Provides `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`.
        project: Version of the project, for the rows.
        report: As in `real_rows`.

    Raises:
        ValueError: MLflow is not installed, cannot be reached, or does not have the experiment (any more).
    """
    from scheduler.learning.registry import tracking_uri

    limit_requests()
    try:
        import mlflow
    except ImportError:
        raise ValueError("MLflow is missing; install the extra `train`, or give a folder with --runs") from None
    uri, name = tracking_uri(environ), environ.get("MLFLOW_EXPERIMENT_NAME") or "star-hvd"
    with tempfile.TemporaryDirectory(prefix="star-runs-") as scratch:
        try:
            client = mlflow.MlflowClient(tracking_uri=uri)
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                shown = redacted(uri, environ)
                raise ValueError(f"MLflow at {shown} has no experiment {name}; expected the one the run log sends to")
            if experiment.lifecycle_stage == "deleted":  # With its runs: a search would find none.
                raise ValueError(
                    f"MLflow's experiment {name} was deleted; restore it with `mlflow experiments restore "
                    f"--experiment-id {experiment.experiment_id}`, or set MLFLOW_EXPERIMENT_NAME to another one"
                )
            mlflow.set_tracking_uri(uri)
            missing = _download(client, experiment.experiment_id, Path(scratch))
        except mlflow.exceptions.MlflowException as error:
            raise ValueError(redacted(f"MLflow at {uri} says: {error}", environ)) from None
        missing = {run: redacted(reason, environ) for run, reason in missing.items()}
        return real_rows(Path(scratch), project, missing=missing, report=report)


def _download(client: Any, experiment_id: str, target: Path) -> dict[str, str]:
    """Download the files of every job of an experiment, each to its own folder.

    Returns:
        The jobs without files, with the reason.
    """
    token, missing = None, {}
    while True:
        page = client.search_runs([experiment_id], "tags.`star.kind` = 'job'", max_results=200, page_token=token)
        for run in page:
            name = run.info.run_id
            try:
                if not _download_run(client, name, target / name):
                    missing[name] = "MLflow has no files of it; call `star-hvd sync-logs` on its hosts"
            except Exception as error:
                # MLflow passes on any error of its stores. The other runs may be there.
                shutil.rmtree(target / name, ignore_errors=True)
                text = " ".join(str(error).split())[:300]
                missing[name] = f"its files cannot be downloaded: {type(error).__name__}: {text}"
        token = page.token
        if not token:
            return missing


def _download_run(client: Any, run_id: str, folder: Path) -> bool:
    """Download a job's files; returns whether MLflow has its events."""
    if all(item.path != "star" for item in client.list_artifacts(run_id)):
        return False
    folder.mkdir()
    client.download_artifacts(run_id, "star", str(folder))
    for file in (folder / "star").iterdir():
        file.rename(folder / file.name)
    return (folder / "events.jsonl").exists()


def _job_rows(runs: Sequence[LoggedRun], project: str) -> list[list[Any]]:
    """Rows of one job: moments of its sync runs, labelled with the times of each mode."""
    modes: dict[str, list[LoggedRun]] = {}
    for run in runs:
        modes.setdefault(run.plans[0].label, []).append(run)
    basis = [run for run in modes.pop("sync", []) if math.isfinite(run.target_s)]
    if not basis or not modes:
        return []
    sync_s = _sync_s(runs)
    plans = [basis[0].plans[0], *(own[0].plans[0] for own in modes.values())]
    outcomes = [(0.0, 1.0), *(_outcome(own, sync_s) for own in modes.values())]
    # Equal numbers of parameters count as the same network, which must not be in both training and test sets.
    network = f"real-{(runs[0].facts.get('optimizer') or {}).get('parameters', 'unknown')}"
    found: list[list[Any]] = []
    for run in basis:
        for window in windows(run):
            conditions = Conditions.from_window(window)
            if conditions is None:
                continue
            features, costs = _features(plans, conditions, window, _hosts(run))
            for index, plan in enumerate(plans):
                meta = ["real", run.name, network, "real", -1, window.step, plan.label[:24], plan.mode, project]
                found.append([*meta, *outcomes[index], costs[index], *features[index]])
    return found


def _hosts(run: LoggedRun) -> list[str] | None:
    """Host of every rank, None if it is unknown; Horovod numbers the ranks host by host."""
    names, counts = run.facts.get("hosts"), run.facts.get("ranks_per_host")
    if not isinstance(names, list) or not isinstance(counts, list) or len(names) != len(counts):
        return None
    if not all(isinstance(count, int) and 0 < count <= len(run.reports) for count in counts):
        return None
    found = [str(name) for name, count in zip(names, counts, strict=True) for _ in range(count)]
    return found if len(found) == len(run.reports) else None


def _features(
    plans: Sequence[Plan], conditions: Conditions, window: Window, hosts: Sequence[str] | None
) -> tuple[Array, list[float]]:
    """Feature rows of the logged plans, the first of which is active, and the cost model's relative times.

    Some features depend on all candidates, so they are computed as a decision at this moment would: from all that it
    would offer, not from those that happen to have been logged.
    """
    with np.errstate(invalid="ignore"):  # Links that were not measured have an infinite rate.
        offered = candidates(conditions, plans[0], hosts=hosts)
    more = [plan for plan in plans if not any(same_plan(plan, one) for one in offered)]
    every = [*offered, *more]
    found = moment_rows(offered, more, conditions, window, plans[0])
    predictions = in_order(every, conditions)
    chosen = [next(index for index, one in enumerate(every) if same_plan(plan, one)) for plan in plans]
    return found[chosen], [speed(predictions[index]) for index in chosen]


def _outcome(runs: Sequence[LoggedRun], sync_s: float) -> tuple[float, float]:
    """Logarithm of the relative time, and the share of the runs that reached the target.

    Of a mode that never reached it, the time is that which it was given: decisions add the cost of a miss themselves.
    """
    times = [run.target_s for run in runs if math.isfinite(run.target_s)]
    relative = math.log(statistics.median(times or [run.given_s for run in runs]) / sync_s)
    return max(-_CLIP, min(_CLIP, relative)), len(times) / len(runs)
