"""`star-scheduler simulate`: a logged run replayed in other modes."""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from scheduler.cli.main import main
from scheduler.cli.simulate import LoggedTimes, draw, find_run, read_run, run, tables
from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import ring_s
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan
from scheduler.simulator.reports import read_reports
from scheduler.simulator.whatif import InForce, WhatIf, what_if


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
        {"kind": "window", "time_s": 1.0, "step": 10, "noise_scale": 6.0, "ranks": {"compute_s": [0.05] * 4},
         "reduced_part": 0.5, "pushed_part": 0.25},
        {"kind": "window", "time_s": 2.0, "step": 20, "noise_scale": None},
        {"kind": "end", "time_s": 6.0, "step": steps},
    ]
    (folder / "events.jsonl").write_text("\n".join(json.dumps(event) for event in events) + "\n")
    return folder


def test_a_run_is_read(tmp_path: Path) -> None:
    found = read_run(logged(tmp_path / "run"))
    assert found.compute_s.shape == (60, 4)
    assert (found.comm_bytes, found.noise, found.parts) == (56_000.0, 6.0, (0.5, 0.25))
    assert found.in_force is not None and found.in_force.share("sync") == 1.0
    assert found.seconds == pytest.approx(5.9 + 0.21, rel=0.01), "from the first step to the last one's end"


def test_gradients_are_as_large_as_the_log_says(tmp_path: Path) -> None:
    """Frozen parameters, which the optimizer has too, are not communicated."""
    path = logged(tmp_path / "run") / "events.jsonl"
    path.write_text(path.read_text().replace('"noise_scale": null', '"comm_bytes": 14000.0'))
    assert read_run(path.parent).comm_bytes == 14_000.0


def test_what_each_mode_and_each_rank_cost(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run"))
    found = what_if(times.compute_s, times.wait_s, comm_bytes=times.comm_bytes, noise=times.noise)
    by_label = {one.label: one for one in found.modes}
    assert by_label["sync"].relative == 1.0
    assert by_label["sync"].time_s == pytest.approx(found.sync_s) == pytest.approx(60 * 0.21, rel=0.03)
    assert by_label["partial(3)"].relative == pytest.approx(0.06 / 0.21, rel=0.15)
    assert by_label["partial(3)"].low <= by_label["partial(3)"].relative <= by_label["partial(3)"].high
    assert found.slowdown == pytest.approx(0.21 / 0.06, rel=0.03)
    # Were rank 2 as fast as the others the job would take 0.06 instead of 0.21 s a step: 71 % less.
    assert found.ranks[2].gain == pytest.approx(0.71, rel=0.02)
    assert found.ranks[2].slowest_share == 1.0
    assert all(one.gain == pytest.approx(0.0, abs=1e-9) for one in found.ranks if one.rank != 2)


def test_a_run_that_compressed_its_gradients_is_replayed_with_their_size(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run"))
    links: dict[str, Any] = {"comm_bytes": 1e7, "link_bytes_per_s": [25e6] * 4, "modes": ("local(4)",)}
    whole, small = (what_if(times.compute_s, **links, reduced_part=part) for part in (1.0, 0.02))
    relative = [next(one.relative for one in found.modes if one.label == "local(4)") for found in (whole, small)]
    assert relative[0] < 1.0 < relative[1], "averagings of parameters are not compressed"


@pytest.mark.parametrize(("share", "error"), [(0.3, 1e-6), (1.0, 1e-6), (1.5, 0.12)])
def test_communication_counts_once_where_links_are_known(share: float, error: float) -> None:
    """Equal ranks with 50 ms of compute; waits are those of a ring all-reduce over such links, `share` of it."""
    times = np.full((64, 4), 0.05)
    ring = ring_s(Conditions(times_s=times, rate=np.full(4, 1e8), comm_bytes=1e7))
    in_force = InForce(plans=(Plan.sync(4),), which=np.zeros(64, dtype=np.int64), updates=np.ones(64))
    waits = np.full((64, 4), share * ring)
    found = what_if(
        times, waits, comm_bytes=1e7, link_bytes_per_s=[1e8] * 4, modes=("ps",), in_force=in_force
    )  # fmt: skip
    assert found.replayed_s == pytest.approx(64 * (0.05 + max(1.0, share) * ring), rel=error)
    assert found.sync_s == pytest.approx(64 * (0.05 + share * ring)) and found.slowdown == pytest.approx(1.0)
    unknown = what_if(times, waits, modes=("ps",), in_force=in_force)
    assert unknown.sync_s == pytest.approx(found.sync_s)


def relaxed(folder: Path, label: str = "ps(backup=1)", *, steps: int = 200, dropped: int = 0) -> Path:
    """A run of which the first 10 steps were in `sync`, then a relaxed mode that rank 2 is late in.

    Args:
        folder: Where to.
        label: The mode; its steps take as long as the fast ranks do.
        steps: Last step.
        dropped: Every so-and-so-many-th step nobody reports, 0 for none: updates of others' gradients.
    """
    folder.mkdir(parents=True)
    lines: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(3)}
    now_s = 1.0
    for k in range(steps):
        slow = k < 10
        now_s += 0.13 if slow else 0.04
        if dropped and not slow and k % dropped:
            continue
        for rank in range(3):
            compute_s = 0.12 if rank == 2 else 0.03
            if rank == 2 and not slow and k % 4:
                continue
            late = rank == 2 and not slow
            wait_s = (0.13 - compute_s) if slow else 0.0 if late else 0.01
            lines[rank].append({"kind": "step", "time_s": now_s, "rank": rank, "step": k, "compute_s": compute_s,
                                "wait_s": wait_s, "late": late})  # fmt: skip
    for rank, found in lines.items():
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    plan = parse_mode(label, 3)
    assert plan is not None
    events: list[dict[str, object]] = [
        {"kind": "plan", "time_s": 0.0, "step": 0, "label": "sync", "plan": Plan.sync(3).to_dict()},
        {"kind": "plan", "time_s": 1.0, "step": 10, "label": plan.label, "plan": plan.to_dict()},
        {"kind": "plan", "time_s": 1.0, "step": 11, "label": "sync", "plan": Plan.sync(5).to_dict()},  # Of others.
        {"kind": "end", "time_s": now_s + 30.0},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def replayed(folder: Path) -> tuple[WhatIf, LoggedTimes]:
    times = read_run(folder)
    return what_if(times.compute_s, times.wait_s, in_force=times.in_force), times


def shown(found: WhatIf, times: LoggedTimes) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in tables(found, times):
        console.print(table)
    return console.export_text()


def test_the_modes_in_force_are_among_the_modes(tmp_path: Path) -> None:
    found, times = replayed(relaxed(tmp_path / "run"))
    by_label = {one.label: one for one in found.modes}
    assert by_label["ps(backup=1)"].share == pytest.approx(0.95)
    assert by_label["sync"].share == pytest.approx(0.05) and by_label["partial(2)"].share == 0.0
    lines = {line.split("│")[1].strip(): line for line in shown(found, times).splitlines() if line.startswith("│")}
    assert lines["ps(backup=1)"].endswith(" 95 % │") and lines["sync"].endswith("  5 % │")
    assert lines["partial(2)"].endswith("     │")


def test_the_table_can_be_checked_against_the_run(tmp_path: Path) -> None:
    found, times = replayed(relaxed(tmp_path / "run"))
    assert times.seconds == pytest.approx(10 * 0.13 + 190 * 0.04, rel=0.01), "not what came after the last step"
    assert found.replayed_s == pytest.approx(times.seconds, rel=0.1)
    assert f"as it ran           │     {times.seconds:.1f} │" in shown(found, times)
    assert f"as it ran, replayed │     {found.replayed_s:.1f} │" in shown(found, times)


def test_steps_of_relaxed_modes_are_not_steps_of_sync(tmp_path: Path) -> None:
    """An update of two of three gradients brings a training less far than one of all three."""
    found, times = replayed(relaxed(tmp_path / "run"))
    assert found.steps == 200 and 150 < found.sync_steps < 195
    assert found.sync_s == pytest.approx(0.13 * found.sync_steps, rel=0.01)
    assert f"200 steps of 3 ranks, worth about {found.sync_steps:.0f} of sync" in shown(found, times)
    # The mode in force costs what the run took, the ten steps in sync put aside.
    cost_s = next(one.time_s for one in found.modes if one.label == "ps(backup=1)")
    assert cost_s == pytest.approx(200 * 0.04, rel=0.15)
    synced, _ = replayed(relaxed(tmp_path / "synced", "sync"))
    assert synced.sync_steps == synced.steps == 200


def test_updates_that_nobody_reported_count(tmp_path: Path) -> None:
    """Servers update several times between two reports of a rank."""
    found, _ = replayed(relaxed(tmp_path / "run", "ps(1)", dropped=3))
    assert found.steps == pytest.approx(200, abs=3)
    assert found.sync_steps < 100


def test_under_local_a_step_is_a_round_of_steps(tmp_path: Path) -> None:
    lines = [
        {"rank": rank, "step": step, "compute_s": 0.1 * (1 + k), "wait_s": 0.0 if step else 0.02}
        for rank in range(3) for step in range(40) for k in range(4 if step else 1)
    ]  # fmt: skip
    (tmp_path / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = {"kind": "plan", "step": 1, "label": "local(4)", "plan": Plan.local(3, steps=4).to_dict()}
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"kind": "plan", "step": 0, "label": "sync"}) + "\n" + json.dumps(plan) + "\n"
    )
    found, times = replayed(tmp_path)
    assert times.compute_s[1, 0] == pytest.approx(0.25), "the mean of a round's four"
    assert found.steps == 1 + 39 * 4 and found.sync_steps > 100
    # Ranks do not communicate inside a round: what a step of `sync` takes for it is known from the one there was.
    assert found.sync_s == pytest.approx(0.12 + (0.25 + 0.02) * (found.sync_steps - 1))


def test_an_averaging_counts_as_the_mean_of_the_ranks_steps(tmp_path: Path) -> None:
    """In `local(0.6s)` three ranks make six steps of 0.1 s meanwhile, one makes one of 0.6 s."""
    lines = [
        {"rank": rank, "step": step, "compute_s": 0.6 if rank == 3 else 0.1, "wait_s": 0.0}
        for step in range(64) for rank in range(4) for _ in range(1 if rank == 3 else 6)
    ]  # fmt: skip
    (tmp_path / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = {"kind": "plan", "step": 0, "label": "local(0.6s)", "plan": Plan.local(4, seconds=0.6).to_dict()}
    (tmp_path / "events.jsonl").write_text(json.dumps(plan) + "\n")
    found, times = replayed(tmp_path)
    assert times.in_force is not None and times.in_force.updates.tolist() == [4.75] * 64
    assert found.replayed_s == pytest.approx(64 * 0.6, rel=0.02)


def test_intervals_are_as_wide_as_the_errors(tmp_path: Path) -> None:
    found, _ = replayed(relaxed(tmp_path / "run"))
    for one in found.modes:
        if one.label != "sync":
            assert one.low < 0.85 * one.relative and one.high > 1.5 * one.relative, one.label


def test_communication_is_measured_in_sync(tmp_path: Path) -> None:
    """Late ranks wait for nothing: their zeros are not the communication of a step."""
    times = read_run(relaxed(tmp_path / "run", "partial(2)"))
    assert np.isfinite(times.wait_s[:10]).all() and np.isnan(times.wait_s[10:, 2]).all()
    found = what_if(times.compute_s, times.wait_s, in_force=times.in_force)
    assert found.sync_s / found.sync_steps == pytest.approx(0.12 + 0.01)


def test_one_rank_has_one_mode() -> None:
    assert [one.label for one in what_if(np.full((40, 1), 0.1)).modes] == ["sync"]


def test_modes_that_are_possible_are_listed(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run"))
    usual = {one.label for one in what_if(times.compute_s, times.wait_s).modes}
    found = {one.label for one in what_if(times.compute_s, times.wait_s, batch=16, microbatches=4).modes}
    assert found - usual == {"sync(balanced)", "sync(steal)"}


def test_an_averaging_costs_its_communication_once() -> None:
    """Of 0.05 s of communication in each step, `local(4)` has a quarter: what is measured is no compute time."""
    times = np.full((64, 4), 0.05)
    found = {one.label: one.relative for one in what_if(times, np.full((64, 4), 0.05), modes=("local(4)",)).modes}
    assert found["local(4)"] < 1.0, "0.625 of the time, at the price of the drift between averagings"


def test_waits_count_by_their_mean() -> None:
    """One wait of three is long, as on a busy machine: the replay takes as long as the run did."""
    waits = np.where(np.arange(96)[:, None] % 3 == 0, 0.07, 0.01) * np.ones((1, 4))
    found = what_if(np.full((96, 4), 0.05), waits)
    assert found.sync_s == pytest.approx(96 * 0.05 + waits[:, 0].sum(), rel=0.02)


def test_equal_ranks_gain_nothing(tmp_path: Path) -> None:
    times = read_run(logged(tmp_path / "run", slow=1.0))
    found = what_if(times.compute_s, times.wait_s)
    assert found.modes[0].relative > 0.9
    assert found.slowdown < 1.1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path / "runs" / "monday")
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plot, figures = tmp_path / "plots" / "what-if.png", tmp_path / "what-if.json"
    assert main(["simulate", "monday", "--plot", str(plot), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "without rank 2's delays it would have taken 71 % less" in printed and "partial(3)" in printed
    assert "71.0 % │ 100 % of steps" in printed and "faster by" not in printed
    assert plot.stat().st_size > 5000
    written = json.loads(figures.read_text())
    assert written["steps"] == 60 and len(written["ranks"]) == 4
    assert written["measured_s"] == pytest.approx(6.1, abs=0.1)
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
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="has no step reports; expected a run's folder"):
            find_run(str(path), tmp_path, "http://server")


def test_a_rank_that_never_reported_is_named(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run")
    (folder / "rank1.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"ranks \[1\] reported no step"):
        read_reports(sorted(folder.glob("rank*.jsonl")))
    (folder / "rank1.jsonl").write_text('{"kind": "step", "rank": 1, "compute_s": 0.1}\n')
    with pytest.raises(ValueError, match=r"rank1.jsonl: a report has rank 1 and step None"):
        read_reports(sorted(folder.glob("rank*.jsonl")))


def test_a_run_without_the_files_of_other_hosts_is_no_smaller_run(tmp_path: Path) -> None:
    """Its plans, of another number of ranks, were ignored, and the ranks that are there replayed as the whole job."""
    folder = logged(tmp_path / "run")
    (folder / "run.json").write_text('{"schema": 1, "world_size": 4}')
    assert read_run(folder).compute_s.shape == (60, 4)
    for rank in (2, 3):
        (folder / f"rank{rank}.jsonl").unlink()
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] reported no step; .* `star-hvd sync-logs` there"):
        read_run(folder)


def test_a_run_of_another_version_is_not_replayed(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run")
    (folder / "run.json").write_text('{"schema": 2, "world_size": 4}')
    with pytest.raises(ValueError, match="run run cannot be replayed: it is of version 2 of the run log; expected 1"):
        read_run(folder)


def test_late_ranks_keep_their_last_time(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    reports = [(0, 0, 1.0), (1, 0, 5.0), (0, 1, 1.1), (0, 2, 1.2), (1, 3, 4.0), (0, 3, 1.3)]
    lines = [json.dumps({"rank": r, "step": s, "compute_s": t}) for r, s, t in reports]
    path.write_text("\n".join(lines))
    found = read_reports([path])
    assert found.compute_s.tolist() == [[1.0, 5.0], [1.1, 5.0], [1.2, 5.0], [1.3, 4.0]]
    assert np.isnan(found.wait_s).all() and math.isnan(found.seconds)


def test_many_ranks_are_shown_by_their_gain(tmp_path: Path) -> None:
    times = np.full((20, 24), 0.1)
    times[:, 7] = 0.2
    found = what_if(times)
    _, ranks = tables(found, read_run(logged(tmp_path / "run")))
    assert ranks.row_count == 16 and ranks.caption == "8 more ranks would save less"
    draw(found, tmp_path / "many.svg", "many")
    assert (tmp_path / "many.svg").read_text().startswith("<?xml")


def test_a_run_that_tells_no_plans_is_taken_for_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = logged(tmp_path / "run")
    (folder / "events.jsonl").unlink()
    found, times = replayed(folder)
    assert times.in_force is None and math.isnan(found.replayed_s) and found.sync_steps == 60
    assert "replayed │" not in shown(found, times)
    figures = tmp_path / "figures.json"
    assert main(["simulate", str(folder), "--json", str(figures)]) == 0
    written = json.loads(figures.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert written["replayed_s"] is None and written["modes"][0]["share"] is None


def test_bad_times() -> None:
    with pytest.raises(ValueError, match="expected \\(steps, ranks\\)"):
        what_if(np.array([[1.0, math.nan]]))


def test_a_folder_is_a_run(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run")
    assert find_run(str(folder), tmp_path) == folder


class FakeMlflow:
    """MLflow's client with one run named `monday`, as far as `simulate` asks it."""

    code = "INVALID_PARAMETER_VALUE"
    asked: list[str] = []
    targets: list[Path] = []

    def __init__(self, tracking_uri: str) -> None:
        if tracking_uri == "nonsense://":
            raise self.error("INVALID_PARAMETER_VALUE", "no such store")

    @staticmethod
    def error(code: str, text: str) -> Exception:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import ErrorCode

        found: Exception = MlflowException(text, error_code=ErrorCode.Value(code))
        return found

    def get_run(self, run_id: str) -> Any:
        self.asked.append(f"timeout {os.environ.get('MLFLOW_HTTP_REQUEST_TIMEOUT')}")
        raise self.error(self.code, "no answer")

    def search_experiments(self) -> list[Any]:
        self.asked.append("experiments")
        return [SimpleNamespace(experiment_id="1")]

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        return [SimpleNamespace(info=SimpleNamespace(run_id="abc"))] if "monday" in query else []

    def download_artifacts(self, run_id: str, path: str, target: str) -> str:
        self.targets.append(Path(target))
        return str(logged(Path(target) / path))


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> type[FakeMlflow]:
    tracking = pytest.importorskip("mlflow.tracking")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "")  # So that what `simulate` sets is undone.
        monkeypatch.delenv(name)
    for name, value in (("code", "INVALID_PARAMETER_VALUE"), ("asked", []), ("targets", [])):
        monkeypatch.setattr(FakeMlflow, name, value)
    monkeypatch.setattr(tracking, "MlflowClient", FakeMlflow)
    return FakeMlflow


@pytest.mark.parametrize("code", ["INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"])
def test_a_name_in_mlflow_is_downloaded_to_a_folder_that_is_removed_at_the_end(
    code: str, tmp_path: Path, fake_mlflow: type[FakeMlflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda call, *args, **more: at_exit.append(partial(call, *args, **more)))
    monkeypatch.setattr(fake_mlflow, "code", code)
    assert read_run(find_run("monday", tmp_path, "http://server")).compute_s.shape == (60, 4)
    assert fake_mlflow.asked == ["timeout 10", "experiments"], "a server that hangs is not waited for"
    (target,) = fake_mlflow.targets
    assert target.is_dir()
    for call in at_exit:
        call()
    assert not target.exists()


def test_a_server_without_an_answer_is_asked_once(tmp_path: Path, fake_mlflow: type[FakeMlflow]) -> None:
    fake_mlflow.code = "INTERNAL_ERROR"
    with pytest.raises(ValueError, match="cannot fetch run monday from MLflow at http://server: no answer"):
        find_run("monday", tmp_path, "http://server")
    assert fake_mlflow.asked == ["timeout 10"] and not fake_mlflow.targets


def test_a_tracking_uri_that_mlflow_refuses_is_told(tmp_path: Path, fake_mlflow: type[FakeMlflow]) -> None:
    with pytest.raises(ValueError, match="cannot fetch run monday from MLflow at nonsense://: no such store"):
        find_run("monday", tmp_path, "nonsense://")


def test_an_error_of_the_store_of_files_is_told(
    tmp_path: Path, fake_mlflow: type[FakeMlflow], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of boto3, for example, are neither MLflow's nor errors of the system."""

    def fails(*arguments: object) -> str:
        raise RuntimeError("no such bucket")

    monkeypatch.setattr(fake_mlflow, "download_artifacts", fails)
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    assert main(["simulate", "monday", "--tracking-uri", "http://server"]) == 2
    said = capsys.readouterr().err
    assert "cannot fetch the files of run monday from MLflow at http://server: RuntimeError: no such bucket" in said


def shared(folder: Path, plan: Plan, shares: tuple[int, ...], *, fixed_part: float, steps: int = 64) -> Path:
    """A run with batch shares; usual batches of 16 would take 50 ms, on rank 2 four times as long."""
    folder.mkdir(parents=True)
    usual_s = np.array([0.05, 0.05, 0.2, 0.05])
    times_s = usual_s * (fixed_part + (1.0 - fixed_part) * np.array(shares) / 16)
    for rank in range(4):
        lines = [
            {"kind": "step", "time_s": (k + 1) * (times_s.max() + 0.01), "rank": rank, "step": k, "late": False,
             "samples": shares[rank], "compute_s": times_s[rank], "wait_s": times_s.max() + 0.01 - times_s[rank]}
            for k in range(steps)
        ]  # fmt: skip
        (folder / f"rank{rank}.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    events = [
        {"kind": "facts", "time_s": 0.0, "values": {"world_size": 4, "batch": 16}},
        {"kind": "plan", "time_s": 0.0, "step": 0, "label": plan.label, "plan": plan.to_dict()},
        {"kind": "window", "time_s": 1.0, "step": 10, "fixed_part": fixed_part or None},
    ]
    (folder / "events.jsonl").write_text("\n".join(json.dumps(event) for event in events) + "\n")
    return folder


@pytest.mark.parametrize("fixed_part", [0.0, 0.2])
@pytest.mark.parametrize("fixed", [False, True])
def test_batch_shares_do_not_hide_which_rank_is_slow(tmp_path: Path, fixed: bool, fixed_part: float) -> None:
    shares = (20, 20, 4, 20)
    plan = Plan.sync(4, batch_shares=shares, balanced=not fixed)
    times = read_run(shared(tmp_path / "run", plan, shares, fixed_part=fixed_part))
    assert times.compute_s == pytest.approx(np.tile([0.05, 0.05, 0.2, 0.05], (64, 1)))
    found = what_if(times.compute_s, times.wait_s, in_force=times.in_force, fixed_part=times.fixed_part)
    assert found.sync_s == pytest.approx(64 * 0.21, rel=0.01)
    assert max(found.ranks, key=lambda one: one.gain).rank == 2
    # An unknown fixed part, 0 in these logs, is taken for the usual one.
    allowed = 0.02 if fixed_part else 0.05
    assert found.replayed_s == pytest.approx(times.seconds, rel=allowed), "shares count once, and as they were"
