"""The command `star-scheduler`, as a person uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scheduler.cli import evaluate, main, promote, train
from scheduler.cli.promote import gate
from scheduler.learning import dataset
from scheduler.learning.evaluate import Regrets
from scheduler.learning.features import FEATURES
from scheduler.learning.logged_rows import read_run, real_rows, windows
from scheduler.learning.predictor import ModelError, Predictor, load
from scheduler.learning.registry import Version
from scheduler.plan.plan import Plan
from scheduler.target import Target
from tests.support.learning import save_model, small_table


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for name in ("collect", "train", "evaluate", "promote"):
        assert name in text
        with pytest.raises(SystemExit) as stopped:
            main.main([name, "--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert "default" in shown and "%%" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.csv.gz"], "cannot read the table nowhere.csv.gz"),
        (["train", "table.txt"], "ends in .csv.gz"),
        (["collect", "--moments", "0"], "--moments 0; expected at least"),
        (["collect", "--seed", "999999", "--jobs", "5"], "later ones are held out"),
        (["collect", "--jobs", "0"], "no rows"),
        (["collect", "--jobs", "0", "--runs", "nowhere"], "expected a folder of logged runs"),
        (["evaluate", "--model", "no/such/folder"], "does not exist; expected a folder"),
        (["evaluate", "--model", "table.txt"], "--model is table.txt, a file; expected a folder with model.json"),
        (["evaluate", "--json", "table.txt/a.json"], "table.txt is a file; expected a place where a file can"),
        (["evaluate", "--json", "."], "--json is ., a folder; expected a file"),
        (["train", "--out", "table.txt"], "--out is table.txt, a file; expected a folder"),
        (["evaluate", "--scenarios", "0"], "--scenarios is 0"),
        (["promote", "--scenarios", "0"], "--scenarios is 0"),
        (["evaluate", "--seed", "70000"], "--seed is 70000; expected 1000000 or more"),
        (["promote", "--seed", "999999"], "--seed is 999999; expected 1000000 or more"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.txt").write_text("x")
    assert main.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"star-scheduler {arguments[0]}: error: ") and message in lines[-1]


@pytest.mark.parametrize(
    ("command", "option", "value"), [("train", "--tune-s", "-1"), ("collect", "--budget-s", "nan")]
)
def test_durations_are_numbers_from_0(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([command, f"{option}={value}"])
    assert f"{option}: it is '{value}'; expected seconds, at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_collect_train_and_evaluate_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["collect", "--jobs", "2", "--seed", "3", "--moments", "1", "--out", "t.csv.gz"]) == 0
    frame, described = dataset.read(tmp_path / "t.csv.gz")
    assert described["sources"] == {"simulated": len(frame)} and "--seed 3" in described["made_by"]
    dataset.write(tmp_path / "small.csv.gz", small_table())
    assert main.main(["train", "small.csv.gz", "--out", "model", "--no-registry"]) == 0
    assert "90 % intervals cover" in capsys.readouterr().out
    assert isinstance(load(tmp_path / "model"), Predictor)


def test_train_asks_mlflow_before_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit takes minutes, and its model could not be registered later."""

    class Down:
        def __init__(self, environ: Mapping[str, str]) -> None:
            raise ModelError("MLflow at http://server says: no answer")

    monkeypatch.setattr("scheduler.learning.registry.Registry", Down)
    monkeypatch.setattr("scheduler.learning.train.fit", lambda *_: pytest.fail("it fits"))
    dataset.write(tmp_path / "small.csv.gz", small_table())
    assert main.main(["train", str(tmp_path / "small.csv.gz"), "--out", str(tmp_path / "model")]) == 2
    assert "MLflow at http://server says: no answer" in capsys.readouterr().err


@pytest.mark.slow
def test_several_tables_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = small_table()
    half = (frame["seed"] < 6).to_numpy()
    dataset.write(tmp_path / "a.csv.gz", frame[half])
    dataset.write(tmp_path / "b.csv.gz", frame[~half])
    assert main.main(["train", "a.csv.gz", "b.csv.gz", "--out", "model", "--no-registry"]) == 0
    data = load(tmp_path / "model").about["data"]
    assert data["rows"] == len(frame) and data["networks"] == 12


@pytest.mark.slow
def test_train_adds_logged_runs_by_itself_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = small_table()
    dataset.write(tmp_path / "t.csv.gz", frame)
    train = ["train", "t.csv.gz", "--runs", "runs", "--out", "model", "--no-registry"]
    (tmp_path / "runs").mkdir()
    assert main.main(train) == 2
    assert "no usable runs in runs" in capsys.readouterr().err
    logged(tmp_path / "runs", "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path / "runs", "b", Plan.partial(4, 3), reached_s=5.0)
    assert main.main(train) == 0
    real, about = dataset.read(tmp_path / "training_logs/datasets/logged.csv.gz")
    assert about["sources"] == {"real": len(real)} and about["made_by"] == "star-scheduler train --runs runs"
    data = load(tmp_path / "model").about["data"]
    assert data["rows"] == len(frame) + len(real) and data["sources"]["real"] == len(real) > 0

    (tmp_path / "runs").rename(tmp_path / "moved")  # The same runs under another name.
    for name, other in (("a", "x"), ("b", "y")):
        (tmp_path / "moved" / name).rename(tmp_path / "moved" / other)
    dataset.write(tmp_path / "kept.csv.gz", real)
    assert main.main(["train", "t.csv.gz", "kept.csv.gz", "--runs", "moved", "--out", "again", "--no-registry"]) == 0
    assert load(tmp_path / "again").about["data"]["rows"] == data["rows"]


@pytest.mark.slow
def test_train_without_a_table_fits_to_the_projects_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(train, "SHIPPED_TABLES", tmp_path / "datasets")
    assert main.main(["train", "--no-registry"]) == 2, "there is none"
    assert "cannot read the table training_logs" in capsys.readouterr().err
    dataset.write(tmp_path / "datasets/some.csv.gz", small_table())
    assert main.main(["train", "--no-registry", "--out", "model"]) == 0
    assert "fitting to some.csv.gz" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_runs_in_auto_alone_are_told_and_the_default_tables_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logged(tmp_path / "runs", "a", Plan.sync(4), reached_s=10.0, mode="auto")
    monkeypatch.setattr(
        "scheduler.learning.logged_rows.mlflow_rows",
        lambda environ, project, report: real_rows(tmp_path / "runs", project, report=report),
    )
    arguments = ["train", "--mlflow", "--no-registry", "--out", "model"]
    monkeypatch.setattr(train, "SHIPPED_TABLES", tmp_path / "datasets")
    assert main.main(arguments) == 2, "there are no tables either"
    assert "no usable runs in MLflow" in " ".join(capsys.readouterr().err.split())
    dataset.write(tmp_path / "datasets/some.csv.gz", small_table())
    assert main.main(arguments) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "a: it ran in auto; expected one fixed mode" in said
    assert "warning: no rows: no usable runs in MLflow" in said and "fitting without logged runs" in said
    assert set(load(tmp_path / "model").about["data"]["sources"]) == {"simulated"}


# ---- the gate -------------------------------------------------------------------------------------------------------


def regrets(**mean: float) -> list[Regrets]:
    return [Regrets(1, "small_cnn", "sync", 1.0, dict(mean), dict.fromkeys(mean, 0))]


def judged_by(**mean: float) -> list[Regrets]:
    """In as few scenarios as the gate takes."""
    return regrets(**mean) * evaluate.FEW_SCENARIOS


def test_the_gate_opens_for_a_better_model_alone() -> None:
    good = {"coverage": 0.9}
    assert gate(judged_by(learned=0.03, cost_model=0.05), good) == []
    assert gate(judged_by(learned=0.03, cost_model=0.05, champion=0.03), good) == []
    assert "that of champion 2.00 %" in gate(judged_by(learned=0.03, cost_model=0.05, champion=0.02), good)[0]
    assert "that of cost_model 2.00 %" in gate(judged_by(learned=0.03, cost_model=0.02), good)[0]
    for coverage in (0.8, 0.97, math.nan):
        assert "intervals cover" in gate(judged_by(learned=0.03, cost_model=0.05), {"coverage": coverage})[0]
    assert len(gate(judged_by(learned=0.03, cost_model=0.05), {})) == 1
    few = judged_by(learned=0.03, cost_model=0.05)[1:]
    assert gate(few, good) == ["it was judged in 29 scenarios; expected at least 30"]


class FakeRegistry:
    """Versions by alias, whose model is that of a folder."""

    uri, name = "sqlite:///nowhere", "star-tta"

    def __init__(self, folder: Path, **aliases: str) -> None:
        self.folder, self.aliases = folder, aliases
        self.logged: dict[str, float] = {}
        self.promoted: list[str] = []
        self.downloaded: list[str] = []

    def __call__(self, environ: object) -> FakeRegistry:
        return self

    def alias(self, alias: str) -> Version | None:
        """Somebody else's training takes the challenger's alias as soon as it was resolved."""
        if alias not in self.aliases:
            return None
        found = Version(self.name, self.aliases[alias], "run7")
        if alias == "challenger":
            self.aliases[alias] = "9"
        return found

    def download(self, version: Version) -> Path:
        self.downloaded.append(version.number)
        return self.folder

    def log(self, version: Version, metrics: Mapping[str, float]) -> None:
        self.logged.update(metrics)

    def promote(self, version: Version, metrics: Mapping[str, float]) -> None:
        self.promoted.append(version.number)


def promoted(
    monkeypatch: pytest.MonkeyPatch, registry: FakeRegistry, scenarios: int = 40, **mean: float
) -> tuple[int, set[str]]:
    """Exit status of `promote` where the policies have these regrets, and which policies were judged."""
    seen: set[str] = set()

    def judged(policies: Mapping[str, object], count: int, seed: int) -> list[Regrets]:
        seen.update(policies)
        return regrets(**mean) * count

    monkeypatch.setattr(promote, "run_scenarios", judged)
    monkeypatch.setattr("scheduler.learning.registry.Registry", registry)
    monkeypatch.setenv("COLUMNS", "120")
    return main.main(["promote", "--scenarios", str(scenarios)]), seen


@pytest.mark.slow
def test_a_first_challenger_has_to_beat_the_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    registry = FakeRegistry(tmp_path, challenger="1")
    status, seen = promoted(monkeypatch, registry, scenarios=3, learned=0.04, champion=0.03, cost_model=0.05)
    text = capsys.readouterr().out
    assert status == 1 and seen == {"learned", "champion", "cost_model"} and registry.promoted == []
    assert "star-tta v1 (challenger)" in text and "learned" not in text
    assert "that of shipped model (no champion) 3.00 %" in text
    assert "the champion stays: shipped model (no champion)" in text
    assert "90 % intervals cover" in text and "3 scenarios are too few for a comparison" in text
    assert registry.logged["promote/regret/champion"] == 0.03 and registry.logged["promote/scenarios"] == 3.0


def test_a_challenger_is_judged_against_the_champion_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    monkeypatch.setattr(promote, "MOST_COVERAGE", 1.0)
    monkeypatch.setattr(promote, "LEAST_COVERAGE", 0.0)
    registry = FakeRegistry(tmp_path, challenger="2", champion="1")
    status, _ = promoted(monkeypatch, registry, learned=0.03, champion=0.04, cost_model=0.05)
    text = capsys.readouterr().out
    assert status == 0 and registry.promoted == ["2"] and registry.downloaded == ["2", "1"]
    assert "star-tta v1 (champion)" in text and "star-tta v2 (challenger)" in text
    assert "too few" not in text and "stays" not in text


def test_a_comparison_in_too_few_scenarios_moves_no_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    monkeypatch.setattr(promote, "MOST_COVERAGE", 1.0)
    monkeypatch.setattr(promote, "LEAST_COVERAGE", 0.0)
    registry = FakeRegistry(tmp_path, challenger="2", champion="1")
    status, _ = promoted(monkeypatch, registry, scenarios=1, learned=0.03, champion=0.04, cost_model=0.05)
    assert status == 1 and registry.promoted == []
    assert "rejected: it was judged in 1 scenarios; expected at least 30" in capsys.readouterr().out


def test_a_model_that_would_be_off_in_real_jobs_is_rejected_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = save_model(tmp_path)
    about["ranges"][FEATURES.index("price_seen_log")] = [0.6931, 5.908]  # Of a simulated table.
    (tmp_path / "model.json").write_text(json.dumps(about))
    registry = FakeRegistry(tmp_path, challenger="2", champion="1")
    status, seen = promoted(monkeypatch, registry, learned=0.03, champion=0.04, cost_model=0.05)
    text = " ".join(capsys.readouterr().out.split())
    assert status == 1 and not seen and registry.promoted == []
    assert "rejected: it was fitted to no row with no observed price of staleness (price_seen_log)" in text
    assert "train with the tables in datasets/" in text and "the champion stays: star-tta v1 (champion)" in text


@pytest.mark.slow
def test_the_projects_real_rows_stay_beside_a_table_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(train, "SHIPPED_TABLES", tmp_path / "shipped")
    frame = small_table()
    frame = frame[(frame["wire_log"] > -2.0).to_numpy()]  # Simulated jobs know their links, and observe the price.
    frame = frame[(frame["price_seen_log"] != 0.0).to_numpy()].copy()
    frame["price_seen_log"] += 3.0
    dataset.write(tmp_path / train.DEFAULT_TABLE, frame)
    arguments = ["train", "--no-registry", "--out", "model"]
    assert main.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.count("warning: promote will reject this model: it was fitted to no row with") == 2
    logged(tmp_path / "runs", "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path / "runs", "b", Plan.partial(4, 3), reached_s=5.0)
    for name in ("real", "moments"):
        dataset.write(tmp_path / f"shipped/{name}.csv.gz", dataset.frame_of(real_rows(tmp_path / "runs", "1")))
    assert main.main(arguments) == 0
    said = capsys.readouterr()
    assert "warning" not in said.out and "real runs: learned" in said.out
    assert f"fitting to {train.DEFAULT_TABLE} and real.csv.gz of {tmp_path / 'shipped'}" in said.err
    assert load(tmp_path / "model").about["data"]["sources"] == {"real": 12, "simulated": len(frame)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "table.txt"], "ends in .csv.gz"),
        (["--out", "folder.csv.gz"], "is a folder"),
        (["--out", "file/t.csv.gz"], "file"),
        (["--runs", "nowhere"], "expected a folder of logged runs"),
    ],
)
def test_collect_says_what_is_wrong_before_it_simulates(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(seed: int, **settings: object) -> None:
        raise AssertionError("it simulates")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv.gz").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("scheduler.learning.simulated_rows.collect_scenario", simulate)
    assert main.main(["collect", "--jobs", "1", *more]) == 2
    assert message in capsys.readouterr().err


def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("evaluate", "promote"):
        with pytest.raises(SystemExit):
            main.main([name, "--help"])
        assert "Exit status: 0" in " ".join(capsys.readouterr().out.split())


def test_evaluate_names_the_version_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    save_model(tmp_path)
    registry = FakeRegistry(tmp_path, challenger="4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scheduler.learning.registry.Registry", registry)
    rows = regrets(learned=0.06, champion=0.03, cost_model=0.05) * 40
    monkeypatch.setattr(evaluate, "run_scenarios", lambda *_: rows)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "challenger").mkdir()  # A folder by that name is not what is meant.
    assert main.main(["evaluate"]) == 1
    text = capsys.readouterr().out
    assert "star-tta v4 (challenger)" in text and "shipped model (no champion)" in text
    assert registry.downloaded == ["4"]
    assert registry.logged["evaluate/regret/learned"] == 0.06 and "MLflow, run run7" in text


# ---- logged runs ----------------------------------------------------------------------------------------------------


def logged(
    root: Path, name: str, plan: Plan, *, reached_s: float | None, slow: float = 3.0, batch: int = 8,
    hyper: dict[str, object] | None = None, given_s: float | None = None, status: str = "FINISHED", **more: object,
) -> None:
    """A run of 4 ranks as the run log writes it; rank 1 is slow. It has no end unless `given_s` is given."""
    folder = root / name
    folder.mkdir(parents=True)
    optimizer = {"class": "SGD", "parameters": 9, "hyper": hyper or {"lr": 0.1}}
    facts = {"world_size": 4, "batch": batch, "target": "accuracy>=0.9", "optimizer": optimizer, **more}
    events: list[dict[str, object]] = [
        {"kind": "facts", "time_s": 0.0, "values": facts},
        {"kind": "plan", "time_s": 1.0, "step": 0, "plan": plan.to_dict()},
        {"kind": "window", "time_s": 2.0, "step": 5, "noise_scale": 3.5, "ranks": {}},
        {"kind": "metric", "time_s": 3.0, "name": "accuracy", "value": 0.5, "step": 10},
    ]
    if reached_s is not None:
        events.append({"kind": "metric", "time_s": 1.0 + reached_s, "name": "accuracy", "value": 0.93, "step": 60})
    if given_s is not None:
        events.append({"kind": "end", "time_s": 1.0 + given_s, "status": status, "dropped": 0, "thinned": 0})
    text = "\n".join(json.dumps(event) for event in events) + '\n{"kind": "wind'
    (folder / "events.jsonl").write_text(text)
    for rank in range(4):
        lines = [
            json.dumps({"kind": "step", "time_s": 0.1 * s, "rank": rank, "step": s,
                        "compute_s": 0.1 * (slow if rank == 1 else 1.0) * (1.0 + 0.001 * s), "late": False})
            for s in range(60)
        ]
        (folder / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_runs_of_the_same_job_become_rows(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.partial(4, 3), reached_s=5.0)
    logged(tmp_path, "c", Plan.partial(4, 3), reached_s=4.0)
    logged(tmp_path, "d", Plan.local(4, steps=4), reached_s=None, given_s=20.0)
    logged(tmp_path, "e", Plan.partial(4, 3), reached_s=1.0, batch=16)  # Another job, without a sync run.
    told: list[str] = []
    frame = dataset.frame_of(real_rows(tmp_path, "1", report=told.append))
    assert told[0].startswith("4 of 5 runs used")
    assert set(frame["source"]) == {"real"} and set(frame["run"]) == {"a"} and set(frame["seed"]) == {-1}
    by_plan = frame.groupby("plan")
    assert by_plan["log_relative"].first()["partial(3)"] == pytest.approx(math.log(0.45))
    assert by_plan["log_relative"].first()["local(4)"] == pytest.approx(math.log(2.0)), "the time that it was given"
    assert by_plan["reached"].first().to_dict() == {"sync": 1.0, "partial(3)": 1.0, "local(4)": 0.0}
    assert frame["slowest_log"].to_numpy() == pytest.approx(math.log(3.0), abs=0.05)
    dataset.write(tmp_path / "t.csv.gz", frame)
    assert dataset.read(tmp_path / "t.csv.gz")[1]["sources"] == {"real": len(frame)}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"hyper": {"lr": 0.1}}, {"hyper": {"lr": 0.2}}, False),
        ({"hyper": {"lr": 0.1, "betas": [0.9, 0.99]}}, {"hyper": {"lr": 0.1, "betas": [0.9, 0.9]}}, False),
        # A schedule's momentary rate says nothing: the first one does, and it is what a job without a schedule has.
        ({"hyper": {"lr": 0.1, "initial_lr": 0.4}}, {"hyper": {"initial_lr": 0.4, "lr": 0.2}}, True),
        ({"hyper": {"lr": 0.1}}, {"hyper": {"lr": 0.01, "initial_lr": 0.1}}, True),
        ({"batch": 8}, {"batch": 16}, False),
        ({"program": "a.py"}, {"program": "b.py"}, False),
        ({"program": "a.py --epochs 3 --mode sync"}, {"program": "a.py --epochs 4 --mode sync"}, False),
        ({"program": "a.py --mode sync --epochs 3"}, {"program": "a.py --mode=partial(3) --epochs 3"}, True),
        ({"program": "a.py --star-mode subgroup(0, 1) -x"}, {"program": "a.py mode=local(8) -x"}, True),
        ({"program": "a.py"}, {"program": "a.py --mode sync"}, True),
        ({"program": "a.py --model resnet"}, {"program": "a.py --model vgg"}, False),
        # Tags tell the runs of a program apart, instead of its arguments; not programs.
        ({"program": "w.py /tmp/1", "tags": {"lab": "a"}}, {"program": "w.py /tmp/2", "tags": {"lab": "a"}}, True),
        ({"program": "w.py /tmp/1", "tags": {"lab": "a"}}, {"program": "w.py /tmp/1", "tags": {"lab": "b"}}, False),
        ({"program": "v.py", "tags": {"lab": "a"}}, {"program": "w.py", "tags": {"lab": "a"}}, False),
        ({"target": "accuracy>=0.9"}, {"target": "accuracy >= 0.90"}, True),
        ({"target": "accuracy>=0.9"}, {"target": "accuracy>=0.8"}, False),
        ({"hardware": {"cpu": "x", "gpu": "H100"}}, {"hardware": {"cpu": "x", "gpu": "A100"}}, False),
        ({"hardware": {"cpu": "x", "gpu": "H100"}}, {"hardware": {"cpu": "x", "gpu": "H100"}}, True),
        ({"hardware": {"cpu": "x", "usable_cpus": 2}}, {"hardware": {"cpu": "x", "usable_cpus": 8}}, False),
        ({"ranks_per_host": [4]}, {"ranks_per_host": [2, 2]}, False),
        ({"ranks_per_host": [4]}, {"ranks_per_host": [4]}, True),
    ],
)
def test_only_runs_of_the_same_job_are_paired(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0, **one)
    logged(tmp_path, "b", Plan.partial(4, 3), reached_s=5.0, **other)
    assert bool(real_rows(tmp_path, "1")) is same


def test_every_run_left_out_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    logged(tmp_path / "r", "a", Plan.sync(4), reached_s=10.0, mode="auto")
    logged(tmp_path / "r", "b", Plan.sync(4), reached_s=10.0, target="[abc]")
    logged(tmp_path / "r", "c", Plan.partial(4, 3), reached_s=10.0)
    logged(tmp_path / "r", "d", Plan.sync(4), reached_s=10.0, target=None)
    logged(tmp_path / "r", "e", Plan.sync(4), reached_s=10.0, batch=3)
    logged(tmp_path / "r", "f", Plan.sync(4), reached_s=None, batch=4)
    logged(tmp_path / "r", "g", Plan.partial(4, 3), reached_s=5.0, batch=4)
    logged(tmp_path / "r", "h", Plan.sync(4), reached_s=5.0, batch=5)
    (tmp_path / "r" / "h" / "rank2.jsonl").unlink()
    assert main.main(["collect", "--jobs", "0", "--runs", "r", "--out", "t.csv.gz"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[:-1] == [
        "0 of 8 runs used",
        "a: it ran in auto; expected one fixed mode",
        "b: its target is '[abc]'; expected NAME>=NUMBER",
        "c: no run of the same job in sync",
        "d: it has no target; set STAR_TARGET",
        "e: no run of the same job in another mode than sync",
        "f: no run of the same job in sync reached the target",
        "g: no run of the same job in sync reached the target",
        "h: rank 2 has 0 step reports; expected 8 or more",
    ]
    assert "error: no rows: no usable runs in r;" in lines[-1] and "--jobs" not in lines[-1]
    logged(tmp_path / "r", "i", Plan.sync(4), reached_s=12.0)
    assert main.main(["collect", "--jobs", "0", "--runs", "r", "--out", "t.csv.gz"]) == 0
    said = capsys.readouterr().err
    assert "2 of 9 runs used" in said and "12 rows (0 simulated, 12 real)" in said


@pytest.mark.parametrize(
    ("text", "value", "reached"),
    [
        ("accuracy>=0.5", 0.5, True), ("accuracy>0.5", 0.5, False), ("accuracy > .5", 0.6, True),
        ("loss<=1e-1", 0.1, True), ("loss<0.1", 0.1, False), ("loss<0.1", 0.05, True), ("loss<0.1", math.nan, False),
    ],
)
def test_targets(text: str, value: float, reached: bool) -> None:
    target = Target.parse(text)
    assert target is not None and target.reached(value) is reached


@pytest.mark.parametrize("text", ["abc", "accuracy>=abc", "accuracy>=1.2.3", "accuracy=>0.5", "accuracy==1", "", None])
def test_what_is_no_target(text: object) -> None:
    assert Target.parse(text) is None


def test_a_mode_that_was_asked_for_is_the_runs_though_all_begin_in_sync(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    for name, step in (("b", 3), ("c", 40)):
        logged(tmp_path, name, Plan.sync(4), reached_s=5.0)
        taken = {"kind": "plan", "time_s": 1.5, "step": step, "plan": Plan.partial(4, 3, plan_id=1).to_dict()}
        path = tmp_path / name / "events.jsonl"
        lines = path.read_text().split("\n")
        path.write_text("\n".join([*lines[:2], json.dumps(taken), *lines[2:]]))
    asked, changed = read_run(tmp_path / "b"), read_run(tmp_path / "c")
    assert asked is not None and [plan.label for plan in asked.plans] == ["partial(3)"]
    assert asked.target_s == pytest.approx(5.0), "counted from its first step"
    assert changed is not None and [plan.mode for plan in changed.plans] == ["sync", "partial"]
    told: list[str] = []
    frame = dataset.frame_of(real_rows(tmp_path, "1", report=told.append))
    assert told[1:] == ["c: it changed its mode (sync, partial(3)); expected one fixed mode"]
    assert frame.groupby("plan")["log_relative"].first()["partial(3)"] == pytest.approx(math.log(0.5))
    assert set(frame["network"]) == {"real-9"}


def test_changes_of_batch_shares_are_no_changes_of_the_mode(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.sync(4), reached_s=5.0)
    shares = [(), (9, 5, 9, 9), (10, 3, 10, 9)]
    plans = [Plan.sync(4, balanced=True, batch_shares=own, plan_id=1, reason=f"{own}") for own in shares]
    taken = [
        json.dumps({"kind": "plan", "time_s": 1.5, "step": step, "plan": plan.to_dict()})
        for step, plan in zip((3, 20, 40), plans, strict=True)
    ]
    path = tmp_path / "b" / "events.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], *taken, *lines[2:]]))
    told: list[str] = []
    frame = dataset.frame_of(real_rows(tmp_path, "1", report=told.append))
    assert told == ["2 of 2 runs used"]
    assert frame.groupby("plan")["log_relative"].first()["sync(balanced)"] == pytest.approx(math.log(0.5))
    logged(tmp_path, "c", Plan.sync(4, batch_shares=(9, 5, 9, 9)), reached_s=5.0)
    fixed = read_run(tmp_path / "c")
    assert fixed is not None and fixed.plans[0].batch_shares == (9, 5, 9, 9)


def test_windows_never_look_ahead(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    run = read_run(tmp_path / "a")
    assert run is not None and run.target_s == pytest.approx(10.0)
    for window in windows(run):
        assert all(max(stats.steps) <= window.step for stats in window.ranks)
        assert window.noise_scale == 3.5


def test_rows_have_the_readings_of_the_newest_window_of_their_moment(tmp_path: Path) -> None:
    for name, plan in (("a", Plan.sync(4)), ("b", Plan.partial(4, 3))):
        logged(tmp_path, name, plan, reached_s=10.0)
    ranks = {"input_share": [0.0, 0.25, 0.0, None], "starved_share": [0.0, 0.5, 0.0, 0.0],
             "silent_s": [0.0, 0.0, 7.0, 0.0], "link_bytes_per_s": [1e9, 1e8, None, 1e9]}  # fmt: skip
    window = {"kind": "window", "time_s": 2.5, "step": 30, "reduced_part": 0.25, "pushed_part": 0.5, "ranks": ranks}
    later = {**window, "time_s": 3.0, "step": 100, "reduced_part": 0.75, "ranks": {"input_share": [1.0]}}
    path = tmp_path / "a" / "events.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:3], json.dumps(window), json.dumps(later), *lines[3:]]))
    run = read_run(tmp_path / "a")
    assert run is not None
    for found in windows(run):
        known = found.step >= 30
        assert (found.reduced_part, found.pushed_part) == ((0.25, 0.5) if known else (1.0, 1.0))
        assert found.ranks[1].starved_share == (0.5 if known else 0.0)
        assert found.ranks[2].silent_s == (7.0 if known else 0.0) and math.isnan(found.ranks[2].link_bytes_per_s)
        assert math.isfinite(found.ranks[1].link_bytes_per_s) is known and found.ranks[3].input_share == 0.0
    frame = dataset.frame_of(real_rows(tmp_path, "1"))
    last, first = frame[frame["step"] == frame["step"].max()], frame[frame["step"] == frame["step"].min()]
    assert set(last["fed"]) == {0.25} and set(last["starved"]) == {0.5} and (last["silent_log"] > 0.0).all()
    assert (last["link_share"] > 0.0).all()
    assert not first[["fed", "starved", "silent_log", "link_share"]].to_numpy().any()


def test_a_crash_is_no_miss(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.sync(4), reached_s=None, given_s=30.0)
    logged(tmp_path, "c", Plan.partial(4, 3), reached_s=5.0)  # Killed after its target: that is known.
    logged(tmp_path, "d", Plan.partial(4, 3), reached_s=None)
    logged(tmp_path, "e", Plan.partial(4, 3), reached_s=None, given_s=20.0, status="FAILED")
    logged(tmp_path, "f", Plan.partial(4, 3), reached_s=None, given_s=9.0)
    logged(tmp_path, "g", Plan.local(4, steps=4), reached_s=None)
    told: list[str] = []
    frame = dataset.frame_of(real_rows(tmp_path, "1", report=told.append))
    assert set(frame["plan"]) == {"sync", "partial(3)"} and set(frame["reached"]) == {1.0}
    assert told == [
        "2 of 7 runs used",
        "b: it is in sync and missed the target, which other runs in sync reached",
        "d: it ended without its target, but not as FINISHED: that is no miss",
        "e: it ended without its target, but not as FINISHED: that is no miss",
        "f: it ended without its target after 9 s, less than the 10 s that sync needed: that is no miss",
        "g: it ended without its target, but not as FINISHED: that is no miss",
    ]


@pytest.mark.parametrize("mode", ["sync", "partial"])
@pytest.mark.parametrize("reached_s", [0.0, -0.5])
def test_a_target_reached_before_the_first_plan_is_no_time(tmp_path: Path, mode: str, reached_s: float) -> None:
    """A loaded checkpoint that is evaluated first, for example."""
    for name, plan in (("sync", Plan.sync(4)), ("partial", Plan.partial(4, 3))):
        logged(tmp_path, name, plan, reached_s=reached_s if name == mode else 5.0)
    told: list[str] = []
    assert real_rows(tmp_path, "1", report=told.append) == []
    assert any(line.startswith(f"{mode}: it reached its target before its first plan") for line in told)


def test_runs_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    (tmp_path / "a" / "rank3.jsonl").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.jsonl").write_text("not json\n")
    assert read_run(tmp_path / "a") is None and read_run(tmp_path / "b") is None
    assert real_rows(tmp_path, "1") == []


@pytest.mark.slow
def test_evaluate_judges_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose ranges fit nothing decides as the cost model does: equal regret, status 0."""
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    save_model(tmp_path / "model")
    path = tmp_path / "found.json"
    arguments = ["evaluate", "--model", str(tmp_path / "model"), "--scenarios", "1", "--json", str(path)]
    assert main.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["policy"] == "learned" and found["mean_regret"] == found["baselines"]["cost_model"]
    assert {"star_heuristic", "sync", "oracle", "partial(n-1)"} <= set(found["baselines"])
    assert "(judged)" in capsys.readouterr().out
