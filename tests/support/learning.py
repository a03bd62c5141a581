"""A small table and a small model for the tests of the learned scheduler."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.learning import dataset
from scheduler.learning.features import FEATURES
from scheduler.learning.predictor import UNKNOWN
from scheduler.learning.train import Fit, Settings, fit, save

NETWORKS, MOMENTS = 12, 8
PLANS = (("sync", "sync"), ("partial(3)", "partial"), ("ps(3)", "ps"), ("local(4)", "local"))


@lru_cache(maxsize=1)
def small_table() -> Any:
    """Return rows in which the cost model is wrong by a factor that a feature predicts, plus noise."""
    rng = np.random.default_rng(3)
    rows = []
    for network in range(NETWORKS):
        for moment in range(MOMENTS):
            for index, (label, mode) in enumerate(PLANS):
                values = rng.uniform(-1.0, 1.0, len(FEATURES))
                cost = 0.0 if mode == "sync" else float(rng.uniform(-1.5, 1.0))
                values[FEATURES.index("cost_log")] = cost
                values[FEATURES.index("mode_index")] = index
                if moment == 0:  # Without these rows no job that does not know them could use the model.
                    for unknown, _ in UNKNOWN.values():
                        values[[FEATURES.index(name) for name in unknown]] = list(unknown.values())
                wrong = 0.8 * values[FEATURES.index("late_share")]
                real = 0.0 if mode == "sync" else cost + wrong + 0.1 * float(rng.standard_normal())
                reached = float(values[FEATURES.index("cost_drift")] < 0.5)
                meta = ["simulated", f"sim{network}", f"network{network}", "small_cnn", network, 10 * moment]
                rows.append([*meta, label, mode, "0.1.0", real, reached, np.exp(cost), *values])
    return dataset.frame_of(rows)


@lru_cache(maxsize=1)
def small_fit() -> Fit:
    """Return heads fitted to the small table."""
    return fit(small_table(), Settings(rounds=40, leaves=7, least_rows=10, learning_rate=0.1))


def save_model(path: Path) -> dict[str, Any]:
    """Write a model's folder; return the contents of `model.json`."""
    return save(small_fit(), path, data={"sha256": "0" * 64, "rows": len(small_table())}, made_by="a test")
