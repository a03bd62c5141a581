"""What depends on which ranks there are: process sets, Adasum, SyncBatchNorm, the report, the other collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    logged,
    make_steps,
    mlp,
    raises,
    reference,
    train,
    values_of,
    wrapped,
)
from tests.support.inside import driver_of
from tests.support.plain import horovod

REPORT_S = 60.0  # Reached only where reports stay wrong.


@case()
def process_set(ctx: Context) -> None:
    """Members average among themselves; the others train alone."""
    for options in ({}, {"op": horovod.Sum}, {"groups": 2}):
        # Groups are agreed on inside the set, from global rank 0, which is a member.
        ctx.compare(lambda api, o=options: train(api, Plain.simple, process_set=ctx.subset, **o))


@case()
def process_set_leaves_non_members_alone(ctx: Context) -> None:
    values = train(ctx.star, Plain.simple, process_set=ctx.subset)
    alone = mlp()
    plain = Plain.simple(alone.parameters())
    for step in range(5):
        plain.zero_grad()
        differentiate(alone, step)
        plain.step()
    if ctx.subset.included() and ctx.subset.size() > 1:
        assert not torch.equal(values["0.weight"], alone[0].weight)
    else:
        assert_same(values, values_of(alone, plain), exact=True)


@case()
def parameters_in_another_order_on_one_rank(ctx: Context) -> None:
    """Horovod matches gradients by name, so the order in which a rank lists them does not matter."""

    def run(api: Api) -> Any:
        model = mlp()
        named = list(model.named_parameters())
        if ctx.rank == 1:
            named.reverse()
        optimizer = api.wrap(Plain.sgd([param for _, param in named]), named)
        make_steps(model, optimizer, 4)
        return values_of(model)

    ctx.compare(run)


@case(modes=("sync",))
def different_models_are_refused_on_all_ranks(ctx: Context) -> None:
    model = torch.nn.Linear(4, 3 if ctx.rank == 1 else 2)
    with raises(ValueError, "have other parameters than rank 0"):
        ctx.star.wrap(Plain.sgd(model.parameters()), model.named_parameters())


@case(modes=("sync",))
def adasum_is_horovods_own(ctx: Context) -> None:
    """Horovod's second class, unchanged. Gloo alone cannot carry it out, so nothing is trained here."""
    from horovod.torch import optimizer as theirs

    with logged() as log:
        optimizer = ctx.relaxed().wrap(Plain.simple(mlp().parameters()), op=horovod.Adasum)
    assert "Adasum" in log.getvalue()
    with raises(ValueError, "leave max_grad_norm out"):
        ctx.relaxed().wrap(Plain.simple(mlp().parameters()), op=horovod.Adasum, max_grad_norm=1.0)
    assert type(optimizer).synchronize is vars(theirs._DistributedAdasumOptimizer)["synchronize"]
    assert optimizer.synchronize() is None
    with raises(AssertionError, "not supported when using Adasum"), optimizer.skip_synchronize():
        pass
    for api in (ctx.horovod, ctx.star):
        with raises(NotImplementedError, "process set"):
            api.wrap(Plain.simple(mlp().parameters()), op=horovod.Adasum, process_set=ctx.subset)


@case(modes=("sync",))
def sync_batch_norm_stays_in_sync(ctx: Context) -> None:
    """Horovod's layer works on a GPU only; what keeps the job in `sync` comes before.

    Also if the module with the model imports it from Horovod.
    """
    for layer in (star_hvd.SyncBatchNorm(6), horovod.SyncBatchNorm(6)):
        model = mlp()
        assert isinstance(layer, horovod.SyncBatchNorm)
        optimizer = ctx.relaxed().wrap(Plain.simple(model.parameters()), model.named_parameters())
        for step in range(8):
            optimizer.zero_grad()
            with raises(ValueError, "to be on GPU"):
                layer(batch(ctx.rank, step)[0])
            differentiate(model, step)
            optimizer.step()
        assert optimizer.mode == "sync", optimizer.mode


@case(ranks=(4,), modes=("sync",))
def a_delay_in_backward_is_named(ctx: Context) -> None:
    """One rank sleeps 200 ms inside backward; in `sync` every rank's step takes as long, so only own work tells."""
    slow = 2
    model = mlp()
    if ctx.rank == slow:
        model[2].weight.register_hook(lambda grad: time.sleep(0.2))
    optimizer = ctx.star.wrap(Plain.simple(model.parameters()), model.named_parameters())

    def names_it(report: star_hvd.Report) -> None:
        assert report.mode == "sync"
        assert len(report.stragglers) == 1 and f"rank {slow}" in report.stragglers[0], report.stragglers
        line = report.ranks[slow]
        assert line.slowdown > 2 and line.cause and line.compute_s > 0.18, line
        for other in report.ranks:
            if other.rank != slow:
                assert other.slowdown == 1.0 and not other.cause
                assert other.compute_s < 0.5 * line.compute_s and other.wait_s > 0.1, other
        assert f"rank {slow}" in str(report)

    _train_until(optimizer, lambda: make_steps(model, optimizer, 16), names_it)
    assert ctx.rank == 0 or star_hvd.report(driver_of(optimizer).number) is None
    if ctx.rank == 0:
        with raises(ValueError, "there is no optimizer"):
            star_hvd.report(10_000)


def _train_until(optimizer: Any, train: Callable[[], None], check: Callable[[star_hvd.Report], None]) -> None:
    """Train until rank 0's report is as expected: a rank that the machine holds up meanwhile is rightly named too."""
    number, limit_s, told = driver_of(optimizer).number, time.monotonic() + REPORT_S, "no report"
    while told and time.monotonic() < limit_s:
        train()
        told = star_hvd.broadcast_object(_told(number, int(optimizer.stats()["steps"]), check), 0, name="c.told")
    assert not told, told


def _told(number: int, steps: int, check: Callable[[star_hvd.Report], None]) -> str:
    """What is wrong with the report of the steps made so far, on rank 0; it is waited for."""
    limit_s = time.monotonic() + REPORT_S
    while True:
        report = star_hvd.report(number)
        if report is None:
            return "no report"
        if report.step >= steps - 1:
            break
        if time.monotonic() > limit_s:
            return f"a report of step {report.step} after {steps} steps"
        time.sleep(0.05)
    try:
        check(report)
    except AssertionError as error:
        return f"{error}\n{report}"
    return ""


@case(ranks=(4,), modes=("sync",))
def nobody_slow_nobody_named(ctx: Context) -> None:
    model, optimizer = wrapped(ctx.star, Plain.simple)

    def train() -> None:
        for step in range(16):
            optimizer.zero_grad()
            differentiate(model, step)
            time.sleep(0.02)
            optimizer.step()

    def names_nobody(report: star_hvd.Report) -> None:
        assert report.stragglers == (), report.stragglers

    _train_until(optimizer, train, names_nobody)


@case(modes=("sync",))
def the_other_collectives(ctx: Context) -> None:
    """Wrapped so that the coordinator knows where a rank is; the results are Horovod's."""
    own = torch.arange(4.0) + 10 * ctx.rank

    def run(api: Api) -> Any:
        hvd = api.module
        values = {
            "allreduce": hvd.allreduce(own, name="c.allreduce"),
            "sum": hvd.allreduce(own, name="c.sum", op=hvd.Sum),
            "max": hvd.allreduce(own, name="c.max", op=hvd.Max),
            "fp16": hvd.allreduce(own, name="c.fp16", compression=hvd.Compression.fp16),
            "in_place": hvd.allreduce_(own.clone(), name="c.in_place"),
            "async": hvd.synchronize(hvd.allreduce_async(own, name="c.async")),
            "allgather": hvd.allgather(own.unsqueeze(0), name="c.allgather"),
            "broadcast": hvd.broadcast(own, 1, name="c.broadcast"),
            "broadcast_": hvd.broadcast_(own.clone(), 1, name="c.broadcast_"),
            "alltoall": hvd.alltoall(own[: ctx.size], name="c.alltoall"),
            "reducescatter": hvd.reducescatter(torch.ones(ctx.size, 2) * ctx.rank, name="c.reducescatter"),
            "grouped": hvd.grouped_allreduce([own, own * 2], name="c.grouped")[1],
            "grouped_allgather": hvd.grouped_allgather([own, own * 2], name="c.ggather")[1],
            "set": hvd.allreduce(own, name="c.set", process_set=ctx.subset) if ctx.subset.included() else own,
        }
        hvd.barrier()
        return values

    ctx.compare(run)
    assert star_hvd.broadcast_object({"a": ctx.rank}, root_rank=1, name="c.object") == {"a": 1}
    assert star_hvd.allgather_object(ctx.rank, name="c.objects") == list(range(ctx.size))


def _slow_to_unpack() -> str:
    if int(horovod.rank()) == 1:
        time.sleep(0.1)
    return "unpacked"


class SlowToUnpack:
    """Keeps rank 1 inside the broadcast after the others have left it."""

    def __reduce__(self) -> Any:
        return _slow_to_unpack, ()


@case()
def the_first_step_after_a_broadcast_is_whole(ctx: Context) -> None:
    """Ranks leave a collective at different moments; in lockstep nobody goes on without the last one."""
    model, optimizer = wrapped(ctx.star)
    for step in range(5):
        star_hvd.broadcast_object(SlowToUnpack(), root_rank=0, name="c.slow")
        optimizer.zero_grad()
        differentiate(model, step)
        optimizer.step()
    assert_same(values_of(model, optimizer), reference(Plain.sgd, ranks=ctx.size), exact=ctx.size == 2)
    assert optimizer.stats()["fresh"] == 5 and optimizer.stats()["late"] == 0, optimizer.stats()


@case(modes=("sync",))
def broadcast_parameters_takes_lists_and_dicts(ctx: Context) -> None:
    for form in (lambda m: m.state_dict(), lambda m: list(m.named_parameters())):
        model = mlp(seed=ctx.rank)
        star_hvd.broadcast_parameters(form(model), root_rank=1)
        assert_same(values_of(model), values_of(mlp(seed=1)), exact=True)


@case(last=True)
def uneven_numbers_of_batches_end_with_join(ctx: Context) -> None:
    """Rank 0 has fewer batches: it joins, the others go on; afterwards all are equal."""
    model, optimizer = wrapped(ctx.star, Plain.simple)
    for step in range(3 if ctx.rank == 0 else 5):
        optimizer.zero_grad()
        differentiate(model, step)
        optimizer.step()
    last = star_hvd.join()
    assert 0 <= last < ctx.size
    assert all_equal({name: p for name, p in model.named_parameters()})


@case(modes=("sync",), last=True)
def a_learning_rate_set_behind_backward_counts_in_its_own_step(ctx: Context) -> None:
    """Also once steps are applied with the leader's, as after an epoch that ended with `join`."""
    model, optimizer = wrapped(ctx.star, Plain.simple)
    wrong = []
    for epoch in range(2):
        for step in range(24 + (epoch == 0 and ctx.rank == 0)):
            optimizer.zero_grad()
            differentiate(model, step)
            before = {name: param.detach().clone() for name, param in model.named_parameters()}
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (step % 2)
            optimizer.step()
            moved = any(not torch.equal(param, before[name]) for name, param in model.named_parameters())
            if moved != bool(step % 2):
                wrong.append((epoch, step))
        star_hvd.join()
    assert not wrong


@case(modes=("sync",), last=True)
def shard_gives_every_sample_once(ctx: Context) -> None:
    inputs, targets = batch(0, 0, 76)
    data = torch.utils.data.TensorDataset(inputs, targets, torch.arange(76))
    loader = star_hvd.shard(data, 8, seed=3)
    model, optimizer = wrapped(ctx.star, Plain.simple)
    from star_hvd.runtime import runtime

    run = runtime.current()
    assert run is not None
    for _ in range(2):
        seen: list[int] = []
        for x, y, index in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            seen.extend(index.tolist())
        everybody = horovod.allgather_object(seen, name="c.seen")
        assert sorted(i for part in everybody for i in part) == list(range(76))
        assert all_equal({name: p for name, p in model.named_parameters()})
    assert run.feeding.weight(1) == 1.0, "the last batch's weight is no later one's"


@case(ranks=(1,), modes=("sync",))
def one_rank_alone(ctx: Context) -> None:
    """Without anybody to wait for, the wrapper is the plain optimizer."""
    for options in ({}, {"groups": 2}, {"op": horovod.Adasum}):
        ctx.compare(lambda api, o=options: train(api, Plain.sgd, **o))
    for mode in ("auto", "partial", "partial(1)"):
        train(Api(star_hvd, {"mode": mode}), Plain.sgd)
    model, optimizer = wrapped(ctx.star)
    optimizer.zero_grad(set_to_none=True)
    differentiate(model, 0)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step(lambda: differentiate(model, 1))
    assert star_hvd.report() is None
    assert star_hvd.broadcast_object(3, 0, name="one") == 3
