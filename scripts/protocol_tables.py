#!/usr/bin/env python3
"""Write or check the tables of docs/protocols.md (messages, and a rank's switches), generated from the code.

    python scripts/protocol_tables.py            write them
    python scripts/protocol_tables.py --check    exit status 1 if the page is out of date

Kind, fields and meaning of a control message come from its dataclass and docstring; senders and receivers are the
modules that construct it and those that distinguish it (`case`, `isinstance`, a table `HANDLERS`). The sources are
parsed, not imported: only the standard library is needed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/protocols.md")
PACKAGE = Path("star_hvd")
MESSAGES = PACKAGE / "channel" / "messages"
WIRE = PACKAGE / "ps" / "common" / "wire.py"
SWITCH = PACKAGE / "modes" / "switch_protocol.py"
DISPATCHER = "runtime/runtime.py"
"""Where a rank gets the coordinator's messages."""

RECORDS = {"StepTimes": Path("scheduler/records.py")}
"""Records inside messages, whose fields are sent in their place."""

SERVER: dict[str, tuple[str, str]] = {
    "HELLO": ("worker -> server", "opens a connection"),
    "PUSH": ("worker -> shard 0", "announces a gradient: version, weight, count, hyperparameters, loss"),
    "CHUNK": ("worker -> its server", "a part of a chunk of that gradient"),
    "PULL": ("worker -> shard 0", "asks for the parameters of one version, but for chunks of one that it has"),
    "STATE": ("worker -> shard 0", "asks for parameters and optimizer state of one version"),
    "PRESENCE": ("worker -> shard 0", "this worker is absent, or back"),
    "PARAMS": ("server -> worker", "a part of a chunk of parameters, answer to a push"),
    "PULLED": ("server -> worker", "the same, answer to `PULL`; empty for a chunk that is not sent"),
    "STATED": ("server -> worker", "a part of a chunk's whole record, answer to `STATE`"),
    "VERDICT": ("shard 0 -> worker", "what became of the push: `params`, `dropped`, `moved` or `error`, with notes"),
    "ORDER": ("shard 0 -> shard", "one entry of the log: `update`, `send`, `drop`, `cut`, ...; see below"),
    "ARRIVED": ("shard -> shard 0", "all of this shard's chunks of a push are in"),
    "DONE": ("shard -> shard 0", "all orders up to this number are carried out and mirrored"),
    "JOIN": ("shard -> shard 0", "a shard has come, or come back, since then, and has these orders already"),
}
"""Way and meaning of each member of `Kind`; the names and numbers are compared with the code."""


@dataclass(frozen=True)
class Control:
    """One control message, as defined by its class."""

    name: str
    kind: str
    fields: tuple[str, ...]
    meaning: str
    file: str


def control_messages(root: Path) -> list[Control]:
    """Return all classes with the decorator `message_kind`, in the order of the files and of the classes in them."""
    found = []
    for path in sorted((root / MESSAGES).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(d) == "message_kind" for d in node.decorator_list):
                found.append(_control(node, path.relative_to(root).as_posix(), root))
    return found


def _record_fields(root: Path, record: str) -> list[str]:
    """Return the field names of a record that messages contain."""
    tree = ast.parse((root / RECORDS[record]).read_text(encoding="utf-8"))
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record)
    return [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]


def _control(node: ast.ClassDef, file: str, root: Path) -> Control:
    kind, fields = "", []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign):
            continue
        name = ast.unparse(item.target)
        if name == "kind":
            kind = ast.literal_eval(item.value) if item.value is not None else ""
        elif ast.unparse(item.annotation) in RECORDS:
            fields += [f"{name}.{part}" for part in _record_fields(root, ast.unparse(item.annotation))]
        else:
            fields.append(name if item.value is None else f"{name} = {ast.unparse(item.value)}")
    text = ast.get_docstring(node) or ""
    if not kind or not text:
        raise SystemExit(f"{file}: message {node.name} has no kind or no docstring; expected both")
    return Control(node.name, kind, tuple(fields), " ".join(text.split("\n\n")[0].split()), file)


def uses(root: Path, names: set[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return, per message, the modules that construct it and those that distinguish it."""
    makers: dict[str, set[str]] = {name: set() for name in names}
    takers: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if (root / MESSAGES) in path.parents:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.asname or alias.name: alias.name for node in ast.walk(tree)
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("star_hvd.channel.messages")
                    for alias in node.names}
        if not imported:
            continue
        file = path.relative_to(root / PACKAGE).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for name in _named(node.func, imported, names):
                    makers[name].add(file)
            for name in _distinguished(node, tree, imported, names):
                takers[name].add(file)
    return makers, takers


def _distinguished(node: ast.AST, tree: ast.Module, imported: Mapping[str, str], names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.MatchClass):
        yield from _named(node.cls, imported, names)
    elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "HANDLERS":
        for key in node.value.keys if isinstance(node.value, ast.Dict) else []:
            yield from _named(key, imported, names) if key is not None else ()
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        given = node.args[1]
        constants = {ast.unparse(a.targets[0]): a.value for a in tree.body if isinstance(a, ast.Assign)}
        given = constants.get(ast.unparse(given), given)
        for one in given.elts if isinstance(given, ast.Tuple) else [given]:
            yield from _named(one, imported, names)


def _named(node: ast.expr, imported: Mapping[str, str], names: set[str]) -> Iterator[str]:
    """Yield the message that an expression names: `Arrive`, or `messages.Arrive` of an imported module."""
    if isinstance(node, ast.Name):
        found = imported.get(node.id, "")
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
        found = node.attr
    else:
        return
    if found in names:
        yield found


def _modules(files: set[str]) -> str:
    return ", ".join(f"`{file}`" for file in sorted(files)) or "-"


def _way(makers: set[str], takers: set[str]) -> str:
    """Return the direction: up is to the coordinator, down to the ranks; `up, down` is forwarded by the coordinator."""
    decided = {file for file in makers if file.startswith("coordinator/")}
    up = bool(makers - decided) and any(file.startswith("coordinator/") for file in takers)
    down = bool(decided) or DISPATCHER in takers
    return "up, down" if up and down else "up" if up else "down" if down else "unused"


def control_table(root: Path) -> list[str]:
    """Return the table of control messages."""
    messages = control_messages(root)
    makers, takers = uses(root, {each.name for each in messages})
    lines = ["| kind | class | way | made in | acted on in | fields | meaning |", "|---|---|---|---|---|---|---|"]
    for each in messages:
        fields = ", ".join(f"`{field}`" for field in each.fields) or "-"
        way = _way(makers[each.name], takers[each.name])
        acting = takers[each.name]
        if way == "up":  # Elsewhere they are only sent, and logged.
            acting = {file for file in acting if file.startswith("coordinator/")}
        ends = f"{_modules(makers[each.name])} | {_modules(acting)}"
        meaning = each.meaning.replace("|", "\\|")
        lines.append(f"| `{each.kind}` | `{each.name}` | {way} | {ends} | {fields} | {meaning} |")
    return lines


def server_table(root: Path) -> list[str]:
    """Return the table of messages between workers and servers."""
    tree = ast.parse((root / WIRE).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Kind")
    kinds = {ast.unparse(a.targets[0]): ast.literal_eval(a.value) for a in body if isinstance(a, ast.Assign)}
    if kinds.keys() != SERVER.keys():
        raise SystemExit(f"{WIRE} has the kinds {sorted(kinds)}; expected those of SERVER here, {sorted(SERVER)}")
    lines = ["| number | kind | way | meaning |", "|---|---|---|---|"]
    return lines + [f"| {number} | `{name}` | {' | '.join(SERVER[name])} |" for name, number in kinds.items()]


def state_table(root: Path) -> list[str]:
    """Return the table of a plan's states on a rank."""
    tree = ast.parse((root / SWITCH).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PlanState")
    found = [(ast.unparse(a.targets[0]), ast.literal_eval(a.value)) for a in body if isinstance(a, ast.Assign)]
    return ["| state | the plan is |", "|---|---|", *(f"| {name} | {text} |" for name, text in found)]


def transition_table(root: Path) -> list[str]:
    """Return the transition table of the state machine of a rank's switches."""
    tree = ast.parse((root / SWITCH).read_text(encoding="utf-8"))
    rows = next(
        node.value.elts
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRANSITIONS"
        and isinstance(node.value, ast.Tuple)
    )
    lines = ["| state | event | next state | may instruct | when |", "|---|---|---|---|---|"]
    for row in rows:
        if not isinstance(row, ast.Call) or len(row.args) != 5:
            raise SystemExit(f"{SWITCH}: a row of TRANSITIONS is {ast.unparse(row)}; expected five arguments")
        states, event, to, instructions, when = row.args
        names = ", ".join(f"`{name}`" for name in _members(instructions)) or "-"
        cells = [", ".join(_members(states)), f"`{ast.unparse(event)}`", ", ".join(_members(to)), names]
        lines.append(f"| {' | '.join([*cells, ast.literal_eval(when) or '-'])} |")
    return lines


def _members(node: ast.expr) -> list[str]:
    """Return the names in a tuple: `A` of `(S.A,)`."""
    return [ast.unparse(each).removeprefix("S.") for each in node.elts] if isinstance(node, ast.Tuple) else []


def updated(page: str, root: Path) -> str:
    """Return the page with its tables generated from the current code."""
    tables = {
        "control": control_table(root), "server": server_table(root), "states": state_table(root),
        "transitions": transition_table(root),
    }
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{PAGE} lacks the markers {begin} and {end}")
        page = "\n".join([head + begin, "", *table, "", end]) + tail
    return page


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description="the tables of docs/protocols.md")
    parser.add_argument("--check", action="store_true", help="do not write; exit status 1 where it is out of date")
    check = parser.parse_args(arguments).check
    page = root / PAGE
    old = page.read_text(encoding="utf-8")
    new = updated(old, root)
    if new == old:
        return 0
    if check:
        print(f"{PAGE} is out of date; run python scripts/protocol_tables.py", file=sys.stderr)
        return 1
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
