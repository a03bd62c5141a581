"""The figures of a run's page as SVG, all with the same time axis."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable
from typing import Any

from scheduler.stats import lower_median
from scheduler.target import Target
from star_hvd.run_log.story import BINS, RunStory

__all__ = ["curves_svg", "modes_svg", "ranks_svg"]


_WIDTH_IN, _LEFT_IN, _RIGHT_IN = 9.0, 0.8, 1.5
"""The same margins in all figures, so that their time axes align; legends are in the right margin."""

_MODE_COLORS = {
    "sync": "#4c72b0",
    "partial": "#dd8452",
    "subgroup": "#55a868",
    "grouped": "#c44e52",
    "ps": "#8172b3",
    "local": "#937860",
}
_CAUSE_COLORS = {"compute": "#111111", "input": "#e6a100", "starved": "#7a3fb5", "link": "#1b8a3a"}
_OTHER_COLOR = "#888888"
_MOST_SLOWDOWN = 4.0  # End of the colour scale.
_MOST_SPANS = 3.0  # Usual intervals of windows: longest bar of one window, which says little about hours without any.
_ADJACENT_S = 1e-3  # Windows no further apart are adjacent; rounded times are.
_LABEL_IN = 0.075  # Width of a character in a segment's label.


def modes_svg(story: RunStory) -> str:
    """Draw modes over time, and below them the steps per second between windows."""

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
        seen = {}
        for segment in story.state.segments:
            begin_s = segment.first_s if segment.index else 0.0  # The first is logged a moment after its start.
            width_s = max(segment.last_s - begin_s, 1e-3)
            mode = str(segment.plan.get("mode"))
            seen[mode] = _MODE_COLORS.get(mode, _OTHER_COLOR)
            top.broken_barh([(begin_s, width_s)], (0, 1), facecolors=seen[mode], edgecolor="white")
            label = str(segment.plan.get("label"))
            if width_s / story.end_s * (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) > _LABEL_IN * len(label):
                top.text(begin_s + width_s / 2, 0.5, label, ha="center", va="center", color="white", size=8)
        top.set_yticks([])
        _legend(bottom, seen)  # A segment may be too short for its label.
        times, rates = _rates(story)
        bottom.plot(times, rates, color="#333333", lw=1)
        bottom.set_ylim(0.0, 1.1 * max([rate for rate in rates if rate > 0.0], default=1.0))
        bottom.set_ylabel("steps per s")
        _time_axis(bottom, story)

    return svg_of(draw, 2.6)


def ranks_svg(story: RunStory) -> str:
    """Draw each rank's compute time over the median rank's, and when it was a straggler, coloured by cause."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _heat(figure, axes, story)
        seen = {}
        axes.autoscale(False)  # The limits are set below; to find them again for each bar takes time in all bars.
        for (rank, cause), bars in _straggler_bars(story).items():
            seen[f"slow: {cause}"] = color = _CAUSE_COLORS.get(cause, _OTHER_COLOR)
            axes.broken_barh(bars, (rank + 0.25, 0.2), facecolors=color)
        _legend(axes, seen)
        axes.set_ylim(story.world_size - 0.5, -0.5)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("rank")
        _time_axis(axes, story, "" if seen else " (no stragglers)")

    return svg_of(draw, min(6.0, 1.4 + 0.22 * max(5, story.world_size)))


def _straggler_bars(story: RunStory) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Return begin and width in seconds of the bars of every straggler and cause; adjacent windows are one bar.

    A bar for each window would be tens of thousands in a long job.
    """
    spans_s = story.spans_s()
    most_s = _MOST_SPANS * statistics.median(spans_s) if spans_s else 0.0
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for window, span_s in zip(story.windows, spans_s, strict=True):
        end_s = float(window["time_s"])
        begin_s = end_s - min(span_s, most_s)
        for item in window.get("stragglers") or []:
            bars = found.setdefault((int(item["rank"]), str(item.get("cause"))), [])
            before_s, width_s = bars[-1] if bars else (-math.inf, 0.0)
            if begin_s <= before_s + width_s + _ADJACENT_S:
                bars[-1] = (before_s, end_s - before_s)
            else:
                bars.append((begin_s, end_s - begin_s))
    return found


def curves_svg(story: RunStory) -> str:
    """Draw the curves, one below the other, with the target's bound and the time at which it was reached."""
    names = sorted(story.curves, key=lambda name: (name != "loss", name))[:6]
    target = Target.parse(story.state.facts.get("target", ""))

    def draw(figure: Any) -> None:
        rows = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(rows, names, strict=True):
            points = story.curves[name]
            axes.plot([p[0] for p in points], [p[2] for p in points], lw=1, marker="." if len(points) < 60 else None)
            axes.set_ylabel(name)
            if target is not None and target.name == name:
                _target(axes, story, target)
            _time_axis(axes, story, labelled=axes is rows[-1])

    return svg_of(draw, 0.6 + 1.4 * len(names))


def _target(axes: Any, story: RunStory, target: Target) -> None:
    bound = target.bound
    axes.axhline(bound, color="#c44e52", lw=1, ls="--", label=f"target {target.relation} {bound:g}")
    at_s = story.state.reached.get("time_to_target_s")
    if at_s is not None:
        axes.plot([at_s], [bound], marker="v", color="#c44e52", ls="", label=f"reached at {at_s:.1f} s")
        axes.axvline(at_s, color="#c44e52", lw=1, ls=":")
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=8, frameon=False, handlelength=1.0)


def _heat(figure: Any, axes: Any, story: RunStory) -> None:
    """Draw the ranks' compute times over the median's, on a logarithmic scale, so that 2x and 1/2 are symmetric."""
    from matplotlib.colors import LogNorm

    rows = [story.pace.get(rank, [math.nan] * BINS) for rank in range(story.world_size)]
    columns = [[s for s in column if s > 0.0] for column in zip(*rows, strict=True)]
    usual = [lower_median(column) if column else math.nan for column in columns]
    ratios = [[value / one for value, one in zip(row, usual, strict=True)] for row in rows]
    if not any(ratio > 0.0 for row in ratios for ratio in row):
        return
    edges = [story.end_s * index / BINS for index in range(BINS + 1)]
    norm = LogNorm(1.0 / _MOST_SLOWDOWN, _MOST_SLOWDOWN)
    lines = [rank - 0.5 for rank in range(story.world_size + 1)]
    mesh = axes.pcolormesh(edges, lines, ratios, norm=norm, cmap="RdBu_r", rasterized=True)
    inches = figure.get_size_inches()
    box = figure.add_axes((1.0 - 0.45 * _RIGHT_IN / inches[0], 0.2, 0.1 / inches[0], 0.6))
    bar = figure.colorbar(mesh, cax=box, ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["1/4", "1/2", "1x", "2x", "4x"], fontsize=7)
    bar.ax.minorticks_off()


def _legend(axes: Any, colors: dict[str, str]) -> None:
    """Draw a legend to the right of the figure."""
    for name, color in colors.items():
        axes.plot([], [], lw=6, color=color, label=name)
    if colors:
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False, handlelength=1.0)


def _time_axis(axes: Any, story: RunStory, also: str = "", *, labelled: bool = True) -> None:
    """Draw the time axis of the whole run, with a line at each change of mode."""
    for segment in story.state.segments[1:]:
        axes.axvline(segment.first_s, color="#555555", lw=0.7, ls=(0, (4, 3)))
    axes.set_xlim(0.0, story.end_s)
    if labelled:
        axes.set_xlabel(f"s{also}")


def _rates(story: RunStory) -> tuple[list[float], list[float]]:
    times, rates = [], []
    for before, after in zip(story.windows, story.windows[1:], strict=False):
        elapsed_s = float(after["time_s"]) - float(before["time_s"])
        if elapsed_s > 0:
            times.append(float(after["time_s"]))
            rates.append((float(after["step"]) - float(before["step"])) / elapsed_s)
    return times, [rate if math.isfinite(rate) and rate >= 0 else math.nan for rate in rates]


def svg_of(draw: Callable[[Any], None], height_in: float) -> str:
    """Return a figure as SVG, drawn without pyplot, which has global state and may need a display."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"the page of a run needs matplotlib: {error}; pip install 'star-hvd[train]'") from error
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    figure.subplots_adjust(
        left=_LEFT_IN / _WIDTH_IN, right=1.0 - _RIGHT_IN / _WIDTH_IN, bottom=0.5 / height_in, top=1.0 - 0.1 / height_in
    )
    draw(figure)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
