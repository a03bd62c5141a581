"""How the gradients of a step travel: in which order, and whether the program goes on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transmission", "order_of"]


@dataclass(frozen=True, slots=True)
class Transmission:
    """What is decided about the reductions of `sync`; the same on all ranks.

    Attributes:
        overlap: Whether `step()` returns before they have ended.
        order: Buckets in the order in which they are submitted; empty for that of backward, without holding any back.
    """

    overlap: bool
    order: tuple[int, ...] = ()


def order_of(buckets: int) -> tuple[int, ...]:
    """An order that all ranks know without a word, for links on which reductions take about twice backward's time.

    Backward fills bucket 0 first and the last bucket at its end; the next forward pass needs them the other way round.
    Of what backward has filled, every second bucket goes at once, so that the link is busy. When backward ends, the
    rest goes in the order in which forward needs it. So what is reduced last lies evenly among what was reduced long
    ago, and little of the forward pass is left when it comes: the bound of any order is the bytes' time on the link.
    """
    during = range(0, buckets - 1, 2)
    return (*during, *(index for index in reversed(range(buckets)) if index not in during))
