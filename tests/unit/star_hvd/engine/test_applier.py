"""Steps on one bucket after the other are, bit for bit, one step on all parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from star_hvd.engine.applier import Applier, Shadow, replayable, steps_by_bucket
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from tests.support.allocations import largest_allocation_bytes

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {}),
]


def _params(dims: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    shapes = [(4, 5), (7, 3), (2, 3), (11, 1), (3, 3)] if dims == 2 else [(4, 5), (7,), (2, 3, 3), (1,), (11,)]
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def _optimizer(base: Any, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    params = _params(2 if base is torch.optim.Muon else 1)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]
    return params, base(groups, **options)


def _gradient(params: list[torch.nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn_like(param)


@pytest.mark.parametrize(("base", "options"), CASES)
def test_parts_make_the_whole(base: Any, options: dict[str, Any]) -> None:
    assert steps_by_bucket(base)
    whole, one = _optimizer(base, options)
    parts, other = _optimizer(base, options)
    buckets = pack(parts, 1)
    applier = Applier(other, base, buckets, HyperRow(other.param_groups))
    orders = [list(buckets), list(reversed(buckets)), [*buckets[2:], *buckets[:2]]]
    for step in range(6):
        _gradient(whole, step)
        one.step()
        _gradient(parts, step)
        kept = applier.hyperparameters()
        with torch.no_grad():
            for groups in (one.param_groups, other.param_groups):
                for group in groups:
                    group["lr"] *= 0.5  # As a scheduler after `step()`: what is kept is of the step itself.
        for bucket in orders[step % 3]:
            applier.step_params(bucket.params, kept, None)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, whole, strict=True)), step
    assert [len(group["params"]) for group in other.param_groups] == [2, 3]
    for mine, theirs in zip(parts, whole, strict=True):
        assert other.state[mine].keys() == one.state[theirs].keys()
        for key, value in other.state[mine].items():
            same = torch.equal(value, one.state[theirs][key]) if isinstance(value, torch.Tensor) else True
            assert same, key


def test_the_leaders_hyperparameters_go_first() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    applier = Applier(optimizer, torch.optim.SGD, pack(params, 1), HyperRow(optimizer.param_groups))
    kept = applier.hyperparameters()
    optimizer.param_groups[0]["lr"] = 0.5
    row = applier.hyper.read(optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 0.7
    params[0].grad = torch.ones(2)
    applier.step_params(applier.buckets[0].params, kept, row)
    assert params[0].tolist() == [0.5, 0.5] and optimizer.param_groups[0]["lr"] == 0.7


def test_what_is_not_known_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    assert not steps_by_bucket(Own) and not steps_by_bucket(torch.optim.LBFGS)


@pytest.mark.parametrize(("base", "options"), [case for case in CASES if replayable(case[0])])
def test_replays_leave_parameters_alone_that_no_bucket_holds(base: Any, options: dict[str, Any]) -> None:
    """They were frozen when the optimizer was wrapped, and have a gradient of this rank's own now."""
    params, optimizer = _optimizer(base, options)
    twins, alone = _optimizer(base, options)
    loose, held = params[:3], params[3:]  # All of the first group, and some of the second.
    alone.param_groups[1]["params"] = twins[3:]
    applier = Applier(optimizer, base, pack(held, 1), HyperRow(optimizer.param_groups))
    row = applier.hyper.read(optimizer.param_groups)
    before = [param.detach().clone() for param in loose]
    shadow = Shadow(applier, 0)
    for step in range(3):
        _gradient(params, step)
        means = []
        for bucket in applier.buckets:
            mean = bucket.new_flat()
            for param, view in zip(bucket.params, bucket.split(mean), strict=True):
                view.copy_(param.grad)  # type: ignore[arg-type]
            means.append(mean)
        for twin, param in zip(twins[3:], held, strict=True):
            twin.grad = param.grad.clone()  # type: ignore[union-attr]
        alone.step()
        shadow.apply(means, row)
        applier.step_with(means, row)  # A rank that catches up applies the same steps to its own parameters.
    assert all(torch.equal(param, was) for param, was in zip(loose, before, strict=True))
    assert all(torch.equal(param, twin) for param, twin in zip(held, twins[3:], strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    shadow.take_over()
    assert all(torch.equal(param, twin) for param, twin in zip(held, twins[3:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_checksum_of_parameters_that_begin_anywhere_in_a_buffer(dtype: torch.dtype) -> None:
    flat = torch.arange(8).to(dtype)
    views = [torch.nn.Parameter(flat[:3]), torch.nn.Parameter(flat[3:])]
    copies = [torch.nn.Parameter(view.detach().clone()) for view in views]
    sums = []
    for params in (views, copies):
        optimizer = torch.optim.SGD(params, lr=0.1)
        applier = Applier(optimizer, torch.optim.SGD, pack(params, 1 << 20), HyperRow(optimizer.param_groups))
        sums.append(applier.checksum())
    assert sums[0] == sums[1] != 0


class Doubled(torch.optim.SGD):
    """A step that looks like torch's wrapper around one."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


@pytest.mark.parametrize("base", [torch.optim.SGD, Doubled])
def test_replays_call_no_hooks_of_all_optimizers(base: Any) -> None:
    """Helpers replay others' steps, and what hooks do belongs to this rank's own ones."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # From the first one on torch has wrapped the step.
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = base([param], lr=1.0)
    applier = Applier(optimizer, base, pack([param], 99), HyperRow(optimizer.param_groups))
    called: list[str] = []
    of_all = [
        register_optimizer_step_pre_hook(lambda each, *_: called.append(type(each).__name__)),
        register_optimizer_step_post_hook(lambda each, *_: called.append(type(each).__name__)),
    ]
    try:
        applier.step_with([torch.ones_like(applier.buckets[0].flat)], None)
    finally:
        for each in of_all:
            each.remove()
    assert torch.equal(param.detach(), torch.zeros(3) if base is torch.optim.SGD else -torch.ones(3))
    assert not called or base is Doubled, "a step that calls another class's step runs them there"
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checksum_copies_no_whole_parameter(dtype: torch.dtype) -> None:
    flat = torch.randn(12_000_003).to(dtype)
    param = torch.nn.Parameter(flat[1:])
    optimizer = torch.optim.SGD([param], lr=0.1)
    applier = Applier(optimizer, torch.optim.SGD, pack([param], 1 << 20), HyperRow(optimizer.param_groups))
    size_bytes = param.numel() * param.element_size()
    raw = param.detach().clone().view(torch.uint8)
    whole = size_bytes - size_bytes % 4
    expected = int(raw[:whole].view(torch.int32).sum(dtype=torch.int64)) + int(raw[whole:].sum())
    assert applier.checksum() == expected % (1 << 24)
    with torch.no_grad():
        param[-1] += 1.0
    assert applier.checksum() != expected % (1 << 24)
    assert largest_allocation_bytes(applier.checksum) <= 1 << 25 < 2 * size_bytes
