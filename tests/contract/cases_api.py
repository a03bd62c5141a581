"""Arguments, errors, warnings, attributes and classes."""

from __future__ import annotations

from typing import Any

import torch

import star_hvd
from tests.contract.harness import (
    Api,
    Context,
    Plain,
    case,
    differentiate,
    logged,
    make_steps,
    mlp,
    raises,
    train,
    until_relaxed,
    values_of,
    warned,
    wrapped,
)
from tests.support.plain import horovod

# ---- errors ---------------------------------------------------------------------------------------------------


def _both(ctx: Context, text: str, *, named: Any = None, **options: Any) -> None:
    for api in (ctx.horovod, ctx.star):
        model = mlp()
        own = named(model) if named is not None else model.named_parameters()
        given = {key: value(api, model) if callable(value) else value for key, value in options.items()}
        with raises(ValueError, text):
            api.wrap(Plain.sgd(model.parameters()), own, **given)


@case()
def bad_names(ctx: Context) -> None:
    _both(ctx, "one or more model parameters were not named", named=lambda m: list(m.named_parameters())[1:])
    _both(ctx, "should be a sequence of tuples (name, parameter)", named=lambda m: list(m.parameters()))
    _both(ctx, "Found duplicates: x", named=lambda m: [("x", p) for p in m.parameters()])


@case()
def bad_numbers(ctx: Context) -> None:
    for passes in (0, -1):
        with raises(ValueError, "backward_passes_per_step must be > 0"):
            wrapped(ctx.star, backward_passes_per_step=passes)
    _both(ctx, "gradient_predivide_factor not supported with op != Average", gradient_predivide_factor=2.0, op=_sum)
    model, optimizer = wrapped(ctx.star)
    with raises(ValueError, "backward_passes_per_step must be > 0"):
        optimizer.set_backward_passes_per_step(0)
    for norm in (0.0, -1.0, float("nan")):
        with raises(ValueError, "max_grad_norm"):
            wrapped(ctx.star, max_grad_norm=norm)
    # What was refused left nothing behind.
    differentiate(model, 0)
    optimizer.step()


def _sum(api: Api, model: torch.nn.Module) -> Any:
    return api.module.Sum


@case()
def bad_groups(ctx: Context) -> None:
    for number in (0, -2):
        _both(ctx, "groups should be a non-negative integer or a list", groups=number)
    _both(ctx, "groups must consist of torch.Tensor", groups=lambda api, m: [["0.weight"]])
    _both(ctx, "A parameter can only appear once in groups", groups=lambda api, m: [[m[0].weight], [m[0].weight]])


@case(modes=("sync",))
def bad_modes(ctx: Context) -> None:
    n = ctx.size
    for mode, text in {
        "fast": "mode is 'fast'; expected",
        "partial(0)": f"quorum m is 0; expected 1 <= m <= {n}",
        f"partial({n + 1})": f"quorum m is {n + 1}; expected 1 <= m <= {n}",
        "partial(x)": "expected a whole number m",
        "": "expected 'auto'",
    }.items():
        with raises(ValueError, text):
            wrapped(ctx.star, mode=mode)
    with raises(ValueError, "mode is 3"):
        wrapped(ctx.star, mode=3)
    with raises(ValueError, f"the plan is for {n + 1} ranks but this job has {n}"):
        wrapped(ctx.star, mode=star_hvd.Plan.sync(n + 1))
    with raises(star_hvd.PlanError, "quorum"):
        star_hvd.Plan(mode="sync", world_size=n + 1, quorum=n)


@case(modes=("sync",))
def bad_config(ctx: Context) -> None:
    for name, value in {
        "damping": "half",
        "bucket_bytes": 1,
        "grace_fraction": -0.1,
        "step_deadline_s": float("inf"),
        "heartbeat_s": float("nan"),
        "max_staleness": "4",
        "replay_queue": True,
    }.items():
        with raises(ValueError, f"config {name} is {value!r}; expected"):
            star_hvd.Config(**{name: value})
    with raises(TypeError, "grace"):
        star_hvd.Config(grace=1.0)


@case(modes=("sync",))
def a_plan_as_mode(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star, mode=star_hvd.Plan.partial(ctx.size, ctx.size))
    until_relaxed(optimizer, lambda: make_steps(model, optimizer, 1))
    assert optimizer.mode == f"partial({ctx.size})", optimizer.mode
    _, quiet = wrapped(ctx.star, mode="sync")
    assert quiet.mode == "sync"


@case()
def too_many_backward_passes(ctx: Context) -> None:
    def run(api: Api) -> Any:
        for options in ({}, {"groups": 4}, {"backward_passes_per_step": 2}):
            model, optimizer = wrapped(api, **options)
            passes = options.get("backward_passes_per_step", 1)
            for _ in range(passes):
                differentiate(model, 0)
            with raises(AssertionError, "" if "groups" in options else "Gradients were computed more than"):
                differentiate(model, 0)
            horovod.barrier()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return {}

    ctx.compare(run)


@case()
def too_many_backward_passes_in_groups_is_explained(ctx: Context) -> None:
    """Horovod's bare `assert` fails there, without a word."""
    model, optimizer = wrapped(ctx.star, groups=4)
    differentiate(model, 0)
    with raises(AssertionError, "Increase backward_passes_per_step"):
        differentiate(model, 0)
    horovod.barrier()
    optimizer.synchronize()


@case()
def zero_grad_between_backward_and_step(ctx: Context) -> None:
    def run(api: Api) -> Any:
        for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
            model, optimizer = wrapped(api, **options)
            differentiate(model, 0)
            with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward() but before"):
                optimizer.zero_grad()
            if "backward_passes_per_step" in options:
                differentiate(model, 1)
            optimizer.step()
            optimizer.zero_grad()
            differentiate(model, 2)
            optimizer.synchronize()
            optimizer.zero_grad()  # Allowed from here on.
        return {}

    ctx.compare(run)


@case()
def warning_when_synchronized_twice(ctx: Context) -> None:
    def run(api: Api, **options: Any) -> Any:
        model, optimizer = wrapped(api, **options)
        differentiate(model, 0)
        optimizer.synchronize()
        with warned() as texts:
            optimizer.step()
        assert any("called without optimizer.skip_synchronize() context" in text for text in texts), texts
        optimizer.zero_grad()
        differentiate(model, 1)
        with warned() as texts:
            optimizer.step()
        assert not texts, texts
        return values_of(model, optimizer)

    ctx.compare(run)
    ctx.compare(lambda api: run(api, op=api.module.Sum))  # Summed again, as in Horovod.
    ctx.compare(lambda api: run(api, groups=2))


@case()
def skip_synchronize_ends_with_its_block(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        differentiate(model, 0)
        optimizer.synchronize()
        with raises(KeyError, "inside"), optimizer.skip_synchronize():
            raise KeyError("inside")
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        differentiate(model, 1)
        optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


# ---- attributes and classes -----------------------------------------------------------------------------------


@case()
def attributes(ctx: Context) -> None:
    for options in ({}, {"groups": 2}):
        for api in (ctx.horovod, ctx.star):
            model, optimizer = wrapped(api, backward_passes_per_step=2, **options)
            names = {param: name for name, param in model.named_parameters()}
            assert optimizer.backward_passes_per_step == 2
            assert optimizer.op == api.module.Average
            assert optimizer.process_set is api.module.global_process_set
            assert optimizer.gradient_predivide_factor == 1.0
            assert optimizer.sparse_as_dense is False
            assert optimizer._parameter_names == names
            assert optimizer._requires_update == set(names)
            assert callable(optimizer._register_hooks)
            assert not optimizer._handles
            differentiate(model, 0)
            differentiate(model, 1)
            assert optimizer._handles
            optimizer.synchronize()
            assert not optimizer._handles


@case()
def classes(ctx: Context) -> None:
    for api in (ctx.horovod, ctx.star):
        for base in (torch.optim.SGD, torch.optim.Adam):
            model = mlp()
            optimizer = api.wrap(base(model.parameters(), lr=0.1), model.named_parameters())
            assert isinstance(optimizer, base) and isinstance(optimizer, torch.optim.Optimizer)
            assert type(optimizer) is not base
            assert type(optimizer).__name__ == base.__name__
            # Horovod's broadcast_optimizer_state asks for this module before it steps.
            assert type(optimizer).__module__ == optimizer.__module__ == "horovod.torch.optimizer"
            assert super(type(optimizer), optimizer).step.__func__ is base.step


@case(modes=("sync",))
def repr_and_defaults(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star)
    plain = Plain.sgd(model.parameters())
    assert optimizer.defaults == plain.defaults
    assert str(optimizer) == str(plain)
    lost, _ = ctx.horovod.wrap(Plain.sgd(model.parameters())), None
    assert lost.defaults["lr"] != plain.defaults["lr"], "Horovod keeps defaults now"


class NeedsArguments(torch.optim.SGD):
    """An optimizer whose constructor has a required argument."""

    def __init__(self, params: Any, required: float) -> None:
        super().__init__(params, lr=required)
        self.extra = {"required": required}


@case()
def required_arguments_of_the_users_class(ctx: Context) -> None:
    model = mlp()
    optimizer = ctx.star.wrap(NeedsArguments(model.parameters(), 0.1), model.named_parameters())
    assert isinstance(optimizer, NeedsArguments) and optimizer.extra == {"required": 0.1}
    make_steps(model, optimizer, 5)
    expected = train(ctx.star, Plain.simple)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, expected[name], rtol=1e-6, atol=1e-6)
    with raises(TypeError, ""):
        ctx.horovod.wrap(NeedsArguments(mlp().parameters(), 0.1))


@case()
def subclass_of_the_returned_class(ctx: Context) -> None:
    """Horovod's `super(self.__class__, self)` calls itself for ever there."""
    model, optimizer = wrapped(ctx.star)

    class Counting(type(optimizer)):  # type: ignore[misc]
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            super().zero_grad(*args, **kwargs)

        def load_state_dict(self, *args: Any) -> None:
            super().load_state_dict(*args)

    optimizer.__class__ = Counting
    make_steps(model, optimizer, 5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.steps == 5
    expected = train(ctx.star, Plain.sgd)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, expected[name], rtol=1e-6, atol=1e-6)


@case(modes=("sync",))
def the_returned_class_is_not_called(ctx: Context) -> None:
    _, optimizer = wrapped(ctx.star)
    with raises(TypeError, "DistributedOptimizer"):
        type(optimizer)(mlp().parameters(), lr=0.1)


@case(modes=("sync",))
def what_needs_lockstep_says_so_once(ctx: Context) -> None:
    for options in ({"groups": 2}, {"gradient_predivide_factor": 2.0}, {"process_set": ctx.subset}):
        with logged() as log:
            model, optimizer = wrapped(ctx.relaxed(), **options)
            make_steps(model, optimizer, 3)
        lines = [line for line in log.getvalue().splitlines() if "lockstep" in line]
        assert len(lines) == 1, log.getvalue()
        assert optimizer.mode == "sync"
        assert optimizer.stats() == {} and optimizer.timeline() == []


@case(modes=("sync",))
def mode_of_the_environment_goes_first(ctx: Context) -> None:
    import os

    os.environ["STAR_MODE"] = "nonsense"
    try:
        with raises(ValueError, "nonsense"):
            wrapped(ctx.star, mode="sync")
    finally:
        del os.environ["STAR_MODE"]
