"""The hierarchy of run-time errors; invalid arguments of the user raise `ValueError` instead."""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError

__all__ = ["ChannelError", "DeadlineError", "RankLostError", "ReplicaMismatchError", "StarError"]


class StarError(RuntimeError):
    """Base class of errors during training. Messages state what was received, what was expected and what to do."""


class ChannelError(StarError):
    """A peer is unreachable, or sent an invalid message."""


class DeadlineError(StarError):
    """A wait took longer than its deadline."""


class ReplicaMismatchError(StarError):
    """Parameters differ between ranks where they must be equal."""


class RankLostError(HorovodInternalError):  # type: ignore[misc]  # Horovod is untyped.
    """A collective failed because a rank is gone; the message names it.

    It is a `HorovodInternalError`, so `hvd.elastic.run` recovers from it exactly as from Horovod's own.
    """
