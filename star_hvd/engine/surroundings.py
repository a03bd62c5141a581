"""What a thread has set around its calls of torch, some of which decides what the same call computes.

The first use of a parameter applies the step under way, wherever that use is: under autocast, with another default
device, inside `torch.func.grad`. The step is applied as it would have been in `step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Surroundings", "untransformed"]

_DEVICE = "cpu"  # Only steps in host memory overlap.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Those of one thread at one moment.

    Attributes:
        autocast: Whether it is on, its data type and whether it caches.
        dtype: The default data type.
        modes: Function modes, of which a default device is one.
    """

    autocast: tuple[bool, torch.dtype, bool]
    dtype: torch.dtype
    modes: tuple[Any, ...]

    @classmethod
    def present(cls) -> Surroundings:
        """Return those of the calling thread."""
        autocast = (
            torch.is_autocast_enabled(_DEVICE),
            torch.get_autocast_dtype(_DEVICE),
            torch.is_autocast_cache_enabled(),
        )
        return cls(autocast, torch.get_default_dtype(), tuple(_get_current_function_mode_stack()))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the calling thread in them inside the block, and `untransformed`.

        Inference mode and whether gradients are recorded stay as they are.
        """
        present = Surroundings.present()
        with untransformed(), ExitStack() as stack:
            if present.modes != self.modes:
                stack.enter_context(_function_modes(self.modes))
            if present.autocast != self.autocast:
                enabled, dtype, cached = self.autocast
                stack.enter_context(torch.autocast(_DEVICE, dtype, enabled, cached))
            if present.dtype != self.dtype:
                stack.enter_context(_default_dtype(self.dtype))
            yield


@contextmanager
def untransformed() -> Iterator[None]:
    """Have the calling thread outside every transform of functions, every trace and every mode that sees each operation
    inside the block.
    """
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._get_tracing_state() is not None:
            stack.enter_context(_no_tracing())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield


@contextmanager
def _function_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    held = []
    try:
        while _get_current_function_mode_stack():
            held.append(_pop_mode())
        for mode in modes:
            _push_mode(mode)
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in reversed(held):
            _push_mode(mode)


@contextmanager
def _no_tracing() -> Iterator[None]:
    before = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(before)  # type: ignore[attr-defined]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
