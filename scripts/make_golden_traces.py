"""Writes `tests/golden/traces.json`: round times of eight synthetic workers, for the tests that read recorded traces.

The file has the form that `benchmarks.forecast.read_matrices` reads. Nothing in it was measured; it is drawn with a
fixed seed to resemble recorded traces of undisturbed jobs:

    jitter     no disturbance: compute times scatter by 2 % to 14 %, by worker, with rare single steps that take
               up to twice as long; the network takes little time, on some links always slightly more
    bursts     the same computation; occasionally a worker's link is much slower for a few rounds, later another's
    rotating   the network takes as long as the computation; most of the time one worker's link is slow for a few
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
    """Return each worker's mean link time, always slightly longer for some, shape (n_workers,)."""
    return np.asarray(usual_ms * np.exp(spread * draw.normal(size=WORKERS)))


def scattered(draw: np.random.Generator, means_ms: float | Array, spreads: Array) -> Array:
    """Return times around a mean, with a relative spread per worker, shape (n_rounds, n_workers)."""
    return means_ms * np.exp(spreads * draw.normal(size=(ROUNDS, WORKERS)))


def add_hiccups(draw: np.random.Generator, times_ms: Array, share: float) -> None:
    """Lengthen single times by up to their own length, in place, as by a page fault or another process."""
    hit = draw.random(times_ms.shape) < share
    times_ms[hit] *= draw.uniform(1.2, 2.0, size=int(hit.sum()))


def rotating(draw: np.random.Generator, calm_rounds: float, lasts: tuple[int, int], slow: tuple[float, float]) -> Array:
    """Return factors that slow one link at a time for a few rounds, with pauses, shape (n_rounds, n_workers)."""
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
    """Return factors that slow all links equally in `episodes` episodes, shape (n_rounds, 1)."""
    factors = np.ones((ROUNDS, 1))
    for begin in draw.choice(ROUNDS, size=episodes, replace=False):
        factors[begin : begin + int(draw.integers(lasts[0], lasts[1] + 1))] = draw.uniform(*slow)
    return factors


def trace(compute_ms: Array, in_ms: Array, out_ms: Array) -> dict[str, Any]:
    """Return one trace in the form of the recorded ones, where a round's return transfer is logged one round late."""
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
    """Return all traces; deterministic."""
    draw = np.random.default_rng(SEED)
    return {"jitter": jitter(draw), "bursts": bursts(draw), "rotating": rotating_links(draw)}


def text() -> str:
    """Return the contents of the file."""
    return json.dumps(document(), separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=TARGET, help="file to write (default: %(default)s)")
    file = parser.parse_args().file
    file.write_text(text(), encoding="utf-8")
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
