"""This rank's parameters and the steps that ended without it: queue, shadow, fetch.

Only the training thread changes the live parameters, and only while it is inside `step()`. A step that the helper
completed goes into a queue. While the training thread computes, the helper replays the queue onto a shadow; inside
`step()` the training thread takes the shadow over and applies the rest of the queue itself. `apply_lock` keeps the
two from doing it at once; the engine's lock guards the fields and is never held while parameters are worked on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from star_hvd.engine.applier import Applier, Shadow, place_state
from star_hvd.engine.buckets import Bucket, in_format_of
from star_hvd.engine.device import BUCKET, COPIED, MEANS, PARAMS, SHADOW, SHADOW_READ, Fences
from star_hvd.engine.records import Counters, Result, Snapshot

__all__ = ["Replica"]


class Replica:
    """See the module's text.

    Args:
        applier: Steps the live parameters.
        lock: The engine's.
        counters: Where replays and fetches are counted.
        changed: Wakes who may be waiting for a change; called under the lock.
    """

    def __init__(
        self, applier: Applier, lock: threading.Condition, counters: Counters, changed: Callable[[], None]
    ) -> None:
        self.applier = applier
        self.lock = lock
        self.apply_lock = threading.RLock()
        self.version = 0
        self.computing = True
        self.needs_fetch = False
        self.foreign = False  # The live parameters came without the optimizer's state of their step.
        self.dropped = False
        self.queue: collections.deque[Result] = collections.deque()
        self._counters = counters
        self._changed = changed
        self._shadow: Shadow | None = None
        self._streams = applier.streams
        self._written = self._streams.give(PARAMS)
        self._copied = Fences()
        self._bucket_uses = Fences()
        self._whole = False  # While foreign: nothing came yet, so what was here when the rounds were left still is.

    # ---- under the engine's lock ------------------------------------------------------------------------------

    def push(self, result: Result) -> None:
        """A step has ended without this rank's training thread.

        Fetched parameters may contain it already: their source saw its end before this rank did.
        """
        if self.needs_fetch or result.step < self.version or (self.dropped and self.foreign):
            return
        # A bucket's own buffer becomes the training thread's again; the queue keeps a copy of what is in it.
        means = [m.clone() if m is b.flat else m for m, b in zip(result.means, self.applier.buckets, strict=True)]
        self.queue.append(Result(result.step, means, result.row, self._streams.give(MEANS)))

    def note_bucket_use(self) -> None:
        """The calling thread has queued work on a bucket's own buffer that the next backward pass must not overtake."""
        self._bucket_uses.add(self._streams.give(BUCKET))

    def cannot_replay(self, step: int) -> None:
        """A step has ended that only its members can carry out: the parameters have to be fetched."""
        if step < self.version:
            return
        self.needs_fetch = True
        self.queue.clear()
        self._shadow = None

    def was_not_replayable(self) -> None:
        """The last step, which the helper has put into the queue or a shadow, was one that only its members can do."""
        self.needs_fetch = True
        self.queue.clear()
        self._shadow = None

    def replaced(self, version: int) -> None:
        """The whole state of `version` has come and waits for the training thread to take it over."""
        self.leave()
        self._whole, self.version = False, version

    def shadow_with(self, write: Callable[[Sequence[Bucket], torch.optim.Optimizer], None]) -> None:
        """Make a shadow whose contents `write` fills in; under `apply_lock`."""
        with self.copying():
            shadow = Shadow(self.applier, self.version)
        shadow.fill(write)
        shadow.written = self._streams.give(SHADOW)
        with self.lock:
            self._shadow = shadow
            self._changed()

    @property
    def is_whole(self) -> bool:
        """Whether the live parameters and state are those of `version`, with no step waiting to be applied."""
        return not (self.needs_fetch or self.foreign or self.queue) and self._shadow is None

    def leave(self) -> None:
        """Parameters come from elsewhere from now on; what waits to be applied is void."""
        self._whole = self.is_whole
        self.foreign, self.needs_fetch = True, False
        self.queue.clear()
        self._shadow = None

    def drop(self, *, ended: int) -> None:
        """The training thread has no use for these parameters any more.

        Where they are whole, the helper goes on replaying steps on a shadow: another rank may have to fetch them.

        Args:
            ended: Steps that have ended on this rank.
        """
        self.dropped = self.computing = True
        newest = self._shadow.version if self._shadow is not None else self.version
        if not self.foreign and newest + len(self.queue) != ended:  # A step ended and was never applied.
            self.leave()
            self._whole = False

    def may_replay(self) -> bool:
        """Whether the helper has a step to replay."""
        return bool(self.queue) and self.computing and not self.foreign

    # ---- streams ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """The caller, the training thread, changes live parameters, state or buckets inside the block."""
        with self.apply_lock:
            self._copied.order()
            self.reuse_buckets()
            try:
                yield
            finally:
                self._written = self._streams.give(PARAMS)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """The caller copies live parameters or state inside the block, which nobody may change meanwhile: under
        `apply_lock`, or, while the training thread is away, under the engine's."""
        if self._streams.devices:
            self._written.order(*self.applier.tensors())
        yield
        self._copied.add(self._streams.give(COPIED))

    def written(self) -> None:
        """The training thread, which calls this, may have changed parameters otherwise than by `step()`."""
        self._written = self._streams.give(PARAMS)

    def reuse_buckets(self) -> None:
        """The training thread, which calls this, is about to write into the buckets' own buffers."""
        self._bucket_uses.order()

    # ---- training thread --------------------------------------------------------------------------------------

    def bring_up(self) -> None:
        """Take the shadow over and apply the queue."""
        with self.apply_lock:
            self._take_shadow_over()
            while self._apply_next():
                pass

    def _take_shadow_over(self) -> None:
        with self.lock:
            shadow, self._shadow = self._shadow, None
            if self.needs_fetch or shadow is None:
                return
        with self.writing():
            if self._streams.devices:
                shadow.written.order(*shadow.applier.tensors())
            shadow.take_over()
        with self.lock:
            self.version = shadow.version

    def _apply_next(self) -> bool:
        with self.lock:
            if not self.queue or self.needs_fetch:
                return False
            result = self.queue.popleft()
            assert result.step == self.version, "a step is missing before it is applied"
        with self.writing():
            result.fence.order(*result.means)
            self.applier.step_with(result.means, result.row)
        with self.lock:
            self.version += 1
            self._counters.replayed += 1
            self._changed()
        return True

    def adopt(self, snapshot: Snapshot, ended: int) -> None:
        """Take parameters and optimizer state fetched from another rank, no older than these; under both locks.

        Args:
            snapshot: What was fetched.
            ended: Steps that have ended on this rank.
        """
        self.load(snapshot)
        self.version = snapshot.version
        self.foreign = False
        self._counters.fetched += 1
        # Steps that ended here after the snapshot was taken are still missing; the next step fetches again.
        self.needs_fetch = snapshot.version < ended

    def overwritten(self) -> None:
        """The live parameters are about to become others' without the optimizer's state; under `apply_lock`."""
        self._whole = False

    def placed(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot whose tensors are where the parameters and the optimizer want them.

        A copy from the host waits for the device, so this comes before any lock is taken.
        """
        if not self._streams.devices:
            return snapshot
        params = [param for bucket in self.applier.buckets for param in bucket.params]
        return dataclasses.replace(
            snapshot,
            params=[value.to(param.device) for param, value in zip(params, snapshot.params, strict=True)],
            state=[
                place_state(self.applier.optimizer, param, state)
                for param, state in zip(params, snapshot.state, strict=True)
            ],
        )

    def load(self, snapshot: Snapshot) -> None:
        """Copy a snapshot into the live parameters; entries without state leave the optimizer's state alone."""
        self.overwritten()
        params = [param for bucket in self.applier.buckets for param in bucket.params]
        with self.writing(), torch.no_grad():
            for param, value in zip(params, snapshot.params, strict=True):
                param.copy_(value)
            for param, state in zip(params, snapshot.state, strict=True):
                if state:
                    self.applier.optimizer.state[param] = {  # What travels has lost its memory format.
                        key: in_format_of(param, value) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }

    # ---- helper and server threads ------------------------------------------------------------------------------

    def replay_one(self) -> bool:
        """Replay the oldest step of the queue onto the shadow. Whether there was one."""
        with self.apply_lock:
            with self.lock:
                if not self.may_replay():
                    return False
                result, version = self.queue[0], self.version
                shadow = self._shadow
            if shadow is None:
                with self.copying():
                    shadow = Shadow(self.applier, version)
            assert shadow.version == result.step, "a step is missing before a replay"
            shadow.read.order()
            result.fence.order(*result.means)
            shadow.apply(result.means, result.row)
            shadow.written = self._streams.give(SHADOW)
            with self.lock:
                # A step that cannot be replayed may have ended meanwhile, and made all this void.
                if self.queue and self.queue[0] is result:
                    self.queue.popleft()
                    self._shadow = shadow
                    self._counters.replayed += 1
                self._changed()
            return True

    def snapshot(self, *, state_too: bool = True) -> Snapshot | None:
        """A copy of the newest parameters here and, if wanted, optimizer state; None while this rank is behind itself.

        The newest may be on the shadow, for as long as the training thread is away: it may wait, in a collective of the
        user's, for the very rank that asks. What a rank had when it left the rounds stays good until others' parameters
        come in its place: nobody else may have it.

        Raises:
            DeadlineError: The device does not finish the copy, which the host is to read.
        """
        snapshot = self._copy(state_too)
        if snapshot is not None:
            self._streams.await_host()
        return snapshot

    def _copy(self, state_too: bool) -> Snapshot | None:
        with self.apply_lock:
            with self.lock:
                if self.needs_fetch or (self.foreign and not self._whole) or self.queue:
                    return None
                shadow = self._shadow
                version = self.version if shadow is None else shadow.version
            if shadow is None:
                with self.copying():
                    return _snapshot_of(self.applier, version, state_too)
            if self._streams.devices:
                shadow.written.order(*shadow.applier.tensors())
            snapshot = _snapshot_of(shadow.applier, version, state_too)
            shadow.read.add(self._streams.give(SHADOW_READ))
            return snapshot


def _snapshot_of(source: Applier, version: int, state_too: bool) -> Snapshot:
    params = [param for bucket in source.buckets for param in bucket.params]
    known = source.optimizer.state
    state: list[dict[str, object]] = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in known.get(param, {}).items()}
        if state_too
        else {}
        for param in params
    ]
    return Snapshot(version, [param.detach().clone() for param in params], state)
