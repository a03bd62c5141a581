"""The figures of a run's page, each as the text of an SVG image."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from star_hvd.run_log.page import RunStory

__all__ = ["curves_svg", "modes_svg", "ranks_svg"]

_MODE_COLORS = {
    "sync": "#4c72b0",
    "partial": "#dd8452",
    "subgroup": "#55a868",
    "grouped": "#c44e52",
    "ps": "#8172b3",
    "local": "#937860",
}
_CAUSE_COLORS = {"compute": "#c44e52", "input": "#dd8452", "starved": "#8172b3", "link": "#4c72b0"}


def modes_svg(story: RunStory) -> str:
    """Modes over time, and below them the steps per second between windows."""

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        for segment in story.state.segments:
            width_s = max(segment.last_s - segment.first_s, 1e-3)
            color = _MODE_COLORS.get(str(segment.plan.get("mode")), "#888888")
            top.broken_barh([(segment.first_s, width_s)], (0, 1), facecolors=color, edgecolor="white")
            if width_s > 0.06 * max(story.state.last_s, 1e-3):
                label = str(segment.plan.get("label"))
                top.text(segment.first_s + width_s / 2, 0.5, label, ha="center", va="center", color="white", size=8)
        top.set_yticks([])
        times, rates = _rates(story)
        bottom.plot(times, rates, color="#333333", lw=1)
        bottom.set_ylim(bottom=0)
        bottom.set_ylabel("steps per s")
        bottom.set_xlabel("s")

    return _svg(draw, 2.6)


def ranks_svg(story: RunStory) -> str:
    """When each rank was slow, coloured by cause."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        times = [float(window["time_s"]) for window in story.windows]
        seen = set()
        for index, window in enumerate(story.windows):
            end_s = times[index]
            begin_s = times[index - 1] if index else max(0.0, end_s - 1.0)
            for item in window.get("stragglers") or []:
                cause = str(item.get("cause"))
                seen.add(cause)
                color = _CAUSE_COLORS.get(cause, "#888888")
                axes.broken_barh([(begin_s, end_s - begin_s)], (int(item["rank"]) - 0.4, 0.8), facecolors=color)
        for cause in sorted(seen):
            axes.plot([], [], lw=6, color=_CAUSE_COLORS.get(cause, "#888888"), label=cause)
        if seen:
            axes.legend(loc="upper right", fontsize=8)
        axes.set_xlim(0, max([story.state.last_s, *times, 1.0]))
        axes.set_ylim(story.world_size - 0.5, -0.5)
        axes.set_ylabel("rank")
        axes.set_xlabel("s" if seen else "s (no rank was slow)")

    return _svg(draw, min(6.0, 1.2 + 0.18 * max(4, story.world_size)))


def curves_svg(story: RunStory) -> str:
    """One small plot per curve, over time."""

    def draw(figure: Any) -> None:
        names = sorted(story.curves, key=lambda name: (name != "loss", name))[:6]
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            axes.plot([p[0] for p in story.curves[name]], [p[2] for p in story.curves[name]], lw=1)
            axes.set_title(name, size=10)
            axes.set_xlabel("s")

    return _svg(draw, 2.6)


def _rates(story: RunStory) -> tuple[list[float], list[float]]:
    times, rates = [], []
    for before, after in zip(story.windows, story.windows[1:], strict=False):
        elapsed_s = float(after["time_s"]) - float(before["time_s"])
        if elapsed_s > 0:
            times.append(float(after["time_s"]))
            rates.append((float(after["step"]) - float(before["step"])) / elapsed_s)
    return times, [rate if math.isfinite(rate) and rate >= 0 else math.nan for rate in rates]


def _svg(draw: Callable[[Any], None], height_in: float) -> str:
    """Draw without pyplot: no window system, no global state."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"the page of a run needs matplotlib: {error}; pip install matplotlib") from error
    figure = Figure(figsize=(9.0, height_in), layout="constrained")
    draw(figure)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
