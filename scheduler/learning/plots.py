"""Plots of a training: feature importance, and calibration of intervals and probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scheduler.learning.features import FEATURES

__all__ = ["draw"]


def draw(found: Any, frame: Any, folder: Path) -> list[Path]:
    """Draw importance, and calibration of intervals and of the probability of reaching the target.

    Args:
        found: A `scheduler.learning.train.Fit`.
        frame: The table it was fitted to.
        folder: Folder of the PNG files.

    Returns:
        The files; none if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    drawn = [_importance(pyplot, found, folder), _intervals(pyplot, found, frame, folder)]
    return [*drawn, _reach(pyplot, found, frame, folder)]


def _importance(pyplot: Any, found: Any, folder: Path) -> Path:
    gain = np.asarray(found.boosters["middle"].feature_importance("gain"), dtype=np.float64)
    order = np.argsort(gain)[-25:]
    figure, axes = pyplot.subplots(figsize=(6, 6))
    axes.barh([FEATURES[i] for i in order], gain[order] / max(gain.sum(), 1e-12))
    axes.set_xlabel("share of the gain, head `middle`")
    return _save(pyplot, figure, folder / "importance.png")


def _intervals(pyplot: Any, found: Any, frame: Any, folder: Path) -> Path:
    """Coverage of the intervals by their width: the line should be flat at 0.9."""
    residual = frame["log_relative"].to_numpy() - found.judged["cost"]
    low, high = found.judged["low"] - found.widen, found.judged["high"] + found.widen
    rows = (frame["plan"] != "sync").to_numpy()
    covered, width = ((residual >= low) & (residual <= high))[rows], (high - low)[rows]
    order = np.argsort(width)
    parts = np.array_split(order, 10)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([width[p].mean() for p in parts], [covered[p].mean() for p in parts], marker="o")
    axes.axhline(0.9, linestyle="--", color="gray")
    axes.set(xlabel="width of the interval, logarithm", ylabel="coverage", ylim=(0.5, 1.02))
    return _save(pyplot, figure, folder / "intervals.png")


def _reach(pyplot: Any, found: Any, frame: Any, folder: Path) -> Path:
    real, predicted = frame["reached"].to_numpy(dtype=np.float64), found.judged["reach"]
    known = np.isfinite(real)
    bins = np.clip((predicted[known] * 10).astype(int), 0, 9)
    figure, axes = pyplot.subplots(figsize=(5, 5))
    shown = [bins == b for b in range(10) if (bins == b).any()]
    points = [(predicted[known][one].mean(), real[known][one].mean()) for one in shown]
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.plot([0, 1], [0, 1], linestyle="--", color="gray")
    axes.set(xlabel="predicted probability of reaching the target", ylabel="share that reached it")
    return _save(pyplot, figure, folder / "reach.png")


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
