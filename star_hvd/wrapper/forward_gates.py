"""Gates in front of parameters: a use of a parameter that is not up to date first waits for its bucket.

While a bucket is closed, its parameters have a subclass that intercepts every use of them from Python
(`__torch_function__`): a module's forward pass, `state_dict()`, an average of the weights, `param.data`, an old list of
parameters, a parameter shared with another module. The use waits for the bucket and continues with the ordinary
parameter. This needs no knowledge of the model, and open gates cost nothing.

Code that gets at the memory without Python needs more: before the forward pass of a scripted or compiled module, and
before a scripted method, all buckets are waited for; the transforms of `torch.func` and scripted functions wait for the
parameters among their arguments (`_guard_natives`). A function or method that `torch.compile` has compiled passes no
gate at all, and a gated parameter has another class than the one it was compiled for: once anything was compiled
(`passed_by`), the users of gates close them no more.

Not intercepted are aliases made earlier (`param.detach()` kept from an earlier step) and functions of C++ that take a
tensor without looking for a subclass: those of extensions that are no operators of `torch.ops`, and a few of torch's,
which docs/modes.md lists.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from star_hvd.engine.surroundings import untransformed
from star_hvd.errors import StarError

__all__ = ["ForwardGates"]

_GETTER = "__get__"
_METADATA = frozenset(
    getattr(torch.Tensor, name)
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim", "is_cuda")
)
_METHODS = frozenset(
    (
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.element_size,
        torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.empty_like, torch.zeros_like, torch.ones_like,
    )
)  # fmt: skip


class ForwardGates:
    """The gates of one optimizer.

    Args:
        wait: Called with the index of a closed bucket before one of its parameters is used, in the thread that uses
            it; has to `open` the bucket or raise.
    """

    def __init__(self, wait: Callable[[int], None]) -> None:
        self.wait = wait
        self._closed: dict[int, Sequence[torch.nn.Parameter]] = {}
        self._hook: Any = None
        _all.add(self)

    @property
    def closed(self) -> tuple[int, ...]:
        """The buckets whose gates are closed, in the order of closing."""
        return tuple(self._closed)

    @staticmethod
    def passed_by() -> bool:
        """Whether code that passes no gates is in use, that of `torch.compile`: then no gate should be closed."""
        compiler = sys.modules.get("torch._dynamo.convert_frame")
        return compiler is not None and bool(compiler.FRAME_COUNTER)

    def close(self, index: int, params: Sequence[torch.nn.Parameter]) -> None:
        """Make every use of these parameters call `wait(index)` first."""
        if self._hook is None:
            _guard_natives()
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._closed[index] = params
        for param in params:
            if not isinstance(param, _Gated):
                ordinary = type(param)
                param.__class__ = _gated(ordinary)
                param._star_gate = (self, index, ordinary)  # type: ignore[attr-defined]

    def open(self, index: int) -> None:
        """Make the parameters of a bucket ordinary again."""
        for param in self._closed.pop(index, ()):
            if isinstance(param, _Gated):
                param.__class__ = param.__dict__.pop("_star_gate")[2]

    def open_all(self) -> None:
        """Open all closed gates without waiting; the parameters keep their values."""
        for index in self.closed:
            self.open(index)

    def remove(self) -> None:
        """Open all gates permanently."""
        self.open_all()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._closed and _reads_memory(module):
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait for all closed buckets."""
        for index in self.closed:
            self.wait(index)


_all: weakref.WeakSet[ForwardGates] = weakref.WeakSet()


class _Gated(torch.nn.Parameter):
    """Mixed into the class of a parameter behind a closed gate."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _gated_in((args, kwargs)):
            _pass(param)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _pass(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _pass(self)
        return self.__reduce_ex__(protocol)


_CLASSES: dict[type, type] = {}


def _gated(ordinary: type) -> type:
    """Return the gated subclass of a parameter's class."""
    found = _CLASSES.get(ordinary)
    if found is None:
        bases = (_Gated,) if ordinary is torch.nn.Parameter else (_Gated, ordinary)
        found = _CLASSES[ordinary] = type(ordinary.__name__, bases, {"__module__": ordinary.__module__})
    return found


def _pass(param: Any) -> None:
    """Wait at a parameter's gate."""
    while (gate := param.__dict__.get("_star_gate")) is not None:  # Another thread may have closed it again.
        gates, index, _ = gate
        with untransformed():
            gates.wait(index)
        if param.__dict__.get("_star_gate") is gate:
            raise StarError(f"bucket {index} was waited for, but its parameters were not brought up to date")


def _gated_in(value: Any) -> Iterator[Any]:
    """Yield the parameters behind closed gates among arguments."""
    if isinstance(value, _Gated):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _gated_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _gated_in(item)


def _is_metadata(func: Any) -> bool:
    """Whether a call reads only what updates do not change."""
    if getattr(func, "__name__", "") == _GETTER:
        return getattr(func, "__self__", None) in _METADATA
    return func in _METHODS


def _reads_memory(module: torch.nn.Module) -> bool:
    """Whether a module's forward pass uses parameters in a way that Python cannot intercept."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@functools.cache
def _guard_natives() -> None:
    """Have what takes parameters without telling their class wait at their gates, in this process from now on."""
    for owner, name, everything in (
        (eager_transforms, "_wrap_for_grad", False),
        (eager_transforms, "_wrap_functional_tensor", False),
        (vmap, "_add_batch_dim", False),
        (torch._C.ScriptFunction, "__call__", False),
        (torch._C.ScriptMethod, "__call__", True),
    ):
        if callable(native := getattr(owner, name, None)):  # They are torch's own business, so another may lack them.
            setattr(owner, name, _guarded(native, everything=everything))


def _guarded(native: Callable[..., Any], *, everything: bool) -> Callable[..., Any]:
    """Return a function that calls `native` after waiting.

    Args:
        native: The function.
        everything: Whether it reads more than its arguments.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if everything:
            for gates in tuple(_all):
                gates.wait_for_all()
        for param in _gated_in((args, kwargs)):
            _pass(param)
        return native(*args, **kwargs)

    return call
