"""The predictor: corrects the cost model, steps back where it does not know, and refuses what is damaged."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction
from scheduler.learning import boosters, dataset
from scheduler.learning.features import FEATURES, rows, speed
from scheduler.learning.model_choice import find_ranker
from scheduler.learning.predictor import SHIPPED, UNKNOWN, ModelError, Predictor, load
from scheduler.learning.simulated_rows import in_order
from scheduler.plan.plan import Plan
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from tests.support.learning import save_model, small_table
from tests.support.windows import steady, window


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


def moment(
    predict: Predictor, n: int = 4, *, step: int | None = None, usual_s: float = 0.1
) -> tuple[list[Prediction], list[Prediction]]:
    """The predictor's and the cost model's predictions of one window."""
    given, active = window(steady(n, slow={1: 3.0}, usual_s=usual_s), end=step), Plan.sync(n)
    conditions = Conditions.from_window(given)
    assert conditions is not None
    offered = candidates(conditions, active)
    return predict(offered, conditions, given, active), in_order(offered, conditions)


def test_it_learns_what_the_cost_model_gets_wrong(folder: Path) -> None:
    """In the small table the real time is the cost model's times exp(0.8 late_share)."""
    found = load(folder).estimate(_inside({"late_share": [-0.8, 0.0, 0.8], "cost_log": 0.3, "mode_index": 1.0}))
    assert found.middle[0] == pytest.approx(0.3 - 0.64, abs=0.25)
    assert found.middle[2] == pytest.approx(0.3 + 0.64, abs=0.25)
    assert (found.low <= found.middle).all() and (found.middle <= found.high).all()
    assert found.known.all()


def test_the_chance_to_reach_the_target_follows_the_drift(folder: Path) -> None:
    found = load(folder).estimate(_inside({"cost_drift": [-0.5, 0.9], "mode_index": 1.0}))
    assert found.reach[0] > 0.7 > 0.3 > found.reach[1]


def test_exact_modes_are_corrected_and_reach_what_sync_reaches(folder: Path) -> None:
    about = json.loads((folder / "model.json").read_text())
    about["ranges"] = [[-100.0, 100.0]] * len(FEATURES)  # The small table's are narrow.
    (folder / "model.json").write_text(json.dumps(about))
    predict = load(folder)
    given, active = window(steady(4, slow={1: 3.0}), batch=32), Plan.sync(4)
    conditions = Conditions.from_window(given)
    assert conditions is not None
    offered = [active, Plan.sync(4, balanced=True), Plan.ps(4, 1)]
    plain, balanced, served = predict(offered, conditions, given, active)
    cost = in_order(offered, conditions)
    assert (plain, plain.learned, balanced.learned) == (cost[0], False, True)
    assert balanced.reach == cost[1].reach == 1.0 > served.reach


def test_outside_of_what_it_has_seen_it_does_not_trust_itself(folder: Path) -> None:
    known = load(folder).estimate(_inside({"noise_log": [0.5, 5.0, math.inf], "mode_index": 1.0})).known
    assert known.tolist() == [True, False, False]


def _fitted_to(*tables: str) -> Predictor:
    """A predictor with the ranges of tables of the project."""
    root = Path(__file__).parents[4] / "datasets"
    values = np.concatenate([dataset.matrix(dataset.read(root / name)[0]) for name in tables])
    ranges = np.stack([values.min(axis=0), values.max(axis=0)], axis=1).tolist()
    return Predictor({"ranges": ranges, "calibration": {"widen": 0.0, "widest": 1.0}}, {})


def test_jobs_of_which_less_is_known_are_in_the_tables() -> None:
    assert load(SHIPPED).blind_spots() == [] == _fitted_to("moments.csv.gz").blind_spots()


def test_a_model_fitted_to_jobs_that_measure_everything_has_blind_spots() -> None:
    """It would switch itself off in jobs on one host."""
    values = dataset.matrix(dataset.read(Path(__file__).parents[4] / "datasets" / "moments.csv.gz")[0])
    known = [values[:, FEATURES.index(name)] for name in ("wire_now_log", "price_seen_log")]
    values = values[(known[0] > math.log(1e-4)) & (known[1] > 0.0)]
    ranges = np.stack([values.min(axis=0), values.max(axis=0)], axis=1)
    ranges[FEATURES.index("wire_now_log"), 0] = -8.0
    predictor = Predictor({"ranges": ranges.tolist(), "calibration": {"widen": 0.0, "widest": 1.0}}, {})
    links, price = predictor.blind_spots()
    assert "no row with no known link rate (" in links and "wire_now_log" in links and "datasets/" in links
    assert "no row with no observed price of staleness (price_seen_log)" in price


def test_what_is_unknown_is_what_live_rows_have() -> None:
    given, active = window(steady(4, slow={1: 3.0}), rates=[math.nan] * 4), Plan.sync(4)
    conditions = Conditions.from_window(given)
    assert conditions is not None
    offered = candidates(conditions, active)
    found = rows(offered, conditions, given, active, in_order(offered, conditions))
    for values, _ in UNKNOWN.values():
        for name, value in values.items():
            assert found[:, FEATURES.index(name)] == pytest.approx(value)


def test_rows_it_does_not_know_get_the_cost_model(folder: Path) -> None:
    """The table's features are between -1 and 1: a real window is outside of all of them."""
    predict = load(folder)
    learned, cost = moment(predict)
    assert learned == cost


def test_other_numbers_of_ranks_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The shipped model knows 2 to 32 ranks."""
    predict = load(SHIPPED)
    for n in (64, 64, 8, 3):
        learned, cost = moment(predict, n)
        assert (learned == cost) == (n == 64)
        assert any(one.learned for one in learned) == (n < 64)
    said = [record.getMessage() for record in caplog.records if record.name == "star_hvd"]
    assert said == ["64 ranks: the model was trained on 2 to 32; the cost model decides"]


def test_old_jobs_keep_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """A job only becomes older, so an age above the training data's must not end the use of the model."""
    predict = load(SHIPPED)
    known, _ = moment(predict, 8, step=1500)
    old, _ = moment(predict, 8, step=1_000_000)
    assert [one.learned for one in old] == [one.learned for one in known]
    assert sum(one.learned for one in old) > len(old) / 2
    # The same row with the oldest trained age: the heads are constant beyond it.
    about = dict(zip(FEATURES, predict.about["ranges"], strict=True))
    middle = np.array([[sum(about[name]) / 2.0 for name in FEATURES]] * 3)
    ends = (("age_log", 1, 1.0), ("price_seen_log", 1, 1.0), ("offered", 1, 20.0), ("cycle_log", 0, -1.0))
    for name, end, way in ends:
        ages = middle.copy()
        ages[:, FEATURES.index(name)] = [about[name][end] + way * beyond for beyond in (1e-4, 3.0, 15.0)]
        found = predict.estimate(ages)
        assert len(set(found.middle.tolist())) == len(set(found.reach.tolist())) == 1
        assert len(set(found.known.tolist())) == 1
    assert not caplog.records


def test_a_decision_with_no_row_in_range_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    predict = load(SHIPPED)
    for usual_s in (0.1, 0.001, 0.001, 0.1, 30.0):
        learned, _ = moment(predict, 8, usual_s=usual_s)
        assert any(one.learned for one in learned) == (usual_s > 0.001)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "star_hvd"]
    assert "cycle_log is 0.4074; trained on -7.079 to -1.188" in said and "the cost model decides" in said


def test_wide_intervals_fall_back(folder: Path) -> None:
    about = json.loads((folder / "model.json").read_text())
    about["calibration"]["widest"] = 1e-6
    (folder / "model.json").write_text(json.dumps(about))
    assert not load(folder).estimate(_inside({"mode_index": 1.0})).known.any()


def test_predictions_are_put_together_from_the_heads(folder: Path) -> None:
    about = json.loads((folder / "model.json").read_text())
    about["ranges"] = [[-100.0, 100.0]] * len(FEATURES)
    about["calibration"]["widest"] = 100.0
    (folder / "model.json").write_text(json.dumps(about))
    predict = load(folder)
    learned, cost = moment(predict)
    assert [p.plan for p in learned] == [p.plan for p in cost]
    assert learned[0] == cost[0] and learned[0].plan.mode == "sync" and learned[0].relative == 1.0
    for one, other in zip(learned[1:], cost[1:], strict=True):
        assert one.low <= one.relative <= one.high and 0.0 <= one.reach <= 1.0
        assert one.relative - (1.0 - one.reach) == pytest.approx(speed(one), rel=1e-6)
        # Time = interval over progress: the interval is the cost model's, so what was learned is in the progress.
        assert one.interval_s == other.interval_s
        assert one.progress * speed(one) == pytest.approx(other.progress * speed(other), rel=1e-6)


def test_a_policy_decides_with_it(folder: Path) -> None:
    policy = CostPolicy(4, ranker=load(folder))
    plan = policy.decide(window(steady(4, slow={1: 3.0}), end=40), Plan.sync(4))
    assert plan is not None and plan.mode == "partial"


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(format=7), "format 7; expected 1"),
        (lambda about: about.update(feature_version=99), "feature_version 99"),
        (lambda about: about["features"].reverse(), "other features"),
        (lambda about: about["ranges"].pop(), "invalid ranges or calibration"),
        (lambda about: about["calibration"].update(widen=math.nan), "invalid ranges or calibration"),
        (lambda about: about.pop("heads"), "incomplete"),
        (lambda about: about["heads"]["low"].update(sha256="0" * 64), "damaged, copy it again"),
    ],
)
def test_other_or_damaged_descriptions_are_refused(folder: Path, change: object, message: str) -> None:
    about = json.loads((folder / "model.json").read_text())
    change(about)  # type: ignore[operator]
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "high.txt").read_bytes()
    (folder / "high.txt").write_bytes(text[:-100])
    with pytest.raises(ModelError, match=r"high.txt has SHA-256 .* damaged"):
        load(folder)
    (folder / "high.txt").unlink()
    with pytest.raises(ModelError, match="head high is missing"):
        load(folder)
    (folder / "model.json").write_text("{")
    with pytest.raises(ModelError, match="no model in"):
        load(folder)
    with pytest.raises(ModelError, match="as `train` makes it"):
        load(tmp_path / "nowhere")


def test_a_text_that_is_no_model_is_refused_though_its_hash_is_right(folder: Path) -> None:
    import hashlib

    about = json.loads((folder / "model.json").read_text())
    (folder / "low.txt").write_text("tree\nnonsense")
    about["heads"]["low"]["sha256"] = hashlib.sha256(b"tree\nnonsense").hexdigest()
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="head low"):
        load(folder)


def test_without_lightgbm_there_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boosters.find_library.cache_clear()
    monkeypatch.setattr(boosters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install lightgbm"):
        load(folder)


# ---- which model ----------------------------------------------------------------------------------------------------


def test_star_model_names_a_folder_or_none(folder: Path) -> None:
    told: list[str] = []
    assert isinstance(find_ranker({"STAR_MODEL": str(folder)}, told.append), Predictor)
    assert find_ranker({"STAR_MODEL": "cost_model"}, told.append) is None
    assert told == []


def test_a_wrong_model_costs_one_warning(tmp_path: Path) -> None:
    told: list[str] = []
    assert find_ranker({"STAR_MODEL": str(tmp_path)}, told.append) is None
    assert len(told) == 1 and str(tmp_path) in told[0] and "The cost model decides" in told[0]


def test_the_model_that_is_shipped_is_sound() -> None:
    told: list[str] = []
    found = find_ranker({}, told.append)
    assert told == [] and isinstance(found, Predictor)
    metrics = found.about["metrics"]
    assert 0.85 <= metrics["coverage"] <= 0.95
    assert metrics["choice_regret"] < metrics["cost_choice_regret"] and metrics["error"] < metrics["cost_error"]
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 6 << 20
    learned, cost = moment(found, 8)
    assert learned != cost and any(one.learned for one in learned)


def test_nothing_heavy_is_imported_before_a_model_is_loaded() -> None:
    import subprocess

    code = (
        "import sys, scheduler.learning.predictor; "
        "print([m for m in ('lightgbm', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_loads_and_asks_a_model_without_the_packages_that_lightgbm_imports() -> None:
    """They cost rank 0 seconds before its first step, and 110 MB."""
    import subprocess

    code = (
        "import sys\n"
        "from tests.unit.scheduler.learning.test_predictor import SHIPPED, load, moment\n"
        "before = set(sys.modules)\n"
        "learned, _ = moment(load(SHIPPED), 8)\n"
        "assert any(one.learned for one in learned)\n"
        "print(sorted({'lightgbm', 'pandas', 'sklearn', 'scipy', 'matplotlib'} & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_the_library_says_what_the_package_says(rows: int) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    text = (SHIPPED / "middle.txt").read_text()
    own, theirs = boosters.load_booster(text), lightgbm.Booster(model_str=text)
    assert isinstance(own, boosters.Booster), "the library was not found beside the package"
    assert own.num_feature() == theirs.num_feature() == len(FEATURES)
    given = np.random.default_rng(rows).normal(scale=3.0, size=(rows, len(FEATURES)))
    given[:: 5, 3] = math.nan
    expected = theirs.predict(given) if rows else np.empty(0)
    assert own.predict(given).tolist() == expected.tolist()
    assert own.predict(np.asfortranarray(given)).tolist() == expected.tolist()
    with pytest.raises(boosters.BoosterError, match="rows have shape"):
        own.predict(given[:, :-1])


def test_a_library_elsewhere_costs_the_import_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    monkeypatch.setattr(boosters, "find_library", lambda: None)
    assert isinstance(boosters.load_booster((SHIPPED / "low.txt").read_text()), lightgbm.Booster)
    with pytest.raises(boosters.BoosterError):
        boosters.load_booster("tree\nnonsense")


def _inside(values: dict[str, object]) -> np.ndarray:
    """Rows in the middle of the table's features, with some of them given; the longest list says how many."""
    count = max([len(v) for v in values.values() if isinstance(v, list)], default=1)
    found = np.zeros((count, len(FEATURES)))
    for name, value in values.items():
        found[:, FEATURES.index(name)] = value
    assert len(small_table())
    return found
