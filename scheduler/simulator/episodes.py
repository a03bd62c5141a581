"""Contention: which ranks are slowed down, how, when and for how long; drawn at random, or rows of a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["KINDS", "PATTERNS", "ContentionError", "Episode", "Rows", "generate"]

KINDS = ("compute", "input", "starved", "frozen", "link")
"""`compute`, `input`: a batch takes longer. `starved`: the process gets 1 / factor of a processor, so its helper
threads are late too. `frozen`: the process is stopped. `link`: its network carries 1 / factor."""

_REPEAT_SHARE = 0.75  # Share of the freezing ranks that freeze many times.

PATTERNS = ("none", "one", "several", "rotating", "bursts", "mixed", "frozen", "links")

Rows = tuple[tuple[float, ...], ...]
"""A trace: a row per step of the job, in it a factor per rank, 1 for normal speed; the rows repeat."""


class ContentionError(ValueError):
    """Invalid contention; the message says what was found and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A slowdown of one rank for a period of time.

    Attributes:
        rank: The rank.
        kind: One of `KINDS`.
        start_s: Start, seconds since the job began.
        end_s: End; may be infinite, except for `frozen`.
        factor: How many times slower, 1 or more; unused for `frozen`.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ContentionError(f"episode kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.rank < 0 or not 0.0 <= self.start_s < self.end_s or not 1.0 <= self.factor < math.inf:
            raise ContentionError(f"{self} is invalid; expected rank >= 0, 0 <= start < end and factor >= 1")
        if self.kind == "frozen" and math.isinf(self.end_s):
            raise ContentionError(f"{self} has no end; a frozen rank must thaw: give a finite end_s")


def generate(
    rng: np.random.Generator, world_size: int, *, step_s: float, horizon_s: float, pattern: str = ""
) -> tuple[Episode, ...]:
    """Draw the contention of one job.

    Args:
        rng: Source of randomness.
        world_size: Ranks of the job.
        step_s: Usual step time, the scale of short episodes.
        horizon_s: Expected length of the job, the scale of long ones.
        pattern: One of `PATTERNS`; drawn if empty. `one` and `several`: from seconds to the whole job. `rotating`: one
            rank at a time, for a few steps each. `bursts`: short and independent on all ranks. `mixed`: two patterns.
    """
    drawn = pattern or str(rng.choice(PATTERNS, p=(0.12, 0.2, 0.14, 0.12, 0.12, 0.1, 0.1, 0.1)))
    if drawn not in PATTERNS:
        raise ContentionError(f"pattern is {drawn!r}; expected one of {', '.join(PATTERNS)}")
    if drawn == "none":
        return ()
    if drawn == "mixed":
        two = rng.choice([p for p in PATTERNS if p not in ("none", "mixed")], size=2, replace=False)
        return tuple(e for p in two for e in generate(rng, world_size, step_s=step_s, horizon_s=horizon_s, pattern=p))
    if drawn == "rotating":
        return _rotating(rng, world_size, step_s, horizon_s)
    if drawn == "bursts":
        return _bursts(rng, world_size, step_s, horizon_s)
    if drawn == "frozen":
        return _frozen(rng, world_size, step_s, horizon_s)
    most = 1 if drawn == "one" else max(1, world_size // 2 - 1)
    count = 1 if drawn == "one" else int(rng.integers(min(2, most), most + 1))
    ranks = rng.choice(world_size, size=count, replace=False)
    kind = "link" if drawn == "links" else str(rng.choice(("compute", "input", "starved"), p=(0.6, 0.15, 0.25)))
    return tuple(e for rank in ranks for e in _spells(rng, int(rank), kind, step_s, horizon_s))


def _factor(rng: np.random.Generator, kind: str) -> float:
    """Draw a log-normal slowdown: mostly 1.5 to 6, sometimes up to 20; of links mostly 10, sometimes 100."""
    return float(1.0 + rng.lognormal(2.2 if kind == "link" else 0.6, 0.7))


def _spells(rng: np.random.Generator, rank: int, kind: str, step_s: float, horizon_s: float) -> list[Episode]:
    """Draw alternating slow and normal periods of a rank; mean length log-uniform from ten steps to twice the job."""
    spells: list[Episode] = []
    now_s = float(rng.choice((0.0, rng.uniform(0.0, 0.5 * horizon_s))))
    length_s = math.exp(rng.uniform(math.log(10.0 * step_s), math.log(2.0 * horizon_s)))
    factor = _factor(rng, kind)
    while now_s < 1.5 * horizon_s and len(spells) < 200:
        last_s = length_s * float(rng.exponential())
        spells.append(
            Episode(rank=rank, kind=kind, start_s=now_s, end_s=now_s + max(last_s, step_s), factor=factor)
        )
        now_s += last_s + length_s * float(rng.exponential()) + step_s
    return spells


def _rotating(rng: np.random.Generator, n: int, step_s: float, horizon_s: float) -> tuple[Episode, ...]:
    """Draw one slow rank at a time, another one every few steps; STAR's logs show 3.4 steps."""
    factor, turn_s = _factor(rng, "compute"), step_s * float(rng.uniform(3.0, 40.0))
    count = min(2000, int(1.5 * horizon_s / turn_s) + 1)
    ranks = rng.integers(0, n, size=count)
    return tuple(
        Episode(rank=int(rank), kind="compute", start_s=i * turn_s, end_s=(i + 1) * turn_s, factor=factor)
        for i, rank in enumerate(ranks)
    )


def _bursts(rng: np.random.Generator, n: int, step_s: float, horizon_s: float) -> tuple[Episode, ...]:
    """Draw short independent episodes on every rank, a few steps each."""
    share, length_s = float(rng.uniform(0.02, 0.2)), step_s * float(rng.uniform(2.0, 15.0))
    each = min(200, max(1, int(1.5 * horizon_s * share / length_s)))
    episodes = []
    for rank in range(n):
        for start_s in np.sort(rng.uniform(0.0, 1.5 * horizon_s, size=each)):
            last_s = length_s * float(rng.exponential()) + 0.5 * step_s
            kind = str(rng.choice(("compute", "starved"), p=(0.8, 0.2)))
            episodes.append(
                Episode(
                    rank=rank, kind=kind, start_s=start_s, end_s=start_s + last_s, factor=_factor(rng, "compute")
                )
            )
    return tuple(episodes)


def _frozen(rng: np.random.Generator, n: int, step_s: float, horizon_s: float) -> tuple[Episode, ...]:
    """Draw one or two ranks that freeze: `_REPEAT_SHARE` of them many times, the others one to three times."""
    episodes: list[Episode] = []
    for rank in rng.choice(n, size=min(n, int(rng.integers(1, 3))), replace=False):
        pause_s = max(1.0, step_s * float(rng.uniform(5.0, 60.0)))
        every_s = pause_s * float(rng.uniform(2.0, 12.0))
        now_s = every_s * float(rng.uniform(0.1, 1.0))
        most = 400 if rng.random() < _REPEAT_SHARE else int(rng.integers(1, 4))
        for _ in range(most):
            if now_s >= 1.5 * horizon_s:
                break
            last_s = pause_s * float(rng.uniform(0.5, 1.5))
            episodes.append(Episode(rank=int(rank), kind="frozen", start_s=now_s, end_s=now_s + last_s))
            now_s += last_s + every_s * float(rng.exponential()) + step_s
    return tuple(episodes)
