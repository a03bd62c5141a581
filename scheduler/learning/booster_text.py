"""Validation of the text of a LightGBM model before LightGBM loads it.

LightGBM does not validate such a file: a wrong child index, feature index or tree size makes it access memory out of
bounds and crash the process. Here every index is checked. Only models as `scheduler.learning.train` makes them are
accepted: one output, numerical splits, constant leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from scheduler.learning.boosters import BoosterError

__all__ = ["check_text"]

_HEAD = (
    "version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective", "feature_names",
    "feature_infos", "tree_sizes",
)  # fmt: skip
_FIXED = {"num_class": "1", "num_tree_per_iteration": "1", "label_index": "0"}
_VERSIONS = ("v3", "v4")
_OBJECTIVES = re.compile(
    r"(regression|regression_l1|huber|fair|quantile|mape|poisson|gamma|tweedie|binary|cross_entropy)"
    r"( [a-z_]+:[0-9.eE+-]+)*( sqrt)?"
)
_INFO = re.compile(r"none|\[[^\s:\[\]]+:[^\s:\[\]]+\]")
_OF_SPLITS = {
    "split_feature": int, "split_gain": float, "threshold": float, "decision_type": int, "left_child": int,
    "right_child": int, "internal_value": float, "internal_weight": float, "internal_count": int,
}  # fmt: skip
_OF_LEAVES = {"leaf_value": float, "leaf_weight": float, "leaf_count": int}
_TREE = ("num_leaves", "num_cat", *_OF_SPLITS, *_OF_LEAVES, "is_linear", "shrinkage")
_DECISIONS = (0, 2, 4, 6, 8, 10)
"""Numerical splits (bit 0), with the default side (bit 1) and the kind (bits 2 and 3) of missing values."""
_MOST_LEAVES, _MOST_COUNT = 1 << 16, (1 << 31) - 1
_WHOLE = re.compile(r"-?[0-9]{1,10}")
_REAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,4})?")
_END = "end of trees\n"


def check_text(text: str, features: Sequence[str]) -> None:
    """Check that LightGBM can safely load a text.

    Args:
        text: Contents of the model's file.
        features: Names of the feature columns.

    Raises:
        BoosterError: The text is invalid; the message says where, what was found and what was expected.
    """
    if not text.isascii():
        at = next(at for at, letter in enumerate(text) if not letter.isascii())
        raise BoosterError(f"character {at} is {text[at]!r}; expected ASCII text")
    head, separator, _ = text.partition("\n\n")
    if not separator:
        raise BoosterError("it has no empty line; expected one between head and trees")
    sizes = _check_head(head, features)
    at = len(head) + len(separator)
    for number, size in enumerate(sizes):
        block = text[at : at + size]
        try:
            _check_tree(block, number, len(features))
        except BoosterError as error:
            raise BoosterError(f"tree {number} of {len(sizes)}: {error}") from None
        at += size
    if not text.startswith(_END, at):
        raise BoosterError(f"after its trees is {text[at : at + 20]!r}; expected {_END!r}")


def _check_head(head: str, features: Sequence[str]) -> list[int]:
    """Check the head; returns the sizes of the trees."""
    lines = head.split("\n")
    if lines[0] != "tree":
        raise BoosterError(f"its first line is {lines[0][:40]!r}; expected 'tree'")
    values = _values(lines[1:], _HEAD)
    for name, expected in _FIXED.items():
        if values[name] != expected:
            raise BoosterError(f"{name} is {values[name][:40]!r}; expected {expected}")
    if values["version"] not in _VERSIONS:
        raise BoosterError(f"version is {values['version'][:40]!r}; expected one of {', '.join(_VERSIONS)}")
    if not _OBJECTIVES.fullmatch(values["objective"]):
        raise BoosterError(f"objective is {values['objective'][:40]!r}; expected one with one output")
    if _whole(values["max_feature_idx"], "max_feature_idx") != len(features) - 1:
        raise BoosterError(f"max_feature_idx is {values['max_feature_idx']}; expected {len(features) - 1}")
    if values["feature_names"].split(" ") != list(features):
        raise BoosterError("feature_names are other features than this version's")
    infos = values["feature_infos"].split(" ")
    if len(infos) != len(features) or not all(map(_INFO.fullmatch, infos)):
        raise BoosterError(f"feature_infos has {len(infos)} entries or invalid ones; expected {len(features)} ranges")
    sizes = [_whole(size, "tree_sizes") for size in values["tree_sizes"].split(" ")]
    if min(sizes) < 1:
        raise BoosterError(f"tree_sizes has {min(sizes)}; expected sizes above 0")
    return sizes


def _values(lines: Sequence[str], expected: Sequence[str]) -> dict[str, str]:
    """Values of lines `name=value` by name."""
    values: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals or name not in expected or name in values:
            raise BoosterError(f"it has the line {line[:40]!r}; expected each of {', '.join(expected)} once")
        values[name] = value
    missing = [name for name in expected if name not in values]
    if missing:
        raise BoosterError(f"it lacks {', '.join(missing)}")
    return values


def _check_tree(block: str, number: int, n_features: int) -> None:
    lines = block.rstrip("\n").split("\n")
    if lines[0] != f"Tree={number}" or not block.endswith("\n\n"):
        raise BoosterError(f"it begins with {lines[0][:40]!r} and ends with {block[-4:]!r}; is tree_sizes right?")
    values = _values(lines[1:], _TREE)
    for name in ("num_cat", "is_linear"):
        if values[name] != "0":
            raise BoosterError(f"{name} is {values[name][:40]!r}; expected 0")
    leaves = _whole(values["num_leaves"], "num_leaves")
    if not 1 <= leaves <= _MOST_LEAVES:
        raise BoosterError(f"num_leaves is {leaves}; expected 1 to {_MOST_LEAVES}")
    _number(values["shrinkage"], "shrinkage")
    for name, kind in _OF_SPLITS.items():
        _check_list(name, values[name], kind, leaves - 1)
    for name, kind in _OF_LEAVES.items():
        # A tree of a single leaf has only its value and, in some versions, its count.
        _check_list(name, values[name], kind, leaves, may_lack=leaves == 1 and name != "leaf_value")
    if leaves == 1:
        return
    features = [int(value) for value in values["split_feature"].split()]
    if not 0 <= min(features) <= max(features) < n_features:
        raise BoosterError(f"split_feature has {min(features)} to {max(features)}; expected 0 to {n_features - 1}")
    decisions = {int(value) for value in values["decision_type"].split()}
    if not decisions <= set(_DECISIONS):
        raise BoosterError(f"decision_type has {sorted(decisions)[:9]}; expected some of {_DECISIONS}: no categories")
    _check_shape(*([int(value) for value in values[name].split()] for name in ("left_child", "right_child")))


def _check_list(name: str, text: str, kind: type, count: int, *, may_lack: bool = False) -> None:
    values = text.split(" ") if text else []
    if len(values) != count and not (may_lack and not values):
        raise BoosterError(f"{name} has {len(values)} values; expected {count}")
    for value in values:
        if kind is int:
            _whole(value, name)
        else:
            _number(value, name)


def _check_shape(left: Sequence[int], right: Sequence[int]) -> None:
    """Check that every split except the first, and every leaf, is the child of one split, so that it is a tree.

    Leaf i is written as -i - 1. Children come after their split, so there are no cycles.
    """
    count = len(left)
    for split, children in enumerate(zip(left, right, strict=True)):
        for child in children:
            if not (split < child < count or -count - 1 <= child < 0):
                raise BoosterError(
                    f"split {split} has the child {child}; expected a later split, below {count}, or a leaf, "
                    f"-{count + 1} to -1"
                )
    found = sorted([*left, *right])
    if len(set(found)) != len(found):
        raise BoosterError("a split or a leaf is the child of two splits; expected a tree")


def _whole(text: str, name: str) -> int:
    if not _WHOLE.fullmatch(text) or abs(int(text)) > _MOST_COUNT:
        raise BoosterError(f"{name} has {text[:40]!r}; expected whole numbers")
    return int(text)


def _number(text: str, name: str) -> float:
    if not _REAL.fullmatch(text) or not math.isfinite(float(text)):
        raise BoosterError(f"{name} has {text[:40]!r}; expected finite numbers")
    return float(text)
