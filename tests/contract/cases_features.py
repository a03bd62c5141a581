"""Features of torch around the step: autocast, bfloat16, memory formats, compiled models, fused optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd
from tests.contract.harness import (
    FORCE_S,
    Api,
    Context,
    Plain,
    all_equal,
    assert_same,
    batch,
    case,
    mlp,
    params_of,
    until_relaxed,
    values_of,
    wrapped,
)

STEPS, SLOW_STEPS = 4, 12
Values = dict[str, torch.Tensor]


# ---- autocast -------------------------------------------------------------------------------------------------


def _autocast_loss(model: torch.nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(inputs)
    return torch.nn.functional.mse_loss(outputs.float(), targets)


@case()
def autocast_bfloat16(ctx: Context) -> None:
    def run(api: Api) -> Values:
        model, optimizer = wrapped(api)
        for step in range(STEPS):
            optimizer.zero_grad()
            _autocast_loss(model, ctx.rank, step, torch.bfloat16).backward()
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


def _scaled_float16(ctx: Context, api: Api, recipe: str) -> tuple[Values, float, Any]:
    model, optimizer = wrapped(api)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(_autocast_loss(model, ctx.rank, step, torch.float16)).backward()
        if recipe == "documented":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    return params_of(model), float(scaler.get_scale()), optimizer


@case()
def autocast_float16_with_a_scaler(ctx: Context) -> None:
    """By the documented recipe, and without one: the same numbers as plain Horovod's by the recipe."""
    expected, scale, _ = _scaled_float16(ctx, ctx.horovod, "documented")
    for recipe in ("documented", "naive"):
        found, own_scale, _ = _scaled_float16(ctx, ctx.star, recipe)
        assert own_scale == scale == 1024.0, (recipe, own_scale, scale)
        assert_same(found, expected, exact=ctx.size == 2)


@case(modes=("sync",))
def a_scaler_keeps_a_relaxed_mode_away(ctx: Context) -> None:
    """Whether to skip is decided after the reduction, on all ranks alike: modes do not apply, and say so."""
    found, _, optimizer = _scaled_float16(ctx, ctx.relaxed(), "naive")
    expected, _, _ = _scaled_float16(ctx, ctx.horovod, "documented")
    assert optimizer.mode == "sync"
    assert_same(found, expected, exact=ctx.size == 2)


# ---- parameters in bfloat16 -----------------------------------------------------------------------------------


@case()
def bfloat16_parameters_against_one_process(ctx: Context) -> None:
    """Horovod refuses them; here their gradients travel as float32, and are averaged before they are rounded."""
    model = mlp(dtype=torch.bfloat16)
    optimizer = ctx.star.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    alone = mlp(dtype=torch.bfloat16)
    for step in range(2):
        optimizer.zero_grad()
        _mse(model, ctx.rank, step).backward()
        own = []
        for rank in range(ctx.size):
            alone.zero_grad()
            _mse(alone, rank, step).backward()
            own.append([_grad(param).float() for param in alone.parameters()])
        optimizer.step()
        with torch.no_grad():
            for param, *grads in zip(alone.parameters(), *own, strict=True):
                param.sub_(0.5 * torch.stack(grads).mean(0).to(torch.bfloat16))
    # Two roundings to eight bits may fall on different sides.
    assert_same(params_of(model), params_of(alone), exact=False, tolerance=2**-7)
    assert all_equal(params_of(model))


def _mse(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, dtype=next(model.parameters()).dtype)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


# ---- memory formats -------------------------------------------------------------------------------------------


def _convolutions(memory_format: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3), torch.nn.Flatten()
    )
    return model.to(memory_format=memory_format)


def _images(rank: int, step: int, memory_format: torch.memory_format) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=memory_format)


def _train_images(
    ctx: Context, api: Api, memory_format: torch.memory_format, make: Callable[[Any], torch.optim.Optimizer]
) -> Values:
    model = _convolutions(memory_format)
    optimizer = api.wrap(make(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_images(ctx.rank, step, memory_format)).square().mean().backward()
        optimizer.step()
        for param in model.parameters():
            assert _grad(param).stride() == param.stride(), "a gradient has lost its parameter's memory format"
    return {name: value.contiguous() for name, value in values_of(model, optimizer).items()}


def _fused_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, fused=True)


@case()
def channels_last(ctx: Context) -> None:
    """Horovod refuses gradients that are not contiguous, so the same network in the usual format is the reference.

    A fused step pairs elements by their place in memory: with gradients in another format it is wrong in silence.
    """
    for make in (Plain.sgd, _fused_adam):
        found = _train_images(ctx, ctx.star, torch.channels_last, make)
        expected = _train_images(ctx, ctx.horovod, torch.contiguous_format, make)
        # Convolutions of the two formats are different kernels, and Adam divides by small numbers.
        assert_same(found, expected, exact=False, tolerance=1e-4)
        assert all_equal({name: value for name, value in found.items() if not name.endswith("grad")})


# ---- fused and foreach steps ----------------------------------------------------------------------------------


@case()
def fused_and_foreach_steps(ctx: Context) -> None:
    makes: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
        _fused_adam,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    )

    def run(api: Api, make: Callable[[Any], torch.optim.Optimizer]) -> Values:
        model, optimizer = wrapped(api, make)
        for step in range(STEPS):
            optimizer.zero_grad()
            _mse(model, ctx.rank, step).backward()
            optimizer.step()
        return values_of(model, optimizer)

    for make in makes:
        ctx.compare(lambda api, make=make: run(api, make))  # type: ignore[misc]


# ---- compiled models ------------------------------------------------------------------------------------------


@case(ranks=(2,), modes=("sync",))
def compiled_model(ctx: Context) -> None:
    """The compiled backward hands gradients to the same hooks; without a C++ compiler, which one test more uses."""

    def run(api: Api) -> Values:
        model = mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            _mse(compiled, ctx.rank, step).backward()
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


# ---- with a slow rank -----------------------------------------------------------------------------------------


def _slow_rank(ctx: Context, model: torch.nn.Module, make: Any, loss: Callable[[int], torch.Tensor]) -> None:
    """Train in a relaxed mode with the last rank slow, and end with bit-equal replicas that have learned something."""
    optimizer = ctx.relaxed().wrap(make(model.parameters()), model.named_parameters())

    def one(step: int) -> None:
        optimizer.zero_grad()
        value = loss(step)
        if ctx.rank == ctx.size - 1:
            time.sleep(0.03)
        value.backward()
        optimizer.step()

    until_relaxed(optimizer, lambda: one(0))
    for step in range(SLOW_STEPS):
        one(step)
    optimizer.close()
    assert all(torch.isfinite(value).all() for value in params_of(model).values())
    assert all_equal({name: value.contiguous() for name, value in params_of(model).items()}), "replicas differ"


@case(modes=("sync",), last=True)
def gradients_that_a_slow_rank_has_cleared_stay_cleared(ctx: Context) -> None:
    """The loop clears behind `step()`; a metric that is averaged, or a checkpoint, then applies what others have done.

    The mean of their steps must not be what the next backward pass adds to.
    """
    model = mlp()
    optimizer = ctx.relaxed().wrap(Plain.sgd(model.parameters()), model.named_parameters())
    behind, filled = 0, set[str]()

    def one(step: int) -> None:
        nonlocal behind
        if ctx.rank == ctx.size - 1:
            time.sleep(0.03)
        _mse(model, ctx.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        before = params_of(model)
        if step % 4 < 2:
            star_hvd.allreduce(torch.ones(1), name="contract.metric")
        else:
            time.sleep(0.05)  # The others go on meanwhile.
            optimizer.state_dict()
        behind += any(not torch.equal(before[name], value) for name, value in params_of(model).items())
        filled.update(name for name, param in model.named_parameters() if param.grad is not None and param.grad.any())

    until_relaxed(optimizer, lambda: one(0))
    limit_s, was_behind = time.monotonic() + FORCE_S, False
    # Where all ranks share a busy core, the others are hardly faster; rank 0's clock decides for all of them.
    while not was_behind and star_hvd.broadcast_object(time.monotonic() < limit_s, 0, name="contract.go_on"):
        for step in range(3 * SLOW_STEPS):
            one(step)
        was_behind = any(star_hvd.allgather_object(behind > 0, name="contract.behind"))
    optimizer.close()
    equal = all_equal(params_of(model))  # Before anything that fails on a part of the ranks.
    assert not filled, f"{sorted(filled)} have gradients of other ranks' steps"
    assert was_behind, "the slow rank was never behind"
    assert equal, "replicas differ"


@case(modes=("sync",), last=True)
def autocast_with_a_slow_rank(ctx: Context) -> None:
    model = mlp()
    _slow_rank(ctx, model, Plain.sgd, lambda step: _autocast_loss(model, ctx.rank, step, torch.bfloat16))


@case(modes=("sync",), last=True)
def channels_last_and_fused_with_a_slow_rank(ctx: Context) -> None:
    model = _convolutions(torch.channels_last)
    images = [_images(ctx.rank, step, torch.channels_last) for step in range(SLOW_STEPS)]
    _slow_rank(ctx, model, _fused_adam, lambda step: model(images[step]).square().mean())


@case(modes=("sync",), last=True)
def bfloat16_parameters_with_a_slow_rank(ctx: Context) -> None:
    model = mlp(dtype=torch.bfloat16)
    _slow_rank(ctx, model, Plain.simple, lambda step: _mse(model, ctx.rank, step))
