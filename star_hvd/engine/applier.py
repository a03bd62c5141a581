"""Apply a reduced step to the live parameters, or to a shadow copy while their rank still computes on them.

A rank that is behind still computes on old parameters, so no other thread may change them. Its helper creates a shadow
with the same optimizer class, state and hyperparameters, and applies the closed steps there; the rank takes the shadow
over at its next step. Replicas stay bit-equal, since all run the same operations on the same numbers in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import DONE, Fence, Fences, Streams
from star_hvd.engine.hyperparameters import HyperRow

__all__ = ["ELEMENTWISE", "Applier", "Shadow", "place_state", "replayable", "steps_by_bucket"]

# torch's classes that update every element by itself. They keep all their state in `param_groups` and `state`, so
# copying both copies the optimizer, and parts of a parameter can be updated apart.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)

_PIECE_BYTES = 1 << 24  # Summed at once for a checksum; a multiple of 4.


def replayable(base: type[torch.optim.Optimizer]) -> bool:
    """Whether helpers may replay steps of this class; a subclass may keep other state, so its state is fetched."""
    return base in ELEMENTWISE


def steps_by_bucket(base: type[torch.optim.Optimizer]) -> bool:
    """Whether stepping parts of the parameters one after the other is bit-equal to one step on all of them.

    True where the update of a parameter reads only its own gradient and state; for classes outside torch that is
    unknown, so False.
    """
    return base in (*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon)


class Applier:
    """Steps the live parameters of one optimizer.

    Args:
        optimizer: The optimizer whose `param_groups` and `state` are live; referenced strongly from here.
        base: The user's optimizer class; its `step` is the update rule.
        buckets: The optimizer's buckets, extended in place when parameters are added.
        hyper: Layout of the hyperparameters.
        max_grad_norm: Norm to which the averaged gradient is clipped, None for no clipping.
        streams: Makes the fences for the buckets' devices.
        wrapped: Weak reference to the wrapper that the user holds, which is what step hooks receive.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base: type[torch.optim.Optimizer],
        buckets: list[Bucket],
        hyper: HyperRow,
        max_grad_norm: float | None = None,
        streams: Streams | None = None,
        *,
        wrapped: weakref.ref[torch.optim.Optimizer] | None = None,
    ) -> None:
        self.streams = streams or Streams(buckets)
        self._optimizer = optimizer
        self._wrapped = wrapped
        self.base = base
        self.buckets = buckets
        self.hyper = hyper
        self.max_grad_norm = max_grad_norm

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as the user sees it: the wrapper while it exists."""
        return (self._wrapped() if self._wrapped is not None else None) or self._optimizer

    def step(self, row: Sequence[float] | None, *, clip: bool = True, hooks: bool = True) -> Any:
        """Apply the gradients now in `param.grad`, with the step's hyperparameters.

        Args:
            row: The hyperparameters, None for the optimizer's own.
            clip: Whether to clip the gradients.
            hooks: Whether the optimizer's step hooks run.
        """
        if clip:
            self.clip()  # The averaged gradient is the same on all ranks, so the clipping factor is too.
        without = contextlib.nullcontext() if hooks else _without_hooks(self.optimizer)
        step = self.base.step if hooks else _without_hooks_of_all(self.base)
        with without, self.hyper.applied(self.optimizer.param_groups, row):
            return step(self.optimizer)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return the current parameter groups without their parameters, for a later `step_params`."""
        groups = self.optimizer.param_groups
        return [{key: _own(value) for key, value in group.items() if key != "params"} for group in groups]

    def step_params(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[dict[str, Any]], row: Sequence[float] | None
    ) -> None:
        """Apply the gradients now in `param.grad` of some parameters. Step hooks do not run.

        Args:
            params: The parameters.
            groups: Returned by `hyperparameters`.
            row: The step's hyperparameters, which override those in `groups`.
        """
        optimizer, own = self.optimizer, self.optimizer.param_groups
        chosen = set(map(id, params))  # A tensor's hash costs a call each time.
        parts = [
            {**kept, "params": [param for param in group["params"] if id(param) in chosen]}
            for kept, group in zip(groups, own, strict=True)
        ]
        with _without_hooks(optimizer), self.hyper.applied(parts, row):
            optimizer.param_groups = [part for part in parts if part["params"]]
            try:
                _without_hooks_of_all(self.base)(optimizer)
            finally:
                optimizer.param_groups = own

    def clip(self) -> None:
        """Clip the gradients now in `param.grad` to `max_grad_norm`, if one is set."""
        if self.max_grad_norm is not None:
            params = [param for bucket in self.buckets for param in bucket.params]
            torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters, buffers and optimizer state: everything a copy of this reads."""
        params = [param for bucket in self.buckets for param in bucket.params]
        states = (value for param in params for value in self.optimizer.state.get(param, {}).values())
        return [*params, *(b.flat for b in self.buckets), *(v for v in states if isinstance(v, torch.Tensor))]

    def step_with(self, means: Sequence[torch.Tensor], row: Sequence[float] | None) -> None:
        """Apply the averaged gradients of a step this rank was late for, to parameters in buckets only.

        Others, which were frozen when the optimizer was wrapped, may have a gradient of the next step by now. Step
        hooks do not run.
        """
        for bucket, mean in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(mean)
            bucket.show_all()
        with self._only_in_buckets():
            self.step(row, hooks=False)

    @contextlib.contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Others' steps are applied inside the block; afterwards gradients and buckets' buffers are as before."""
        flats = [bucket.flat.clone() for bucket in self.buckets]
        grads = [(param, param.grad) for bucket in self.buckets for param in bucket.params]
        try:
            yield
        finally:
            for bucket, flat in zip(self.buckets, flats, strict=True):
                bucket.flat.copy_(flat)
            for param, grad in grads:
                param.grad = grad

    @contextlib.contextmanager
    def _only_in_buckets(self) -> Iterator[None]:
        held = {id(param) for bucket in self.buckets for param in bucket.params}
        before = [(group, group["params"]) for group in self.optimizer.param_groups]
        for group, params in before:
            group["params"] = [param for param in params if id(param) in held]
        try:
            yield
        finally:
            for group, params in before:
                group["params"] = params

    def checksum(self, buckets: Sequence[Bucket] | None = None) -> int:
        """Return 24 bits computed over the bytes of some buckets' parameters, by default all, equal on bit-equal
        replicas.
        """
        sums = []
        for bucket in self.buckets if buckets is None else buckets:
            for param in bucket.params:
                sums.append(_sum_of_words(param.detach().contiguous().view(-1).view(torch.uint8)))
        self.streams.await_host()
        total = 0
        for words in sums:
            total = (total * 31 + int(words)) % (1 << 24)
        return total


def _sum_of_words(raw: torch.Tensor) -> torch.Tensor:
    """Return the sum of bytes read as 32-bit words, plus the bytes behind the last whole word.

    In pieces, since torch first copies all that it sums in a wider type to that type.
    """
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for piece in raw.split(_PIECE_BYTES):
        if piece.storage_offset() % 4:  # A half-precision view may begin between words.
            piece = piece.clone()
        whole = piece.numel() - piece.numel() % 4
        total += piece[:whole].view(torch.int32).sum(dtype=torch.int64) + piece[whole:].sum()
    return total


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before = {name: optimizer.__dict__[name] for name in names if name in optimizer.__dict__}
    optimizer.__dict__.update({name: collections.OrderedDict() for name in before})
    try:
        yield
    finally:
        optimizer.__dict__.update(before)


_HOOKED_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _without_hooks_of_all(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return a class's step as its author wrote it: torch wraps it to run hooks, also those of all optimizers.

    These are the process's, so clearing them would take them from optimizers that step in other threads.
    """
    step: Any = base.step
    # A subclass's step made with `functools.wraps` looks the same but for its code.
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED_CODE else step  # type: ignore[no-any-return]


class Shadow:
    """A copy of the parameters and the optimizer state on which closed steps are replayed.

    Args:
        applier: The live parameters; they must not change while the copy is made.
        step: Steps applied to the live parameters so far.

    Attributes:
        written: Fence behind the latest change of this copy.
        read: Fences behind other threads' reads of it; the next change must come after them.
    """

    def __init__(self, applier: Applier, step: int) -> None:
        self.step = step
        self.written: Fence = DONE
        self.read = Fences()
        self._live = applier
        self._twin: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for bucket in applier.buckets:
            for param in bucket.params:
                self._twin[param] = torch.nn.Parameter(param.detach().clone())
        optimizer = _copy_optimizer(applier.optimizer, applier.base, self._twin)
        buckets = [
            Bucket(b.index, tuple(self._twin[p] for p in b.params), flat := b.new_flat(), tuple(b.split(flat)), flat)
            for b in applier.buckets
        ]
        self.applier = Applier(
            optimizer, applier.base, buckets, applier.hyper, applier.max_grad_norm, applier.streams
        )

    def apply(self, means: Sequence[torch.Tensor], row: Sequence[float] | None) -> None:
        """Replay one step.

        Args:
            means: Averaged gradients, one flat buffer per bucket.
            row: The step's hyperparameters, None for those this rank had when the shadow was made.
        """
        self.applier.step_with(means, row)
        self.step += 1

    def fill(self, write: Callable[[Sequence[Bucket], torch.optim.Optimizer], None]) -> None:
        """Have `write` overwrite the copy's parameters and state."""
        write(self.applier.buckets, self.applier.optimizer)

    def take_over(self) -> None:
        """Copy the shadow's parameters into the live ones and move its optimizer state there."""
        live = self._live.optimizer
        with torch.no_grad():
            for param, twin in self._twin.items():
                param.copy_(twin)
        for param, twin in self._twin.items():
            if twin in self.applier.optimizer.state:
                live.state[param] = self.applier.optimizer.state.pop(twin)
        for mine, theirs in zip(self._live.buckets, self.applier.buckets, strict=True):
            mine.flat.copy_(theirs.flat)
            mine.show_all()


def place_state(
    optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter's optimizer state, which came through host memory, on the devices the optimizer expects.

    Tensors with dimensions go to the parameter's device. Scalars such as `step` go where the optimizer already has
    them; if it has none yet, to the host, except where its kernels read them (capturable, fused) and in ASGD, which
    always creates them on the device (see "special device hosting for step" in torch.optim).
    """
    group = next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), {})
    on_device = bool(group.get("capturable") or group.get("fused")) or isinstance(optimizer, torch.optim.ASGD)
    present = optimizer.state.get(param, {})

    def placed(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = present.get(key)
        if value.dim() > 0:
            return value.to(param.device)
        if isinstance(own, torch.Tensor) and own.dim() == 0:
            return value.to(own.device)
        return value.to(param.device) if on_device else value.cpu()

    return {key: placed(key, value) for key, value in state.items()}


def _copy_optimizer(
    optimizer: torch.optim.Optimizer,
    base: type[torch.optim.Optimizer],
    twin: dict[torch.nn.Parameter, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """Copy the optimizer, over the twins of its parameters alone: the training thread works on the others."""
    copied: torch.optim.Optimizer = object.__new__(base)
    plain = {k: v for k, v in optimizer.__dict__.items() if not k.startswith("_star") and k != "step"}
    copied.__dict__.update(plain)
    copied.param_groups = [
        {k: _own(v) for k, v in group.items() if k != "params"}
        | {"params": [twin[p] for p in group["params"] if p in twin]}
        for group in optimizer.param_groups
    ]
    copied.state = collections.defaultdict(dict)
    for param, own in twin.items():
        if param in optimizer.state:
            copied.state[own] = copy.deepcopy(optimizer.state[param])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copied.__dict__[name] = collections.OrderedDict()
    return copied


def _own(value: Any) -> Any:
    """Copy a tensor hyperparameter; other values are immutable."""
    return value.clone() if isinstance(value, torch.Tensor) else value
