"""Mode `ps` on a worker: push gradients to parameter servers and get parameters back; nothing is reduced here.

With early pushes (`Plan.pushes_early`) a bucket is sent within backward, when its gradient is complete; `step` sends
the rest and announces the push. The servers count a push from its announcement, so rules and outcomes are unchanged. If
a program changes gradients before `step`, e.g. clips them by hand, what was sent is void: the whole push is repeated
under a new number, and from then on no push starts within backward.

With gates (`Plan.in_background`) `step` waits only for the push's result: parameters arrive while the program continues
(`arriving.py`), unless `torch.compile` is in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError, StarError
from star_hvd.modes.arriving import ArrivingParameters, Gates
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Client", "Outcome", "ServerSteps", "StepInfo"]

logger = logging.getLogger("star_hvd")

_LOOK_S = 5.0


class Client(Protocol):
    """The part of `star_hvd.ps.worker.client.Client` used here."""

    def ranges(self, index: int) -> list[tuple[int, int, int]]: ...
    def give(self, step: int, index: int, flat: torch.Tensor, small: Mapping[int, bytes]) -> None: ...
    def push(
        self,
        *,
        step: int,
        version: int,
        flats: Sequence[torch.Tensor],
        weight: float,
        count: int,
        own_steps: int,
        row: Sequence[float],
        loss: float,
        keep: bool,
        small: Mapping[int, bytes],
    ) -> None: ...
    def wait(self, deadline_s: float, *, whole: bool = True) -> Any: ...
    def wait_bucket(self, index: int, deadline_s: float) -> None: ...
    def finish(self, deadline_s: float) -> int: ...
    def describe(self) -> str: ...
    def pull(
        self,
        deadline_s: float,
        *,
        known: int | None = None,
        empty: bool = False,
        check: Callable[[], None] = ...,
        look_s: float = ...,
    ) -> Any: ...
    def state(self, deadline_s: float, *, check: Callable[[], None] = ..., look_s: float = ...) -> Snapshot: ...
    def absent(self, inactive: bool) -> None: ...
    def wake(self) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class Compressed(Protocol):
    """The part of `star_hvd.compression.server_pushes.ServerPushes` used here."""

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]: ...
    def ended(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Outcome of one gradient: staleness, seconds between its push and the reply, the id of the plan acted on."""

    version: int
    staleness: int
    comm_s: float
    plan_id: int


@dataclass(slots=True)
class Outcome:
    """Parameters after a push; `kind` is `moved` if the servers have made their last update."""

    kind: str
    version: int
    plan_id: int
    params: list[torch.Tensor]
    applied: bool = True
    damped: float = 0.0


class ServerSteps:
    """Steps of mode `ps`; see the module docstring.

    Args:
        engine: This rank's engine, which reduces nothing meanwhile.
        plan: The plan.
        client: Connection to the servers.
        deadline_s: Longest wait for the servers.
        on_step: Called with every step.
        on_notes: Gets the servers' notes on their updates.
        plan_of: Returns the plan of an id that the servers have adopted, None if it is unknown here.
        same_session: Whether the same servers serve both plans without ending in between.
        early: Whether to send buckets within backward.
        gates: Gates in front of parameters that are still arriving when `step` returns; None if it waits for all.
        compressed: Compresses pushes; None to send them unchanged.
        on_wait: Gets the seconds of every wait of the training thread for such parameters, which is not its own work.
        check_ranks: See `ArrivingParameters`.
        look_s: Interval of these checks.
    """

    def __init__(
        self,
        engine: StepEngine,
        plan: Plan,
        client: Client,
        *,
        deadline_s: float,
        on_step: Callable[[StepInfo], None],
        on_notes: Callable[[list[Any]], None],
        plan_of: Callable[[int], Plan | None],
        same_session: Callable[[Plan, Plan], bool],
        early: bool = False,
        gates: Gates | None = None,
        compressed: Compressed | None = None,
        on_wait: Callable[[float], None] = lambda seconds: None,
        check_ranks: Callable[[], None] = lambda: None,
        look_s: float = _LOOK_S,
    ) -> None:
        self.plan = plan
        self.client = client
        self._engine = engine
        self._deadline_s = deadline_s
        self._check_ranks, self._look_s = check_ranks, look_s
        self._on_step = on_step
        self._on_notes = on_notes
        self._plan_of = plan_of
        self._same_session = same_session
        self._pushes = 0
        self._moved = False
        # Not if gradients are clipped, which needs all of them, or on a device, from which they are copied as a whole.
        self._early = early and engine.applier.max_grad_norm is None and not engine.streams.devices
        made = gates is not None and not engine.streams.devices
        self._arriving: ArrivingParameters | None = None
        if gates is not None and made:
            self._arriving = ArrivingParameters(engine, client, gates, deadline_s, on_wait, check_ranks, look_s)
        self._behind = False  # Whether this step's parameters may arrive behind it.
        self._begun = False  # Whether this step's push has started within backward, with nothing changed since.
        self._given: dict[int, tuple[int, int]] = {}  # Buckets sent before `step`, with their `_state_of` then.
        # The parameters as received: their version and values, in the client's buffers, until the next push.
        self._held: tuple[int, Sequence[torch.Tensor]] | None = None
        self._on_their_way: Sequence[torch.Tensor] = ()
        self._compressed = compressed if not engine.streams.devices else None
        self._weights: dict[int, float] = {}  # Of this push, per bucket: a bfloat16 buffer rounds its own.
        self._small: dict[int, bytes] = {}  # Of this push, per chunk: what is sent instead of its part of the buffer.

    @property
    def wanted(self) -> bool:
        """Whether this object's servers still serve the plan in force."""
        plan = self._engine.plan
        return plan.plan_id == self.plan.plan_id or self._same_session(self.plan, plan)

    @property
    def over(self) -> bool:
        """Whether this rank has nothing left to do with these servers."""
        return self._moved or not self.wanted

    @property
    def acts_on(self) -> int:
        """The plan id that the report of this step carries: that of the plan in force."""
        return self._engine.plan.plan_id

    # ---- training thread ------------------------------------------------------------------------------------

    def give(self, bucket: Bucket) -> None:
        """Handle a complete gradient, and send it if pushes start early."""
        self._engine.outside_gradient()
        # Only `step` folds in a late gradient: no step may follow this backward pass.
        if self._early and not self.over and not self._engine.pending_weight:
            if not self._given or bucket.index in self._given:  # The latter if no step followed a backward pass.
                # Buckets that this forward pass did not use may still be under way, and servers forget a push of which
                # not all has arrived once they have parts of a later one.
                self._finish_arriving()
                self._given.clear()
                self._small.clear()
                self._pushes += 1
            small = self._weigh(bucket)
            self._given[bucket.index] = _state_of(bucket.flat)
            self.client.give(self._pushes, bucket.index, bucket.flat, small=small)

    def step(self, *, skip: bool) -> Any:
        """Push this rank's gradient and wait for parameters.

        If a rank is late, the others wait for it no longer than the servers' rule says; its gradient becomes part of a
        later update.

        Args:
            skip: Push zeros of weight 0 in the gradient's place (a GradScaler found infinities in it): the servers'
                rule may wait for a push.
        """
        engine = self._engine
        self._finish_arriving()
        self._refuse_written_parameters()
        engine.own.steps += 1
        engine.applier.clip()  # Here, since no process ever holds the whole averaged gradient.
        flats, version = self._contribution(skip=skip), engine.step
        weights = [self._weights[bucket.index] for bucket in engine.applier.buckets]
        if self.over:  # The mode ended while this rank was computing.
            engine.keep_late([flat.clone() for flat in flats], version, weights=weights)
            return None
        self._behind = self._arriving is not None and self._arriving.allowed()
        began_s = time.monotonic()
        # Time that this step's forward pass waited for the previous step's parameters.
        arriving_s = self._arriving.take_waited_s() if self._arriving is not None else 0.0
        outcome = self._exchange(flats, weights)
        self._account(flats, weights, version, outcome)
        if outcome.kind == "moved":
            self._moved = True
        else:
            self._write(outcome, arriving=self._behind)
            staleness = max(0, outcome.version - 1 - version)
            self._on_step(StepInfo(outcome.version, staleness, arriving_s + time.monotonic() - began_s, self.acts_on))
            if self._compressed is not None:
                self._compressed.ended()
        return None

    def _contribution(self, *, skip: bool) -> list[torch.Tensor]:
        """Return the buckets' buffers as pushed: gradients times weight, the weight, late gradients folded in."""
        given, self._given = self._given, {}
        for bucket in self._engine.applier.buckets:
            if skip or bucket.index not in given:
                self._weigh(bucket, skip=skip)
        buckets = self._engine.applier.buckets
        unchanged = not skip and all(_state_of(buckets[index].flat) == was for index, was in given.items())
        self._begun = bool(given) and unchanged
        if given and not self._begun:
            self._early = False
            self._small.clear()
            logger.info("gradients were changed before step(): pushes do not begin within backward any more")
        return [bucket.flat for bucket in buckets]

    def _weigh(self, bucket: Bucket, *, skip: bool = False) -> Mapping[int, bytes]:
        """Turn the bucket's buffer into what is pushed. Return per chunk what is sent instead of its part of it."""
        own = self._engine.own.weigh(bucket, skip=skip)
        self._weights[bucket.index] = own + self._engine.fold_late(bucket, bucket.flat)
        if self._compressed is None or skip:
            return {}
        ranges = self.client.ranges(bucket.index)
        made = self._compressed.shrink(bucket, [(start, stop) for _, start, stop in ranges])
        small = {index: data for (index, _, _), data in zip(ranges, made, strict=True) if data is not None}
        self._small |= small
        return small

    def _refuse_written_parameters(self) -> None:
        """Raise if the program has changed the parameters for good: servers do not know of it and would undo it.

        Raises:
            StarError: It has.
        """
        # Few values are compared in every step, all of them if these differ.
        if self._held is not None and self._engine.replica.displaced and self._known() is None:
            raise StarError(
                f"rank {self._engine.rank}: the program changed parameters in mode {self.plan.label}, whose servers "
                "hold their own and would undo that in this step. To load a state, do so on all ranks alike where they "
                "all meet, and call hvd.barrier() before the next step; or load it on one rank and call "
                "hvd.broadcast_parameters(). A program that changes parameters between steps needs mode='sync' or "
                "accuracy='exact'"
            )

    def _exchange(self, flats: list[torch.Tensor], weights: Sequence[float]) -> Outcome:
        return self._push(flats, weights, count=1)

    @property
    def _computed_on(self) -> int:
        """Version of the parameters that the pushed gradients were computed on."""
        return self._engine.step

    def _push(self, flats: Sequence[torch.Tensor], weights: Sequence[float], *, count: int) -> Outcome:
        engine = self._engine
        self._held = None  # The answer is written into the same buffers.
        engine.streams.await_host(self._deadline_s)
        if not self._begun:
            self._pushes += 1
        self._begun = False
        self.client.push(
            step=self._pushes,
            version=self._computed_on,
            flats=flats,
            weight=sum(weights) / max(1, len(weights)),
            count=count,
            own_steps=engine.own.steps,
            row=engine.applier.hyper.read(engine.applier.optimizer.param_groups),
            loss=engine.own.loss,
            keep=True,
            small=self._small,
        )
        self._small = {}
        return self._await_reply()

    def _await_reply(self) -> Outcome:
        wait = WaitTime(self._look_s, self._missing)
        while wait.count() < self._deadline_s:
            if self._engine.failure is not None:
                raise self._engine.failure
            try:
                reply = self.client.wait(self._look_s, whole=not self._behind)
            except DeadlineError:
                # An update may wait for a part that a rank announced before its process died.
                self._check_ranks()
                continue
            if reply.kind == "interrupted":
                continue
            self._on_notes(reply.notes)
            return Outcome(
                reply.kind,
                reply.version,
                reply.plan_id,
                reply.params,
                applied=reply.applied,
                damped=_damped(reply.notes, self._engine.rank) if reply.applied else 0.0,
            )
        raise DeadlineError(
            f"the parameter servers of {self._engine.plan.label} gave no parameters within {self._deadline_s:g} s; "
            "see the log of rank 0 for a server or a rank that is missing"
        )

    def _missing(self) -> str:
        return f"the parameter servers of {self._engine.plan.label} ({self.client.describe()})"

    def _account(
        self, flats: Sequence[torch.Tensor], weights: Sequence[float], version: int, outcome: Outcome
    ) -> None:
        """Count the outcome of this rank's own gradient; one that came after the last update is kept for the next."""
        counters = self._engine.counters
        weight = sum(weights) / max(1, len(weights))
        if outcome.kind == "moved" and not outcome.applied:
            self._engine.keep_late([flat.clone() for flat in flats], version, weights=weights)
            return
        with self._engine.lock:  # Another rank's late gradients may arrive and be counted now.
            if outcome.applied:
                counters.fresh += 1
                counters.applied_weight += weight * (1.0 - outcome.damped)
                counters.damped_weight += weight * outcome.damped
                counters.max_staleness = max(counters.max_staleness, outcome.version - 1 - version)
            else:
                counters.drops += 1
                counters.dropped_weight += weight

    def _write(self, outcome: Outcome, *, arriving: bool = False) -> None:
        engine = self._engine
        with engine.replica.apply_lock:
            engine.replica.overwritten()
            if arriving and self._arriving is not None:
                self._arriving.begin(outcome.params)
                self._held, self._on_their_way = None, outcome.params
            else:
                self._copy(outcome.params)
                self._held = outcome.version, self._values(outcome.params)
            engine.note_step(outcome.version)
        if outcome.plan_id > engine.plan.plan_id:
            plan = self._plan_of(outcome.plan_id)
            if plan is not None and plan.family == self.plan.family == "ps":
                engine.adopt_plan(plan)

    def _copy(self, params: Sequence[torch.Tensor]) -> None:
        with self._engine.replica.writing(), torch.no_grad():
            for bucket, flat in zip(self._engine.applier.buckets, params, strict=True):
                for param, view in zip(bucket.params, bucket.split(flat), strict=True):
                    param.copy_(view)

    def _values(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of flat parameters, one per parameter."""
        pairs = zip(self._engine.applier.buckets, flats, strict=True)
        return [view for bucket, flat in pairs for view in bucket.split(flat)]

    def _finish_arriving(self) -> None:
        """Wait for parameters that are still arriving, before they are used otherwise."""
        version = self._arriving.finish() if self._arriving is not None else None
        if version is not None:
            self._held = version, self._values(self._on_their_way)
        if version is not None and version < self._engine.step:  # From a server that was restarted meanwhile.
            self._engine.note_step(version)

    def _known(self) -> int | None:
        """Return the version of the servers' parameters held here; None if the program has written to them since.

        Compares contents: a tensor's version does not reflect writes through `param.data` or NumPy.
        """
        if self._held is None:
            return None
        version, values = self._held
        params = (param for bucket in self._engine.applier.buckets for param in bucket.params)
        for param, value in zip(params, values, strict=True):
            # In a group the values are on the parameters' device.
            if not _same(param.detach().cpu(), value.cpu().to(param.dtype)):
                return None
        return version

    def program_wrote(self) -> bool:
        """Whether the program has written to the parameters since they were received, and the values are still there.

        Called where ranks meet or a state is loaded; waits for parameters that are arriving.
        """
        self._finish_arriving()
        return self._known() is None if self._held is not None else self._engine.replica.loaded

    def catch_up(self) -> None:
        """Get the newest parameters, e.g. at the end of an epoch; those already here are not sent again."""
        self._finish_arriving()
        if not self.over:
            reply = self._pull(known=self._known())
            if reply.kind == "params":
                self._write(Outcome("params", reply.version, reply.plan_id, reply.params))

    def refresh_state(self) -> None:
        """Get parameters and optimizer state of one consistent version, for a checkpoint.

        Parameters that the program has written stay; the optimizer's state is the newest all the same.
        """
        wrote = self.program_wrote()
        if not self.over:
            snapshot = self.client.state(self._deadline_s, check=self._check_wait, look_s=self._look_s)
            if wrote:
                self._engine.adopt_optimizer_state(snapshot)
                return
            self._engine.adopt_state(snapshot)
            self._held = snapshot.step, snapshot.params

    def set_inactive(self, inactive: bool) -> None:
        """Tell the servers whether to wait for this rank's gradients."""
        self.client.absent(inactive)

    def confirm_inactive(self) -> None:
        """Wait until the servers have processed that; later requests are answered after it."""
        if not self.over:
            self._pull(empty=True)

    def _pull(self, **asks: Any) -> Any:
        return self.client.pull(self._deadline_s, check=self._check_wait, look_s=self._look_s, **asks)

    def _check_wait(self) -> None:
        """Raise what makes a wait for the servers pointless: a lost rank may have taken its server with it."""
        if self._engine.failure is not None:
            raise self._engine.failure
        self._check_ranks()

    def wake(self) -> None:
        """Interrupt a wait, since something changed that it should notice."""
        self.client.wake()

    def drain(self) -> None:
        """Does nothing: no other rank waits for this one here."""

    def shutdown(self) -> None:
        """Does nothing: no other rank waits for this one here."""

    def exit(self) -> None:
        """Leave the mode, which has ended; the client stays until the final state has been fetched.

        Its memory for pushes does not: the client may stay until the next mode with servers, or the end of the job.
        """
        if self._arriving is not None:
            self._arriving.stop()
        self.client.release()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal, where NaN equals NaN."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _state_of(flat: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a buffer in host memory is written to: its version and the sum of its bits.

    The version alone does not reflect changes through `param.grad.data` or NumPy.
    """
    content = flat.view(torch.uint8).numpy()
    end = content.size // 8 * 8
    return flat._version, int(content[:end].view(np.int64).sum()) ^ int.from_bytes(content[end:].tobytes(), "little")


def _damped(notes: Sequence[dict[str, Any]], rank: int) -> float:
    """Return the fraction of this rank's latest gradient that damping removed, from the servers' notes."""
    found = [note["damped"][note["ranks"].index(rank)] for note in notes if rank in note["ranks"]]
    return float(found[-1]) if found else 0.0
