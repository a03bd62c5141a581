"""Note whether a forward pass has begun since the last step: its graph refers to the parameters as they are now.

A rank that waits in a collective of the program between forward and backward must keep them: autograd would refuse the
changed ones, or, where it does not look, give a gradient of neither the old nor the new ones.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["ForwardPasses"]


class ForwardPasses:
    """The forward passes of one optimizer's parameters, as far as modules are called with gradients, in training.

    Modules that evaluate, or are called within `no_grad`, leave no graph that matters. `torch.compile` would compile
    anew for a hook of all modules; once something was compiled, whatever autograd has noted since the step counts.

    Args:
        params: The optimizer's parameters; a view, which follows what is added.
    """

    def __init__(self, params: Collection[torch.nn.Parameter]) -> None:
        self._params = params
        self._begun = False
        self._hook: Any = None
        self._nodes: int | None = None  # Of autograd's graph, at the end of the last step.

    @property
    def begun(self) -> bool:
        """Whether one has begun since the last step. Called by the training thread."""
        return self._begun or (self._nodes is not None and _nodes() > self._nodes)

    def step_ended(self, *, watch: bool, compiled: bool) -> None:
        """Begin to look for the next one.

        Args:
            watch: Whether it matters: whether ranks may be at different steps.
            compiled: Whether the program has compiled something.
        """
        self._begun = False
        self._nodes = _nodes() if watch and compiled else None
        if not watch or compiled:
            self.remove()
        elif self._hook is None:
            self._hook = register_module_forward_pre_hook(_hook_of(weakref.ref(self)))
            weakref.finalize(self, self._hook.remove).atexit = False

    def remove(self) -> None:
        """Look no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def note(self, module: torch.nn.Module) -> None:
        """Note that a module is called."""
        if self._begun or not module.training or not torch.is_grad_enabled():
            return
        self._begun = any(param in self._params for param in module._parameters.values())


def _hook_of(noting: weakref.ref[ForwardPasses]) -> Any:
    """Return a hook that does not keep the optimizer's parameters alive, as torch keeps it for all modules."""

    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        passes = noting()
        if passes is not None:
            passes.note(module)

    return before_forward


_asked = threading.local()


@torch.inference_mode(False)
@torch.enable_grad()
def _nodes() -> int:
    """Return how many nodes of autograd's graphs this thread has made, without those made to find out."""
    node: Any = torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn
    _asked.nodes = getattr(_asked, "nodes", 0) + 1
    return int(node._sequence_nr()) - int(_asked.nodes)
