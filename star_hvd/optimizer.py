"""`DistributedOptimizer`: Horovod's signature and behaviour, with a choice of synchronization modes."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, global_process_set

from scheduler.plan.mode_names import suits_some_world
from scheduler.records import Plan, PlanError, parse_mode
from star_hvd import env
from star_hvd.compression import Compression
from star_hvd.config import Config
from star_hvd.engine.exchange.scaled_steps import ScaledSteps
from star_hvd.errors import StarError
from star_hvd.runtime import runtime
from star_hvd.runtime.job_log import note_unlogged
from star_hvd.wrapper.arguments import check_accuracy, check_numbers, check_overlap, check_predivide, names_of
from star_hvd.wrapper.bucket_core import BY_HAND, MODE_NOT_POSSIBLE, BucketCore
from star_hvd.wrapper.dropped import release_dropped
from star_hvd.wrapper.lockstep_core import HorovodsOwn, NativeCore, note_reducing, unweighted

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("star_hvd")

# GradScaler passes itself to `step` with this warning; our `step` needs it to check the reduced gradients.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    mode: str | Plan = "auto",
    config: Config | None = None,
    max_grad_norm: float | None = None,
    accuracy: str = "bounded",
    overlap: bool | str = False,
) -> Any:
    """Wrap an optimizer so that gradients are averaged over the ranks, in modes that tolerate slow ranks.

    The arguments up to `process_set` are those of `horovod.torch.DistributedOptimizer`. The returned object is an
    instance of the user's optimizer class and shares its state, defaults, groups and hooks.

    Args:
        optimizer: Optimizer to use for computing gradients and applying updates.
        named_parameters: Names of the parameters, usually `model.named_parameters()`.
        compression: `Compression.none`, `Compression.fp16`, or `Compression.auto`, which is lossy: gradients are
            reduced uncompressed, as float16 or in low rank, with error feedback, whichever makes steps fastest. With
            any other compressor class, gradients are reduced one by one.
        backward_passes_per_step: Backward passes accumulated (summed) before a reduction.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: Splits the division by the number of ranks into one before and one after the sum.
        num_groups: Deprecated name of `groups`.
        groups: Number of groups, or lists of parameters, reduced together.
        sparse_as_dense: Whether sparse gradients are made dense for the reduction.
        process_set: Process set to reduce in.
        mode: `auto` (the coordinator decides from measurements), `sync`, `partial(m)` (a step waits for m ranks),
            `subgroup(0,1,2)`, `grouped(G)`, `local(H)`, `ps(x)` and others described in `parse_mode`, or a `Plan`.
            The environment variable `STAR_MODE` takes precedence.
        config: Tuning values, equal on all ranks. Most are the whole job's and are set by its first optimizer or
            loader, so give a loader that comes first the same; `Config` lists those that are each optimizer's own.
        max_grad_norm: Norm to which the averaged gradient is clipped. Use it instead of clipping by hand, which a rank
            that catches up could not repeat.
        accuracy: What `auto` may choose: `bounded` allows all modes, `exact` only `sync`, `sync(balanced)` and
            `sync(steal)`, in which every step equals Horovod's step with the same global batch. It also keeps
            `Compression.auto` from compressing. `Compression.fp16` and a compressor of the user's own do what they do
            in Horovod: the step is then Horovod's with that compressor, and rounded by it. The environment variable
            `STAR_ACCURACY` overrides this argument.
        overlap: Whether `step()` in mode `sync` returns while gradients are still being reduced. Each parameter is
            updated when its gradient has been reduced, and code that uses a parameter waits for that parameter only;
            gradients are reduced in the order in which the forward pass needs them. On two ranks parameters are
            bit-identical to those of `overlap=False`; on more, the last bit of Horovod's sums depends on which tensors
            it fuses. Clear gradients with `optimizer.zero_grad()`, since reading `param.grad` waits. Steps that need
            the whole gradient (`synchronize()` by hand, `max_grad_norm`, step hooks, LBFGS, a GradScaler) do not
            overlap; this is logged once, and `hvd.explain()` says why. `overlap="auto"` tries it in blocks of 16 steps
            and keeps it only if steps become at least 3 % shorter; `hvd.explain()` reports the result. The environment
            variable `STAR_OVERLAP` overrides it.

    If a rank is late: in a relaxed mode the step closes without it, its gradient is folded into a later step with a
    weight of 1 / (1 + staleness), and its `step()` brings its parameters up to date. Adasum, sparse gradients,
    `SyncBatchNorm`, LBFGS, `groups`, and the user's process set or compressor run exactly as in Horovod, in lockstep;
    with a GradScaler only the exact modes are possible. Either is logged once.

    Raises:
        ValueError: Parameters without names or with duplicate names, a number out of range, an unknown mode, m outside
            1..n.
    """
    if gradient_predivide_factor != 1.0:
        check_predivide(op)
    groups = _groups_of(num_groups, groups)
    check_numbers(backward_passes_per_step, groups, max_grad_norm)
    exact = check_accuracy(env.accuracy() or accuracy) == "exact"
    if exact and compression is Compression.auto:
        logger.warning(
            "accuracy is 'exact' and compression is Compression.auto, all forms of which but the uncompressed one are "
            "lossy: gradients are sent uncompressed; leave compression out, or take accuracy 'bounded'"
        )
    overlaps = check_overlap(env.overlap(), overlap)
    mode = env.mode() or mode
    plan = _plan_of(mode, config or Config(), exact=exact)
    if op == mpi_ops.Adasum and max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} was given with op=hvd.Adasum, which combines updates and averages no "
            "gradient that could be clipped; leave max_grad_norm out, or take op=hvd.Average"
        )
    if op == mpi_ops.Adasum and mpi_ops.size() > 1:
        return _adasum(optimizer, named_parameters, compression, backward_passes_per_step, op, process_set)
    return _wrapped(
        optimizer,
        names=names_of(optimizer, named_parameters),
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        plan=plan,
        mode=mode,
        config=config,
        max_grad_norm=max_grad_norm,
        exact=exact,
        overlap=overlaps,
    )


def _plan_of(mode: str | Plan, config: Config, *, exact: bool) -> Plan | None:
    """Return the plan of a mode, None for `auto`; an error if it is impossible, or is not exact and has to be."""
    size, settings = int(mpi_ops.size()), {"damping": config.damping, "max_staleness": config.max_staleness}
    try:
        plan = parse_mode(mode, size, **settings)
    except PlanError as error:
        if not (env.elastic() and suits_some_world(mode)):
            raise
        # A new worker in a world that has changed since: as on the ranks that are there, see `BucketCore.restart`.
        logger.warning(MODE_NOT_POSSIBLE, mode, size, error)
        plan = Plan.sync(size, **settings)
    if exact and plan is not None and plan.mode != "sync":
        raise ValueError(
            f"mode is {plan.label} with accuracy 'exact'; expected 'auto', 'sync', 'sync(balanced)' or 'sync(steal)', "
            "or accuracy 'bounded'"
        )
    return plan


def _groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or the deprecated `num_groups` if only that is set."""
    if num_groups == 0:
        return groups
    message = "Parameter `num_groups` has been replaced by `groups` and will be removed"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


def _wrapped(optimizer: torch.optim.Optimizer, **given: Any) -> Any:
    """Return the wrapped optimizer; `given` goes to `_Wrapper`."""
    release_dropped()
    inner = _inner_of(optimizer)
    previous: Any = inner.__dict__.get("_star_wrapped", lambda: None)()
    # Its state is handed over in a meeting. An object that the program does not pass may be garbage on some ranks.
    hands_over = previous is not None and id(previous) == id(optimizer)
    if previous is not None:
        # A learning-rate scheduler, for one, may refer to it for as long as the job runs; it makes no more steps.
        previous._star.core.remove_hooks()
        if hands_over and isinstance(previous._star.core, BucketCore):
            previous._star.core.hand_over()
        previous._star.finalizer()  # Left for later, it would keep the former core and its buffers in memory.
        release_dropped()
    wrapped = _wrap(inner, overlaps=bool(given["overlap"]))
    wrapped._star = _Wrapper(wrapped, inner, **given)
    if previous is not None:
        previous._star = wrapped._star  # What the program still does with it concerns the same optimizer.
    # Neither the model nor the runtime refers to the wrapped object, so it is finalized with the user's last reference
    # to it, whether `close` was called or not.
    wrapped._star.finalizer = weakref.finalize(wrapped, wrapped._star.drop)
    wrapped._star.finalizer.atexit = False
    return wrapped


def _adasum(optimizer: torch.optim.Optimizer, named: Any, compression: Any, passes: int, op: Any, where: Any) -> Any:
    from horovod.torch.optimizer import DistributedOptimizer as Plain

    logger.warning("Adasum runs in Horovod's own optimizer, in lockstep; modes do not apply")
    wrapped = Plain(optimizer, named, compression, passes, op, process_set=where)
    wrapped.horovods_own = HorovodsOwn()
    note_reducing(wrapped.horovods_own)
    note_unlogged(wrapped.horovods_own, "Adasum", int(mpi_ops.rank()))
    _pin_unweighted()
    return wrapped


def _pin_unweighted() -> None:
    """Keep the job's other optimizers in lockstep, since one now reduces without the batches' weights."""
    running = runtime.current()
    for driver in running.drivers.values() if running is not None else ():
        driver.pin(unweighted(), equal_batches=True)


def _inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's own optimizer, also if `optimizer` is already wrapped."""
    if "_star_class" not in type(optimizer).__dict__:
        return optimizer
    wrapper: _Wrapper = optimizer._star  # type: ignore[attr-defined]
    return wrapper.inner


def _wrap(inner: torch.optim.Optimizer, *, overlaps: bool) -> Any:
    """Return an instance of a subclass of the user's class that shares its `__dict__` with the user's object.

    Unlike Horovod, it does not call `__init__` again, which would lose state, defaults and required arguments.
    `__module__` must be Horovod's: its `broadcast_optimizer_state` checks it to see that `step` reduces.
    `_star` is in a slot, because in the shared `__dict__` it would keep the wrapped object alive.
    """
    base = type(inner)
    body = {name: value for name, value in vars(_Methods).items() if name not in ("__dict__", "__weakref__")}
    body["__module__"] = "horovod.torch.optimizer"
    body["__slots__"] = ("_star",)
    body["_star_class"] = True
    body["step"] = _Step()
    if overlaps:  # Not elsewhere: torch's optimizers read `state` once or twice per parameter and step.
        body["state"] = _State()
    cls = type(base.__name__, (base,), body)
    wrapped: Any = object.__new__(cls)
    object.__setattr__(wrapped, "__dict__", inner.__dict__)
    inner.__dict__["_star_wrapped"] = weakref.ref(wrapped)
    return wrapped


class _Step:
    """`step` of the generated class: a data descriptor, so it takes precedence over `step` in the shared `__dict__`.

    A learning-rate scheduler created before wrapping stored its counting `step` there and looks for it later.
    """

    def __get__(self, optimizer: Any, owner: type) -> Any:
        if optimizer is None:
            return _Methods.step
        return optimizer.__dict__.get("_star_step", MethodType(_Methods.step, optimizer))

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.__dict__["_star_step"] = value

    def __delete__(self, optimizer: Any) -> None:
        optimizer.__dict__.pop("_star_step", None)


class _State:
    """`state` of the generated class, for steps that overlap with the program: a use of it first ends the step.

    It is the dictionary at its usual place that is returned. What the program has kept of it from before the step, and
    its use through the object that was wrapped, is not seen here.
    """

    def __get__(self, optimizer: Any, owner: type) -> Any:
        if optimizer is None:
            return self
        _finish_step(optimizer)
        try:
            return optimizer.__dict__["state"]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute 'state'") from None

    def __set__(self, optimizer: Any, value: Any) -> None:
        _finish_step(optimizer)
        optimizer.__dict__["state"] = value


def _finish_step(optimizer: Any) -> None:
    wrapper = getattr(optimizer, "_star", None)  # None in a copy, and while the optimizer is being wrapped.
    if wrapper is not None and isinstance(wrapper.core, BucketCore):
        wrapper.core.finish_step()


class _Wrapper:
    """State of the generated class: the arguments, the core, and the user's progress in a step.

    Args:
        wrapped: The object returned to the user; only a weak reference to it is kept.
        inner: The user's own optimizer.
        given: Arguments of `DistributedOptimizer`.

    Attributes:
        finalizer: Calls `drop`, once: with the last reference to the wrapped object, or when it is wrapped again.
    """

    finalizer: Callable[[], Any]

    def __init__(self, wrapped: Any, inner: torch.optim.Optimizer, **given: Any) -> None:
        self.wrapped = weakref.ref(wrapped)
        self.inner = inner
        self.base = type(inner)
        self.given = given
        self.synchronized = False
        self.should_synchronize = True
        self.stepped = False
        self.scaled = ScaledSteps()
        self.size = int(mpi_ops.size())
        self.core: BucketCore | NativeCore = self._core()

    def _core(self) -> BucketCore | NativeCore:
        given, reason = self.given, self._lockstep_reason()
        common = {
            "passes": given["passes"],
            "sparse_as_dense": given["sparse_as_dense"],
            "max_grad_norm": given["max_grad_norm"],
        }
        why = "1 rank" if self.size == 1 and not env.elastic() else reason
        if why:
            if reason and (given["plan"] is None or given["plan"].relaxed or given["plan"].uneven):
                logger.warning("%s: runs in lockstep exactly as in Horovod; modes do not apply", reason)
            return self._native_core(common, why)
        return BucketCore(
            self.inner,
            self.base,
            wrapped=self.wrapped,
            scale_by_ranks=given["op"] == mpi_ops.Sum,
            fp16=given["compression"] is Compression.fp16,
            lossy=given["compression"] is Compression.auto and not given["exact"],
            plan=given["plan"],
            mode=given["mode"],
            run=runtime.ensure(given["config"]) if runtime.may_start() else None,
            config=given["config"],
            exact=given["exact"],
            overlap=given["overlap"],
            names=given["names"],
            **common,
        )

    def _native_core(self, common: dict[str, Any], why: str) -> NativeCore:
        given = self.given
        native = NativeCore(
            self.inner,
            self.base,
            wrapped=self.wrapped,
            names=given["names"],
            compression=given["compression"],
            op=given["op"],
            predivide=given["predivide"],
            groups=given["groups"],
            process_set=given["process_set"],
            **common,
        )
        note_unlogged(native, why, int(mpi_ops.rank()))
        if native.reduces:
            _pin_unweighted()
        return native

    def _lockstep_reason(self) -> str | None:
        given = self.given
        if given["groups"]:
            return "the argument groups"
        if given["process_set"] is not global_process_set:
            return "the argument process_set"
        if given["op"] not in (Average, mpi_ops.Sum):
            return "a reduction other than Average and Sum"
        if given["predivide"] != 1.0:
            return "gradient_predivide_factor"
        if given["compression"] not in (Compression.none, Compression.fp16, Compression.auto):
            return "a compressor other than none, fp16 and auto"
        return None

    def refresh_state(self) -> None:
        """Get the optimizer's state, and parameters of the same step, where servers or other ranks hold it."""
        if isinstance(self.core, BucketCore):
            self.core.refresh_state()

    def local_state(self) -> dict[str, Any]:
        """Return the optimizer's state as it is on this rank."""
        state = dict(self.base.state_dict(self.wrapped() or self.inner))
        if isinstance(self.core, BucketCore):
            self.core.save_residuals(state)
        return state

    def restart(self) -> None:
        """Continue after Horovod was initialized again (elastic)."""
        run = runtime.ensure(self.given["config"])
        if isinstance(self.core, BucketCore) and not self.core.attached_to(run):
            self.core.restart(run)
        elif isinstance(self.core, NativeCore) and self.size != run.world_size:
            self.core.remove_hooks()
            self.core = self._core()
        self.size = run.world_size

    def step(self, closure: Callable[[], Any] | None, grad_scaler: Any) -> Any:
        """See `_Methods.step`."""
        if self._accumulates and (grad_scaler is not None or issubclass(self.base, torch.optim.LBFGS)):
            raise ValueError(
                "hvd.shard(..., microbatches=) does not go with a GradScaler or LBFGS, which look at every gradient, "
                "nor do the parts of a batch that hvd.catch_out_of_memory caught; leave microbatches out, or take "
                "smaller batches (with autocast to bfloat16 no GradScaler is needed)"
            )
        if issubclass(self.base, torch.optim.LBFGS) and closure is not None:
            self.stepped = True
            return self.core.step_with_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stepped = self.whole
        if not self.stepped:
            return loss
        if grad_scaler is not None:
            self.pin("a GradScaler decides after the reduction whether to step")
            self._check_unscaled(grad_scaler)
        if self.should_synchronize:
            if self.synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=3,
                )
            # Reduce again, as Horovod does: no rank knows whether others have new gradients since their synchronize().
            if isinstance(self.core, BucketCore):
                scaled = grad_scaler is not None  # A helper could not undo that.
                self.core.synchronize(manual=False, whole=self._whole(grad_scaler), can_replay=not scaled)
            else:
                self.core.synchronize(manual=False)
        self.synchronized = False
        skip = grad_scaler is not None and self._skips(grad_scaler)
        value = self.core.apply(skip=skip)
        return loss if closure is not None else value

    def _check_unscaled(self, grad_scaler: Any) -> None:
        """Check that the program has not unscaled gradients that are still being reduced, each rank its own.

        Raises:
            StarError: It has: then some ranks might find an infinity that others do not, and skip the step alone.
        """
        reduced = self.synchronized or not self.should_synchronize
        reduces = isinstance(self.core, BucketCore) or self.core.reduces
        if reduces and not reduced and _scaler_state(grad_scaler, self.wrapped())["stage"].name == "UNSCALED":
            raise StarError(
                "scaler.unscale_(optimizer) was called while each rank had its own gradients, which were still being "
                "reduced; expected optimizer.synchronize() before it: loss.backward(), optimizer.synchronize(), "
                "scaler.unscale_(optimizer), the clipping, and scaler.step(optimizer) within 'with "
                "optimizer.skip_synchronize():'. To clip alone, give max_grad_norm= to hvd.DistributedOptimizer"
            )

    def _skips(self, grad_scaler: Any) -> bool:
        """Unscale the gradients and return whether the step must not be applied."""
        found = _found_infinity(grad_scaler, self.wrapped())
        if isinstance(self.core, BucketCore) and self.core.is_member:
            engine = self.core.driver.engine
            whole, mixed = self.core.whole_step, engine.agreement.mixed
            return self.scaled.skips(grad_scaler, engine.step, whole=whole, mixed=mixed) or found
        return found

    @property
    def _accumulates(self) -> bool:
        """Whether the training loop's batches are micro-batches."""
        running = runtime.current()
        return running is not None and running.in_hand is not None

    @property
    def whole(self) -> bool:
        """Whether `step()` makes a step now; before the last micro-batch of a step it only accumulates gradients.

        Raises:
            ValueError: This optimizer cannot accumulate micro-batches.
        """
        if isinstance(self.core, BucketCore):
            return self.core.whole
        if self._accumulates:
            raise ValueError(
                f"{self._lockstep_reason()}: such an optimizer does not accumulate micro-batches; leave the argument, "
                "or microbatches of hvd.shard, out"
            )
        return True

    def _whole(self, grad_scaler: Any) -> str | None:
        """Why this step may not overlap with the program, as far as the call to `step()` shows; None if it may."""
        if grad_scaler is not None:
            return "a GradScaler decides after the reduction whether to step"
        return BY_HAND if self.synchronized else None

    def drop(self) -> None:
        """Release the core; called by the garbage collector, in any thread, after the user's last reference is gone."""
        self.core.drop()

    def pin(self, reason: str) -> None:
        """Stay in lockstep from now on."""
        if isinstance(self.core, BucketCore):
            self.core.driver.pin(reason)
            self.core.restrictions.looks_at_every_gradient = reason
            if self.core.wire is not None:
                self.core.wire.forbid(f"they are: {reason}")


def _found_infinity(scaler: Any, optimizer: Any) -> bool:
    """Unscale the reduced gradients and return whether any is infinite.

    They are equal on all ranks, so either all ranks skip the step or none.
    """
    state = _scaler_state(scaler, optimizer)
    if state["stage"].name == "READY":
        scaler.unscale_(optimizer)
    return bool(sum(found.item() for found in state["found_inf_per_device"].values()))


def _scaler_state(scaler: Any, optimizer: Any) -> Any:
    return scaler._per_optimizer_states[id(optimizer)]


class _Methods:
    """Bodies of the generated class; `self` is an instance of the user's optimizer class."""

    _star: _Wrapper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("this class cannot be instantiated; call star_hvd.DistributedOptimizer with an optimizer")

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to our `step`.

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Average the gradients over the step's members and apply them.

        If this rank is late: its gradient is kept for a later step, and its parameters catch up with the steps that
        ended in the meantime.
        """
        self._opt_called = True  # What a learning-rate scheduler checks.
        return self._star.step(closure, grad_scaler)

    step.hooked = True  # type: ignore[attr-defined]  # The base class runs the user's step hooks, once per step.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait until every gradient is the mean over the step's members.

        If this rank is late: its gradient is kept for a later step, and `step()` brings its parameters up to date.
        Like `step()`, it does nothing before the last micro-batch of a step.
        """
        if self._star.whole:
            self._star.core.synchronize(manual=True)
            self._star.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context, `step()` does not synchronize; for use after an explicit `synchronize()`."""
        self._star.should_synchronize = False
        try:
            yield
        finally:
            self._star.should_synchronize = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, except those accumulated from other micro-batches of the step.

        Raises:
            AssertionError: Called between `backward()` and `step()` or `synchronize()`.
        """
        if self._star.core.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        to_none = args[0] if args else kwargs.get("set_to_none", True)
        core = self._star.core
        if isinstance(core, BucketCore):
            if to_none and core.clear_gradients():
                return
            core.finish_step()
        # Does not wait for parameters in flight, unless it overwrites memory that may be sent to servers again.
        with torch._C.DisableTorchFunctionSubclass() if to_none else contextlib.nullcontext():
            self._star.base.zero_grad(self, *args, **kwargs)  # type: ignore[arg-type]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes accumulated before a reduction.

        Raises:
            ValueError: `passes` is not above 0.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._star.core.set_passes(passes)
        self._star.given["passes"] = passes  # For the core that replaces this one when the number of ranks changes.

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, fetched first if parameter servers or other ranks hold it.

        Call it before the model's `state_dict()`, so that parameters and state are of the same step in every mode. In
        `partial` and `local`, while the program has other weights in the place of the parameters, it changes nothing:
        the state is that of the parameters that the program will put back. A copy of the optimizer has its own state.
        """
        wrapper: _Wrapper | None = getattr(self, "_star", None)
        if wrapper is None:  # torch copies the groups and the state, and nothing else.
            made = next(each for each in type(self).__mro__ if "_star_class" in each.__dict__)
            return dict(made.__bases__[0].state_dict(self))  # type: ignore[attr-defined]
        wrapper.refresh_state()
        return wrapper.local_state()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's state, on all ranks; discards an unfinished step and gradients that wait for a step."""
        self._star.core.forget()
        if isinstance(self._star.core, BucketCore):
            self._star.core.leave_remote_state()
        self._star.synchronized, self._star.should_synchronize = False, True
        self._star.base.load_state_dict(self, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(self._star.core, BucketCore):
            self._star.core.state_loaded(args[0] if args else kwargs["state_dict"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and reduce its gradients too. Collective: all ranks, at the same place in the program.

        If ranks may be at different steps, it waits for all of them; in `ps` and `grouped` the job then trains in
        `sync` for some steps, before servers get the new parameters too.

        Raises:
            StarError: It is called between `backward()` and `step()`; nothing is added.
        """
        core = self._star.core
        with core.adding() if isinstance(core, BucketCore) else contextlib.nullcontext():
            self._star.base.add_param_group(self, param_group)  # type: ignore[arg-type]
            core.add_params(param_group["params"])

    def close(self) -> None:
        """End this optimizer: get its newest state, remove its hooks, stop its helper, and drop its late gradients.

        Collective: waits until all ranks have called it. Needed only in jobs that create one optimizer after another.
        """
        core = self._star.core
        core.remove_hooks()
        if isinstance(core, BucketCore):
            core.detach()

    def stats(self) -> dict[str, float]:
        """Return this rank's counters: steps, fresh, late, folds, drops, max_staleness and more.

        Empty for an optimizer that runs as in Horovod, in lockstep.
        """
        core = self._star.core
        return core.driver.reporter.stats() if isinstance(core, BucketCore) else {}

    def timeline(self) -> list[dict[str, Any]]:
        """Return the latest steps on rank 0: step, time_s, members, mode, folds, weight; empty on other ranks.

        At most 100,000, fewer with more than 250 ranks. Entries may share their lists of members.
        """
        core = self._star.core
        return list(core.driver.reporter.timeline) if isinstance(core, BucketCore) else []

    @property
    def mode(self) -> str:
        """The active mode, `partial(3)` for example."""
        core = self._star.core
        return core.driver.engine.plan.label if isinstance(core, BucketCore) else "sync"

    @property
    def stepped(self) -> bool:
        """Whether the last `step()` made a step; with micro-batches (`hvd.shard`), only the last of each step does."""
        return self._star.stepped

    # Attributes of Horovod's optimizer that user code reads.
    backward_passes_per_step = property(lambda self: self._star.core.passes)
    op = property(lambda self: self._star.given["op"])
    process_set = property(lambda self: self._star.given["process_set"])
    gradient_predivide_factor = property(lambda self: self._star.given["predivide"])
    sparse_as_dense = property(lambda self: self._star.given["sparse_as_dense"])
    _handles = property(lambda self: self._star.core.handles)
    _requires_update = property(lambda self: self._star.core.requires_update)
    _parameter_names = property(lambda self: self._star.given["names"])
    _compression = property(lambda self: self._star.given["compression"])

    def _register_hooks(self) -> None:
        """Do nothing; kept for scripts that call it after a reset."""
