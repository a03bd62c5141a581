"""What every rank runs to test the modes that hand state over, and the switches between them; see `scenarios.py`."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import logging
import os
import random
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import star_hvd as hvd
from scheduler.records import Plan, parse_mode
from star_hvd.coordinator.plans.set_ledger import MOST_SETS
from star_hvd.runtime import process_sets, runtime
from star_hvd.runtime.process_sets import MAX_SETS
from tests.multiproc.scenarios import Facts, batch, compute, digest, model, run_each
from tests.support.inside import driver_of, inside
from tests.support.signals import PATIENCE_S

# Servers import torch when they start; on a core that many share that takes its time, and a plan is not tried again.
CONFIG = hvd.Config(plan_deadline_s=200.0, control_deadline_s=200.0)
SLOW_S, FAST_S = 0.03, 0.004
LIMIT_S = 300.0  # More than anything is waited for.
COUNTED_S = 1.0
SWITCHING_S, LEAST_SWITCHES, LEAST_KINDS = 30.0, 15, 4
MODES = ["sync", "partial(3)", "subgroup(0,1,2)", "subgroup(1,2)", "local(3)", "grouped(2)"]
MODES += ["subgroup(1,2,3)", "subgroup(0,3)", "subgroup(0,1)", "subgroup(0,2,3)"]  # More sets than are kept.
MODES += ["ps(4)", "ps(1)", "ps(2)"]


class OwnSGD(torch.optim.SGD):
    """A class of the user's: helpers cannot replay its steps."""


def publish(optimizer: Any, mode: str | Plan) -> None:
    """Let the coordinator, on rank 0, send a plan to all ranks, if none is on its way."""
    run = runtime.current()
    if run is None or run.coordinator is None:
        return
    plan = parse_mode(mode, int(hvd.size()))
    assert plan is not None
    with run.coordinator.job_state() as job:
        engine = job.optimizers.get(driver_of(optimizer).number)
        ready = engine is not None and engine.asked.complete and not engine.switching
        if engine is not None and ready and engine.active.label != plan.label:
            engine.publish(plan, time.monotonic())


def go_into(optimizer: Any, mode: str, step: Callable[[int], object], number: int) -> int:
    """Make steps until `mode` is in force, from number on; returns the number of the next one."""
    began_s = time.monotonic()
    while within(began_s):
        publish(optimizer, mode)
        step(number)
        number += 1
        if optimizer.mode == mode:
            break
    return number


def within(began_s: float) -> bool:
    """Whether there is time left to wait for something that began then."""
    return time.monotonic() - began_s < PATIENCE_S


def train(mode: str, steps: int, *, make: Any = None, slow: bool = True) -> Facts:
    """A fixed mode, one rank slow; ranks make as many steps as they like until the last has made `steps`."""
    net = model()
    inner = make(net.parameters()) if make else torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    modes = set()
    losses: list[float] = []
    began_s = time.monotonic()
    while optimizer.mode == "sync" and mode != "sync" and within(began_s):  # Servers take seconds to start.
        optimizer.zero_grad()
        compute(net, batch(len(losses)), FAST_S)
        optimizer.step()
        losses.append(0.0)
    del losses[:]
    for number in range(steps):
        optimizer.zero_grad()
        inputs = batch(number)
        late = slow and int(hvd.rank()) == int(hvd.size()) - 1
        compute(net, inputs, SLOW_S if late else FAST_S)
        with torch.no_grad():
            losses.append(float((net(inputs) - inputs.sum(1, keepdim=True)).square().mean()))
        optimizer.step()
        modes.add(optimizer.mode)
    return finish(net, optimizer) | {"modes": sorted(modes), "first": losses[0], "last": sum(losses[-5:]) / 5}


def checkpoint(mode: str) -> Facts:
    """A checkpoint taken in a mode is loaded in it again, and resumes in `sync` with the same momentum."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    number = 0
    while optimizer.mode == "sync" or number < 30:
        optimizer.zero_grad()
        compute(net, batch(number), FAST_S)
        optimizer.step()
        number += 1
    state = copy.deepcopy(hvd.broadcast_object((optimizer.state_dict(), net.state_dict()), 0, name="checkpoint"))
    for again in range(5):
        optimizer.zero_grad()
        compute(net, batch(again), FAST_S)
        optimizer.step()
    optimizer.load_state_dict(state[0])
    net.load_state_dict(state[1])
    loaded, mode_then = digest(net), optimizer.mode
    momentum = [entry["momentum_buffer"] for entry in inside(optimizer).base.state_dict(optimizer)["state"].values()]
    same = all(torch.equal(a, b["momentum_buffer"]) for a, b in zip(momentum, state[0]["state"].values(), strict=True))
    began_s = time.monotonic()
    while optimizer.mode == "sync" and within(began_s):
        optimizer.zero_grad()
        compute(net, batch(number), FAST_S)
        optimizer.step()
        number += 1
    facts = {"loaded": loaded, "same": same, "mode_then": mode_then, "mode_again": optimizer.mode}
    return finish(net, optimizer) | facts


def _model_first(net: torch.nn.Module, optimizer: Any, state: Any) -> None:
    net.load_state_dict(state[1])
    optimizer.load_state_dict(state[0])


def _model_alone(net: torch.nn.Module, optimizer: Any, state: Any) -> None:
    net.load_state_dict(state[1])
    hvd.barrier()


def _model_at_root(net: torch.nn.Module, optimizer: Any, state: Any) -> None:
    if int(hvd.rank()) == 0:
        net.load_state_dict(state[1])
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)


def _both_at_root(net: torch.nn.Module, optimizer: Any, state: Any) -> None:
    if int(hvd.rank()) == 0:
        optimizer.load_state_dict(copy.deepcopy(state[0]))
        net.load_state_dict(state[1])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)


def _both_at_root_model_first(net: torch.nn.Module, optimizer: Any, state: Any) -> None:
    if int(hvd.rank()) == 0:
        net.load_state_dict(state[1])
        optimizer.load_state_dict(copy.deepcopy(state[0]))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


WAYS = (_model_first, _model_alone, _model_at_root, _both_at_root, _both_at_root_model_first)


def reload(mode: str) -> Facts:
    """A checkpoint is loaded in all ways that programs have; the steps that follow, of size 0, keep what was loaded."""
    net, number = model(), 0
    inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)

    def steps(count: int) -> None:
        """So many, and more until the mode is in force."""
        nonlocal number
        last, began_s = number + count, time.monotonic()
        while number < last or (optimizer.mode != mode and within(began_s)):
            optimizer.zero_grad()
            compute(net, batch(number), FAST_S)
            optimizer.step()
            number += 1

    steps(1)
    hvd.barrier()
    state = copy.deepcopy(hvd.broadcast_object((optimizer.state_dict(), net.state_dict()), 0, name="reload"))
    ways: dict[str, Any] = {}
    for load in WAYS:
        steps(4 + int(hvd.rank()))
        hvd.barrier()
        before = optimizer.mode
        load(net, optimizer, state)
        found = {"before": before, "loaded": digest(net)}
        if load not in (_model_alone, _model_at_root):
            momentum = inside(optimizer).base.state_dict(optimizer)["state"].values()
            pairs = zip(momentum, state[0]["state"].values(), strict=True)
            found["same"] = all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in pairs)
        optimizer.param_groups[0]["lr"] = 0.0
        steps(2)
        hvd.barrier()
        ways[load.__name__] = found | {"behind": digest(net)}
        optimizer.param_groups[0]["lr"] = 0.02
    saved = model()
    saved.load_state_dict(state[1])
    return finish(net, optimizer) | {"ways": ways, "saved": digest(saved)}


def summed(mode: str) -> Facts:
    """op=Sum: the mode is asked for, and `sync` trains on where it does not suit."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.005)
    named = net.named_parameters()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, op=hvd.Sum, mode=mode, config=CONFIG)
    modes: set[str] = set()
    number, began_s = 0, time.monotonic()
    while number < 60 or (mode.startswith("partial") and optimizer.mode == "sync" and within(began_s)):
        optimizer.zero_grad()
        compute(net, batch(number), FAST_S)
        optimizer.step()
        modes.add(optimizer.mode)
        number += 1
    return finish(net, optimizer) | {"modes": sorted(modes)}


def beforehand() -> Facts:
    """A server and a set are got ready in `sync`; the plans that want them find them there."""
    net, number = model(), 0
    inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync", config=CONFIG)
    run, served, members = runtime.current(), Plan.ps(4, 3, servers=(1,)), Plan.subgroup(4, (0, 1, 2))
    assert run is not None
    services = run.services

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        compute(net, batch(number), FAST_S)
        optimizer.step()
        number += 1

    step()
    if run.coordinator is not None:
        with run.coordinator.job_state() as job:
            readiness = job.optimizers[driver_of(optimizer).number].readiness
            readiness.for_plan(served)
            readiness.for_links([2.5e7, 2.5e7, 2.5e7, 2.5e6], 1_000_000)
    there, began_s = torch.zeros(1), time.monotonic()
    while float(there) < 1.0 and within(began_s):
        step()
        pid = services.sessions.server.pid
        ready = services.sets.get(members.members) is not None and (pid is not None or int(hvd.rank()) != 1)
        there = hvd.allreduce(torch.tensor([float(ready)]), op=hvd.Min, name=f"ready{number}")
    facts = {"ready": float(there), "pid": services.sessions.server.pid, "mode_then": optimizer.mode}
    seen = []
    for plan in (members, served):
        began_s = time.monotonic()
        while within(began_s):
            publish(optimizer, plan)
            step()
            if optimizer.mode == plan.label:
                break
        seen.append(optimizer.mode)
        hvd.barrier()
    return finish(net, optimizer) | facts | {"seen": seen, "pid_again": services.sessions.server.pid}


def many_sets() -> Facts:
    """Every subgroup of four ranks twice in turn, more than the number of sets that Horovod may be asked for."""
    process_sets.MAX_SETS = MOST_SETS + 2
    net, number, seen, most = model(), 0, [], 0
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync", config=CONFIG)
    run = runtime.current()
    assert run is not None
    # Each has a rank of the one before, which brings the state.
    subgroups = [(0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (2, 3), *itertools.combinations(range(4), 3)]
    plans = [Plan.subgroup(4, members) for members in subgroups]
    for plan in plans * 2:
        began_s = time.monotonic()
        while within(began_s):
            publish(optimizer, plan)
            optimizer.zero_grad()
            compute(net, batch(number), FAST_S)
            optimizer.step()
            number += 1
            if optimizer.mode == plan.label:
                break
        seen.append(optimizer.mode)
        most = max(most, len(run.services.sets.made))
        hvd.barrier()
    process_sets.MAX_SETS = MAX_SETS
    return finish(net, optimizer) | {"seen": seen, "wanted": [plan.label for plan in plans * 2], "most": most}


def counted(mode: str) -> Facts:
    """Ranks make different numbers of steps in a mode, with an optimizer that counts them, and go on in `sync`."""
    net, made, hooked = model(), 0, [0, 0]
    inner = torch.optim.NAdam(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync", config=CONFIG)

    def count(which: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            hooked[which] += 1

        return hook

    optimizer.register_step_pre_hook(count(0))
    optimizer.register_step_post_hook(count(1))

    def step(number: int) -> None:
        nonlocal made
        optimizer.zero_grad()
        compute(net, batch(number), SLOW_S if int(hvd.rank()) == int(hvd.size()) - 1 else FAST_S)
        optimizer.step()
        made += 1

    def moments() -> str:
        state = inside(optimizer).base.state_dict(optimizer)["state"].values()
        return repr([values[key].tolist() for values in state for key in sorted(values)])

    number, began_s = go_into(optimizer, mode, step, 0), time.monotonic()
    while time.monotonic() - began_s < COUNTED_S:
        step(number)
        number += 1
    facts: Facts = {"in_mode": optimizer.mode, "in_it": made}
    hvd.barrier()
    facts["met"] = moments()
    number = go_into(optimizer, "sync", step, number)
    for _ in range(5):
        step(number)
    return facts | finish(net, optimizer) | {"made": made, "hooked": hooked, "moments": moments()}


def finish(net: torch.nn.Module, optimizer: Any) -> Facts:
    """Close the optimizer; all ranks then have every step."""
    optimizer.close()
    state = inside(optimizer).base.state_dict(optimizer)
    return {"digest": digest(net), "stats": optimizer.stats(), "state": len(state["state"])}


def varied(seen: list[str]) -> bool:
    """Whether the switches were among as many kinds of modes as the test wants: which ones come first is chance."""
    return len({mode.partition("(")[0] for mode in seen}) >= LEAST_KINDS


def switching(seed: int, switches: int, how: str) -> Facts:
    """Random switches among all modes at random steps while ranks train.

    Args:
        seed: Of the modes and of what ranks do.
        switches: Ends it, as `SWITCHING_S` do once there were `LEAST_SWITCHES`; both once they were `varied`.
        how: `even`, `slow` (the last rank), or `moody`: each rank is slow, and stands still, when it likes.
    """
    chosen, which, mood = (random.Random(s) for s in (seed, 1000 + seed, 2000 + 10 * seed + int(hvd.rank())))
    net = model(seed)
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync", config=CONFIG)
    seen: list[str] = []
    previous, number, rounds, began_s = "", 0, 0, time.monotonic()
    done = torch.zeros(1)
    while not done[0]:
        for _ in range(chosen.randint(1, 4)):
            optimizer.zero_grad()
            late = how == "slow" and int(hvd.rank()) == int(hvd.size()) - 1
            pause_s = mood.choice([0.0] * 40 + [0.05, 0.2, 1.5]) if how == "moody" else 0.0
            compute(net, batch(number), 0.01 if late else 0.001 + pause_s)
            optimizer.step()
            number += 1
            if optimizer.mode != previous:
                previous = optimizer.mode
                seen.append(previous)
        if int(hvd.rank()) == 0:
            publish(optimizer, which.choice([mode for mode in MODES if mode != optimizer.mode]))
        rounds += 1
        if rounds % 8 == 0:  # A collective of the user's own, in the middle of it all.
            enough = len(seen) > LEAST_SWITCHES and time.monotonic() - began_s > SWITCHING_S
            over = (varied(seen) and (len(seen) > switches or enough)) or not within(began_s)
            done = hvd.broadcast(torch.tensor([float(over)]), 0)
    return finish(net, optimizer) | {"seen": seen, "steps": number}


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Past it the job ends, and every rank says where it stands."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    last_words = threading.Timer(LIMIT_S - 5.0, _tell_state)
    last_words.daemon = True
    last_words.start()
    yield
    last_words.cancel()
    faulthandler.cancel_dump_traceback_later()


def _tell_state() -> None:
    """What the parts of this rank hold, whatever their fields are called by now."""
    run = runtime.current()
    for driver in list(run.drivers.values()) if run is not None else ():
        engine = driver.engine
        for part in (driver, engine, engine.replica, driver.switcher):
            print(f"modes.py: rank {engine.rank}: {_fields_of(part)}", file=sys.stderr, flush=True)
    if run is not None and run.coordinator is not None:
        with run.coordinator.job_state() as job:
            for part in (job, *(each for one in job.optimizers.values() for each in (one, one.rule))):
                print(f"modes.py: coordinator: {_fields_of(part)}", file=sys.stderr, flush=True)


def _fields_of(part: object) -> str:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    values = {name: getattr(part, name, None) for name in (*getattr(part, "__dict__", ()), *slots)}
    return f"{type(part).__name__}: " + ", ".join(f"{name}={reprlib.repr(value)}" for name, value in values.items())


def one(name: str) -> Facts:
    if name.startswith("switch:"):
        _, seed, count, how = name.split(":")
        return switching(int(seed), int(count), how)
    if name == "beforehand":
        return beforehand()
    if name == "many_sets":
        return many_sets()
    if name.startswith("summed:"):
        return summed(name.partition(":")[2])
    if name.startswith("counted:"):
        return counted(name.partition(":")[2])
    if name.startswith("reload:"):
        return reload(name.partition(":")[2])
    return checkpoint(name.partition(":")[2]) if name.startswith("checkpoint:") else train(name, 40)


def main(wanted: list[str]) -> None:
    if os.environ.get("STAR_TEST_LOG"):
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    run_each(wanted, one, deadline)


if __name__ == "__main__":
    main(sys.argv[1:])
