"""Forecast of every rank's next step time from the reports of a window."""

from __future__ import annotations

import math

import numpy as np

from scheduler.diagnosis.forecast import Forecast, Forecaster
from scheduler.records import Window

__all__ = ["outlook"]


def outlook(window: Window) -> Forecast | None:
    """Forecast the next step from a window's reports; takes some tens of milliseconds for eight ranks.

    Args:
        window: Recent reports. If a rank has no report of a step (it was late), its time there is unknown.

    Returns:
        The forecast, None if no rank has reported anything.
    """
    table = window.table
    width = table.compute_s.shape[1]
    known = np.arange(width) >= width - table.counts[:, None]
    forecaster = Forecaster(len(table))
    for step in np.unique(table.steps[known]).tolist():
        here = known & (table.steps == step)
        # Under servers a rank may report a step more than once.
        count = here.sum(axis=1)
        sums_s = np.where(here, table.compute_s, 0.0).sum(axis=1)
        forecaster.update(np.where(count > 0, sums_s / np.maximum(count, 1), math.nan))
    return forecaster.forecast() if forecaster.iterations else None
