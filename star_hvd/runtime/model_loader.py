"""The trained predictor, loaded by rank 0 of a job in mode `auto` while the job trains.

Loading takes 0.1 s of CPU time (`scheduler.learning.boosters`), or up to 20 s of waiting if the model is in a registry.
No step waits for it: until the predictor is loaded, the cost model decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.plan.plan import Plan
from scheduler.records import Window
from star_hvd.threads import supervised

if TYPE_CHECKING:
    from scheduler.learning.predictor import Predictor

__all__ = ["ModelLoader", "digest"]

logger = logging.getLogger("star_hvd")

_LOOK_INTERVAL_S = 0.02
_LATEST_S = 10.0


class ModelLoader:
    """Predicts with the cost model until the predictor is loaded, or always if there is none.

    `STAR_MODEL` names the predictor: a folder, or a registered model as `models:/name@alias`. By default it is the one
    shipped with the package. If it is missing, damaged or was not trained for this number of ranks, a warning is logged
    and the cost model decides.

    Args:
        world_size: Number of ranks of the job.
        latest_s: Longest wait for the first step; if it takes longer, the predictor is loaded during it.

    Attributes:
        facts: For the run log, which model decides: `source` (`shipped`, the value of `STAR_MODEL`, or `cost_model`),
            `sha256` (`digest`), and `fallback`, the reason if the cost model replaces the wanted model. None while
            loading.
    """

    def __init__(self, world_size: int, latest_s: float = _LATEST_S) -> None:
        self._world_size = world_size
        self._latest_s = latest_s
        self.facts: dict[str, str] | None = None
        self._loaded: Predictor | None = None
        self._begun: Callable[[], bool] = lambda: True
        self._thread = supervised(self._run, "star-model", critical=False)

    def load_after(self, begun: Callable[[], bool]) -> None:
        """Load the predictor in a thread once `begun` returns True; return at once. Once per process, by one thread."""
        if self._thread.ident is None:
            self._begun = begun
            self._thread.start()

    def __call__(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        """Return predictions for plans, the fastest first."""
        loaded = self._loaded
        return rank(offered, conditions) if loaded is None else loaded(offered, conditions, window, active)

    def _run(self) -> None:
        latest_s = time.monotonic() + self._latest_s
        while not self._begun() and time.monotonic() < latest_s:
            time.sleep(_LOOK_INTERVAL_S)
        self._begun = lambda: True  # The old one may hold a reference to an optimizer.
        problems: list[str] = []
        try:
            from scheduler.learning.model_choice import find_ranker

            found = find_ranker(os.environ, problems.append)
            problem = None if found is None else found.out_of_range(self._world_size)
            if problem is None:
                self._loaded = found
            else:  # Here and not at its first decision, so that the run log does not name it as what decides.
                problems.append(problem)
        except Exception as error:  # Whatever is wrong with it, the cost model can decide.
            problems.append(f"no predictor of time to accuracy ({error}); the cost model decides")
        for problem in problems:
            logger.warning("%s", problem)
        self.facts = _facts(os.environ.get("STAR_MODEL", "").strip(), self._loaded, problems)


def digest(about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a model's `model.json`, which has the hashes of its heads: the same for every copy."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _facts(wanted: str, loaded: Predictor | None, problems: Sequence[str]) -> dict[str, str]:
    source = wanted or "shipped"
    if problems:
        return {"source": source, "fallback": f"cost_model: {'; '.join(problems)}"}
    if loaded is None:
        return {"source": "cost_model"}
    return {"source": source, "sha256": digest(loaded.about)}
