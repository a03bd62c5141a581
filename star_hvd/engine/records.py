"""Records and protocols shared by the parts of the step engine."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Protocol

import torch

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import DONE, Fence
from star_hvd.engine.header import Header

__all__ = ["Averaging", "Counters", "Listener", "Result", "OpenStep", "Snapshot"]


class Averaging(Protocol):
    """What the mode `local` averages besides the parameters."""

    def proxy_contribution(self, bucket: Bucket) -> torch.Tensor:
        """Return the helper's contribution for a training thread that is inactive."""
        ...

    def extras(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors to sum, already multiplied by this rank's weight."""
        ...

    def ended_by_proxy(self, result: Result, extras: list[torch.Tensor]) -> None:
        """Note an averaging that ended without this rank's training thread; called under the engine's lock."""
        ...

    @property
    def absorbable(self) -> bool:
        """Whether such an averaging waits for the helper to use it."""
        ...

    def absorb(self) -> bool:
        """Use it, in the helper's thread. Return whether there was one."""
        ...


class Listener(Protocol):
    """Observer of an engine's events. Called under the engine's lock: it must only record them and return."""

    def on_arrive(self, step: int, plan_id: int) -> None: ...
    def on_late(self, version: int, plan_id: int) -> None: ...
    def on_join(self, version: int) -> None: ...
    def on_step_end(self, step: int, header: Header, plan: Plan, mean_sqr: float, sent_bytes: int) -> None: ...
    def on_switch(self, step: int, plan: Plan) -> None: ...
    def on_mismatch(self, step: int) -> None: ...


@dataclass(slots=True)
class Counters:
    """What happened to this rank's gradients; weights are summed over buckets and divided by their number.

    At any moment produced = applied + damped + dropped + what still waits for a step.
    """

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
class OpenStep:
    """One step in progress on this rank.

    Attributes:
        number: The step.
        buffers: Per bucket the flat buffer that was submitted, None before that.
        reduced_buffers: Per bucket the tensor that is sent; `buffers[i]` itself unless its type changes.
        handles: Per bucket the handle of the reduction; the carrier's is the header's.
        owner: `trainer` or `helper` once the header is claimed; the owner completes the step.
        early: Whether the training thread has claimed the step within backward and has not arrived yet.
        header: The header's tensor, part of the carrier's if there is a carrier.
        header_handle: Handle of the header's reduction.
        flagged: The plan whose flag this rank raised in the header.
        folded: Number of buckets into which a late gradient was folded.
        waiting: Handles the helper has not collected yet.
        averaging: Set if the buffers hold parameters (`local`).
        extras: Tensors averaged besides them.
        means: Per bucket the mean, once it is computed.
    """

    number: int
    buffers: list[torch.Tensor | None]
    reduced_buffers: list[torch.Tensor | None]
    handles: list[int | None]
    owner: str = ""
    early: bool = False
    header: torch.Tensor | None = None
    header_handle: int | None = None
    flagged: Plan | None = None
    folded: int = 0
    waiting: collections.deque[int] = field(default_factory=collections.deque)
    averaging: Averaging | None = None
    extras: list[torch.Tensor] = field(default_factory=list)
    means: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, number: int, n_buckets: int) -> OpenStep:
        """Create a step for which nothing has been submitted."""
        return cls(number, [None] * n_buckets, [None] * n_buckets, [None] * n_buckets)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that carry the gradients, as encoded; 0 in an averaging, whose parameters are not."""
        if self.averaging is not None:
            return 0
        return sum(tensor.numel() * tensor.element_size() for tensor in self.reduced_buffers if tensor is not None)

    def claimed(self, index: int) -> bool:
        """Whether a bucket of this step has been submitted."""
        return self.buffers[index] is not None

    def handle_of(self, index: int | None) -> int:
        """Return the handle of a bucket, or the header's if None, once the header is claimed."""
        handle = None if index is None else self.handles[index]
        handle = self.header_handle if handle is None else handle
        assert handle is not None
        return handle

    def all_handles(self) -> list[int]:
        """Return the handles of all buckets and the header, once the header is claimed."""
        assert self.header_handle is not None
        return [handle for handle in self.handles if handle is not None] + [self.header_handle]


@dataclass(slots=True)
class Result:
    """A reduced step: averaged gradients, one flat buffer per bucket, and the hyperparameters to apply it with.

    `row` is None if every rank uses its own hyperparameters, exactly as in Horovod. A thread that did not compute the
    means orders itself behind `fence` before it uses them. `complete` says whether every member's gradient is fresh.
    """

    step: int
    means: list[torch.Tensor]
    row: tuple[float, ...] | None
    fence: Fence = DONE
    complete: bool = True


@dataclass(slots=True)
class Snapshot:
    """Parameters and optimizer state after `step` steps, for a rank that cannot replay."""

    step: int
    params: list[torch.Tensor]
    state: list[dict[str, object]]

    def on_host(self) -> Snapshot:
        """Return it in host memory; on a GPU, copied on the calling thread's current streams, for which this waits."""
        return Snapshot(
            self.step,
            [param.cpu() for param in self.params],
            [{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()} for state in self.state],
        )
