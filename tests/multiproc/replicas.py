"""A plain loop without `shard`, with collectives of the user's in it, in every relaxed mode; see `test_replicas.py`.

`python -m tests.multiproc.replicas MODE...`: for every mode schedules of random paces, lengths and collectives. After
each collective the ranks compare their parameters by plain Horovod, which star_hvd does not see.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import star_hvd as hvd
from tests.multiproc.modes import CONFIG, MODES, deadline, publish, within
from tests.multiproc.scenarios import Facts, batch, compute, digest, model, run_each
from tests.support.inside import driver_of, inside
from tests.support.plain import horovod

SCHEDULES = 6  # Of each mode.
PAUSES_S = [0.0] * 12 + [0.002, 0.01, 0.03]

COLLECTIVES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "allreduce": lambda net: hvd.allreduce(torch.ones(3)),
    "barrier": lambda net: hvd.barrier(),
    "allgather": lambda net: hvd.allgather(torch.ones(1)),
    "broadcast_object": lambda net: hvd.broadcast_object({"epoch": 1}, 0, name="epoch"),
    "allgather_object": lambda net: hvd.allgather_object(1, name="metric"),
    "broadcast_parameters": lambda net: hvd.broadcast_parameters(net.state_dict(), 0),
}


def differences(net: torch.nn.Module, optimizer: Any) -> list[str]:
    """What differs between ranks now, and whether a rank is behind a step that has ended."""
    engine = driver_of(optimizer).engine
    seen = horovod.allgather_object((digest(net), engine.step, engine.next_step), name="compare")
    furthest = max(step for _, _, step in seen)
    wrong = [f"ranks at {[step for _, step, _ in seen]}"] if len({one for one, _, _ in seen}) > 1 else []
    return wrong + [f"rank {r} at {step} of {furthest}" for r, (_, step, _) in enumerate(seen) if step < furthest]


def batches(seed: int, length: int, shard: Iterable[Any] | None) -> Iterable[torch.Tensor]:
    if shard is None:
        return (batch(1000 * seed + number) for number in range(length))
    return (item[0] for item in shard)


def schedule(seed: int, net: torch.nn.Module, optimizer: Any, shard: Iterable[Any] | None, *, switch: bool) -> Facts:
    """One stretch of training of random length and pace, then one collective, `state_dict` before or after it."""
    common, own = random.Random(seed), random.Random(7000 * seed + int(hvd.rank()))
    low = common.randint(2, 12)
    length = low if common.random() < 0.5 else own.randint(low, 2 * low)  # As long on every rank, or not.
    pace_s, steps = own.choice([0.001, 0.001, 0.01]), 0
    for inputs in batches(seed, length, shard):
        optimizer.zero_grad()
        compute(net, inputs, pace_s + own.choice(PAUSES_S))
        optimizer.step()
        steps += 1
        if switch and int(hvd.rank()) == 0:
            publish(optimizer, own.choice(MODES))
    if own.random() < 0.3:
        optimizer.state_dict()  # On any rank alone, as for a checkpoint.
    name = common.choice(sorted(COLLECTIVES))
    COLLECTIVES[name](net)
    found = differences(net, optimizer)
    net.eval()
    with torch.no_grad():
        loss = float(net(torch.ones(1, 8)))
    net.train()
    losses = horovod.allgather_object(loss, name="losses")
    mode = optimizer.mode
    return {"collective": name, "wrong": found, "steps": steps, "mode": mode, "losses_equal": len(set(losses)) == 1}


def train(mode: str, *, sharded: bool) -> Facts:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    first = "sync" if mode == "switching" else mode
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=first, config=CONFIG)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(3)))
    shard = hvd.shard(data, batch_size=4) if sharded else None
    number, began_s = 0, time.monotonic()
    while first != "sync" and optimizer.mode == "sync" and within(began_s):  # Servers take seconds to start.
        one_step(net, optimizer, number)
        number += 1
    hvd.barrier()
    found = [schedule(seed, net, optimizer, shard, switch=mode == "switching") for seed in range(SCHEDULES)]
    optimizer.close()
    return {"schedules": found, "at_the_end": differences(net, optimizer), "stats": optimizer.stats()}


def one_step(net: torch.nn.Module, optimizer: Any, number: int, compute_s: float = 0.004) -> None:
    """Train on this rank's batch of that number."""
    optimizer.zero_grad()
    compute(net, batch(number), compute_s)
    optimizer.step()


def after_shutdown() -> Facts:
    """A program that trains its loop to the end, shuts Horovod down and looks at its parameters."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    named = net.named_parameters()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode="partial(2)", config=CONFIG)
    rank = int(hvd.rank())
    for number in range(20 + rank):
        one_step(net, optimizer, number, 0.02 if rank == 3 else 0.003)
    hvd.shutdown()
    return {"digest": digest(net)}


def exchanged(mode: str, how: str) -> Facts:
    """A program in which rank 0 evaluates an average of the weights in their place while the others train on.

    Args:
        mode: The mode.
        how: `copied` into the parameters or `replaced` by `param.data`; `copied,met` with a metric that all ranks
            average before the weights are put back, `copied,saved` with a checkpoint of them that rank 0 takes.
    """
    net, rank = model(), int(hvd.rank())
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    average, touched, number, began_s = [param.detach().clone() for param in net.parameters()], [], 0, time.monotonic()

    def step() -> None:
        nonlocal number
        one_step(net, optimizer, number)
        number += 1
        for mean, param in zip(average, net.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.1)

    def put(values: list[torch.Tensor]) -> None:
        for param, value in zip(net.parameters(), values, strict=True):
            if how == "replaced":
                param.data = value.clone()
            else:
                param.data.copy_(value)

    while optimizer.mode == "sync" and within(began_s):
        step()
    hvd.barrier()
    engine = driver_of(optimizer).engine
    for _ in range(3):
        for _ in range(6):
            step()
        if rank == 0:
            own, first = [param.detach().clone() for param in net.parameters()], engine.next_step
            put(average)
            # The others make steps; at servers this rank does not hear of them.
            local = mode.startswith("local")  # The others' averagings wait until this rank is in a collective.
            while not local and engine.plan.family == "all_ranks" and engine.next_step < first + 4 and within(began_s):
                time.sleep(0.01)
        else:
            for _ in range(6):
                step()
        if how.endswith("met"):
            hvd.allreduce(torch.ones(1), name="metric")
        if rank == 0 and how.endswith("saved"):
            optimizer.state_dict()
        if rank == 0:
            wrong = [not torch.equal(p, a) for p, a in zip(net.parameters(), average, strict=True)]
            touched.append(any(wrong))
            put(own)
    step()
    hvd.barrier()
    found = differences(net, optimizer)
    optimizer.close()
    stats = optimizer.stats()
    return {"touched": touched, "wrong": found, "at_the_end": differences(net, optimizer), "stats": stats}


def between(mode: str, *, compiles: bool) -> Facts:
    """A program that averages its loss between forward and backward, while the others make steps.

    Args:
        mode: The mode.
        compiles: Whether the network is compiled.
    """
    net, rank, number = model(), int(hvd.rank()), 0
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    called = torch.compile(net, backend="aot_eager") if compiles else net
    engine, changed, behind, began_s = driver_of(optimizer).engine, 0, 0, time.monotonic()

    def step(*, logs: bool) -> None:
        nonlocal number, changed, behind
        optimizer.zero_grad()
        time.sleep(0.03 if rank == int(hvd.size()) - 1 else 0.002)
        inputs = batch(number)
        loss = (called(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if logs:
            before = digest(net)
            hvd.allreduce(loss.detach(), name="loss")
            changed += digest(net) != before
            behind += engine.step < engine.next_step
        loss.backward()
        optimizer.step()
        number += 1

    while optimizer.mode == "sync" and within(began_s):
        step(logs=False)
    hvd.barrier()
    found = differences(net, optimizer)
    while True:
        for each in range(8):
            step(logs=each == 7)
        if anywhere(behind or not mode.startswith("partial") or not within(began_s)):
            break
    hvd.barrier()
    found += differences(net, optimizer)
    with torch.no_grad():  # A pass that leaves no graph.
        hvd.allreduce(net(batch(0)).mean(), name="evaluated")
    found += differences(net, optimizer)
    optimizer.close()
    facts = {"changed": changed, "behind": behind, "wrong": found, "stats": optimizer.stats()}
    return facts | {"at_the_end": differences(net, optimizer)}


def anywhere(fact: bool) -> bool:
    """Whether it is so on some rank. Collective, behind star_hvd's back."""
    return any(horovod.allgather_object(bool(fact), name="anywhere"))


def momentum(optimizer: Any) -> str:
    """A digest of the optimizer's state on this rank."""
    state = inside(optimizer).base.state_dict(optimizer)["state"]
    return hashlib.sha256(b"".join(state[i]["momentum_buffer"].numpy().tobytes() for i in sorted(state))).hexdigest()


def loaded(mode: str, how: str) -> Facts:
    """Rank 0 loads a checkpoint while the others train on, and broadcasts it once they have come, too.

    Args:
        mode: The mode.
        how: `model` alone, or `both`, the optimizer's state too.
    """
    net, rank, number = model(), int(hvd.rank()), 0
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    began_s = time.monotonic()

    def step() -> None:
        nonlocal number
        one_step(net, optimizer, number)
        number += 1

    while optimizer.mode == "sync" and within(began_s):
        step()
    hvd.barrier()
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    expected = digest(net), momentum(optimizer) if mode.startswith("partial") else ""
    wrong, engine = [], driver_of(optimizer).engine
    for _ in range(3):
        for _ in range(4):
            step()
        if rank == 0:
            first = engine.next_step
            net.load_state_dict(saved[0])
            if how == "both":
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
            while mode.startswith("partial") and engine.next_step < first + 4 and within(began_s):
                time.sleep(0.01)  # The others make steps without this rank.
        else:
            for _ in range(6):
                step()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        if how == "both":
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        wrong += differences(net, optimizer)
        wrong += ["parameters"] * (digest(net) != expected[0])
        if mode.startswith("partial"):  # In the other modes a rank's state is its own, or not its concern.
            states = {*horovod.allgather_object(momentum(optimizer), name="states")}
            wrong += ["state"] * (len(states) > 1 or (how == "both" and states != {expected[1]}))
        step()
        hvd.barrier()
        wrong += differences(net, optimizer)
    optimizer.close()
    return {"wrong": wrong, "at_the_end": differences(net, optimizer), "stats": optimizer.stats()}


def one(name: str) -> Facts:
    if name == "shutdown":
        return after_shutdown()
    if name.startswith("exchanged"):
        _, mode, how = name.split(":")
        return exchanged(mode, how)
    if name.startswith("between"):
        _, mode, how = name.split(":")
        return between(mode, compiles=how == "compiled")
    if name.startswith("loaded"):
        _, mode, how = name.split(":")
        return loaded(mode, how)
    mode, _, how = name.partition(":")
    return train(mode, sharded=how == "shard")


if __name__ == "__main__":
    run_each(sys.argv[1:], one, deadline)
