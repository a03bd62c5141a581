"""GradScaler: with the documented recipe, without it, switched off."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

import star_hvd
from tests.contract.harness import (
    Api,
    Context,
    Plain,
    all_equal,
    apply_reference,
    assert_same,
    case,
    loss_of,
    mlp,
    params_of,
    raises,
    train,
    values_of,
    warned,
    wrapped,
)
from tests.support.plain import horovod


def _scale_and_step(api: Api, recipe: str, **options: Any) -> tuple[Any, torch.nn.Module, list[float]]:
    """Five steps; in the third one rank's gradient has an infinity."""
    model, optimizer = wrapped(api, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales: list[float] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, int(horovod.rank()), step)
        if step == 2 and int(horovod.rank()) == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if recipe == "naive":
            scaler.step(optimizer)
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return optimizer, model, scales


def _scaled_reference(ranks: int) -> dict[str, torch.Tensor]:
    model = mlp()
    optimizer = Plain.sgd(model.parameters())
    for step in (0, 1, 3, 4):  # Nobody takes the third.
        apply_reference(model, optimizer, step, ranks)
    return params_of(model)


@case()
def grad_scaler_without_a_recipe(ctx: Context) -> None:
    """All ranks skip the step in which one had an infinity, and their scales stay equal."""
    for options in ({}, {"groups": 2}, {"max_grad_norm": 100.0}):
        with warned() as texts:
            _, model, scales = _scale_and_step(ctx.star, "naive", **options)
        assert not texts, texts
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0], scales
        assert_same(params_of(model), _scaled_reference(ctx.size), exact=ctx.size == 2)
        assert all_equal(params_of(model))


@case(modes=("sync",))
def grad_scaler_without_a_recipe_under_horovod(ctx: Context) -> None:
    """A rank that looks for infinities before the others' gradients have come in finds none, and keeps its scale.

    The reduction in place runs beside that look, so which comes first is a matter of luck; here rank 1 waits.
    """
    model, optimizer = wrapped(ctx.horovod)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = loss_of(model, ctx.rank, 0)
    if ctx.rank == 1:
        loss = loss * float("inf")
        _wait_for_all("contract.looked")
    else:
        optimizer.step = functools.partial(_after_all, optimizer.step)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer._handles.clear()
    scales = horovod.allgather_object(scaler.get_scale(), name="contract.scales")
    assert scales == [1024.0 if rank != 1 else 512.0 for rank in range(ctx.size)], scales


def _after_all(step: Any) -> Any:
    _wait_for_all("contract.looked")
    return step()


def _wait_for_all(name: str) -> None:
    horovod.allreduce(torch.zeros(1), name=name)


@case(ranks=(1, 2), modes=("sync",))
def grad_scaler_that_unscales_before_the_reduction(ctx: Context) -> None:
    """Ranks would clip and look at gradients of their own; one that finds an infinity would skip the step alone."""
    for options in ({}, {"groups": 2}):
        model, optimizer = wrapped(ctx.star, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, ctx.rank, 0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with raises(star_hvd.StarError, "optimizer.synchronize()") if ctx.size > 1 else contextlib.nullcontext():
            scaler.step(optimizer)
        if ctx.size > 1:
            with optimizer.skip_synchronize():
                optimizer.synchronize()


@case()
def grad_scaler_by_the_documented_recipe(ctx: Context) -> None:
    _, model, scales = _scale_and_step(ctx.star, "documented")
    _, theirs, their_scales = _scale_and_step(ctx.horovod, "documented")
    assert scales == their_scales
    assert_same(params_of(model), params_of(theirs), exact=ctx.size == 2)
    assert all_equal(params_of(model))


@case(modes=("sync",))
def grad_scaler_stays_in_sync(ctx: Context) -> None:
    for recipe in ("naive", "documented"):
        optimizer, model, _ = _scale_and_step(ctx.relaxed(), recipe)
        assert optimizer.mode == "sync", optimizer.mode
        assert_same(params_of(model), _scaled_reference(ctx.size), exact=ctx.size == 2)


@case()
def grad_scaler_switched_off(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, ctx.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(values_of(model, optimizer), train(ctx.star, Plain.sgd), exact=ctx.size == 2)
