"""Other jobs on shared hosts, and the contention they cause for the simulated job.

A job takes a share of its hosts' processors and links while it runs. Sharing is fair: the simulated job gets what the
others leave, and at least an equal share. Contention is piecewise constant between arrivals and ends of jobs.

File format (`read_arrivals`): one submission per line, `HH:MM:SS` or seconds, ascending; empty lines and lines that
begin with `#` are skipped. Times count from the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.simulator.episodes import ContentionError, Episode

__all__ = ["OtherJob", "contention", "draw_jobs", "read_arrivals"]

_LEAST = 1.02
"""Smaller slowdowns are not counted as contention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherJob:
    """A job that shares hosts with the simulated one.

    Attributes:
        start_s: Start, seconds since the simulated job began; negative if it was running before.
        end_s: End.
        hosts: Indices of the hosts it runs on.
        processors: Share of each host's processors that it demands, 0 to 1.
        link: Share of each host's link that it demands, 0 to 1.
    """

    start_s: float
    end_s: float
    hosts: tuple[int, ...]
    processors: float = 0.5
    link: float = 0.5

    def __post_init__(self) -> None:
        shares = 0.0 <= self.processors <= 1.0 and 0.0 <= self.link <= 1.0
        if not (-math.inf < self.start_s < self.end_s and shares and all(host >= 0 for host in self.hosts)):
            raise ContentionError(f"{self} is invalid; expected start < end, hosts >= 0 and shares from 0 to 1")


def read_arrivals(path: Path) -> tuple[float, ...]:
    """Read submission times, in seconds since the first.

    Raises:
        ContentionError: The file is missing or malformed; the message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ContentionError(f"cannot read submission times from {path}: {error}") from None
    found: list[float] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            parts = [float(part) for part in text.split(":")]
        except ValueError:
            parts = []
        if len(parts) not in (1, 3) or not all(math.isfinite(part) and part >= 0.0 for part in parts):
            raise ContentionError(f"{path}, line {number} is {text!r}; expected HH:MM:SS or seconds")
        time_s = parts[0] if len(parts) == 1 else 3600.0 * parts[0] + 60.0 * parts[1] + parts[2]
        if found and time_s < found[-1]:
            raise ContentionError(f"{path}, line {number} is {text!r}, before the one above; expected ascending times")
        found.append(time_s)
    if not found:
        raise ContentionError(f"{path} has no submission times; expected HH:MM:SS or seconds, one per line")
    return tuple(time_s - found[0] for time_s in found)


def draw_jobs(
    rng: np.random.Generator,
    hosts: int,
    horizon_s: float,
    *,
    arrivals_s: Sequence[float] = (),
    gap_s: float = 0.0,
    duration_s: float = 0.0,
) -> tuple[OtherJob, ...]:
    """Draw other jobs with random hosts, demands and exponential durations.

    Args:
        rng: Source of randomness.
        hosts: Hosts of the cluster.
        horizon_s: Length of the simulated job.
        arrivals_s: Submission times; a Poisson process if empty.
        gap_s: Mean gap between two submissions; a fifth of the horizon if 0.
        duration_s: Mean duration; a quarter of the horizon if 0.
    """
    if hosts < 1 or not 0.0 < horizon_s < math.inf:
        raise ContentionError(f"{hosts} hosts for {horizon_s} s; expected at least 1 host and a time above 0")
    times = list(arrivals_s)
    if not times:
        now_s = 0.0
        while (now_s := now_s + float(rng.exponential(gap_s or horizon_s / 5.0))) < horizon_s:
            times.append(now_s)
    jobs = []
    for start_s in times:
        if start_s >= horizon_s:
            continue
        size = int(rng.integers(1, hosts + 1)) if hosts > 1 else 1
        chosen = rng.choice(hosts, size=min(size, max(1, hosts // 2)), replace=False)
        last_s = max(1e-3, float(rng.exponential(duration_s or horizon_s / 4.0)))
        jobs.append(
            OtherJob(
                start_s=start_s,
                end_s=start_s + last_s,
                hosts=tuple(sorted(int(host) for host in chosen)),
                processors=float(rng.uniform(0.1, 1.0)),
                link=float(rng.uniform(0.0, 0.9)),
            )
        )
    return tuple(jobs)


def contention(jobs: Sequence[OtherJob], host_of_rank: Sequence[int], *, idle: float = 0.3) -> tuple[Episode, ...]:
    """The contention that other jobs cause for the ranks of the simulated job.

    Args:
        jobs: The other jobs.
        host_of_rank: Host of every rank.
        idle: Share of a host's processors that the simulated job leaves unused when alone, 0 to below 1.

    Raises:
        ContentionError: `idle` is out of range.
    """
    if not 0.0 <= idle < 1.0:
        raise ContentionError(f"idle is {idle}; expected 0 to below 1")
    episodes: list[Episode] = []
    for host in sorted(set(host_of_rank)):
        here = [job for job in jobs if host in job.hosts and job.end_s > 0.0]
        ranks = [rank for rank, own in enumerate(host_of_rank) if own == host]
        edges = sorted({0.0, *(max(0.0, job.start_s) for job in here), *(job.end_s for job in here)})
        for start_s, end_s in itertools.pairwise(edges):
            now = [job for job in here if job.start_s <= start_s < job.end_s]
            taken = max(0.0, sum(job.processors for job in now) - idle)
            slower = {
                "compute": 1.0 / max(1.0 - taken, 1.0 / (len(now) + 1.0)),
                "link": 1.0 / max(1.0 - sum(job.link for job in now), 1.0 / (len(now) + 1.0)),
            }
            episodes += [
                Episode(rank=rank, kind=kind, start_s=start_s, end_s=end_s, factor=factor)
                for kind, factor in slower.items()
                if factor >= _LEAST
                for rank in ranks
            ]
    return tuple(episodes)
