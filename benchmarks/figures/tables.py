"""Recorded figures as tables of the documents, each between a pair of markers that name it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures.rows import ROWS
from benchmarks.lab.spec import FREE_VARIANTS, PLAIN_VARIANTS

__all__ = ["PARTS", "MarkerError", "block_names", "blocks_of", "render", "replace_blocks", "with_earlier"]

Rows = Mapping[str, Mapping[str, Any]]
BEGIN, END = "<!-- figures: begin {} -->", "<!-- figures: end {} -->"
MARKER = re.compile(r"^<!-- figures: (begin|end) ([\w-]+) -->$", re.MULTILINE)
OF_COLUMNS = ("straggler_free", "plain", "star")
SHOWN = ("row", "none slow", "plain Horovod", "`star_hvd`", "ratio", "bound_ratio")  # Columns that are always shown.
FED = {"sampler": "`DistributedSampler`", "shard": "`hvd.shard`"}


class MarkerError(ValueError):
    """Markers are unpaired or name an unknown table; the message says which."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _seconds(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    if one["seconds"] is None:
        return "not reached"
    if one["least_s"] is None or one["least_s"] == one["most_s"]:
        return f"{one['seconds']:.1f} s"
    most = "never" if one["most_s"] is None else f"{one['most_s']:.1f}"
    return f"{one['seconds']:.1f} s ({one['least_s']:.1f}-{most})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100.0 * value:.{digits}f} %"


def _training(part: Sequence[str], rows: Rows) -> list[str]:
    """Return the time-to-accuracy table: one line per row, fixed modes in the last column."""
    head = (
        "row", "scenario", "ranks", "network", "seeds", "cores", "fed (Horovod, `star_hvd`)", "to", "none slow",
        "plain Horovod", "`star_hvd`", "ratio", "bound_ratio", "accuracy (`star_hvd`, plain)", "largest staleness",
        "others: time, bound_ratio",
    )  # fmt: skip
    lines = [_trained(name, rows[name]["figures"]) for name in part]
    head, lines, same = _without_constants(head, lines, SHOWN)
    notes = [f"In all rows: {same}."] if same else []
    notes.append("`bound_ratio`: time over that of a job that uses every rank at its own speed.")
    return [*_table(head, lines), "", "\n".join(notes)]


def _trained(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    trained = found["trained"]
    plain, star = trained.get("plain"), trained.get("star")
    fixed = [
        f"`{mode}` {_seconds(one)}, {_ratio(one['bound_ratio'])}"
        for mode, one in trained.items()
        if mode not in OF_COLUMNS
    ]
    final = [_percent(one["final_accuracy"]) if one else "-" for one in (star, plain)]
    return (
        f"`{name}`", f"`{found['scenario']}`", str(found["ranks"]), _network(found), str(found["seeds"]),
        str(found["cores"]), ", ".join(FED[one["feeding"]] for one in (plain, star) if one),
        _percent(found["target_accuracy"]), _seconds(trained.get("straggler_free")), _seconds(plain), _seconds(star),
        _ratio(star and star["ratio"]), _ratio(star and star["bound_ratio"]), ", ".join(final),
        "-" if star is None or star["max_staleness"] is None else str(star["max_staleness"]), "; ".join(fixed),
    )  # fmt: skip


def _without_constants(
    head: Sequence[str], lines: Sequence[Sequence[str]], keep: Collection[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Take the columns out that are equal in all of several lines, except `keep`; also return these as a sentence."""
    columns = list(zip(*lines, strict=True))
    varied = [name in keep or len(lines) < 2 or len(set(own)) > 1 for name, own in zip(head, columns, strict=True)]
    same = [f"{name} {own[0]}" for name, own, kept in zip(head, columns, varied, strict=True) if not kept and own[0]]
    shorter = [tuple(itertools.compress(line, varied)) for line in lines]
    return tuple(itertools.compress(head, varied)), shorter, "; ".join(same)


def _network(found: Mapping[str, Any]) -> str:
    network = "" if found["network"] == "usual" else f" {found['network']}"
    unit, name_of_unit = (1e3, "kB") if found["model_bytes"] < 1e6 else (1e6, "MB")
    return f"{found['dataset']}{network}, {found['model_bytes'] / unit:.3g} {name_of_unit}"


def _what(name: str, found: Mapping[str, Any]) -> str:
    label = f"`{name}`" if name == found["scenario"] else f"`{name}` (`{found['scenario']}`)"
    return f"{label}, {found['ranks']} ranks, {_network(found)}"


def _faults(part: Sequence[str], rows: Rows) -> list[str]:
    """Return the table of trainings in which a process dies: the worst over all seeds and modes."""
    lines = []
    for name in part:
        found = rows[name]["figures"]
        times = [_after(found[key]) for key in ("recovery_s", "rebuild_s")]
        # The figures are of star_hvd's, and in a variant without stragglers nothing dies.
        struck = [f"`{mode}`" for mode in found["trained"] if mode not in (*PLAIN_VARIANTS, *FREE_VARIANTS)]
        label = f"{_what(name, found)}, {', '.join(struck)}"
        lost = "-" if found["lost_steps"] is None else str(found["lost_steps"])
        lines.append((label, str(found["cores"]), str(found["killed"]), *times, lost, _failed(found)))
    head = ("row", "cores", "killed in", "longest pause", "of it a new world", "steps lost", "jobs failed and retried")
    return _table(head, lines)


def _failed(found: Mapping[str, Any]) -> str:
    """Return how many jobs failed, by variant; a record of an earlier version does not say."""
    failed = found.get("failed_attempts")
    if failed is None:
        return "-"
    return ", ".join(f"`{name}` {count}" for name, count in failed.items() if count) or "0"


def _after(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s:.2f} s"


def _flat(part: Sequence[str], rows: Rows) -> list[str]:
    """Return a table of any other part: one line per figure."""
    lines = []
    for name in part:
        entry = rows[name]
        for key, value in entry["figures"].items():
            if key not in ("cores", "ranks"):
                ranks = entry["figures"].get("ranks", "")
                ranks = ranks if isinstance(ranks, int) else ""
                lines.append((f"`{name}`", str(ranks), str(entry["cores"]), f"`{key}`", _value(value)))
    return _table(("row", "ranks", "cores", "figure", "value"), lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"
    if isinstance(value, list):
        return " - ".join(map(_value, value))
    return "-" if value is None else str(value)


PARTS: dict[str, Callable[[Sequence[str], Rows], list[str]]] = {
    "scenarios": _training,
    "exact": _training,
    "networks": _training,
    "faults": _faults,
    "costs": _flat,
    "decisions": _flat,
}


def render(part: str, document: Mapping[str, Any]) -> str:
    """Return a part's table, with version, date and the rows that were not measured.

    Args:
        part: One of `PARTS`, or `all`: all of them, then the rows that only earlier versions were measured for.
        document: What `report_all` recorded.
    """
    if part != "all":
        return f"{_part(part, document)}\n\n{_origin(document)}"
    blocks = [*(f"**{name}**\n\n{_part(name, document)}" for name in PARTS), _origin(document)]
    for former in document.get("earlier", ()):
        parts = [name for name in PARTS if any(row.part == name and row.name in former["rows"] for row in ROWS)]
        blocks.append(f"### Of version `{former['version']}`\n\nNot measured since.")
        blocks += [f"**{name}**\n\n{_part(name, former, only=former['rows'])}" for name in parts]
        blocks.append(_origin(former))
    return "\n\n".join(blocks)


def with_earlier(document: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures together with the rows that were recorded before and are not among them, by version.

    Args:
        document: The figures of one version.
        recorded: What was recorded before, with what it had of earlier versions.
    """
    named = {row.name for row in ROWS} - {name for name, row in document["rows"].items() if _is_measured(row)}
    earlier = []
    for former in (recorded, *recorded.get("earlier", ())):
        rows = {name: row for name, row in former["rows"].items() if name in named and _is_measured(row)}
        named -= rows.keys()
        if rows and former["version"] != document["version"]:
            earlier.append({**{key: former[key] for key in ("version", "quick", "date")}, "rows": rows})
    return {**document, "earlier": earlier}


def _is_measured(row: Mapping[str, Any]) -> bool:
    return row.get("state") == "measured"


def _part(part: str, document: Mapping[str, Any], only: Collection[str] | None = None) -> str:
    rows = document["rows"]
    names = [row.name for row in ROWS if row.part == part and (only is None or row.name in only)]
    there = [name for name in names if _is_measured(rows.get(name, {}))]
    lines = PARTS[part](there, rows) if there else []
    former = {name for each in document.get("earlier", ()) for name in each["rows"]}
    reasons = {name: "an earlier version was" if name in former else "not run" for name in names}
    absent = [f"`{name}` ({rows.get(name, {}).get('reason', reasons[name])})" for name in names if name not in there]
    if absent:
        lines += ["", f"Not measured: {'; '.join(absent)}."]
    return "\n".join(lines).strip()


def _origin(document: Mapping[str, Any]) -> str:
    quick = ", quick: no figures" if document["quick"] else ""
    return f"Version `{document['version']}`, {document['date']}{quick}, by `python -m benchmarks.report_all`."


def block_names(text: str, page: str = "the page") -> list[str]:
    """Return the names of the tables that a page has markers for.

    Raises:
        MarkerError: A marker is unpaired or names an unknown table.
    """
    names: list[str] = []
    opened = ""
    for kind, name in MARKER.findall(text):
        if name not in (*PARTS, "all") or (kind == "begin") == bool(opened) or (kind == "end" and name != opened):
            raise MarkerError(f"{page}: the marker '{kind} {name}' is out of place; expected begin and end in pairs, "
                              f"each of {', '.join((*PARTS, 'all'))}")  # fmt: skip
        opened = name if kind == "begin" else ""
        names += [name] if kind == "begin" else []
    if opened:
        raise MarkerError(f"{page}: the marker 'begin {opened}' has no end")
    return names


def blocks_of(text: str) -> dict[str, str]:
    """Return the text between the markers, by table name."""
    return {
        name: text.split(BEGIN.format(name), 1)[1].split(END.format(name), 1)[0].strip() for name in block_names(text)
    }


def replace_blocks(page: Path, document: Mapping[str, Any]) -> bool:
    """Write the recorded figures between the page's markers; return whether the page changed."""
    before = page.read_text(encoding="utf-8")
    text = before
    for name in block_names(before, page.name):
        head, rest = text.split(BEGIN.format(name), 1)
        _, tail = rest.split(END.format(name), 1)
        text = f"{head}{BEGIN.format(name)}\n\n{render(name, document)}\n\n{END.format(name)}{tail}"
    if text != before:
        page.write_text(text, encoding="utf-8")
    return text != before
