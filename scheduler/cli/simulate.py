"""`star-scheduler simulate RUN`: what a logged run would have cost in other modes, and what each rank cost it.

RUN is a run's folder, its name under `STAR_LOG_DIR`, or the id or the name of its MLflow run. Input: files of the run
log (`training_logs/README.md`), the step reports in `rank<r>.jsonl` and facts, plans and windows in `events.jsonl`. The
replay is `scheduler.simulator.whatif`.
"""

from __future__ import annotations

import argparse
import atexit
import bisect
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler.balance.usual_batches import UsualBatches
from scheduler.mlflow_limits import limit_requests, request_errors
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan
from scheduler.redact import redacted
from scheduler.run_events import other_schema, read_description, read_run_file
from scheduler.simulator.reports import Reports, read_reports
from scheduler.simulator.whatif import InForce, WhatIf, what_if
from scheduler.transmission.behind_compute import EDGE

__all__ = ["LoggedTimes", "add_arguments", "draw", "find_run", "read_run", "run", "tables"]

_ARTIFACTS = "star"
"""Artifact path of the run log's files in an MLflow run."""

_NO_ID = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
"""MLflow's codes for a text that cannot be the id of a run, and for the id of none."""

_SHOWN = 16

_CAPTION = """measured: first step to last, validation and switches included
replayed: the same steps by the cost model, as in every row below"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimes:
    """Input of a replay, from a run's folder.

    Attributes:
        compute_s: Compute times of usual batches, shape (n_steps, n_ranks).
        wait_s: Waits, same shape, NaN where unknown.
        comm_bytes: Gradient bytes, 0 if unknown.
        edge_part: Fraction of them that compute cannot hide at servers; the last one logged.
        parts: Fractions of them that a reduction and a push send, below 1 with compression; the last ones logged.
        fixed_part: Fraction of a rank's time that does not depend on its batch size, NaN if unknown.
        batch: Samples of a rank's batch if batch shares are possible, else 0; the last one logged.
        microbatches: Micro-batches of a rank in a step if others can take them over, else 0; the last ones logged.
        link_bytes_per_s: Link rate of every rank, empty if unknown.
        noise: Noise scale in gradients of one rank, NaN if unknown.
        in_force: The active plans, None if not logged.
        seconds: From the start of the first step to the end of the last one, NaN if unknown.
    """

    compute_s: Any
    wait_s: Any
    comm_bytes: float = 0.0
    edge_part: float = EDGE
    parts: tuple[float, float] = (1.0, 1.0)
    fixed_part: float = math.nan
    batch: int = 0
    microbatches: int = 0
    link_bytes_per_s: tuple[float, ...] = ()
    noise: float = math.nan
    in_force: InForce | None = None
    seconds: float = math.nan


def find_run(name: str, root: Path, uri: str | None = None) -> Path:
    """Find the folder of a run; a run that is only in MLflow is downloaded to a temporary folder.

    That folder is removed when this process ends.

    Args:
        name: A folder, a run's name, or the id or name of an MLflow run.
        root: The folder of the run log.
        uri: Tracking server; the SQLite file under `root` if None.

    Raises:
        ValueError: There is no such run, or MLflow cannot be asked.
    """
    for folder in (Path(name), root / "runs" / name):
        if any(folder.glob("rank*.jsonl")):
            return folder
    if os.sep in name and Path(name).exists():  # A path, not the name of a run in MLflow.
        raise ValueError(f"{name} has no step reports; expected a run's folder, with rank<r>.jsonl of every rank")
    where = uri or (f"sqlite:///{root / 'mlflow.db'}" if (root / "mlflow.db").exists() else "")
    if not where:
        raise ValueError(f"no run {name} under {root}, and no MLflow there; give a run's folder, or set STAR_LOG_DIR")
    return _fetch(name, where)


def _fetch(name: str, uri: str) -> Path:
    limit_requests()
    try:
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise ValueError(f"run {name} is not a folder, and MLflow is missing: pip install star-hvd[train]") from None
    try:
        client = MlflowClient(tracking_uri=uri)
        run_id = _run_id(client, name)
    except request_errors() as error:
        raise ValueError(redacted(f"cannot fetch run {name} from MLflow at {uri}: {error}")) from None
    target = tempfile.mkdtemp(prefix="star-run-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    try:
        folder = Path(client.download_artifacts(run_id, _ARTIFACTS, target))
    except Exception as error:  # MLflow passes on any error of its stores.
        said = f"{type(error).__name__}: {error}"
        raise ValueError(redacted(f"cannot fetch the files of run {name} from MLflow at {uri}: {said}")) from None
    if not any(folder.glob("rank*.jsonl")):
        raise ValueError(f"MLflow run {name} has no step reports; expected rank<r>.jsonl among its artifacts")
    return folder


def _run_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_run(name).info.run_id)
    except MlflowException as error:
        if error.error_code not in _NO_ID:
            raise
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    escaped = name.replace("'", "")
    for query in (f"tags.`star.run` = '{escaped}'", f"attributes.run_name = '{escaped}'"):
        found = client.search_runs(experiments, query, max_results=1)
        if found:
            return str(found[0].info.run_id)
    raise ValueError(f"MLflow has no run {name}; expected the id or the name of a run")


def read_run(folder: Path) -> LoggedTimes:
    """Read a run's folder.

    Raises:
        ValueError: It has no step reports of all ranks, or is of another version.
    """
    about = read_description(folder)
    if reason := other_schema(about.get("schema")):
        raise ValueError(f"run {folder.name} cannot be replayed: {reason}")
    events, usual = list(read_run_file(folder / "events.jsonl")), UsualBatches()
    for event in events:
        usual.take(event)
    reports = read_reports(sorted(folder.glob("rank*.jsonl")), usual, world_size=about.get("world_size"))
    n = reports.compute_s.shape[1]
    facts: dict[str, Any] = {}
    plans: list[tuple[int, Plan]] = []
    noise: list[float] = []
    rates: list[float] = []
    parts, edge_part, size_bytes, batch, microbatches = (1.0, 1.0), EDGE, 0.0, 0, 0
    for event in events:
        kind = event.get("kind")
        if kind == "facts" and isinstance(event.get("values"), dict):
            facts.update(event["values"])
        elif kind == "plan":
            plan = _plan(event, n)
            plans += [(int(event["step"]), plan)] if plan is not None else []
        elif kind == "window":
            noise += _positive([event.get("noise_scale")])
            known = _positive((event.get("ranks") or {}).get("link_bytes_per_s") or [])
            rates = known if len(known) == n else rates
            size_bytes = next(iter(_positive([event.get("comm_bytes")])), size_bytes)
            sent = _positive([event.get("reduced_part"), event.get("pushed_part")])
            parts = (min(1.0, sent[0]), min(1.0, sent[1])) if len(sent) == len(parts) else parts
            edge_part = min(1.0, next(iter(_positive([event.get("edge_part")])), edge_part))
            batch, microbatches = (_count(event.get(name)) for name in ("batch", "microbatches"))
    optimizer = facts.get("optimizer")
    # Frozen parameters have no gradients, so the size in old logs is too large.
    sizes = [size_bytes, optimizer.get("parameter_bytes") if isinstance(optimizer, dict) else None]
    return LoggedTimes(
        compute_s=reports.compute_s,
        wait_s=reports.wait_s,
        comm_bytes=next(iter(_positive(sizes)), 0.0),
        edge_part=edge_part,
        parts=parts,
        fixed_part=usual.fixed_part,
        batch=batch,
        microbatches=microbatches,
        link_bytes_per_s=tuple(rates),
        noise=statistics.median(noise) if noise else math.nan,
        in_force=_in_force(reports, plans) if plans else None,
        seconds=reports.seconds,
    )


def _plan(event: dict[str, Any], world_size: int) -> Plan | None:
    """The plan of an event; None, which keeps the previous one, if it is invalid or for another world size."""
    if not isinstance(event.get("step"), int):
        return None
    try:
        plan = Plan.from_dict(event["plan"]) if "plan" in event else parse_mode(str(event.get("label")), world_size)
    except (TypeError, ValueError):
        return None
    return plan if plan is not None and plan.world_size == world_size else None


def _in_force(reports: Reports, plans: list[tuple[int, Plan]]) -> InForce:
    """The active plan and the number of updates of every row."""
    first = [step for step, _ in plans]
    which = np.array([max(0, bisect.bisect_right(first, step) - 1) for step in reports.steps.tolist()])
    # In `local` a global step is an averaging after several steps of a rank; costs are per mean step of the ranks.
    local = np.array([plan.mode == "local" for _, plan in plans])[which]
    steps = np.diff(reports.steps, append=reports.steps[-1] + 1)
    return InForce(
        plans=tuple(plan for _, plan in plans),
        which=which,
        updates=steps * np.where(local, reports.own_steps, 1.0),
    )


def _positive(values: Sequence[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0]


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def tables(found: WhatIf, logged: LoggedTimes) -> tuple[Table, Table]:
    """Tables of the cost of every mode and of every rank."""
    modes = Table(title=_title(found), caption=_CAPTION if math.isfinite(logged.seconds) else None)
    for column in ("mode", "seconds", "of sync", "90 %", "in force"):
        modes.add_column(column, justify="left" if column == "mode" else "right")
    for name, seconds, what in (
        ("as it ran", logged.seconds, "measured"), ("as it ran, replayed", found.replayed_s, ""),
    ):  # fmt: skip
        if math.isfinite(seconds):
            modes.add_row(name, f"{seconds:.1f}", f"{seconds / found.sync_s:.2f}", what, "")
    if modes.row_count:
        modes.add_section()
    for one in found.modes:
        interval = "" if one.label == "sync" else f"{one.low:.2f}-{one.high:.2f}"
        modes.add_row(one.label, f"{one.time_s:.1f}", f"{one.relative:.2f}", interval, _share(one.share))
    ranks = Table(title="The job in sync, were one rank as fast as the others")
    for column in ("rank", "time saved", "slowest in"):
        ranks.add_column(column, justify="right")
    worst = sorted(found.ranks, key=lambda one: -one.gain)
    for rank in worst[:_SHOWN]:
        ranks.add_row(str(rank.rank), f"{100.0 * rank.gain:.1f} %", f"{100.0 * rank.slowest_share:.0f} % of steps")
    if len(worst) > _SHOWN:
        ranks.caption = f"{len(worst) - _SHOWN} more ranks would save less"
    return modes, ranks


def _title(found: WhatIf) -> str:
    text = f"{found.steps} steps of {found.world_size} ranks"
    if abs(found.sync_steps - found.steps) >= 0.5:
        text += f", worth about {found.sync_steps:.0f} of sync"
    return f"{text}, in every mode"


def _share(share: float) -> str:
    """A share of the steps as percent; small ones as `<1 %`."""
    if not share > 0.0:
        return ""
    return "<1 %" if share < 0.01 else f"{100.0 * share:.0f} %"


def draw(found: WhatIf, path: Path, title: str, measured_s: float = math.nan) -> None:
    """Plot both tables.

    Args:
        found: Result of the replay.
        path: File to write.
        title: Title of the plot.
        measured_s: Measured time of the run, NaN if unknown.

    Raises:
        ValueError: matplotlib does not support the file type.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.35 * max(len(found.modes), 6) + 1.6))
    _draw_modes(left, found, measured_s)
    right.bar([one.rank for one in found.ranks], [100.0 * one.gain for one in found.ranks], color="#c0603a")
    right.set_xlim(-0.5, len(found.ranks) - 0.5)
    right.set_ylim(0.0, 110.0 * max(0.05, *(one.gain for one in found.ranks)))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel("rank")
    right.set_ylabel("% of sync's time")
    right.set_title("time saved without its delays")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def _draw_modes(axes: Any, found: WhatIf, measured_s: float) -> None:
    labels = [one.label for one in found.modes][::-1]
    values = [one.relative for one in found.modes][::-1]
    low = [max(0.0, one.relative - one.low) for one in found.modes][::-1]
    high = [max(0.0, one.high - one.relative) for one in found.modes][::-1]
    axes.barh(labels, values, xerr=[low, high], color=["#999999" if label == "sync" else "#3b6ea5" for label in labels])
    axes.axvline(1.0, color="black", linewidth=0.8)
    if math.isfinite(measured_s):
        axes.axvline(measured_s / found.sync_s, color="#c0603a", linestyle="--", label=f"as it ran: {measured_s:.1f} s")
        axes.legend()
    axes.set_xlabel("time over that of sync, with 90 % interval")
    axes.set_title("every mode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name, or the id or name of its MLflow run")
    parser.add_argument("--modes", help="modes to replay, such as partial(3),ps(2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the tables as .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--tracking-uri", help="MLflow server; default MLFLOW_TRACKING_URI, or the log's SQLite file")


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def run(args: argparse.Namespace) -> int:
    """Replay, print two tables, plot.

    Returns:
        Exit status: 0, or 2 if the run cannot be replayed.
    """
    root = Path(os.environ.get("STAR_LOG_DIR", "").strip() or "training_logs").resolve()
    try:
        logged = read_run(find_run(args.run, root, args.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")))
        options = {"modes": _split(args.modes)} if args.modes else {}
        found = what_if(
            logged.compute_s,
            logged.wait_s,
            comm_bytes=logged.comm_bytes,
            edge_part=logged.edge_part,
            reduced_part=logged.parts[0],
            pushed_part=logged.parts[1],
            fixed_part=logged.fixed_part,
            batch=logged.batch,
            microbatches=logged.microbatches,
            link_bytes_per_s=logged.link_bytes_per_s or None,
            noise=logged.noise,
            in_force=logged.in_force,
            **options,
        )
        if args.plot is not None:
            draw(found, args.plot, f"run {Path(args.run).name}: {_title(found)}", logged.seconds)
    except ValueError as error:
        sys.stderr.write(f"star-scheduler simulate: error: {' '.join(str(error).split())}\n")
        return 2
    console = Console()
    for table in tables(found, logged):
        console.print(table)
    console.print(_sentence(found, logged.seconds), highlight=False)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = _plain({"measured_s": logged.seconds, **asdict(found)})
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sentence(found: WhatIf, measured_s: float) -> str:
    best, worst = found.modes[0], max(found.ranks, key=lambda one: one.gain)
    slow = f"Stragglers made sync {found.slowdown:.2f}x as long as its median ranks would have needed"
    if worst.gain > 0.02:
        slow += f"; without rank {worst.rank}'s delays it would have taken {100.0 * worst.gain:.0f} % less time"
    took = ""
    if math.isfinite(measured_s) and math.isfinite(found.replayed_s):
        took = f" The run took {100.0 * measured_s / found.sync_s:.0f} %."
    if best.label == "sync":
        return f"{slow}. No mode would have been faster than sync."
    return f"{slow}. {best.label} would have taken {100.0 * best.relative:.0f} % of sync's time.{took}"
