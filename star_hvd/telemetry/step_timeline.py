"""Samples steps: when their buckets are transferred, and how long the program waits for them.

Per bucket: when its gradient was complete, when it was submitted, when its reduction (or reply) arrived, how long the
training thread waited for it, and its bytes. What was submitted in one step may arrive in the next (`overlap=True`,
averaging in the background); a sample ends once everything has arrived, at the latest at the end of the next step.

Any thread may note an event: events are appended to a list, which the training thread reads when the sample ends. While
no step is sampled, a note costs one attribute access.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["EVERY", "BucketTimes", "StepSample", "StepTimeline", "TimedClient", "TimedCollective", "exposure"]

EVERY = 32
"""One in this many steps is sampled: the same steps on all ranks, so that samples can be compared."""

_FIRST = 8  # First sampled step, after the warm-up.
_KEPT = 16  # Latest samples kept in memory.
_MOST_STEPS = 64  # Maximum steps in a sample of `local`, which ends with an averaging.
_READY, _SUBMITTED, _ARRIVED, _WAITED = range(4)
_BUCKET = re.compile(r"\.[a-z](\d+)")  # In the name of a reduction: gradients, parameters or state of a bucket.

Clock = Callable[[], float]


@dataclass(slots=True)
class BucketTimes:
    """Times of one bucket in seconds since the sample's start, None if unknown. Index -1: the header, other state."""

    index: int
    bytes: int = 0
    ready_s: float | None = None
    submitted_s: float | None = None
    arrived_s: float | None = None
    waited_s: float = 0.0


@dataclass(slots=True)
class StepSample:
    """One sampled step.

    Attributes:
        step: Its number.
        mode: Label of the plan.
        means: What hides communication: `background`, `overlap`, or empty.
        began_s: Start, on the clock.
        interval_s: Time until the start of the next step; in `local`, of all steps up to an averaging.
        steps: Number of steps in that time.
        exposed_s: How long the training thread waited in that time.
        buckets: The step's buckets, in order of submission.
        waits: Index of the bucket, start and end of every wait, in seconds since the sample's start.
    """

    step: int
    mode: str
    means: str
    began_s: float
    interval_s: float = 0.0
    steps: int = 1
    exposed_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    waits: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Part of its time that the training thread waited."""
        return self.exposed_s / self.interval_s if self.interval_s > 0.0 else 0.0

    def as_record(self) -> dict[str, Any]:
        """Return plain values for the run log: a list per bucket and per wait, times in microseconds."""
        return {
            "step": self.step,
            "mode": self.mode,
            "means": self.means,
            "steps": self.steps,
            "interval_us": _us(self.interval_s),
            "exposed_us": _us(self.exposed_s),
            "buckets": [
                [b.index, b.bytes, _us(b.ready_s), _us(b.submitted_s), _us(b.arrived_s), _us(b.waited_s)]
                for b in self.buckets
            ],
            "waits": [[index, _us(began_s), _us(ended_s)] for index, began_s, ended_s in self.waits],
        }


def _us(time_s: float | None) -> int | None:
    return None if time_s is None else round(1e6 * time_s)


class StepTimeline:
    """See the module's text.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        sampling: Whether a step is being sampled.
        latest: The latest samples, newest last.
        on_sample: Called with every sample, in the training thread.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.sampling = False
        self.latest: deque[StepSample] = deque(maxlen=_KEPT)
        self.on_sample: Callable[[StepSample], None] | None = None
        self._clock = clock
        self._events: list[tuple[int, int, float, float]] | None = None
        self._sample: StepSample | None = None
        self._over = False  # Whether the sampled step has ended; what it submitted may still be in flight.
        self._last_sampled = -1
        self._looks: list[Callable[[], None]] = []  # Functions of collectives that note what has arrived.

    # ---- training thread ------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether `start` has to be called at the start of this step; otherwise it would do nothing."""
        return self.sampling or (step - _FIRST) // EVERY > self._last_sampled

    def start(self, step: int, mode: str, means: str = "", *, whole: bool = True) -> None:
        """Note the start of a step's work.

        Args:
            step: Its number.
            mode: Label of the plan.
            means: What hides communication.
            whole: Whether a sample may end and start here; in `local`, only after an averaging was sent.
        """
        sample, now_s = self._sample, self._clock()
        if sample is not None:
            goes_on = not whole and sample.mode == mode and sample.steps < _MOST_STEPS
            if not self._over:
                if goes_on:
                    sample.steps += 1
                    return
                sample.interval_s, self._over = now_s - sample.began_s, True
                goes_on = True
            if goes_on and self._left():
                return
            self._end()
        if whole and self.due(step):
            self._last_sampled = (step - _FIRST) // EVERY
            self._looks.clear()
            self._sample, self._events, self._over = StepSample(step, mode, means, now_s), [], False
            self.sampling = True

    def ready(self, index: int) -> None:
        """Note that the gradient of a bucket is complete."""
        self._note(_READY, index, 0.0)

    def waited(self, index: int, began_s: float) -> None:
        """Note that the training thread waited from `began_s` until now for a bucket; -1 for all or something else."""
        self._note(_WAITED, index, began_s)

    def look(self) -> None:
        """Note everything that has arrived by now."""
        for look in self._looks:
            look()

    def watch(self, look: Callable[[], None]) -> None:
        """Register a function that notes arrivals, for `look` to call during this sample."""
        if look not in self._looks:
            self._looks.append(look)

    # ---- any thread -----------------------------------------------------------------------------------------------

    def submitted(self, index: int, size: int) -> None:
        """Note that a bucket of `size` bytes is submitted."""
        self._note(_SUBMITTED, index, float(size))

    def arrived(self, index: int) -> None:
        """Note that the result of a bucket, or of a part of it, has arrived."""
        self._note(_ARRIVED, index, 0.0)

    def _note(self, kind: int, index: int, value: float) -> None:
        if (events := self._events) is not None:
            events.append((kind, index, self._clock(), value))

    # ---- the end of a sample --------------------------------------------------------------------------------------

    def _left(self) -> bool:
        """Whether something of the sampled step is still in flight."""
        assert self._events is not None and self._sample is not None
        buckets, _ = fold(self._events, self._sample.began_s, self._sample.interval_s)
        held = self._sample.means == "overlap"  # Some buckets may be submitted in the next step.
        return any(one.arrived_s is None and (held or one.submitted_s is not None) for one in buckets)

    def _end(self) -> None:
        sample, events = self._sample, self._events
        self.sampling, self._sample, self._events = False, None, None
        assert sample is not None and events is not None
        sample.buckets, sample.waits = fold(events, sample.began_s, sample.interval_s)
        ended_s = 0.0
        for _, wait_s, until_s in sorted(sample.waits, key=lambda wait: wait[1]):  # One may lie within another.
            until_s = min(until_s, sample.interval_s)
            sample.exposed_s += max(0.0, until_s - max(wait_s, ended_s))
            ended_s = max(ended_s, until_s)
        self.latest.append(sample)
        if self.on_sample is not None:
            self.on_sample(sample)


def fold(
    events: Sequence[tuple[int, int, float, float]], began_s: float, interval_s: float
) -> tuple[list[BucketTimes], list[tuple[int, float, float]]]:
    """Return the buckets and waits of a sample from its events, without those of the next step."""
    found: dict[int, BucketTimes] = {}
    again: set[int] = set()  # Buckets that the next step has filled again.
    waits = []
    for kind, index, at_s, value in events:
        now_s = at_s - began_s
        bucket = found.get(index)
        if kind == _WAITED:
            waits.append((index, max(0.0, value - began_s), now_s))
            if bucket is not None and bucket.submitted_s is not None and value - began_s >= bucket.submitted_s:
                bucket.waited_s += now_s - (value - began_s)
        elif kind == _ARRIVED:
            if bucket is not None and bucket.submitted_s is not None:
                bucket.arrived_s = now_s  # The time of its last part remains.
        elif kind == _READY and now_s > interval_s:
            again.add(index)
        elif kind == _READY:  # Anything submitted before this was held back from the previous step.
            found[index] = BucketTimes(index, ready_s=now_s)
        elif index not in again and (now_s <= interval_s or bucket is not None):
            bucket = found.setdefault(index, BucketTimes(index))
            bucket.submitted_s = now_s if bucket.submitted_s is None else bucket.submitted_s
            bucket.bytes += int(value)
    sent = [bucket for bucket in found.values() if bucket.submitted_s is not None]
    only_ready = [bucket for bucket in found.values() if bucket.submitted_s is None]
    return sorted(sent, key=lambda bucket: bucket.submitted_s or 0.0) + only_ready, waits


_WORTH_HIDING = 0.03


def exposure(samples: Sequence[StepSample], mode: str, comm_s: float, *, advise_overlap: bool = True) -> str:
    """Describe the exposed part of a step and what is done about it; empty without a sample of the mode.

    Args:
        samples: The latest samples of a rank.
        mode: Label of the active plan.
        comm_s: If all ranks wait for each other, the time of a reduction for the last rank to arrive, else NaN: any
            longer wait of this rank is for slower ranks.
        advise_overlap: Whether overlap may be advised: not if the program asks for it already, or it is impossible.
    """
    same = [sample for sample in samples if sample.mode == mode]
    if not same:
        return ""
    step_s = statistics.median(sample.interval_s / sample.steps for sample in same)
    share = statistics.median(sample.share for sample in same)
    if math.isfinite(comm_s) and step_s > 0.0:
        share = min(share, comm_s / step_s)
    done = _done(same[-1], share, advise_overlap=advise_overlap)
    return f"{100.0 * share:.0f} % of a step of {1e3 * step_s:.3g} ms is exposed communication, {done}"


def _done(sample: StepSample, share: float, *, advise_overlap: bool) -> str:
    if sample.means == "overlap":
        return "the rest goes on beside backward and the next forward pass (overlap)"
    if sample.means == "background":
        return "the rest goes on behind compute (background)"
    option = {"sync": "overlap='auto'", "local": "Config(background=True)", "ps": "Config(background=True)"}
    mode = sample.mode.partition("(")[0]
    advice = "" if mode == "sync" and not advise_overlap else option.get(mode, "")
    if share < _WORTH_HIDING or not advice:
        return "which is left as it is"
    return f"which {advice} may hide"


class Reduces(Protocol):
    """A `star_hvd.engine.collective.Collective`."""

    def submit(self, name: str, tensor: torch.Tensor) -> int: ...
    def hurry(self) -> None: ...
    def poll(self, handle: int) -> bool: ...
    def wait(self, handle: int, longest_s: float) -> bool: ...
    def finish(self, handle: int) -> None: ...


class TimedCollective:
    """A collective that notes its reductions in a timeline.

    Args:
        inner: The collective that reduces.
        timeline: Receives the events.
    """

    def __init__(self, inner: Reduces, timeline: StepTimeline) -> None:
        self._inner, self._timeline = inner, timeline
        self._open: dict[int, int] = {}  # Bucket index by handle.

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        """See `Collective.submit`."""
        if not self._timeline.sampling:
            return self._inner.submit(name, tensor)
        found = _BUCKET.search(name)
        index = int(found[1]) if found else -1
        self._timeline.submitted(index, tensor.numel() * tensor.element_size())
        handle = self._inner.submit(name, tensor)
        self._open[handle] = index
        self._timeline.watch(self._look)
        return handle

    def hurry(self) -> None:
        """See `Collective.hurry`."""
        self._inner.hurry()

    def poll(self, handle: int) -> bool:
        """See `Collective.poll`."""
        ended = self._inner.poll(handle)
        if ended and self._open:
            self._note(handle)
        return ended

    def wait(self, handle: int, longest_s: float) -> bool:
        """See `Collective.wait`."""
        ended = self._inner.wait(handle, longest_s)
        if ended and self._open:
            self._note(handle)
        return ended

    def finish(self, handle: int) -> None:
        """See `Collective.finish`."""
        self._inner.finish(handle)
        if self._open:
            self._note(handle)

    def _note(self, handle: int) -> None:
        index = self._open.pop(handle, None)
        if index is not None:
            self._timeline.arrived(index)

    def _look(self) -> None:
        for handle in list(self._open):
            with contextlib.suppress(ValueError):  # Another thread has just collected it and notes it.
                self.poll(handle)


_NONE_SMALL: Mapping[int, bytes] = {}


class TimedClient:
    """A client of servers (`star_hvd.modes.ps_worker.Client`) that notes its transfers in a timeline.

    Args:
        client: The client.
        timeline: Receives the events.
    """

    def __init__(self, client: Any, timeline: StepTimeline) -> None:
        self._client, self._timeline = client, timeline
        self._given: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def give(self, step: int, index: int, flat: torch.Tensor, small: Mapping[int, bytes] = _NONE_SMALL) -> None:
        """See `Client.give`."""
        self._given.add(index)
        if self._timeline.sampling:
            self._timeline.submitted(index, self._sent_bytes(index, flat, small))
        self._client.give(step, index, flat, small=small)

    def push(self, *, flats: Sequence[torch.Tensor], **fields: Any) -> None:
        """See `Client.push`."""
        if self._timeline.sampling:
            small = fields.get("small", _NONE_SMALL)
            for index, flat in enumerate(flats):
                if index not in self._given:
                    self._timeline.submitted(index, self._sent_bytes(index, flat, small))
        self._given.clear()
        self._client.push(flats=flats, **fields)

    def _sent_bytes(self, index: int, flat: torch.Tensor, small: Mapping[int, bytes]) -> int:
        """Return the size of a bucket as sent, some of whose chunks may be sent in a smaller form."""
        size_bytes = flat.element_size()
        if not small:
            return flat.numel() * size_bytes
        return sum(
            len(small[chunk]) if chunk in small else (stop - start) * size_bytes
            for chunk, start, stop in self._client.ranges(index)
        )

    def wait(self, deadline_s: float, *, whole: bool = True) -> Any:
        """See `Client.wait`."""
        reply = self._client.wait(deadline_s, whole=whole)
        if whole and self._timeline.sampling and reply.kind != "interrupted":
            for index in range(len(reply.params)):
                self._timeline.arrived(index)
        return reply

    def wait_bucket(self, index: int, deadline_s: float) -> None:
        """See `Client.wait_bucket`."""
        began_s = time.monotonic()
        try:
            self._client.wait_bucket(index, deadline_s)
            self._timeline.arrived(index)
        finally:
            self._timeline.waited(index, began_s)
