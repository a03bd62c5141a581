"""Note whether a forward pass has begun since the last step: its graph refers to the parameters as they are now.

A rank that waits in a collective of the program between forward and backward must keep them: autograd would refuse the
changed ones, or, where it does not look, give a gradient of neither the old nor the new ones.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["ForwardPasses"]

Hook = Callable[[torch.nn.Module, Any], None]


class ForwardPasses:
    """The forward passes of one optimizer's parameters, as far as modules are called with gradients, in training.

    Modules that evaluate, or are called within `no_grad`, leave no graph that matters. torch would compile again what
    it has compiled if a hook of all modules came later, so there the modules that `torch.compile` returned get one.
    Passes of modules that are compiled in place (`module.compile()`) are not seen.

    Args:
        params: The optimizer's parameters; a view, which follows what is added.

    Attributes:
        begun: Whether one has begun since the last step.
    """

    def __init__(self, params: Collection[torch.nn.Parameter]) -> None:
        self._params = params
        self._hooks: list[Any] = []
        self._hooked = ""
        self.begun = False

    def step_ended(self, *, watch: bool, compiled: bool) -> None:
        """Begin to look for the next one.

        Args:
            watch: Whether it matters: whether ranks may be at different steps.
            compiled: Whether the program has compiled something.
        """
        self.begun = False
        wanted = ("compiled" if compiled else "all") if watch else ""
        if wanted == self._hooked:
            return
        self.remove()
        self._hooked = wanted
        if not watch:
            return
        returned, in_place = _compiled(self._params) if compiled else ([], [])
        noting = weakref.ref(self)  # torch keeps its hooks, and these must not keep the parameters.
        self._hooks += [module.register_forward_pre_hook(_hook_of(noting, whole=True)) for module in returned]
        if not returned and not in_place:
            self._hooks.append(register_module_forward_pre_hook(_hook_of(noting, whole=False)))
        for hook in self._hooks:
            weakref.finalize(self, hook.remove).atexit = False

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked = ""

    def note(self, module: torch.nn.Module, *, whole: bool) -> None:
        """Note that a module is called.

        Args:
            module: The module.
            whole: Whether modules inside it are not noted when they are called.
        """
        if self.begun or not module.training or not torch.is_grad_enabled():
            return
        own = module.parameters() if whole else module._parameters.values()
        self.begun = any(param in self._params for param in own)


def _hook_of(noting: weakref.ref[ForwardPasses], *, whole: bool) -> Hook:
    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        passes = noting()
        if passes is not None:
            passes.note(module, whole=whole)

    return before_forward


def _compiled(params: Collection[torch.nn.Parameter]) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return the compiled modules with some of these parameters: those `torch.compile` returned, those done in place.

    Takes tens of milliseconds. Hooks of the latter would be compiled, too.
    """
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    modules: list[torch.nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    returned = [each for each in modules if type(each) is kind]
    in_place = [each for each in modules if each.__dict__.get("_compiled_call_impl") is not None]

    def own(found: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return [module for module in found if any(param in params for param in module.parameters())]

    return own(returned), own(in_place)
