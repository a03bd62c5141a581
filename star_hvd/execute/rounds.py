"""The claim rule: every rank submits every bucket of every step exactly once, by its training thread or its helper.

One `RoundEngine` per optimizer and rank. All methods return at once; the training thread and the helper thread loop
around them (`trainer.py`), and a test drives them in any interleaving it likes.

State, all under one lock. `version` counts the steps applied to the live parameters, `next_round` is the first step
this rank has not wholly submitted. They are equal while the training thread computes a gradient that can still be
fresh. Whoever claims the header, always the last tensor of a step, owns the step's completion:

* The training thread claims it when its gradient is whole (`arrive`), waits, averages, applies.
* The helper claims it, with every bucket not yet submitted, when the coordinator closes the step. It submits what is
  left over from before or zeros, and puts the result into a queue. While the training thread computes, the helper
  replays the queue onto a shadow copy; while the training thread is inside `step()`, that thread applies it itself.

A gradient that lost its claim is kept and folded into the next submission of its bucket.
"""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field
from typing import Protocol

import torch

from scheduler.records import Plan
from star_hvd.buckets import Bucket
from star_hvd.errors import StarError
from star_hvd.execute.collective import Collective
from star_hvd.execute.header import Contribution, Header, HeaderCodec
from star_hvd.execute.hyper import HyperRow
from star_hvd.execute.late import LateGradients
from star_hvd.execute.replay import Applier, Shadow

__all__ = ["Counters", "Listener", "Result", "RoundEngine", "Snapshot"]


class DeviceEvent(Protocol):
    """A point in a device's work, `torch.cuda.Event` for example."""

    def query(self) -> bool:
        """Whether the device has got there."""
        ...


class Listener(Protocol):
    """Who wants to know what happens here. Called under the engine's lock: it must only note and return."""

    def on_arrive(self, round_: int, epoch: int) -> None: ...
    def on_late(self, version: int, epoch: int) -> None: ...
    def on_join(self, version: int) -> None: ...
    def on_round(self, round_: int, header: Header, plan: Plan, mean_sqr: float) -> None: ...
    def on_switch(self, round_: int, plan: Plan) -> None: ...
    def on_mismatch(self, round_: int) -> None: ...


@dataclass(slots=True)
class Counters:
    """What happened to this rank's gradients; weights are counted per bucket and divided by the number of buckets."""

    fresh: int = 0
    late: int = 0
    folds: int = 0
    drops: int = 0
    proxied: int = 0
    replayed: int = 0
    fetched: int = 0
    max_staleness: int = 0
    produced_weight: float = 0.0
    applied_weight: float = 0.0
    damped_weight: float = 0.0
    dropped_weight: float = 0.0


@dataclass(slots=True)
class _Round:
    """One step in progress on this rank."""

    number: int
    flats: list[torch.Tensor | None]
    wires: list[torch.Tensor | None]
    handles: list[int | None]
    owner: str = ""
    header: torch.Tensor | None = None
    header_handle: int | None = None
    flagged: Plan | None = None
    folded: int = 0
    waiting: collections.deque[int] = field(default_factory=collections.deque)

    def claimed(self, index: int) -> bool:
        return self.handles[index] is not None


@dataclass(slots=True)
class Result:
    """A reduced step: averaged gradients, one flat buffer per bucket, and the hyperparameters to apply it with."""

    round: int
    means: list[torch.Tensor]
    row: tuple[float, ...] | None


@dataclass(slots=True)
class Snapshot:
    """Parameters and optimizer state after `version` steps, for a rank that cannot replay."""

    version: int
    params: list[torch.Tensor]
    state: list[dict[str, object]]


class RoundEngine:
    """See the module's text.

    Args:
        rank: This rank.
        plan: The first plan, in force from step 0; must be `sync`.
        applier: Steps the live parameters.
        collective: Reduces tensors.
        listener: Is told what happens.
        prefix: Names of the collectives start with it; unique per optimizer and equal on all ranks.
        scale_by_ranks: Whether the result is the mean times the number of ranks (`op=Sum`).
        can_replay: Whether the optimizer's steps can be replayed on a copy.
        replay_queue: Closed steps kept for a training thread inside `step()` before closing waits for it.
        noise_interval_steps: Every how many steps the local gradient norm is taken.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: Plan,
        applier: Applier,
        collective: Collective,
        listener: Listener,
        prefix: str = "star",
        scale_by_ranks: bool = False,
        can_replay: bool = True,
        replay_queue: int = 8,
        noise_interval_steps: int = 8,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.plan = plan
        self.prepared: Plan | None = None
        self.pinned: str | None = None
        self.applier = applier
        self.collective = collective
        self.listener = listener
        self.prefix = prefix
        self.counters = Counters()
        self.version = 0
        self.next_round = 0
        self.own_steps = 0
        self.away = False
        self.weight = 1.0
        self.loss = float("nan")
        self.needs_fetch = False
        self.failure: BaseException | None = None
        self.lock = threading.Condition(threading.RLock())
        self.apply_lock = threading.RLock()
        self._scale_by_ranks = scale_by_ranks
        self._can_replay = can_replay
        self._replay_queue = replay_queue
        self._noise_interval_steps = noise_interval_steps
        self._computing = True
        self._queue: collections.deque[Result] = collections.deque()
        self._shadow: Shadow | None = None
        self._deferred: dict[int, DeviceEvent] = {}
        self._late = LateGradients(applier.buckets, self.counters)
        self._codec = HeaderCodec(plan.world_size, applier.hyper.size)
        self._current = self._open(0)
        self._inflight: _Round | None = None
        self._close_upto = -1
        self._leader = 0
        self._agreed_row: tuple[float, ...] | None = None
        self._mixed = False
        self._checksum_round: int | None = None
        self._local_sqr = 0.0

    # ---- training thread ------------------------------------------------------------------------------------

    def gradient_ready(self, index: int) -> None:
        """The training thread's gradient of one bucket is whole in the bucket's `flat`.

        Submits it as this step's contribution when nobody has, else keeps it for a later step.
        """
        with self.lock:
            self._raise_failure()
            bucket = self.applier.buckets[index]
            self.counters.produced_weight += self.weight / len(self.applier.buckets)
            if self.version == self.next_round and not self._current.claimed(index):
                self._submit_fresh(bucket)
            else:
                self._late.keep(bucket, self.weight, self.version)
                self.lock.notify_all()

    def defer(self, index: int, event: DeviceEvent) -> None:
        """A bucket will be whole once `event` has happened on its device; until then its gradient can lose its step."""
        with self.lock:
            self._raise_failure()
            self._deferred[index] = event
            self.lock.notify_all()

    def flush_deferred(self) -> bool:
        """Submit the deferred buckets that are whole by now. Whether none is left to wait for.

        A gradient that has lost its step anyway is kept at once: copies are ordered on its device's stream.
        """
        with self.lock:
            self._raise_failure()
            for index, event in list(self._deferred.items()):
                lost = self.version != self.next_round or self._current.claimed(index)
                if lost or event.query():
                    del self._deferred[index]
                    self.gradient_ready(index)
            return not self._deferred

    def layout_changed(self, hyper: HyperRow) -> None:
        """Buckets were added on all ranks after the same step, in lockstep; headers and rounds take their new form."""
        with self.apply_lock, self.lock:
            if self.version != self.next_round or self._inflight is not None or self._queue:
                raise StarError("parameters were added while a step was in flight; add them between two steps")
            self.applier.hyper = hyper
            self._codec = HeaderCodec(self.world_size, hyper.size)
            self._agreed_row = None
            self._current = self._open(self.next_round)

    def arrive(self, *, manual: bool = False) -> bool:
        """The training thread has given all its buckets. Whether its gradient is in the step, else it is behind.

        Args:
            manual: The user works on the result between `synchronize` and `step`, so helpers cannot replay it.
        """
        with self.lock:
            self._raise_failure()
            self._computing = False
            self.own_steps += 1
            if self.version != self.next_round:
                self.counters.late += 1
                self.listener.on_late(self.version, self.plan.epoch)
                return False
            missing = [i for i in range(len(self.applier.buckets)) if not self._current.claimed(i)]
            if missing:
                raise StarError(f"buckets {missing} of step {self.version} were not submitted before arrive()")
            self._claim_header("trainer", fresh=True, manual=manual or not self._can_replay)
            self.counters.fresh += 1
            self.listener.on_arrive(self.version, self.plan.epoch)
            self.lock.notify_all()
            return True

    def own_handles(self) -> list[int]:
        """Handles of the step that the training thread owns, after `arrive` returned True."""
        with self.lock:
            self._raise_failure()
            assert self._inflight is not None and self._inflight.owner == "trainer"
            return _handles(self._inflight)

    def finish_own(self) -> Result:
        """Average the step the training thread owns, in place; its handles must have ended."""
        with self.lock:
            self._raise_failure()
            assert self._inflight is not None and self._inflight.owner == "trainer"
            result = self._complete(self._inflight)
            self._inflight = None
            self.lock.notify_all()
            return result

    def apply_own(self, result: Result, step: object = None) -> object:
        """Apply the training thread's own step to the live parameters.

        Args:
            result: What `finish_own` returned.
            step: Callable that applies it; the applier's step where None.
        """
        with self.apply_lock:
            apply = step if callable(step) else self.applier.step
            value = apply(result.row)
            with self.lock:
                self.version += 1
                self.lock.notify_all()
            return value

    def catch_up(self, target: int) -> bool:
        """Bring the live parameters up to the closed steps, without waiting.

        Returns:
            True when the training thread may compute again: it has every step that ended here, or at least `target`
            of them (a rank whose optimizer step is slower than the others' whole step would never leave otherwise;
            the helper replays the rest). False: call again after a step in flight has ended.
        """
        with self.lock:
            self._raise_failure()
            self._computing = False
        with self.apply_lock:
            self._take_shadow_over()
            self._drain_queue()
        with self.lock:
            self._raise_failure()
            behind = self._queue or (self._inflight is not None and self.version < self.next_round)
            if (self.needs_fetch or behind) and self.version < target:
                return False
            self._computing = True
            self._local_sqr = 0.0
            self.lock.notify_all()
            return True

    def note_joined(self) -> None:
        """Tell that the training thread, which was behind, starts on the parameters of step `version`."""
        with self.lock:
            self.listener.on_join(self.version)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take parameters and optimizer state fetched from another rank.

        Raises:
            StarError: The snapshot is older than what is here, or from a step that has not ended here.
        """
        with self.apply_lock, self.lock:
            if not self.version <= snapshot.version <= self.next_round:
                raise StarError(
                    f"fetched parameters are of step {snapshot.version}; expected {self.version}..{self.next_round}"
                )
            optimizer = self.applier.optimizer
            params = [param for bucket in self.applier.buckets for param in bucket.params]
            with torch.no_grad():
                for param, value in zip(params, snapshot.params, strict=True):
                    param.copy_(value)
            for param, state in zip(params, snapshot.state, strict=True):
                optimizer.state[param] = dict(state)
            self.version = snapshot.version
            self.counters.fetched += 1
            # Steps that ended here after the snapshot was taken are still missing; the next step fetches again.
            ended = self._inflight.number if self._inflight is not None else self.next_round
            self.needs_fetch = snapshot.version < ended

    def snapshot(self) -> Snapshot | None:
        """A copy of the live parameters and optimizer state, None while this rank is itself behind."""
        with self.apply_lock:
            with self.lock:
                if self.needs_fetch or self._shadow is not None or self._queue:
                    return None
                version = self.version
            optimizer = self.applier.optimizer
            params = [param for bucket in self.applier.buckets for param in bucket.params]
            state = [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
                for p in params
            ]
            return Snapshot(version, [p.detach().clone() for p in params], state)

    # ---- helper thread --------------------------------------------------------------------------------------

    def close(self, round_: int) -> None:
        """The coordinator closes `round_`.

        Outside a relaxed plan the order is carried out only while this rank really is away: a rank that came back
        before the order reached it delivers its gradient itself, so `sync` stays exact.
        """
        with self.lock:
            self._close_upto = max(self._close_upto, round_)
            self.lock.notify_all()

    def set_away(self, away: bool) -> None:
        """Whether the training thread is outside its training loop and delivers no gradient for now."""
        with self.lock:
            self.away = away
            self.lock.notify_all()

    def helper_has_work(self) -> bool:
        """Whether `helper_tick` would do something now. A step in flight counts: it has to be polled."""
        with self.lock:
            due = self._helper_owns() or self._may_close() or self._may_replay() or bool(self._deferred)
            return self.failure is None and due

    def helper_owns(self) -> bool:
        """Whether a step is in flight that the helper has to complete."""
        with self.lock:
            return self._helper_owns()

    def must_poll(self) -> bool:
        """Whether the helper waits for something that nobody announces: a reduction or a device."""
        with self.lock:
            return self._helper_owns() or bool(self._deferred)

    def helper_tick(self) -> bool:
        """Do one thing that is due, without waiting. Whether something was done."""
        with self.lock:
            self._raise_failure()
            if self._deferred:
                self.flush_deferred()
            if self._helper_owns():
                return self._poll_inflight()
            if self._may_close():
                self._proxy()
                return True
        return self._replay_one()

    # ---- both -----------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> str | None:
        """Get ready for a plan and raise its flag in the next headers. A reason why not, or None."""
        with self.lock:
            if plan.world_size != self.world_size:
                return f"the plan is for {plan.world_size} ranks, this job has {self.world_size}"
            if plan.epoch <= self.plan.epoch:
                return f"the plan's epoch {plan.epoch} is not newer than {self.plan.epoch}"
            if plan.relaxed and self.pinned:
                return self.pinned
            self.prepared = plan
            return None

    def abandon(self, epoch: int) -> None:
        """Lower the flag of a plan that some rank could not prepare."""
        with self.lock:
            if self.prepared is not None and self.prepared.epoch == epoch:
                self.prepared = None

    def pin(self, reason: str) -> None:
        """Refuse relaxed plans from now on."""
        with self.lock:
            self.pinned = reason
            if self.prepared is not None and self.prepared.relaxed:
                self.prepared = None

    def fail(self, error: BaseException) -> None:
        """Stop: every later call raises `error`."""
        with self.lock:
            if self.failure is None:
                self.failure = error
            self.lock.notify_all()

    def drop_pending(self) -> None:
        """Count the gradients that still wait for a step as dropped: there is no further step."""
        with self.lock:
            self._late.drop_all()

    @property
    def pending_weight(self) -> float:
        """Weight of late gradients that wait for a step, on the scale of the counters."""
        with self.lock:
            return self._late.pending_weight

    # ---- inside ---------------------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _open(self, number: int) -> _Round:
        n = len(self.applier.buckets)
        return _Round(number, [None] * n, [None] * n, [None] * n)

    def _submit_fresh(self, bucket: Bucket) -> None:
        flat = bucket.flat
        if self._current.number % self._noise_interval_steps == 0:
            self._local_sqr += float(torch.linalg.vector_norm(flat[:-1], dtype=torch.float32)) ** 2
        if self.weight != 1.0:
            flat[:-1].mul_(self.weight)
        flat[-1] = self.weight
        self.counters.applied_weight += self.weight / len(self.applier.buckets)
        self._fold(bucket, flat)
        self._submit(bucket, flat)

    def _fold(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._late.fold(bucket, flat, self._current.number, self.plan):
            self._current.folded += 1

    def _submit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        wire = bucket.to_wire(flat)
        self._current.flats[bucket.index], self._current.wires[bucket.index] = flat, wire
        self._current.handles[bucket.index] = self.collective.submit(f"{self.prefix}.b{bucket.index}", wire)

    def _claim_header(self, owner: str, *, fresh: bool, manual: bool = False) -> None:
        """Submit the header of the current round, which makes `owner` responsible for its completion."""
        round_ = self._current
        # The last owner applied or queued its step before anybody can get here: one step in flight at a time.
        assert self._inflight is None, "two steps in flight"
        round_.owner = owner
        round_.header = torch.zeros(self._codec.size, dtype=torch.float32)
        self._codec.write(self.rank, self._contribution(fresh, manual), round_.header.numpy())
        round_.header_handle = self.collective.submit(f"{self.prefix}.h", round_.header)
        self._inflight = round_
        self.next_round = round_.number + 1
        self._current = self._open(self.next_round)

    def _contribution(self, fresh: bool, manual: bool) -> Contribution:
        item = Contribution(fresh=fresh, own_steps=self.own_steps)
        # Two own steps first: what forbids relaxed modes (a GradScaler, sparse gradients) shows itself in the first.
        if self.prepared is not None and (self.own_steps > 1 or not self.prepared.relaxed):
            item.flag_epoch_delta = self.prepared.epoch - self.plan.epoch
            self._current.flagged = self.prepared
        if self._leader == self.rank:
            item.hyper = (
                self.applier.hyper.read(self.applier.optimizer.param_groups)
                if fresh or self._agreed_row is None
                else self._agreed_row
            )
        item.folds = self._current.folded / len(self.applier.buckets)
        if not fresh:
            return item
        item.manual, item.weight, item.loss = manual, self.weight, self.loss
        self.loss = float("nan")
        if self._current.number % self._noise_interval_steps == 0:
            item.local_sqr = self._local_sqr
        if self._checksum_round == self._current.number:
            item.checksum = self.applier.checksum()
        return item

    def _complete(self, round_: _Round) -> Result:
        """Turn sums into means and act on the header. The handles have ended and are collected."""
        assert round_.header is not None
        header = self._codec.read(round_.header.numpy())
        means: list[torch.Tensor] = []
        for bucket in self.applier.buckets:
            flat, wire = round_.flats[bucket.index], round_.wires[bucket.index]
            assert flat is not None and wire is not None
            bucket.from_wire(wire, flat)
            weight = float(flat[-1])
            factor = weight / self.world_size if self._scale_by_ranks else weight
            if factor not in (0.0, 1.0):
                flat[:-1].div_(factor)
            means.append(flat)
        mean_sqr = float("nan")
        if header.local_count == self.world_size:
            mean_sqr = sum(float(torch.linalg.vector_norm(m[:-1], dtype=torch.float32)) ** 2 for m in means)
        return Result(round_.number, means, self._read_header(round_, header, mean_sqr))

    def _read_header(self, round_: _Round, header: Header, mean_sqr: float) -> tuple[float, ...] | None:
        """Act on what all ranks see alike in this step; the row of hyperparameters to apply it with."""
        number = round_.number
        if header.hyper is not None:
            self._agreed_row = header.hyper
        self._leader = header.leader
        self._mixed = self._mixed or self.plan.relaxed or not header.complete
        row = self._agreed_row if self._mixed else None
        if header.manual and round_.owner == "helper":
            self._must_fetch()
        if header.checksum_ok is False:
            self.listener.on_mismatch(number)
        self.listener.on_round(number, header, self.plan, mean_sqr)
        self._maybe_switch(number, header, round_.flagged)
        return row

    def _maybe_switch(self, number: int, header: Header, flagged: Plan | None) -> None:
        delta = header.agreed_epoch_delta(self.world_size)
        if delta is None:
            return
        # Everybody raised the flag for this plan in this very step, so everybody takes it up now, even if it has
        # been abandoned or followed by a newer one while the step was in flight.
        assert flagged is not None and flagged.epoch - self.plan.epoch == delta
        self.plan = flagged
        if self.prepared is not None and self.prepared.epoch <= flagged.epoch:
            self.prepared = None
        self._checksum_round = number + 1
        self.listener.on_switch(number + 1, self.plan)

    def _must_fetch(self) -> None:
        self.needs_fetch = True
        self._queue.clear()
        self._shadow = None

    def _helper_owns(self) -> bool:
        return self._inflight is not None and self._inflight.owner == "helper"

    def _may_close(self) -> bool:
        """Whether the helper may stand in for the training thread in the current round."""
        if self._inflight is not None or self._close_upto < self.next_round:
            return False
        if len(self._queue) >= self._replay_queue:
            return False
        return self.away or self.plan.relaxed

    def _proxy(self) -> None:
        """Stand in: submit every bucket the training thread has not, then the header."""
        for bucket in self.applier.buckets:
            if not self._current.claimed(bucket.index):
                flat = bucket.new_flat()
                self._fold(bucket, flat)
                self._submit(bucket, flat)
        self._claim_header("helper", fresh=False)
        self.counters.proxied += 1

    def _poll_inflight(self) -> bool:
        round_ = self._inflight
        assert round_ is not None
        if not round_.waiting:
            round_.waiting.extend(_handles(round_))
        while round_.waiting and self.collective.poll(round_.waiting[0]):
            self.collective.finish(round_.waiting.popleft())
        if round_.waiting:
            return False
        result = self._complete(round_)
        self._inflight = None
        if not self.needs_fetch:
            # The bucket's own buffer becomes the training thread's again; the queue keeps a copy of its result.
            own = [m.clone() if m is b.flat else m for m, b in zip(result.means, self.applier.buckets, strict=True)]
            self._queue.append(Result(result.round, own, result.row))
        self.lock.notify_all()
        return True

    def _may_replay(self) -> bool:
        return bool(self._queue) and self._computing

    def _replay_one(self) -> bool:
        with self.apply_lock:
            with self.lock:
                if not self._may_replay():
                    return False
                result = self._queue[0]
                version = self.version
            if self._shadow is None:
                self._shadow = Shadow(self.applier, version)
            assert self._shadow.version == result.round, "a step is missing before a replay"
            self._shadow.apply(result.means, result.row)
            with self.lock:
                if self._queue and self._queue[0] is result:
                    self._queue.popleft()
                self.counters.replayed += 1
                self.lock.notify_all()
            return True

    def _take_shadow_over(self) -> None:
        with self.lock:
            shadow, self._shadow = self._shadow, None
            if self.needs_fetch or shadow is None:
                return
        shadow.take_over()
        with self.lock:
            self.version = shadow.version

    def _drain_queue(self) -> None:
        while True:
            with self.lock:
                if not self._queue or self.needs_fetch:
                    return
                result = self._queue.popleft()
                assert result.round == self.version, "a step is missing before it is applied"
            self.applier.step_with(result.means, result.row)
            with self.lock:
                self.version += 1
                self.counters.replayed += 1
                self.lock.notify_all()


def _handles(round_: _Round) -> list[int]:
    assert round_.header_handle is not None
    return [handle for handle in round_.handles if handle is not None] + [round_.header_handle]
