"""Training of the predictor: heads, tuning within a time budget, calibration on held-out networks.

All figures of `Fit.metrics`, and the calibration of intervals, come from cross-validation by network: predictions for
networks that the heads were not fitted to, and intervals that were not widened by what these networks need.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.conditions import Array
from scheduler.learning.dataset import DatasetError, folds, matrix
from scheduler.learning.features import FEATURES, SCHEMA_VERSION
from scheduler.learning.predictor import CORRECTION_WEIGHT, FORMAT, HEADS, ModelError

__all__ = ["COVERAGE", "Fit", "Settings", "fit", "kendall", "metrics", "save", "tune"]

Ints = npt.NDArray[np.int64]

COVERAGE = 0.9
"""Target coverage of an interval."""

_QUANTILES = {"low": 0.05, "middle": 0.5, "high": 0.95}
_FOLDS = 5
_LEAST_NETWORKS = 10
_COST_MODEL = {"cost": "cost_log", "cost_reach": "cost_reach"}
_SPACE: dict[str, tuple[float, ...]] = {
    "learning_rate": (0.03, 0.05, 0.08),
    "rounds": (120, 200, 300),
    "leaves": (15, 31, 63),
    "least_rows": (20, 50, 100),
    "columns": (0.4, 0.6, 0.8),
    "ridge": (0.0, 1.0, 10.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """LightGBM settings, equal for all heads.

    Attributes:
        learning_rate: Learning rate of boosting.
        rounds: Trees per head.
        leaves: Most leaves of a tree.
        least_rows: Least rows in a leaf.
        columns: Share of the features that a tree uses.
        ridge: L2 penalty on leaves.
        seed: Random seed.
    """

    learning_rate: float = 0.05
    rounds: int = 200
    leaves: int = 31
    least_rows: int = 50
    columns: float = 0.6
    ridge: float = 1.0
    seed: int = 1


@dataclass(slots=True, kw_only=True)
class Fit:
    """Fitted heads and their validation.

    Attributes:
        boosters: LightGBM booster per head.
        settings: Settings of the fit.
        ranges: Range of every feature, (n_features, 2).
        widen: Width added to intervals on both sides, in logarithms.
        widest: Width above which the cost model's prediction is used.
        metrics: Metrics on held-out networks.
        judged: Out-of-fold predictions by head; `cost` and `cost_reach` are the cost model's.
    """

    boosters: dict[str, Any]
    settings: Settings
    ranges: Array
    widen: float
    widest: float
    metrics: dict[str, float]
    judged: dict[str, Array] = field(default_factory=dict)


def _lightgbm() -> Any:
    try:
        import lightgbm
    except (ImportError, OSError) as error:
        raise ModelError(f"LightGBM cannot be loaded ({error}); install the extra `train`") from None
    return lightgbm


def _parameters(settings: Settings, head: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "learning_rate": settings.learning_rate,
        "num_leaves": settings.leaves,
        "min_data_in_leaf": settings.least_rows,
        "feature_fraction": settings.columns,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": settings.ridge,
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
        "max_bin": 127,
    }
    if head == "reach":
        return {**found, "objective": "cross_entropy"}
    return {**found, "objective": "quantile", "alpha": _QUANTILES[head]}


def _fit_heads(features: Array, targets: Mapping[str, Array], settings: Settings, heads: tuple[str, ...]) -> Any:
    lightgbm = _lightgbm()
    found = {}
    for head in heads:
        label = targets["reached" if head == "reach" else "residual"]
        known = np.isfinite(label)
        data = lightgbm.Dataset(
            features[known], label[known], weight=targets["weight"][known], feature_name=list(FEATURES)
        )
        found[head] = lightgbm.train(_parameters(settings, head), data, num_boost_round=int(settings.rounds))
    return found


def _targets(frame: Any, features: Array) -> dict[str, Array]:
    """Labels and weights; every moment has the same weight, independent of its number of candidates."""
    log_relative = frame["log_relative"].to_numpy(dtype=np.float64)
    count = frame.groupby(["run", "step"])["plan"].transform("size").to_numpy(dtype=np.float64)
    return {
        "residual": log_relative - features[:, FEATURES.index("cost_log")],
        "log_relative": log_relative,
        "reached": frame["reached"].to_numpy(dtype=np.float64),
        "weight": 10.0 / count,
    }


def _cross_validate(
    features: Array, targets: Mapping[str, Array], fold: Ints, settings: Settings, heads: tuple[str, ...]
) -> dict[str, Array]:
    """Predictions for every row by heads that were fitted to other networks."""
    found = {head: np.full(len(features), np.nan) for head in heads}
    for index in np.unique(fold):
        held_out, kept = fold == index, fold != index
        chosen = {name: values[kept] for name, values in targets.items()}
        for head, booster in _fit_heads(features[kept], chosen, settings, heads).items():
            found[head][held_out] = booster.predict(features[held_out], num_threads=1)
    return found


def tune(frame: Any, *, budget_s: float, seed: int = 1, report: Callable[[str], None] | None = None) -> Settings:
    """Random search for the settings with the least choice regret, within a time budget.

    Args:
        frame: The table.
        budget_s: Seconds; at least the defaults are evaluated.
        seed: Seed of the search.
        report: Called with a sentence on every trial.
    """
    features, fold = matrix(frame), folds(frame, 3)
    targets = _targets(frame, features)
    rng = np.random.default_rng(seed)
    best, least, begin_s, trial = Settings(seed=seed), math.inf, time.monotonic(), 0
    settings, slowest_s = best, 0.0
    while trial == 0 or time.monotonic() - begin_s + slowest_s < budget_s:
        began_s = time.monotonic()
        judged = _cross_validate(features, targets, fold, settings, ("middle", "reach")) | _by_cost_model(features)
        regret = _regret(frame, _decided(frame, judged), targets)
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        trial += 1
        if report is not None:
            report(f"trial {trial}: choice regret {100.0 * regret:.2f} % with {settings}")
        if regret < least:
            best, least = settings, regret
        drawn = {name: values[int(rng.integers(len(values)))] for name, values in _SPACE.items()}
        whole = {name: int(drawn[name]) for name in ("rounds", "leaves", "least_rows")}
        settings = replace(best, **{**drawn, **whole})  # type: ignore[arg-type]
    return best


def fit(frame: Any, settings: Settings | None = None) -> Fit:
    """Fit all heads, and calibrate and validate them across networks.

    Raises:
        DatasetError: The table has too few networks.
        ModelError: LightGBM is missing.
    """
    networks = frame["network"].nunique()
    if networks < _LEAST_NETWORKS:
        raise DatasetError(f"the table has {networks} networks; expected at least {_LEAST_NETWORKS}: collect more")
    settings = settings or Settings()
    features, fold = matrix(frame), folds(frame, _FOLDS)
    targets = _targets(frame, features)
    judged = _cross_validate(features, targets, fold, settings, HEADS) | _by_cost_model(features)
    rows = _others(frame)
    widen = _widen(judged, targets["residual"], rows)
    width = judged["high"] - judged["low"] + 2.0 * widen
    widest = float(np.quantile(width[rows], 0.995)) + 0.1
    return Fit(
        boosters=_fit_heads(features, targets, settings, HEADS),
        settings=settings,
        ranges=np.stack([np.nanmin(features, axis=0), np.nanmax(features, axis=0)], axis=1),
        widen=widen,
        widest=widest,
        metrics=metrics(frame, judged, targets, fold),
        judged=judged,
    )


def _others(frame: Any) -> npt.NDArray[np.bool_]:
    """Rows in which decisions use the heads: all but those of plain `sync`, whose relative time is 1 by definition."""
    return np.asarray((frame["plan"] != "sync").to_numpy())


def _widen(judged: Mapping[str, Array], residual: Array, rows: npt.NDArray[np.bool_]) -> float:
    """Conformal correction (Romano et al. 2019): quantile, at the coverage, of the distances from the interval."""
    distances = np.maximum(judged["low"] - residual, residual - judged["high"])[rows]
    return float(np.quantile(distances, min(1.0, COVERAGE * (1.0 + 1.0 / len(distances)))))


def metrics(frame: Any, judged: Mapping[str, Array], targets: Mapping[str, Array], fold: Ints) -> dict[str, float]:
    """Metrics of predictions; the prefix `cost_` marks those of the cost model alone.

    The prefix `real_` marks those on rows of real runs, which are so few that metrics of all rows do not show them. A
    table without such rows has none.

    The intervals of a fold are widened by what the other folds need: a width that was calibrated on the judged rows
    would cover the calibration's share of them whatever the heads predict.
    """
    rows = _others(frame)
    widen = np.zeros(len(fold))
    for index in np.unique(fold):
        widen[fold == index] = _widen(judged, targets["residual"], rows & (fold != index))
    found = _figures(frame, judged, targets, widen)
    real = (frame["source"] == "real").to_numpy()
    if (real & rows).any():
        own = _figures(
            frame[real], {name: values[real] for name, values in judged.items()},
            {name: values[real] for name, values in targets.items()}, widen[real],
        )  # fmt: skip
        # A head of so few moments may have no value, which MLflow and JSON would not take.
        found |= {f"real_{name}": value for name, value in own.items() if math.isfinite(value)}
    return found


def _figures(frame: Any, judged: Mapping[str, Array], targets: Mapping[str, Array], widen: Array) -> dict[str, float]:
    """`metrics` of these rows, whose intervals are widened by `widen`."""
    rows, residual = _others(frame), targets["residual"]
    covered = (residual >= judged["low"] - widen) & (residual <= judged["high"] + widen)
    learned = judged["cost"] + judged["middle"]
    return {
        "error": float(np.abs(residual - judged["middle"])[rows].mean()),
        "cost_error": float(np.abs(residual)[rows].mean()),
        "coverage": float(covered[rows].mean()),
        "width": float((judged["high"] - judged["low"] + 2.0 * widen)[rows].mean()),
        "kendall": kendall(frame, learned, targets["log_relative"]),
        "cost_kendall": kendall(frame, judged["cost"], targets["log_relative"]),
        "choice_regret": _regret(frame, _decided(frame, judged), targets),
        "cost_choice_regret": _regret(frame, np.exp(judged["cost"]) + 1.0 - judged["cost_reach"], targets),
        "reach_brier": float(np.nanmean((judged["reach"] - targets["reached"])[rows] ** 2)),
    }


def _by_cost_model(features: Array) -> dict[str, Array]:
    """The cost model's logarithm of the relative time and its probability of the target, which are features."""
    return {name: features[:, FEATURES.index(column)] for name, column in _COST_MODEL.items()}


def _decided(frame: Any, judged: Mapping[str, Array]) -> Array:
    """Relative times as decisions compare them (`predictor`), save that no row counts as out of range."""
    learned = np.exp(judged["cost"] + CORRECTION_WEIGHT * judged["middle"]) + 1.0 - np.clip(judged["reach"], 0.0, 1.0)
    return np.where(_others(frame), learned, np.exp(judged["cost"]) + 1.0 - judged["cost_reach"])


def kendall(frame: Any, predicted: Array, real: Array) -> float:
    """Mean over moments of Kendall's tau-a between predicted and actual order of the candidates."""
    taus = []
    for index in frame.groupby(["run", "step"]).indices.values():
        if len(index) < 3:
            continue
        one = np.sign(predicted[index][:, None] - predicted[index][None, :])
        two = np.sign(real[index][:, None] - real[index][None, :])
        taus.append(float((one * two).sum()) / (len(index) * (len(index) - 1)))
    return float(np.mean(taus)) if taus else math.nan


def _regret(frame: Any, predicted: Array, targets: Mapping[str, Array]) -> float:
    """Mean over moments of the chosen candidate's time over the best one's, minus 1.

    Both the predicted and the real times include the repetition of a missed target.
    """
    real = np.exp(targets["log_relative"]) + 1.0 - np.nan_to_num(targets["reached"], nan=1.0)
    lost = []
    for index in frame.groupby(["run", "step"]).indices.values():
        chosen = index[int(np.argmin(predicted[index]))]
        lost.append(min(9.0, float(real[chosen]) / float(real[index].min()) - 1.0))
    return float(np.mean(lost))


def save(found: Fit, path: Path, *, data: Mapping[str, Any], made_by: str = "") -> dict[str, Any]:
    """Write a model's folder, `model.json` last, so that an incomplete folder is not a model.

    Returns:
        Contents of `model.json`.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.json").unlink(missing_ok=True)
    heads = {}
    for head in HEADS:
        text = found.boosters[head].model_to_string().encode("utf-8")
        (path / f"{head}.txt").write_bytes(text)
        heads[head] = {"sha256": hashlib.sha256(text).hexdigest()}
    kept = ("sha256", "rows", "runs", "networks", "sources", "families", "table_version", "horizon_steps", "project")
    about = {
        "format": FORMAT,
        "feature_version": SCHEMA_VERSION,
        "features": list(FEATURES),
        "ranges": [[float(f"{low:.6g}"), float(f"{high:.6g}")] for low, high in found.ranges],
        "heads": heads,
        "calibration": {"coverage": COVERAGE, "widen": found.widen, "widest": found.widest},
        "settings": asdict(found.settings),
        "data": {name: data[name] for name in kept if name in data},
        "metrics": found.metrics,
        "made_by": made_by,
    }
    (path / "model.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about
