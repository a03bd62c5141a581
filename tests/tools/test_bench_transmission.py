"""The benchmark of communication on slow links: its figures, without a link."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.transmission import bound_s, figures, link_s, variants_of
from benchmarks.workers.transmission import VARIANTS, Job, network_of


def cell(variant: str, part: float, step_s: float, ratio: float | None, mode: str = "sync") -> dict[str, Any]:
    place = {"mbytes": 1.0, "mbit": 50.0, "mode": mode, "part": part}
    return place | {"variant": variant, "step_s": step_s, "ratio": ratio, "bound": 0.9 * step_s}


def test_figures_are_those_of_their_cells() -> None:
    cells = [
        cell("horovod", 0.8, 1.0, 1.0),
        cell("overlap", 0.8, 0.8, 0.8),
        cell("overlap", 0.5, 0.7, 0.7),
        cell("overlap", 2.0, 1.5, 1.5),
        cell("overlap", 0.8, 0.9, 0.9, mode="partial(3)"),
    ]
    assert figures(cells) == {"sync_lossless": 0.8, "sync_lossless_bound": pytest.approx(0.72)}
    bound = [cell("star", 2.0, 1.0, 1.1), cell("overlap-auto", 2.0, 1.05, 1.2)]
    assert figures(bound) == {"compute_bound": pytest.approx(1.05)}
    assert figures([cell("hierarchical", 0.8, 0.7, 0.7)]) == {"hierarchical": 0.7}
    assert figures([]) == {}


def test_the_bound_of_a_lossless_schedule() -> None:
    assert bound_s(0.6, 0.06, 16) == 0.6  # The bytes.
    assert bound_s(0.6, 0.59, 16) == pytest.approx(0.6275)  # The first layer's gradient comes last and is needed first.
    assert bound_s(0.6, 0.0, 1) == 0.6


def test_bytes_on_the_link() -> None:
    assert link_s(10.0, 80.0, 2) == pytest.approx(1.0)
    job = Job(mbytes=1.0, compute_s=0.1, layers=16, mode="sync", steps=1, warm=1)
    assert sum(4 * param.numel() for param in network_of(job).parameters()) == pytest.approx(1e6, rel=0.02)


def test_plain_horovod_comes_first() -> None:
    assert variants_of("sync")[0] == "horovod" and "overlap" in variants_of("sync")
    assert "overlap" not in variants_of("partial(3)")
    assert "hierarchical" in variants_of("sync", 2) and "hierarchical" not in variants_of("sync")
    assert all(not variant.options or variant.ours or name == "horovod-fp16" for name, variant in VARIANTS.items())
