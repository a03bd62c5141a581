"""Description of the user's optimizer without its parameters, as sent to servers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from star_hvd.engine.hyperparameters import EXECUTION_KEYS, SCHEDULER_KEYS, HyperRow
from star_hvd.ps.common.layout import LayoutError, class_path, load_class

__all__ = ["OptimizerSpec", "RowReader"]


def _plain(value: Any, where: str) -> list[Any]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["v", value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), value.item()]
    if isinstance(value, (tuple, list)):
        return ["s", [_plain(part, where) for part in value], isinstance(value, tuple)]
    raise LayoutError(f"{where} is a {type(value).__name__}; servers accept numbers, strings, None and tuples of these")


def _restore(item: Sequence[Any]) -> Any:
    if item[0] == "v":
        return item[1]
    if item[0] == "t":
        if any(size != 1 for size in item[2]):
            raise ValueError(f"a tensor has shape {item[2]}; expected one element")
        return torch.full(tuple(item[2]), item[3], dtype=getattr(torch, item[1]), device="cpu")
    if item[0] != "s":
        raise ValueError(f"a value has kind {item[0]!r}; expected v, t or s")
    parts = [_restore(part) for part in item[1]]
    return tuple(parts) if item[2] else parts


@dataclass(frozen=True)
class OptimizerSpec:
    """The user's optimizer without its parameters.

    Attributes:
        path: Its class as `module:name`.
        groups: Hyperparameters of every parameter group.
    """

    path: str
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(
        cls, base: type[torch.optim.Optimizer], param_groups: Sequence[Mapping[str, Any]], hyper: HyperRow
    ) -> OptimizerSpec:
        """Describe an optimizer.

        Args:
            base: The user's class.
            param_groups: The current groups.
            hyper: The layout of the rows the workers will send. Entries of schedulers (`initial_lr`) are left out, as
                in the rows, and so are numbers that came to a group later.

        Raises:
            LayoutError: The class or a hyperparameter cannot be sent to another process.
        """
        left_out = {"params", *SCHEDULER_KEYS}
        groups = [
            {k: v for k, v in group.items() if k not in left_out and hyper.takes(index, k, v)}
            for index, group in enumerate(param_groups)
        ]
        if HyperRow(groups).size != hyper.size:
            raise LayoutError(f"the groups hold {HyperRow(groups).size} numbers; expected {hyper.size}, as in the rows")
        spec = cls(class_path(base), tuple(groups))
        spec.to_dict()
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        groups = [
            {key: _plain(value, f"hyperparameter {key!r} of group {i}") for key, value in group.items()}
            for i, group in enumerate(self.groups)
        ]
        return {"path": self.path, "groups": groups}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizerSpec:
        """The inverse of `to_dict`.

        Raises:
            LayoutError: The values do not describe an optimizer.
        """
        try:
            path, groups = values["path"], values["groups"]
            if not isinstance(path, str) or not isinstance(groups, list) or not groups:
                raise ValueError("expected a class path and a list of groups")
            return cls(path, tuple({str(k): _restore(v) for k, v in group.items()} for group in groups))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise LayoutError(f"an optimizer cannot be read: {type(error).__name__}: {str(error)[:200]}") from None

    def on_host(self) -> OptimizerSpec:
        """Return a copy without the execution options of a GPU."""
        host = {"fused": None, "foreach": None, "capturable": False}
        return OptimizerSpec(
            self.path, tuple({k: host.get(k, v) if k in host else v for k, v in group.items()} for group in self.groups)
        )

    def build(self, params: Mapping[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """Construct the optimizer.

        Args:
            params: Parameters by group number; groups without parameters are left out.

        Raises:
            LayoutError: The class's constructor fails.
        """
        base = load_class(self.path)
        groups = [_own(self.groups[number]) | {"params": chosen} for number, chosen in params.items()]
        accepted = inspect.signature(base).parameters
        keywords = {k: v for k, v in _own(self.groups[0]).items() if k in accepted}
        try:
            return base(groups, **keywords)
        except Exception as error:  # The user's code may raise anything.
            raise LayoutError(f"a server cannot construct {self.path}: {type(error).__name__}: {error}") from error

    def check_rebuilt(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the class, constructed as on a server, has the settings that the optimizer has.

        `param_groups` do not tell what a class keeps as attributes of its own, which would become defaults, nor
        arguments that its constructor requires. Values alone are compared; classes of torch have neither.

        Args:
            optimizer: The live optimizer, perhaps wrapped.

        Raises:
            LayoutError: The class's constructor fails, or a setting would be another one.
        """
        base = load_class(self.path)
        if f"{base.__module__}.".startswith("torch.optim."):
            return
        # One element for each group; a class may demand matrices.
        used = [(number, group["params"][0]) for number, group in enumerate(optimizer.param_groups) if group["params"]]
        params = {
            number: [torch.nn.Parameter(torch.zeros((1,) * param.dim(), dtype=param.dtype, device="cpu"))]
            for number, param in used
        }
        if not params:
            return
        trial = self.on_host().build(params)
        ordinary = torch.optim.Optimizer([torch.nn.Parameter(torch.zeros(1, device="cpu"))], {})
        for name, value in vars(trial).items():
            live = vars(optimizer).get(name, value)
            if name in vars(ordinary) or not (_is_plain(value) and _is_plain(live)) or _same(value, live):
                continue
            raise LayoutError(
                f"servers would construct {self.path} with {name} = {value!r}, but here it is {live!r}: a server knows "
                f"the entries of param_groups only. Keep {name} there, by `defaults` of the class, instead of as an "
                "attribute"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for part in value.values())
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)  # NaN is no equal of itself.


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


class RowReader:
    """Converts the rows of hyperparameters that workers send to values per group."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._groups = [dict(group) for group in spec.groups]
        self._hyper = HyperRow(self._groups)
        self._last: tuple[tuple[float, ...], list[dict[str, Any]]] | None = None

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return self._hyper.size

    def values(self, row: Sequence[float]) -> list[dict[str, Any]]:
        """Return the hyperparameters of every group."""
        key = tuple(row)
        if self._last is None or self._last[0] != key:
            with self._hyper.applied(self._groups, key):
                found = [{k: v for k, v in _own(g).items() if k not in EXECUTION_KEYS} for g in self._groups]
            self._last = (key, found)
        return self._last[1]
