"""The versioned table that predictors are trained on: one row per candidate plan per moment.

Two files: `NAME.csv.gz` with the rows and `NAME.json` with the schema, the provenance and the hash of the rows. `folds`
splits by network, so that rows of one run are never in both training and test sets.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.learning.features import FEATURES, SCHEMA_VERSION
from scheduler.learning.simulated_rows import HORIZON_STEPS, Moment
from scheduler.simulator.scenario import Scenario

__all__ = [
    "META",
    "TABLE_VERSION",
    "TARGETS",
    "DatasetError",
    "columns",
    "description_path",
    "folds",
    "frame_of",
    "matrix",
    "read",
    "records",
    "write",
]

TABLE_VERSION = 1
"""Version of the columns other than the features."""

META: dict[str, str] = {
    "source": "simulated or real",
    "run": "name of the job; rows of one run belong together",
    "network": "what was trained; splits go by it",
    "family": "kind of network: one of scheduler.simulator.FAMILIES, or `real`",
    "seed": "of a simulated scenario, -1 for a real run",
    "step": "global step of the moment",
    "plan": "label of the candidate",
    "mode": "its mode",
    "project": "version of the project that wrote the row",
}
TARGETS: dict[str, str] = {
    "log_relative": "natural logarithm of the time to equal progress over that of sync from the same moment",
    "reached": "chance, 0 to 1, to reach the target if the whole job went like that; empty where unknown",
    "cost_relative": "the cost model's relative time, for comparison",
}


class DatasetError(ValueError):
    """An unusable table; the message says what was found, what was expected and what to do."""


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise DatasetError("pandas is missing; install the extra `train`: pip install 'star-hvd[train]'") from None
    return pandas


def records(scenario: Scenario, moments: Iterable[Moment], project: str) -> list[list[Any]]:
    """Rows of a simulated job, in the order of `columns()`."""
    found: list[list[Any]] = []
    network = scenario.network
    for moment in moments:
        for index, plan in enumerate(moment.plans):
            meta = ["simulated", f"sim{scenario.seed}", network.name, network.family, scenario.seed, moment.step]
            # A subgroup's label lists its ranks: too long for a table.
            label = plan.label if len(plan.label) <= 24 else f"{plan.mode}({plan.quorum} of {plan.world_size})"
            targets = [moment.log_relative[index], moment.reached[index], moment.cost[index]]
            found.append([*meta, label, plan.mode, project, *targets, *moment.features[index]])
    return found


def columns() -> list[str]:
    """Names of all columns, in order."""
    return [*META, *TARGETS, *FEATURES]


def frame_of(rows: Sequence[Sequence[Any]]) -> Any:
    """Make a pandas table of rows in the order of `columns()`."""
    return _pandas().DataFrame(rows, columns=columns())


def write(path: Path, frame: Any, *, made_by: str = "") -> dict[str, Any]:
    """Write a table and its description.

    Args:
        path: `NAME.csv.gz`; the description goes to `NAME.json`.
        frame: A table with the columns of `columns()`.
        made_by: Command that made it.

    Returns:
        The description.

    Raises:
        DatasetError: The columns or the file name are wrong.
    """
    if list(frame.columns) != columns():
        raise DatasetError(f"the table has the columns {list(frame.columns)[:5]}...; expected those of `columns()`")
    about_path = description_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a time in the archive's header equal rows give equal files.
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as archive:
        archive.write(frame.to_csv(index=False, float_format="%.5g", lineterminator="\n").encode())
    path.write_bytes(buffer.getvalue())
    described = {
        "table_version": TABLE_VERSION,
        "feature_version": SCHEMA_VERSION,
        "horizon_steps": HORIZON_STEPS,
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "rows": len(frame),
        "runs": int(frame["run"].nunique()),
        "networks": int(frame["network"].nunique()),
        "sources": {str(k): int(v) for k, v in frame["source"].value_counts().items()},
        "families": {str(k): int(v) for k, v in sorted(frame["family"].value_counts().items())},
        "project": sorted({str(v) for v in frame["project"]}),
        "made_by": made_by,
        "columns": {**META, **TARGETS},
        "features": list(FEATURES),
    }
    about_path.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return described


def read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read a table and check it against its description.

    Returns:
        The pandas table and the description.

    Raises:
        DatasetError: The table is missing, damaged, or of another version.
    """
    pandas = _pandas()
    about_path = description_path(path)
    try:
        raw = path.read_bytes()
        described = json.loads(about_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot read the table {path}: {error}; make one with `star-scheduler collect`") from None
    _check(path, described, raw)
    try:
        frame = pandas.read_csv(io.BytesIO(gzip.decompress(raw)))
    except (OSError, EOFError, ValueError) as error:
        raise DatasetError(f"the table {path} is damaged: {error}; make it again") from None
    if list(frame.columns) != columns():
        raise DatasetError(f"the table {path} has other columns than its version says; make it again")
    return frame, described


def _check(path: Path, described: Mapping[str, Any], raw: bytes) -> None:
    expected = {"table_version": TABLE_VERSION, "feature_version": SCHEMA_VERSION}
    for name, version in expected.items():
        if not isinstance(described, dict) or described.get(name) != version:
            got = described.get(name) if isinstance(described, dict) else described
            raise DatasetError(f"{path} has {name} {got}; expected {version}: make it again with `collect`")
    found = hashlib.sha256(raw).hexdigest()
    if found != described.get("sha256"):
        raise DatasetError(f"{path} has SHA-256 {found[:12]}..., its description says another; make it again")


def description_path(path: Path) -> Path:
    """The file with the description of a table.

    Raises:
        DatasetError: The name is not that of a table, or there is a folder of this name.
    """
    if not path.name.endswith(".csv.gz"):
        raise DatasetError(f"the table is {path.name}; expected a name that ends in .csv.gz")
    if path.is_dir():
        raise DatasetError(f"the table {path} is a folder; expected a file")
    return path.with_name(path.name[: -len(".csv.gz")] + ".json")


def matrix(frame: Any) -> npt.NDArray[np.float64]:
    """The features of a table, shape (n_rows, n_features)."""
    return np.asarray(frame[list(FEATURES)].to_numpy(dtype=np.float64))


def folds(frame: Any, count: int = 5) -> npt.NDArray[np.int64]:
    """Fold of every row, 0 to `count` - 1, by a hash of its network's name, so equal in every table."""
    names = frame["network"].astype(str)
    fold = {name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % count for name in names.unique()}
    return np.asarray(names.map(fold).to_numpy(dtype=np.int64))
