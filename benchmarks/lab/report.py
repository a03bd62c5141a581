"""Human-readable output: the table of a run, the sentence below it, and progress during the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.lab.scenarios import FREEZE_EVERY_S, FREEZE_S
from benchmarks.lab.spec import PLAIN_VARIANTS

__all__ = ["ProgressView", "bound_sentence", "progress_view", "sentence", "straggler_phrase", "table"]

PLAIN_LINE_INTERVAL_S = 5.0
TITLES = {
    "straggler_free": "Horovod, none slow",
    "plain": "Horovod",
    "drop": "backup workers (drop)",
    "star": "star_hvd",
    "star_free": "star_hvd, none slow",
}
FED = {"sampler": "equal", "shard": "queue"}
COUNT_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten"}


class ProgressView:
    """Shows how many units of a run are done: a progress bar on a terminal, otherwise an occasional line."""

    def __init__(self, console: Console, total: int, bar: Progress | None) -> None:
        self._console, self._total, self._bar = console, total, bar
        self._task = bar.add_task("starting", total=total) if bar is not None else None
        self._done = 0
        self._last_line_s = float("-inf")

    def update(self, fields: dict[str, Any]) -> None:
        """Process a progress line: `text` to show, and `done`, the units finished since the previous one."""
        self._done += int(fields.get("done", 0))
        text = str(fields.get("text", ""))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=text)
            return
        now_s = time.monotonic()
        if now_s - self._last_line_s >= PLAIN_LINE_INTERVAL_S or self._done == self._total:
            self._last_line_s = now_s
            self._console.print(f"[{self._done}/{self._total}] {text}", markup=False, highlight=False)


@contextmanager
def progress_view(console: Console, total: int) -> Iterator[ProgressView]:
    """Open a `ProgressView` of `total` units that fits the console."""
    if not console.is_terminal:
        yield ProgressView(console, total, None)
        return
    columns = (BarColumn(24), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        yield ProgressView(console, total, bar)


def table(summary: dict[str, Any]) -> Table:
    """Return a table with one row per variant."""
    percent = 100.0 * summary["target_accuracy"]
    title = f"{summary['scenario']}, {summary['ranks']} ranks, {summary['dataset']}"
    # The columns fill a terminal of 80 characters; there is no room for lines between them.
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    result.add_column("variant", no_wrap=True)
    modes = summary["modes"].items()
    fixed = {name: {**one, "median_s": one["seconds"], "seeds": one["per_seed"]} for name, one in modes}
    rows = {**summary["variants"], **fixed}
    several = any(len(values["seeds"]) > 1 for values in rows.values())  # Otherwise a terminal has no room for these.
    spread = ["min - max"] if several else []
    figures = ("ratio", "bound", *spread, "final", "ms/step", "late", "fed")
    for name in (f"to {percent:.1f} %", *figures):
        result.add_column(name, justify="right", no_wrap=True)
    for name, values in rows.items():
        relaxed = name not in PLAIN_VARIANTS
        result.add_row(
            TITLES.get(name, f"  {name}"),
            _seconds(values["median_s"]),
            _ratio(values["median_s"], summary["plain_s"]),
            "-" if name == "straggler_free" else _times(values["bound_ratio"]),
            *([_spread([run["time_to_accuracy_s"] for run in values["seeds"]])] if several else []),
            f"{100.0 * values['final_accuracy']:.1f} %",
            f"{1000.0 * values['step_s']:.0f}",
            _late(values) if relaxed else "-",
            FED[values["feeding"]],
            style="bold" if name == "star" else None,
        )
    result.caption = (
        "ratio: to plain Horovod; bound: to every rank used at its own speed; late: gradients folded, dropped, largest "
        f"staleness; fed: {FED['sampler']} shares by DistributedSampler, or the {FED['shard']} of hvd.shard; "
        f"{summary['cores']} cores"
    )
    result.caption_justify = "left"
    return result


def straggler_phrase(summary: dict[str, Any]) -> str:
    """Return a phrase that names the stragglers of this run, as the beginning of a sentence."""
    last, slowdown = summary["ranks"] - 1, summary["slowdown"]
    times = COUNT_WORDS.get(slowdown, f"{slowdown:g}")
    return {
        "none": "With nobody slow",
        "one-slow": f"With rank {last} {times} times slower",
        "two-slow": f"With ranks {last - 1} and {last} {times} times slower",
        "rotating": f"With one rank after another {times} times slower",
        "trace": "With the slowdowns of the trace",
        "slow-input": f"With the samples of rank {last} {times} times as costly to load",
        "quota": f"With rank {last} held to {100.0 * summary['quota_cores']:.0f} % of a core",
        "starved": f"With rank {last} held to {100.0 * summary['quota_cores']:.0f} % of a core",
        "slow-link": f"With the link of rank {last} {times} times slower",
        "frozen": f"With rank {last} stopped {FREEZE_S:g} s in every {FREEZE_EVERY_S:g} s",
        "killed-worker": f"With the process of rank {last} killed on the way",
        "killed-server": "With a parameter server killed on the way",
    }[summary["scenario"]]


def sentence(summary: dict[str, Any]) -> str:
    """Return what the run means to a user."""
    percent = f"{100.0 * summary['target_accuracy']:.1f} %"
    final = summary["final_accuracy"]
    if summary["star_s"] is None or summary["plain_s"] is None:
        missing = [TITLES[name] for name in final if summary[f"{name}_s"] is None]
        if not missing:
            return f"{straggler_phrase(summary)}, only {', '.join(TITLES[name] for name in final)} was run."
        return f"{straggler_phrase(summary)}, {' and '.join(missing)} did not reach {percent} in most seeds."
    text = (
        f"{straggler_phrase(summary)}, plain Horovod took {summary['plain_s']:.1f} s to reach {percent}, "
        f"star_hvd took {summary['star_s']:.1f} s ({summary['ratio']:.2f} of it); "
        f"final accuracy {100.0 * final['star']:.1f} % against {100.0 * final['plain']:.1f} %."
    )
    if summary["straggler_free_s"] is not None:
        text += f" With nobody slow, plain Horovod took {summary['straggler_free_s']:.1f} s."
    return text


def bound_sentence(summary: dict[str, Any]) -> str:
    """Return how far star_hvd is from the bound given by the ranks' speeds; empty if the bound is unknown."""
    if summary["bound_ratio"] is None:
        return ""
    text = (
        f"Every rank used at its own speed, that would become {summary['bound_s']:.1f} s: "
        f"star_hvd took {summary['bound_ratio']:.2f} times as long."
    )
    if summary["own_bound_ratio"] is not None:
        text += f" Reckoned from star_hvd's own time with nobody slow, {summary['own_bound_ratio']:.2f} times."
    return text


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f} s"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(value: float | None, plain_s: float | None) -> str:
    return "-" if value is None or not plain_s else f"{value / plain_s:.2f}"


def _late(values: dict[str, Any]) -> str:
    counts = [values[key] for key in ("folds", "drops", "max_staleness")]
    return "-" if None in counts else "/".join(map(str, counts))


def _spread(values: list[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "-"
    most = f"{max(reached):.1f}" if len(reached) == len(values) else "never"
    return f"{min(reached):.1f} - {most}"
