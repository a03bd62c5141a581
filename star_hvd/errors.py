"""One tree for run-time errors; bad arguments from the user are `ValueError`s instead."""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError

__all__ = ["ChannelError", "DeadlineError", "RankLostError", "ReplicaMismatchError", "StarError"]


class StarError(RuntimeError):
    """Something went wrong while training ran. The message says what was got, expected and what to do."""


class ChannelError(StarError):
    """A peer could not be reached, or sent something that cannot be read."""


class DeadlineError(StarError):
    """A wait took longer than its deadline."""


class ReplicaMismatchError(StarError):
    """Parameters differ between ranks where they must be equal."""


class RankLostError(HorovodInternalError):  # type: ignore[misc]  # Horovod is untyped.
    """A collective failed because a rank is gone; the message names it.

    It is a `HorovodInternalError`, so `hvd.elastic.run` recovers from it exactly as from Horovod's own.
    """
