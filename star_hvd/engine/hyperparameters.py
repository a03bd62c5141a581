"""Encode hyperparameters as a flat row of numbers, so that every rank can apply a step with the leader's values.

Ranks that make different numbers of steps advance their learning-rate schedulers differently. The step's leader sends
its values in band and all ranks apply the step with them. A rank's own `param_groups` are restored afterwards, so its
scheduler and the user's view stay consistent. Some optimizers also keep state there (`StateInGroups`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["EXECUTION_KEYS", "SCHEDULER_KEYS", "HyperRow", "StateInGroups"]

EXECUTION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Entries for how a step is executed, not for what it computes: every rank, and a server, has its own."""

SCHEDULER_KEYS = frozenset({"initial_lr", "base_momentum", "max_momentum", "min_lr", "max_lr", "swa_lr"})
"""Entries that schedulers of torch add to groups, perhaps on some ranks earlier than on others (from a checkpoint on
rank 0 alone, say). Optimizers do not read them."""

_NOT_SENT = EXECUTION_KEYS | SCHEDULER_KEYS | {"params"}
_WATCHED_STEPS = 2  # The first one may only create the entries.


def _numbers(value: Any) -> int:
    """How many numbers a value needs; 0 for values that are not sent (None, strings, large tensors)."""
    if isinstance(value, (bool, int, float)):
        return 1
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return 1
    if isinstance(value, (tuple, list)) and value and all(_numbers(v) == 1 for v in value):
        return len(value)
    return 0


class HyperRow:
    """The numeric entries of all parameter groups, in a fixed order.

    Args:
        groups: The optimizer's `param_groups`; entries that select an implementation, entries of schedulers, and those
            added later are not sent.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._slots = [
            (index, key, _numbers(value))
            for index, group in enumerate(groups)
            for key, value in sorted(group.items())
            if key not in _NOT_SENT and _numbers(value)
        ]
        self._known = {(index, key) for index, key, _ in self._slots}
        self.size = sum(count for _, _, count in self._slots)

    def takes(self, index: int, key: str, value: Any) -> bool:
        """Whether an entry is in the row, or could not be since it is no number or for the execution alone.

        False for a number that came to the group later, or of a scheduler.
        """
        return (index, key) in self._known or key in EXECUTION_KEYS or not _numbers(value)

    def read(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        """Return the row of this rank's current values, `size` numbers.

        A loaded state may have None, or another count of numbers, where there were numbers, and the program may have
        removed a group: NaN stands for each then.
        """
        row: list[float] = []
        for index, key, count in self._slots:
            value = _entry(groups, index, key)
            parts = value if isinstance(value, (tuple, list)) else (value,)
            row.extend((float(part) for part in parts) if _numbers(value) == count else [math.nan] * count)
        return row

    @contextmanager
    def applied(self, groups: Sequence[dict[str, Any]], row: Sequence[float] | None) -> Iterator[None]:
        """Use `row` inside the block and restore this rank's own values afterwards; None changes nothing.

        A value that is NaN in `row`, or that this rank does not have as numbers, is left as it is. What the block
        changes itself, as an optimizer that counts its steps here does, stays.
        """
        if row is None:
            yield
            return
        before: list[tuple[int, str, Any, Any]] = []
        position = 0
        try:
            for index, key, count in self._slots:
                old, numbers = _entry(groups, index, key), row[position : position + count]
                position += count
                if _numbers(old) != count or any(map(math.isnan, numbers)):
                    continue
                new = _like(old, numbers)
                if isinstance(old, torch.Tensor):
                    before.append((index, key, old.clone(), new))
                    old.copy_(new)
                elif new != old:
                    before.append((index, key, old, new))
                    groups[index][key] = new
            yield
        finally:
            # Groups may share one tensor; the first saved value is its own.
            for index, key, old, new in reversed(before):
                current = groups[index][key]
                if not _unchanged(current, new):
                    continue
                if isinstance(current, torch.Tensor):
                    current.copy_(old)
                else:
                    groups[index][key] = old


class StateInGroups:
    """Finds out whether an optimizer's own step changes numbers in its `param_groups`.

    Optimizers outside torch keep state there: apex's `FusedAdam` its step count, Prodigy its estimate of the distance.
    Ranks that make different numbers of steps would have different values, and steps that are fetched lack them.

    Args:
        base: The optimizer's class; torch's own have nothing of the kind.

    Attributes:
        found: An entry that a step has changed or added, empty as long as there is none.
    """

    def __init__(self, base: type[torch.optim.Optimizer]) -> None:
        self.found = ""
        self._left = 0 if f"{base.__module__}.".startswith("torch.optim.") else _WATCHED_STEPS

    @contextmanager
    def watched(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Compare the numbers before and after the block, a step of the optimizer, if it is one of the first."""
        if not self._left:
            yield
            return
        before = _entries(groups)
        yield
        self._left -= 1
        after = _entries(groups)
        changed = [entry for entry, numbers in after.items() if before.get(entry) != numbers]
        self.found = self.found or (changed[0][1] if changed else "")


def _entry(groups: Sequence[dict[str, Any]], index: int, key: str) -> Any:
    return groups[index].get(key) if index < len(groups) else None


def _unchanged(current: Any, new: Any) -> bool:
    """Whether a value is still the one that was set; NaN, which is no equal of itself, may be."""
    if isinstance(current, torch.Tensor):
        return bool(torch.allclose(current, new, rtol=0.0, atol=0.0, equal_nan=True))
    return current is new or bool(current == new)


def _entries(groups: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[str]]:
    """Return the numbers of all entries, as text, in which NaN equals itself."""
    found = {}
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key != "params" and _numbers(value):
                parts = value if isinstance(value, (tuple, list)) else (value,)
                found[index, key] = [repr(float(part)) for part in parts]
    return found


def _like(old: Any, numbers: Sequence[float]) -> Any:
    """Return `numbers` in the shape and type of `old`; an integer becomes a float if its number is not whole."""
    if isinstance(old, torch.Tensor):
        return torch.as_tensor(numbers[0], dtype=old.dtype, device=old.device).reshape(old.shape)
    if isinstance(old, (tuple, list)):
        return type(old)(_like(part, [number]) for part, number in zip(old, numbers, strict=True))
    if isinstance(old, int) and not float(numbers[0]).is_integer():
        return numbers[0]  # `lr=1`, say, whose schedule has gone on to 0.1 on the leader.
    return type(old)(numbers[0])
