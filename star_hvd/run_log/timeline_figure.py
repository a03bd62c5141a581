"""The figure of single steps on a run's page: compute, and every bucket's communication, hidden and exposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_hvd.run_log.figures import svg_of

__all__ = ["chosen_samples", "hidden_and_exposed", "steps_svg"]

Span = tuple[float, float]

_MOST_STEPS, _MOST_BUCKETS = 4, 24  # Maximum steps drawn per run, and buckets per step.
_COMPUTE, _WAIT, _HIDDEN, _HELD = "#4c72b0", "#c44e52", "#55a868", "#bbbbbb"
_ROW_IN = 0.17


def chosen_samples(samples: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the samples to draw, with their ranks: for each of the last sampled modes, the one of median exposure.

    Args:
        samples: Rank and timeline event, in the order of the log, grouped by rank.
    """
    by_mode: dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]] = {}
    for rank, event in samples:
        same = by_mode.setdefault((event["mode"], event["means"]), [])
        if not same or same[0][0] == rank:
            same.append((rank, event))
    found = []
    for same in list(by_mode.values())[-_MOST_STEPS:]:
        same.sort(key=lambda item: float(item[1]["exposed_us"]) / max(1, item[1]["interval_us"]))
        found.append(same[len(same) // 2])
    return found


def hidden_and_exposed(way: Span, waits: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the parts of a bucket's transfer in which the training thread computes, and those in which it waits.

    Args:
        way: Start and end of the transfer.
        waits: Start and end of the training thread's waits, in order of time.
    """
    hidden, exposed, at = [], [], way[0]
    for begin, end in waits:
        begin, end = max(begin, at), min(end, way[1])
        if begin >= end:
            continue
        if begin > at:
            hidden.append((at, begin))
        exposed.append((begin, end))
        at = end
    if at < way[1]:
        hidden.append((at, way[1]))
    return hidden, exposed


def steps_svg(samples: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Draw one panel per sampled step; see `chosen_samples`."""
    shown = [[row for row in event["buckets"] if row[0] >= 0 and _known(row)] for _, event in samples]
    shown = [sorted(sorted(rows, key=lambda row: -row[1])[:_MOST_BUCKETS], key=lambda row: row[3]) for rows in shown]
    heights = [3 + len(rows) for rows in shown]

    def draw(figure: Any) -> None:
        figure.subplots_adjust(top=1.0 - 0.3 / figure.get_size_inches()[1], hspace=0.9)
        panels = figure.subplots(len(samples), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (rank, event), rows in zip(panels, samples, shown, strict=True):
            _panel(axes, rank, event, rows)
        for name, color in (("compute", _COMPUTE), ("waiting", _WAIT), ("hidden", _HIDDEN), ("held back", _HELD)):
            panels[0].plot([], [], lw=6, color=color, label=name)
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False, handlelength=1.0)

    return svg_of(draw, 0.5 + sum(_ROW_IN * height + 0.45 for height in heights))


def _known(row: Sequence[Any]) -> bool:
    return row[3] is not None


def _panel(axes: Any, rank: int, event: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> None:
    interval_ms = event["interval_us"] / 1e3
    waits = [(began / 1e3, ended / 1e3) for _, began, ended in sorted(event["waits"], key=lambda wait: wait[1])]
    computing, waiting = hidden_and_exposed((0.0, interval_ms), waits)
    _bars(axes, computing, 0.0, 0.8, _COMPUTE)
    _bars(axes, waiting, 0.0, 0.8, _WAIT)
    end_ms = interval_ms
    for line, (_, _, ready, submitted, arrived, _) in enumerate(rows, start=1):
        way = (submitted / 1e3, (event["interval_us"] if arrived is None else arrived) / 1e3)
        hidden, exposed = hidden_and_exposed(way, waits)
        if ready is not None and ready < submitted:
            _bars(axes, [(ready / 1e3, way[0])], line, 0.25, _HELD)
        _bars(axes, hidden, line, 0.55, _HIDDEN)
        _bars(axes, exposed, line, 0.55, _WAIT)
        end_ms = max(end_ms, way[1])
    axes.axvline(interval_ms, color="#555555", lw=0.7, ls=(0, (4, 3)))
    axes.set_xlim(0.0, 1.02 * end_ms)
    axes.set_ylim(len(rows) + 0.6, -0.6)
    labels = [f"{index}: {size / 1e6:.2g} MB" for index, size, *_ in rows]
    axes.set_yticks(range(len(rows) + 1), ["thread", *labels], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("ms", fontsize=8, labelpad=1)
    span = f"{event['steps']} steps of {interval_ms / event['steps']:.1f} ms" if event["steps"] > 1 else "a step"
    share = event["exposed_us"] / max(1, event["interval_us"])
    means = f" ({event['means']})" if event["means"] else ""
    title = f"{event['mode']}{means}, rank {rank}, from step {event.get('step')}: {span}, {interval_ms:.1f} ms, "
    axes.set_title(f"{title}{share:.0%} of it waiting", fontsize=8, loc="left", pad=3)


def _bars(axes: Any, spans: Sequence[Span], line: float, height: float, color: str) -> None:
    axes.broken_barh([(begin, end - begin) for begin, end in spans], (line - height / 2, height), facecolors=color)
