"""`star-scheduler simulate`: a logged run replayed in other modes."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from scheduler.cli import main
from scheduler.replay_run import draw, find_run, read_run, run, tables
from scheduler.simulator.whatif import read_reports, what_if


def logged(folder: Path, *, steps: int = 60, slow: float = 4.0) -> Path:
    """A run in `sync` with rank 2 slow, as the run log writes it."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    times = 0.05 * np.exp(0.02 * rng.standard_normal((steps, 4))) * np.array([1.0, 1.0, slow, 1.0])
    ends = times.max(axis=1) + 0.01
    for rank in range(4):
        lines = [
            {"kind": "step", "time_s": 0.1 * k, "rank": rank, "step": k, "compute_s": times[k, rank],
             "wait_s": ends[k] - times[k, rank], "late": False}
            for k in range(steps)
        ]  # fmt: skip
        lines.insert(3, {"kind": "resources", "time_s": 0.3, "rank": rank, "cpu_share": 0.5})
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / f"rank{rank}.jsonl").write_text(text + '\n{"kind": "st')  # A killed run's last line is cut off.
    events = [
        {"kind": "facts", "time_s": 0.0, "values": {"world_size": 4, "optimizer": {"parameter_bytes": 56_000}}},
        {"kind": "plan", "time_s": 0.0, "step": 0, "mode": "sync", "label": "sync"},
        {"kind": "window", "time_s": 1.0, "step": 10, "noise_scale": 6.0, "ranks": {"compute_s": [0.05] * 4}},
        {"kind": "window", "time_s": 2.0, "step": 20, "noise_scale": None},
        {"kind": "end", "time_s": 6.0, "step": steps},
    ]
    (folder / "events.jsonl").write_text("\n".join(json.dumps(event) for event in events) + "\n")
    return folder


def test_a_run_is_read(tmp_path: Path) -> None:
    found = read_run(logged(tmp_path / "run"))
    assert found.compute_s.shape == (60, 4)
    assert (found.comm_bytes, found.noise, found.modes, found.seconds) == (56_000.0, 6.0, ("sync",), 6.0)


def test_what_each_mode_and_each_rank_cost(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run"))
    found = what_if(times.compute_s, times.wait_s, comm_bytes=times.comm_bytes, noise=times.noise)
    by_label = {one.label: one for one in found.modes}
    assert by_label["sync"].relative == 1.0
    assert by_label["sync"].time_s == pytest.approx(found.sync_s) == pytest.approx(60 * 0.21, rel=0.03)
    assert by_label["partial(3)"].relative == pytest.approx(0.06 / 0.21, rel=0.15)
    assert by_label["partial(3)"].low <= by_label["partial(3)"].relative <= by_label["partial(3)"].high
    assert found.slowdown == pytest.approx(0.21 / 0.06, rel=0.03)
    # Were rank 2 as fast as the others the job would take 0.06 instead of 0.21 s a step: 250 % faster.
    assert found.ranks[2].gain == pytest.approx(2.4, rel=0.05)
    assert found.ranks[2].slowest_share == 1.0
    assert all(one.gain == pytest.approx(0.0, abs=1e-9) for one in found.ranks if one.rank != 2)


def test_equal_ranks_gain_nothing(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run", slow=1.0))
    found = what_if(times.compute_s, times.wait_s)
    assert found.modes[0].relative > 0.95
    assert found.slowdown < 1.1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path / "runs" / "monday")
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plot, figures = tmp_path / "plots" / "what-if.png", tmp_path / "what-if.json"
    assert main(["simulate", "monday", "--plot", str(plot), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "without rank 2 it would have been" in printed and "partial(3)" in printed
    assert plot.stat().st_size > 5000
    written = json.loads(figures.read_text())
    assert written["steps"] == 60 and len(written["ranks"]) == 4
    assert main(["simulate", "monday", "--modes", "partial(2),subgroup(0,1,3)"]) == 0
    printed = capsys.readouterr().out
    assert "partial(2)" in printed and "subgroup(0,1,3)" in printed and "asgd" not in printed


def test_runs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                 ) -> None:
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = argparse.Namespace(run="nowhere", modes=None, plot=None, json=None, tracking_uri=None)
    assert run(options) == 2
    assert "no run nowhere under" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no step reports found"):
        read_run(tmp_path)


def test_a_rank_that_never_reported_is_named(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run")
    (folder / "rank1.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"ranks \[1\] reported no step"):
        read_reports(sorted(folder.glob("rank*.jsonl")))
    (folder / "rank1.jsonl").write_text('{"kind": "step", "rank": 1, "compute_s": 0.1}\n')
    with pytest.raises(ValueError, match=r"rank1.jsonl, line 1: 'step'"):
        read_reports(sorted(folder.glob("rank*.jsonl")))


def test_late_ranks_keep_their_last_time(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    reports = [(0, 0, 1.0), (1, 0, 5.0), (0, 1, 1.1), (0, 2, 1.2), (1, 3, 4.0), (0, 3, 1.3)]
    lines = [json.dumps({"rank": r, "step": s, "compute_s": t}) for r, s, t in reports]
    path.write_text("\n".join(lines))
    compute_s, wait_s = read_reports([path])
    assert compute_s.tolist() == [[1.0, 5.0], [1.1, 5.0], [1.2, 5.0], [1.3, 4.0]]
    assert np.isnan(wait_s).all()


def test_many_ranks_are_shown_by_their_gain(tmp_path: Path) -> None:
    times = np.full((20, 24), 0.1)
    times[:, 7] = 0.2
    found = what_if(times)
    _, ranks = tables(found, read_run(logged(tmp_path / "run")))
    assert ranks.row_count == 16 and ranks.caption == "8 more ranks gain less"
    draw(found, tmp_path / "many.svg", "many")
    assert (tmp_path / "many.svg").read_text().startswith("<?xml")


def test_bad_times() -> None:
    with pytest.raises(ValueError, match="expected \\(steps, ranks\\)"):
        what_if(np.array([[1.0, math.nan]]))


def test_a_folder_is_a_run(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run")
    assert find_run(str(folder), tmp_path) == folder
