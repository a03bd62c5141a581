"""Gates in front of parameters: a use of a parameter that is not up to date waits for its bucket first.

While a bucket is closed, the class of its parameters is a subclass that sees every use of them from Python
(`__torch_function__`): a module's forward pass, `state_dict()`, an average of the weights, `param.data`, a list of
parameters that the program made long ago, a parameter that another module uses too. The use waits for the bucket and
continues with the ordinary parameter. So no knowledge of the model is needed, and open gates cost nothing.

Not seen are aliases made before (`param.detach()` kept from an earlier step) and what reads the memory without Python:
a scripted or compiled module. Those are seen by a hook before every module's forward pass, and wait for all buckets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

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
        wait: Is called with the index of a closed bucket before one of its parameters is used, in the thread that uses
            it; has to `open` it, or to raise.
    """

    def __init__(self, wait: Callable[[int], None]) -> None:
        self.wait = wait
        self._closed: dict[int, Sequence[torch.nn.Parameter]] = {}
        self._hook: Any = None

    @property
    def closed(self) -> tuple[int, ...]:
        """The buckets whose gates are closed, in the order in which they were."""
        return tuple(self._closed)

    def close(self, index: int, params: Sequence[torch.nn.Parameter]) -> None:
        """From now on a use of these parameters calls `wait(index)` first."""
        if self._hook is None:
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._closed[index] = params
        for param in params:
            if not isinstance(param, _Gated):
                ordinary = type(param)
                param.__class__ = _gated(ordinary)
                param._star_gate = (self, index, ordinary)  # type: ignore[attr-defined]

    def open(self, index: int) -> None:
        """The parameters of a bucket are ordinary ones again."""
        for param in self._closed.pop(index, ()):
            if isinstance(param, _Gated):
                param.__class__ = param.__dict__.pop("_star_gate")[2]

    def open_all(self) -> None:
        """Open what is closed, without waiting: the parameters stay as they are."""
        for index in self.closed:
            self.open(index)

    def remove(self) -> None:
        """Open all gates for good."""
        self.open_all()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._closed and _reads_memory(module):
            for index in self.closed:
                self.wait(index)


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
    """The subclass of a parameter's class."""
    found = _CLASSES.get(ordinary)
    if found is None:
        bases = (_Gated,) if ordinary is torch.nn.Parameter else (_Gated, ordinary)
        found = _CLASSES[ordinary] = type(ordinary.__name__, bases, {"__module__": ordinary.__module__})
    return found


def _pass(param: Any) -> None:
    """Wait at a parameter's gate."""
    while (gate := param.__dict__.get("_star_gate")) is not None:  # It may be closed again by then, by another thread.
        gates, index, _ = gate
        gates.wait(index)
        if param.__dict__.get("_star_gate") is gate:
            raise StarError(f"bucket {index} was waited for, but its parameters were not brought up to date")


def _gated_in(value: Any) -> Iterator[Any]:
    """The parameters behind closed gates among arguments."""
    if isinstance(value, _Gated):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _gated_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _gated_in(item)


def _is_metadata(func: Any) -> bool:
    """Whether a call reads nothing but what no update changes."""
    if getattr(func, "__name__", "") == _GETTER:
        return getattr(func, "__self__", None) in _METADATA
    return func in _METHODS


def _reads_memory(module: torch.nn.Module) -> bool:
    """Whether a module's forward pass uses parameters where Python does not see it."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
