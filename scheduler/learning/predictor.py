"""The learned predictor: how long a mode will take compared to `sync`, with an interval, and whether it gets there.

LightGBM corrects the cost model instead of replacing it: a head predicts

    log(relative time) - log(relative time by the cost model)

at the quantiles 5, 50 and 95 %, a further one the chance to reach the target. Where nothing was learned the correction
is near 0, so the cost model stands; decisions go by the geometric mean of both. It knows when it does not know: rows
outside of what it was trained on, and rows whose interval is too wide, get the cost model's prediction.

A model is a folder: `model.json` and one LightGBM text file per head, named in it with SHA-256. Text, no pickle: a
model from elsewhere runs no code.
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

__all__ = ["FORMAT", "HEADS", "SHIPPED", "ModelError", "Predictor", "load"]

logger = logging.getLogger("star_hvd")

Flags = npt.NDArray[np.bool_]

FORMAT = 1
"""Version of `model.json`."""

HEADS = ("low", "middle", "high", "reach")
SHIPPED = Path(__file__).parents[1] / "models" / "default"
"""The model that comes with the package."""

_SHIPPED_SHA256 = "38f58c7966b9555457a8ba54f37a590ea5c60945abab1806f81e0f7804fc926e"
"""Of that model's `model.json`, which has those of its heads: what is it, to the bit, needs no trial."""

_FILE = "model.json"
_MOST_BYTES = 32 << 20
_OUTSIDE = 0.1
"""Part of a feature's range beyond its ends that still counts as inside."""

_TRUST = 0.5
"""Part of the learned correction that the choice goes by: two predictors that err differently are better than either.
Chosen on 60 simulated jobs (regret 2.9 %, 3.2 % with none of it); on 30 others it is 5.8 %, 6.0 % with all of it and
7.8 % with none."""


class ModelError(ValueError):
    """A model that cannot be used: what was got, what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Of candidates: logarithms of relative times, chance to reach the target, and which rows are trusted."""

    low: Array
    middle: Array
    high: Array
    reach: Array
    known: Flags


class Predictor:
    """A loaded model; callable as the ranker of `scheduler.policy.cost_policy.CostPolicy`.

    Args:
        about: What `model.json` says.
        boosters: Per head a `boosters.Booster` or a LightGBM booster.

    Attributes:
        about: The same: versions, training data, metrics.
        fallbacks: Rows that got the cost model's prediction so far.
        predicted: Rows in all.
    """

    def __init__(self, about: Mapping[str, Any], boosters: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self.fallbacks = 0
        self.predicted = 0
        self._boosters = dict(boosters)
        low, high = (np.array([pair[side] for pair in about["ranges"]], dtype=np.float64) for side in (0, 1))
        room = _OUTSIDE * (high - low) + 1e-9
        self._least, self._most = low - room, high + room
        calibration = about["calibration"]
        self._widen = float(calibration["widen"])
        self._widest = float(calibration["widest"])
        self._told: set[int] = set()  # Numbers of ranks.
        self._cost, self._ranks = FEATURES.index("cost_log"), FEATURES.index("ranks_log2")

    def __call__(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        """Predictions for candidates, in their order.

        Ranks that are late or silent count with what they reported last. Takes a few milliseconds, on one thread.
        """
        costs = {id(prediction.plan): prediction for prediction in rank(offered, conditions)}
        predictions = [costs[id(plan)] for plan in offered]
        if not self._least[self._ranks] <= math.log2(conditions.world_size) <= self._most[self._ranks]:
            # Nothing of what it learned would be used: see `estimate`.
            self.predicted += len(offered)
            self.fallbacks += len(offered)
            self._tell_ranks(conditions.world_size)
            return predictions
        found = self.estimate(rows(offered, conditions, window, active, predictions))
        self.predicted += len(offered)
        self.fallbacks += int((~found.known).sum())
        return [
            _prediction(cost, found, index) if found.known[index] and cost.plan.mode != "sync" else cost
            for index, cost in enumerate(predictions)
        ]

    def _tell_ranks(self, world_size: int) -> None:
        """Say once that there is no model for so many ranks."""
        if world_size in self._told:
            return
        self._told.add(world_size)
        least, most = (round(2.0**bound) for bound in self.about["ranges"][self._ranks])
        trained = f"{least} to {most}" if least < most else f"{least}"
        logger.warning("%d ranks: the model was trained on %s; the cost model decides", world_size, trained)

    def estimate(self, features: Array) -> _Estimates:
        """What the heads say of feature rows, shape (n, n_features); intervals are calibrated."""
        raw = {
            head: np.asarray(booster.predict(features, num_threads=1, validate_features=False), dtype=np.float64)
            for head, booster in self._boosters.items()
        }
        cost = features[:, self._cost]
        middle = raw["middle"]
        low = np.minimum(raw["low"] - self._widen, middle)
        high = np.maximum(raw["high"] + self._widen, middle)
        inside = ((features >= self._least) & (features <= self._most)).all(axis=1)
        finite = np.isfinite(low) & np.isfinite(high) & np.isfinite(raw["reach"])
        return _Estimates(
            low=cost + low,
            middle=cost + middle,
            high=cost + high,
            reach=np.clip(raw["reach"], 0.0, 1.0),
            known=inside & finite & (high - low <= self._widest),
        )


def _prediction(cost: Prediction, found: _Estimates, index: int) -> Prediction:
    """The cost model's prediction with what was learned put in."""
    reach = float(found.reach[index])
    # What a target that may be missed costs is the time to train again in `sync`, as in the cost model.
    missed = 1.0 - reach
    own = math.log(speed(cost))
    middle = math.exp(own + _TRUST * (float(found.middle[index]) - own))
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
    """Load a model's folder, checked against its schema and hashes.

    Any but that of the package is first checked and tried in a process of its own (`scheduler.learning.trial`):
    LightGBM ends the process that gives it a damaged one.

    Raises:
        ModelError: Missing, damaged, of another version, or LightGBM is not installed.
    """
    about, digest = _about(path)
    texts = {head: _text(path, about, head) for head in HEADS}
    if digest != _SHIPPED_SHA256:
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
            raise ModelError(f"head {head} of {path} is no LightGBM model: {error}") from None
        if boosters[head].num_feature() != len(FEATURES):
            count = boosters[head].num_feature()
            raise ModelError(f"head {head} of {path} takes {count} features; expected {len(FEATURES)}: train anew")
    return Predictor(about, boosters)


def _about(path: Path) -> tuple[dict[str, Any], str]:
    """What `model.json` says, and its SHA-256."""
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
        raise ModelError(f"the model in {path} has ranges or calibration that are none; train anew")


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

