"""Gradients out of the ordinary: missing, frozen, shared, of several types, not contiguous, sparse."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

import star_hvd
from tests.contract.harness import (
    Api,
    Context,
    Plain,
    all_equal,
    assert_same,
    batch,
    case,
    differentiate,
    loss_of,
    make_steps,
    mlp,
    params_of,
    raises,
    until_relaxed,
    values_of,
    wrapped,
)
from tests.support.inside import driver_of


class Branches(torch.nn.Module):
    """Uses another layer depending on rank and step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared, self.left, self.right = (torch.nn.Linear(6, 6) for _ in range(3))
        self.turn = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        branch = (self.left, self.right)[self.turn % 2]
        hidden: torch.Tensor = branch(torch.tanh(self.shared(inputs)))
        return hidden[:, :3]


@case()
def parameters_without_gradient_on_one_rank(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model = Branches()
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        for step in range(5):
            optimizer.zero_grad()
            model.turn = step + (ctx.rank == 1)
            differentiate(model, step)
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def a_rank_without_any_gradient(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        for step in range(4):
            optimizer.zero_grad()
            if step != 2 or ctx.rank != 0:
                differentiate(model, step)
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def frozen_parameters(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model = mlp()
        model[0].weight.requires_grad_(False)
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        make_steps(model, optimizer, 4)
        assert torch.equal(model[0].weight, mlp()[0].weight)
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def a_parameter_used_twice(ctx: Context) -> None:
    def run(api: Api) -> Any:
        torch.manual_seed(0)
        shared = torch.nn.Linear(6, 6)
        model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared, torch.nn.Linear(6, 3))
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
        make_steps(model, optimizer, 4)
        return values_of(model, optimizer)

    ctx.compare(run)


class Mixed(torch.nn.Module):
    """Layers of several types."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6).to(dtype) for dtype in dtypes])
        self.last = torch.nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))
        out: torch.Tensor = self.last(inputs.float())
        return out


def _train_mixed(api: Api, *dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    model = Mixed(*dtypes)
    optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(int(star_hvd.rank()), step)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return values_of(model, optimizer)


@case()
def float32_and_float64(ctx: Context) -> None:
    ctx.compare(lambda api: _train_mixed(api, torch.float64, torch.float32))


@case()
def bfloat16_works_where_horovod_refuses(ctx: Context) -> None:
    values = _train_mixed(ctx.star, torch.float64, torch.bfloat16)
    assert values["layers.1.weight"].dtype == torch.bfloat16
    assert not torch.equal(values["layers.1.weight"], Mixed(torch.float64, torch.bfloat16).layers[1].weight)
    assert torch.isfinite(values["layers.1.weight"]).all()
    model = Mixed(torch.bfloat16)
    with raises(ValueError, "is not supported"):  # Once Horovod takes it, float32 on the wire is not needed.
        ctx.horovod.module.allreduce(model.layers[0].weight.detach(), name="contract.bf16")


@case()
def gradients_that_are_not_contiguous(ctx: Context) -> None:
    """A gradient with other strides than its parameter; Horovod refuses those, so one process is the reference."""

    def run(wrap: Any, ranks: range) -> dict[str, torch.Tensor]:
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) / 10)
        optimizer = wrap(torch.optim.SGD([weight], lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            total = [((weight.t() * (rank + 1.0)) ** 2).sum() for rank in ranks]
            (sum(total) / len(total)).backward()  # type: ignore[union-attr]
            optimizer.step()
        return {"weight": weight.detach().clone()}

    got = run(ctx.star.wrap, range(ctx.rank, ctx.rank + 1))
    assert_same(got, run(lambda optimizer: optimizer, range(ctx.size)), exact=False)


def _train_embedding(api: Api, *, factor: float = 1.0, steps: int = 4, **options: Any) -> Any:
    torch.manual_seed(7)
    table = torch.nn.Embedding(10, 4, sparse=True)
    head = torch.nn.Linear(4, 1)
    model = torch.nn.ModuleDict({"table": table, "head": head})
    optimizer = api.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        rank = int(star_hvd.rank())
        # Not the same number of rows on every rank.
        index = torch.tensor([(rank + step + i) % 10 for i in range(2 + rank)])
        (head(table(index)).pow(2).mean() * factor).backward()
        optimizer.step()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
    return values_of(model), optimizer


@case()
def sparse_embedding(ctx: Context) -> None:
    got, optimizer = _train_embedding(ctx.star)
    expected, _ = _train_embedding(ctx.horovod)
    assert_same(got, expected, exact=False)
    assert optimizer.mode in ("sync", f"partial({ctx.size})")


@case()
def sparse_embedding_summed(ctx: Context) -> None:
    got, _ = _train_embedding(ctx.star, op=ctx.star.module.Sum)
    assert_same(got, _train_embedding(ctx.horovod, op=ctx.horovod.module.Sum)[0], exact=False)


@case()
def sparse_as_dense(ctx: Context) -> None:
    got, _ = _train_embedding(ctx.star, sparse_as_dense=True)
    assert_same(got, _train_embedding(ctx.horovod, sparse_as_dense=True)[0], exact=ctx.size == 2)


@case(ranks=(2,), modes=("sync",))
def a_model_cast_after_wrapping(ctx: Context) -> None:
    """The buffers are of the former type; wrapped again, the optimizer goes on as under Horovod."""
    (model, optimizer), (theirs, their_optimizer) = wrapped(ctx.star, Plain.simple), wrapped(ctx.horovod, Plain.simple)
    make_steps(model, optimizer, 2)
    make_steps(theirs, their_optimizer, 2)
    model.double()
    theirs.double()
    with raises(star_hvd.StarError, "wrap the optimizer again"):
        make_steps(model, optimizer, 3, first=2)
    optimizer = ctx.star.wrap(optimizer, model.named_parameters())
    make_steps(model, optimizer, 5, first=2)
    make_steps(theirs, their_optimizer, 5, first=2)
    assert_same(params_of(model), params_of(theirs), exact=True)


@case(ranks=(2,), modes=("sync",))
def layers_that_meet_within_a_pass_are_found_before_they_are_used(ctx: Context) -> None:
    """The first pass that gets to them, or the first group with one, may come when a relaxed mode is in force."""
    embedding, added = torch.nn.Embedding(4, 3, sparse=True), torch.nn.Embedding(4, 3, sparse=True)
    for layer in (embedding, added, star_hvd.SyncBatchNorm(3), ctx.horovod.module.SyncBatchNorm(3)):
        model = mlp()
        params = [*model.parameters()] + ([] if layer is added else [*layer.parameters()])
        optimizer = ctx.relaxed().wrap(Plain.simple(params))
        if layer is added:
            assert not driver_of(optimizer).equal_batches
            optimizer.add_param_group({"params": [*layer.parameters()]})
        assert driver_of(optimizer).equal_batches, layer
        make_steps(model, optimizer, 6)
        assert optimizer.mode == "sync", optimizer.mode


@case(ranks=(2,), modes=("sync",), last=True)
def sparse_gradients_that_first_come_in_a_relaxed_mode(ctx: Context) -> None:
    """No layer tells of them beforehand. They are reduced in their buckets: no rank is waited for, and none is lost."""
    for mode in ("partial(1)", "local(2)"):
        model, table = mlp(), torch.nn.Parameter(torch.zeros(4, 3))
        named = [*model.named_parameters(), ("table", table)]
        inner = torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9)
        optimizer = star_hvd.DistributedOptimizer(inner, named_parameters=named, mode=mode)
        until_relaxed(optimizer, functools.partial(_sparse_step, model, None, optimizer))
        for _ in range(8):
            _sparse_step(model, table, optimizer)
        optimizer.close()
        rows = table.detach()
        assert all_equal(params_of(model) | {"table": rows}), mode
        assert (rows[[0, 1, 3]] < -0.05).all() and not rows[2].any(), f"{mode}: {rows}"
        assert optimizer.stats()["mismatches"] == 0


def _sparse_step(model: torch.nn.Module, table: torch.nn.Parameter | None, optimizer: Any) -> None:
    rank = int(star_hvd.rank())
    optimizer.zero_grad()
    time.sleep(0.02 if rank else 0.002)
    loss = loss_of(model, rank, 0)
    if table is not None:
        loss = loss + torch.nn.functional.embedding(torch.tensor([rank, 3]), table, sparse=True).sum()
    loss.backward()
    optimizer.step()


@case(modes=("sync",))
def sparse_gradients_stay_in_sync(ctx: Context) -> None:
    got, optimizer = _train_embedding(ctx.relaxed(), steps=8)
    assert optimizer.mode == "sync", optimizer.mode
    assert_same(got, _train_embedding(ctx.horovod, steps=8)[0], exact=False)
