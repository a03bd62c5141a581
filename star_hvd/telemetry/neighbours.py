"""Lets jobs of one user on one host find each other through a directory with one small file per rank, and no daemon.

Once per second every rank writes on which processors it may run, and reads what ranks of other jobs wrote. Files are
replaced atomically and readable by their owner only; readers remove those of processes that have ended. Other files are
counted and left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from star_hvd import env

__all__ = ["Entry", "Registry", "ranks_near", "registry_folder"]

logger = logging.getLogger("star_hvd")

_STALE_S = 10.0  # An older entry belongs to a process that is stopped, or that ended unseen in another namespace.
_MAX_BYTES = 4096
_CLOCK_S = 2.0  # Two readings of a process's start since the epoch may differ by this much.


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A rank's report on itself.

    Attributes:
        job: Name of its job's run.
        rank: Its rank.
        pid: Its process id.
        started_s: Start of that process, seconds since the epoch, since process ids are reused.
        started_ticks: The same in clock ticks since the machine's start, which do not move with the system's clock; 0
            if unknown, as without `/proc` and in entries of earlier versions.
        space: Its PID namespace; in another namespace its process id is meaningless.
        cpus: Processors it may run on.
        written_s: When this was written, seconds since the epoch.
    """

    job: str
    rank: int
    pid: int
    started_s: float
    space: int
    cpus: tuple[int, ...]
    written_s: float
    started_ticks: int = 0


def ranks_near(entries: Iterable[Entry], cpus: Collection[int]) -> int:
    """Number of entries of other jobs whose ranks run on some of `cpus`.

    What they could give up without getting slower is not asked: a rank that waits for others sleeps, so the time of its
    waits is among the idle time of its processors already.
    """
    return sum(not set(entry.cpus).isdisjoint(cpus) for entry in entries)


def registry_folder() -> Path:
    """Return the directory shared by this user's jobs on this host: `STAR_NEIGHBOURS_DIR`, else one in /tmp.

    XDG_RUNTIME_DIR and TMPDIR do not count: jobs of other sessions may lack them or have other ones, and the former is
    removed at logout, while the job goes on.
    """
    chosen = env.neighbours_folder()
    return Path(f"/tmp/star-hvd-{os.getuid()}") if chosen is None else Path(chosen)


class Registry:
    """This rank's entry, and those of other jobs.

    Args:
        job: Name of this job's run.
        rank: This rank.
        folder: The directory; by default `registry_folder()`.

    Attributes:
        dropped: Number of files that were not a valid entry.
    """

    def __init__(self, job: str, rank: int, folder: Path | None = None) -> None:
        self.dropped = 0
        self._job, self._rank = job, rank
        self._folder = registry_folder() if folder is None else folder
        self.file_name = f"{os.getpid()}-{_space()}.json"
        self._started_s = psutil.Process().create_time()
        self._started_ticks = _start_ticks(os.getpid())
        self._counted: set[tuple[str, int]] = set()
        self._usable = self._open()

    def write(self, *, cpus: Collection[int]) -> None:
        """Replace this rank's entry."""
        if not self._usable:
            return
        entry = Entry(
            job=self._job, rank=self._rank, pid=os.getpid(), started_s=self._started_s, space=_space(),
            cpus=tuple(sorted(cpus)), written_s=time.time(), started_ticks=self._started_ticks,
        )
        part = self._folder / f"{self.file_name}.part"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(entry), file)
            part.replace(self._folder / self.file_name)
        except FileNotFoundError:  # The directory was removed; the next entry is written into the new one.
            self._usable = self._open()
        except OSError as error:
            logger.debug("jobs of this host do not hear of rank %d: %s", self._rank, error)

    def others(self) -> list[Entry]:
        """Return the entries of running ranks of other jobs; remove those of processes that have ended."""
        if not self._usable:
            return []
        found = []
        for path in sorted(self._folder.glob("*.json")):
            entry = self._read(path)
            if entry is not None and entry.job != self._job and self._runs(entry, path):
                found.append(entry)
        return found

    def close(self) -> None:
        """Remove this rank's entry."""
        for name in (self.file_name, f"{self.file_name}.part"):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _open(self) -> bool:
        """Make the directory; return whether only this user can access it."""
        try:
            self._folder.mkdir(mode=0o700, parents=False, exist_ok=True)
            about = self._folder.lstat()
        except OSError as error:
            logger.debug("jobs of this host do not know of each other: %s", error)
            return False
        private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
        if not private:
            logger.warning(
                "%s is not a directory of this user alone; jobs of this host do not know of each other", self._folder
            )
        return private

    def _read(self, path: Path) -> Entry | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # Opening a pipe would block.
            with os.fdopen(descriptor, "rb") as file:
                text = file.read(_MAX_BYTES + 1)
                modified_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:  # It was removed in the meantime.
            return None
        try:
            return _entry(json.loads(text))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if (path.name, modified_ns) not in self._counted:
                self._counted.add((path.name, modified_ns))
                self.dropped += 1
            return None

    def _runs(self, entry: Entry, path: Path) -> bool:
        if entry.space == _space() and not _alive(entry):
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        return abs(time.time() - entry.written_s) < _STALE_S


def _alive(entry: Entry) -> bool:
    try:
        process = psutil.Process(entry.pid)
        return process.status() != psutil.STATUS_ZOMBIE and _is_same(entry, process)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _is_same(entry: Entry, process: psutil.Process) -> bool:
    """Whether a process of the entry's number started when the entry's did.

    `create_time` counts from the epoch and is computed from the present clock: it moves when the clock is set.
    """
    ticks = _start_ticks(entry.pid)
    if ticks and entry.started_ticks:
        return ticks == entry.started_ticks
    return bool(abs(process.create_time() - entry.started_s) < _CLOCK_S)


def _start_ticks(pid: int) -> int:
    """Return the start of a process in clock ticks since the machine's start, 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat_line.rpartition(")")[2].split()[19])  # Field 22; the second, a name, may hold spaces.
    return 0


def _space() -> int:
    """Return this process's PID namespace, 0 if there are none."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _entry(values: Any) -> Entry:
    """Check the contents of a file and return its entry.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: It is not an entry.
    """
    entry = Entry(
        job=str(values["job"]),
        cpus=tuple(int(cpu) for cpu in values["cpus"]),
        rank=int(values["rank"]), pid=int(values["pid"]), space=int(values["space"]),
        started_s=float(values["started_s"]), written_s=float(values["written_s"]),
        started_ticks=int(values.get("started_ticks", 0)),
    )
    numbers = (entry.started_s, entry.started_ticks, entry.written_s)
    if entry.pid < 1 or entry.rank < 0 or not all(0.0 <= value < math.inf for value in numbers):
        raise ValueError(f"an entry has the numbers {numbers}, process {entry.pid} and rank {entry.rank}")
    return entry
