"""The same numbers as under Horovod, whatever is reduced and however."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.harness import (
    Api,
    Context,
    Plain,
    assert_same,
    batch,
    case,
    differentiate,
    loss_of,
    make_steps,
    mlp,
    reference,
    train,
    values_of,
    warned,
    wrapped,
)


@case()
def sgd_with_momentum(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, Plain.sgd))
    assert_same(train(ctx.star, Plain.sgd), reference(Plain.sgd, ranks=ctx.size), exact=ctx.size == 2)


@case()
def adam(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, lambda p: torch.optim.Adam(p, lr=0.01)))


@case()
def adamw(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)))


@case()
def rmsprop(ctx: Context) -> None:
    # Divides by the root of small means of squares, which magnifies the last bits.
    ctx.compare(lambda api: train(api, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)), tolerance=1e-5)


@case()
def without_names(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, Plain.sgd, named=False))


@case()
def several_groups_of_parameters(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model = mlp()
        parts = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "momentum": 0.5}]
        optimizer = api.wrap(torch.optim.SGD(parts, lr=0.1), model.named_parameters())
        make_steps(model, optimizer, 4)
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def op_sum(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), op=api.module.Sum))


@case()
def predivide_factor(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, Plain.sgd, gradient_predivide_factor=float(ctx.size)))
    # Another power of two than the number of ranks: also exact.
    ctx.compare(lambda api: train(api, Plain.sgd, gradient_predivide_factor=8.0))


@case()
def fp16_compression(ctx: Context) -> None:
    """Horovod averages float16 on the wire; star_hvd divides the sum afterwards: equal on 2 ranks, else to 2**-11."""

    def run(api: Api) -> Any:
        return train(api, Plain.simple, steps=3, compression=api.module.Compression.fp16)

    got, expected = run(ctx.star), run(ctx.horovod)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-3, atol=2e-4)
    exact = reference(Plain.simple, ranks=ctx.size, steps=3)
    assert any(not torch.equal(got[name], exact[name]) for name in exact), "nothing was compressed"


class Halves:
    """A compressor of the user's: a power of two, so nothing is lost."""

    calls = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Halves.calls += 1
        return tensor * 0.5, ("context", tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        assert context[0] == "context"
        return tensor * 2.0


@case()
def compressor_of_the_user(ctx: Context) -> None:
    Halves.calls = 0
    got = train(ctx.star, Plain.sgd, compression=Halves)
    assert Halves.calls == 5 * 4, f"{Halves.calls} calls of compress; expected one per parameter and step"
    assert_same(got, train(ctx.horovod, Plain.sgd, compression=Halves), exact=ctx.size == 2)


@case()
def groups_by_number(ctx: Context) -> None:
    for groups in (1, 2, 4):
        ctx.compare(lambda api, n=groups: train(api, Plain.sgd, groups=n))


@case()
def groups_by_list(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model = mlp()
        own = dict(model.named_parameters())
        groups = [[own["0.weight"], own["2.bias"]], [own["2.weight"]]]  # 0.bias is in none.
        optimizer = api.wrap(Plain.sgd(model.parameters()), model.named_parameters(), groups=groups)
        make_steps(model, optimizer, 4)
        return values_of(model, optimizer)

    ctx.compare(run)


@case(modes=("sync",))
def groups_name_parameters_of_another_optimizer(ctx: Context) -> None:
    """Horovod leaves parameters out that the optimizer does not have."""

    def run(api: Api) -> Any:
        model = mlp()
        own = dict(model.named_parameters())
        groups = [[own["0.weight"], own["2.weight"]], [own["0.bias"], own["2.bias"]]]
        first = [(name, p) for name, p in own.items() if name.startswith("0.")]
        optimizer = api.wrap(Plain.sgd([p for _, p in first]), first, groups=groups)
        for step in range(3):
            model.zero_grad()
            differentiate(model, step)
            optimizer.step()
        return {name: param.detach().clone() for name, param in first}

    ctx.compare(run)


@case(modes=("sync",))
def num_groups_is_deprecated(ctx: Context) -> None:
    def run(api: Api) -> Any:
        with warned() as texts:
            values = train(api, Plain.sgd, num_groups=2)
        assert any("DeprecationWarning" in text and "num_groups" in text for text in texts), texts
        return values

    ctx.compare(run)


@case()
def passes_are_summed(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, Plain.sgd, passes=2))
    got = train(ctx.star, Plain.sgd, passes=2)
    assert_same(got, reference(Plain.sgd, ranks=ctx.size, passes=2), exact=ctx.size == 2)


@case()
def passes_with_groups_and_names(ctx: Context) -> None:
    ctx.compare(lambda api: train(api, Plain.sgd, passes=2, groups=2))


@case()
def passes_changed_between_steps(ctx: Context) -> None:
    def run(api: Api) -> Any:
        model, optimizer = wrapped(api)
        step = 0
        for passes in (1, 3, 2, 1):
            optimizer.set_backward_passes_per_step(passes)
            assert optimizer.backward_passes_per_step == passes
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(passes):
                    differentiate(model, step)
                    step += 1
                optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


@case()
def step_before_all_passes(ctx: Context) -> None:
    """`step()` after fewer passes than agreed reduces what is there."""

    def run(api: Api) -> Any:
        model, optimizer = wrapped(api, backward_passes_per_step=3)
        for step, passes in enumerate((3, 1, 2, 3)):
            optimizer.zero_grad()
            for i in range(passes):
                differentiate(model, 10 * step + i)
            optimizer.step()
        return values_of(model, optimizer)

    ctx.compare(run)


def _clipped_by_hand(api: Api) -> Any:
    model, optimizer = wrapped(api)
    for step in range(4):
        optimizer.zero_grad()
        differentiate(model, step)
        optimizer.synchronize()
        # The order of the norm's summands is that of the parameters: backwards in a bucket.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with warned() as texts, optimizer.skip_synchronize():
            optimizer.step()
        assert not texts, texts
    return values_of(model, optimizer)


@case()
def clipping_by_hand(ctx: Context) -> None:
    ctx.compare(_clipped_by_hand)


@case()
def clipping_inside(ctx: Context) -> None:
    """`max_grad_norm` does what clipping by hand does."""
    got = train(ctx.star, Plain.sgd, steps=4, max_grad_norm=0.05)
    assert_same(got, _clipped_by_hand(ctx.horovod), exact=False)


@case()
def uneven_batches_are_weighted(ctx: Context) -> None:
    """Batches of (24, 12, 16, 24) samples give the gradient of the 76 together; a mean of means would not."""
    from star_hvd.runtime import runtime

    sizes = (24, 12, 16, 24)[: ctx.size]
    data = [batch(rank, 0, samples) for rank, samples in enumerate(sizes)]
    model, alone = mlp(), mlp()
    optimizer = ctx.star.wrap(Plain.simple(model.parameters()), model.named_parameters())
    run = runtime.current()
    assert run is not None
    run.feeding.begin(0)  # What the loader of `shard` says about the batch it hands out.
    run.feeding.note(0, sizes[ctx.rank] / 24.0)
    try:
        torch.nn.functional.mse_loss(model(data[ctx.rank][0]), data[ctx.rank][1]).backward()
        optimizer.step()
    finally:
        run.feeding.end(0)
    whole = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    torch.nn.functional.mse_loss(alone(whole[0]), whole[1]).backward()
    for param, twin in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, twin.grad, rtol=1e-6, atol=1e-6)


@case()
def loss_of_every_rank_counts(ctx: Context) -> None:
    """One step by hand: parameters minus lr times the mean gradient."""
    model, alone = mlp(), mlp()
    optimizer = ctx.star.wrap(Plain.simple(model.parameters()), model.named_parameters())
    differentiate(model, 0)
    optimizer.step()
    total = sum(loss_of(alone, rank, 0) for rank in range(ctx.size)) / ctx.size
    assert isinstance(total, torch.Tensor)
    total.backward()
    for param, twin in zip(model.parameters(), alone.parameters(), strict=True):
        assert twin.grad is not None
        torch.testing.assert_close(param, twin - 0.1 * twin.grad, rtol=1e-6, atol=1e-6)
