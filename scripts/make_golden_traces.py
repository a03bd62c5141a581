"""Writes `tests/golden/traces.json`: round times of eight made-up workers, for the tests that read recorded traces.

The file has the form that `benchmarks.forecast.read_matrices` reads. Nothing in it was measured; what recorded traces
of jobs that nobody disturbed are known to look like is drawn with a fixed seed:

    jitter     nobody is disturbed: compute times scatter by 2 % to 14 %, by worker, with rare single steps that take
               up to twice as long; the network costs little, and some links always a little more
    bursts     the same computation; now and then a worker's link is much slower for a few rounds, later another's
    rotating   the network costs as much as the computation; most of the time one worker's link is slow for a few
               rounds, then another's, and at times all links are

    python scripts/make_golden_traces.py [FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

TARGET = Path(__file__).resolve().parents[1] / "tests" / "golden" / "traces.json"
SEED = 3
WORKERS = 8
ROUNDS = 260


def link_ms(draw: np.random.Generator, usual_ms: float, spread: float) -> Array:
    """What each worker's link usually takes: some are always a little longer, shape (n_workers,)."""
    return np.asarray(usual_ms * np.exp(spread * draw.normal(size=WORKERS)))


def scattered(draw: np.random.Generator, means_ms: float | Array, spreads: Array) -> Array:
    """Times around a mean, with a spread per worker that is a share of it, shape (n_rounds, n_workers)."""
    return means_ms * np.exp(spreads * draw.normal(size=(ROUNDS, WORKERS)))


def add_hiccups(draw: np.random.Generator, times_ms: Array, share: float) -> None:
    """Make single times longer by up to their own length, in place: a page fault, another process for a moment."""
    hit = draw.random(times_ms.shape) < share
    times_ms[hit] *= draw.uniform(1.2, 2.0, size=int(hit.sum()))


def rotating(draw: np.random.Generator, calm_rounds: float, lasts: tuple[int, int], slow: tuple[float, float]) -> Array:
    """Factors of one link at a time: slow for a few rounds, after a pause another one, shape (n_rounds, n_workers)."""
    factors = np.ones((ROUNDS, WORKERS))
    at, worker = 0, int(draw.integers(WORKERS))
    while at < ROUNDS:
        at += int(draw.poisson(calm_rounds))
        end = at + int(draw.integers(lasts[0], lasts[1] + 1))
        factors[at:end, worker] = draw.uniform(*slow)
        worker = (worker + int(draw.integers(1, WORKERS))) % WORKERS
        at = end
    return factors


def contended(draw: np.random.Generator, episodes: int, lasts: tuple[int, int], slow: tuple[float, float]) -> Array:
    """Factors of all links alike, in so many episodes, shape (n_rounds, 1)."""
    factors = np.ones((ROUNDS, 1))
    for begin in draw.choice(ROUNDS, size=episodes, replace=False):
        factors[begin : begin + int(draw.integers(lasts[0], lasts[1] + 1))] = draw.uniform(*slow)
    return factors


def trace(compute_ms: Array, in_ms: Array, out_ms: Array) -> dict[str, Any]:
    """One trace in the form of the recorded ones: the way out of a round is written down one round late."""
    late_ms = np.vstack([np.zeros((1, WORKERS)), out_ms[:-1]])
    return {
        "ssgd": {"in_ms": in_ms.round(1).tolist(), "prev_out_ms": late_ms.round(1).tolist()},
        "worker_compute_ms": compute_ms.T.round(1).tolist(),
    }


def jitter(draw: np.random.Generator) -> dict[str, Any]:
    compute_ms = scattered(draw, 180.0, draw.permutation(np.linspace(0.02, 0.14, WORKERS)))
    add_hiccups(draw, compute_ms, 0.005)
    in_ms, out_ms = (scattered(draw, link_ms(draw, 10.0, 0.3), np.full(WORKERS, 0.2)) for _ in range(2))
    return trace(compute_ms, in_ms, out_ms)


def bursts(draw: np.random.Generator) -> dict[str, Any]:
    compute_ms = scattered(draw, 180.0, draw.permutation(np.linspace(0.02, 0.14, WORKERS)))
    add_hiccups(draw, compute_ms, 0.005)
    link = rotating(draw, 4.0, (3, 7), (2.0, 4.0))
    in_ms, out_ms = (scattered(draw, link_ms(draw, 20.0, 0.3), np.full(WORKERS, 0.2)) * link for _ in range(2))
    return trace(compute_ms, in_ms, out_ms)


def rotating_links(draw: np.random.Generator) -> dict[str, Any]:
    compute_ms = scattered(draw, 45.0, draw.permutation(np.linspace(0.02, 0.10, WORKERS)))
    add_hiccups(draw, compute_ms, 0.005)
    link = rotating(draw, 2.0, (3, 7), (1.5, 2.5)) * contended(draw, 6, (5, 12), (1.3, 1.8))
    in_ms, out_ms = (scattered(draw, link_ms(draw, 30.0, 0.2), np.full(WORKERS, 0.25)) * link for _ in range(2))
    return trace(compute_ms, in_ms, out_ms)


def document() -> dict[str, Any]:
    """All traces; the same each time."""
    draw = np.random.default_rng(SEED)
    return {"jitter": jitter(draw), "bursts": bursts(draw), "rotating": rotating_links(draw)}


def text() -> str:
    """What the file contains."""
    return json.dumps(document(), separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=TARGET, help="file to write (default: %(default)s)")
    file = parser.parse_args().file
    file.write_text(text(), encoding="utf-8")
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
