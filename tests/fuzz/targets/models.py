"""The predictor's files: the text of a head, which LightGBM would believe, and what `model.json` says."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from scheduler.learning.booster_text import check_text
from scheduler.learning.boosters import BoosterError
from scheduler.learning.features import FEATURES
from scheduler.learning.predictor import SHIPPED, ModelError, read_about
from tests.fuzz.mutate import damaged, damaged_bytes
from tests.fuzz.run import Target
from tests.fuzz.targets.logs import scratch_folder
from tests.support.model_edits import other_number

_TREES = 2


@functools.lru_cache(maxsize=1)
def _text() -> str:
    """The shipped head with its first trees alone."""
    head, _, rest = (SHIPPED / "reach.txt").read_text().partition("\n\n")
    lines = head.split("\n")
    sizes = [int(size) for size in lines[-1].partition("=")[2].split()[:_TREES]]
    lines[-1] = f"tree_sizes={' '.join(map(str, sizes))}"
    return "\n".join(lines) + f"\n\n{rest[: sum(sizes)]}end of trees\n\n"


def _head(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return other_number(_text(), draw).encode("latin-1", errors="replace")
    return damaged_bytes(_text().encode(), draw)


def _read_head(data: bytes) -> None:
    check_text(data.decode("utf-8", errors="replace"), FEATURES)


@functools.lru_cache(maxsize=1)
def _said() -> dict[str, Any]:
    return dict(json.loads((SHIPPED / "model.json").read_text()))


def _json(draw: random.Random) -> bytes:
    text = json.dumps(damaged(_said(), draw, draw.choice((1, 2))), default=repr).encode()
    return damaged_bytes(text, draw) if draw.random() < 0.4 else text


def _read_json(data: bytes) -> None:
    folder: Path = scratch_folder()
    (folder / "model.json").write_bytes(data)
    read_about(folder)


TARGETS = (
    Target("model-text", _head, _read_head, (BoosterError,), 1.0),
    Target("model-json", _json, _read_json, (ModelError,), 1.0),
)
