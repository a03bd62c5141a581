"""What programs do beside their steps, where a relaxed mode was asked for: how they evaluate, what they write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd
from tests.contract.harness import (
    Api,
    Context,
    Plain,
    Values,
    all_equal,
    assert_same,
    batch,
    case,
    differentiate,
    params_of,
    wrapped,
)
from tests.support.plain import horovod
from tests.support.signals import PATIENCE_S

STEPS = 8


def _steps(model: torch.nn.Module, optimizer: Any, count: int, *, slow: bool = False) -> None:
    for step in range(count):
        optimizer.zero_grad()
        if slow and int(horovod.rank()) == 0:
            time.sleep(0.03)
        differentiate(model, step)
        optimizer.step()


def _in_relaxed_mode(ctx: Context) -> tuple[torch.nn.Module, Any]:
    """A model in training, in a mode in which a rank may be late."""
    model, optimizer = wrapped(ctx.relaxed(), lambda params: torch.optim.Adam(params, lr=0.01))
    limit_s = time.monotonic() + PATIENCE_S
    while optimizer.mode == "sync":
        assert time.monotonic() < limit_s, "the mode never came into force"
        _steps(model, optimizer, 1)
    return model, optimizer


def _trained(api: Api, change: Callable[[torch.nn.Module, Any, int], None]) -> tuple[Values, Any]:
    model, optimizer = wrapped(api, Plain.simple)
    for step in range(STEPS):
        optimizer.zero_grad()
        change(model, optimizer, step)
    return params_of(model), optimizer


def _clamp_memory(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    differentiate(model, step)
    optimizer.step()
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def _perturb(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """Sharpness-aware minimization: the gradient at another place, whose way back leaves the same values."""
    differentiate(model, step)
    optimizer.synchronize()
    before = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(param.grad, alpha=0.1)
    optimizer.zero_grad()
    differentiate(model, step)
    optimizer.synchronize()
    with torch.no_grad():
        for param, value in zip(model.parameters(), before, strict=True):
            param.copy_(value)
    with optimizer.skip_synchronize():
        optimizer.step()


def _update_by_hand(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    differentiate(model, step)
    optimizer.synchronize()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.1)


@case(ranks=(2,), modes=("sync",))
def a_program_that_writes_to_its_parameters_stays_in_sync(ctx: Context) -> None:
    """A late rank could not repeat what the others write, and replicas would differ."""
    for change in (_clamp_memory, _perturb, _update_by_hand):
        got, optimizer = _trained(ctx.relaxed(), change)
        assert optimizer.mode == "sync", f"{change.__name__}: {optimizer.mode}"
        optimizer.close()
        assert_same(got, _trained(ctx.horovod, change)[0], exact=True)


@case(ranks=(2,), modes=("sync",))
def a_state_loaded_once_allows_relaxed_modes(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star, Plain.simple)
    _steps(model, optimizer, STEPS)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    _steps(model, optimizer, 2)
    from tests.support.inside import driver_of

    assert driver_of(optimizer).engine.agreement.pinned is None


@case(ranks=(2,), modes=("sync",))
def a_collective_within_backward_stays_in_sync(ctx: Context) -> None:
    """Contrastive losses compare with the outputs of all ranks; the mean of a loss that is only looked at is no such
    thing."""

    def contrast(model: torch.nn.Module, optimizer: Any, step: int) -> None:
        module = horovod if optimizer in made else star_hvd
        outputs = model(batch(ctx.rank, step)[0])
        everybodys = module.allgather(outputs, name=f"outputs.{step}")
        (outputs @ everybodys.t()).square().mean().backward()
        optimizer.step()

    made: list[Any] = []

    def plain(model: torch.nn.Module, optimizer: Any, step: int) -> None:
        made.append(optimizer)
        contrast(model, optimizer, step)

    expected = _trained(ctx.horovod, plain)[0]
    if ctx.rank == 0:  # Horovod's own names of unnamed operations count those of the process, which differ from here.
        horovod.allreduce(torch.ones(1), name="of a part", process_set=ctx.subset)
    got, optimizer = _trained(ctx.relaxed(), contrast)
    assert optimizer.mode == "sync", optimizer.mode
    optimizer.close()
    assert_same(got, expected, exact=True)


@case(ranks=(2,), modes=("sync",), last=True)
def a_loss_that_is_averaged_for_the_log_allows_relaxed_modes(ctx: Context) -> None:
    model, optimizer = _in_relaxed_mode(ctx)
    loss = differentiate(model, 0)
    optimizer.step()
    star_hvd.allreduce(loss, name="c.loss")
    _steps(model, optimizer, 4)
    assert optimizer.mode != "sync"
    optimizer.close()


@case(ranks=(2,), modes=("sync",), last=True)
def evaluation_in_inference_mode(ctx: Context) -> None:
    """Ranks catch up where the program evaluates; what they make there has to be usable in training."""
    model, optimizer = _in_relaxed_mode(ctx)
    for _ in range(4):
        _steps(model, optimizer, 3, slow=True)
        with torch.inference_mode():
            star_hvd.allreduce(model(batch(ctx.rank, 0)[0]).sum(), name="c.evaluated")
            evaluated = params_of(model)
        assert all_equal({name: value.clone() for name, value in evaluated.items()})
    late = float(star_hvd.allreduce(torch.tensor(float(optimizer.stats()["late"])), name="c.late"))
    optimizer.close()
    assert late > 0, "no rank was ever late"


@case(ranks=(2,), modes=("sync",), last=True)
def training_in_another_thread(ctx: Context) -> None:
    """The optimizer is made here, and another thread trains; replicas are equal behind collectives of both."""
    model, optimizer = _in_relaxed_mode(ctx)
    seen: list[Values] = []

    def train() -> None:
        _steps(model, optimizer, 12, slow=True)
        star_hvd.barrier()
        seen.append(params_of(model))
        _steps(model, optimizer, 5, slow=True)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    star_hvd.barrier()
    assert all_equal(seen[0]) and all_equal(params_of(model))
    optimizer.close()


def _exchanged(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.clamp(-0.01, 0.01)


def _replaced(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-0.01, 0.01)


@case(ranks=(2,), last=True)
def a_model_that_goes_elsewhere_and_back_between_steps(ctx: Context) -> None:
    """As `torch.save(model.cpu().state_dict(), path); model.cuda()` on one rank: gradients get other memory."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api, Plain.simple)
        for step in range(6):
            model.zero_grad(set_to_none=step % 2 == 0)  # Horovod's optimizer takes no argument.
            differentiate(model, step)
            optimizer.step()
            if ctx.rank == 0:
                model.double()
                model.float()
        return params_of(model)

    ctx.compare(run)


@case(ranks=(2,), last=True)
def gradients_that_the_program_replaces(ctx: Context) -> None:
    """Before `step()` the mean takes their place, as in Horovod; behind `synchronize()` they are what is applied."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api, Plain.simple)
        for step in range(4):
            model.zero_grad(set_to_none=step % 2 == 0)  # Horovod's optimizer takes no argument.
            differentiate(model, step)
            for param in model.parameters():
                _replaced(param)
            optimizer.step()
        for step, change in enumerate((_exchanged, _replaced)):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.synchronize()
            for param in model.parameters():
                change(param)
            with optimizer.skip_synchronize():
                optimizer.step()
        return params_of(model)

    ctx.compare(run)


@case(ranks=(1, 2), modes=("sync",), last=True)
def gradients_are_clipped_wherever_the_optimizer_steps(ctx: Context) -> None:
    """On a single rank, for `groups`, and in a closure."""
    for options in ({}, {"groups": 2} if ctx.size > 1 else {}):
        model, optimizer = wrapped(ctx.star, Plain.simple, max_grad_norm=0.05, **options)
        differentiate(model, 0)
        optimizer.step()
        norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
        assert norm <= 0.0501, norm
    model, optimizer = wrapped(ctx.star, lambda params: torch.optim.LBFGS(params, max_iter=1), max_grad_norm=0.05)

    def closure() -> Any:
        optimizer.zero_grad()
        return differentiate(model, 0)

    optimizer.step(closure)
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert norm <= 0.0501, norm


@case(ranks=(2,), modes=("sync",), last=True)
def unnamed_collectives_of_a_part_leave_the_names_of_all_alone(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star, Plain.simple)
    _steps(model, optimizer, 2)
    if ctx.subset.included():
        assert star_hvd.broadcast_object(7, 0, process_set=ctx.subset) == 7
        star_hvd.allreduce(torch.ones(1), process_set=ctx.subset)
    assert star_hvd.broadcast_object(ctx.rank, 0) == 0
    assert float(star_hvd.allreduce(torch.ones(1), op=star_hvd.Sum)) == 2.0
    _steps(model, optimizer, 2)
