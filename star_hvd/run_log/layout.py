"""Locations and names of a run's files, and the settings for them. Imports nothing heavy.

    training_logs/                  `STAR_LOG_DIR`
        mlflow.db, artifacts/       MLflow's own, unless MLFLOW_TRACKING_URI is set
        runs/<run>/                 one folder per job, the same name on all hosts
            run.json                name, schema, start, world size, experiment; written once by every host's first rank
            events.jsonl            rank 0: facts, windows, plans, metrics, the end
            rank<r>.jsonl           rank r: its step reports and resource readings
            sent.json               what MLflow already has
            shipper.log, report.html
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from scheduler.run_events import MAX_RANKS, SCHEMA, read_mapping, sound

__all__ = [
    "EVENTS",
    "SCHEMA",
    "RunLock",
    "clean",
    "default_root",
    "draft_of",
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

EVENTS, RUN, SENT = "events.jsonl", "run.json", "sent.json"
_MOST_UNIX_S = 1e11
_QUIET_S = 60.0  # Without locks, a run whose files are unchanged for so long has ended. Windows come every second.
_TAIL_BYTES = 4096  # Longer than an end event.
_LIVE, _SENDING = "live.lock", "sending.lock"


def default_root() -> Path:
    """`STAR_LOG_DIR`: the log folder. Default: `training_logs` in the current directory."""
    root = Path(os.environ.get("STAR_LOG_DIR", "").strip() or "training_logs")
    with contextlib.suppress(OSError):  # The current directory was removed: no run log, but training goes on.
        return root.resolve()
    return root


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
    """Return a name for a job: its start in UTC and six random hexadecimal digits. Rank 0 sends it to the others."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def run_directory(name: str, root: Path | None = None) -> Path:
    """Return the folder of a run.

    Raises:
        ValueError: The name, which may come from another rank, is not a valid file name.
    """
    if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"run name is {name!r}; expected letters, digits, - and _")
    return (root or default_root()) / "runs" / name


def run_directories(root: Path) -> list[Path]:
    """Return the folders of all runs under `root`, oldest first."""
    return sorted(path.parent for path in (root / "runs").glob(f"*/{RUN}"))


def clean(value: Any) -> Any:
    """Return `value` as JSON types that readers accept: NaN and infinity become null, unknown objects their text.

    A lone surrogate, which stands for a byte that is not UTF-8 in a file's name, becomes a question mark.
    """
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(item) for item in value]
    with contextlib.suppress(Exception):
        return clean(value.item())  # Scalars of numpy and torch.
    return clean(str(value))


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; empty if the file is missing or damaged."""
    try:
        return read_mapping(path.read_bytes()) or {}
    except OSError:
        return {}


def read_about(directory: Path) -> dict[str, Any]:
    """Return the contents of `run.json` in a run's folder.

    Raises:
        ValueError: The folder contains no run, a damaged one, or one of another version.
    """
    about = read_json(directory / RUN)
    if about.get("schema") != SCHEMA:
        raise ValueError(
            f"{directory} holds a run of version {about.get('schema')!r}; expected {SCHEMA}. Check that it is a run "
            "folder and that star_hvd is new enough"
        )
    began_s, ranks = about.get("began_unix_s"), about.get("world_size")
    whole = type(ranks) is int and 0 < ranks <= MAX_RANKS and isinstance(about.get("name"), str)
    if not sound(about) or not whole or not isinstance(began_s, (int, float)) or not 0.0 <= began_s < _MOST_UNIX_S:
        raise ValueError(
            f"{directory / RUN} is damaged; expected name, begin and 1 to {MAX_RANKS} ranks, as the run log writes them"
        )
    return about


def write_json(path: Path, values: dict[str, Any], *, replace: bool = True) -> None:
    """Write a JSON file atomically.

    Args:
        path: The file.
        values: Its contents.
        replace: Whether an existing file is replaced rather than kept.

    Raises:
        OSError: The disk is full, for example; an existing file is unchanged.
    """
    draft, text = draft_of(path), json.dumps(clean(values), indent=1) + "\n"
    try:
        draft.write_text(text, encoding="utf-8")
        if replace:
            draft.replace(path)
        else:
            _publish(draft, path, text)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def draft_of(path: Path) -> Path:
    """Return a new name beside `path`. In containers, ranks that share the folder may have equal process ids."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}")


def _publish(draft: Path, path: Path, text: str) -> None:
    """Make the contents of `draft` appear as `path` unless that exists."""
    with contextlib.suppress(FileExistsError):
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # The file system has no hard links. A reader may see the file before it has its contents.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)


class RunLock:
    """A lock on a run that the kernel releases when its process dies in any way.

    A POSIX record lock: forked children (data loaders) do not inherit it, unlike one of `flock`.

    Args:
        directory: The run's folder.
        sending: Whether it is the exclusive lock for sending the run to MLflow, rather than the one shared by the
            ranks that write it.

    Attributes:
        supported: False once the file system turned out to have no locks.
    """

    def __init__(self, directory: Path, *, sending: bool = False) -> None:
        self._path = directory / (_SENDING if sending else _LIVE)
        self._how = fcntl.LOCK_EX if sending else fcntl.LOCK_SH
        self._fd: int | None = None
        self.supported = True

    def take(self, *, alone: bool = False) -> bool:
        """Take the lock without blocking; with `alone`, exclusively.

        Returns:
            False if another process holds it. True if the file system has no locks: nothing would ever be sent there
            otherwise, and sending twice changes nothing.

        Raises:
            OSError: The lock's file cannot be opened: the file system is read-only, for example.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._fd, (fcntl.LOCK_EX if alone else self._how) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self.free()
                return False
            self.supported = False
        return True

    def free(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_live(directory: Path) -> bool:
    """Whether another process of this host still writes the run. Must not be called by a writer itself.

    On a file system without locks, whether it looks so.

    Raises:
        OSError: The lock's file cannot be opened.
    """
    if not (directory / _LIVE).exists():
        return False
    lock = RunLock(directory)
    taken = lock.take(alone=True)
    lock.free()
    return not taken if lock.supported else _looks_live(directory)


def _looks_live(directory: Path) -> bool:
    """Whether a file of the run was written lately and has no end event; the job's file decides if there is one."""
    events = directory / EVENTS
    return any(_looks_open(path) for path in ([events] if events.exists() else directory.glob("rank*.jsonl")))


def _looks_open(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            file.seek(max(0, stat.st_size - _TAIL_BYTES))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return False
    ended = (read_mapping(last) or {}).get("kind") == "end"
    return not ended and time.time() - stat.st_mtime < _QUIET_S
