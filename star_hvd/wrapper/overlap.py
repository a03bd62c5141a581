"""`overlap=True`: `step()` returns once its gradients are submitted; every bucket is applied when it is needed.

Reductions and arithmetic are those of `sync`: the user's own optimizer class applies each bucket's mean to the bucket's
parameters, with the hyperparameters as they were in `step()`. Until then the bucket's gates are closed
(`forward_gates.py`), so that every use of a parameter waits for it; `finish` waits for all buckets and ends the step.

All of this may be called in any thread, since any thread may use a parameter. `Replica.apply_lock` is held while a
bucket is applied, never while it is waited for.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from scheduler.transmission.decision import OVERLAP
from scheduler.transmission.off_switch import OffSwitch
from scheduler.transmission.order import order_in_groups
from scheduler.transmission.sizes import SizeSearch
from star_hvd.engine.applier import steps_by_bucket
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.collective import wait_all
from star_hvd.engine.device import APPLIED, DONE, SUBMITTED, Fence
from star_hvd.engine.header import Header
from star_hvd.engine.surroundings import Surroundings
from star_hvd.modes.driver import StepDriver
from star_hvd.wrapper.forward_gates import ForwardGates
from star_hvd.wrapper.ordered_collective import OrderedCollective
from star_hvd.wrapper.program_writes import ProgramWrites

__all__ = ["Overlap", "log_off", "never"]

logger = logging.getLogger("star_hvd")


_HELD_BACK = 16  # Steps; with fewer, a program that reduces every second step by hand would change the order in each.
_GPU = "parameters are on a GPU, where overlapped steps are not tested yet"
_OFF = "overlap is off: %s"


def never(
    base: type[torch.optim.Optimizer], max_grad_norm: float | None, params: Iterable[torch.nn.Parameter]
) -> str | None:
    """Return why no step of an optimizer can overlap, None if steps may; the same on all ranks.

    Args:
        base: The user's optimizer class.
        max_grad_norm: Norm to which the averaged gradient is clipped.
        params: The optimizer's parameters.
    """
    reason = None
    if not steps_by_bucket(base):
        reason = f"{base.__name__} is not known to update every parameter from its own gradient and state alone"
    elif max_grad_norm is not None:
        reason = "max_grad_norm needs the norm of the whole gradient"
    elif not hasattr(torch, "get_autocast_dtype"):
        reason = f"torch is {torch.__version__}; overlapped steps need 2.4 or later"
    elif any(param.is_cuda for param in params):
        reason = _GPU
    return reason


def log_off(reason: str) -> None:
    """Log why steps do not overlap although that was asked for."""
    logger.warning(_OFF, reason)


@dataclass(slots=True)
class _Pending:
    """A step that is submitted but not applied to all buckets yet."""

    step: int
    groups: list[dict[str, Any]]
    left: set[int]
    submitted: Fence
    surroundings: Surroundings
    writes: ProgramWrites | None
    row: Sequence[float] | None = None
    row_known: bool = False
    cleared: bool = False  # Whether the user has called `zero_grad` since.
    wait_s: float = 0.0
    applied: dict[int, Fence] = field(default_factory=dict)


class Overlap:
    """The overlapped steps of one optimizer on one rank.

    Args:
        driver: The optimizer's driver.
        collective: The collective of its engine.
        deadline_s: Longest wait for a reduction.
        auto: Whether to try overlapping, and keep it only if it is faster.
        watched: Returns what watches for the program's own writes to parameters, if they matter.
    """

    def __init__(
        self,
        driver: StepDriver,
        collective: OrderedCollective,
        deadline_s: float,
        *,
        auto: bool = False,
        watched: Callable[[], ProgramWrites | None] = lambda: None,
    ) -> None:
        self.driver, self.collective, self._deadline_s = driver, collective, deadline_s
        self.gates = ForwardGates(self.wait)
        self._watched = watched
        self._engine = driver.engine
        self._applier = driver.engine.applier
        self._lock = driver.engine.replica.apply_lock
        self._pending: _Pending | None = None
        self._stopped = False
        self._pid = os.getpid()
        self._applied_by: int | None = None  # The thread that is inside the user's optimizer.
        self._reasons: set[str] = set()  # Those that were logged.
        self._refusal: str | None = None  # Why steps of this rank do not overlap.
        self._held_back = 0  # Steps, from the next one on, that are sent as without overlap.
        self._trial = OffSwitch() if auto else None
        self.layout_changed()
        driver.overlapped = self
        driver.reporter.on_header = self._note_header

    def layout_changed(self) -> None:
        """Adapt to added buckets. Measurements with fewer say nothing of them; what a trial has decided stays."""
        self._reduced = {param for bucket in self._applier.buckets for param in bucket.params}
        trial = self._trial
        if trial is None or not trial.decided:
            self._sizes = SizeSearch(len(self._applier.buckets))
            self._trial = None if trial is None else OffSwitch()
            self._on = trial is None or not self._sizes.decided  # Whether steps overlap now.
        self._use(overlap=self._on)

    @property
    def _wanted(self) -> bool:
        """Whether steps are to overlap, now or in a later block of a trial."""
        return not self._stopped and (self._on or (self._trial is not None and not self._trial.decided))

    def _use(self, *, overlap: bool) -> None:
        """Turn overlapping on or off and set the order, from the next step on, on all ranks."""
        buckets, ordered = self._applier.buckets, overlap and not self._held_back
        groups = order_in_groups(len(buckets), self._sizes.together) if ordered else ()
        self._on = overlap
        self.collective.set_order([[f"{self._engine.prefix}.b{index}" for index in group] for group in groups])

    def _note_header(self, header: Header) -> None:
        """Use the header of a reduced step, which all ranks read alike; called under the engine's lock."""
        if math.isnan(header.interval_s) or self._engine.plan.mode != "sync":
            return
        before, self._held_back = self._held_back, _HELD_BACK if header.no_overlap else max(0, self._held_back - 1)
        if bool(before) != bool(self._held_back):
            self._use(overlap=self._on)
            if before:
                self._refusal = None
        if self._held_back:  # The step whose time this is may have been sent either way.
            return
        sizes, trial, decision = self._sizes, self._trial, None
        if not sizes.decided:
            together = sizes.together
            if sizes.note(header.interval_s):
                decision = sizes.decision
            if sizes.together != together or decision is not None:
                self._use(overlap=trial is None or decision is None)
        elif trial is not None:
            if trial.note(header.interval_s):
                decision = trial.decision(OVERLAP, "overlap")
            if trial.on != self._on:
                self._use(overlap=trial.on)
        if decision is not None and self._engine.rank == 0:
            logger.info("%s", self.describe())
            self.driver.reporter.note_transmission(decision)

    def describe(self) -> str:
        """Describe why steps do not overlap, or what was decided by trial; empty if nothing was yet."""
        if self._wanted and (self._refusal is not None or self._held_back):
            return f"overlap is off: {self._refusal or 'another rank does not overlap; its log says why'}"
        trial = self._trial.describe("overlap") if self._trial is not None else ""
        return "; ".join(part for part in (self._sizes.describe(), trial) if part)

    @property
    def decided(self) -> bool:
        """Whether all trials have ended: of the sizes, and of overlap itself."""
        return self._sizes.decided and (self._trial is None or self._trial.decided)

    @property
    def pending(self) -> bool:
        """Whether a step is submitted that has not ended yet."""
        return self._pending is not None and not self._left_behind()

    # ---- may this step overlap ------------------------------------------------------------------------------------

    def allowed(self, reason: str | None = None) -> bool:
        """Whether the next step may overlap; if not, log why, once, and let all ranks know with the step after it.

        Args:
            reason: A reason against it that the caller knows.
        """
        if not self._wanted:
            return False
        reason = reason or self._reason()
        self._refusal = reason or self._refusal
        self._engine.own.no_overlap = reason is not None
        if reason is not None and reason not in self._reasons:
            self._reasons.add(reason)
            log_off(reason)
        return self._on and reason is None

    def _reason(self) -> str | None:
        if not self._applier.buckets:
            return "there is no trained parameter"
        optimizer = self._applier.optimizer
        hooks = (
            optimizer.__dict__.get("_optimizer_step_pre_hooks"),
            optimizer.__dict__.get("_optimizer_step_post_hooks"),
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        if any(hooks):
            return "step hooks see the whole step"
        if any(p.requires_grad and p not in self._reduced for group in optimizer.param_groups for p in group["params"]):
            return "a parameter that was frozen when the optimizer was wrapped is trained, which no bucket holds"
        if self._applier.streams.devices:
            return _GPU
        if self.gates.passed_by():
            return "torch.compile is in use, whose code reads parameters where that is not seen"
        return None

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Close the gates: the training thread owns the step, all of which is submitted."""
        engine, applier = self._engine, self._applier
        with self._lock:
            engine.replica.partial = True
            self._pending = _Pending(
                engine.step,
                applier.hyperparameters(),
                {bucket.index for bucket in applier.buckets},
                applier.streams.give(SUBMITTED),
                Surroundings.present(),
                self._watched(),
            )
            for bucket in applier.buckets:
                for param in bucket.params:
                    param.grad = None  # The buffer's contents are being reduced.
                self.gates.close(bucket.index, bucket.params)
        self.driver.begin_overlapped()

    def clear_gradients(self) -> bool:
        """The user clears the gradients of a step by setting them to None. Return whether it is still in progress."""
        if self._left_behind():
            return False
        with self._lock:
            pending = self._pending
            if pending is None:
                return False
            pending.cleared = True
            for bucket in self._applier.buckets:
                if bucket.index not in pending.left:
                    for param in bucket.params:
                        param.grad = None
            return True

    def waits_for(self, index: int) -> bool:
        """Whether the step in progress is not applied to a bucket yet."""
        pending = self._pending
        return pending is not None and index in pending.left

    @torch.inference_mode(False)  # The program may call this in inference mode, whose tensors cannot be changed later.
    def wait(self, index: int) -> None:
        """Wait until the mean of a bucket is applied and its gates are open.

        Raises:
            HorovodInternalError: The reduction failed; all gates are open then.
            DeadlineError: Some rank did not take part in time.
            Exception: The user's optimizer raised it. As without overlap, the step counts: this bucket, and those
                applied in the same call, are not applied again; the others are applied when they are used.
        """
        if self._left_behind():
            return
        pending = self._pending
        if pending is None:
            self.gates.open(index)
            return
        with pending.surroundings.restored():
            self._wait(pending, index)

    def _wait(self, pending: _Pending, index: int) -> None:
        began_s = time.monotonic()
        try:
            with self.driver.named_failures():
                if not pending.row_known:
                    self._await(pending, None)
                self._await(pending, index)
                ready = [index, *self._collect_ended(pending, index)]
        except Exception as error:
            self._engine.fail(error)
            self.abandon()
            raise
        finally:
            self._note_wait(pending, time.monotonic() - began_s)
            self.driver.timeline.waited(index, began_s)
        try:
            self._apply(pending, ready)
        finally:
            if not pending.left:
                self._end(pending)

    def finish(self) -> None:
        """Wait for the rest of the step and end it.

        Does nothing if no step is in progress, or inside the user's optimizer, which applies a bucket of it.
        """
        if self._applied_by == threading.get_ident():
            return
        while not self._left_behind() and (pending := self._pending) is not None:
            with self._lock:
                left = sorted(pending.left, reverse=True)
            for index in left:
                self.wait(index)
            if not left:
                self._end(pending)

    def _left_behind(self) -> bool:
        """Whether this is a forked process, which keeps its parameters since no thread here can complete the step."""
        if self._pid == os.getpid():
            return False
        self._pending = None  # Without the lock, which another thread may have held at the fork.
        self.gates.open_all()
        return True

    def abandon(self) -> None:
        """Abandon a step that cannot end since its world is gone. Parameters keep their values."""
        with self._lock:
            self._pending = None
            self.gates.open_all()

    def stop(self) -> None:
        """End overlapping: no further step overlaps, nor is it held back."""
        self._stopped = True
        self.abandon()
        self.gates.remove()
        self.collective.stop()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _await(self, pending: _Pending, index: int | None) -> None:
        with self._lock:
            if self._pending is not pending or (index is not None and index not in pending.left):
                return
            handle = self._engine.own_step().handle_of(index)
        what = f"the reduction of step {pending.step}"
        wait_all(self._engine.collective, [handle], self._deadline_s, what)

    def _collect_ended(self, pending: _Pending, index: int) -> list[int]:
        """Collect the reductions that the forward pass needs next, up to the first that has not ended; return them.

        Each call of the user's optimizer costs more than the arithmetic of a small bucket, so one call applies them
        all. Forward needs the buckets in descending order.
        """
        found: list[int] = []
        collective = self._engine.collective
        with self._lock:
            if self._pending is not pending or index not in pending.left:
                return found
            step = self._engine.own_step()
            for other in sorted((other for other in pending.left if other < index), reverse=True):
                handle = step.handle_of(other)
                if not collective.poll(handle):
                    break
                collective.finish(handle)
                found.append(other)
        return found

    def _apply(self, pending: _Pending, indices: Sequence[int]) -> None:
        """Apply buckets whose reductions were collected, in one of the threads that wait for the first of them."""
        with self._lock:
            if self._pending is not pending or indices[0] not in pending.left:
                pending.applied.get(indices[0], DONE).order()
                return
            engine = self._engine
            buckets = [self._applier.buckets[index] for index in indices if index in pending.left]
            if not pending.row_known:
                pending.row, pending.row_known = engine.own_row(), True
            pending.submitted.order()
            for bucket in buckets:
                engine.own_mean(bucket.index)
            self._applied_by = threading.get_ident()
            try:
                self._step(pending, buckets)
                if pending.writes is not None:
                    pending.writes.applied(buckets)
            finally:
                self._applied_by = None
                applied = engine.streams.give(APPLIED)
                for bucket in buckets:
                    pending.left.discard(bucket.index)
                    pending.applied[bucket.index] = applied
                    self.gates.open(bucket.index)  # Last: once it is open, `waits_for` must report it as done.

    def _step(self, pending: _Pending, buckets: Sequence[Bucket]) -> None:
        """Step buckets. Their gates open afterwards: another thread must not read a half-written bucket."""
        params = [param for bucket in buckets for param in bucket.params]
        with self._engine.replica.writing(), torch._C.DisableTorchFunctionSubclass():
            for bucket in buckets:
                bucket.show_all()
            self._applier.step_params(params, pending.groups, pending.row)
            if pending.cleared:
                for param in params:
                    param.grad = None

    def _note_wait(self, pending: _Pending, waited_s: float) -> None:
        pending.wait_s += waited_s
        self.driver.timer.add_outside(waited_s)

    def _end(self, pending: _Pending) -> None:
        """End the step, which counts from here on."""
        with self._lock:
            if self._pending is not pending or pending.left:
                return
            try:
                self._engine.wire.waited(pending.wait_s)  # Forward and evaluations since `step()` are no wait.
                result = self._engine.finish_own()
                self._engine.apply_own(result, lambda row: None)
                if pending.writes is not None:
                    pending.writes.step_ended(self._engine.replica.writes)
            finally:  # Not earlier: a thread that finds no step in progress starts the next one.
                self._pending = None
        self.driver.end_overlapped(pending.step, pending.wait_s)
