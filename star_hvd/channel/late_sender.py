"""Sends late gradients to the parent and receives its parameters in a background thread, while training continues.

There are two buffers: one gradient, or the sum of several, is in flight; gradients computed meanwhile are summed in the
other and sent with the next push. So a link that needs k steps per gradient carries the sum of k gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.locks import ordered_condition
from star_hvd.telemetry.wait_time import WaitTime
from star_hvd.threads import supervised

__all__ = ["LateSender", "Sent", "Sum"]

_SLICE_S = 1.0  # Longest wait in `flush` without another look at its deadline.


class Link(Protocol):
    """The part of `star_hvd.channel.late_push.ParentLink` used here."""

    def push(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Sum:
    """Gradients waiting to be sent: per bucket, in host memory, the sum of gradient * weight, then of the weights.

    Attributes:
        flats: The sums.
        version: Step of the parameters that the oldest gradient was computed on.
        weights: The sums of the weights, which buffers of bfloat16 round to 8 bits.
        count: Number of gradients.
    """

    flats: list[torch.Tensor]
    version: int
    weights: list[float]
    count: int = 1

    @property
    def weight(self) -> float:
        """Their weight, on the scale of the counters."""
        return sum(self.weights) / len(self.weights)


@dataclass(frozen=True, slots=True)
class Sent:
    """A push that the parent has received.

    Attributes:
        version: Step of the parameters that its oldest gradient was computed on.
        contained: First step whose parameters contain it.
        count: Number of gradients.
        time_s: Time from its start to the parent's answer.
    """

    version: int
    contained: int
    count: int
    time_s: float


class LateSender:
    """The thread and its buffers, see the module docstring. While nothing is in flight, the caller may use the link.

    Args:
        link: Connection to the parent.
        name: Name of the thread.
        receive: Gets the parent's parameters of a step or later; returns None if it has none within some time.
        streams: Returns a context in which the thread uses its own streams: the residual of `Compression.auto` is on a
            device, whose default stream is filled with the training's kernels.

    Attributes:
        unanswered: After `close`: the push that was in flight; the parent may have received it or not.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        receive: Callable[[int], Snapshot | None],
        streams: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._link, self._receive, self._streams = link, receive, streams
        self._changed = ordered_condition("LateSender._changed")
        self._waiting: Sum | None = None
        self.unanswered: Sum | None = None
        self._busy = self._closed = False
        self._finished = self._closes_link = False  # Whether the thread uses the link no more, or closes it at its end.
        self._discarded = False  # Whether the parameters that follow the push in flight are no longer wanted.
        self._error: Exception | None = None
        self._snapshot: Snapshot | None = None
        self._sent: list[Sent] = []
        self._thread = supervised(self._run, name)
        self._thread.start()

    # ---- training thread --------------------------------------------------------------------------------------

    def add(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float]) -> None:
        """Send the contents of these buffers, with their weights, as soon as the link is free; never waits."""
        host = [flat.detach().cpu() for flat in flats]
        with self._changed:
            self._check()
            if self._waiting is None:
                self._waiting = Sum([flat.clone() for flat in host], version, list(weights))
            else:
                for total, flat in zip(self._waiting.flats, host, strict=True):
                    total.add_(flat)
                self._waiting.weights = [a + b for a, b in zip(self._waiting.weights, weights, strict=True)]
                self._waiting.count += 1
            self._changed.notify_all()

    def take_results(self) -> tuple[list[Sent], Snapshot | None]:
        """Return the pushes the parent has received since the last call, and its newest parameters, if any."""
        with self._changed:
            self._check()
            sent, snapshot, self._sent, self._snapshot = self._sent, self._snapshot, [], None
        return sent, snapshot

    def discard(self) -> Sum | None:
        """Return the gradients that were not sent, and forget them, and the parameters that have come or are to come.

        A push in flight cannot be taken back.
        """
        with self._changed:
            unsent, self._waiting, self._snapshot, self._discarded = self._waiting, None, None, self._busy
            self._changed.notify_all()
        return unsent

    def flush(self, deadline_s: float) -> None:
        """Wait until everything is sent.

        Raises:
            DeadlineError: It was not sent within `deadline_s`.
        """
        wait = WaitTime(_SLICE_S, "the parent to take the late gradients of this rank", lasts=True)
        while not self._is_free(min(_SLICE_S, max(0.0, deadline_s - wait.passed_s))):
            if wait.count() >= deadline_s:
                raise DeadlineError(
                    f"the parent did not accept a late gradient within {deadline_s:g} s; see its log, or raise "
                    "Config.step_deadline_s"
                )

    def _is_free(self, longest_s: float) -> bool:
        """Wait at most that long until everything is sent; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._to_send, longest_s)
            self._check()
            return not self._to_send

    @property
    def _to_send(self) -> bool:
        return self._busy or self._waiting is not None

    def close(self, deadline_s: float) -> Sum | None:
        """Wait for the push in flight and end the thread. Return the gradients that were not sent.

        A thread that has not ended within `deadline_s` closes the link itself once it has.
        """
        with self._changed:
            self._closed = True
            unsent, self._waiting = self._waiting, None
            self._changed.notify_all()
        self._thread.join(deadline_s)
        with self._changed:
            self._closes_link |= not self._finished
        return unsent

    @property
    def closes_link(self) -> bool:
        """After `close`: whether the thread still used the link, and closes it itself; else that is the caller's."""
        return self._closes_link

    def _check(self) -> None:
        if self._error is not None:
            raise ChannelError(f"late gradients cannot be sent any more: {self._error}") from self._error

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._streams():
                self._send_all()
        finally:
            with self._changed:
                self._finished = True
                closes_link = self._closes_link
            if closes_link:
                self._link.close()

    def _send_all(self) -> None:
        try:
            while (job := self._next()) is not None:
                began_s = time.monotonic()
                contained = self._link.push(job.flats, job.version, job.weights)
                sent = Sent(job.version, contained, job.count, time.monotonic() - began_s)
                with self._changed:
                    self._sent.append(sent)
                    self.unanswered = None
                snapshot = self._receive(contained)
                with self._changed:
                    if not self._discarded:
                        self._snapshot = snapshot or self._snapshot
                    self._busy = self._discarded = False
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error, self._busy = error, False
                self._changed.notify_all()
                closed = self._closed
            if not closed:
                raise

    def _next(self) -> Sum | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            job, self._waiting = self._waiting, None
            self._busy = job is not None and not self._closed
            self.unanswered = job if self._busy else None
            return self.unanswered
