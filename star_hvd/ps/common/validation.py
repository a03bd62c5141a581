"""Checks of messages between workers, servers and their owner, before they change any state.

A msgpack mapping may hold any types; a wrong one would fail later, when half of the message is applied. The functions
here raise `ChannelError` with the value received and what was expected.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from star_hvd.errors import ChannelError

__all__ = [
    "check_order",
    "check_presence",
    "check_products",
    "check_pull",
    "check_push",
    "check_push_result",
    "is_whole",
]

_MOST = 1 << 62
_MOST_REAL = 1e15  # Of a hyperparameter; integral ones have to fit 64 bits.
_MOST_COUNT = 1 << 20  # Gradients in one push, and ranks.
_MOST_NOTES = 4096


def is_whole(value: Any, least: int = 0, most: int = _MOST) -> bool:
    """Return whether a value is an int, not a bool, from `least` to `most`."""
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST


def _refuse(what: str, name: str, value: Any, expected: str) -> ChannelError:
    return ChannelError(f"{name} of {what} is {reprlib.repr(value)[:80]}; expected {expected}")


def check_push(meta: Mapping[str, Any], row_size: int | None = None) -> None:
    """Check the announcement of a push.

    Args:
        meta: The received mapping.
        row_size: Numbers in a row of hyperparameters, None where unknown.
    """
    for name, least, most in (("version", 0, _MOST), ("count", 1, _MOST_COUNT), ("own_steps", 0, _MOST)):
        if not is_whole(meta.get(name), least, most):
            raise _refuse("a push", name, meta.get(name), f"a whole number from {least}")
    weight, loss, row = meta.get("weight"), meta.get("loss"), meta.get("row")
    # NaN passes: the rule refuses such a weight in an answer to its rank, and a loss may be NaN.
    if type(weight) not in (int, float):
        raise _refuse("a push", "weight", weight, "a number")
    if loss is not None and type(loss) is not float:
        raise _refuse("a push", "loss", loss, "a number or nothing")
    if not _is_row(row, row_size):
        raise _refuse("a push", "row", row, f"{row_size} numbers or nothing")
    if not (meta.get("again") is None or is_whole(meta["again"])):
        raise _refuse("a push", "again", meta["again"], "a server's index or nothing")


def check_pull(meta: Mapping[str, Any]) -> None:
    """Check a request for parameters: the version its rank already has, and whether it wants only an answer."""
    if not (meta.get("known") is None or is_whole(meta["known"])):
        raise _refuse("a request", "known", meta["known"], "a version or nothing")
    if not isinstance(meta.get("empty", False), bool):
        raise _refuse("a request", "empty", meta["empty"], "true or false")


def check_presence(meta: Mapping[str, Any]) -> None:
    """Check a rank's report of itself."""
    if meta.get("what") not in ("absent", "present"):
        raise _refuse("a rank", "presence", meta.get("what"), "absent or present")


def _is_row(row: Any, size: int | None) -> bool:
    """Return whether a value is a row of hyperparameters or None; infinite ones are allowed."""
    if row is None:
        return True
    return isinstance(row, list) and (size is None or len(row) == size) and all(map(_is_real, row))


def _is_real(value: Any) -> bool:
    return type(value) is float and (not math.isfinite(value) or abs(value) < _MOST_REAL)


def check_products(products: Any) -> None:
    """Check the dot products of a push with the recent updates: three numbers, or None without the guard."""
    if products is None:
        return
    if not isinstance(products, list) or len(products) != 3 or not all(type(value) is float for value in products):
        raise _refuse("an arrival", "products", products, "three numbers or nothing")


def _is_push(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_whole(value[0], most=_MOST_COUNT) and is_whole(value[1])


def _is_part(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_push(value[:2]) and type(value[2]) is float


def check_order(order: Mapping[str, Any], row_size: int) -> None:
    """Check an order of the primary.

    Args:
        order: The received mapping.
        row_size: Numbers in a row of hyperparameters.
    """
    kind = order.get("op")
    if not is_whole(order.get("seq"), 1):
        raise _refuse("an order", "seq", order.get("seq"), "a whole number from 1")
    lists = {"update": ("parts", _is_part), "send": ("to", _is_push)}
    wholes = {
        "update": ("version",), "send": (), "drop": ("rank", "step"), "guard": (), "cut": (),
        "pull": ("rank", "request"), "state": ("rank", "request"),
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in wholes:
        raise _refuse("an order", "op", kind, f"one of {', '.join(wholes)}")
    for name in wholes[kind]:
        if not is_whole(order.get(name), most=_MOST_COUNT if name == "rank" else _MOST):
            raise _refuse(f"an order to {kind}", name, order.get(name), "a whole number from 0")
    if kind in lists:
        name, fits = lists[kind]
        values = order.get(name)
        if not isinstance(values, list) or not all(map(fits, values)):
            raise _refuse(f"an order to {kind}", name, values, "pushes")
    if kind == "update":
        _check_update(order, row_size)
    if kind == "send" and not (order.get("only") is None or is_whole(order["only"])):
        raise _refuse("an order to send", "only", order["only"], "a server's index or nothing")
    if kind == "pull":
        check_pull(order)
    if kind == "guard" and not isinstance(order.get("on"), bool):
        raise _refuse("an order to guard", "on", order.get("on"), "true or false")


def _check_update(order: Mapping[str, Any], row_size: int) -> None:
    row, send, lr_factor = order.get("row"), order.get("send"), order.get("lr_factor")
    if type(lr_factor) is not float or not 0.0 <= lr_factor < math.inf:
        raise _refuse("an order to update", "lr_factor", lr_factor, "a number from 0")
    if not _is_row(row, row_size):
        raise _refuse("an order to update", "row", row, f"{row_size} numbers or nothing")
    if not isinstance(send, list) or not all(map(_is_push, send)):
        raise _refuse("an order to update", "send", send, "pushes")


def check_push_result(result: Mapping[str, Any]) -> None:
    """Check the primary's result of a push."""
    if missing := {"kind", "version", "plan_id", "applied", "reason", "notes"} - result.keys():
        raise ChannelError(f"the result of a push lacks the fields {sorted(missing)}")
    kind, notes = result["kind"], result["notes"]
    if not isinstance(kind, str) or not isinstance(result["reason"], str):
        raise _refuse("the result of a push", "kind", kind, "a string, as of its reason")
    for name in ("version", "plan_id"):
        if not is_whole(result[name]):
            raise _refuse("the result of a push", name, result[name], "a whole number from 0")
    if not isinstance(result["applied"], bool):
        raise _refuse("the result of a push", "applied", result["applied"], "true or false")
    if not isinstance(notes, list) or len(notes) > _MOST_NOTES or not all(map(_is_note, notes)):
        raise _refuse("the result of a push", "notes", notes, f"at most {_MOST_NOTES} notes of updates and drops")


def _is_note(note: Any) -> bool:
    """Return whether a value is the note of an update or of a dropped push."""
    if not isinstance(note, dict) or not isinstance(ranks := note.get("ranks"), list) or not all(map(is_whole, ranks)):
        return False
    if note.get("kind") == "drop":
        return True
    lists: Sequence[Any] = (note.get("staleness"), note.get("damped"))
    if not all(isinstance(values, list) and len(values) == len(ranks) for values in lists):
        return False
    wholes = is_whole(note.get("version")) and is_whole(note.get("gradients"))
    numbers = all(_is_number(value) for values in lists for value in values)
    return wholes and numbers and (note.get("loss") is None or type(note["loss"]) is float)
