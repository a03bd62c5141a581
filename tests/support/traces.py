"""Round times from trace files: the synthetic one, and the recorded ones where they are available."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "traces.json"
"""Written by `scripts/make_golden_traces.py`: no recorded time in it."""
RECORDED = Path(os.environ.get("STAR_TRACES", ROOT.parent / "shared" / "data" / "star" / "traces.json"))
"""STAR's logs of ten networks, 8 workers each; no part of this project."""


def golden_and_recorded(golden: list[tuple[Any, ...]], recorded: list[tuple[Any, ...]]) -> list[Any]:
    """Return test parameters: those of our own file, followed by the recorded traces' if these are available.

    The first value of every tuple is the name of a trace; the test gets the file's path before it.
    """
    cases = [(GOLDEN, *case) for case in golden]
    if RECORDED.is_file():
        cases += [(RECORDED, *case) for case in recorded]
    return [pytest.param(*case, id="-".join(str(value) for value in case[1:])) for case in cases]


def uncontended_s(path: Path, name: str, what: str) -> np.ndarray:
    """Return seconds per round and worker, shape (n_rounds, 8), without the three warm-up rounds.

    Args:
        what: `compute`, or `total`, which adds sending the gradient to the server and receiving the parameters.
    """
    trace = _document(path)[name]
    inward, outward = np.asarray(trace["ssgd"]["in_ms"]), np.asarray(trace["ssgd"]["prev_out_ms"])
    compute = np.asarray([row[: len(inward)] for row in trace["worker_compute_ms"]]).T
    if what == "total":  # The return transfer is logged one round late.
        compute = compute[:-1] + inward[:-1] + outward[1:]
    return np.asarray(compute[3:] * 1e-3)


@cache
def _document(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
