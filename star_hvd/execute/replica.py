"""This rank's parameters and the steps that ended without it: queue, shadow, fetch.

Only the training thread changes the live parameters, and only while it is inside `step()`. A step that the helper
completed goes into a queue. While the training thread computes, the helper replays the queue onto a shadow; inside
`step()` the training thread takes the shadow over and applies the rest of the queue itself. `apply_lock` keeps the
two from doing it at once; the engine's lock guards the fields and is never held while parameters are worked on.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

import torch

from star_hvd.buckets import Bucket, in_format_of
from star_hvd.execute.device import fence
from star_hvd.execute.replay import Applier, Shadow
from star_hvd.execute.state import Counters, Result, Snapshot

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
        self._whole = False  # While foreign: nothing came yet, so what was here when the rounds were left still is.

    # ---- under the engine's lock ------------------------------------------------------------------------------

    def push(self, result: Result) -> None:
        """A step has ended without this rank's training thread.

        Fetched parameters may contain it already: their source saw its end before this rank did.
        """
        if self.needs_fetch or result.round < self.version or (self.dropped and self.foreign):
            return
        # A bucket's own buffer becomes the training thread's again; the queue keeps a copy of what is in it.
        means = [m.clone() if m is b.flat else m for m, b in zip(result.means, self.applier.buckets, strict=True)]
        self.queue.append(Result(result.round, means, result.row))

    def cannot_replay(self, round_: int) -> None:
        """A step has ended that only its members can carry out: the parameters have to be fetched."""
        if round_ < self.version:
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
        shadow = Shadow(self.applier, self.version)
        shadow.fill(write)
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
        shadow.take_over()
        fence(self.applier.buckets)
        with self.lock:
            self.version = shadow.version

    def _apply_next(self) -> bool:
        with self.lock:
            if not self.queue or self.needs_fetch:
                return False
            result = self.queue.popleft()
            assert result.round == self.version, "a step is missing before it is applied"
        self.applier.step_with(result.means, result.row)
        fence(self.applier.buckets)
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

    def load(self, snapshot: Snapshot) -> None:
        """Copy a snapshot into the live parameters; entries without state leave the optimizer's state alone."""
        self.overwritten()
        params = [param for bucket in self.applier.buckets for param in bucket.params]
        with torch.no_grad():
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
                shadow = Shadow(self.applier, version)
            assert shadow.version == result.round, "a step is missing before a replay"
            shadow.apply(result.means, result.row)
            fence(self.applier.buckets)
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
        """
        with self.apply_lock:
            with self.lock:
                if self.needs_fetch or (self.foreign and not self._whole) or self.queue:
                    return None
                shadow = self._shadow
                version = self.version if shadow is None else shadow.version
            source = self.applier if shadow is None else shadow.applier
            optimizer = source.optimizer
            params = [param for bucket in source.buckets for param in bucket.params]
            state: list[dict[str, object]] = [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
                if state_too
                else {}
                for p in params
            ]
            values = [param.detach().clone() for param in params]
            fence(source.buckets)
            return Snapshot(version, values, state)
