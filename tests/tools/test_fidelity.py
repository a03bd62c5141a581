"""The simulated twin of a laboratory run, and what is compared of both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simspeed
from benchmarks.fidelity import compare, kendall_tau, main, predictions, regret, smooth_s
from benchmarks.lab.twin import (
    Constants,
    batches_of,
    calibrate,
    plan_of,
    simulated_s,
    straggler_free_s,
    target_steps,
    twin,
    undisturbed_s,
)
from scheduler.plan.plan import Plan

MACHINE = Constants(own_s=0.006, cycle_s=0.009, spin_s=0.015, epoch_s=0.02)


def training(step_s: float, steps: int, **fields: Any) -> dict[str, Any]:
    """Two evaluations per 5 % of the way, in which accuracy rises from 0.5 to 1."""
    times = [step_s * (k + 1) for k in range(0, steps, 2)]
    return {
        "train_s": step_s * steps, "global_steps": steps, "times_s": times, "steps": list(range(1, steps + 1, 2)),
        "accuracies": [0.5 + 0.5 * (k + 1) / steps for k in range(0, steps, 2)],
        "report": {"noise_scale": 5.0}, **fields,
    }  # fmt: skip


def record(scenario: str = "one-slow", rows: Any = ((1.0, 1.0, 1.0, 4.0),), **modes: float) -> dict[str, Any]:
    """As `benchmarks.tta` writes it: 4 ranks, 30 ms of device, 2 epochs of 80 batches; seconds of each mode."""
    spec = {
        "scenario": scenario, "rows": [list(row) for row in rows], "ranks": 4, "dataset": "digits", "quorum": 3,
        "train_samples": 1280, "epochs": 2, "batch_samples": 16, "device_s": 0.03, "hidden_units": 32,
    }  # fmt: skip
    return {
        "scenario": scenario, "ranks": 4, "spec": spec, "model_bytes": 14_000, "versions": {"cores": "2"},
        "target_accuracy": 0.93, "plain_s": 6.0, "star_s": 2.2,
        "variants": {
            "straggler_free": {"seeds": [training(0.06, 40), training(0.2, 40)]},
            "plain": {"seeds": [training(0.15, 40)]},
            "star": {"seeds": [training(0.05, 40)]},
        },
        "modes": {name: {"seconds": seconds, "per_seed": [training(0.05, 40)]} for name, seconds in modes.items()},
    }  # fmt: skip


def test_constants_come_from_the_least_disturbed_straggler_free_run() -> None:
    found = calibrate(record())
    assert straggler_free_s(record()) == pytest.approx(0.06)
    # 30 ms beside the device's; half of that is spinning with 4 ranks on 2 cores.
    assert found.spin_s == pytest.approx(0.015)
    assert found.own_s + found.cycle_s == pytest.approx(0.015)
    assert found.epoch_s == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="no straggler-free run"):
        calibrate({"spec": record()["spec"], "variants": {}})


def test_pauses_of_the_machine_are_taken_out() -> None:
    run = training(0.05, 40)
    run["times_s"] = [t + (3.0 if k > 7 else 0.0) for k, t in enumerate(run["times_s"])]
    run["train_s"] += 3.0
    # What is left of the pause is as long as the scenario could explain: 4 x 2 steps of 0.1 s.
    assert undisturbed_s(run, 0.1) == pytest.approx(2.0 + 0.8 - 0.1)
    assert undisturbed_s(training(0.05, 40), 0.1) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("mode", "step_s"),
    [("plain", 0.126 + 0.009 + 0.015), ("partial(3)", 0.0547), ("asgd", 0.0475), ("local(8)", 0.1275)],
)
def test_times_of_the_twin(mode: str, step_s: float) -> None:
    """One rank 4x: device 120 ms and 6 ms of its own; the others 36 ms and what a collective takes."""
    one = record()
    sc = twin(one, MACHINE, plain=mode == "plain")
    seconds = simulated_s(sc, plan_of(mode, one["spec"]), one["spec"], MACHINE)
    # The ends of two short epochs weigh: whoever has a slow batch ends it.
    assert seconds / 40.0 == pytest.approx(step_s, rel=0.3)


def test_links_freezes_and_rows_are_simulated() -> None:
    link = record("slow-link", ((1.0, 1.0, 1.0, 10.0),))
    link["spec"]["link_bits_per_s"], link["model_bytes"], link["spec"]["passes"] = 2e8, 1_000_000, 2
    sc = twin(link, MACHINE)
    assert sc.cluster.link_bytes_per_s == (2.5e7, 2.5e7, 2.5e7, 2.5e6)
    assert not sc.rows and batches_of(link["spec"]) == 320
    slow_s = simulated_s(sc, Plan.sync(4), link["spec"], MACHINE) / 80.0
    assert slow_s == pytest.approx(0.036 + 2 * 3 / 4 * 1e6 / 2.5e6, rel=0.05)
    frozen = twin(record("frozen", ((1.0, 1.0, 1.0, 1.5),)), MACHINE)
    assert {(e.rank, e.kind) for e in frozen.episodes} == {(3, "frozen")}
    starved = twin(record("starved", ((1.0, 1.0, 1.0, 10.0),)), MACHINE)
    assert [(e.rank, e.kind, e.factor) for e in starved.episodes] == [(3, "starved", 10.0)]
    turning = twin(record("rotating", ((4.0, 1.0, 1.0, 1.0), (1.0, 4.0, 1.0, 1.0))), MACHINE)
    assert turning.rows[0][0] == pytest.approx((0.12 + 0.006) / 0.036)
    assert not twin(record("none", ((1.0, 1.0, 1.0, 1.0),)), MACHINE).rows


@pytest.mark.parametrize(("workers", "step_s"), [(0, 0.045 + 3 * 0.048), (2, 0.096)])
def test_slow_input_slows_the_rank_that_waits_for_it(workers: int, step_s: float) -> None:
    one = record("slow-input")
    one["spec"] |= {"input_s_per_sample": 0.003, "workers": workers}
    (row,) = twin(one, MACHINE).rows
    assert row[:3] == (1.0,) * 3
    assert 0.036 * row[3] + 0.009 == pytest.approx(step_s), "a step of sync with it"
    (plain,) = twin(one, MACHINE, plain=True).rows
    assert 0.036 * plain[3] + 0.024 == pytest.approx(step_s + (0.0 if workers else 0.015))


def test_kendalls_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([4, 3, 2, 1], [10, 20, 30, 40]) == -1.0
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1.0 / 3.0)
    # What is equal in reality has no order; what is equal in the prediction agrees with none.
    assert kendall_tau([1, 2, 3], [10.0, 10.1, 20.0]) == 1.0
    assert kendall_tau([1, 1, 3], [10.0, 15.0, 20.0]) == pytest.approx(2.0 / 3.0)
    # A target that was missed is last.
    assert kendall_tau([1, 2, 9], [10.0, 15.0, math.inf]) == 1.0
    assert math.isnan(kendall_tau([1, 2], [math.inf, math.inf]))


def test_modes_are_predicted_and_compared() -> None:
    one = record(**{"partial(3)": 2.0, "local(8)": 5.0, "asgd": 1.9})
    predicted = predictions(one, MACHINE)
    assert set(predicted) == {"plain", "partial(3)", "local(8)", "asgd"}
    # In sync a step takes 126 ms and more, in plain Horovod 15 ms longer.
    assert predicted["partial(3)"] < 0.5 < predicted["plain"]
    assert predicted["plain"] == pytest.approx(1.0 + 0.015 / 0.13, rel=0.03)
    rows = {row["mode"]: row for row in compare(one, MACHINE)}
    assert rows["plain"]["real_step_s"] == pytest.approx(0.15)
    assert abs(rows["plain"]["error"]) < 0.15
    assert rows["asgd"]["real_tta_s"] == 1.9
    # The straggler-free run never reached its target, so there is nothing to simulate.
    assert math.isinf(rows["asgd"]["simulated_tta_s"])
    for run in one["variants"]["straggler_free"]["seeds"]:
        run["time_to_accuracy_s"] = run["train_s"] / 2.0
    assert target_steps(one) == pytest.approx(20.0, abs=1.0)
    rows = {row["mode"]: row for row in compare(one, MACHINE)}
    assert rows["plain"]["simulated_tta_s"] == pytest.approx(20 * 0.15, rel=0.1)
    assert rows["partial(3)"]["simulated_tta_s"] < 0.5 * rows["plain"]["simulated_tta_s"]


def test_times_over_several_targets_depend_less_on_one_evaluation() -> None:
    one = record()
    steady, dipped = training(0.05, 80), training(0.05, 80)
    assert smooth_s(one, [steady]) == pytest.approx(0.05 * 66.0, rel=0.05)
    late = next(k for k, value in enumerate(dipped["accuracies"]) if value >= 0.93)
    for k in (late, late + 1):
        dipped["accuracies"][k] = 0.925
    assert 1.0 < smooth_s(one, [dipped]) / smooth_s(one, [steady]) < 1.05
    steady["accuracies"] = [0.9] * len(steady["accuracies"])
    assert math.isinf(smooth_s(one, [steady])) and math.isinf(smooth_s(one, [training(0.05, 40), steady]))


def test_regret_of_auto() -> None:
    found = regret(record(**{"partial(3)": 2.0, "asgd": 2.5}))
    assert found is not None and (found["best"], found["best_s"]) == ("partial(3)", 2.0)
    assert found["regret"] == pytest.approx(0.1)
    assert found["over_plain"] == pytest.approx(2.2 / 6.0)
    # Of each curve: as fast as the fixed modes, a third of plain Horovod's time.
    assert found["smooth_regret"] == pytest.approx(0.0) and found["smooth_over_plain"] == pytest.approx(1.0 / 3.0)
    never = record(**{"partial(3)": 2.0})
    never["star_s"] = None
    assert math.isinf(regret(never)["regret"])  # type: ignore[index]
    without = record()
    del without["variants"]["star"]
    assert regret(without) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_MODEL", "cost_model")
    files = []
    for name, one in (("a", record(**{"partial(3)": 2.0, "asgd": 1.9})), ("b", record("killed-worker"))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(one))
    out = tmp_path / "out.json"
    assert main([*map(str, files), "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {row["scenario"] for row in written["fidelity"]["rows"]} == {"one-slow"}
    assert written["real_regret"]["mean"] == pytest.approx(2.2 / 1.9 - 1.0)
    assert set(written["kendall_tau"]) >= {"mean", "cost_model", "rows"}
    assert "median error of the simulator" in capsys.readouterr().out
    files[0].write_text("{}")
    assert main([str(files[0])]) == 2
    assert "has no modes, scenario, spec, variants" in capsys.readouterr().err


def test_a_file_without_two_modes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record()))
    assert main([str(tmp_path / "a.json"), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert "a.json has plain alone" in said and '--variants straggler_free,plain,star --modes "partial(3)"' in said


def test_equal_times_are_no_order_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAR_MODEL", "cost_model")
    (tmp_path / "a.json").write_text(json.dumps(record(**{"partial(3)": 6.0})))
    out = tmp_path / "out.json"
    assert main([str(tmp_path / "a.json"), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["kendall_tau"]["mean"] is None
    assert "mean tau -" in capsys.readouterr().out


def test_a_scenario_with_equal_curves_leaves_the_means_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAR_MODEL", "cost_model")
    tied, ordered = record("two-slow", **{"partial(3)": 2.0}), record(**{"partial(3)": 2.0})
    for run in tied["variants"]["plain"]["seeds"] + tied["modes"]["partial(3)"]["per_seed"]:
        run["accuracies"] = [0.5] * len(run["accuracies"])  # Never at the target.
    for name, one in (("tied", tied), ("ordered", ordered)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    out = tmp_path / "out.json"
    assert main([str(tmp_path / "tied.json"), str(tmp_path / "ordered.json"), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["kendall_tau"]["smooth_cost_model"] == 1.0
    assert found["real_regret"]["smooth_mean"] == pytest.approx(0.0)


def test_simulator_speed_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    assert simspeed.main(["--ranks", "70", "--steps", "12", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["ok"] and set(found["modes"]) >= {"sync", "partial", "ps(1)", "ssp(3)", "ps(dynamic)", "auto"}
    assert all(one["gradients"] >= 12 * 70 for one in found["modes"].values())
    assert simspeed.main(["--ranks", "1"]) == 2
