"""Where a run's files lie, what they are called, and the settings that say so. Imports nothing heavy.

    training_logs/                  `STAR_LOG_DIR`
        mlflow.db, artifacts/       MLflow's own, where no MLFLOW_TRACKING_URI says otherwise
        runs/<run>/                 one folder per job, the same name on all hosts
            run.json                name, schema, start, world size; written once by every host's first rank
            events.jsonl            rank 0: facts, windows, plans, metrics, the end
            rank<r>.jsonl           rank r: its step reports and resource readings
            sent.json               how far MLflow has them
            shipper.log, report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import time
from pathlib import Path
from typing import Any

from scheduler.run_events import MAX_RANKS, read_mapping, sound

__all__ = [
    "EVENTS",
    "SCHEMA",
    "RunLock",
    "clean",
    "default_root",
    "enabled",
    "experiment_name",
    "is_live",
    "new_run_name",
    "read_about",
    "read_json",
    "run_directory",
    "run_directories",
    "tracking_uri",
    "write_json",
]

SCHEMA = 1
"""Version of the files and of what MLflow gets, tag `star.schema`. A reader refuses versions it does not know."""

EVENTS, RUN, SENT = "events.jsonl", "run.json", "sent.json"
_MOST_UNIX_S = 1e11
_LIVE, _SENDING = "live.lock", "sending.lock"


def default_root() -> Path:
    """`STAR_LOG_DIR`: where runs land. Default: `training_logs` in the current directory."""
    return Path(os.environ.get("STAR_LOG_DIR") or "training_logs").resolve()


def enabled() -> bool:
    """`STAR_RUN_LOG`: 0 switches the run log off. Default: on."""
    return os.environ.get("STAR_RUN_LOG", "1").strip().lower() not in ("0", "off", "no", "false")


def experiment_name() -> str:
    """`MLFLOW_EXPERIMENT_NAME`: the experiment runs belong to. Default: star-hvd."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "star-hvd"


def tracking_uri(root: Path) -> str:
    """`MLFLOW_TRACKING_URI`: where MLflow keeps runs. Default: the SQLite file `mlflow.db` under `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def new_run_name() -> str:
    """A name for a job: its start in UTC and six random hexadecimal digits. Rank 0 makes it and tells the others."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def run_directory(name: str, root: Path | None = None) -> Path:
    """The folder of a run.

    Raises:
        ValueError: The name is no file name; it may come from another rank.
    """
    if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"run name is {name!r}; expected letters, digits, - and _")
    return (root or default_root()) / "runs" / name


def run_directories(root: Path) -> list[Path]:
    """The folders of all runs under `root`, oldest first."""
    return sorted(path.parent for path in (root / "runs").glob(f"*/{RUN}"))


def clean(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are none become null, unknown objects their text."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(item) for item in value]
    with contextlib.suppress(Exception):
        return clean(value.item())  # Numbers of numpy and torch.
    return str(value)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty where the file is missing or damaged."""
    try:
        return read_mapping(path.read_bytes()) or {}
    except OSError:
        return {}


def read_about(directory: Path) -> dict[str, Any]:
    """What `run.json` of a run's folder says.

    Raises:
        ValueError: The folder holds no run, or one of a newer version.
    """
    about = read_json(directory / RUN)
    if about.get("schema") != SCHEMA:
        raise ValueError(
            f"{directory} holds a run of version {about.get('schema')!r}; expected {SCHEMA}: is it a run folder, and "
            "this program new enough?"
        )
    began_s, ranks = about.get("began_unix_s"), about.get("world_size")
    whole = type(ranks) is int and 0 < ranks <= MAX_RANKS and isinstance(about.get("name"), str)
    if not sound(about) or not whole or not isinstance(began_s, (int, float)) or not 0.0 <= began_s < _MOST_UNIX_S:
        raise ValueError(
            f"{directory / RUN} names no run of 1 to {MAX_RANKS} ranks with its begin; expected what the run log wrote"
        )
    return about


def write_json(path: Path, values: dict[str, Any], *, replace: bool = True) -> None:
    """Make a file of `values`, whole or not at all.

    Args:
        path: The file.
        values: What it holds.
        replace: Whether a file that is there gives way; else it stays as it is.

    Raises:
        OSError: The disk is full, for example; the old file is still there.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(clean(values), indent=1) + "\n", encoding="utf-8")
        if replace:
            draft.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


class RunLock:
    """A lock on a run that the kernel takes back when its process dies, however it dies.

    A POSIX record lock: children made by fork (data loaders) do not hold it, as they would one of `flock`.

    Args:
        directory: The run's folder.
        sending: The lock of whoever sends the run to MLflow; else that of the ranks which write it, who share it.
    """

    def __init__(self, directory: Path, *, sending: bool = False) -> None:
        self._path = directory / (_SENDING if sending else _LIVE)
        self._how = fcntl.LOCK_EX if sending else fcntl.LOCK_SH
        self._fd: int | None = None

    def take(self, *, alone: bool = False) -> bool:
        """Take the lock, `alone` or as its kind is shared; never blocks.

        Returns:
            False where another process has it, or where the file system has none.
        """
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.lockf(self._fd, (fcntl.LOCK_EX if alone else self._how) | fcntl.LOCK_NB)
        except OSError:
            self.free()
            return False
        return True

    def free(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_live(directory: Path) -> bool:
    """Whether another process of this host still writes the run; never blocks. Not to be asked by the writer itself."""
    if not (directory / _LIVE).exists():
        return False
    lock = RunLock(directory)
    taken = lock.take(alone=True)
    lock.free()
    return not taken
