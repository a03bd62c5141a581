"""The trained predictor, loaded by rank 0 of a job in mode `auto` while the job trains.

Loading takes 0.1 s of a processor (`scheduler.learning.boosters`), or up to 20 s of waiting where a registry has the
model. No step waits for either: until the predictor is there, the cost model decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import Ranker
from scheduler.records import Window
from star_hvd.threads import supervised

__all__ = ["ModelLoader", "digest"]

logger = logging.getLogger("star_hvd")

_LOOK_INTERVAL_S = 0.02
_LATEST_S = 10.0  # A job whose first step takes longer has nothing to hurry for: it is loaded beside that step.


class ModelLoader:
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
        self._begun: Callable[[], bool] = lambda: True
        self._thread = supervised(self._run, "star-model", critical=False)

    def load(self, deadline_s: float) -> None:
        """Load it, unless that was done; what takes longer than `deadline_s` goes on beside the job."""
        self.load_after(lambda: True)
        self._thread.join(deadline_s)

    def load_after(self, begun: Callable[[], bool]) -> None:
        """Load it in a thread as soon as `begun` says so; returns at once. Once per process, by one thread."""
        if self._thread.ident is None:
            self._begun = begun
            self._thread.start()

    def __call__(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        """Predictions for plans, the fastest first."""
        loaded = self._loaded
        return rank(offered, conditions) if loaded is None else loaded(offered, conditions, window, active)

    def _run(self) -> None:
        latest_s = time.monotonic() + _LATEST_S
        while not self._begun() and time.monotonic() < latest_s:
            time.sleep(_LOOK_INTERVAL_S)
        self._begun = lambda: True  # It may hold an optimizer.
        problems: list[str] = []
        try:
            from scheduler.learning.model_choice import find_ranker

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
