"""One self-contained HTML page on a run: modes, stragglers and causes, decisions and their outcomes, curves."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.target import Target
from star_hvd.run_log.convert import flat
from star_hvd.run_log.figures import curves_svg, modes_svg, ranks_svg
from star_hvd.run_log.story import RunStory, read_story
from star_hvd.run_log.timeline_figure import chosen_samples, steps_svg

__all__ = ["rank_table", "segment_table", "sent_table", "sentence", "summary_of", "write_page"]

_MOST_DECISIONS = 40  # On sending; the latest are shown.
_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.q{color:#666}"""


def sentence(plan: Mapping[str, Any]) -> str:
    """Describe a plan event in one sentence."""
    text = f"step {plan.get('step')} ({plan.get('time_s') or 0.0:.1f} s): {plan.get('label')}"
    reason = str(plan.get("reason") or "")
    return text + (f", because {reason}" if reason else "")


def _predictions(plan: Mapping[str, Any]) -> str:
    """Return a collapsed table of the predictions behind a decision; empty if there were none."""
    rows = [
        (
            name,
            f"{_number(values, 'relative')} ({_number(values, 'low')} to {_number(values, 'high')})",
            _number(values, "reach"),
        )
        for name, values in (plan.get("prediction") or {}).items()
        if isinstance(values, Mapping)
    ]
    if not rows:
        return ""
    columns = ("candidate", "time relative to sync (90 % interval)", "probability to reach the target")
    return f"<details><summary>predictions</summary>{_table(columns, rows)}</details>"


def _outcome(event: Mapping[str, Any]) -> str:
    """Describe the outcome of a switch; empty if unknown."""
    predicted, measured = event.get("predicted"), event.get("measured")
    if not (isinstance(predicted, (int, float)) and isinstance(measured, (int, float))):
        return ""
    against, steps = html.escape(str(event.get("against"))), _number(event, "steps").split(".")[0]
    text = f"Predicted {predicted:.2g}x faster than {against}, measured {measured:.2g}x over {steps} steps"
    return f"<br><b>{text}{'; the mode was left' if event.get('harmful') else ''}.</b>"


def _number(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return f"{value:.2f}" if isinstance(value, (int, float)) else "?"


def write_page(directory: Path, out: Path, on_progress: Callable[[], None] = lambda: None) -> Path:
    """Write the page of the run in `directory` to `out`, whose folder is made; return the path written.

    Args:
        directory: The run's folder.
        out: The page's file.
        on_progress: Called now and then while the run's files are read.

    Raises:
        ValueError: The folder contains no run.
        ImportError: matplotlib is missing; the message says how to install it.
    """
    story = read_story(directory, on_progress)
    state = story.state
    decisions = "".join(
        f"<li>{html.escape(sentence(segment.plan))}{_outcome(segment.outcome)}{_predictions(segment.plan)}</li>"
        for segment in state.segments
    )
    parts = [
        f"<h1>Run {html.escape(story.name)}</h1>",
        f"<p>{html.escape(summary_of(story))}</p>",
        "<h2>Modes</h2>",
        modes_svg(story),
        "<p class=q>All figures have the same time axis; dashed lines are changes of mode.</p>",
        f"<ol>{decisions}</ol>" if decisions else "<p class=q>No plan was logged.</p>",
        "<h2>Ranks</h2>",
        ranks_svg(story),
        "<p class=q>Colour: compute time over that of the median rank. Bars: when a rank was a straggler, and why.</p>",
        rank_table(story),
        *_uneven(story),
        *_steps(story),
        "<h2>Loss and accuracy</h2>",
        curves_svg(story) if story.curves else "<p class=q>No curve was logged: call hvd.record_loss(loss).</p>",
        "<h2>Segments</h2>",
        segment_table(story),
        "<h2>Job</h2>",
        _table(("", ""), flat(state.facts).items()),
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(story.name)}</title>"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"{head}<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n", encoding="utf-8")
    return out


def _uneven(story: RunStory) -> list[str]:
    """Return what compute times mean if ranks had batches of different sizes; else nothing."""
    plans = [segment.plan.get("plan") or {} for segment in story.state.segments]
    if not any(plan.get("balanced") or plan.get("batch_shares") for plan in plans):
        return []
    return ["<p class=q>Under batch shares compute times are those of batches of the usual size.</p>"]


def _steps(story: RunStory) -> list[str]:
    """Return the section with timelines of single steps, and decisions on sending; empty for a log without either."""
    sent = sent_table(story)
    how = ["<h2>What was sent how</h2>", sent] if sent else []
    samples = chosen_samples(story.samples)
    if not samples:
        return how
    text = (
        "Of each mode the sampled step of median waiting. Top: the training thread. Below: the buckets on their way, "
        "hidden behind compute or waited for; waiting includes that for slower ranks. Dashed: the end of the step."
    )
    return ["<h2>One step</h2>", steps_svg(samples), f"<p class=q>{text}</p>", *how]


def sent_table(story: RunStory) -> str:
    """Return the table of the latest decisions on sending, as HTML; empty without any."""
    rows = []
    for rank, event in sorted(story.transmissions, key=lambda item: item[1].get("step") or 0)[-_MOST_DECISIONS:]:
        gain = event.get("gain")
        saved = f"{gain:.1%}" if isinstance(gain, (int, float)) else ""
        rows.append((event.get("what"), rank, event.get("step"), event.get("chosen"), saved, event.get("text")))
    return _table(("what", "rank", "step", "chosen", "saves", "because"), rows) if rows else ""


def summary_of(story: RunStory) -> str:
    """Return one sentence about a run, as plain text."""
    state = story.state
    ended = state.status or "not ended"
    text = f"{story.world_size} ranks, {state.last_step} steps in {state.last_s:.1f} s, {len(state.segments)} plans, "
    text += f"{ended}.{_target(story)}"
    if state.dropped:
        text += f" {state.dropped} log entries were lost."
    return text


def _target(story: RunStory) -> str:
    """Describe whether the target was reached; empty if there was none."""
    text, reached = story.state.facts.get("target"), story.state.reached
    target = Target.parse(text)
    if not text:
        return ""
    if target is None:
        return f" Target {text} is invalid; expected one like accuracy>=0.95."
    if reached:
        at_s, step = reached["time_to_target_s"], reached["steps_to_target"]
        return f" Target {text} reached after {at_s:.1f} s, at step {step:.0f}."
    if target.name not in story.recorded:
        call = f"hvd.record_metric({target.name!r}, value)"
        return f" Target {text} not reached: no metric `{target.name}` was recorded; call {call}."
    least, most = story.recorded[target.name]
    return f" Target {text} not reached (best {most if target.relation.startswith('>') else least:.4g})."


def rank_table(story: RunStory) -> str:
    """Return the table of a run's ranks, as HTML."""
    causes: dict[int, dict[str, float]] = {}  # Seconds; late in a long job a window stands for more of them.
    spans_s = story.spans_s()
    for window, span_s in zip(story.windows, spans_s, strict=True):
        for item in window.get("stragglers") or []:
            per_rank = causes.setdefault(int(item["rank"]), {})
            per_rank[str(item.get("cause"))] = per_rank.get(str(item.get("cause")), 0.0) + span_s
    known_s = sum(spans_s)
    rows = []
    for rank in range(story.world_size):
        count, compute_s, wait_s, late = story.steps.get(rank, (0, 0.0, 0.0, 0.0))
        slow = sum(causes.get(rank, {}).values()) / known_s if known_s > 0.0 else 0.0
        why = ", ".join(sorted(causes.get(rank, {}), key=lambda name: -causes[rank][name]))
        times = (f"{1e3 * compute_s:.1f}", f"{1e3 * wait_s:.1f}", f"{late:.0%}") if count else ("?", "?", "?")
        rows.append((rank, count, *times, f"{slow:.0%}", why))
    names = ("rank", "reports", "compute ms", "wait ms", "late", "slow", "cause")
    return _table(names, rows)


def segment_table(story: RunStory) -> str:
    """Return the table of a run's plans, each with what was measured under it, as HTML."""
    rows = []
    for segment in story.state.segments:
        figures = segment.summary()
        cells = [f"{figures[name]:.4g}" if name in figures else "" for name in ("steps", "duration_s", "step_s")]
        losses = [f"{figures[name]:.4g}" if name in figures else "" for name in ("loss_first", "loss_last")]
        rows.append((segment.plan.get("label"), *cells, *losses))
    return _table(("mode", "steps", "s", "s per step", "loss from", "to"), rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(names, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"

