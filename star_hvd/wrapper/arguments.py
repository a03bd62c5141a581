"""Check `DistributedOptimizer`'s arguments; errors are worded like Horovod's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average

__all__ = ["check_accuracy", "check_numbers", "check_overlap", "check_predivide", "names_of"]


def check_predivide(op: Any) -> None:
    """Check that `gradient_predivide_factor` can be used.

    Raises:
        ValueError: The reduction has no division, or Horovod is built for ROCm.
    """
    if mpi_ops.rocm_built():
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def check_accuracy(accuracy: Any) -> str:
    """Return the accuracy that `auto` has to keep.

    Raises:
        ValueError: Neither `exact` nor `bounded`.
    """
    if accuracy not in ("exact", "bounded"):
        raise ValueError(
            f"accuracy is {accuracy!r}; expected 'exact' (auto chooses only sync, sync(balanced) and sync(steal)) or "
            "'bounded' (all modes); the environment variable STAR_ACCURACY goes before the argument"
        )
    return str(accuracy)


def check_overlap(chosen: str | None, overlap: Any) -> bool | str:
    """Return whether steps overlap with the program: True, False, or `auto`.

    Args:
        chosen: The environment's setting, None if it has none.
        overlap: The argument.

    Raises:
        ValueError: It is none of these.
    """
    if chosen is not None:
        overlap = {"1": True, "0": False}.get(chosen, chosen)
    if not isinstance(overlap, bool) and overlap != "auto":
        raise ValueError(f"overlap is {overlap!r}; expected True, False or 'auto', or STAR_OVERLAP=1, 0 or auto")
    return overlap  # type: ignore[no-any-return]


def check_numbers(passes: int, groups: Any, max_grad_norm: float | None) -> None:
    """Check backward passes per step, groups of parameters and the norm to clip to.

    Raises:
        ValueError: One of them is invalid.
    """
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}; expected a positive number or None")
    if groups is None:
        return
    if not isinstance(groups, list):
        if not groups > 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[int] = set()
    for param in (p for group in groups for p in group):
        if not isinstance(param, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(param) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(param))


def names_of(optimizer: torch.optim.Optimizer, named: Iterable[Any] | None) -> dict[torch.nn.Parameter, str]:
    """Return the name of every parameter, as given or by its position in the groups.

    Raises:
        ValueError: An item is not a (name, parameter) pair, names repeat, or a parameter of the optimizer has none.
    """
    pairs = (
        list(named)
        if named is not None
        else [
            (f"allreduce.noname.{i}.{j}", param)
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
        ]
    )
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named_ids = {id(param) for _, param in pairs}
    unnamed = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in named_ids]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    return {param: name for name, param in pairs}
