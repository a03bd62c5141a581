"""`star-scheduler simulate RUN`: what a logged run would have cost in other modes, and what each rank cost it.

RUN is a run's folder, its name under `STAR_LOG_DIR`, or the id or the name of its MLflow run. What is read is the
run log's contract, files alone (`training_logs/README.md`): the step reports in `rank<r>.jsonl`, and from
`events.jsonl` the job's facts and windows. The replay is `scheduler.simulator.whatif`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.simulator.whatif import WhatIf, read_reports, what_if

__all__ = ["LoggedTimes", "add_arguments", "draw", "find_run", "read_run", "run", "tables"]

_ARTIFACTS = "star"
"""Where the run log puts its files in an MLflow run."""

_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimes:
    """What a replay needs of a run.

    Attributes:
        compute_s: Shape (n_steps, n_ranks).
        wait_s: Same shape, NaN where unknown.
        comm_bytes: Gradient bytes, 0 where unknown.
        link_bytes_per_s: Of every rank, empty where unknown.
        noise: Noise scale in gradients of one rank, NaN where unknown.
        modes: Labels of the modes that were in force, in order.
        seconds: Length of the logged run, NaN where unknown.
    """

    compute_s: Any
    wait_s: Any
    comm_bytes: float = 0.0
    link_bytes_per_s: tuple[float, ...] = ()
    noise: float = math.nan
    modes: tuple[str, ...] = ()
    seconds: float = math.nan


def find_run(name: str, root: Path, uri: str | None = None) -> Path:
    """The folder of a run; what is only in MLflow is fetched into a temporary one.

    Args:
        name: A folder, a run's name, or the id or name of an MLflow run.
        root: The folder of the run log.
        uri: Tracking server; the SQLite file under `root` if None.

    Raises:
        ValueError: There is no such run.
    """
    for folder in (Path(name), root / "runs" / name):
        if any(folder.glob("rank*.jsonl")):
            return folder
    where = uri or (f"sqlite:///{root / 'mlflow.db'}" if (root / "mlflow.db").exists() else "")
    if not where:
        raise ValueError(f"no run {name} under {root}, and no MLflow there; give a run's folder, or set STAR_LOG_DIR")
    return _fetch(name, where)


def _fetch(name: str, uri: str) -> Path:
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise ValueError(f"run {name} is no folder, and MLflow is not installed: pip install star-hvd[train]") from None
    client = MlflowClient(tracking_uri=uri)
    try:
        run_id = _run_id(client, name)
        target = tempfile.mkdtemp(prefix="star-run-")
        folder = Path(client.download_artifacts(run_id, _ARTIFACTS, target))
    except MlflowException as error:
        raise ValueError(f"MLflow at {uri} does not give run {name}: {error}") from None
    if not any(folder.glob("rank*.jsonl")):
        raise ValueError(f"MLflow run {name} has no step reports; expected rank<r>.jsonl among its artifacts")
    return folder


def _run_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_run(name).info.run_id)
    except MlflowException:
        pass
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    escaped = name.replace("'", "")
    for query in (f"tags.`star.run` = '{escaped}'", f"attributes.run_name = '{escaped}'"):
        found = client.search_runs(experiments, query, max_results=1)
        if found:
            return str(found[0].info.run_id)
    raise ValueError(f"MLflow knows no run {name}, neither as an id nor as a name")


def read_run(folder: Path) -> LoggedTimes:
    """Read a run's folder.

    Raises:
        ValueError: It has no step reports of all ranks.
    """
    compute_s, wait_s = read_reports(sorted(folder.glob("rank*.jsonl")))
    facts: dict[str, Any] = {}
    modes: list[str] = []
    noise: list[float] = []
    rates: list[float] = []
    seconds = math.nan
    for event in _events(folder / "events.jsonl"):
        kind = event.get("kind")
        if kind == "facts" and isinstance(event.get("values"), dict):
            facts.update(event["values"])
        elif kind == "plan" and event.get("label", event.get("mode")):
            label = str(event.get("label", event.get("mode")))
            modes += [label] if modes[-1:] != [label] else []
        elif kind == "window":
            noise += _positive([event.get("noise_scale")])
            known = _positive((event.get("ranks") or {}).get("link_bytes_per_s") or [])
            rates = known if len(known) == compute_s.shape[1] else rates
        if isinstance(event.get("time_s"), (int, float)):
            seconds = float(event["time_s"])
    optimizer = facts.get("optimizer")
    size = _positive([optimizer.get("parameter_bytes")]) if isinstance(optimizer, dict) else []
    return LoggedTimes(
        compute_s=compute_s,
        wait_s=wait_s,
        comm_bytes=size[0] if size else 0.0,
        link_bytes_per_s=tuple(rates),
        noise=statistics.median(noise) if noise else math.nan,
        modes=tuple(modes),
        seconds=seconds,
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a file; a line that is cut off, as the last of a killed run is, is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _positive(values: Sequence[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0]


def tables(found: WhatIf, logged: LoggedTimes) -> tuple[Table, Table]:
    """What every mode would have cost, and what each rank did."""
    modes = Table(title=f"{found.steps} logged steps of {found.world_size} ranks in every mode")
    for column in ("mode", "seconds", "of sync", "90 %", "in force"):
        modes.add_column(column, justify="right" if column not in ("mode", "in force") else "left")
    for one in found.modes:
        modes.add_row(
            one.label, f"{one.time_s:.1f}", f"{one.relative:.2f}", f"{one.low:.2f}-{one.high:.2f}",
            "yes" if one.label in logged.modes else "",
        )  # fmt: skip
    ranks = Table(title="The job in sync, were one rank as fast as the others")
    for column in ("rank", "faster by", "slowest in"):
        ranks.add_column(column, justify="right")
    worst = sorted(found.ranks, key=lambda one: -one.gain)
    for rank in worst[:_SHOWN]:
        ranks.add_row(str(rank.rank), f"{100.0 * rank.gain:.1f} %", f"{100.0 * rank.slowest_share:.0f} % of steps")
    if len(worst) > _SHOWN:
        ranks.caption = f"{len(worst) - _SHOWN} more ranks gain less"
    return modes, ranks


def draw(found: WhatIf, path: Path, title: str) -> None:
    """Plot both tables.

    Raises:
        ValueError: A file type that matplotlib does not write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.35 * max(len(found.modes), 6) + 1.6))
    labels = [one.label for one in found.modes][::-1]
    values = [one.relative for one in found.modes][::-1]
    low = [max(0.0, one.relative - one.low) for one in found.modes][::-1]
    high = [max(0.0, one.high - one.relative) for one in found.modes][::-1]
    left.barh(labels, values, xerr=[low, high], color=["#999999" if label == "sync" else "#3b6ea5" for label in labels])
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("time over that of sync")
    left.set_title("every mode")
    right.bar([one.rank for one in found.ranks], [100.0 * one.gain for one in found.ranks], color="#c0603a")
    right.set_xlim(-0.5, len(found.ranks) - 0.5)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel("rank")
    right.set_ylabel("%")
    right.set_title("how much faster without its delays")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name, or the id or name of its MLflow run")
    parser.add_argument("--modes", help="modes to replay, as partial(3),ps(2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tables, .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--tracking-uri", help="MLflow's server; default MLFLOW_TRACKING_URI, or the SQLite file here")


def _split(text: str) -> list[str]:
    """Names at commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def run(args: argparse.Namespace) -> int:
    """Replay, print two tables, draw.

    Returns:
        Exit status: 0, or 2 where there is nothing to replay.
    """
    root = Path(os.environ.get("STAR_LOG_DIR") or "training_logs").resolve()
    try:
        logged = read_run(find_run(args.run, root, args.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")))
        options = {"modes": _split(args.modes)} if args.modes else {}
        found = what_if(
            logged.compute_s,
            logged.wait_s,
            comm_bytes=logged.comm_bytes,
            link_bytes_per_s=logged.link_bytes_per_s or None,
            noise=logged.noise,
            **options,
        )
        if args.plot is not None:
            draw(found, args.plot, f"run {Path(args.run).name}")
    except ValueError as error:
        sys.stderr.write(f"star-scheduler simulate: error: {' '.join(str(error).split())}\n")
        return 2
    console = Console()
    for table in tables(found, logged):
        console.print(table)
    console.print(_sentence(found), highlight=False)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return 0


def _sentence(found: WhatIf) -> str:
    best, worst = found.modes[0], max(found.ranks, key=lambda one: one.gain)
    slow = f"Stragglers made sync {found.slowdown:.2f}x as long as its median ranks would have needed"
    if worst.gain > 0.02:
        slow += f"; without rank {worst.rank} it would have been {100.0 * worst.gain:.0f} % faster"
    if best.label == "sync":
        return f"{slow}. No mode would have been faster than sync."
    return f"{slow}. {best.label} would have taken {100.0 * best.relative:.0f} % of sync's time."
