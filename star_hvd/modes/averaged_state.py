"""Optimizer state that `local` averages with the parameters: what has their shape, and the rest.

State of a parameter's shape (momentum, Adam's moments) is laid out like a bucket's gradients. The rest, with one vector
for all buckets, is what an update reads besides: step counts, as numbers or 0-dimensional tensors, NAdam's
`mu_product`, and floating-point tensors of other shapes (Adafactor). If it differed between ranks, so would the updates
of the same gradient. It is averaged in float64, so that a count that is equal on all ranks keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from star_hvd.engine.buckets import Bucket

__all__ = ["gather_rest", "mean_of_rest", "move_to_mean", "put_rest", "shaped_keys", "shaped_values", "unaveraged"]

State = Mapping[Any, MutableMapping[str, Any]]


def shaped_keys(bucket: Bucket, state: State) -> list[str]:
    """Return the keys of state with the parameters' shape, the same on all ranks once all have stepped."""
    own = ((param, state.get(param, {})) for param in bucket.params)
    return sorted({key for param, values in own for key, value in values.items() if _shaped(param, value)})


def shaped_values(bucket: Bucket, state: State, key: str) -> list[torch.Tensor | None]:
    """Return the values of such a key, one per parameter, None for a parameter that has none of its shape."""
    own = ((param, state.get(param, {}).get(key)) for param in bucket.params)
    return [value if _shaped(param, value) else None for param, value in own]


def _shaped(param: torch.Tensor, value: Any) -> bool:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floats and bool(value.shape) and value.shape == param.shape


def _in_rest(param: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if value.is_floating_point():
        return not _shaped(param, value)
    return _whole_number(value)


def _whole_number(value: torch.Tensor) -> bool:
    kept = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return not value.shape and not kept


def unaveraged(value: Any) -> str:
    """Return why a tensor of an optimizer's state stays each rank's own in `local`, empty if it is averaged.

    Other values are numbers, which are averaged, or settings: `bool`, `str` and None.
    """
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or _whole_number(value):
        return ""
    shape = list(value.shape)
    return f"is a {value.dtype} tensor of shape {shape}; expected floating-point tensors or single numbers"


def _rest(buckets: Sequence[Bucket], state: State) -> Iterator[tuple[MutableMapping[str, Any], str, int]]:
    """Yield state and key of each value of the rest, and its size; size 0 is one number for a parameter without it."""
    for bucket in buckets:
        own = [(param, state.get(param, {})) for param in bucket.params]
        keys = sorted({key for param, values in own for key, value in values.items() if _in_rest(param, value)})
        for key in keys:
            for param, values in own:
                value = values.get(key)
                size = value.numel() if isinstance(value, torch.Tensor) else 1
                yield values, key, size if _in_rest(param, value) else 0


def gather_rest(buckets: Sequence[Bucket], state: State) -> torch.Tensor:
    """Return this rank's values, followed by 1, on the first bucket's device. The host does not wait for a device."""
    places, at = list(_rest(buckets, state)), 0
    device = buckets[0].flat.device if buckets else torch.device("cpu")
    rest = torch.zeros(1 + sum(max(size, 1) for _, _, size in places), dtype=torch.float64, device=device)
    for values, key, size in places:
        part = rest[at : at + max(size, 1)]
        value: Any = values.get(key)
        if isinstance(value, torch.Tensor) and size and not (size == 1 and value.device.type == "cpu"):
            part.copy_(value.detach().reshape(-1), non_blocking=True)
        elif size:
            part.fill_(float(value))  # Copied from unpinned memory, it would be waited for.
        at += max(size, 1)
    rest[at:].fill_(1.0)
    return rest


def mean_of_rest(total: torch.Tensor) -> torch.Tensor:
    """Return the mean, followed by a 1, of summed vectors that ranks had multiplied by their weights."""
    mean: torch.Tensor = total / total[-1:].clamp_min(torch.finfo(total.dtype).tiny)
    return mean


@torch.no_grad()
def put_rest(buckets: Sequence[Bucket], state: State, mean: torch.Tensor, before: torch.Tensor | None = None) -> None:
    """Write the mean into the state.

    Args:
        buckets: All buckets, or those of a copy.
        state: The state of their parameters.
        mean: From `mean_of_rest`, in host memory.
        before: This rank's vector, in host memory, to add `mean - before` instead.
    """
    at = 0
    for values, key, size in _rest(buckets, state):
        end = at + max(size, 1)
        if size:
            values[key] = _moved(values[key], mean[at:end], None if before is None else before[at:end])
        at = end


def _moved(value: Any, mean: torch.Tensor, before: torch.Tensor | None) -> Any:
    """Write to a tensor, in place, or return another number; what was whole stays whole."""
    tensor = isinstance(value, torch.Tensor)
    own = value if tensor else torch.tensor(value, dtype=torch.float64, device="cpu")
    target = _beside(own, mean)
    if before is not None:
        now = own.to(torch.float64, copy=True)
        move_to_mean(now, _beside(own, before), target)
        target = now
    if tensor:
        value.copy_(target if value.is_floating_point() else target.round())
        return value
    return round(float(target)) if isinstance(value, int) else float(target)


def _beside(value: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in host memory in the shape of `value`, on its device."""
    if numbers.numel() == 1:
        return torch.full(value.shape, float(numbers), dtype=torch.float64, device=value.device)
    return numbers.reshape(value.shape).to(value.device, non_blocking=True)


def move_to_mean(value: torch.Tensor, before: torch.Tensor, mean: torch.Tensor) -> None:
    """Add `mean - before` to `value`, keeping non-negative values such as second moments from falling below zero.

    Second moments decay, so the difference of two older values can exceed the present value. The result stays at least
    as large as the smaller of the present value and the mean.
    """
    moved = value + (mean - before)
    never_negative = (before.amin() >= 0) & (mean.amin() >= 0) & (value.amin() >= 0)
    value.copy_(torch.where(never_negative, torch.maximum(moved, torch.minimum(value, mean.to(moved.dtype))), moved))
