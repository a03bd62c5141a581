"""Leases of a span, as a coordinator sends them."""

from __future__ import annotations

from scheduler.rules.runs import run_of
from star_hvd.channel.messages.leases import Lease

__all__ = ["lease"]


def lease(loader: int, epoch: int, start: int, stop: int, *, over: bool = False) -> Lease:
    """Positions `start` to `stop` in answer to a request; none if they are equal."""
    return Lease(loader, epoch, list(run_of((start, stop))) if stop > start else [], over)
