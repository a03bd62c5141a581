"""Repeats a batch that ran out of memory on this rank in parts, whose gradients together make the same step.

    for inputs, wanted in loader:
        with hvd.catch_out_of_memory(loader):
            optimizer.zero_grad()
            loss_of(model(inputs), wanted).backward()
            optimizer.step()

The parts accumulate like micro-batches: the batch's gradient is sum(w_m g_m) / sum(w_m) over its parts. Gradients that
the failed backward pass has already produced, and that may be in flight to other ranks, are those of the whole batch:
they are kept, and the parts add nothing to those parameters (`MicrobatchInHand.covered`). The other ranks wait in that
step, as for any slow rank, and the coordinator is notified of the limit, so that batch shares respect it from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol

import torch

from star_hvd.channel.messages.shares import MemoryLimit
from star_hvd.input.microbatches import MicrobatchInHand, in_hand_around
from star_hvd.input.network import meets_in_pass, trained
from star_hvd.modes.driver import StepDriver
from star_hvd.runtime.runtime import Runtime

__all__ = ["Repeats", "catch_out_of_memory", "cut_batch"]

logger = logging.getLogger("star_hvd")

_SIGNS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # Outside torch's allocator: loading a module, a library's work space.
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)
"""Messages of torch's plain `RuntimeError`s for lack of memory."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Samples `start` to `stop` of a batch, and the parameters that already have their gradient."""

    start: int
    stop: int
    covered: frozenset[torch.nn.Parameter] = frozenset()

    @property
    def size(self) -> int:
        return self.stop - self.start

    def cut(self, limit: int) -> list[_Part]:
        """Split into parts of at most `limit` samples, as equal as possible."""
        count = -(-self.size // limit) if limit else 1
        ends = [self.start + i * self.size // count for i in range(count + 1)]
        return [_Part(start, stop, self.covered) for start, stop in pairwise(ends)]


class Repeats:
    """Delivers the batches of one loader, in parts if whole batches would not fit in memory.

    Args:
        unweighted: Returns why gradients cannot be accumulated, if no driver of the runtime's reduces them; else empty.
    """

    def __init__(self, unweighted: Callable[[], str] = str) -> None:
        self._unweighted = unweighted
        self._run: Runtime | None = None
        self._loader = -1
        self._part: _Part | None = None  # The part the training loop works on.
        self._repeat: list[_Part] = []  # Parts of it to repeat after it failed.
        self._steps_ended = 0
        self._steps_of_last = 0  # Steps made with the batch before, over all optimizers.

    def deliver(
        self, run: Runtime, loader: int, samples: int, data: Any, load: Callable[[int, int], Any]
    ) -> Iterator[Any]:
        """Yield the data of a batch, or of its parts one after the other.

        Args:
            run: The runtime.
            loader: Number of the loader.
            samples: Number of samples in the batch.
            data: Data of the whole batch.
            load: Returns the data of samples start to stop of the batch.
        """
        self._run, self._loader, self._steps_ended = run, loader, run.steps_ended
        # If the loop fetches ahead, the part in hand would be another than the one it works on.
        limit = 0 if run.feeding.fetches_ahead(loader) else run.memory.failed(loader)
        waiting = deque(_Part(0, samples).cut(limit))
        in_hand: MicrobatchInHand | None = None
        outer = run.in_hand
        try:
            while waiting:
                part = self._part = waiting.popleft()
                whole = part.size == samples
                if not whole:
                    # When the step is made, all parts have been computed: it has the time of a whole batch.
                    more = lambda: bool(waiting)  # noqa: E731
                    reference = run.reference_samples or 1.0  # Unknown before the first training.
                    run.in_hand = in_hand = MicrobatchInHand(
                        part.size, reference, more, 1.0, part.covered, loader=loader, outer=outer
                    )
                yield data if whole else load(part.start, part.stop)
                waiting.extendleft(reversed(self._repeat))
                self._repeat = []
            self._steps_of_last = run.steps_ended - self._steps_ended
        finally:
            self._part = None
            if in_hand is not None:
                in_hand.over = True
                run.feeding.used(loader)
            # Otherwise it is of another loader, inside of whose loop this one's was.
            if in_hand is not None and run.in_hand is in_hand:
                run.in_hand = in_hand_around(outer, loader)
                # If the batch made no step, no later step may contain it.
                if run.in_hand is None and run.steps_ended == self._steps_ended:
                    for driver in run.drivers.values():
                        driver.forget_parts()

    def fail(self) -> str:
        """Deliver the part that ran out of memory again in smaller parts; return why that is impossible, or empty."""
        run, part = self._run, self._part
        if run is None or part is None:
            return "it was not raised in work on a batch of this loader of a map-style data set without microbatches"
        if part.size < 2:
            return "the batch has one sample"
        drivers = list(run.drivers.values())
        if run.world_size == 1:
            return "the job has one rank: use a smaller batch_size"
        if run.steps_ended != self._steps_ended:
            return "a step was begun with the gradient of this batch"
        if run.feeding.may_fetch_ahead(self._loader):
            return "the loop takes a batch before the gradient of the one before it, so it is unknown which one failed"
        if self._steps_of_last > max(1, len(drivers)):
            return "several steps were made with the batch before it, while the parts of a batch make one step"
        reason = next(filter(None, (driver.whole_only() for driver in drivers)), "") or self._equal_passes(drivers)
        if reason:
            return reason
        covered = part.covered.union(*(driver.hold_gradients() for driver in drivers))
        limit = run.memory.lower(self._loader, part.size)
        run.agent.send(MemoryLimit(self._loader, limit))
        self._repeat = _Part(part.start, part.stop, covered).cut(limit)
        logger.warning(
            "rank %d ran out of memory with %d samples: they are repeated in %d parts, and its batches are to have at "
            "most %d samples from here on",
            run.rank, part.size, len(self._repeat), limit,
        )  # fmt: skip
        return ""

    def _equal_passes(self, drivers: Sequence[StepDriver]) -> str:
        """Return why all ranks need equally many passes, empty if they do not: parts are more than the others make."""
        known = next(filter(None, (driver.equal_batches for driver in drivers)), "") or self._unweighted()
        # Layers pin the drivers only when they are first used, and the pass may have failed before that.
        if not known and meets_in_pass(trained(driver.engine.applier.optimizer for driver in drivers)):
            return "the network has layers that reduce over all ranks within a pass"
        return known


class Repeating(Protocol):
    """A loader that can deliver a batch again, such as those of `hvd.shard`."""

    @property
    def repeats(self) -> Repeats:
        """The object that delivers its batches."""


class catch_out_of_memory:
    """Context around the body of a training loop that repeats a batch in smaller parts if it runs out of memory.

        for inputs, wanted in loader:
            with hvd.catch_out_of_memory(loader):
                optimizer.zero_grad()
                loss_of(model(inputs), wanted).backward()
                optimizer.step()

    The loop's next iterations get the same samples in parts, whose gradients are accumulated: only the last part makes
    a step (`optimizer.stepped`). If the loss is a mean over the batch, the gradient is that of the whole batch. From
    then on, larger batches of this rank are split at that size, and under `sync(balanced)` it gets fewer samples, and
    others more, within a few steps. Other errors are raised as usual. So is an out-of-memory error after which nothing
    can be repeated, with the reason in the log: with one sample, after `step()` has started, in a loop that fetches a
    batch ahead of the one it works on or makes several steps with each batch, with a GradScaler, LBFGS, sparse
    gradients or `backward_passes_per_step`, in modes in which a rank makes its steps alone, where ranks meet inside a
    pass (`SyncBatchNorm`, a collective that backward goes through), and where Horovod reduces the gradients itself,
    without weights (`groups`, a process set, the user's compressor, `gradient_predivide_factor`).

    Args:
        loader: The loader from `hvd.shard` whose loop this is.

    If a rank is late: the others wait for the step, as for any slow rank.
    """

    def __init__(self, loader: Repeating) -> None:
        self._repeats = loader.repeats

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not _is_out_of_memory(error):
            return False
        reason = self._repeats.fail()
        if reason:
            logger.error("a batch that ran out of memory is not repeated in parts: %s", reason)
            return False
        _release(error, trace)
        return True


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _release(error: BaseException, trace: TracebackType | None) -> None:
    """Free the graph of the failed pass: variables that its calls still hold, and the tensors of the loop itself."""
    _clear_frames(error)
    if trace is not None:
        local = trace.tb_frame.f_locals
        _cut_graph(list(_computed(list(local.values()))))
        if local is not trace.tb_frame.f_globals and isinstance(local, dict):
            local.clear()  # This copy of the variables would keep them alive.
    gc.collect()  # Frames that caught errors, and graphs with hooks, are often kept alive by reference cycles.
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _clear_frames(error: BaseException) -> None:
    """Clear the variables of all calls that ended by an error or by one of its causes."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _computed(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors with a graph among variables and in containers, a model's output for example."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = list(getattr(value, "__dict__", {}).values())
    else:
        return
    if depth:
        for part in parts:
            yield from _computed(part, depth - 1)


def _cut_graph(tensors: list[torch.Tensor]) -> None:
    """Keep the values of tensors and release the graph they were computed in.

    A view cannot be detached in place; it is replaced by a detached view of the same memory, if no graph has saved it.
    """
    views = []
    for tensor in tensors:
        try:
            tensor.detach_()
        except RuntimeError:
            views.append(tensor)
    for view in views:
        with contextlib.suppress(RuntimeError):  # Otherwise it is freed when the loop assigns the variable again.
            if view.grad_fn is not None:
                torch.utils.swap_tensors(view, view.detach())


def cut_batch(data: Any, start: int, stop: int, size: int) -> Any:
    """Return samples start to stop of a batch that torch's default collate function has made from `size` samples.

    Raises:
        ValueError: Something in it does not have one entry per sample.
    """
    if isinstance(data, Mapping):
        return {key: cut_batch(value, start, stop, size) for key, value in data.items()}
    if isinstance(data, torch.Tensor) and data.ndim and data.shape[0] == size:
        return data[start:stop]
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        if len(data) == size and all(isinstance(value, (str, bytes)) for value in data):
            return data[start:stop]
        parts = [cut_batch(value, start, stop, size) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else parts
    raise ValueError(f"a batch has a {type(data).__name__} in it that is not one entry for each of {size} samples")
