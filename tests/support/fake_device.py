"""A fake GPU: operations are queued on streams and run when the test says so; until then their results are poison.

`Lazy` tensors claim to be on `cuda:0`. An operation on them is queued on the current stream, like a kernel launch; its
result reads as NaN (new memory) or as the previous contents until it runs. Views share memory. As on CUDA, a host read
waits for the current stream only, so values not yet written by another stream come out as poison. The device also
records errors that poison does not reveal: memory used on a stream that the allocator does not know of, a host wait
without a deadline, and one under an engine's lock.

Tests normally use one thread; `device.on(name)` makes a stream the current one, as if another thread ran.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from star_hvd.engine import device

__all__ = ["FakeDevice", "Lazy", "Stuck"]

CUDA0 = torch.device("cuda:0")


class Stuck(AssertionError):
    """Streams wait for each other, or for an event that nothing will record."""


class FakeEvent:
    """Happens when its stream reaches it."""

    def __init__(self, name: str, device: FakeDevice, *, happened: bool = False) -> None:
        self.name, self.happened = name, happened
        self._device = device

    def query(self) -> bool:
        if not self.happened:
            self._device.asked = self
        return self.happened


class FakeStream:
    """An in-order queue; an entry is a kernel, an event to wait for, or an event to record."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[tuple[str, Any]] = deque()

    def blocked(self) -> bool:
        return bool(self.queue) and self.queue[0][0] == "wait" and not self.queue[0][1].happened

    def advance(self) -> bool:
        """Execute the next entry; return whether there was one that is not blocked."""
        if not self.queue or self.blocked():
            return False
        kind, what = self.queue.popleft()
        if kind == "kernel":
            what()
        elif kind == "record":
            what.happened = True
        return True


class Memory:
    """An allocation, with its home stream and the streams that were registered with the allocator.

    Once no tensor refers to it, the allocator reuses it after the work already queued on these streams, regardless of
    other streams: whoever still reads it gets poison.
    """

    def __init__(self, device: FakeDevice, base: torch.Tensor) -> None:
        self.known = {device.current.name}
        self._device, self._home, self._base = device, device.current, base

    def __del__(self) -> None:
        device, base = self._device, self._base
        for name in self.known - {self._home.name}:
            event = FakeEvent("freed", device)
            device.stream(name).queue.append(("record", event))
            self._home.queue.append(("wait", event))
        self._home.queue.append(("kernel", lambda: _poison(base)))


class Lazy(torch.Tensor):
    """A tensor of the fake device."""

    inner: torch.Tensor
    memory: Memory
    device_: FakeDevice

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory, device: FakeDevice) -> Lazy:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("meta"),  # The device that C++ sees; it has no guard for devices it was not built for.
        )
        made.inner, made.memory, made.device_ = inner, memory, device
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA0

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Lazy))
        return found.device_.dispatch(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Intercepts tensors created on the device, or copied to it, from host values only."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(isinstance(leaf, Lazy) for leaf in tree_leaves((args, kwargs))):
            return self._device.dispatch(func, args, kwargs)
        if torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return func(*args, **kwargs)
        if func._schema.name == "aten::_to_copy":
            self._device.check_locks()  # A copy from unpinned memory waits for its stream.
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return self._device.upload(func(*args, **kwargs).clone())


class FakeDevice:
    """See the module's docstring.

    Args:
        disabled: Hand-overs whose fences do nothing; the test must then find poison.

    Attributes:
        faults: Descriptions of errors that a real device would have suffered from.
        locks: Engines' locks, under which the host may not wait for the device.
        used: Hand-overs for which a fence was recorded.
        ordered: Hand-overs whose fence had not been reached by its stream when another stream waited for it.
        asked: The last event that was queried before it happened.
    """

    def __init__(self, disabled: Sequence[str] = ()) -> None:
        self.disabled = frozenset(disabled)
        self.streams: dict[str, FakeStream] = {}
        self.stream("default")
        self._here = threading.local()  # The current stream of each thread, if not the default one.
        self.faults: list[str] = []
        self.locks: list[threading.Condition] = []
        self.used: set[str] = set()
        self.ordered: set[str] = set()
        self.asked: FakeEvent | None = None
        self._mode = _Factories(self)

    # ---- streams --------------------------------------------------------------------------------------------

    @property
    def current(self) -> FakeStream:
        """Return the calling thread's current stream."""
        return getattr(self._here, "stream", None) or self.stream("default")

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._here.stream = stream

    def stream(self, name: str) -> FakeStream:
        return self.streams.setdefault(name, FakeStream(name))

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Make this the current stream, as if another thread ran."""
        before, self.current = self.current, self.stream(name)
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeDevice]:
        """Activate the device: inside, tensors can be created on it."""
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=self.sleep)
        with (
            mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
            mock.patch.object(device, "time", clock),
            self._mode,
        ):
            yield self

    def finish(self, stream: FakeStream | None = None) -> None:
        """Run one stream or all streams to the end, and whatever they wait for."""
        wanted = [stream] if stream is not None else list(self.streams.values())
        while any(each.queue for each in wanted):
            moved = False
            for each in wanted:
                while each.advance():
                    moved = True
            if not moved and not any(other.advance() for other in self.streams.values()):
                raise Stuck("no stream can go on")

    def finish_event(self, event: FakeEvent) -> None:
        """Run only what an event needs; other streams stay as far behind as possible."""
        for stream in self.streams.values():
            if ("record", event) in stream.queue:
                while not event.happened:
                    if stream.blocked():
                        self.finish_event(stream.queue[0][1])
                    elif not stream.advance():
                        raise Stuck(f"event {event.name}")
                return

    # ---- the `Backend` that `Streams` uses ---------------------------------------------------------------------

    def queues(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Lazy)

    def present_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def record(self, device: torch.device, name: str, stream: FakeStream | None = None) -> FakeEvent:
        self.used.add(name)
        if name in self.disabled:
            return FakeEvent(name, self, happened=True)
        event = FakeEvent(name, self)
        (stream or self.current).queue.append(("record", event))
        return event

    def wait(self, device: torch.device, event: FakeEvent, name: str) -> None:
        if name not in self.disabled:
            if not event.happened:
                self.ordered.add(name)
            self.current.queue.append(("wait", event))

    def register(self, tensor: torch.Tensor, name: str) -> None:
        assert isinstance(tensor, Lazy)
        if name not in self.disabled:
            tensor.memory.known.add(self.current.name)

    @contextlib.contextmanager
    def own_streams(self, devices: Sequence[torch.device]) -> Iterator[None]:
        with self.on(f"{self.current.name}'s own"):
            yield

    # ---- operations -------------------------------------------------------------------------------------------

    def upload(self, value: torch.Tensor) -> Lazy:
        """Return a host value on the device; poison until its copy has run."""
        return self._launch(lambda: value, value)

    def _launch(self, kernel: Callable[[], Any], like: Any) -> Any:
        """Queue a kernel that computes one or several tensors with the shapes of `like`."""
        several = isinstance(like, tuple)
        inners = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) for t in (like if several else (like,))]

        def run() -> None:
            made = kernel()
            for inner, value in zip(inners, made if several else (made,), strict=True):
                inner.copy_(value)

        for inner in inners:
            _poison(inner)
        self.current.queue.append(("kernel", run))
        found = tuple(Lazy(inner, Memory(self, inner), self) for inner in inners)
        return found if several else found[0]

    def sleep(self, seconds: float) -> None:
        """Wait, as the host, for the last event queried: only what it needs is run."""
        self.check_locks()
        assert self.asked is not None
        self.finish_event(self.asked)

    def check_locks(self) -> None:
        """Note a fault if the host waits for the device here while it holds an engine's lock."""
        if any(lock._is_owned() for lock in self.locks):  # type: ignore[attr-defined]
            self.faults.append("the host waits for the device under an engine's lock")

    def host_read(self) -> None:
        """Wait, as the host, for the current stream and whatever that waits for."""
        self.check_locks()
        if self.current.queue:
            self.faults.append("the host waits for the device without a deadline")
            self.finish(self.current)

    def _note_use(self, tensors: Sequence[Lazy], func: Any) -> None:
        for tensor in tensors:
            if self.current.name not in tensor.memory.known:
                self.faults.append(f"{func} on {self.current.name} uses memory of {sorted(tensor.memory.known)}")

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        lazies = [leaf for leaf in leaves if isinstance(leaf, Lazy)]
        schema, name = func._schema, func._schema.name.partition("::")[2]
        raw_args, raw_kwargs = tree_map_only(Lazy, lambda t: t.inner, (args, kwargs))
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            self.host_read()
            return func(*raw_args, **raw_kwargs)
        if name == "_to_copy" and torch.device(kwargs.get("device") or CUDA0).type == "cpu":
            self.host_read()
            return func(*raw_args, **raw_kwargs)
        if name == "copy_" and not isinstance(args[0], Lazy):
            self.host_read()
            return func(*raw_args, **raw_kwargs)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            # A view: no kernel runs.
            wrap = lambda t: Lazy(t, lazies[0].memory, self)  # noqa: E731
            return tree_map_only(torch.Tensor, wrap, func(*raw_args, **raw_kwargs))
        if name == "copy_" and not isinstance(args[1], Lazy) and args[1].dim() > 0:
            self.check_locks()
        self._note_use(lazies, func)
        raw_args, raw_kwargs = self._frozen(name, raw_args, raw_kwargs, args, kwargs)
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs[argument.name]
                self.current.queue.append(("kernel", lambda: func(*raw_args, **raw_kwargs)))
                return value
        if "device" in raw_kwargs:
            raw_kwargs["device"] = torch.device("cpu")
        return self._launch(lambda: func(*raw_args, **raw_kwargs), func(*raw_args, **raw_kwargs))

    def _frozen(self, name: str, raw_args: Any, raw_kwargs: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Copy host arguments at their current values; only scalars are accepted, except as source of a copy."""
        inners = {id(leaf.inner) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Lazy)}

        def freeze(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in inners:
                return tensor
            if tensor.dim() > 0 and name != "copy_":
                raise RuntimeError(f"{name}: expected all tensors on the same device, found cuda:0 and cpu")
            return tensor.clone()

        frozen_args, frozen_kwargs = tree_map_only(torch.Tensor, freeze, (raw_args, dict(raw_kwargs)))
        return frozen_args, frozen_kwargs


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
