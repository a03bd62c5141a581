"""The trained predictor, loaded by rank 0 before the first step of a job in mode `auto`.

Importing LightGBM takes a second or two. Beside the first steps that would make rank 0 look starved, which it then is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.conditions import Conditions
from scheduler.cost_model import Prediction, rank
from scheduler.cost_policy import Ranker
from scheduler.plans import Plan
from scheduler.records import Window

__all__ = ["LazyRanker", "digest"]

logger = logging.getLogger("star_hvd")


class LazyRanker:
    """Predicts by the cost model until the predictor is loaded, and for good where there is none.

    `STAR_MODEL` names the predictor: a folder, or a registered model as `models:/name@alias`. Without it the one
    shipped with the package is taken. A missing or damaged one costs a warning.

    Attributes:
        facts: For the run log, which model decides: `source` (`shipped`, what `STAR_MODEL` says, or `cost_model`),
            `sha256` (`digest`), and `fallback`, why it is the cost model though a model was wanted. None while loading.
    """

    def __init__(self) -> None:
        self.facts: dict[str, str] | None = None
        self._loaded: Ranker | None = None
        self._thread = threading.Thread(target=self._run, name="star-model", daemon=True)

    def load(self, deadline_s: float) -> None:
        """Load it, unless that was done; what takes longer than `deadline_s` goes on beside the job."""
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(deadline_s)

    def __call__(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        """Predictions for plans, the fastest first."""
        loaded = self._loaded
        return rank(offered, conditions) if loaded is None else loaded(offered, conditions, window, active)

    def _run(self) -> None:
        problems: list[str] = []
        try:
            from scheduler.predictor import find_ranker

            self._loaded = find_ranker(os.environ, problems.append)
        except Exception as error:  # Whatever is wrong with it: the cost model decides as well.
            problems.append(f"no predictor of time to accuracy ({error}); the cost model decides")
        for problem in problems:
            logger.warning("%s", problem)
        self.facts = _facts(os.environ.get("STAR_MODEL", "").strip(), self._loaded, problems)


def digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of what a model's `model.json` says, the hashes of its heads included: the same for every copy of it."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _facts(wanted: str, loaded: Ranker | None, problems: Sequence[str]) -> dict[str, str]:
    source = wanted or "shipped"
    if problems:
        return {"source": source, "fallback": f"cost_model: {'; '.join(problems)}"}
    if loaded is None:
        return {"source": "cost_model"}
    return {"source": source, "sha256": digest(getattr(loaded, "about", {}))}
