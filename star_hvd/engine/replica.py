"""This rank's parameters and optimizer state, and the steps that ended without its training thread.

Only the training thread changes the live parameters, and only inside `step()`. A step that the helper completed goes
into a queue. While the training thread computes, the helper replays the queue onto a shadow copy; inside `step()` the
training thread takes the shadow over and applies the rest of the queue itself. `apply_lock` keeps the two from doing so
at once; the engine's lock guards the fields and is never held while parameters are worked on.

The live parameters are in one of seven states (`ReplicaState`). `step` is the step of the live parameters; in
AVERAGE_PENDING it is that of the averaging, which is written to the live parameters or to a shadow, on which later
steps are then replayed. Each line: a call, the states it is made in, the states that can follow.

    push               CURRENT, REPLAYABLE                    REPLAYABLE
    push               any other                              the same
    advance            any                                    the same
    catch_up           REPLAYABLE                             CURRENT, STALE
    catch_up           AVERAGE_PENDING                        CURRENT, AVERAGE_PENDING
    catch_up           any other                              the same
    replay_one         any                                    the same
    cannot_replay      CURRENT, REPLAYABLE, STALE             STALE
    cannot_replay      any other                              STATELESS
    replaced           CURRENT, REPLAYABLE, AVERAGE_PENDING   AVERAGE_PENDING
    replaced           any other                              the same
    average_used       AVERAGE_PENDING                        CURRENT, REPLAYABLE, AVERAGE_PENDING
    average_used       any other                              the same
    discard_average    AVERAGE_PENDING                        CURRENT, STALE
    discard_average    any other                              the same
    leave              CURRENT, LEFT                          LEFT
    leave              any other                              PARAMETERS_ONLY
    overwritten        LEFT                                   PARAMETERS_ONLY
    overwritten        any other                              the same
    resume             any                                    STATELESS
    drop               CURRENT, REPLAYABLE, STALE             the same, STATELESS
    drop               any other                              the same
    adopt              STALE, STATELESS                       CURRENT, STALE
    adopt              any other                              the same

A step that no longer concerns these parameters changes nothing: `push` and `cannot_replay` of a step before `step`,
`average_used` of an averaging that a later one has replaced.

While the program has other values in the live parameters (`displaced`), an average of them that it evaluates say, they
are not those of `step`: nothing is copied from them, and what ended meanwhile is fetched from another rank later.
Values that it loads (`set_aside`) replace those of `step` once all ranks have them; until then no step is applied to
them either. For both, `replay_one` and `catch_up` end in `cannot_replay` where they would have to; so does `replay_one`
if the device has no memory for the shadow.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from star_hvd.engine.applier import Applier, Shadow, place_state
from star_hvd.engine.buckets import Bucket, in_format_of
from star_hvd.engine.device import BUCKET, COPIED, MEANS, PARAMS, SHADOW, SHADOW_READ, Fences
from star_hvd.engine.records import Counters, Result, Snapshot
from star_hvd.engine.swap_detector import SwapDetector
from star_hvd.locks import ordered_rlock

__all__ = ["Replica", "ReplicaState"]

logger = logging.getLogger("star_hvd")

_DEVICE_DEADLINE_S = 300.0


class ReplicaState(enum.Enum):
    """State of a rank's live parameters and optimizer state; the module docstring lists the transitions."""

    CURRENT = "complete, and no step waits to be applied"
    REPLAYABLE = "complete; later steps wait in the queue or on the shadow"
    STALE = "complete; a later step has ended that cannot be replayed: fetch"
    AVERAGE_PENDING = "an averaging has ended without the training thread; at most a shadow contains it"
    LEFT = "complete; the common steps were left, and nothing has come from elsewhere yet"
    PARAMETERS_ONLY = "parameters from a server or a parent; the optimizer's state is elsewhere"
    STATELESS = "of no step: both have to be fetched before this rank may compute on"

    @property
    def needs_fetch(self) -> bool:
        """Whether parameters and optimizer state have to be fetched."""
        return self in (ReplicaState.STALE, ReplicaState.STATELESS)

    @property
    def in_common_steps(self) -> bool:
        """Whether the live parameters result from common steps, and are as complete as those steps left them."""
        return self in (ReplicaState.CURRENT, ReplicaState.REPLAYABLE, ReplicaState.STALE)

    @property
    def queues(self) -> bool:
        """Whether a step that ends without the training thread is kept to be applied later."""
        return self in (ReplicaState.CURRENT, ReplicaState.REPLAYABLE, ReplicaState.AVERAGE_PENDING)

    @property
    def servable(self) -> bool:
        """Whether the live parameters, or the shadow, are a state that other ranks may fetch."""
        return self in (ReplicaState.CURRENT, ReplicaState.REPLAYABLE, ReplicaState.AVERAGE_PENDING, ReplicaState.LEFT)


class Replica:
    """This rank's parameters and optimizer state; see the module docstring.

    Args:
        applier: Steps the live parameters.
        lock: The engine's lock.
        counters: Counts replays and fetches.
        changed: Wakes the threads that wait for a change; called under the lock.
    """

    def __init__(
        self, applier: Applier, lock: threading.Condition, counters: Counters, changed: Callable[[], None]
    ) -> None:
        self.applier = applier
        self.lock = lock
        self.apply_lock = ordered_rlock("Replica.apply_lock")
        self.step = 0
        self.state = ReplicaState.CURRENT
        self.computing = True
        self.writes = 0  # Number of writes to live parameters, state or buckets through this object.
        self.partial = False  # Whether a step is applied to some of the buckets only.
        self.queue: collections.deque[Result] = collections.deque()
        self._counters = counters
        self._changed = changed
        self._shadow: Shadow | None = None
        self._swaps = SwapDetector(applier.buckets)
        self._accepted = False  # Whether what the program writes replaces the parameters, until they are written here.
        self._set_aside = False  # Whether steps that wait belong to other values than the live parameters'.
        self.state_loaded = False  # Whether the program has loaded the optimizer's state, since it was written here.
        self._streams = applier.streams
        self._written = self._streams.give(PARAMS)
        self._copied = Fences()
        self._bucket_uses = Fences()

    # ---- under the engine's lock ------------------------------------------------------------------------------

    def push(self, result: Result) -> None:
        """Queue a step that ended without this rank's training thread.

        Fetched parameters may contain it already: their source saw it end before this rank did.
        """
        if not self.state.queues or result.step < self.step:
            return
        # The training thread reuses the bucket's own buffer, so the queue keeps a copy of its contents.
        means = [m.clone() if m is b.flat else m for m, b in zip(result.means, self.applier.buckets, strict=True)]
        self.queue.append(Result(result.step, means, result.row, self._streams.give(MEANS)))
        if self.state is ReplicaState.CURRENT:
            self.state = ReplicaState.REPLAYABLE

    def advance(self) -> None:
        """Note that the training thread has applied one more step to the live parameters."""
        self.partial = False
        if self.state is not ReplicaState.AVERAGE_PENDING:  # Else `step` is that of the averaging already.
            self.step += 1

    def note_bucket_use(self) -> None:
        """Note that the calling thread queued work on a bucket's own buffer, for which the next backward must wait."""
        self._bucket_uses.add(self._streams.give(BUCKET))

    def cannot_replay(self, step: int | None = None) -> None:
        """Note that a step has ended whose result only its members can compute: the state has to be fetched.

        Args:
            step: The step; None for the last one, which the helper may have queued or replayed on the shadow. If the
                training thread has taken that over already, its parameters are those of no step until they are fetched,
                before its next batch.
        """
        if step is not None and step < self.step:
            return
        self._discard_waiting()
        self.state = ReplicaState.STALE if self.state.in_common_steps else ReplicaState.STATELESS

    def replaced(self, step: int) -> bool:
        """Note that an averaging ended without the training thread; its result, of `step`, waits to be written.

        Returns:
            Whether it can be used: this rank must have what it does not contain, e.g. integer state.
        """
        if not self.state.queues:
            return False
        self._discard_waiting()
        self.state, self.step = ReplicaState.AVERAGE_PENDING, step
        return True

    def average_used(self, step: int) -> None:
        """Note that the averaging of `step` has been written to a shadow, or else to the live parameters."""
        if self.state is ReplicaState.AVERAGE_PENDING and self.step == step and self._shadow is None:
            self.state = ReplicaState.REPLAYABLE
            self._update_state()

    @property
    def is_whole(self) -> bool:
        """Whether the live parameters and state are those of `step`, with no step waiting to be applied."""
        return self.state is ReplicaState.CURRENT

    def leave(self) -> None:
        """Parameters come from elsewhere from now on; discard what waits to be applied."""
        whole = self.state in (ReplicaState.CURRENT, ReplicaState.LEFT)
        self._discard_waiting()
        self.state = ReplicaState.LEFT if whole else ReplicaState.PARAMETERS_ONLY

    def resume(self) -> None:
        """Common steps start again with a state that is elsewhere."""
        self._discard_waiting()
        self.state = ReplicaState.STATELESS

    def drop(self, *, ended: int) -> None:
        """Note that the training thread no longer uses these parameters.

        If they are complete, the helper continues to replay steps on a shadow, for other ranks that fetch them.

        Args:
            ended: Number of steps that have ended on this rank.
        """
        self.computing = True
        if self.state.in_common_steps and self.newest_step + len(self.queue) != ended:
            self.resume()  # A step ended that was never applied.

    @property
    def newest_step(self) -> int:
        """The step of the newest parameters here: the shadow's if there is a shadow."""
        return self.step if self._shadow is None else self._shadow.step

    def may_replay(self) -> bool:
        """Whether the helper has a step to replay."""
        return bool(self.queue) and self.computing and self._on_shadow

    @property
    def _on_shadow(self) -> bool:
        """Whether steps may be replayed on a shadow, which is copied from the live parameters if there is none yet."""
        made = self.state is ReplicaState.AVERAGE_PENDING and self._shadow is not None
        return made or self.state is ReplicaState.REPLAYABLE

    def _discard_waiting(self) -> None:
        self.queue.clear()
        self._shadow = None
        self._update_state()

    def _update_state(self) -> None:
        if self.state is ReplicaState.REPLAYABLE and not self.queue and self._shadow is None:
            self.state = ReplicaState.CURRENT

    # ---- streams ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, *, parameters: bool = True) -> Iterator[None]:
        """The caller, the training thread, changes live parameters, optimizer state or buckets inside the block.

        Args:
            parameters: Whether parameters are among them.
        """
        with self.apply_lock:
            self._copied.order()
            self.reuse_buckets()
            try:
                yield
            finally:
                self.writes += 1
                if parameters:
                    self._swaps.note()
                    self._accepted = self._set_aside = self.state_loaded = False
                self._written = self._streams.give(PARAMS)

    def accept(self) -> None:
        """Called by the training thread: all ranks have what the program has written, and train on with it."""
        with self.apply_lock:
            self._accepted, self._set_aside, self.state_loaded = True, False, False

    def set_aside(self, *, state_loaded: bool = False) -> None:
        """Called by the training thread: the program has loaded values, which replace those of the step on all ranks.

        Steps that the other ranks make before they have these values must not be applied to them: this rank fetches.

        Args:
            state_loaded: Whether the optimizer's state is among them.
        """
        with self.apply_lock:
            self._accepted = self._set_aside = True
            self.state_loaded = self.state_loaded or state_loaded

    @property
    def loaded(self) -> bool:
        """Whether the program has written to the live parameters, as far as `SwapDetector` can tell."""
        with self.apply_lock:
            return self._swaps.written()

    @property
    def left_alone(self) -> bool:
        """Whether what the program has in the live parameters' place, or has loaded, must stay for now."""
        with self.apply_lock:
            return self.out_of_place

    @property
    def out_of_place(self) -> bool:
        """As `left_alone`; for the helper under the engine's lock, while the training thread is inactive."""
        return self._set_aside or (not self._accepted and self._swaps.moved())

    def loaded_snapshot(self, *, state_too: bool) -> Snapshot:
        """Copy what the program has loaded; for the training thread."""
        with self.apply_lock, self.copying():
            return _snapshot_of(self.applier, self.step, state_too)

    @property
    def displaced(self) -> bool:
        """Whether the program has others in the live parameters' place for a while, see `SwapDetector`."""
        with self.apply_lock:
            return not self._accepted and self._swaps.moved()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """The caller copies live parameters or state inside the block, while no thread may change them.

        Called under `apply_lock` or, while the training thread is inactive, under the engine's lock.
        """
        if self._streams.devices:
            self._written.order(*self.applier.tensors())
        yield
        self._copied.add(self._streams.give(COPIED))

    def written(self) -> None:
        """Called by the training thread after it may have changed parameters other than by `step()`."""
        self._written = self._streams.give(PARAMS)

    def reuse_buckets(self) -> None:
        """Called by the training thread before it writes into the buckets' own buffers."""
        self._bucket_uses.order()

    # ---- training thread --------------------------------------------------------------------------------------

    def catch_up(self, *, show_mean: bool = False) -> None:
        """Take the shadow over and apply the queue.

        Args:
            show_mean: Leave the mean of the last applied step in `param.grad`, as the end of a step does. Else the
                gradients there stay: the program may not have cleared them, and the next `backward()` adds to them, or
                a step has yet to use them.
        """
        with self.apply_lock:
            while self._is_behind():  # A step may end meanwhile.
                self.reuse_buckets()  # Before gradients there are copied, too.
                keeping = contextlib.nullcontext() if show_mean else self.applier.keeping_gradients()
                with keeping:
                    self._take_shadow_over()
                    while not self._set_aside and self._apply_next():
                        pass
                self.written()  # Buffers too, since the last of these steps.

    def _is_behind(self) -> bool:
        """Whether the training thread has something to take over or to apply; nothing is applied to loaded values."""
        with self.lock:
            if self._shadow is None and self._set_aside and self.queue and self.state is ReplicaState.REPLAYABLE:
                self.cannot_replay()
            return self._shadow is not None or (bool(self.queue) and self.state is ReplicaState.REPLAYABLE)

    def discard_average(self) -> None:
        """Note that the program has loaded other values since the pending averaging, which are not to be replaced.

        Steps that have ended since the averaging are missing in what was loaded: the state has to be fetched.
        """
        with self.apply_lock, self.lock:
            if self.state is not ReplicaState.AVERAGE_PENDING:
                return
            behind = bool(self.queue) or self.newest_step != self.step
            self._discard_waiting()
            self.state = ReplicaState.CURRENT
            if behind:
                self.cannot_replay()
            self._changed()

    def _take_shadow_over(self) -> None:
        with self.lock:
            shadow = self._shadow
            if shadow is None:
                return
        with self.writing():
            if self._streams.devices:
                shadow.written.order(*shadow.applier.tensors())
            shadow.read.order()  # The state's tensors become the live ones, which the next step changes in place.
            shadow.take_over()
        with self.lock:
            if self._shadow is shadow:
                self._shadow, self.state = None, ReplicaState.REPLAYABLE
                self._update_state()
            if self.state is not ReplicaState.AVERAGE_PENDING:  # A later averaging ended meanwhile.
                self.step = shadow.step

    def _apply_next(self) -> bool:
        with self.lock:
            if not self.queue or self.state is not ReplicaState.REPLAYABLE:
                return False
            result = self.queue[0]
            assert result.step == self.step, "a step is missing before it is applied"
        with self.writing():
            result.fence.order(*result.means)
            self.applier.step_with(result.means, result.row)
        with self.lock:
            if self.queue and self.queue[0] is result:  # Not discarded meanwhile.
                self.queue.popleft()
            self.advance()
            self._update_state()
            self._counters.replayed += 1
            self._changed()
        return True

    def adopt(self, snapshot: Snapshot, ended: int) -> bool:
        """Load a state fetched from another source, no older than this one; called under both locks.

        Args:
            snapshot: The fetched state.
            ended: Number of steps that have ended on this rank.

        Returns:
            Whether it was needed; else nothing was changed.
        """
        if not self.state.needs_fetch:
            return False
        self.load(snapshot)
        self.step = snapshot.step
        self._counters.fetched += 1
        # Steps that ended here after the snapshot was taken are still missing; the next step fetches again.
        self.state = ReplicaState.STALE if snapshot.step < ended else ReplicaState.CURRENT
        return True

    def overwritten(self) -> None:
        """Note that the live parameters will be overwritten without the optimizer's state; under `apply_lock`."""
        with self.lock:
            if self.state is ReplicaState.LEFT:
                self.state = ReplicaState.PARAMETERS_ONLY

    def placed(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot whose tensors are on the devices where the parameters and the optimizer need them.

        A copy from the host waits for the device, so this runs before any lock is taken.
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

    def load(self, snapshot: Snapshot, *, parameters: bool = True) -> None:
        """Copy a snapshot into the live parameters; a parameter without state in it keeps its optimizer state.

        Args:
            snapshot: Parameters and state.
            parameters: False to copy the optimizer's state only.
        """
        self.overwritten()
        params = [param for bucket in self.applier.buckets for param in bucket.params]
        with self.writing(parameters=parameters), torch.no_grad():
            for param, value in zip(params, snapshot.params if parameters else (), strict=parameters):
                param.copy_(value)
            for param, state in zip(params, snapshot.state, strict=True):
                if state:
                    self.applier.optimizer.state[param] = {  # Transfer loses the memory format.
                        key: in_format_of(param, value) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }

    # ---- helper and server threads ------------------------------------------------------------------------------

    def replay_one(self) -> bool:
        """Replay the oldest queued step on the shadow. Return whether there was one."""
        with self.apply_lock:
            with self.lock:
                if not self.may_replay():
                    return False
                result, step = self.queue[0], self.step
                shadow = self._shadow
            try:
                shadow = self._replayed(result, shadow, step)
            except torch.cuda.OutOfMemoryError as error:  # The device may have room for the state, but not for another.
                logger.warning("the state of step %d will be fetched, as replaying it needs memory: %s", step, error)
                shadow = None
            with self.lock:
                # A step that cannot be replayed may have ended meanwhile and discarded all this.
                if self.queue and self.queue[0] is result:
                    if shadow is None:
                        self.cannot_replay()
                    else:
                        self.queue.popleft()
                        self._shadow = shadow
                        self._counters.replayed += 1
                self._changed()
            return True

    def _replayed(self, result: Result, shadow: Shadow | None, step: int) -> Shadow | None:
        """Replay a step on the shadow, or on a new one of the live parameters, which are those of `step`.

        Returns:
            The shadow; None if the program has other values in the live parameters.
        """
        if shadow is None:
            with self.copying():
                shadow = Shadow(self.applier, step)
            # Asked behind the copy: the program may have begun to change them meanwhile.
            if self.displaced or self._set_aside:  # A queue would grow for as long as the program keeps them.
                return None
        assert shadow.step == result.step, "a step is missing before a replay"
        shadow.read.order()
        result.fence.order(*result.means)
        shadow.apply(result.means, result.row)
        shadow.written = self._streams.give(SHADOW)
        return shadow

    def shadow_with(self, write: Callable[[Sequence[Bucket], torch.optim.Optimizer], None]) -> None:
        """Create a shadow for the pending averaging, which `write` fills in; called under `apply_lock`."""
        with self.copying():
            shadow = Shadow(self.applier, self.step)
        shadow.fill(write)
        shadow.written = self._streams.give(SHADOW)
        with self.lock:
            if self.state is ReplicaState.AVERAGE_PENDING and self.step == shadow.step:
                self._shadow = shadow
            self._changed()

    def snapshot(
        self, min_step: int = 0, deadline_s: float = _DEVICE_DEADLINE_S, *, state_too: bool = True
    ) -> Snapshot | None:
        """Copy the newest state here (see `StateSource`); None while this rank lacks steps itself.

        The newest state may be on the shadow while the training thread computes or is inactive: it may be waiting, in a
        user's collective, for the very rank that asks. The state a rank had when it left the common steps stays valid
        until other parameters overwrite it, since it may be the only copy.

        Args:
            min_step: Older states are not copied.
            deadline_s: Longest wait for the device, since the host reads the copy.
            state_too: Whether to include the optimizer's state.

        Raises:
            DeadlineError: The device does not finish the copy in time.
        """
        snapshot = self.queue_snapshot(min_step, state_too=state_too)
        if snapshot is not None:
            self._streams.await_host(deadline_s)
        return snapshot

    def queue_snapshot(self, min_step: int, *, state_too: bool) -> Snapshot | None:
        """As `snapshot`, without waiting for the device; the host may not read the copy yet."""
        with self.apply_lock:
            with self.lock:
                shadow, step = self._shadow, self.newest_step
                pending = self.state is ReplicaState.AVERAGE_PENDING and shadow is None
                if not self.state.servable or pending or self.queue or step < min_step or self.partial:
                    return None
            if shadow is None:
                with self.copying():
                    snapshot = _snapshot_of(self.applier, step, state_too)
                return None if self.displaced else snapshot
            if self._streams.devices:
                shadow.written.order(*shadow.applier.tensors())
            snapshot = _snapshot_of(shadow.applier, step, state_too)
            shadow.read.add(self._streams.give(SHADOW_READ))
            return snapshot


def _snapshot_of(source: Applier, step: int, state_too: bool) -> Snapshot:
    params = [param for bucket in source.buckets for param in bucket.params]
    known = source.optimizer.state
    state: list[dict[str, object]] = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in known.get(param, {}).items()}
        if state_too
        else {}
        for param in params
    ]
    return Snapshot(step, [param.detach().clone() for param in params], state)
