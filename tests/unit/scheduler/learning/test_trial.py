"""Edited model files: the process that trains goes on, by the cost model, after one warning."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler.learning import predictor, trial
from scheduler.learning.booster_text import check_text
from scheduler.learning.boosters import BoosterError
from scheduler.learning.features import FEATURES
from scheduler.learning.model_choice import find_ranker
from scheduler.learning.predictor import SHIPPED, ModelError, load
from tests.support.effort import cases
from tests.support.extras import needs
from tests.support.learning import save_model
from tests.support.model_edits import edited

pytestmark = needs("lightgbm")

JOB = """
import json, logging, os, sys
from star_hvd.runtime.model_loader import ModelLoader
from scheduler.policy.candidates import candidates
from scheduler.cost.conditions import Conditions
from scheduler.plan.plan import Plan
from tests.support.threads import await_end
from tests.support.windows import steady, window

class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("star_hvd").addHandler(Kept())
given, active = window(steady(8, slow={1: 3.0})), Plan.sync(8)
conditions = Conditions.from_window(given)
offered = candidates(conditions, active)
for folder in sys.argv[1:]:
    said = []
    os.environ["STAR_MODEL"] = folder
    ranker = ModelLoader(8)
    ranker.load_after(lambda: True)
    await_end("star-model", 300.0)
    predicted = len(ranker(offered, conditions, given, active)) == len(offered)
    print(json.dumps([folder, said, ranker.facts, predicted]), flush=True)
"""
"""What rank 0 of a job does with the model that STAR_MODEL names."""


def _try(root: Path, seeds: range) -> tuple[int, int]:
    """Edited models that cost a warning, and all, as one process that loads them like a job saw them."""
    about = save_model(root / "model")
    about["ranges"], about["calibration"]["widest"] = [[-100.0, 100.0]] * len(FEATURES), 100.0  # It knows all windows.
    (root / "model" / "model.json").write_text(json.dumps(about))
    done = {str(root / str(seed)): edited(root / "model", root / str(seed), seed) for seed in seeds}
    ran = subprocess.run(
        [sys.executable, "-c", JOB, *done], capture_output=True, text=True, errors="replace", timeout=1800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('["/')]
    last = list(done.items())[min(len(found), len(done) - 1)]
    assert ran.returncode == 0, f"ended with {ran.returncode} at {last}: {ran.stderr[-2000:]}"
    assert [folder for folder, *_ in found] == list(done)
    warned = 0
    for folder, said, facts, predicted in found:
        assert predicted, (folder, done[folder])
        if "fallback" in facts:
            assert len(said) == 1 and folder in said[0] and "The cost model decides" in said[0], (said, done[folder])
            warned += 1
        else:  # Such an edit left a model: another leaf's value, or something behind the trees.
            assert said == [], (said, done[folder])
    return warned, len(found)


@pytest.mark.slow
def test_edited_models_end_no_job(tmp_path: Path) -> None:
    warned, tried = _try(tmp_path, range(16))
    assert tried == 16 and warned >= 8


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_many_edited_models_end_no_job(tmp_path: Path) -> None:
    """All two hundred with TEST_EFFORT=10."""
    count = cases(20)
    warned, tried = _try(tmp_path, range(100, 100 + count))
    print(f"{warned} of {tried} edited models cost a warning, the others were models still")
    assert tried == count and warned >= 0.6 * count


# ---- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", predictor.HEADS)
def test_what_lightgbm_writes_is_taken(head: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    for folder in (SHIPPED, tmp_path):
        text = (folder / f"{head}.txt").read_text()
        check_text(text, FEATURES)
        with pytest.raises(BoosterError):  # So it was this text that was looked at.
            check_text(text.replace("Tree=0", "Tree=7", 1), FEATURES)


def _resized(text: str, old: str, new: str) -> str:
    """One replacement in tree 0, its size made to fit."""
    head, _, rest = text.partition("\n\n")
    sizes = head.rpartition("tree_sizes=")[2].split(" ")
    size = int(sizes[0])
    tree = rest[:size]
    assert old in tree
    changed = tree.replace(old, new, 1)
    first = f"tree_sizes={' '.join([str(len(changed)), *sizes[1:]])}"
    return f"{head.rpartition('tree_sizes=')[0]}{first}\n\n{changed}{rest[size:]}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("left_child=2 3", "left_child=900 3", "tree 0 of 200: split 0 has the child 900"),
        ("left_child=2 3", "left_child=3 3", "the child of two splits"),
        ("left_child=2 3", "left_child=0 3", "split 0 has the child 0"),
        ("left_child=2 3", "left_child=-99 3", "a leaf, -31 to -1"),
        ("split_feature=65", "split_feature=66", "split_feature has .* 66; expected 0 to 65"),
        ("split_feature=65", "split_feature=-1", "split_feature has -1"),
        ("split_feature=65", "split_feature=4503599627370496", "expected whole numbers"),
        ("num_leaves=31", "num_leaves=3100000", "num_leaves is 3100000; expected 1 to 65536"),
        ("num_leaves=31", "num_leaves=30", "split_feature has 30 values; expected 29"),
        ("num_cat=0", "num_cat=1", "num_cat is '1'; expected 0"),
        ("decision_type=2", "decision_type=1", "decision_type has"),
        ("leaf_value=", "leaf_value=nan ", "leaf_value has 32 values; expected 31"),
        ("shrinkage=1", "shrinkage=inf", "expected finite numbers"),
        ("shrinkage=1", "shrinkage=1\nleaf_coeff=1", "leaf_coeff=1"),
        ("is_linear=0\n", "", "it lacks is_linear"),
    ],
)
def test_each_wrong_index_is_named(old: str, new: str, message: str) -> None:
    text = _resized((SHIPPED / "reach.txt").read_text(), old, new)
    with pytest.raises(BoosterError, match=message):
        check_text(text, FEATURES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tree\n", "forest\n", "first line is 'forest'"),
        ("version=v4", "version=v9", "version is 'v9'"),
        ("num_class=1", "num_class=3", "num_class is '3'; expected 1"),
        ("max_feature_idx=65", "max_feature_idx=99999999", "max_feature_idx is 99999999; expected 65"),
        ("objective=quantile", "objective=multiclass num_class:5", "expected one with one output"),
        ("noise_log", "noise_dog", "other features"),
        ("tree_sizes=3", "tree_sizes=9", "tree 0 of 200"),
        ("end of trees", "end of treez", "after its trees"),
    ],
)
def test_a_wrong_head_is_named(old: str, new: str, message: str) -> None:
    text = (SHIPPED / "middle.txt").read_text()
    assert old in text
    with pytest.raises(BoosterError, match=message):
        check_text(text.replace(old, new, 1), FEATURES)


# ---- the trial ------------------------------------------------------------------------------------------------------


def test_the_model_of_the_package_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is in the code: a new one there has to be told, or every job would try it."""
    found = hashlib.sha256((SHIPPED / "model.json").read_bytes()).hexdigest()
    assert found == predictor.SHIPPED_SHA256, "a new model of the package: put its digest into predictor.py"

    def no_trial(texts: object) -> None:
        raise AssertionError("a trial")

    monkeypatch.setattr(predictor, "try_heads", no_trial)
    load(SHIPPED)


def test_a_child_that_dies_is_a_refused_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\ncat > /dev/null\nkill -SEGV $$\n")
    child.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(child))
    told: list[str] = []
    assert find_ranker({"STAR_MODEL": str(tmp_path)}, told.append) is None
    assert len(told) == 1 and "was ended by SIGSEGV" in told[0] and "copy it again or train anew" in told[0]


def test_a_trial_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\nexec sleep 600\n")
    child.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(child))
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    began_s = time.monotonic()
    with pytest.raises(ModelError, match=r"did not end within 0\.5 s"):
        load(tmp_path)
    assert time.monotonic() - began_s < 120.0


def test_what_is_loaded_is_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes between the trial and the load would not have been tried."""
    save_model(tmp_path)
    tried: dict[str, str] = {}
    monkeypatch.setattr(predictor, "try_heads", lambda texts: tried.update(texts))
    loaded: list[str] = []
    monkeypatch.setattr(predictor, "load_booster", lambda text: loaded.append(text) or _Fits())
    load(tmp_path)
    assert loaded == [tried[head] for head in predictor.HEADS]


class _Fits:
    def num_feature(self) -> int:
        return len(FEATURES)
