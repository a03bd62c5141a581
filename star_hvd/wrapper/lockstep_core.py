"""One all-reduce per parameter or group, exactly as in `horovod.torch.DistributedOptimizer`.

Used with options that only work in lockstep: the user's groups, process set or compressor, and a predivide factor.
It averages without weights: with one such optimizer, or one of Horovod's own, all ranks need batches of equal size
(`unweighted`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from horovod.common.util import split_list
from horovod.torch import mpi_ops
from horovod.torch.functions import broadcast_object

from star_hvd.input.joined import described
from star_hvd.runtime import runtime
from star_hvd.wrapper.dropped import note_dropped

__all__ = ["HorovodsOwn", "NativeCore", "Reducing", "mean_loss", "note_reducing", "too_many_passes", "unweighted"]

Group = tuple[torch.nn.Parameter, ...]


class Reducing(Protocol):
    """The core of an optimizer that uses Horovod's own reductions."""

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients through this optimizer."""
        ...


class HorovodsOwn:
    """Placeholder for one of Horovod's own optimizers; must be kept alive as long as that optimizer."""

    reduces = True


_cores: weakref.WeakSet[Reducing] = weakref.WeakSet()


def note_reducing(core: Reducing) -> None:
    """Track a core while it lives."""
    _cores.add(core)


def unweighted() -> str:
    """Return why batches have to be equal if an optimizer reduces without their weights, else an empty string."""
    reducing = any(core.reduces for core in list(_cores))
    return "an optimizer's gradients are reduced by Horovod itself, without weights" if reducing else ""


def mean_loss(loss: Any, name: str, process_set: Any = mpi_ops.global_process_set) -> Any:
    """Return the mean of a closure's loss over the ranks, so that optimizers that depend on it decide alike on all."""
    if loss is None:
        return None
    number = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    own = torch.as_tensor(number, dtype=torch.float64, device="cpu")
    return mpi_ops.allreduce(own, name=name, op=mpi_ops.Average, process_set=process_set)


def too_many_passes() -> AssertionError:
    """Return the error, worded like Horovod's, for more backward passes than `backward_passes_per_step`."""
    return AssertionError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        "backward_passes_per_step to accumulate gradients locally."
    )


class NativeCore:
    """Hooks that reduce each parameter, or each group, separately.

    Args:
        inner: The user's own optimizer.
        base: Its class.
        wrapped: Weak reference to the wrapped optimizer, which nothing here may keep alive.
        names: Name of every parameter.
        compression: Class with `compress` and `decompress`.
        passes: Backward passes per step.
        op: Horovod's reduction.
        predivide: `gradient_predivide_factor`.
        groups: Number of groups, or lists of parameters.
        sparse_as_dense: Whether sparse gradients are made dense for the reduction.
        process_set: The process set to reduce in.
        max_grad_norm: Norm to which the averaged gradient is clipped.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        base: type[torch.optim.Optimizer],
        *,
        wrapped: weakref.ref[torch.optim.Optimizer],
        names: dict[torch.nn.Parameter, str],
        compression: Any,
        passes: int,
        op: Any,
        predivide: float,
        groups: int | list[Any] | None,
        sparse_as_dense: bool,
        process_set: Any,
        max_grad_norm: float | None,
    ) -> None:
        self.base = base
        self._inner = inner
        self._wrapped = wrapped
        self._dropped = False
        self.passes = passes
        self.names = names
        self.requires_update: set[torch.nn.Parameter] = set()
        self.handles: dict[Any, tuple[Any, Any]] = {}
        self.driver = None
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._max_grad_norm = max_grad_norm
        self._delay: dict[torch.nn.Parameter, int] = {}
        self._group_of: dict[torch.nn.Parameter, Group] = {}
        self._count: dict[Group, int] = {}
        self._hooks: list[Any] = []
        params = [p for g in inner.param_groups for p in g["params"] if p.requires_grad]
        if groups and self._has_peers:
            self._form_groups(params, groups)
        self.add_params(params)
        note_reducing(self)

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients through this optimizer."""
        return bool(self._hooks) and not self._dropped

    @property
    def _has_peers(self) -> bool:
        """Whether this rank reduces with others: it may be alone, or no member of the process set."""
        return bool(self._process_set.included()) and mpi_ops.size() > 1

    def _form_groups(self, params: list[torch.nn.Parameter], groups: int | list[Any]) -> None:
        order = broadcast_object(
            [self.names[p] for p in params], root_rank=0, name="star.groups", process_set=self._process_set
        )
        params = sorted(params, key=lambda p: order.index(self.names[p]))
        if isinstance(groups, list):
            own = set(params)  # Groups may name parameters of another optimizer.
            wanted = [tuple(p for p in group if p in own) for group in groups]
            inside = {p for group in wanted for p in group}
            formed = [*wanted, *((p,) for p in params if p not in inside)]
        else:
            formed = [tuple(group) for group in split_list(params, groups)]
        for group in formed:
            self._count[group] = 0
            self._group_of.update(dict.fromkeys(group, group))

    def add_params(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Register hooks on parameters, if this rank reduces with others."""
        for param in params if self._has_peers else ():
            if param.requires_grad and param not in self.requires_update:
                self.requires_update.add(param)
                self.names.setdefault(param, f"allreduce.added.{len(self.names)}")
                self._delay[param] = self.passes
                self._hooks.append(param.register_post_accumulate_grad_hook(self._on_gradient))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, which is passed to the user's step hooks."""
        return self._wrapped() or self._inner

    def drop(self) -> None:
        """Called by the garbage collector, in any thread, once the user holds no reference to the optimizer."""
        self._dropped = True  # The hooks cannot be removed here: a backward pass may be running them.
        note_dropped(self)

    def release(self) -> None:
        """Remove a dropped optimizer's hooks."""
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def pending(self) -> bool:
        """Whether backward has produced gradients that no `synchronize` has collected."""
        return bool(self.handles) or any(passes < self.passes for passes in self._delay.values())

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step."""
        self.passes = passes
        self._delay = dict.fromkeys(self._delay, passes)

    def forget(self) -> None:
        """Discard a partial step."""
        running = runtime.current()
        if running is not None:
            for handle, _ in self.handles.values():
                running.joined.ended(handle)
        self.handles.clear()
        self._delay = dict.fromkeys(self._delay, self.passes)
        self._count = dict.fromkeys(self._count, 0)

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._dropped:
            return
        if self._delay[param] <= 0:
            raise too_many_passes()
        self._delay[param] -= 1
        if self._delay[param] > 0:
            return
        group = self._group_of.get(param)
        if group is None:
            self.handles[param] = self._reduce(param)
            return
        self._count[group] += 1
        if self._count[group] == len(group):
            self._give_group(group)

    def _give_group(self, group: Group) -> None:
        for param in group:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        packed, contexts = zip(*[self._compression.compress(p.grad) for p in group], strict=True)
        handle = self._submit("grouped_allreduce_async_", self.names[group[0]], tensors=packed)
        self.handles[group] = (handle, contexts)

    def _reduce(self, param: torch.nn.Parameter) -> tuple[Any, Any]:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        tensor, name = param.grad, self.names[param]
        if tensor.is_sparse:
            if not self._sparse_as_dense:
                return self._submit("sparse_allreduce_async", name, tensor=tensor), None
            tensor = tensor.to_dense()
        packed, context = self._compression.compress(tensor)
        factor = self._predivide if self._op == mpi_ops.Average else 1.0
        handle = self._submit(
            "allreduce_async_", name, tensor=packed, prescale_factor=1.0 / factor, postscale_factor=factor
        )
        return handle, context

    def _submit(self, operation: str, name: str, **given: Any) -> Any:
        """Start one of Horovod's reductions, and describe it to ranks in `join`, which add zeros to it.

        Their `join` is not Horovod's if the job has other optimizers, too. Reductions are counted by name, since ranks
        may begin those of one backward pass in different orders.
        """
        given |= {"name": name, "op": self._op, "process_set": self._process_set}
        run, collective = runtime.current(), None
        if run is not None and run.trains and self._process_set is mpi_ops.global_process_set:
            counter = f"gradient.{name}"
            run.user_calls[counter] += 1
            collective = described(operation, given, counter, run.user_calls[counter])
            run.joined.begin(collective)
        handle = getattr(mpi_ops, operation)(**given)
        if run is not None and collective is not None:
            run.joined.submitted(handle, collective)
        return handle

    def synchronize(self, *, manual: bool) -> None:
        """Reduce missing gradients, wait, and write the results to `param.grad`."""
        if not self._process_set.included():
            return
        for param in self.requires_update:
            group = self._group_of.get(param)
            if group is None and param not in self.handles:
                self.handles[param] = self._reduce(param)
            elif group is not None and group not in self.handles:
                self._give_group(group)
        for key, (handle, context) in self.handles.items():
            if isinstance(key, tuple):
                for param, output, own in zip(key, mpi_ops.synchronize(handle), context, strict=True):
                    self._put(param, self._compression.decompress(output, own))
            else:
                output = handle() if callable(handle) else mpi_ops.synchronize(handle)
                self._put(key, self._compression.decompress(output, context))
        running = runtime.current()
        if running is not None:
            running.steps_ended += 1
        self.forget()

    def _put(self, param: torch.nn.Parameter, reduced: torch.Tensor) -> None:
        assert param.grad is not None
        if param.grad.is_sparse and not reduced.is_sparse:
            reduced = reduced.to_sparse()
        if param.grad is not reduced:
            param.grad = reduced

    def apply(self, *, skip: bool = False) -> Any:
        """Step the user's optimizer on the reduced gradients."""
        if skip:
            return None
        self._clip()
        return self.base.step(self.optimizer)

    def _clip(self) -> None:
        """Clip the gradients of all parameters, in an order that is the same on all ranks."""
        if self._max_grad_norm is not None:
            params = [param for group in self._inner.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, self._max_grad_norm)

    def step_with_closure(self, closure: Any) -> Any:
        """Make a step whose optimizer evaluates `closure` itself, with reduced gradients after every evaluation."""
        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize(manual=True)
            self._clip()
            return mean_loss(loss, "star.loss", self._process_set) if self._has_peers else loss

        return self.base.step(self.optimizer, reduced)
