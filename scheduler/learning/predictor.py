"""The learned predictor: time of a mode relative to `sync`, with an interval, and the probability of the target.

LightGBM corrects the cost model instead of replacing it: three heads predict the quantiles 5, 50 and 95 % of

    log(relative time) - log(relative time by the cost model)

and a fourth the probability of reaching the target. Decisions use the geometric mean of cost model and corrected
prediction. Rows outside the range of the training data, and rows with too wide an interval, get the cost model's
prediction. Only a few features may be outside of it, where the heads are constant, as they are not at a border of what
they mean: `_UNBOUNDED_ABOVE`, `_UNBOUNDED_BELOW`.

A model is a folder: `model.json` and one LightGBM text file per head, listed in it with SHA-256. Text, not pickle, so
that a model from elsewhere executes no code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.conditions import Array, Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.learning.boosters import BoosterError, LightGBMMissing, load_booster
from scheduler.learning.features import FEATURES, SCHEMA_VERSION, rows, speed
from scheduler.learning.trial import try_heads
from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = [
    "CORRECTION_WEIGHT",
    "FORMAT",
    "HEADS",
    "SHIPPED",
    "SHIPPED_SHA256",
    "UNKNOWN",
    "ModelError",
    "Predictor",
    "load",
    "read_about",
]

logger = logging.getLogger("star_hvd")

Flags = npt.NDArray[np.bool_]

FORMAT = 1
"""Version of `model.json`."""

HEADS = ("low", "middle", "high", "reach")
SHIPPED = Path(__file__).parents[1] / "models" / "default"
"""The package's model."""

SHIPPED_SHA256 = "d0953c6140a937b3f12e48f86db7d6a35dd006f830de395b6e76a43a424e8a26"
"""SHA-256 of its `model.json`, which holds the hashes of its heads: this exact model needs no trial."""

_FILE = "model.json"
_MOST_BYTES = 32 << 20
_MARGIN = 0.1
"""Margin at both ends of a feature's range, as a fraction of it, that still counts as in range."""

_UNBOUNDED_ABOVE = ("age_log", "price_seen_log", "offered")
"""Features that count as the greatest trained value beyond it: what grows throughout a job, and the number of
candidates. No tree splits there, so the heads predict the same; without this, no row of an older job would be in range.
"""

_UNBOUNDED_BELOW = ("cycle_log",)
"""Features that count as the least trained value below it: a collective's negotiation is nothing in a long step."""

UNKNOWN: dict[str, tuple[dict[str, float], str]] = {
    "no known link rate": (dict.fromkeys(("wire_log", "wire_usual_log", "wire_now_log"), math.log(1e-4)),
                           "a job on one host"),
    "no observed price of staleness": ({"price_seen_log": 0.0}, "a job without hvd.record_loss"),
}  # fmt: skip
"""What live jobs may not know: the values of the features then (`scheduler.learning.features`), and an example."""

CORRECTION_WEIGHT = 0.5
"""Weight of the learned correction: an average of two predictors with different errors is better than either. Chosen on
simulated jobs with earlier tables. With those of this version the regret on 72 held-out jobs is 4.1 %, 7.5 % with 0."""


class ModelError(ValueError):
    """An unusable model; the message says what was found, what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Logarithms of relative times, probability of reaching the target, and a mask of usable rows."""

    low: Array
    middle: Array
    high: Array
    reach: Array
    known: Flags


class Predictor:
    """A loaded model; callable as the ranker of `scheduler.policy.cost_policy.CostPolicy`.

    Args:
        about: Contents of `model.json`.
        boosters: Per head a `boosters.Booster` or a LightGBM booster.

    Attributes:
        about: Contents of `model.json`: versions, training data, metrics.
    """

    def __init__(self, about: Mapping[str, Any], boosters: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self._boosters = dict(boosters)
        low, high = (np.array([pair[side] for pair in about["ranges"]], dtype=np.float64) for side in (0, 1))
        room = _MARGIN * (high - low) + 1e-9
        self._least, self._most = low - room, high + room
        calibration = about["calibration"]
        self._widen = float(calibration["widen"])
        self._widest = float(calibration["widest"])
        self._warned_sizes: set[int] = set()
        self._warned_range = False
        self._most[[FEATURES.index(name) for name in _UNBOUNDED_ABOVE]] = math.inf
        self._least[[FEATURES.index(name) for name in _UNBOUNDED_BELOW]] = -math.inf
        self._cost, self._ranks = FEATURES.index("cost_log"), FEATURES.index("ranks_log2")

    def __call__(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        """Predict for candidates, in their order, in a few milliseconds on one thread.

        Late or silent ranks count with their last reports.
        """
        costs = {id(prediction.plan): prediction for prediction in rank(offered, conditions)}
        predictions = [costs[id(plan)] for plan in offered]
        problem = self.out_of_range(conditions.world_size)
        if problem is not None:  # All rows would be out of range: see `estimate`.
            self._warn_size(conditions.world_size, problem)
            return predictions
        features = rows(offered, conditions, window, active, predictions)
        found = self.estimate(features)
        self._warn_range(features[[not plan.plain for plan in offered]])
        return [
            _prediction(cost, found, index) if found.known[index] and not cost.plan.plain else cost
            for index, cost in enumerate(predictions)
        ]

    def out_of_range(self, world_size: int) -> str | None:
        """Return why the cost model decides with this number of ranks, None if the model was trained for it."""
        if self._least[self._ranks] <= math.log2(world_size) <= self._most[self._ranks]:
            return None
        least, most = (round(2.0**bound) for bound in self.about["ranges"][self._ranks])
        trained = f"{least} to {most}" if least < most else f"{least}"
        return f"{world_size} ranks: the model was trained on {trained}; the cost model decides"

    def blind_spots(self) -> list[str]:
        """Return why whole kinds of jobs would never use the model, with what to do; empty for a model to use.

        One feature out of range takes every row out of it.
        """
        found = []
        for lacking, (values, example) in UNKNOWN.items():
            columns = [FEATURES.index(name) for name in values]
            given = np.array(list(values.values()))
            outside = (given < self._least[columns]) | (given > self._most[columns])
            if outside.any():
                names = ", ".join(name for name, is_outside in zip(values, outside, strict=True) if is_outside)
                found.append(
                    f"it was fitted to no row with {lacking} ({names}), so the cost model would decide in every such "
                    f"job ({example}); train with the tables in datasets/, too"
                )
        return found

    def _warn_size(self, world_size: int, problem: str) -> None:
        """Warn once that the model was not trained for this number of ranks."""
        if world_size not in self._warned_sizes:
            self._warned_sizes.add(world_size)
            logger.warning("%s", problem)

    def _outside(self, features: Array) -> Flags:
        """Which values are outside the range of the training data, shape (n, n_features)."""
        return ~((features >= self._least) & (features <= self._most))

    def _warn_range(self, features: Array) -> None:
        """Warn once that no row of a decision is in range: without this, the model would be off without a sign."""
        outside = self._outside(features)
        if self._warned_range or not len(features) or not outside.any(axis=1).all():
            return
        self._warned_range = True
        worst = int(outside.sum(axis=0).argmax())
        values = features[outside[:, worst], worst]
        least, most = self.about["ranges"][worst]
        logger.warning(
            "no candidate is in the range of the model's training data, so the cost model decides until one is: "
            "%s is %.4g; trained on %.4g to %.4g", FEATURES[worst], values[0], least, most
        )  # fmt: skip

    def estimate(self, features: Array) -> _Estimates:
        """Calibrated estimates for feature rows, shape (n, n_features)."""
        raw = {
            head: np.asarray(booster.predict(features, num_threads=1, validate_features=False), dtype=np.float64)
            for head, booster in self._boosters.items()
        }
        cost = features[:, self._cost]
        middle = raw["middle"]
        low = np.minimum(raw["low"] - self._widen, middle)
        high = np.maximum(raw["high"] + self._widen, middle)
        in_range = ~self._outside(features).any(axis=1)
        finite = np.isfinite(low) & np.isfinite(high) & np.isfinite(raw["reach"])
        return _Estimates(
            low=cost + low,
            middle=cost + middle,
            high=cost + high,
            reach=np.clip(raw["reach"], 0.0, 1.0),
            known=in_range & finite & (high - low <= self._widest),
        )


def _prediction(cost: Prediction, found: _Estimates, index: int) -> Prediction:
    """The cost model's prediction with the learned correction."""
    # An exact mode reaches what `sync` reaches.
    reach = cost.reach if cost.plan.mode == "sync" else float(found.reach[index])
    # A missed target costs the time to train again in `sync`, as in the cost model.
    missed = 1.0 - reach
    own = math.log(speed(cost))
    middle = math.exp(own + CORRECTION_WEIGHT * (float(found.middle[index]) - own))
    low, high = (math.exp(float(bound[index])) for bound in (found.low, found.high))
    return Prediction(
        plan=cost.plan,
        relative=middle + missed,
        low=min(low, middle) + missed,
        high=max(high, middle) + missed,
        interval_s=cost.interval_s,
        progress=cost.progress * speed(cost) / middle,
        drift=cost.drift,
        reach=reach,
        learned=True,
    )


# ---- loading --------------------------------------------------------------------------------------------------------


def load(path: Path) -> Predictor:
    """Load a model's folder and check its schema and hashes.

    Any model except the package's is first tried in a child process (`scheduler.learning.trial`), because LightGBM may
    crash the process that loads a damaged one.

    Raises:
        ModelError: The model is missing, damaged, or of another version, or LightGBM is not installed.
    """
    about, digest = read_about(path)
    texts = {head: _text(path, about, head) for head in HEADS}
    if digest != SHIPPED_SHA256:
        try:
            try_heads(texts)
        except LightGBMMissing as error:
            raise ModelError(str(error)) from None
        except BoosterError as error:
            raise ModelError(f"the model in {path}: {error}; copy it again or train anew") from None
    boosters = {}
    for head, text in texts.items():
        try:
            boosters[head] = load_booster(text)
        except LightGBMMissing as error:
            raise ModelError(str(error)) from None
        except BoosterError as error:
            raise ModelError(f"head {head} of {path} is not a LightGBM model: {error}") from None
        if boosters[head].num_feature() != len(FEATURES):
            count = boosters[head].num_feature()
            raise ModelError(f"head {head} of {path} takes {count} features; expected {len(FEATURES)}: train anew")
    return Predictor(about, boosters)


def read_about(path: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of a model's `model.json`, checked, and its SHA-256.

    Raises:
        ModelError: There is no such file, or it describes no model for this version.
    """
    try:
        raw = _bytes(path / _FILE)
        about = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"no model in {path}: {error}; expected a folder with {_FILE}, as `train` makes it") from None
    if not isinstance(about, dict):
        raise ModelError(f"{path / _FILE} holds {type(about).__name__}; expected a mapping")
    for name, expected in (("format", FORMAT), ("feature_version", SCHEMA_VERSION)):
        if about.get(name) != expected:
            raise ModelError(
                f"the model in {path} has {name} {about.get(name)!r}; expected {expected}: train anew with this version"
            )
    if about.get("features") != list(FEATURES):
        raise ModelError(f"the model in {path} has other features than this version; train anew")
    _check_numbers(path, about)
    return about, hashlib.sha256(raw).hexdigest()


def _bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        raw = stream.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ModelError(f"{file} has more than {_MOST_BYTES} bytes; expected a model's file")
    return raw


def _check_numbers(path: Path, about: Mapping[str, Any]) -> None:
    try:
        ranges = np.array(about["ranges"], dtype=np.float64)
        calibration = [float(about["calibration"][name]) for name in ("widen", "widest")]
        fits = ranges.shape == (len(FEATURES), 2) and bool((ranges[:, 0] <= ranges[:, 1]).all())
        fits = fits and all(map(math.isfinite, calibration)) and bool(np.isfinite(ranges).all())
        fits = fits and all(isinstance(about["heads"][head]["sha256"], str) for head in HEADS)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"the model in {path} is incomplete: {error!r}; train anew") from None
    if not fits:
        raise ModelError(f"the model in {path} has invalid ranges or calibration; train anew")


def _text(path: Path, about: Mapping[str, Any], head: str) -> str:
    file = path / f"{head}.txt"
    try:
        raw = _bytes(file)
    except OSError as error:
        raise ModelError(f"head {head} is missing: {error}; copy the whole folder, or train anew") from None
    found, expected = hashlib.sha256(raw).hexdigest(), about["heads"][head]["sha256"]
    if found != expected:
        raise ModelError(f"{file} has SHA-256 {found[:12]}..., {_FILE} says {expected[:12]}...: damaged, copy it again")
    return raw.decode("utf-8", errors="replace")

