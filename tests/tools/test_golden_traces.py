"""The traces of our own making are what their script writes, and have in them what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import make_golden_traces
import numpy as np
import pytest

from tests.support.traces import GOLDEN, uncontended_s


def test_the_file_is_what_the_script_writes() -> None:
    kept, made = json.loads(GOLDEN.read_text(encoding="utf-8")), json.loads(make_golden_traces.text())
    assert list(kept) == list(made)
    for name, trace in made.items():
        for key in ("in_ms", "prev_out_ms"):
            np.testing.assert_allclose(kept[name]["ssgd"][key], trace["ssgd"][key], atol=0.11)
        np.testing.assert_allclose(kept[name]["worker_compute_ms"], trace["worker_compute_ms"], atol=0.11)


def test_another_file_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_golden_traces.py", str(tmp_path / "traces.json")])
    make_golden_traces.main()
    assert (tmp_path / "traces.json").read_text(encoding="utf-8") == make_golden_traces.text()


def test_computation_scatters_and_no_worker_stays_slow() -> None:
    for name in make_golden_traces.document():
        times = uncontended_s(GOLDEN, name, "compute")
        spread = np.log(times).std(axis=0)
        assert times.shape[1] == make_golden_traces.WORKERS and spread.min() > 0.015 and spread.max() < 0.2
        assert np.ptp(np.median(times, axis=0)) < 0.1 * np.median(times)


def test_links_are_slow_for_a_few_rounds_and_every_worker_has_its_turn() -> None:
    total, compute = (uncontended_s(GOLDEN, "rotating", what) for what in ("total", "compute"))
    times = total - compute[:-1]
    slow = times > 1.3 * np.median(times, axis=1, keepdims=True)
    assert slow.any(axis=0).all() and slow.any(axis=1).mean() > 0.5
    follows = (slow[1:] & slow[:-1]).sum() / slow[:-1].sum()
    assert follows > 2 * slow.mean()  # what is slow stays so for some rounds
