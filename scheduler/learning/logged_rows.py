"""Training rows from logged runs of the same job in several modes, each to its target.

A single run has no information on other modes. If the same job (equal program, sizes, optimizer with its
hyperparameters, batch, target, tags, machine and placement) was run in `sync` and in other modes to the target, moments
of the `sync` runs get the times of the others as labels. Runs in mode `auto`, without a target, or without a `sync` run
of the same job are skipped and reported with the reason, as are runs that continue an earlier training (after an
elastic reset, or from a checkpoint), whose times are those of its rest.

A run that did not reach the target counts as a miss only if it finished, after at least the time that `sync` needed: a
crash says nothing about a mode. The label of its relative time is the time that it was given, a lower bound, because
the probability of reaching the target has a label of its own, as in simulated rows.

Input: files of the run log (`training_logs/README.md`). One run is read at a time, line by line, and of its reports
only those are kept that its moments need (`scheduler.learning.logged_reports`); of runs in other modes than `sync`,
none.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import re
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
from scheduler.learning.logged_reports import FIRST_STEP, HISTORY, Report, extent, moments_until, newest, reports
from scheduler.learning.simulated_rows import in_order, moment_rows
from scheduler.mlflow_limits import limit_requests, request_errors
from scheduler.plan.plan import MODES, Plan, PlanError
from scheduler.policy.candidates import candidates, same_plan
from scheduler.records import RankStats, Window
from scheduler.redact import redacted
from scheduler.run_events import other_schema, read_description, read_run_file
from scheduler.target import Target
from scheduler.transmission.behind_compute import EDGE

__all__ = ["LoggedRun", "mlflow_rows", "read_run", "real_rows", "windows"]

_MODE_ARGUMENT = re.compile(r"(?<!\S)(?:--?(?:\w+[-_])*mode(?:=|\s+(?!-))|(?:\w+[-_])*mode=)(?:\w+\([^)]*\)|\S+)")
"""`--mode partial(3)`, `--star-mode=sync`, `mode=ssp(3)`."""

_START_SHARE = 0.05
"""Greatest part of a run's time that the `sync` before the user's mode may take. Servers need about 2 s to start."""

_ACTIVE_STEP = 12
"""Step by which the user's mode is active, in old logs, which do not say what the user asked for."""

_LEAST_RATE, _MOST_RATE = 1.0, 1e15  # Bytes per second; a link that is not between them was not measured.
_MOST_COMM_S = 1e6  # As long as no communication of a step takes.
_MOST_COUNT = 1 << 53  # Limit of sizes, which floats represent exactly.
_MOST_SAMPLES = 1 << 30  # Limit of a batch.
_NO_MISS = "it ended without its target, but not as FINISHED: that is no miss"
_CLIP = 3.5  # As in `simulated_rows`.


class _Begun(NamedTuple):
    """A plan and when it became active."""

    plan: Plan
    step: int
    time_s: float


@dataclass(slots=True, kw_only=True)
class LoggedRun:
    """One run of the log.

    Attributes:
        name: Name of its folder.
        facts: The job's logged facts.
        plans: Active plans in order, without repetition and without a short `sync` that precedes the user's mode.
        target_s: When the target was reached, seconds since the first plan; infinite if it was not.
        given_s: When it finished, seconds since the first plan; NaN if it failed, was killed, or runs.
        moments: Steps of its windows, ascending; only of a run in `sync` that reached its target, as the others have
            no rows of their own.
        reports: Per rank the reports that these windows need, in order of step, without its first.
        noise: Noise scale at each of these steps, where it is known.
        readings: The newest `window` event at each of them, if there is one.
        first: The first `window` event.
    """

    name: str
    facts: dict[str, Any]
    plans: list[Plan]
    target_s: float
    given_s: float
    moments: list[int] = field(default_factory=list)
    reports: dict[int, list[Report]] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    readings: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    first: Mapping[str, Any] = field(default_factory=dict)

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
        return _with_reports(_read_events(folder), folder)
    except _UnusableRun:
        return None


def _read_events(folder: Path) -> LoggedRun:
    """Read a run's events except its windows; no file of a rank, which are a thousand times as long.

    Raises:
        _UnusableRun: The run cannot be used.
    """
    if reason := other_schema(read_description(folder).get("schema")):
        raise _UnusableRun(reason)
    facts: dict[str, Any] = {}
    plans: list[_Begun] = []
    points: list[tuple[str, float, float]] = []
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
        elif kind == "end" and event.get("status") == "FINISHED":
            end_s = float(event.get("time_s") or 0.0)
    if first_batch:
        facts["batch"] = first_batch
    target = _check_facts(facts)
    if not plans:
        raise _UnusableRun("it has no plan")
    reached = [time_s for name, value, time_s in points if name == target.name and target.reached(value)]
    begin_s = plans[0].time_s
    target_s = min(reached) - begin_s if reached else math.inf
    if target_s <= 0.0:
        raise _UnusableRun("it reached its target before its first plan, so no time says anything")
    given_s = end_s - begin_s
    modes = _without_start(plans, facts.get("mode"), target_s if reached else given_s)
    return LoggedRun(name=folder.name, facts=facts, plans=modes, target_s=target_s, given_s=given_s)


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
    # A run without an end is not used: what it lacks, not the start of its mode, is the reason.
    long = plans[1].time_s - plans[0].time_s > _START_SHARE * took_s
    return modes[1:] if _starts_as_asked(modes, asked) and not long else modes


def _starts_as_asked(modes: Sequence[Plan], asked: object) -> bool:
    """Whether the plans are a start in `sync` and the mode that the user asked for."""
    # `grouped` without a number, `grouped(0)` as a label, gets the number of its groups when it becomes active.
    return len(modes) == 2 and modes[0].plain and asked in (modes[1].label, f"{modes[1].mode}(0)")


def _plan(event: Mapping[str, Any]) -> Plan:
    """The plan of an event, without what differs between events of the same mode."""
    try:
        plan = Plan.from_dict(event.get("plan") or {}).replace(plan_id=0, reason="")
        # In older logs every change of these shares is a plan; shares that the user has set belong to the mode.
        return plan.replace(batch_shares=()) if plan.balanced else plan
    except (PlanError, TypeError) as error:
        raise _UnusableRun(f"it has an invalid plan: {error}") from None


def _check_facts(facts: Mapping[str, Any]) -> Target:
    """The target of a run that its facts, or MLflow's parameters, do not exclude."""
    if not facts:  # A target is not what is missing.
        raise _UnusableRun("its events.jsonl has no facts; expected those of a run, the file is empty or damaged")
    if facts.get("continues"):
        raise _UnusableRun("it continues an earlier training")
    if not facts.get("target"):
        raise _UnusableRun("it has no target; set STAR_TARGET")
    target = Target.parse(facts["target"])
    if target is None:
        raise _UnusableRun(f"its target is {facts['target']!r}; expected NAME>=NUMBER")
    return target


def _with_reports(run: LoggedRun, folder: Path) -> LoggedRun:
    """The run with the reports and readings of its moments.

    Raises:
        _UnusableRun: A rank has too few reports.
    """
    has_rows = run.plans[0].label == "sync" and math.isfinite(run.target_s)
    paths = [folder / f"rank{rank}.jsonl" for rank in range(run.plans[0].world_size)]
    last_steps = []
    for rank, path in enumerate(paths):
        count, last = extent(itertools.islice(reports(path), None if has_rows else FIRST_STEP))
        if count < FIRST_STEP:
            raise _UnusableRun(f"rank {rank} has {count} step reports; expected {FIRST_STEP} or more")
        last_steps.append(last)
    if not has_rows:
        return run
    moments = moments_until(min(last_steps))
    noise, readings, first = _at_moments(folder, moments)
    kept = {rank: newest(reports(path), moments) for rank, path in enumerate(paths)}
    return dataclasses.replace(run, moments=moments, reports=kept, noise=noise, readings=readings, first=first)


def _at_moments(
    folder: Path, moments: Sequence[int]
) -> tuple[dict[int, float], dict[int, Mapping[str, Any]], Mapping[str, Any]]:
    """The newest noise scale and the newest window at each moment, and the first window."""
    noise: dict[int, float] = {}
    readings: dict[int, Mapping[str, Any]] = {}
    first: Mapping[str, Any] = {}
    ranks: object = None
    for event in read_run_file(folder / "events.jsonl"):
        if event.get("kind") != "window":
            continue
        ranks = event.get("ranks") or ranks  # With many ranks, few windows have the readings of each.
        event["ranks"] = ranks
        first = first or event
        for moment in moments[bisect.bisect_left(moments, int(event.get("step") or 0)) :]:
            readings[moment] = event
            if isinstance(event.get("noise_scale"), (int, float)):
                noise[moment] = float(event["noise_scale"])
    return noise, readings, first


def windows(run: LoggedRun) -> list[Window]:
    """Windows of the coordinator at the moments of a run."""
    return [_window(run, step, run.readings.get(step, {})) for step in run.moments]


def _window(run: LoggedRun, step: int, event: Mapping[str, Any]) -> Window:
    """The window at a step, of which the log has this newest `window` event."""
    sizes = run.facts.get("optimizer") or {}
    # Frozen parameters have no gradients, so those of old logs are too large.
    size = _of_job(run, event, "comm_bytes", _MOST_COUNT) or int(sizes.get("parameter_bytes") or 0)
    batch, fixed_part = _of_job(run, event, "batch", _MOST_SAMPLES), event.get("fixed_part")
    microbatches = _of_job(run, event, "microbatches", _MOST_SAMPLES) or 0
    return Window(
        step=step, ranks=tuple(_rank_stats(run, step, event)), noise_scale=run.noise.get(step, math.nan),
        comm_bytes=size, edge_part=_part(event, "edge_part", EDGE),
        reduced_part=_part(event, "reduced_part"), pushed_part=_part(event, "pushed_part"),
        batch=(_count(run.facts, "batch", _MOST_SAMPLES) or 0) if batch is None else batch,
        fixed_part=float(fixed_part) if isinstance(fixed_part, (int, float)) and 0.0 <= fixed_part < 1.0 else math.nan,
        microbatches=microbatches, allowed=frozenset({"sync"} if microbatches else MODES),
    )  # fmt: skip


def _of_job(run: LoggedRun, event: Mapping[str, Any], name: str, most: int) -> int | None:
    """A number of the whole job at a moment; of one before the first window that of the first; None in old logs."""
    return _count(event or run.first, name, most)


def _count(values: Mapping[str, Any], name: str, most: int) -> int | None:
    value = values.get(name)
    return int(value) if isinstance(value, (int, float)) and 0 <= value <= most else None


def _rank_stats(run: LoggedRun, step: int, event: Mapping[str, Any]) -> Iterator[RankStats]:
    """The ranks at a step: their reports so far, and the readings of the newest window."""
    kept = {rank: [one for one in own if one.step <= step][-HISTORY:] for rank, own in sorted(run.reports.items())}
    queued_s, computed_s = (
        np.array([sum(getattr(one, name) for one in own) for own in kept.values()])
        for name in ("runqueue_s", "compute_s")
    )
    _, waits_out = queueing(queued_s, computed_s, np.array([len(own) for own in kept.values()]))
    for waits, (rank, own) in zip(waits_out.tolist(), kept.items(), strict=True):
        times_s = [one.own_s(waits) for one in own]
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


class _Jobs:
    """Runs by the job that they are of, and those that cannot be used, with the reason."""

    def __init__(self) -> None:
        self._runs: dict[str, list[LoggedRun]] = {}
        self._skipped: dict[str, str] = {}

    def take(self, folder: Path) -> None:
        """Read a run's folder, which is not needed afterwards."""
        try:
            run = _read_events(folder)
            _check_mode(run)
            run = _with_reports(run, folder)
        except _UnusableRun as why:
            self.skip(folder.name, str(why))
        else:
            self._runs.setdefault(run.key, []).append(run)

    def skip(self, name: str, reason: str) -> None:
        """Note a run that is not used."""
        self._skipped[name] = reason

    def rows(self, project: str, report: Callable[[str], None] | None) -> list[list[Any]]:
        """Rows of all jobs; `report` as in `real_rows`."""
        skipped, found = dict(self._skipped), []
        count = len(skipped) + sum(map(len, self._runs.values()))
        # By name, so that equal runs give equal rows, in whatever order MLflow lists them.
        jobs = [sorted(runs, key=lambda run: run.name) for runs in self._runs.values()]
        for runs in sorted(jobs, key=lambda runs: runs[0].name):
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


def real_rows(root: Path, project: str, *, report: Callable[[str], None] | None = None) -> list[list[Any]]:
    """Rows of all runs under a folder, in the order of `dataset.columns()`.

    Args:
        root: `training_logs/runs`, or another folder of run folders.
        project: Version of the project, for the rows.
        report: Called with a sentence on how many runs were used, then with one on every skipped run.

    Raises:
        ValueError: The folder does not exist.
    """
    if not root.is_dir():
        raise ValueError(f"--runs is {root}; expected a folder of logged runs")
    jobs = _Jobs()
    for folder in sorted(path.parent for path in root.glob("*/events.jsonl")):
        jobs.take(folder)
    return jobs.rows(project, report)


def _check_mode(run: LoggedRun) -> None:
    _check_asked(run.facts)
    if _starts_as_asked(run.plans, run.facts.get("mode")):
        raise _UnusableRun(
            f"its mode, {run.plans[1].label}, became active after more than {100.0 * _START_SHARE:.0f} % of its time; "
            "expected a longer run, or a later target"
        )
    if len(run.plans) > 1:  # Mode auto, which older logs do not record, or several modes.
        labels = ", ".join(dict.fromkeys(plan.label for plan in run.plans))
        raise _UnusableRun(f"it changed its mode ({labels[:80]}); expected one fixed mode")


def _check_asked(facts: Mapping[str, Any]) -> None:
    """Refuse a run whose user asked for `auto`."""
    if facts.get("mode") == "auto":
        raise _UnusableRun("it ran in auto; expected one fixed mode")


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
            found[run.name] = _NO_MISS
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
    jobs = _Jobs()
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
        _take_runs(client, experiment.experiment_id, jobs, environ)
    except request_errors() as error:
        raise ValueError(redacted(f"MLflow at {uri} says: {error}", environ)) from None
    return jobs.rows(project, report)


def _take_runs(client: Any, experiment_id: str, jobs: _Jobs, environ: Mapping[str, str]) -> None:
    """Read every job of an experiment: one at a time is on the disk, and only those that can be used."""
    token = None
    while True:
        page = client.search_runs([experiment_id], "tags.`star.kind` = 'job'", max_results=200, page_token=token)
        for run in page:
            reason = _why_not(run) or _take_run(client, run.info.run_id, jobs)
            if reason:
                jobs.skip(run.info.run_id, redacted(reason, environ))
        token = page.token
        if not token:
            return


def _why_not(run: Any) -> str:
    """Why a run cannot be used by what MLflow's database says of it; empty if its files have to say."""
    params, metrics = run.data.params, run.data.metrics
    if reason := other_schema(run.data.tags.get("star.schema")):
        return reason
    try:
        if params:  # Else its facts were not sent.
            _check_facts(params)
            _check_asked(params)
    except _UnusableRun as why:
        return str(why)
    if run.info.status in ("RUNNING", "SCHEDULED"):
        return "it has not ended, and MLflow gets its files at the end; if it crashed, call `star-hvd sync-logs`"
    # The totals come with the end: without them, a time to the target is not known either.
    if run.info.status != "FINISHED" and "duration_s" in metrics and "time_to_target_s" not in metrics:
        return _NO_MISS
    return ""


def _take_run(client: Any, run_id: str, jobs: _Jobs) -> str:
    """Download a run, read it and delete the files; returns why that was not possible, else empty."""
    with tempfile.TemporaryDirectory(prefix="star-run-") as scratch:
        folder = Path(scratch) / run_id
        try:
            if not _download_run(client, run_id, folder):
                return "MLflow has no files of it; call `star-hvd sync-logs` on its hosts"
        except Exception as error:
            # MLflow passes on any error of its stores. The other runs may be there.
            text = " ".join(str(error).split())[:300]
            return f"its files cannot be downloaded: {type(error).__name__}: {text}"
        jobs.take(folder)
    return ""


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
        offered = candidates(conditions, plans[0], allowed=window.allowed, hosts=hosts)
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
