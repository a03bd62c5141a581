"""How valid input is damaged: bytes, and the plain values that they stand for."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import msgpack

__all__ = ["damaged", "damaged_bytes", "odd", "packed", "weird"]

_INTS = (0, 1, -1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, (1 << 52) - 1, 1 << 52,
         -(1 << 52), (1 << 53) - 1, 1 << 53, (1 << 63) - 1, -(1 << 63))  # fmt: skip
_MORE_INTS = (1 << 63, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.0, 0.1, -1.0, 5e-324, 1e-300, 1e300, 1.7976931348623157e308, math.nan, math.inf, -math.inf)
_TEXTS = ("", "x", "sync", "partial(3)", "0", "é", "\x00", "a" * 300, "../../etc/passwd", "nan", "1e400", "{}", "%s",
          "torch.float32", "float32", "nn", "params", "moved")  # fmt: skip


def weird(draw: random.Random) -> Any:
    """A value of any type, often one that programs stumble over."""
    return draw.choice(
        (
            lambda: draw.choice(_INTS),
            lambda: draw.choice(_MORE_INTS),
            lambda: draw.randrange(-3, 40),
            lambda: draw.choice(_FLOATS),
            lambda: draw.choice(_TEXTS),
            lambda: None,
            lambda: draw.random() < 0.5,
            lambda: draw.randbytes(draw.randrange(5)),
            lambda: [odd(draw) for _ in range(draw.randrange(4))],
            lambda: {draw.choice(_TEXTS): odd(draw) for _ in range(draw.randrange(3))},
            lambda: _nested(draw.choice((3, 30, 400))),
        )
    )()


def odd(draw: random.Random) -> Any:
    """A plain value, often one that programs stumble over."""
    return draw.choice((*_INTS, *_FLOATS, None, True, "x", ""))


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def damaged(value: Any, draw: random.Random, times: int = 1) -> Any:
    """A copy with some places changed: another value, a field less, more or twice, an order changed."""
    value = copy.deepcopy(value)
    for _ in range(times):
        value = _damage(value, draw)
    return value


def _damage(value: Any, draw: random.Random) -> Any:
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.75:
            value[at] = _damage(value[at], draw)
        elif kind < 0.83:
            del value[at]
        elif kind < 0.91:
            value.insert(at, value[draw.randrange(len(value))])
        else:
            draw.shuffle(value)
        return value
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.8:
            value[key] = _damage(value[key], draw)
        elif kind < 0.9:
            del value[key]
        else:
            value[draw.choice(_TEXTS)] = weird(draw)
        return value
    if isinstance(value, bytes) and value and draw.random() < 0.8:
        return damaged_bytes(value, draw)
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 2, -2, 256))
    if isinstance(value, float) and draw.random() < 0.4:
        return draw.choice(_FLOATS)
    return weird(draw)


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some of them flipped, left out, repeated, cut off or put in."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = draw.choice((0, 1, 0x7F, 0x80, 0xC0, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF))
        elif kind == 2:
            del found[at : at + draw.choice((1, 2, 8))]
        elif kind == 3:
            found[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
        elif kind == 4:
            del found[at:]
        else:
            found[at:at] = found[at : at + draw.choice((1, 4, 16))]
    return bytes(found)


def packed(value: Any) -> bytes:
    """As msgpack; what it cannot hold, as a number of more than 64 bits, becomes a text."""
    try:
        return bytes(msgpack.packb(value))
    except (OverflowError, ValueError, TypeError):
        return bytes(msgpack.packb(_held(value)))


def _held(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (list, tuple)) and depth < 400:
        return [_held(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 400:
        return {str(key)[:50]: _held(item, depth + 1) for key, item in value.items()}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    return value if isinstance(value, (int, float, str, bytes)) or value is None else str(value)[:50]
