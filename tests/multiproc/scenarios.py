"""What every rank of a multi-process test runs: small trainings, each with a slow rank, one after another in a job.

A scenario returns facts, as JSON values, and judges nothing: the tests compare the facts of all ranks. What has to
happen in a scenario is waited for (`go_on`), for a busy machine may take many more steps to it than an idle one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import horovod.torch as horovod_torch
import torch
from horovod.torch import allreduce as allreduce_of_horovod_torch

import star_hvd as hvd
from scheduler.records import Plan
from star_hvd.runtime import runtime
from tests.support.inside import driver_of
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning
from tests.support.plain import horovod
from tests.support.signals import PATIENCE_S, mark, marked

Facts = dict[str, Any]
Scenario = Callable[[], Facts]

LIMIT_S = 300.0  # More than anything is waited for.
FAST_S, SLOW_S = 0.004, 0.03
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def digest(net: torch.nn.Module) -> str:
    raw = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    return hashlib.sha256(raw).hexdigest()[:16]


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * int(hvd.rank()) + number)
    return torch.randn(4, 8, generator=generator)


def slow_rank() -> bool:
    return int(hvd.rank()) == int(hvd.size()) - 1


def compute(net: torch.nn.Module, inputs: torch.Tensor, seconds: float | None = None) -> None:
    """Forward and backward of a batch, which takes the slow rank longer."""
    time.sleep(seconds if seconds is not None else SLOW_S if slow_rank() else FAST_S)
    (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()


def sgd(net: torch.nn.Module, mode: str | Plan = "partial", **options: Any) -> Any:
    inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    return hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, **options)


def end(net: torch.nn.Module, *optimizers: Any) -> Facts:
    """Close the optimizers; all ranks then have every step."""
    for optimizer in optimizers:
        optimizer.close()
    stats = [optimizer.stats() for optimizer in optimizers]
    return {"digest": digest(net), "stats": stats[0], "all_stats": stats}


def steps(net: torch.nn.Module, optimizer: Any, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        optimizer.zero_grad()
        compute(net, batch(number))
        optimizer.step()


def go_on(name: str, optimizer: Any, count: int, *counters: str) -> Iterator[int]:
    """Numbers of the steps to make: `count` of them, and more until every counter counts something on some rank."""
    began_s, number, missing = time.monotonic(), 0, {"late", "folds", *counters}
    while number < count or (missing and time.monotonic() - began_s < PATIENCE_S):
        yield number
        number += 1
        stats = optimizer.stats()
        for counter in sorted(missing):
            if stats[counter] > 0:
                mark(f"{name}.{counter}")
        missing = {counter for counter in missing if not marked(f"{name}.{counter}")}


def await_mode(net: torch.nn.Module, optimizer: Any, relaxed: bool) -> None:
    """Train in step with the others until the mode is in force here."""
    limit_s, number = time.monotonic() + PATIENCE_S, 0
    while driver_of(optimizer).engine.plan.relaxed is not relaxed:
        assert time.monotonic() < limit_s, f"the plan is {driver_of(optimizer).engine.plan.label}"
        steps(net, optimizer, 1, first=number)
        number += 1


def agreed(fact: bool, name: str) -> bool:
    """Whether it is so on every rank. Collective."""
    return float(hvd.allreduce(torch.tensor([float(fact)]), op=hvd.Min, name=name)) > 0.0


def seen_anywhere(optimizer: Any, name: str, *counters: str) -> bool:
    """Whether every counter counts something on some rank. Collective."""
    stats = optimizer.stats()
    found = torch.tensor([float(stats[counter]) for counter in counters])
    return bool((hvd.allreduce(found, op=hvd.Sum, name=name) > 0.0).all())


def slow_rank_took_fewer(samples: list[list[int]]) -> bool:
    """Whether it took fewer samples than rank 0, which a busy machine may hold up for some epochs. Collective."""
    counts = hvd.allgather(torch.tensor([sum(map(len, samples))]), name="took")
    return int(counts[-1]) < int(counts[0])


def publish(optimizer: Any, plan: Plan) -> None:
    """Let the coordinator, on rank 0, send a plan to all ranks."""
    run = runtime.current()
    if run is not None and run.coordinator is not None:
        with run.coordinator.job_state() as job:
            engine = job.optimizers.get(driver_of(optimizer).number)
            if engine is not None and engine.asked.complete:
                engine.publish(plan, time.monotonic())


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return 203

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.cat([torch.tensor([float(index)]), torch.randn(8, generator=generator)])


@scenario
def shard_in_partial() -> Facts:
    net = model()
    optimizer = sgd(net)
    await_mode(net, optimizer, relaxed=True)
    loader = hvd.shard(Numbered(), batch_size=4, seed=3)
    digests, samples, limit_s = [], [], time.monotonic() + PATIENCE_S
    while len(samples) < 3 or not (
        (seen_anywhere(optimizer, "seen", "late", "folds") and slow_rank_took_fewer(samples))
        or not agreed(time.monotonic() < limit_s, "time")
    ):
        seen: list[int] = []
        for rows in loader:
            seen += rows[:, 0].int().tolist()
            optimizer.zero_grad()
            compute(net, rows[:, 1:])
            optimizer.step()
        digests.append(digest(net))
        samples.append(seen)
    return {"digests": digests, "samples": samples} | end(net, optimizer)


@scenario
def switching() -> Facts:
    """Plans are published all the time, from the training thread of rank 0, while speeds differ."""
    net = model()
    optimizer = sgd(net, "sync")
    size, modes = int(hvd.size()), set()
    limit_s, number, done = time.monotonic() + PATIENCE_S, 0, False
    while not done:
        if number % 5 == 4:
            quorum = (1, size, size - 1, size, size - 1)[number // 5 % 5]
            publish(optimizer, Plan.sync(size) if quorum == size else Plan.partial(size, quorum))
        optimizer.zero_grad()
        compute(net, batch(number), 0.002 + 0.006 * ((number // 20 + int(hvd.rank())) % size))
        optimizer.step()
        modes.add(driver_of(optimizer).engine.plan.label)
        number += 1
        if number >= 180 and number % 20 == 0:
            done = agreed(len(modes) >= 2 or time.monotonic() > limit_s, "switched")
    facts = end(net, optimizer)
    return facts | {"modes": sorted(modes)}


@scenario
def schedulers_of_their_own() -> Facts:
    """Every rank gets a learning rate of its own; replicas are equal only if all apply the leader's."""
    net = model()
    inner = torch.optim.Adam(net.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="partial")
    await_mode(net, optimizer, relaxed=True)  # In lockstep every rank uses its own, as under Horovod.
    optimizer.param_groups[0]["lr"] *= 1 + int(hvd.rank())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    made = 0
    for number in go_on("schedulers", optimizer, 40):
        steps(net, optimizer, 1, number)
        schedule.step()
        made += 1
    own_lr = optimizer.param_groups[0]["lr"]
    return end(net, optimizer) | {"own_lr": own_lr, "expected_lr": 0.001 * (1 + int(hvd.rank())) * 0.99**made}


@scenario
def clipping_by_hand() -> Facts:
    net = model()
    optimizer = sgd(net)
    for number in go_on("by_hand", optimizer, 40, "fetched"):
        optimizer.zero_grad()
        compute(net, 10 * batch(number))
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return end(net, optimizer)


@scenario
def clipping_by_hand_and_switching_with_shards() -> Facts:
    """Everything at once: fetches, switches, ends of epochs, and an epoch that every rank leaves early."""
    net = model()
    optimizer = sgd(net, "partial(1)")
    loader = hvd.shard(Numbered(), batch_size=8)
    digests, number, limit_s = [], 0, time.monotonic() + PATIENCE_S
    for epoch in itertools.count():
        for rows in loader:
            number += 1
            optimizer.zero_grad()
            compute(net, rows[:, 1:])
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
            if epoch == 3 and number % 3 == 0:
                break
            if number % 4 == 0:
                publish(optimizer, Plan.partial(int(hvd.size()), 1 + number // 4 % int(hvd.size())))
        if epoch != 3:
            digests.append(digest(net))
        if epoch >= 4 and (
            seen_anywhere(optimizer, "seen", "late", "folds", "fetched")
            or not agreed(time.monotonic() < limit_s, "time")
        ):
            break
    return end(net, optimizer) | {"digests": digests}


@scenario
def one_rank_leaves_its_loop_early() -> Facts:
    """The others come to the end of that epoch; all meet at the end of the next one, and every sample is there once."""
    net = model()
    optimizer = sgd(net)
    loader = hvd.shard(Numbered(), batch_size=4, seed=5)
    digests, samples = [], []
    for epoch in range(6):
        left, seen = False, []
        for number, rows in enumerate(loader):
            seen += rows[:, 0].int().tolist()
            optimizer.zero_grad()
            compute(net, rows[:, 1:])
            optimizer.step()
            if epoch in (1, 2, 4) and int(hvd.rank()) == epoch % int(hvd.size()) and number == 1:
                left = True
                break
        digests.append(digest(net))
        samples.append([left, seen])
    for number in go_on("leaving", optimizer, 1):
        steps(net, optimizer, 1, number)
    return {"digests": digests, "samples": samples} | end(net, optimizer)


@scenario
def clipping_inside() -> Facts:
    net = model()
    optimizer = sgd(net, max_grad_norm=0.5)
    for number in go_on("inside", optimizer, 40):
        steps(net, optimizer, 1, number)
    return end(net, optimizer)


@scenario
def two_passes() -> Facts:
    net = model()
    optimizer = sgd(net, backward_passes_per_step=2)
    for number in go_on("two_passes", optimizer, 30):
        optimizer.zero_grad()
        compute(net, batch(2 * number))
        compute(net, batch(2 * number + 1), 0.0)
        optimizer.step()
    return end(net, optimizer)


@scenario
def compressed() -> Facts:
    net = model()
    optimizer = sgd(net, compression=hvd.Compression.fp16)
    for number in go_on("compressed", optimizer, 40):
        steps(net, optimizer, 1, number)
    return end(net, optimizer)


@scenario
def two_optimizers() -> Facts:
    net, other = model(1), model(2)
    first, second = sgd(net), sgd(other, "partial(1)")
    for number in go_on("two_optimizers", first, 40):
        first.zero_grad()
        second.zero_grad()
        compute(net, batch(number))
        compute(other, batch(number), 0.0)
        first.step()
        second.step()
    facts = end(net, first, second)
    return facts | {"other": digest(other)}


@scenario
def a_grad_scaler_after_a_warm_up() -> Facts:
    """While a mode is relaxed; its first gradients are infinite, and later the scale doubles every 5 steps."""
    scaled = {mode: _scaled_after_a_warm_up(mode) for mode in ("ps(1)", "subgroup(0,1)", "partial")}
    return scaled["partial"] | {"scaled": {mode: {**facts, "stats": None} for mode, facts in scaled.items()}}


def _scaled_after_a_warm_up(mode: str) -> Facts:
    net = model()
    optimizer = sgd(net, mode)
    await_mode(net, optimizer, relaxed=True)
    for number in go_on("scaled", optimizer, 10) if mode == "partial" else range(10):
        steps(net, optimizer, 1, number)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    agreed(True, f"scaled.{mode}.start")
    number, relaxed = 0, optimizer.mode
    while optimizer.mode != "sync" or number < 3:
        _scaled_step(net, optimizer, scaler, number, float("inf") if number < 2 else 1.0)
        number += 1
    agreed(True, f"scaled.{mode}.sync")
    before = digest(net)
    for number in range(12):
        _scaled_step(net, optimizer, scaler, number)
    moved = digest(net) != before
    finite = all(bool(param.isfinite().all()) for param in net.parameters())
    return end(net, optimizer) | {"relaxed": relaxed, "moved": moved, "finite": finite, "scale": scaler.get_scale()}


def _scaled_step(net: torch.nn.Module, optimizer: Any, scaler: Any, number: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    time.sleep(SLOW_S if slow_rank() else FAST_S)
    inputs = batch(number)
    scaler.scale((net(inputs) - inputs.sum(1, keepdim=True)).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@scenario
def a_layer_thawed_in_relaxed_modes() -> Facts:
    """`add_param_group` while ranks are at different steps, and what it refuses."""
    modes = ("ps(1)", "grouped(2)", "subgroup(0,1)", "local(3)", "partial")
    thawed = {mode: _thawed(mode) for mode in modes}
    return thawed["partial"] | {"thawed": {mode: {**facts, "stats": None} for mode, facts in thawed.items()}}


def _thawed(mode: str) -> Facts:
    net = model()
    net[0].requires_grad_(False)
    inner = torch.optim.SGD(net[2].parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net[2].named_parameters(), mode=mode)
    await_mode(net, optimizer, relaxed=True)
    for number in go_on("before", optimizer, 10) if mode == "partial" else range(10):
        steps(net, optimizer, 1, number)
    relaxed, before = optimizer.mode, net[0].weight.detach().clone()
    compute(net, batch(0), 0.0)
    refused = ""
    try:
        optimizer.add_param_group({"params": list(net[0].parameters())})
    except hvd.StarError as error:
        refused = str(error)
    groups = len(optimizer.param_groups)
    optimizer.step()
    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.01})
    for number in go_on("after", optimizer, 10) if mode == "partial" else range(10):
        steps(net, optimizer, 1, number)
    moved = not torch.equal(before, net[0].weight)
    facts = {"relaxed": relaxed, "moved": moved, "refused": refused, "groups": groups}
    return end(net, optimizer) | facts | {"mode": optimizer.mode}


@scenario
def a_layer_thawed_without_a_group() -> Facts:
    """It is among the optimizer's parameters from the start, so each rank updates it alone, as under Horovod."""
    net = model()
    net[0].requires_grad_(False)
    optimizer = sgd(net)
    for number in go_on("frozen", optimizer, 10):
        steps(net, optimizer, 1, number)
    net[0].requires_grad_(True)
    relaxed, number, limit_s = optimizer.mode, 0, time.monotonic() + PATIENCE_S
    while (optimizer.mode != "sync" or number < 3) and time.monotonic() < limit_s:
        steps(net, optimizer, 1, number)
        number += 1
    mode = optimizer.mode
    while hvd.rank() == 0 and "frozen" not in hvd.explain() and time.monotonic() < limit_s:
        time.sleep(0.01)  # What ranks do reaches the coordinator a moment later.
    explained = hvd.explain()
    return end(net, optimizer) | {"digest": digest(net[2]), "relaxed": relaxed, "mode": mode, "explain": explained}


@scenario
def joining() -> Facts:
    """The slow rank has fewer batches, and says so."""
    net = model()
    optimizer = sgd(net)
    for number in go_on("joining", optimizer, 10 if slow_rank() else 40):
        steps(net, optimizer, 1, number)
    hvd.join()
    joined = digest(net)
    steps(net, optimizer, 5)
    return {"joined": joined} | end(net, optimizer)


@scenario
def joining_while_others_reduce() -> Facts:
    """The slow rank has fewer batches; the others reduce metrics before and behind each of their further steps."""
    modes = {mode: _joined_while_others_reduce(mode) for mode in ("sync", "ps(1)", "partial")}
    return modes["partial"] | {"joined": {mode: {**facts, "stats": None} for mode, facts in modes.items()}}


def _joined_while_others_reduce(mode: str) -> Facts:
    net = model()
    optimizer = sgd(net, mode)
    if mode != "sync":
        await_mode(net, optimizer, relaxed=True)
    for number in go_on("reduce", optimizer, 5) if mode == "partial" else range(5):
        steps(net, optimizer, 1, number)
    found = [_metrics(net, optimizer, number) for number in range(0 if slow_rank() else 4)]
    last = hvd.join()
    joined = digest(net)
    together = float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))
    steps(net, optimizer, 3)
    return {"found": found, "last": last, "joined": joined, "together": together} | end(net, optimizer)


def _metrics(net: torch.nn.Module, optimizer: Any, number: int) -> list[float]:
    before = hvd.allreduce(torch.tensor(1.0 + int(hvd.rank())), op=hvd.Sum)
    steps(net, optimizer, 1, number)
    handles = [hvd.allreduce_async(torch.ones(2, 3), name="later"), hvd.allreduce_async(torch.ones(2), op=hvd.Sum)]
    behind = hvd.allreduce(torch.ones(2, dtype=torch.float64), name="behind", compression=hvd.Compression.fp16)
    first, second = hvd.grouped_allreduce([torch.ones(1), torch.ones(2, dtype=torch.float64)], op=hvd.Sum)
    parts = [before, behind, first, second, *map(hvd.synchronize, reversed(handles))]
    return [float(part.sum()) for part in parts]


@scenario
def a_long_evaluation() -> Facts:
    """One rank does something else until the others have trained on for a while without it."""
    net = model()
    optimizer = sgd(net)
    await_mode(net, optimizer, relaxed=True)
    steps(net, optimizer, 5)
    missed = 0
    if slow_rank():
        engine, before = driver_of(optimizer).engine, optimizer.stats()["steps"]
        limit_s = time.monotonic() + PATIENCE_S
        while missed < 40 and time.monotonic() < limit_s:
            time.sleep(0.01)
            missed = engine.next_step - before
        mark("evaluated")
    else:
        number, limit_s = 0, time.monotonic() + PATIENCE_S + 10.0
        while not marked("evaluated") and time.monotonic() < limit_s:
            steps(net, optimizer, 1, number)
            number += 1
    for number in go_on("evaluation", optimizer, 5):
        steps(net, optimizer, 1, number)
    return end(net, optimizer) | {"missed": missed}


@scenario
def collectives_at_the_end_of_epochs() -> Facts:
    """A plain loop, and a metric averaged over the ranks after every epoch."""
    net = model()
    optimizer = sgd(net)
    means, limit_s = [], time.monotonic() + PATIENCE_S
    for epoch in itertools.count():
        steps(net, optimizer, 12, first=12 * epoch)
        means.append(float(hvd.allreduce(torch.tensor(float(hvd.rank())), name="metric")))
        if epoch >= 3 and (
            seen_anywhere(optimizer, "seen", "late", "folds") or not agreed(time.monotonic() < limit_s, "time")
        ):
            break
    return end(net, optimizer) | {"means": means}


@scenario
def functions_of_horovod_torch() -> Facts:
    """A plain loop whose program uses `horovod.torch` beside its optimizer, without names."""
    net = model()
    optimizer = sgd(net, "partial(1)")
    means, digests, limit_s = [], [], time.monotonic() + PATIENCE_S
    for epoch in itertools.count():
        steps(net, optimizer, 12, first=12 * epoch)
        own = torch.tensor(float(hvd.rank()))
        means.append([float(horovod_torch.allreduce(own)), float(allreduce_of_horovod_torch(own))])
        digests.append(digest(net))
        slow_only = (slow_rank(), time.monotonic() > limit_s)
        over = horovod_torch.broadcast_object(slow_only, int(hvd.size()) - 1)
        assert over[0], "the object of another rank"
        horovod_torch.barrier()
        if epoch >= 3 and (seen_anywhere(optimizer, "seen beside", "late", "folds") or over[1]):
            break
    return end(net, optimizer) | {"means": means, "digests": digests}


@scenario
def auto_without_a_slow_rank() -> Facts:
    net = model()
    optimizer, times_s = sgd(net, "auto"), []
    ended_s = time.monotonic()
    for number in range(50):
        optimizer.zero_grad()
        compute(net, batch(number), 0.1)  # Long beside what a busy machine takes a rank's processor away for.
        times_s.append(time.monotonic() - ended_s)
        optimizer.step()
        ended_s = time.monotonic()
    limit_s = time.monotonic() + PATIENCE_S
    while hvd.rank() == 0 and not _modes() and time.monotonic() < limit_s:  # Reports come late on a busy machine.
        time.sleep(0.01)
    modes = _modes()
    return end(net, optimizer) | {"modes": modes, "times_s": times_s}


@scenario
def auto_with_a_rank_that_recovers() -> Facts:
    """The last rank is slow until `auto` has acted on it; the job goes on until `auto` has taken that back."""
    net = model()
    optimizer = sgd(net, "auto")
    loader = hvd.shard(Numbered(), batch_size=4)
    limit_s, acted, back = time.monotonic() + PATIENCE_S, False, False
    while not back:  # `auto` leaves `partial` late: it costs nothing then, and slow ranks come back.
        for rows in loader:
            optimizer.zero_grad()
            compute(net, rows[:, 1:], 0.2 if slow_rank() and not acted else 0.05)
            optimizer.step()
        modes = _modes()
        relaxed = set(modes) > {"sync"}  # Which mode it takes is for the machine of the moment to say.
        # The plan that the ranks follow may still be the one before the latest: the latest says whether they are back.
        over = time.monotonic() > limit_s
        # Rank 0 knows the plans; all go by what it says at the end of an epoch.
        acted, back, modes = hvd.broadcast_object(
            (relaxed, over or (relaxed and modes[-1] == "sync"), modes), 0, name="auto"
        )
    return end(net, optimizer) | {"modes": modes}


@scenario
def shutdown_of_horovod_torch() -> Facts:
    """The last scenario: Horovod is shut down while the slow rank has steps to make that the others do not wait for."""
    net = model()
    optimizer = sgd(net, "partial(1)")
    await_mode(net, optimizer, relaxed=True)
    steps(net, optimizer, 20)
    horovod_torch.shutdown()
    stats = optimizer.stats()
    return {"digest": digest(net), "stats": stats, "all_stats": [stats], "initialized": bool(hvd.is_initialized())}


def _modes() -> list[str]:
    """Modes of the latest optimizer so far, on rank 0."""
    report = hvd.report()
    return [plan["mode"] for plan in report.plans] if report is not None else []


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def run_each(
    wanted: Iterable[str], one: Callable[[str], Facts], deadline: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Run parts of a job one after another, each within a deadline, and write what they found after each."""
    torch.set_num_threads(1)
    wait_without_spinning()
    hvd.init()
    facts: dict[str, Facts] = {}
    for name in wanted:
        write_result({"facts": facts, "running": name})
        began_s = time.monotonic()
        with deadline():
            facts[name] = one(name)
            facts[name]["seconds"] = time.monotonic() - began_s
            if hvd.is_initialized():
                horovod.barrier()
    write_result({"facts": facts, "running": ""})


def main(wanted: list[str]) -> None:
    run_each(wanted or SCENARIOS, lambda name: SCENARIOS[name](), _deadline)


if __name__ == "__main__":
    main(sys.argv[1:])
