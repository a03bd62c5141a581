"""Plots of result files of `benchmarks.tta`: accuracy over time, and which gradients were in which step."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from benchmarks.lab.report import straggler_phrase

__all__ = ["Strip", "main", "member_strip", "modes_phrase", "plot"]

STYLE = {
    "straggler_free": ("#8a8a8a", "Horovod, none slow"),
    "plain": ("#d1495b", "Horovod"),
    "drop": ("#edae49", "backup workers (drop)"),
    "star_free": ("#7fb2f5", "star_hvd, none slow"),
    "star": ("#1f6feb", "star_hvd"),
}
FRESH_COLOR, MISSING_COLOR, FOLD_COLOR = "#1f6feb", "#f4d6a0", "#c77700"
SMOOTHED = 3
TITLE_CHARACTERS = 100  # Characters of a title line that fit the plot's width.
DPI = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Data of the lower part of the plot.

    Attributes:
        edges_s: Boundaries of the steps since the start of training, shape (n_steps + 1,).
        members: 1 where a rank's fresh gradient is in the step, shape (n_ranks, n_steps).
        fold_times_s: Ends of the steps in which late gradients were folded.
        modes: Mode of each step, shape (n_steps,).
        steps: Number of each step, same shape.
    """

    edges_s: list[float]
    members: list[list[int]]
    fold_times_s: list[float]
    modes: list[str]
    steps: list[int]

    @property
    def changes(self) -> list[tuple[float, int, str]]:
        """Return every change of mode: time, first step, and mode."""
        return [
            (self.edges_s[index], self.steps[index], self.modes[index])
            for index in range(1, len(self.modes))
            if self.modes[index] != self.modes[index - 1]
        ]


def plot(summary: dict[str, Any], path: Path, variants: Sequence[str] = tuple(STYLE)) -> None:
    """Plot a result of `tta` into the image file `path`."""
    shown = [name for name in variants if name in summary["variants"]]
    strip = member_strip(_first_star(summary), summary["ranks"])
    figure, axes = plt.subplots(
        2 if strip else 1,
        1,
        figsize=(8.0, 5.6 if strip else 4.0),
        height_ratios=[2.8, 1.0] if strip else [1.0],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    _draw_curves(axes[0][0], summary, shown)
    if strip:
        _draw_strip(axes[1][0], strip)
    axes[-1][0].set_xlabel("training time (s)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _first_star(summary: dict[str, Any]) -> dict[str, Any] | None:
    star = summary["variants"].get("star")
    return star["seeds"][0] if star else None


def member_strip(run: dict[str, Any] | None, ranks: int) -> Strip | None:
    """Return when each step ended, whose fresh gradient was in it, and where late gradients were folded.

    Args:
        run: A seed's entry of the star variant, with `timeline`, `times_s` and `steps`.
        ranks: Number of ranks.

    Returns:
        None without a timeline.
    """
    if run is None or not run["timeline"]:
        return None
    timeline = sorted(run["timeline"], key=lambda entry: entry["step"])
    # The optimizer's clock has a different origin; steps known to both clocks give the offset.
    # Timeline entries are numbered from 0; the step counter is the number of completed steps.
    ends_s = {entry["step"] + 1: entry["time_s"] for entry in timeline}
    offsets = [
        time_s - ends_s[step] for time_s, step in zip(run["times_s"], run["steps"], strict=True) if step in ends_s
    ]
    offset_s = statistics.median(offsets) if offsets else -timeline[0]["time_s"]
    edges = [max(0.0, entry["time_s"] + offset_s) for entry in timeline]
    members = [[int(rank in entry["members"]) for entry in timeline] for rank in range(ranks)]
    return Strip(
        edges_s=[0.0, *edges],
        members=members,
        fold_times_s=[end_s for end_s, entry in zip(edges, timeline, strict=True) if entry.get("folds", 0) > 0],
        modes=[str(entry["mode"]) for entry in timeline],
        steps=[int(entry["step"]) for entry in timeline],
    )


def _draw_curves(axes: Axes, summary: dict[str, Any], shown: Sequence[str]) -> None:
    target = summary["target_accuracy"]
    axes.axhline(100 * target, color="0.4", linewidth=0.8, linestyle=(0, (4, 3)))
    for level, name in enumerate(shown):
        color, label = STYLE[name]
        values = summary["variants"][name]
        for index, run in enumerate(values["seeds"]):
            middle = [100 * value for value in _running_median(run["accuracies"])]
            axes.plot(run["times_s"], middle, color=color, linewidth=1.8, alpha=0.9, label=None if index else label)
        if values["median_s"] is not None:
            _mark_time(axes, values["median_s"], 100 * target, color, level)
    axes.set_ylim(bottom=_floor(target), top=100)
    axes.set_xlim(left=0)
    axes.set_ylabel("held-out accuracy (%)")
    axes.set_title(f"{straggler_phrase(summary)} ({summary['ranks']} ranks, {summary['dataset']})", loc="left")
    axes.legend(loc="center right", frameon=False)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def _floor(target: float) -> float:
    return max(0.0, 100 * target - 45)


def _mark_time(axes: Axes, time_s: float, percent: float, color: str, level: int) -> None:
    """Mark where the target is reached, and write its time near the bottom, one line higher per level."""
    axes.plot([time_s], [percent], "o", color=color, markersize=7, zorder=5)
    floor = _floor(percent / 100)
    axes.plot([time_s, time_s], [floor, percent], color=color, linewidth=1.0, linestyle=":")
    axes.annotate(
        f"{time_s:.1f} s",
        (time_s, floor),
        xytext=(4, 5 + 13 * level),
        textcoords="offset points",
        color=color,
        fontweight="bold",
    )


def _running_median(values: Sequence[float]) -> list[float]:
    return [statistics.median(values[max(0, end - SMOOTHED) : end]) for end in range(1, len(values) + 1)]


def _draw_strip(axes: Axes, strip: Strip) -> None:
    ranks = len(strip.members)
    colors = ListedColormap([MISSING_COLOR, FRESH_COLOR])
    for rank, values in enumerate(strip.members):
        axes.pcolormesh(strip.edges_s, [rank - 0.4, rank + 0.4], [values], cmap=colors, vmin=0, vmax=1, rasterized=True)
    axes.vlines(strip.fold_times_s, ranks - 0.4, ranks + 0.4, color=FOLD_COLOR, linewidth=1.0)
    axes.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "folded"])
    axes.set_ylim(ranks + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    for time_s, _, _ in strip.changes:
        axes.axvline(time_s, color="0.15", linewidth=1.0, linestyle=(0, (3, 2)))
    lines = textwrap.wrap(modes_phrase(strip), TITLE_CHARACTERS)
    beside = len(lines[-1]) <= TITLE_CHARACTERS // 2  # The legend fits in the same line.
    axes.set_title("\n".join(lines if beside else [*lines, ""]), loc="left", fontsize=10)
    handles = [
        Patch(color=FRESH_COLOR, label="fresh"),
        Patch(color=MISSING_COLOR, label="not waited for"),
        Patch(color=FOLD_COLOR, label="late gradient folded in"),
    ]
    where = (1.01, 0.98)
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=where, ncols=3, frameon=False, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def modes_phrase(strip: Strip) -> str:
    """Return all modes in order: `star_hvd: sync, partial(3) from step 5, ps(backup=1) from step 77`."""
    if not strip.changes:
        return f"star_hvd: {strip.modes[0]} throughout"
    names = ", ".join(f"{mode} from step {step}" for _, step, mode in strip.changes)
    return f"star_hvd: {strip.modes[0]}, {names}"


def main(argv: Sequence[str] | None = None) -> int:
    """Plot a result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("result", type=Path, help="file written by python -m benchmarks.tta --json")
    parser.add_argument("out", type=Path, nargs="?", help="image to write; default: beside the result, .png")
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".png")
    try:
        plot(json.loads(args.result.read_text(encoding="utf-8")), out)
    except (OSError, json.JSONDecodeError, KeyError) as error:
        sys.stderr.write(f"error: {args.result} is no result of benchmarks.tta: {error!r}\n")
        return 2
    sys.stdout.write(f"wrote {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
