"""What a worker or a shard cannot have said: refused before a server changes anything."""

from __future__ import annotations

from typing import Any

from star_hvd.errors import ChannelError

__all__ = ["check_arrival", "check_push"]

_MOST = 1 << 53


def check_push(meta: dict[str, Any], row_size: int, n_servers: int) -> dict[str, Any]:
    """The announcement of a push, as it came.

    Args:
        meta: What came.
        row_size: Numbers in a row of hyperparameters.
        n_servers: Number of shards.

    Raises:
        ChannelError: A value is missing, of another type, or out of range.
    """
    # Numbers that make no sense here but could come of a worker's mistake are the rule's to refuse, with an answer.
    for name in ("version", "count", "own_steps"):
        if type(meta.get(name)) is not int or not -_MOST < meta[name] < _MOST:
            raise ChannelError(f"{name} of a push is no whole number below 2^53")
    if not _number(meta.get("weight")):
        raise ChannelError(f"weight of a push is a {type(meta.get('weight')).__name__}; expected a number")
    loss, row, again = meta.get("loss"), meta.get("row"), meta.get("again")
    if not (loss is None or _number(loss)):  # Any number: a diverging job has infinite ones.
        raise ChannelError(f"loss of a push is a {type(loss).__name__}; expected a number or none")
    if row is not None and not (isinstance(row, list) and len(row) == row_size and all(map(_number, row))):
        raise ChannelError(f"a push has a row of hyperparameters that is not {row_size} numbers")
    if not (again is None or (type(again) is int and 0 <= again < n_servers)):
        raise ChannelError(f"a push is sent again to shard {again!r}; there are {n_servers}")
    return meta


def check_arrival(meta: dict[str, Any], world_size: int) -> tuple[int, list[float] | None]:
    """The rank whose push is in at a shard, and the shard's products.

    Raises:
        ChannelError: A value is missing or out of range.
    """
    rank, products = meta.get("rank"), meta.get("products")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ChannelError(f"a push of rank {rank!r} has arrived; there are {world_size}")
    if products is not None and not (
        isinstance(products, list) and len(products) == 3 and all(map(_number, products))
    ):
        raise ChannelError("a push has arrived with products that are not three numbers")
    return rank, products


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_MOST < value < _MOST)
