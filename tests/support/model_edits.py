"""Edited copies of a predictor's model, with errors as from a bad disk, a bad merge or an attacker."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

from scheduler.learning.predictor import HEADS

__all__ = ["edited"]

_NUMBERS = ("-1", "0", "7", "99", "-99", "4095", "2147483647", "-2147483648", "4503599627370496", "nan", "inf", "1e309",
            "", "x")  # fmt: skip


def edited(source: Path, target: Path, seed: int) -> str:
    """Copy a model with one or more edits; hashes are updated in nine of ten cases. Return a description."""
    draw = random.Random(seed)
    shutil.copytree(source, target)
    head = draw.choice(HEADS)
    text = (target / f"{head}.txt").read_text()
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        kind = draw.choice(tuple(_KINDS))
        text = _KINDS[kind](text, draw)
        done.append(kind)
    raw = text.encode("latin-1", errors="replace")
    (target / f"{head}.txt").write_bytes(raw)
    if seed % 10:
        about = json.loads((target / "model.json").read_text())
        about["heads"][head]["sha256"] = hashlib.sha256(raw).hexdigest()
        (target / "model.json").write_text(json.dumps(about))
    return f"{head}: {', '.join(done)}"


def _byte(text: str, draw: random.Random) -> str:
    end = text.find("end of trees")
    at = draw.randrange(max(1, end if end > 0 else len(text)))
    return text[:at] + chr(draw.randrange(256)) + text[at + 1 :]


def _without_line(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    del lines[draw.randrange(len(lines))]
    return "\n".join(lines)


def _line_twice(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    return "\n".join(lines[: at + 1] + lines[at:])


def other_number(text: str, draw: random.Random) -> str:
    """Replace a number in a line of numbers; in half of the cases by one of equal length, so that sizes still match."""
    lines = text.split("\n")
    name = draw.choice(("left_child", "right_child", "split_feature", "num_leaves", "decision_type", "tree_sizes",
                        "leaf_value", "threshold", "num_cat", "max_feature_idx", "is_linear"))  # fmt: skip
    places = [at for at, line in enumerate(lines) if line.startswith(f"{name}=")]
    if not places:
        return _byte(text, draw)
    at = draw.choice(places)
    values = lines[at].partition("=")[2].split(" ")
    which = draw.randrange(len(values))
    same = "".join(draw.choice("0123456789") for _ in values[which])
    values[which] = draw.choice((same, draw.choice(_NUMBERS)))
    lines[at] = f"{name}={' '.join(values)}"
    return "\n".join(lines)


def _swapped(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(max(1, len(text)))]


_KINDS = {
    "a byte": _byte,
    "a line less": _without_line,
    "a line twice": _line_twice,
    "a number": other_number,
    "another number": other_number,
    "two lines swapped": _swapped,
    "cut": _cut,
}
