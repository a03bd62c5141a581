"""Apply unified diffs in pure Python: all of them or none.

The build of Horovod needs only this, and slim images have neither `patch` nor `git`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path


class PatchError(Exception):
    """A patch is malformed or does not apply; nothing was changed."""


def apply_hunk(lines: list[str], hunk: list[str], start: int, shift: int, where: str) -> int:
    """Replace the hunk's old lines by its new ones in `lines`.

    Args:
        start: index where the hunk says its old lines begin.
        shift: offset in lines caused by earlier hunks.

    Returns: the offset in lines for everything after the hunk.
    Raises PatchError if the old lines are not found.
    """
    old = [line[1:] for line in hunk if line[0] in " -"]
    new = [line[1:] for line in hunk if line[0] in " +"]
    expected = max(start + shift, 0)
    candidates = range(len(lines) - len(old) + 1)
    for at in sorted(candidates, key=lambda index: abs(index - expected)):
        if lines[at : at + len(old)] == old:
            lines[at : at + len(old)] = new
            return at - start + len(new) - len(old)
    there = [*lines[expected : expected + len(old)], *[""] * len(old)]
    at = next(index for index, want in enumerate(old) if there[index] != want)
    got = there[at].rstrip() if there[at] else "no such line"
    raise PatchError(
        f"{where}: got {got!r} as line {expected + at + 1}, expected "
        f"{old[at].rstrip()!r}, and found the block nowhere else. Make the patch anew for this source; "
        f"nothing was changed"
    )


def parse_patch(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (file, index of the first old line, hunk lines) for each hunk of a unified diff."""
    target = ""
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        if line.startswith("+++ "):
            target = line[4:].split("\t")[0].strip().partition("/")[2]
        header = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
        if not header:
            continue
        first = int(header[1])
        old_left, new_left = (int(count or 1) for count in (header[2], header[3]))
        hunk: list[str] = []
        while old_left > 0 or new_left > 0:
            # Some editors strip the space that represents an empty context line.
            body = next(lines, "").replace("\r\n", "\n") or "?"
            body = " \n" if body == "\n" else body
            if body[0] not in " +-":
                raise PatchError(f"damaged patch: hunk {line.strip()!r} of {target} ends early; make it anew")
            old_left -= body[0] in " -"
            new_left -= body[0] in " +"
            hunk.append(body)
        yield target, max(first - 1, 0), hunk


def apply_patches(root: Path, patches: Sequence[Path]) -> list[str]:
    """Apply unified diffs with a/ and b/ prefixes, in order: all of them or none.

    Returns: the changed files, relative to `root`.
    Raises PatchError if one does not apply; then no file was changed.
    """
    changed: dict[str, list[str]] = {}
    for patch in patches:
        shifts: dict[str, int] = {}
        hunks = list(parse_patch(patch.read_text(encoding="utf-8")))
        if not hunks:
            raise PatchError(f"{patch.name}: got no hunk, expected a unified diff; make it anew or remove it")
        for name, start, hunk in hunks:
            path = root / name
            if name == "dev/null" or not path.resolve().is_relative_to(root.resolve()):
                raise PatchError(f"{patch.name}: got the path {name!r}, expected one inside the source tree")
            if name not in changed:
                content = path.read_text(encoding="utf-8") if path.is_file() else ""
                changed[name] = content.splitlines(keepends=True)
            where = f"{patch.name} does not apply to {name}"
            shifts[name] = apply_hunk(changed[name], hunk, start, shifts.get(name, 0), where)
    for name, lines in changed.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(lines), encoding="utf-8")
    return sorted(changed)
