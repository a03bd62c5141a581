"""Cases that train the same model once under `horovod.torch` and once under `star_hvd`, inside one job.

Starting a job takes longer than all of its cases, so one job per world size runs every case and pytest reads the
outcomes. Data depend on rank and step only: every rank can compute what any other rank, or a single process with all
the data, would have.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import star_hvd
from tests.support.plain import horovod

__all__ = [
    "CASES",
    "FORCE_S",
    "Api",
    "Context",
    "Plain",
    "all_equal",
    "assert_same",
    "batch",
    "case",
    "differentiate",
    "logged",
    "make_steps",
    "mean_gradients",
    "mlp",
    "params_of",
    "raises",
    "reference",
    "train",
    "until_relaxed",
    "values_of",
    "warned",
    "wrapped",
]

FORCE_S = 120.0
"""Reached only if what a case waits for, a mode in force for example, never comes about."""
Values = dict[str, torch.Tensor]
OptimizerOf = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Api:
    """One of the two libraries, and how its `DistributedOptimizer` is called."""

    module: Any
    options: dict[str, Any]

    def wrap(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return self.module.DistributedOptimizer(optimizer, *args, **{**self.options, **kwargs})


@dataclass(frozen=True)
class Context:
    """What a case is given. `subset` is a process set with half of the ranks, made by `init`."""

    rank: int
    size: int
    horovod: Api
    star: Api
    subset: Any

    def compare(self, run: Callable[[Api], Any], *, tolerance: float = 1e-6) -> None:
        """Run the same under both and compare: bit for bit on two ranks, where no sum has an order."""
        assert_same(run(self.star), run(self.horovod), exact=self.size <= 2, tolerance=tolerance)

    def relaxed(self) -> Api:
        """star_hvd, asked for a mode in which one rank may be late."""
        return Api(star_hvd, {"mode": f"partial({max(1, self.size - 1)})"})


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[[Context], None]
    ranks: tuple[int, ...]
    modes: tuple[str, ...]
    last: bool


CASES: dict[str, Case] = {}


def case(
    *, ranks: tuple[int, ...] = (2, 4), modes: tuple[str, ...] = ("sync", "partial"), last: bool = False
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Register a case.

    Args:
        ranks: World sizes to run it in.
        modes: Modes of star_hvd to run it in; `partial` stands for `partial(n)`, which waits for everybody.
        last: Run it after the others, because it leaves ranks at different steps of its optimizer.
    """

    def register(function: Callable[[Context], None]) -> Callable[[Context], None]:
        name = getattr(function, "__name__", "")
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(name, function, ranks, modes, last)
        return function

    return register


# ---- models and data ------------------------------------------------------------------------------------------


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two layers, equal on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def batch(
    rank: int, step: int, samples: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs.to(dtype), torch.randn(samples, 3, generator=generator).to(dtype)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, dtype=next(model.parameters()).dtype)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def differentiate(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """Forward and backward on a rank's data, this rank's where left out."""
    loss = loss_of(model, int(horovod.rank()) if rank is None else rank, step)
    loss.backward()
    return loss


def make_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, last: int, *, first: int = 0) -> None:
    """Steps `first` to `last`, `last` left out."""
    for step in range(first, last):
        optimizer.zero_grad()
        differentiate(model, step)
        optimizer.step()


def train(
    api: Api, optimizer_of: OptimizerOf, *, steps: int = 5, passes: int = 1, named: bool = True, **options: Any
) -> Values:
    """Train the small model and return everything that a difference would show in."""
    model = mlp()
    if named:
        options["named_parameters"] = model.named_parameters()
    optimizer = api.wrap(optimizer_of(model.parameters()), backward_passes_per_step=passes, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            differentiate(model, step * passes + i)
        optimizer.step()
    return values_of(model, optimizer)


def values_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Values:
    """Copies of parameters, gradients and optimizer state."""
    values: Values = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        values[name] = param.detach().clone()
        if param.grad is not None:
            values[f"{name}.grad"] = param.grad.detach().to_dense().clone()
        for key, value in (optimizer.state.get(param, {}) if optimizer is not None else {}).items():
            if isinstance(value, torch.Tensor):
                values[f"{index}.{key}"] = value.detach().clone()
    return values


def mean_gradients(model: torch.nn.Module, step: int, ranks: int, passes: int = 1) -> list[torch.Tensor]:
    """The mean over the ranks of the sum over the passes, computed here alone."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(ranks):
        model.zero_grad()
        for i in range(passes):
            differentiate(model, step * passes + i, rank)
        for sum_, param in zip(total, model.parameters(), strict=True):
            assert param.grad is not None
            sum_.add_(param.grad)
    model.zero_grad()
    return [sum_ / ranks for sum_ in total]


def reference(optimizer_of: OptimizerOf, *, ranks: int, steps: int = 5, passes: int = 1) -> Values:
    """What one process with all the data comes to."""
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        apply_reference(model, optimizer, step, ranks, passes)
    return values_of(model, optimizer)


def apply_reference(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: int, passes: int = 1
) -> None:
    """One step of `reference`."""
    means = mean_gradients(model, step, ranks, passes)
    for param, mean in zip(model.parameters(), means, strict=True):
        param.grad = mean
    optimizer.step()


def until_relaxed(optimizer: Any, step: Callable[[], None]) -> None:
    """Make steps until all ranks are in another mode than `sync`, however many: rank 0 may be held up. Collective."""
    limit_s = time.monotonic() + FORCE_S
    while True:
        found = star_hvd.allgather_object((optimizer.mode != "sync", time.monotonic() > limit_s), name="contract.mode")
        if all(relaxed for relaxed, _ in found):
            return
        # On all ranks alike: the others would wait in the next step for one that fails here.
        assert not any(late for _, late in found), "the mode never came into force"
        step()


# ---- checks ---------------------------------------------------------------------------------------------------


def assert_same(got: Values, expected: Values, *, exact: bool, tolerance: float = 1e-6) -> None:
    """Equal keys and values: bit for bit, or to 1e-6 of the largest element."""
    assert got.keys() == expected.keys(), f"different entries: {sorted(got.keys() ^ expected.keys())}"
    for name, value in expected.items():
        other = got[name]
        assert other.dtype == value.dtype and other.shape == value.shape, f"{name}: {other.dtype} {other.shape}"
        if exact:
            assert torch.equal(other, value), f"{name} differs by {float((other - value).abs().max()):.3g}"
        else:
            scale = max(1.0, float(value.abs().max()))
            difference = float((other - value).abs().max()) / scale
            assert difference <= tolerance, f"{name} differs by {difference:.3g}"


def all_equal(values: Values) -> bool:
    """Whether all ranks have the same bits. Collective."""
    flat = torch.cat([value.detach().double().reshape(-1) for value in values.values()])
    gathered = horovod.allgather(flat.unsqueeze(0), name="contract.all_equal")
    return bool((gathered == gathered[0]).all())


@contextlib.contextmanager
def raises(kind: type[BaseException], text: str) -> Iterator[None]:
    """The block raises `kind` with `text` somewhere in its message."""
    try:
        yield
    except kind as error:
        assert text in str(error), f"expected {text!r} in the message {str(error)!r}"
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}; nothing was raised")


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Collects the warnings of the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        # What star_hvd itself filters, it filters for every program.
        warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)
        yield texts
    texts.extend(f"{item.category.__name__}: {item.message}" for item in found)


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """Collects what star_hvd logs in the block."""
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    logger = logging.getLogger("star_hvd")
    logger.addHandler(handler)
    try:
        yield sink
    finally:
        logger.removeHandler(handler)


class Plain:
    """The user's own optimizers, by the name of the case that uses them."""

    @staticmethod
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)

    @staticmethod
    def simple(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


def wrapped(api: Api, make: Any = Plain.sgd, **options: Any) -> tuple[torch.nn.Module, Any]:
    """The small model and its optimizer, wrapped by a library."""
    model = mlp()
    return model, api.wrap(make(model.parameters()), model.named_parameters(), **options)


def params_of(model: torch.nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
