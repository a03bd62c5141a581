"""Hand over tensors between threads, and thus between the streams of a GPU.

On a GPU an operation is queued on the calling thread's current stream and runs later; operations of different streams
run in any order. The training thread works on the user's streams, every other thread of ours on a stream of its own, so
that a proxy contribution does not queue behind a late rank's kernels. For the same reason the training thread submits
or keeps deferred buckets on a stream of its own (`StepDriver.arrive`): the user's still has the rest of backward.
Wherever a tensor passes from one thread to another, the giver therefore creates a `Fence` behind its own work, and the
taker has its current stream wait for it (`Fence.order`), which blocks no thread. Memory allocated on another stream is
registered with the allocator at the same point. A thread waits (`Fence.wait`, with a deadline) only where the host
reads what the device computes, and never under the engine's lock.

All hand-overs, by the name of their fence (T training thread and autograd's, H helper, S tensor server, X
`star-transmit-N`):

| name          | giver   | taker   | what is handed over                                 | where                   |
|---------------|---------|---------|-----------------------------------------------------|-------------------------|
| `parts`       | T       | T       | a bucket's gradients, of several of autograd's streams | `Streams.gather` |
| `gradient`    | T       | H, T    | a bucket's gradient, in modes that close without it | `StepEngine.defer`     |
| `norm`        | H, T    | T, host | squared norm of the local gradient                  | `StepEngine.arrive`    |
| `kept`        | H, T, S | H, T    | a late gradient until its bucket is next submitted  | `LateGradients`         |
| `bucket`      | H, T    | T       | a bucket's own buffer, for the next backward pass   | `Replica.reuse_buckets` |
| `means`       | H       | T, H    | means of a step that ended without T                | `Replica.push`          |
| `averaged`    | H       | T, H    | an averaging of `local` that ended without T | `LocalSteps.ended_by_proxy` |
| `params`      | T       | H, S    | live parameters and optimizer state, to copy        | `Replica.writing`       |
| `copied`      | H, S    | T       | the same, copied: they may be changed again         | `Replica.copying`       |
| `shadow`      | H       | T, S    | parameters, state and gradients of the shadow       | `Replica.replay_one`    |
| `shadow_read` | S       | H, T    | the same, copied: they may be changed again         | `Replica.snapshot`      |
| `transmit`    | T, H    | T, H, X | a bucket that is held back until its turn comes     | `OrderedCollective`     |
| `submitted`   | T       | T, H    | parameters and state, to apply a bucket's mean to   | `Overlap.begin`         |
| `applied`     | T, H    | T, H    | the same, with the mean applied                     | `Overlap.wait`          |
| `host`        | T, S    | host    | what goes to a rank or a server: pushes, snapshots  | `Streams.await_host`    |

No row is needed where the same thread gives and takes, where only host memory passes (the preparer's states, a
parameter server's answers, everything behind `ps.Client`, headers), and for Horovod: a reduction starts after an event
that Horovod records on the current stream of the submitting thread, and the collecting thread (`finish`) finds it
complete. With `HOROVOD_ENABLE_ASYNC_COMPLETION` it does not: Horovod has the device's default stream wait instead, so
that a helper would read means too early, and only modes in which the training thread collects them are possible
(`lockstep_only`). The proxy thread of `grouped` submits its own buffers and leaves only counts behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from star_hvd.engine.buckets import Bucket
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_lock
from star_hvd.telemetry.wait_time import WaitTime

__all__ = [
    "APPLIED",
    "AVERAGED",
    "BUCKET",
    "COPIED",
    "CUDA",
    "DONE",
    "GRADIENT",
    "HOST",
    "KEPT",
    "MEANS",
    "NAMES",
    "NORM",
    "PARAMS",
    "PARTS",
    "SHADOW",
    "SHADOW_READ",
    "SUBMITTED",
    "TRANSMIT",
    "Backend",
    "Event",
    "Fence",
    "Fences",
    "Streams",
]

GRADIENT, NORM, KEPT, BUCKET, MEANS, AVERAGED = "gradient", "norm", "kept", "bucket", "means", "averaged"
PARAMS, COPIED, SHADOW, SHADOW_READ, HOST = "params", "copied", "shadow", "shadow_read", "host"
TRANSMIT, SUBMITTED, APPLIED, PARTS = "transmit", "submitted", "applied", "parts"
NAMES = (
    PARTS, GRADIENT, NORM, KEPT, BUCKET, MEANS, AVERAGED, PARAMS, COPIED, SHADOW, SHADOW_READ, HOST, TRANSMIT,
    SUBMITTED, APPLIED,
)  # fmt: skip

_POLL_S = 0.0001
_HOST_DEADLINE_S = 300.0  # A step of a slow rank may take long; a device that hangs must not hang the job silently.


class Event(Protocol):
    """A point in a stream's work, `torch.cuda.Event` for example."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


class Backend(Protocol):
    """Interface to a kind of device. `name` is the hand-over's, for tests and traces."""

    def queues(self, tensor: torch.Tensor) -> bool:
        """Whether operations on this tensor are queued on streams."""
        ...

    def present_stream(self, device: torch.device) -> Any:
        """Return the calling thread's current stream of `device`; hashable, and equal between calls."""
        ...

    def record(self, device: torch.device, name: str, stream: Any = None) -> Event:
        """Record an event behind all work queued on a stream of `device`, by default the current one."""
        ...

    def wait(self, device: torch.device, event: Any, name: str) -> None:
        """Have the calling thread's current stream of `device` wait for an event; blocks no thread."""
        ...

    def register(self, tensor: torch.Tensor, name: str) -> None:
        """Record with the allocator that the calling thread's current stream uses this tensor's memory."""
        ...

    def own_streams(self, devices: Sequence[torch.device]) -> AbstractContextManager[None]:
        """Make streams owned by the calling thread its current ones inside the block."""
        ...


class _Cuda:
    """Streams and events of CUDA, and of ROCm under the same names."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def queues(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def present_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def record(self, device: torch.device, name: str, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(device))
        return event

    def wait(self, device: torch.device, event: torch.cuda.Event, name: str) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def register(self, tensor: torch.Tensor, name: str) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    @contextlib.contextmanager
    def own_streams(self, devices: Sequence[torch.device]) -> Iterator[None]:
        made: dict[torch.device, torch.cuda.Stream] = self._of_thread.__dict__.setdefault("streams", {})
        with contextlib.ExitStack() as stack:
            for device in devices:
                if device not in made:  # Other ranks wait for this small work: higher priority than training kernels.
                    made[device] = torch.cuda.Stream(device, priority=-1)
                # A new thread's device is GPU 0, which leaving the stream's context would set, so that every rank would
                # have a CUDA context there. The device's context returns to it only if the process has one there.
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(made[device]))
            yield


CUDA: Backend = _Cuda()


class Fence:
    """The end of the work that a thread had queued on some devices when it created this.

    Args:
        backend: Backend of the devices.
        name: Name of the hand-over.
        events: One per device.
    """

    __slots__ = ("_backend", "_events", "name")

    def __init__(self, backend: Backend, name: str, events: Sequence[tuple[torch.device, Event]]) -> None:
        self.name = name
        self._backend = backend
        self._events = events

    def done(self) -> bool:
        """Whether all devices have reached it."""
        return all(event.query() for _, event in self._events)

    def order(self, *tensors: torch.Tensor) -> None:
        """Have the calling thread's current streams wait for this fence; the thread itself does not wait.

        Args:
            *tensors: The tensors taken over, whose memory may belong to another stream.
        """
        for device, event in self._events:
            self._backend.wait(device, event, self.name)
        if self._events:
            for tensor in tensors:
                if self._backend.queues(tensor):
                    self._backend.register(tensor, self.name)

    def wait(self, deadline_s: float = _HOST_DEADLINE_S) -> None:
        """Block the calling thread until all devices have reached the fence.

        Raises:
            DeadlineError: They did not within `deadline_s`.
        """
        if self.done():
            return
        wait = WaitTime(what=lambda: f"the device to finish its work (hand-over '{self.name}')")
        while not self.done():
            if wait.count() > deadline_s:
                raise DeadlineError(
                    f"the device did not finish its work (hand-over '{self.name}') within {deadline_s:g} s; a kernel "
                    "hangs, or other processes have the device"
                )
            time.sleep(_POLL_S)


DONE = Fence(CUDA, "done", ())  # For host memory.


class Fences:
    """Fences of several givers, from any thread, for one taker."""

    __slots__ = ("_fences", "_lock")

    def __init__(self) -> None:
        self._lock = ordered_lock("Fences._lock")  # No calls are made under it.
        self._fences: list[Fence] = []

    def add(self, fence: Fence) -> None:
        """Add a fence to wait for."""
        if fence is not DONE:
            with self._lock:
                self._fences.append(fence)

    def order(self) -> None:
        """Call `Fence.order` for all of them and remove them."""
        if self._fences:
            with self._lock:
                taken, self._fences = self._fences, []
            for fence in taken:
                fence.order()


class Streams:
    """Creates the fences of one optimizer.

    Args:
        buckets: The optimizer's buckets, extended in place when parameters are added.
        backend: Backend of the devices they can be on.
    """

    def __init__(self, buckets: Sequence[Bucket], backend: Backend = CUDA) -> None:
        self._buckets = buckets
        self._backend = backend
        self._parts_on: dict[int, set[Any]] = {}  # Per bucket the streams that write parts of its gradient.
        self.devices: tuple[torch.device, ...] = ()
        self.renew()

    def renew(self) -> None:
        """Update the devices after buckets were added."""
        found = {bucket.flat.device: None for bucket in self._buckets if self._backend.queues(bucket.flat)}
        self.devices = tuple(found)

    def give(self, name: str) -> Fence:
        """Return a fence behind all work the calling thread has queued on this optimizer's devices."""
        if not self.devices:
            return DONE
        return Fence(self._backend, name, [(device, self._backend.record(device, name)) for device in self.devices])

    def give_one(self, name: str, tensor: torch.Tensor) -> Fence:
        """Return the same for the device of one tensor only."""
        if not self.devices or not self._backend.queues(tensor):
            return DONE
        return Fence(self._backend, name, [(tensor.device, self._backend.record(tensor.device, name))])

    def note_part(self, index: int, flat: torch.Tensor) -> None:
        """Note that the calling thread has queued a part of what fills a bucket's buffer, `flat`; see `gather`."""
        if self.devices and self._backend.queues(flat):
            self._parts_on.setdefault(index, set()).add(self._backend.present_stream(flat.device))

    def gather(self, index: int, flat: torch.Tensor) -> None:
        """Have the calling thread's current stream wait for all parts of a bucket, after the last part is queued.

        Autograd accumulates each gradient on the stream of the parameter's forward pass, and a program may have
        several; they are in order only after the whole backward pass.
        """
        streams = self._parts_on.pop(index, None)
        if streams is not None and len(streams) > 1:
            here = self._backend.present_stream(flat.device)
            for stream in streams:
                if stream != here:
                    self._backend.wait(flat.device, self._backend.record(flat.device, PARTS, stream), PARTS)

    def await_host(self, deadline_s: float = _HOST_DEADLINE_S) -> None:
        """Block until all work the calling thread has queued is done, before the host reads its results.

        Raises:
            DeadlineError: It was not done within `deadline_s`.
        """
        if self.devices:
            self.give(HOST).wait(deadline_s)

    def use(self, *tensors: torch.Tensor) -> None:
        """Register tensors that the calling thread uses from here on, already complete (e.g. after a reduction)."""
        if self.devices:
            for tensor in tensors:
                if self._backend.queues(tensor):
                    self._backend.register(tensor, "reduced")

    def queues(self, tensor: torch.Tensor) -> bool:
        """Whether operations on a tensor are queued on a stream."""
        return bool(self.devices) and self._backend.queues(tensor)

    def own(self) -> AbstractContextManager[None]:
        """Make streams owned by the calling thread its current ones; does nothing without a GPU."""
        return self._backend.own_streams(self.devices) if self.devices else contextlib.nullcontext()
