"""Optimizer state: kept on wrapping, broadcast, saved, extended, shared."""

from __future__ import annotations

import copy
import io
import pickle
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
    batch,
    case,
    differentiate,
    make_steps,
    mean_gradients,
    mlp,
    params_of,
    values_of,
    warned,
)
from tests.support.plain import horovod


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=1.0)


# ---- kept on wrapping -----------------------------------------------------------------------------------------


@case()
def state_made_before_wrapping_is_kept(ctx: Context) -> None:
    """Horovod builds the optimizer anew and loses momentum, sums and defaults."""

    def adagrad(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1)

    for make in (adagrad, Plain.sgd, lambda p: torch.optim.Adam(p, lr=0.01)):
        model, alone = mlp(), mlp()
        plain, twin = make(model.parameters()), make(alone.parameters())
        for step in range(2):  # Trained before wrapping, the same everywhere.
            apply_reference(model, plain, step, ctx.size)
            apply_reference(alone, twin, step, ctx.size)
        optimizer = ctx.star.wrap(plain, model.named_parameters())
        assert optimizer.state is plain.state and optimizer.defaults == plain.defaults
        for step in range(2, 5):
            optimizer.zero_grad()
            differentiate(model, step)
            optimizer.step()
            apply_reference(alone, twin, step, ctx.size)
        assert_same(values_of(model, optimizer), values_of(alone, twin), exact=ctx.size == 2)


@case(modes=("sync",))
def state_made_before_wrapping_under_horovod(ctx: Context) -> None:
    model = mlp()
    plain = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    optimizer = ctx.horovod.wrap(plain, model.named_parameters())
    sums = [float(state["sum"].max()) for state in optimizer.state.values()]
    assert sums and all(value == 0.0 for value in sums), "Horovod keeps the state now"


@case(ranks=(2,), modes=("sync",))
def a_copy_of_the_optimizer_has_its_own_state(ctx: Context) -> None:
    """torch copies groups and state; a program may keep that of its best epoch so."""
    for api in (ctx.star, ctx.horovod):
        model = mlp()
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        make_steps(model, optimizer, 2)
        kept, state = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict())
        make_steps(model, optimizer, 4, first=2)
        found = kept.state_dict()
        assert found["param_groups"] == state["param_groups"] and found["state"].keys() == state["state"].keys()
        for index, entries in state["state"].items():
            assert torch.equal(found["state"][index]["momentum_buffer"], entries["momentum_buffer"])


@case()
def a_group_added_after_wrapping_gets_defaults(ctx: Context) -> None:
    model = mlp()
    optimizer = ctx.star.wrap(Plain.sgd(model[0].parameters()), model[0].named_parameters())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert optimizer.param_groups[1]["lr"] == 0.1 and optimizer.param_groups[1]["momentum"] == 0.9


# ---- broadcast ------------------------------------------------------------------------------------------------


@case()
def broadcasting_fresh_state_leaves_weights_alone(ctx: Context) -> None:
    for wrapped in (True, False):
        model = mlp()
        before = params_of(model)
        optimizer: Any = _adamw(model.parameters())
        if wrapped:
            optimizer = ctx.star.wrap(optimizer, model.named_parameters())
        ctx.star.module.broadcast_optimizer_state(optimizer, root_rank=0)
        assert_same(params_of(model), before, exact=True)
        assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
        assert not getattr(optimizer, "_handles", None)
        if wrapped:
            make_steps(model, optimizer, 3)
            assert all_equal(params_of(model))


@case(modes=("sync",))
def broadcasting_fresh_state_under_horovod_shrinks_weights(ctx: Context) -> None:
    model = mlp()
    before = params_of(model)
    ctx.horovod.module.broadcast_optimizer_state(_adamw(model.parameters()), root_rank=0)
    assert not torch.equal(model[0].weight, before["0.weight"]), "Horovod restores the weights now"


@case()
def training_after_a_broadcast(ctx: Context) -> None:
    """Parameters and state of rank 0 on all ranks, then the same steps."""

    def run(api: Api) -> Any:
        values = {}
        for name, make in makers.items():
            model = mlp(seed=ctx.rank)
            optimizer = api.wrap(make(model.parameters()), model.named_parameters())
            api.module.broadcast_parameters(model.state_dict(), root_rank=0)
            api.module.broadcast_optimizer_state(optimizer, root_rank=0)
            make_steps(model, optimizer, 4)
            values.update({f"{name}.{key}": value for key, value in values_of(model, optimizer).items()})
        assert all_equal(values)
        return values

    makers: dict[str, Any] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }
    ctx.compare(run)


@case()
def a_fresh_state_that_was_broadcast_leaves_zero_gradients(ctx: Context) -> None:
    """Scripts read them: of Horovod's own tests one broadcasts a gradient at this place."""

    def run(api: Api) -> Any:
        model = mlp()
        model[0].bias.requires_grad_(False)
        optimizer = api.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
        api.module.broadcast_optimizer_state(optimizer, root_rank=0)
        assert model[0].bias.grad is None
        values = values_of(model, optimizer)
        assert not values["2.weight.grad"].any()
        optimizer.zero_grad()
        differentiate(model, 0)
        optimizer.step()
        return {**{f"after.{key}": value for key, value in values_of(model, optimizer).items()}, **values}

    ctx.compare(run)


@case()
def a_checkpoint_restored_on_rank_0_only(ctx: Context) -> None:
    """The `__module__` trap: a wrapper that Horovod does not know would reduce on some ranks and hang."""
    for function in (ctx.star.module.broadcast_optimizer_state, horovod.broadcast_optimizer_state):
        for make in (Plain.sgd, _adamw):
            model = mlp()
            plain = make(model.parameters())
            if ctx.rank == 0:
                for step in range(3):
                    apply_reference(model, plain, step, ctx.size)
                plain.param_groups[0]["lr"] = 0.025
            optimizer = ctx.star.wrap(plain, model.named_parameters())
            function(optimizer, root_rank=0)
            ctx.star.module.broadcast_parameters(model.state_dict(), root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.025
            assert optimizer.state[model[0].weight], "no state arrived"
            make_steps(model, optimizer, 6, first=3)
            assert all_equal(values_of(model, optimizer))


@case()
def elastic_state_syncs_from_rank_0(ctx: Context) -> None:
    model = mlp(seed=ctx.rank)
    optimizer = ctx.star.wrap(Plain.sgd(model.parameters()), model.named_parameters())
    state = star_hvd.elastic.TorchState(model=model, optimizer=optimizer, plan_id=ctx.rank)
    state.sync()
    assert state.plan_id == 0
    make_steps(model, optimizer, 2)
    state.save()
    saved = values_of(model, optimizer)
    make_steps(model, optimizer, 4, first=2)
    state.restore()
    restored = values_of(model, optimizer)
    assert_same(
        {name: v for name, v in restored.items() if not name.endswith("grad")},
        {name: v for name, v in saved.items() if not name.endswith("grad")},
        exact=True,
    )
    make_steps(model, optimizer, 3, first=2)
    assert all_equal(values_of(model, optimizer))


# ---- saved ----------------------------------------------------------------------------------------------------


@case()
def state_dict_survives_every_way_of_saving(ctx: Context) -> None:
    ways = (
        lambda state: pickle.loads(pickle.dumps(state)),
        copy.deepcopy,
        _through_torch_save,
    )
    for way in ways:
        model, other = mlp(), mlp(seed=1)
        optimizer = ctx.star.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        make_steps(model, optimizer, 2)
        assert optimizer.state_dict().keys() == {"state", "param_groups"}
        loaded = ctx.star.wrap(torch.optim.SGD(other.parameters(), lr=7.0), other.named_parameters())
        loaded.load_state_dict(way(optimizer.state_dict()))
        other.load_state_dict(way(model.state_dict()))
        assert loaded.param_groups[0]["lr"] == 0.1
        make_steps(model, optimizer, 4, first=2)
        make_steps(other, loaded, 4, first=2)
        assert_same(values_of(other, loaded), values_of(model, optimizer), exact=ctx.size == 2)


def _through_torch_save(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@case()
def state_dict_is_that_of_the_plain_optimizer(ctx: Context) -> None:
    """A checkpoint of a wrapped optimizer loads into a plain one, and the other way round."""
    model, alone = mlp(), mlp()
    optimizer = ctx.star.wrap(Plain.sgd(model.parameters()), model.named_parameters())
    plain = Plain.sgd(alone.parameters())
    make_steps(model, optimizer, 2)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors with what it loads.
    alone.load_state_dict(model.state_dict())
    apply_reference(alone, plain, 2, ctx.size)
    make_steps(model, optimizer, 3, first=2)
    assert_same(values_of(alone, plain), values_of(model, optimizer), exact=ctx.size == 2)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    make_steps(model, optimizer, 4, first=3)


# ---- extended, wrapped again ----------------------------------------------------------------------------------


@case()
def parameters_added_later_are_reduced(ctx: Context) -> None:
    for options in ({}, {"groups": 1}):
        model, alone = mlp(), mlp()
        optimizer = ctx.star.wrap(Plain.sgd(model[0].parameters()), model[0].named_parameters(), **options)
        plain = Plain.sgd(alone[0].parameters())
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
                plain.add_param_group({"params": list(alone[2].parameters()), "lr": 0.05})
            model.zero_grad()
            differentiate(model, step)
            optimizer.step()
            apply_reference(alone, plain, step, ctx.size)
        assert_same(params_of(model), params_of(alone), exact=ctx.size == 2)


@case(modes=("sync",))
def parameters_added_later_are_not_reduced_under_horovod(ctx: Context) -> None:
    model = mlp()
    optimizer = ctx.horovod.wrap(Plain.sgd(model[0].parameters()), model[0].named_parameters())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    differentiate(model, 0)
    optimizer.step()
    assert not all_equal(params_of(model)), "Horovod reduces them now"


@case()
def a_frozen_layer_thawed_and_added(ctx: Context) -> None:
    """The usual way to unfreeze: `requires_grad_()`, then a new group."""
    model, alone = mlp(), mlp()
    for part in (model, alone):
        part[0].requires_grad_(False)
    optimizer = ctx.star.wrap(Plain.simple(model[2].parameters()), model[2].named_parameters())
    plain = Plain.simple(alone[2].parameters())
    for step in range(4):
        if step == 2:
            for part, own in ((model, optimizer), (alone, plain)):
                part[0].requires_grad_(True)
                own.add_param_group({"params": list(part[0].parameters())})
        model.zero_grad()
        differentiate(model, step)
        optimizer.step()
        _step_where_trainable(alone, plain, step, ctx.size)
    assert_same(params_of(model), params_of(alone), exact=ctx.size == 2)


def _step_where_trainable(model: torch.nn.Module, optimizer: Any, step: int, ranks: int) -> None:
    trainable = [param for param in model.parameters() if param.requires_grad]
    total = [torch.zeros_like(param) for param in trainable]
    for rank in range(ranks):
        model.zero_grad()
        differentiate(model, step, rank)
        for sum_, param in zip(total, trainable, strict=True):
            assert param.grad is not None
            sum_.add_(param.grad)
    for sum_, param in zip(total, trainable, strict=True):
        param.grad = sum_ / ranks
    optimizer.step()


@case()
def wrapping_again_does_not_reduce_twice(ctx: Context) -> None:
    for options in ({}, {"groups": 2}):
        model = mlp()
        plain = Plain.sgd(model.parameters())
        first = ctx.star.wrap(plain, model.named_parameters(), op=star_hvd.Sum, **options)
        for again in (first, plain):
            optimizer = ctx.star.wrap(again, model.named_parameters(), op=star_hvd.Sum, **options)
            assert type(optimizer).__mro__[1] is torch.optim.SGD
        differentiate(model, 0)
        optimizer.step()
        expected = mean_gradients(mlp(), 0, ctx.size)
        for param, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean * ctx.size, rtol=1e-6, atol=1e-6)


def _adversaries(api: Api, make: Any, lr: float) -> tuple[torch.nn.Module, torch.nn.Module, Any, Any]:
    """A generator and a critic as in a GAN, and the optimizer of each; `make` makes the generator's."""
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(6, 3), torch.nn.Linear(3, 1)
    names = [[(f"{of}.{name}", p) for name, p in m.named_parameters()] for of, m in (("g", generator), ("c", critic))]
    own = api.wrap(make(generator.parameters(), lr=lr), names[0])
    return generator, critic, own, api.wrap(torch.optim.SGD(critic.parameters(), lr=0.05), names[1])


@case()
def two_optimizers_in_turn(ctx: Context) -> None:
    """As in a GAN: backward of one runs through the other's parameters, and steps overlap."""

    def run(api: Api) -> Any:
        generator, critic, own, others = _adversaries(api, torch.optim.Adam, lr=0.01)
        for step in range(5):
            noise, real = batch(int(star_hvd.rank()), step)
            others.zero_grad()
            (critic(generator(noise).detach()) - critic(real)).mean().backward()
            if step % 2 == 0:
                others.step()
            own.zero_grad()
            # Through the critic without its parameters, as the allowed passes are spent on odd steps.
            critic.requires_grad_(False)
            (-critic(generator(noise)).mean()).backward()
            critic.requires_grad_(True)
            own.step()
            if step % 2 == 1:
                others.step()
        return {**values_of(generator, own), **{f"critic.{k}": v for k, v in values_of(critic).items()}}

    ctx.compare(run)


@case()
def gradients_of_another_loss_are_reduced_and_dropped(ctx: Context) -> None:
    """The plain GAN loop: the generator's loss leaves gradients in the critic, whose optimizer has to collect them."""

    def run(api: Api) -> Any:
        generator, critic, own, others = _adversaries(api, torch.optim.SGD, lr=0.05)
        for step in range(4):
            noise, real = batch(int(star_hvd.rank()), step)
            others.zero_grad()
            (critic(generator(noise).detach()) - critic(real)).mean().backward()
            with warned() as texts:  # Of the synchronize() at the end of the turn before.
                others.step()
            assert len(texts) == (step > 0), texts
            own.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            own.step()
            others.synchronize()
        return {**values_of(generator, own), **{f"critic.{k}": v for k, v in values_of(critic).items()}}

    ctx.compare(run)
