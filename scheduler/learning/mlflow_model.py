"""The predictor as an MLflow model: feature rows in, estimates out. MLflow executes this file when it loads the model.

Training jobs do not use it: they load the folder inside the model (`scheduler.learning.registry.fetch`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow.models import set_model

from scheduler.learning.features import FEATURES
from scheduler.learning.predictor import Predictor, load

__all__ = ["COLUMNS", "Served"]

COLUMNS = ("low", "middle", "high", "reach", "known")
"""Logarithms of the relative time, the probability of reaching the target, and whether the estimate is used."""


class Served(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """A model for `mlflow.pyfunc.load_model`."""

    def load_context(self, context: Any) -> None:
        """Load the folder `star` among the artifacts."""
        self._predictor: Predictor = load(Path(context.artifacts["star"]))

    # Without annotations, which MLflow would interpret as a schema; there is a signature already.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Estimates for a table with the columns of `scheduler.learning.features.FEATURES`."""
        import pandas

        found = self._predictor.estimate(model_input[list(FEATURES)].to_numpy(dtype="float64"))
        return pandas.DataFrame({name: getattr(found, name) for name in COLUMNS})


set_model(Served())
