"""Doubles of what sends control messages."""

from __future__ import annotations

from collections import deque

from star_hvd.channel.messages.base import Message, Send

__all__ = ["sending_to"]


def sending_to(queue: list[Message] | deque[Message]) -> Send:
    """Return a function that puts every message into `queue`, urgent or not."""

    def send(message: Message, *, urgent: bool = True) -> None:
        queue.append(message)

    return send
