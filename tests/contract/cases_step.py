"""What happens around `step`: closures, hooks, schedulers, a step given up."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.contract.harness import (
    Api,
    Context,
    Plain,
    all_equal,
    assert_same,
    case,
    differentiate,
    loss_of,
    make_steps,
    mean_gradients,
    mlp,
    reference,
    values_of,
    warned,
    wrapped,
)
from tests.support.plain import horovod

# ---- closures -------------------------------------------------------------------------------------------------


def _step_with_closure(model: torch.nn.Module, optimizer: Any, step: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return differentiate(model, step)

    return optimizer.step(closure)


@case()
def closure_is_evaluated_before_the_reduction(ctx: Context) -> None:
    for options in ({}, {"groups": 2}):
        model, optimizer = wrapped(ctx.star, **options)
        for step in range(5):
            loss = _step_with_closure(model, optimizer, step)
            assert isinstance(loss, torch.Tensor) and loss.requires_grad
            assert not optimizer._handles
        assert_same(values_of(model, optimizer), reference(Plain.sgd, ranks=ctx.size), exact=ctx.size == 2)


@case(modes=("sync",))
def closure_under_horovod_is_not_reduced(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.horovod)

    def closure() -> torch.Tensor:
        return differentiate(model, 0)

    optimizer.step(closure)
    assert optimizer._handles, "Horovod synchronizes after the closure now"
    optimizer.synchronize()


@case()
def closure_returns_the_loss_and_may_run_without_grad(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star)
    with torch.no_grad():
        loss = _step_with_closure(model, optimizer, 0)
    torch.testing.assert_close(loss, loss_of(mlp(), ctx.rank, 0))


@case()
def lbfgs(ctx: Context) -> None:
    """Several evaluations per step, each reduced; all ranks take the same decisions."""
    for options in ({}, {"line_search_fn": "strong_wolfe"}):

        def make(params: Any, options: dict[str, Any] = options) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(params, lr=0.5, max_iter=6, **options)

        model, optimizer = wrapped(ctx.star, make)
        alone = mlp()
        plain = make(alone.parameters())
        for step in range(2):
            _step_with_closure(model, optimizer, step)
            plain.step(functools.partial(_everybodys_closure, alone, step, ctx.size))
        assert all_equal(values_of(model))
        for param, twin in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-3, atol=1e-4)


def _everybodys_closure(model: torch.nn.Module, step: int, ranks: int) -> torch.Tensor:
    means = mean_gradients(model, step, ranks)
    with torch.no_grad():
        losses = [loss_of(model, rank, step) for rank in range(ranks)]
    for param, mean in zip(model.parameters(), means, strict=True):
        param.grad = mean
    return torch.stack(losses).mean()


# ---- hooks ----------------------------------------------------------------------------------------------------


def _count_hooks(api: Api, **options: Any) -> tuple[int, int]:
    counts = {"pre": 0, "post": 0}
    model = mlp()
    plain = Plain.sgd(model.parameters())

    def count(kind: str) -> Any:
        def hook(*_: Any) -> None:
            counts[kind] += 1

        return hook

    optimizer = api.wrap(plain, model.named_parameters(), **options)
    optimizer.register_step_pre_hook(count("pre"))
    optimizer.register_step_post_hook(count("post"))
    make_steps(model, optimizer, 4)
    return counts["pre"], counts["post"]


@case()
def step_hooks_run_once_per_step(ctx: Context) -> None:
    assert _count_hooks(ctx.star) == (4, 4)
    assert _count_hooks(ctx.star, groups=2) == (4, 4)


@case(modes=("sync",))
def step_hooks_run_twice_under_horovod(ctx: Context) -> None:
    assert _count_hooks(ctx.horovod) == (8, 8), "Horovod runs step hooks once now"


@case()
def hooks_registered_before_wrapping_are_kept(ctx: Context) -> None:
    seen: list[str] = []
    model = mlp()
    plain = Plain.sgd(model.parameters())
    plain.register_step_pre_hook(lambda *_: seen.append("pre"))
    plain.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer = ctx.star.wrap(plain, model.named_parameters())
    differentiate(model, 0)
    optimizer.step()
    assert seen == ["pre", "post"], seen


@case()
def step_hooks_see_reduced_gradients(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star, Plain.simple)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    differentiate(model, 0)
    optimizer.step()
    torch.testing.assert_close(seen[0], mean_gradients(mlp(), 0, ctx.size)[0], rtol=1e-6, atol=1e-7)


# ---- learning-rate schedulers ---------------------------------------------------------------------------------


def _train_with_scheduler(api: Api, *, before: bool) -> tuple[dict[str, torch.Tensor], list[float], list[str]]:
    with warned() as texts:
        model = mlp()
        plain: Any = torch.optim.SGD(model.parameters(), lr=0.2)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5) if before else None
        optimizer = api.wrap(plain, model.named_parameters())
        if scheduler is None:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        rates = []
        for step in range(6):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return values_of(model), rates, texts


@case()
def scheduler_made_after_wrapping(ctx: Context) -> None:
    got, rates, texts = _train_with_scheduler(ctx.star, before=False)
    expected, their_rates, _ = _train_with_scheduler(ctx.horovod, before=False)
    assert rates == their_rates == [0.2, 0.1, 0.1, 0.05, 0.05, 0.025]
    assert not texts, texts
    assert_same(got, expected, exact=ctx.size == 2)


@case()
def scheduler_made_before_wrapping(ctx: Context) -> None:
    got, rates, texts = _train_with_scheduler(ctx.star, before=True)
    assert rates == [0.2, 0.1, 0.1, 0.05, 0.05, 0.025], rates
    assert not texts, texts
    assert_same(got, _train_with_scheduler(ctx.star, before=False)[0], exact=ctx.size == 2)
    assert all_equal({name: v for name, v in got.items() if not name.endswith(".grad")})


@case()
def one_cycle_scheduler_moves_momentum_too(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
        for step in range(6):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.step()
            scheduler.step()
        return values_of(model, optimizer)

    ctx.compare(run)


# ---- zero_grad ------------------------------------------------------------------------------------------------


@case()
def zero_grad_passes_set_to_none_on(ctx: Context) -> None:
    for options in ({}, {"groups": 2}):
        model, optimizer = wrapped(ctx.star, **options)
        for step, flag in enumerate((True, False, True, False, True)):
            differentiate(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=flag)
            for param in model.parameters():
                assert (param.grad is None) if flag else (param.grad is not None and not param.grad.any())
        expected = reference(Plain.sgd, ranks=ctx.size)
        for name, param in model.named_parameters():
            torch.testing.assert_close(param, expected[name], rtol=1e-6, atol=1e-6)


@case(modes=("sync",))
def zero_grad_of_horovod_takes_no_argument(ctx: Context) -> None:
    _, optimizer = wrapped(ctx.horovod)
    try:
        optimizer.zero_grad(set_to_none=True)
    except TypeError:
        return
    raise AssertionError("Horovod takes set_to_none now")


@case()
def gradients_cleared_by_the_model(ctx: Context) -> None:
    """`model.zero_grad()`, or gradients assigned by hand, instead of the optimizer's own `zero_grad`."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(5):
            if step % 2:
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            else:
                model.zero_grad()
            differentiate(model, step)
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


# ---- a step given up ------------------------------------------------------------------------------------------


@case()
def a_synchronized_step_that_is_not_applied(ctx: Context) -> None:
    """`synchronize()`, a look at the gradients, and on to the next batch without `step()`."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(6):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.synchronize()
            if step in (1, 2):
                continue
            with optimizer.skip_synchronize():
                optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def synchronize_twice_by_hand(ctx: Context) -> None:
    """The second time reduces the mean again, which changes nothing."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(4):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.synchronize()
            if step == 1:
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def load_state_dict_in_the_middle_of_a_step(ctx: Context) -> None:
    """What backward has begun is forgotten; the next step counts in full."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        saved = None
        for step in range(6):
            optimizer.zero_grad()
            differentiate(model, step)
            if step == 3:
                assert saved is not None
                horovod.barrier()  # Horovod forgets handles, but their names stay taken until the reductions end.
                _wait_for_handles(optimizer)
                optimizer.load_state_dict(saved)
                assert not optimizer._handles
                continue
            optimizer.step()
            saved = optimizer.state_dict() if step == 1 else saved
        return values_of(model, optimizer)

    ctx.compare(run)


def _wait_for_handles(optimizer: Any) -> None:
    import time

    handles = [value[0] for value in optimizer._handles.values() if value is not None and value[0] is not None]
    while not all(horovod.poll(handle) for handle in handles):
        time.sleep(0.001)


@case()
def load_state_dict_after_synchronize(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(5):
            optimizer.zero_grad()
            differentiate(model, step)
            if step == 2:
                optimizer.synchronize()
                optimizer.load_state_dict(optimizer.state_dict())
                continue
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def passes_changed_in_the_middle_of_a_step(ctx: Context) -> None:
    """Gradients on their way stay in the step."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(4):
            optimizer.zero_grad()
            differentiate(model, step)
            if step == 1:
                optimizer.set_backward_passes_per_step(1)
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)
