"""Connect autograd to the step engine: hooks that fill the buckets, and one step of the user's optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from scheduler.plan.mode_names import parse_again
from scheduler.records import Plan, PlanError
from star_hvd import env
from star_hvd.compression.lossy_wire import STATE_KEY, LossyWire
from star_hvd.config import Config
from star_hvd.engine.applier import Applier, replayable
from star_hvd.engine.bucket_sizes import limits_of
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.collective import Collective, HorovodCollective
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Result
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import StarError
from star_hvd.input.forward_passes import ForwardPasses
from star_hvd.input.microbatches import MicrobatchInHand
from star_hvd.input.network import SPARSE
from star_hvd.modes.driver import StepDriver
from star_hvd.runtime import runtime
from star_hvd.telemetry.step_timeline import StepTimeline, TimedCollective
from star_hvd.wrapper.accumulation import Accumulation
from star_hvd.wrapper.collective_of_all import collective_of_all
from star_hvd.wrapper.dropped import note_dropped
from star_hvd.wrapper.forward_gates import ForwardGates
from star_hvd.wrapper.lockstep_core import mean_loss, too_many_passes
from star_hvd.wrapper.ordered_collective import OrderedCollective
from star_hvd.wrapper.overlap import Overlap, log_off, never
from star_hvd.wrapper.program_writes import ProgramWrites
from star_hvd.wrapper.restrictions import Restrictions
from star_hvd.wrapper.same_parameters import equal_arithmetic, same_on_all_ranks
from star_hvd.wrapper.sparse import SparseGradients

__all__ = ["BY_HAND", "MODE_NOT_POSSIBLE", "BucketCore"]

logger = logging.getLogger("star_hvd")

Closure = Callable[[], Any]

MODE_NOT_POSSIBLE = "mode %s is not possible with %d ranks: %s; training in sync until their number changes"
BY_HAND = "the program calls synchronize() itself"
_WRITES = "the program changes parameters itself between steps, which a rank that is late could not repeat"
_cores: weakref.WeakSet[BucketCore] = weakref.WeakSet()  # All of this process; used by the training thread.

_DETACHED = (
    "an elastic job trains inside a function decorated with hvd.elastic.run, with optimizers that are in the state "
    "given to that function or made inside it; this step was made outside, or with another optimizer"
)


_STOPPED = (
    "Horovod was shut down and initialized again since this optimizer was wrapped, and this backward pass runs in a "
    "thread of its own, where the optimizer cannot meet the other ranks; wrap it again by hvd.DistributedOptimizer "
    "after hvd.init()"
)

_WRAPPED_AGAIN = (
    "this optimizer was wrapped again since, and ended with that; use the object that hvd.DistributedOptimizer "
    "returned last, and keep a reference to it"
)


class BucketCore:
    """The optimizer's flat buckets, hooks and engine.

    Args:
        inner: The user's own optimizer, which shares its `__dict__` with the wrapped one.
        base: Its class.
        wrapped: Weak reference to the wrapped optimizer, which nothing here may keep alive.
        passes: Backward passes per step.
        scale_by_ranks: Whether the reduction is `op=Sum`.
        fp16: Whether gradients are reduced as float16.
        lossy: Whether gradients may be compressed with loss if that makes steps faster (`Compression.auto`).
        sparse_as_dense: Whether sparse gradients are made dense for the reduction.
        plan: The user's plan, None for `auto`.
        mode: The mode it was made from, which says what it is with another number of ranks.
        run: The runtime. None in an elastic job, where a new worker must not call collectives before
            `hvd.elastic.run`, which attaches the optimizer.
        config: Settings that the user gave to this optimizer, None for the defaults; those of channel and control are
            the runtime's.
        names: Name of every parameter.
        max_grad_norm: Norm to which the averaged gradient is clipped.
        exact: Whether `auto` may choose only exact modes.
        overlap: Whether steps of `sync` overlap with the program; `auto` to find out whether that is faster.

    Attributes:
        buckets: The flat buckets, in order; extended in place when parameters are added.
        restrictions: What keeps the optimizer in sync.
        whole_step: Whether the step that was synchronized last is of a plan in which all ranks wait for each other, and
            contains all gradients.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        base: type[torch.optim.Optimizer],
        *,
        wrapped: weakref.ref[torch.optim.Optimizer],
        passes: int,
        scale_by_ranks: bool,
        fp16: bool,
        sparse_as_dense: bool,
        plan: Plan | None,
        mode: str | Plan = "auto",
        run: runtime.Runtime | None,
        config: Config | None,
        names: dict[torch.nn.Parameter, str],
        max_grad_norm: float | None,
        exact: bool = False,
        overlap: bool | str = False,
        lossy: bool = False,
    ) -> None:
        self._exact = exact
        params = _trainable(inner.param_groups)
        self._no_overlap = never(base, max_grad_norm, params)
        if overlap and self._no_overlap is not None:
            log_off(self._no_overlap)
        self._asks_overlap = bool(overlap)
        self._overlaps = overlap if self._no_overlap is None else False
        self._overlap: Overlap | None = None
        self.base = base
        self._inner = inner
        self._wrapped = wrapped
        self._dropped = False
        self.passes = passes
        self.requires_update: set[torch.nn.Parameter] = set()
        self._fp16 = fp16
        self._scale_by_ranks = scale_by_ranks
        self._plan, self._mode = plan, mode
        self._max_grad_norm = max_grad_norm
        self._sparse = SparseGradients(sparse_as_dense, summed=scale_by_ranks, replayed=replayable(base))
        self._accumulation = Accumulation(sparse_as_dense)
        self._delay: dict[torch.nn.Parameter, int] = {}
        self._where: dict[torch.nn.Parameter, tuple[Bucket, int]] = {}
        self._unready: list[int] = []
        self._given: set[torch.nn.Parameter] = set()
        self._giving = False  # Whether a gradient is being put into its bucket, or the bucket submitted.
        self._hooks: list[Any] = []
        self._result: Result | None = None
        self._outcome, self.whole_step = "", False
        self._applying = False  # Whether the user's optimizer or its step hooks run.
        self.buckets: list[Bucket] = []
        self.wire = LossyWire(self.buckets) if lossy else None  # Belongs to the optimizer, so it outlives a world.
        self._names = names
        self._config, self._users_config = config or Config(), config
        self._attached: tuple[runtime.Runtime, StepDriver] | None = None
        self._closed = False
        self._timeline: StepTimeline | None = None
        self._writes: ProgramWrites | None = None
        averages = not exact and (plan is None or plan.mode == "local")
        self.restrictions = Restrictions(inner, base, names, self._where.keys(), averages=averages)
        self._passes_begun = ForwardPasses(self._where.keys())
        _cores.add(self)
        self._add(params if run is None else same_on_all_ranks(params, names))
        self.restrictions.parameters_added()
        if run is not None:
            self._attached = run, self._attach(run)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, which is passed to the user's step hooks."""
        return self._wrapped() or self._inner

    @property
    def run(self) -> runtime.Runtime:
        """The runtime this optimizer is attached to.

        Raises:
            StarError: It is not attached, since an elastic job trains outside `hvd.elastic.run`.
        """
        if self._attached is None:
            raise StarError(_DETACHED)
        return self._attached[0]

    @property
    def driver(self) -> StepDriver:
        """The driver of this optimizer's engine; raises as `run` does."""
        if self._attached is None:
            raise StarError(_DETACHED)
        return self._attached[1]

    def attached_to(self, run: runtime.Runtime | None) -> bool:
        """Whether this optimizer is attached to `run`."""
        return self._attached is not None and self._attached[0] is run

    @property
    def in_use(self) -> bool:
        """Whether this optimizer is attached to the running runtime and was not closed: else its state is here."""
        running = runtime.current()  # None between two worlds of an elastic job, and after `shutdown`.
        return running is not None and self.attached_to(running) and not self._closed

    def _attach(self, run: runtime.Runtime) -> StepDriver:
        driver, self._closed = run.new_driver(), False
        if self.wire is not None:
            self.wire.compared(equal=equal_arithmetic(bucket.flat.device for bucket in self.buckets))
        self._connect(driver)
        initial = Plan.sync(
            run.world_size,
            damping=self._config.damping,
            max_staleness=self._config.max_staleness,
            reason="every job starts in sync",
        )
        hyper = HyperRow(self._inner.param_groups)
        applier = Applier(self._inner, self.base, self.buckets, hyper, self._max_grad_norm, wrapped=self._wrapped)
        self._writes = ProgramWrites(applier)
        collective = collective_of_all(driver, applier.streams, ordered=bool(self._overlaps))
        engine = self._new_engine(run, driver, initial, applier, collective)
        plan = self._plan
        if plan is not None and plan.world_size != run.world_size:
            plan = self._plan_in(run.world_size, warns=run.rank == 0)
        with _beside_others(run):
            run.attach(driver, engine, initial, plan, exact=self._exact)
        if isinstance(collective, OrderedCollective):
            deadline_s, auto = self._config.step_deadline_s, self._overlaps == "auto"
            self._overlap = Overlap(driver, collective, deadline_s, auto=auto, watched=self._watched)
        self.restrictions.at_start(driver, plan, self.buckets)
        return driver

    def _plan_in(self, world_size: int, *, warns: bool) -> Plan:
        """Return the user's plan in another world (elastic), `sync` if the user's mode is not possible there."""
        assert self._plan is not None
        settings = {"damping": self._config.damping, "max_staleness": self._config.max_staleness}
        try:
            return parse_again(self._mode, self._plan, world_size, **settings)
        except PlanError as error:
            if warns:
                logger.warning(MODE_NOT_POSSIBLE, self._plan.label, world_size, error)
            return Plan.sync(world_size, reason=f"{self._plan.label} is not possible: {error}", **settings)

    def _connect(self, driver: StepDriver) -> None:
        """Give the driver its access to the buckets."""
        self._timeline = driver.timeline
        driver.asks_overlap, driver.no_overlap = self._asks_overlap, self._no_overlap or ""
        driver.gates = ForwardGates(lambda index: None)  # The code that closes a gate sets `wait`.
        driver.mid_step, driver.mid_pass = self._mid_step, lambda: self._passes_begun.begun
        driver.forget_parts, driver.forget_writes = self._accumulation.clear, self._forget_writes
        driver.has_parts = lambda: self._accumulation.count > 0
        driver.whole_only, driver.hold_gradients = self._whole_only, self._hold_gradients

    def _forget_writes(self) -> None:
        if self._writes:
            self._writes.discard()

    def _mid_step(self) -> bool:
        return self._applying or bool(self._given) or bool(self._outcome) or bool(self._accumulation.count)

    def _new_engine(
        self, run: runtime.Runtime, driver: StepDriver, initial: Plan, applier: Applier, collective: Collective
    ) -> StepEngine:
        return StepEngine(
            rank=run.rank,
            plan=initial,
            applier=applier,
            collective=collective,
            listener=driver.reporter,
            collective_of=lambda members: TimedCollective(
                HorovodCollective(run.services.process_set(members)), driver.timeline
            ),
            prefix=f"star.{driver.number}",
            scale_by_ranks=self._scale_by_ranks,
            can_replay=replayable(self.base),
            replay_queue=self._config.replay_queue,
            noise_interval_steps=self._config.noise_interval_steps,
            raise_on_mismatch=self._config.replica_mismatch == "raise",
            wire=self.wire,
        )

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _add(self, params: Sequence[torch.nn.Parameter]) -> None:
        size = sum(param.numel() * param.element_size() for param in params)
        by_bucket = bool(self._overlaps) or self._config.background is True  # Each is waited for separately.
        limits = limits_of(size, self._config.bucket_bytes, by_bucket=by_bucket)
        buckets = pack(params, limits, fp16=self._fp16, first_index=len(self.buckets))
        self.buckets.extend(buckets)
        for bucket in buckets:
            self._unready.append(len(bucket.params))
            for position, param in enumerate(bucket.params):
                self._where[param] = (bucket, position)
                self._delay[param] = self.passes
                self.requires_update.add(param)
                self._hooks.append(param.register_post_accumulate_grad_hook(self._on_gradient))

    def remove_hooks(self) -> None:
        """Remove the hooks, e.g. before the parameters are wrapped again."""
        self.finish_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._passes_begun.remove()

    def drop(self) -> None:
        """Called by the garbage collector, in any thread, once the user holds no reference to the optimizer.

        Also by the training thread when it is wrapped again.
        """
        self._dropped = True  # The hooks cannot be removed here: a backward pass may be running them.
        note_dropped(self)
        if self._attached is not None:
            self._attached[1].drop()

    def release(self) -> None:
        """Remove a dropped optimizer's hooks, and copy gradients out of its buckets."""
        self.remove_hooks()
        for bucket, position in self._where.values():
            bucket.take_out(position)

    def detach(self) -> None:
        """End this optimizer's work, together with the other ranks; the newest state is here afterwards. Collective."""
        if self.in_use:
            self.run.detach(self.driver)
            self._closed = True

    def hand_over(self) -> None:
        """Get the newest state for the optimizer that takes this one's place, and end. Collective.

        Only where ranks may be at different steps, or the state elsewhere: in `sync` a program may wrap again what it
        has left in the middle of a step, and has all of it.
        """
        if not self.in_use or self.driver.engine.failure is not None:
            return
        self.finish_step()  # At its end another plan may come into force.
        if self.run.mixed or self.driver.engine.plan.relaxed:
            self.detach()

    def finish_step(self) -> None:
        """Wait for an overlapped step to end."""
        if self._overlap is not None and self._overlap.pending:
            self._overlap.finish()

    def clear_gradients(self) -> bool:
        """The user sets gradients to None. Return whether an overlapped step in progress takes care of that."""
        return self._overlap is not None and self._overlap.clear_gradients()

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._dropped:
            return
        if not self._given:  # Once a pass.
            self._follow()
        overlap = self._overlap
        if overlap is not None and overlap.pending:
            if overlap.waits_for(self._where[param][0].index):
                raise StarError(
                    f"backward gave a gradient of {self._names.get(param, 'a parameter')} before the step under way "
                    "was applied to it: its graph was made before step(), or without its parameters being seen; "
                    "expected forward passes after step(). Use overlap=False, or call optimizer.synchronize() first"
                )
            overlap.finish()
        if self._timeline is not None and self._timeline.sampling:
            self._timeline.look()
        part = self.in_hand
        if part is not None:
            self._end_synchronized()
            self._accumulation.add(param, *self._where[param], part)
            return
        if self._delay[param] <= 0:
            raise too_many_passes()
        assert param.grad is not None and not param.grad.requires_grad
        self._delay[param] -= 1
        if self._delay[param] == 0:
            self._give(param)

    def _give(self, param: torch.nn.Parameter) -> None:
        """Put a parameter's gradient, or zeros if it is missing, into its bucket."""
        if param in self._given:
            return
        if not self._given and self._writes and self._writes.found(self.driver.engine.replica.writes):
            self.driver.pin(_WRITES)
        self._end_synchronized()
        self._giving = True  # Stays True if memory runs out before the end.
        self._given.add(param)
        bucket, position = self._where[param]
        sparse, in_bucket = self._sparse.is_sparse(param), self._all_in_buckets
        if self.driver.gates is not None and (in_bucket or not sparse):
            # Zeros of a branch that this forward pass did not use: the servers' answer to the buffer's last push
            # may not be here yet, and if one restarts, the buffer is sent again.
            self.driver.gates.wait(bucket.index)
        if sparse:
            self.driver.pin(SPARSE, equal_batches=True)
            name = f"{self.driver.engine.prefix}.s{bucket.index}.{position}"
            self._sparse.give(param, bucket.views[position], name, in_bucket=in_bucket)
        else:
            bucket.adopt(position)
        streams = self.driver.engine.streams
        streams.note_part(bucket.index, bucket.flat)
        self._unready[bucket.index] -= 1
        if self._unready[bucket.index] == 0:
            streams.gather(bucket.index, bucket.flat)
            parts = self.in_hand is not None or self._accumulation.count
            if parts:
                self.run.feeding.note_place()
            self.driver.engine.own.weight = self._accumulation.weight if parts else self.run.feeding.weight(self.passes)
            self.driver.give(bucket)
        self._giving = False

    @property
    def _all_in_buckets(self) -> bool:
        """Whether sparse gradients, too, are reduced in their buckets: alike on all ranks in a step.

        Horovod's reduction of a sparse one waits for all ranks, of which some are elsewhere in a relaxed mode. A rank
        that was late in it may give a gradient that it computed there to a step of `sync`.
        """
        engine = self.driver.engine
        return engine.plan.relaxed or engine.agreement.mixed or self.driver.active_mode is not None

    # ---- a step ---------------------------------------------------------------------------------------------

    @property
    def in_hand(self) -> MicrobatchInHand | None:
        """The micro-batch that the training loop works on, None if its batches are whole."""
        return self._attached[0].in_hand if self._attached is not None else None

    @property
    def whole(self) -> bool:
        """Whether this rank's gradient of the step is complete; False between a step's micro-batches.

        Asked first by every step, so what the step is made with is attached here, and the micro-batch noted.

        Raises:
            ValueError: `backward_passes_per_step` is above 1, which defines steps in another way.
        """
        self._follow()
        part = self.in_hand
        if part is None:
            return True
        if self.passes != 1:
            raise ValueError(
                f"backward_passes_per_step is {self.passes} with hvd.shard(..., microbatches=); expected 1: the loader "
                "says which micro-batches make a step"
            )
        self._accumulation.note_step(part)
        return part.is_last

    def _whole_only(self) -> str:
        """Return why a batch that ran out of memory cannot be repeated in parts, empty if it can."""
        if self._giving:
            return "it was raised while a gradient was handed to its reduction"
        if self.passes != 1:
            return f"backward_passes_per_step is {self.passes}"
        if self._sparse.any:
            return "gradients are sparse"
        if self.driver.active_mode is not None:
            return f"in mode {self.driver.engine.plan.label} a rank makes its steps alone"
        return self.restrictions.looks_at_every_gradient

    def _hold_gradients(self) -> frozenset[torch.nn.Parameter]:
        """Keep the gradients of the current batch, which is repeated in parts."""
        given = {param: bucket.views[at] for param, (bucket, at) in self._where.items() if param in self._given}
        return self._accumulation.hold(self.in_hand, given)

    @property
    def pending(self) -> bool:
        """Whether backward has produced gradients that no `synchronize` has collected."""
        if self.in_hand is not None:
            return False
        # Fast path: `zero_grad` asks in every step, and a lookup per parameter would cost a call each.
        return bool(self._given) or any(passes < self.passes for passes in self._delay.values())

    @property
    def handles(self) -> dict[torch.nn.Parameter, Any]:
        """Parameters whose gradients are being reduced, or accumulated for a later pass."""
        return {p: None for p, passes in self._delay.items() if passes < self.passes or p in self._given}

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step; gradients already being reduced stay in the step."""
        self.passes = passes
        self._delay = dict.fromkeys(self._delay, passes)

    @torch.inference_mode(False)
    def refresh_state(self) -> None:
        """Fetch the job's optimizer state, for a checkpoint, if it is not on this rank."""
        self.finish_step()
        if self.in_use and not self._given:
            self.driver.refresh_state()

    def leave_remote_state(self) -> None:
        """Before a state is loaded: leave a mode in which servers hold the state.

        All ranks load it, or the others come to a collective in which they get it. The parameters stay if the program
        has loaded them.
        """
        if self.in_use and self.driver.at_servers:
            self.run.leave_servers("load_state_dict", self.driver)

    def save_residuals(self, state: dict[str, Any]) -> None:
        """Add this rank's compression residuals (what is still to be sent) to an optimizer's state."""
        residuals = self.wire.state(self._indices()) if self.wire is not None else None
        if residuals is not None:
            state[STATE_KEY] = residuals

    def state_loaded(self, state: Mapping[str, Any]) -> None:
        """Load what `save_residuals` added on this rank; parameters are loaded, too, before or behind this."""
        if self.in_use:
            self.driver.state_loaded()
        if self.wire is not None:
            self.wire.load(state.get(STATE_KEY), self._indices())

    def _indices(self) -> dict[torch.nn.Parameter, int]:
        params = [param for group in self._inner.param_groups for param in group["params"]]
        return {param: i for i, param in enumerate(params)}

    def forget(self) -> None:
        """Discard a partial step, on all ranks: submitted gradients are reduced but not applied."""
        alive = self._attached is not None and self.attached_to(runtime.current())
        if alive and self.driver.engine.failure is None:
            self.finish_step()
        if self._given and alive and self.driver.engine.failure is None:
            try:
                self.synchronize(manual=True)
            except HorovodInternalError:
                logger.info("a step failed with its world")  # Elastic: the state is restored to its last commit.
        self._end_synchronized()
        self._reset()

    def _reset(self) -> None:
        self._accumulation.clear()
        self._delay = dict.fromkeys(self._delay, self.passes)
        self._unready = [len(bucket.params) for bucket in self.buckets]
        self._given.clear()
        self._giving = False

    def _end_synchronized(self) -> None:
        """Count a step that was synchronized but not applied, before a gradient of the next step is handled."""
        outcome, result = self._outcome, self._result
        self._outcome, self._result = "", None
        if outcome == "member" and result is not None and self.driver.engine.failure is None:
            self.driver.engine.apply_own(result, lambda row: None)

    def synchronize(self, *, manual: bool, whole: str | None = BY_HAND, can_replay: bool = True) -> None:
        """Submit missing gradients and wait; on return every gradient is the mean over the step's members.

        If this rank is late, its gradient is kept for a later step and `apply` will bring the parameters up to date.

        Args:
            manual: Whether the user calls this.
            whole: Why the step may not overlap with the program; None if it may, and then it is not waited for.
            can_replay: Whether a helper can apply the mean as it is.
        """
        again = bool(self._outcome)  # Without another gradient since: `step` without `skip_synchronize`.
        if again and self._outcome == "in mode" and self.driver.active_mode is not None:
            return  # Servers have the gradient; `apply` finds what was changed since.
        if again and self._outcome == "late" and not self.pending:
            return  # The gradient is kept, or in the step that is being reduced; given again, it would count twice.
        if not again:
            self.run.note_step(self.driver.number)
        self.finish_step()
        self._end_synchronized()
        self._accumulation.finish()
        self.restrictions.before_step(self.driver)
        part = self.in_hand
        self.driver.reporter.own_part = part.own_part if part is not None else 1.0
        for param in self.requires_update - self._given:
            self._give(param)
        if self.driver.active_mode is not None:  # The gradients stay this rank's own; `apply` makes the whole step.
            self._reset()
            self._outcome = "in mode"
            return
        # What hooks in front of the step do to the mean, a helper that replays it does not.
        by_hand = manual or not can_replay or _has_hooks(self.optimizer, "_optimizer_step_pre_hooks")
        arrived = self.driver.arrive(manual=by_hand)
        relaxed = self.driver.engine.plan.relaxed  # Of this step; the next one's once it is completed.
        if arrived and self._may_overlap(whole):
            self._reset()
            self._outcome = "overlapped"
            return
        result = self.driver.complete() if arrived else None
        self.whole_step = result is not None and result.complete and not relaxed
        if result is not None:
            self._each_dense(Bucket.show)  # The program may have put others in their place since backward.
            self._sparse.collect()
        elif by_hand:  # What the program or its hooks write must not get into a buffer that is being reduced.
            self._each_dense(Bucket.take_out)
        self._reset()
        self._result, self._outcome = result, "late" if result is None else "member"
        if manual:  # No step() may follow.
            self._watch_program()
            self.driver.timer.start()  # The wait is not this rank's own work.

    def _each_dense(self, do: Callable[[Bucket, int], None]) -> None:
        for param, (bucket, position) in self._where.items():
            if not (self._sparse.any and self._sparse.is_sparse(param)):
                do(bucket, position)

    @property
    def is_member(self) -> bool:
        """Whether the step that `synchronize` ended contains this rank's gradient, and its mean is in `param.grad`."""
        return self._outcome == "member"

    def _may_overlap(self, whole: str | None) -> bool:
        if self._overlap is None:
            self.driver.no_overlap = self._no_overlap or whole or ""
            return False
        if self._sparse.any:
            whole = SPARSE
        elif any(other.shares(self._where) for other in _cores if other is not self):
            whole = "another optimizer has a parameter in common with this one"
        return self._overlap.allowed(whole) and self.driver.engine.may_overlap()

    def apply(self, *, skip: bool = False) -> Any:
        """Apply the step that `synchronize` ended, or catch up with steps that ended without this rank.

        Args:
            skip: Count the step without changing parameters (a GradScaler found infinities, equally on all ranks).
        """
        outcome, result = self._outcome, self._result
        self._outcome, self._result = "", None
        engine, value = self.driver.engine, None
        if outcome == "member" and result is not None:
            step = (lambda row: None) if skip else None
            with self._step_under_way(), self._recorded_before_post_hooks():
                value = engine.apply_own(result, step)
            written = engine.replica.writes
            self.driver.end_of_step(was_late=False)
            if self._writes and engine.replica.writes != written:
                self._writes.superseded()
        elif outcome == "overlapped":
            assert self._overlap is not None
            self._overlap.begin()
        elif outcome == "in mode":
            with _hooks_around(self.optimizer, self._step_under_way()):
                self._each_dense(Bucket.adopt)  # The program or its hooks may have replaced gradients.
                value = self.driver.step_in_mode(skip=skip)
        elif outcome == "late":
            with _hooks_around(self.optimizer):
                self.driver.end_of_step(was_late=True)
                if _has_hooks(self.optimizer, "_optimizer_step_post_hooks") and (writes := self._watched()) is not None:
                    writes.applied(self.buckets)
        else:  # step() inside skip_synchronize() without a synchronize(): a purely local step, as in Horovod.
            with self._step_under_way(), engine.replica.writing():
                value = engine.applier.step(None, clip=False)
        if outcome in ("member", "late"):
            self._watch_program()
        self._passes_begun.step_ended(watch=engine.agreement.mixed, compiled=ForwardGates.passed_by())
        return value

    @contextmanager
    def _step_under_way(self) -> Iterator[None]:
        """The user's optimizer and its hooks run inside the block: others' steps must not be applied meanwhile."""
        self._applying = True
        try:
            with self.restrictions.watching():
                yield
        finally:
            self._applying = False
        self.restrictions.step_made(self.driver)

    def _watch_program(self) -> None:
        """Watch for the program's own writes to parameters from here on, if they matter."""
        writes = self._watched()
        if writes is not None:
            writes.step_ended(self.driver.engine.replica.writes)
        else:
            self._forget_writes()

    @contextmanager
    def _recorded_before_post_hooks(self) -> Iterator[None]:
        """Record the parameters between the step inside the block and the user's post-hooks, which may change them.

        A late rank could not repeat such a change, nor do servers know of it: it is the program's own.
        """
        writes = self._watched()
        if writes is None or not _has_hooks(self.optimizer, "_optimizer_step_post_hooks"):
            yield
            return
        first = torch.optim.Optimizer.register_step_post_hook(
            self.optimizer, lambda *_: writes.applied(self.buckets)
        )
        self.optimizer.__dict__["_optimizer_step_post_hooks"].move_to_end(first.id, last=False)
        try:
            yield
        finally:
            first.remove()

    def _watched(self) -> ProgramWrites | None:
        """Return what watches for the program's own writes to parameters, None if no relaxed mode is possible."""
        engine, may_relax = self.driver.engine, not self._exact and (self._plan is None or self._plan.relaxed)
        in_sync = self.driver.active_mode is None and engine.agreement.pinned is None
        return self._writes if may_relax and in_sync else None

    def step_with_closure(self, closure: Closure) -> Any:
        """Make a step whose optimizer evaluates `closure` itself, with reduced gradients after every evaluation."""

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize(manual=True)
            assert self._outcome == "member", "closures run in sync only"
            whole = self.whole_step
            self._end_synchronized()
            if not whole:
                raise StarError(
                    f"a step of {self.base.__name__} ended without a gradient of every rank: some have no more "
                    "batches, and cannot follow, as its state cannot be sent to them; give all ranks equally many "
                    "batches (hvd.shard does, or says why it cannot)"
                )
            self.driver.engine.applier.clip()
            return mean_loss(loss, f"{self.driver.engine.prefix}.loss")

        value = self.base.step(self.optimizer, reduced)
        with self.driver.engine.replica.writing():
            pass  # LBFGS has written the parameters between its evaluations; they are the step's, not the program's.
        self.driver.end_of_step(was_late=False)
        return value

    # ---- life -----------------------------------------------------------------------------------------------

    def shares(self, params: Collection[torch.nn.Parameter]) -> bool:
        """Whether this optimizer is in use and has one of these parameters."""
        return bool(self._hooks) and not self._dropped and not self._where.keys().isdisjoint(params)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Parameters are added inside the block, on all ranks at the same step. Collective.

        Raises:
            StarError: This rank is inside a step.
        """
        if self._attached is None:  # An elastic job that does not train yet.
            yield
            return
        self.finish_step()  # An overlapped step must be applied with the groups it started with.
        if self.driver.mid_step():
            raise StarError(
                "add_param_group was called between backward() and step(); expected between two steps: call it after "
                "step(), or before backward()"
            )
        run, engine = self.run, self.driver.engine
        if not run.mixed and not engine.plan.relaxed:
            yield
            return
        self.leave_remote_state()
        with run.meeting("add_param_group"):
            yield
            # Until all ranks have added them, none may start a step.
            run.client.await_all("add_param_group", self._config.step_deadline_s)

    def add_params(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Add the parameters of a new group, inside `adding`."""
        self._forget_writes()
        self._add([param for param in params if param.requires_grad and param not in self._where])
        self.restrictions.parameters_added()
        if self._attached is None:
            return
        self.driver.engine.layout_changed(HyperRow(self.optimizer.param_groups))
        self.restrictions.parameters_reduced(self.driver)
        self.driver.switcher.parameters_added()
        self.driver.reporter.layout_changed()
        if self._overlap is not None:
            self._overlap.layout_changed()

    def _follow(self) -> None:
        """Go on in the new world if Horovod was shut down and initialized again: all ranks make their first step in it.

        An elastic job restarts its optimizers itself, and without Horovod the step raises Horovod's error.

        Raises:
            StarError: A backward pass came here in a thread of autograd, which is no place for collectives; or the
                optimizer has ended.
        """
        if self._dropped:
            raise StarError(_WRAPPED_AGAIN)
        if self._attached is None or not self._attached[0].stopped or env.elastic() or not mpi_ops.is_initialized():
            return
        if not self._attached[0].in_training_thread():
            raise StarError(_STOPPED)
        self.restart(runtime.ensure(self._users_config))  # None asks for no settings of the job.

    def restart(self, run: runtime.Runtime) -> None:
        """Continue in a new world with parameters and optimizer state; a partial step is discarded."""
        if self._overlap is not None:
            self._overlap.stop()
            self._overlap = None
        self._reset()
        self._result, self._outcome = None, ""
        self.restrictions.new_world()
        same_on_all_ranks([param for bucket in self.buckets for param in bucket.params], self._names, ordered=True)
        self._attached = run, self._attach(run)


@contextmanager
def _beside_others(run: runtime.Runtime) -> Iterator[None]:
    """Add an optimizer inside the block, on all ranks at the same place in the program. Collective.

    With several, ranks that average after steps of their own would wait for each other crosswise, one for the averaging
    of this optimizer and one for a step of that one: those in `local` leave it here, and none enters it later. So do
    those at servers that are not possible beside it, where no rank makes a step meanwhile. A return from `partial`
    comes with the next step, which waits for all active ranks (`ClosingRule.awaits_all`).
    """
    others = [driver for driver in list(run.drivers.values()) if not driver.dropped]
    for driver in others:
        driver.finish_step()  # At its end another plan may come into force.
    relaxed = run.mixed or any(driver.engine.plan.relaxed for driver in others)
    with ExitStack() as stack:
        if relaxed:
            for driver in others:
                driver.makes_room = True
            try:
                stack.enter_context(run.meeting("another optimizer"))
            finally:
                for driver in others:
                    driver.makes_room = False
        yield
        for driver in others:
            driver.refuse_crossing()
        if relaxed:  # Until all ranks have refused, none may make a step: at its end the plan could come into force.
            run.client.await_all("another optimizer", run.config.step_deadline_s)
    for driver in others:
        driver.leave_local()


def _trainable(groups: Sequence[dict[str, Any]]) -> list[torch.nn.Parameter]:
    return [param for group in groups for param in group["params"] if param.requires_grad]


def _has_hooks(optimizer: torch.optim.Optimizer, kind: str) -> bool:
    """Whether an optimizer has step hooks, of its own or of all optimizers."""
    of_all = _global_optimizer_pre_hooks if "_pre_" in kind else _global_optimizer_post_hooks
    return bool(of_all or optimizer.__dict__.get(kind))


@contextmanager
def _hooks_around(
    optimizer: torch.optim.Optimizer, under_way: AbstractContextManager[None] | None = None
) -> Iterator[None]:
    """Run the user's step hooks once around what does not call the optimizer's own `step`, or calls it without hooks.

    Hooks of all optimizers run too, in torch's order.

    Args:
        optimizer: The wrapped optimizer.
        under_way: Entered from the first hook before the step to the step's end.
    """
    with under_way or nullcontext():
        own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
        for hook in [*_global_optimizer_pre_hooks.values(), *own.values()]:
            hook(optimizer, (), {})
        yield
    own = getattr(optimizer, "_optimizer_step_post_hooks", {})
    for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (), {})
