"""A plot of all trainings: time to accuracy over the bound, per row and variant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["draw"]

PLAIN, STAR, FIXED = "#d1495b", "#1f6feb", "#7fb2f5"
ROW_HEIGHT_IN = 0.45
DPI = 150


def draw(document: Mapping[str, Any], path: Path) -> bool:
    """Draw `bound_ratio` of every measured training; return whether there was any."""
    bars = [
        (name, variant, one["bound_ratio"])
        for name, entry in document["rows"].items()
        if entry["state"] == "measured"
        for variant, one in entry["figures"].get("trained", {}).items()
        if variant != "straggler_free" and one["bound_ratio"] is not None
    ]
    if not bars:
        return False
    labels = [f"{row}: {'plain Horovod' if variant == 'plain' else variant}" for row, variant, _ in bars]
    colors = [{"plain": PLAIN, "star": STAR}.get(variant, FIXED) for _, variant, _ in bars]
    figure, axes = plt.subplots(figsize=(8.0, 1.2 + ROW_HEIGHT_IN * len(bars)), layout="constrained")
    places = range(len(bars))
    axes.barh(places, [ratio for _, _, ratio in bars], color=colors)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time to accuracy over that of a job that uses every rank at its own speed")
    axes.set_title(f"version {document['version']}, {document['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True
