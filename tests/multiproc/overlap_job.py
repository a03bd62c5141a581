"""Programs that train once without and once with `overlap=True`: what every rank of the test's job runs.

A program returns facts about what it read on its way and what it ended with; the test compares the two.
"""

from __future__ import annotations

import collections
import copy
import gc
import hashlib
import logging
import os
import pickle
import random
import sys
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.errors import StarError
from tests.multiproc.drawn_models import ACTIONS, DrawnNet, drawn_optimizer
from tests.multiproc.modes import go_into, within
from tests.support.effort import cases
from tests.support.inside import driver_of, inside
from tests.support.launch import write_result

Facts = dict[str, Any]
Program = Callable[[bool], Facts]

PROGRAMS: dict[str, Program] = {}
STEPS = 8


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Net(torch.nn.Module):
    """A frozen layer, a shared parameter, a layer used twice, one used by another module, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.twice = torch.nn.Linear(8, 8)
        self.rnn = torch.nn.GRU(8, 8)
        self.other = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.out = torch.nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.twice(torch.tanh(self.twice(self.frozen(self.embed(x))))))
        y, _ = self.rnn(y)
        y = torch.nn.functional.linear(y, self.other.weight, self.other.bias).mean(0)
        return self.out(self.norm(y))


def digest(tensors: Any) -> str:
    raw = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).hexdigest()[:16]


def state_digest(optimizer: Any) -> str:
    state = optimizer.state_dict()["state"]
    return digest(v for key in sorted(state) for v in state[key].values() if isinstance(v, torch.Tensor))


def make(overlap: bool | str, kind: str = "sgd", **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net()
    if kind == "sgd":
        own: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    elif kind == "adafactor":
        own = torch.optim.Adafactor(net.parameters(), lr=1e-2)
    elif kind == "nadam":
        own = torch.optim.NAdam(net.parameters(), lr=1e-2)
    else:
        own = torch.optim.AdamW(net.parameters(), lr=1e-2)
    options = {"mode": "sync", "overlap": overlap} | options
    optimizer = hvd.DistributedOptimizer(own, net.named_parameters(), **options)
    assert len(inside(optimizer).core.buckets) > 3, "there is nothing to overtake"
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    return net, optimizer


def loss_of(net: Net, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * int(hvd.rank()) + number)
    x = torch.randint(0, 12, (3, 6), generator=generator)
    return torch.nn.functional.cross_entropy(net(x), x[0])


def step(net: Net, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(net, number)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def clipped_step(net: torch.nn.Module, optimizer: Any) -> None:
    """Clip by hand between the reduction and the step."""
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def pending(optimizer: Any) -> bool:
    overlapped = driver_of(optimizer).overlapped
    return overlapped is not None and overlapped.pending


def end(net: Net, optimizer: Any, **facts: Any) -> Facts:
    state = state_digest(optimizer)
    facts |= {"params": digest(net.parameters()), "state": state, "steps": optimizer.stats()["steps"]}
    optimizer.close()
    return facts


def plain(overlap: bool, kind: str) -> Facts:
    net, optimizer = make(overlap, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    losses, went_on = [], 0
    for number in range(STEPS):
        losses.append(step(net, optimizer, number))
        scheduler.step()
        went_on += pending(optimizer)
    assert went_on == (STEPS if overlap else 0), f"{went_on} of {STEPS} steps overlapped"
    return end(net, optimizer, losses=losses)


@program
def sgd(overlap: bool) -> Facts:
    return plain(overlap, "sgd")


@program
def adamw(overlap: bool) -> Facts:
    return plain(overlap, "adamw")


@program
def one_call(overlap: bool) -> Facts:
    """Where all reductions have ended before the next forward pass, one call of the optimizer applies all buckets."""
    net, optimizer = make(overlap)
    module, calls = sys.modules["torch.optim.sgd"], []
    apply = module.sgd

    def counting(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        apply(params, *args, **kwargs)

    with unittest.mock.patch.object(module, "sgd", counting):
        for number in range(STEPS):
            step(net, optimizer, number)
            if overlap:
                engine, began_s = driver_of(optimizer).engine, time.monotonic()
                while within(began_s) and not all(map(engine.collective.poll, engine.own_step().all_handles())):
                    time.sleep(0.001)
                last = engine.applier.buckets[-1]
                assert driver_of(optimizer).overlapped.waits_for(last.index)
                last.params[0].sum()
                assert not pending(optimizer), "a bucket is left whose reduction had ended"
    return end(net, optimizer, calls=calls)


@program
def reads(overlap: bool) -> Facts:
    """Checkpoints, evaluations, averages, norms and collectives between steps, and lists made long before."""
    net, optimizer = make(overlap)
    listed, seen = list(net.parameters()), []
    average = torch.optim.swa_utils.AveragedModel(net)
    for number in range(3 * STEPS):
        step(net, optimizer, number)
        kind = number % 8
        if kind == 0:
            seen.append(digest(net.state_dict().values()))
        elif kind == 1:
            seen.append(state_digest(optimizer))
        elif kind == 2:
            with torch.no_grad():
                seen.append(float(loss_of(net, 99)))
        elif kind == 3:
            average.update_parameters(net)
        elif kind == 4:
            seen.append(float(sum(param.square().sum() for param in listed)))
        elif kind == 5:
            seen.append(digest(copy.deepcopy(net).parameters()))
        elif kind == 6:
            seen.append(float(hvd.allreduce(listed[0].detach().sum(), name="read")))
        else:
            seen.append(digest(param.grad for param in listed if param.grad is not None))
    return end(net, optimizer, seen=seen, average=digest(average.parameters()))


@program
def writes(overlap: bool) -> Facts:
    """Parameters and state that the program changes between steps."""
    net, optimizer = make(overlap)
    kept = None
    for number in range(STEPS):
        step(net, optimizer, number)
        if number == 1:
            kept = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        elif number == 3:
            with torch.no_grad():
                for param in net.parameters():
                    param.mul_(0.5)
        elif number == 5:
            net.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        elif number == 6:
            hvd.broadcast_parameters(net.state_dict(), root_rank=1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    return end(net, optimizer)


@program
def state_used(overlap: bool) -> Facts:
    """The optimizer's state, which the program reads, changes, clears and replaces right after a step."""
    net, optimizer = make(overlap)
    weight, seen = net.other.weight, []
    for number in range(2 * STEPS):
        step(net, optimizer, number)
        assert pending(optimizer) == overlap
        if number in (0, 1):
            seen.append(digest([optimizer.state[weight]["momentum_buffer"]]))
        elif number == 3:
            optimizer.state[weight]["momentum_buffer"].zero_()
        elif number == 5:
            optimizer.state.clear()
        elif number == 7:
            copied = pickle.loads(pickle.dumps(optimizer.__getstate__()))
            found = [copied["state"].get(param, {}) for param in copied["param_groups"][0]["params"]]
            seen.append(digest(state["momentum_buffer"] for state in found if state))
        elif number == 9:
            optimizer.state = collections.defaultdict(dict, {weight: dict(optimizer.state[weight])})
            seen.append(optimizer.__dict__["state"] is optimizer.state and len(optimizer.state))
    return end(net, optimizer, seen=seen)


@program
def surroundings(overlap: bool) -> Facts:
    """Parameters are first used under autocast, a default device or data type, or inside a transform of functions."""
    net, optimizer = make(overlap, "adafactor")
    weight, dtype = net.twice.weight, torch.get_default_dtype()
    for number in range(2 * STEPS):
        step(net, optimizer, number)
        assert pending(optimizer) == overlap
        if number % 4 == 0 and int(hvd.rank()) == 0:
            weight.norm()  # Else under autocast, as on the other rank.
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(net, 99)
    first = end(net, optimizer)
    net, optimizer = make(overlap, "nadam")
    weight = net.twice.weight
    step(net, optimizer, 0)
    with torch.device("meta"):
        optimizer.state_dict()
    step(net, optimizer, 1)
    try:
        torch.set_default_dtype(torch.float64)
        optimizer.state.clear()
        step(net, optimizer, 2)
        torch.set_default_dtype(dtype)
        weight.norm()
    finally:
        torch.set_default_dtype(dtype)
    step(net, optimizer, 3)
    torch.func.grad(lambda x: (x @ net.twice.weight).sum())(torch.ones(8))
    optimizer.state_dict()
    kinds = sorted({str(value.dtype) for one in optimizer.state.values() for value in one.values()})
    return end(net, optimizer, first=first, kinds=kinds)


@program
def clamped(overlap: bool) -> Facts:
    """The program changes parameters in every step, which forbids relaxed modes; one that does not may have them."""
    pinned, went_on = [], 0
    for kind in ("none", "seen", "unseen"):
        net, optimizer = make(overlap, mode="auto")
        for number in range(STEPS):
            step(net, optimizer, number)
            went_on += pending(optimizer)
            if kind == "none" and number % 2:
                net.state_dict()
            with torch.no_grad():
                for param in net.parameters() if kind != "none" else ():
                    (param if kind == "seen" else param.data).clamp_(-0.3, 0.3)
        pinned.append(driver_of(optimizer).engine.agreement.pinned)
        optimizer.close()
    assert pinned[0] is None and all("changes parameters itself" in str(reason) for reason in pinned[1:]), pinned
    assert (went_on > STEPS) == overlap
    return {"pinned": pinned}


@program
def gradients(overlap: bool) -> Facts:
    """All ways to clear gradients, and none; several passes."""
    net, optimizer = make(overlap, backward_passes_per_step=2)
    for number in range(2 * STEPS):
        if number % 4 == 0:
            optimizer.zero_grad(set_to_none=False)
        elif number % 4 == 1:
            net.zero_grad()
        elif number % 4 == 2:
            for param in net.parameters():
                param.grad = None
        for part in range(2):
            loss_of(net, 2 * number + part).backward()
        optimizer.step()
    return end(net, optimizer)


@program
def late_clear(overlap: bool) -> Facts:
    """Gradients are cleared between forward and backward, while a part of the step is applied."""
    net, optimizer = make(overlap)
    for number in range(STEPS):
        loss = loss_of(net, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return end(net, optimizer)


@program
def exceptions(overlap: bool) -> Facts:
    """The program raises between and inside its steps, on all ranks, and goes on."""
    net, optimizer = make(overlap)
    for number in range(STEPS):
        try:
            optimizer.zero_grad()
            loss = loss_of(net, number)
            if number == 2:
                raise ValueError("before backward")
            loss.backward()
            optimizer.step()
            if number == 4:
                raise ValueError("after the step")
        except ValueError:
            pass
    return end(net, optimizer)


@program
def by_hand(overlap: bool) -> Facts:
    """What needs the whole gradient does not overlap, and the reason is logged once."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("star_hvd").addHandler(handler)
    net, optimizer = make(overlap)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, number).backward()
        if number in (2, 3):
            clipped_step(net, optimizer)
        else:
            optimizer.step()
    first = end(net, optimizer)
    net, optimizer = make(overlap, max_grad_norm=0.1)
    for number in range(STEPS):
        step(net, optimizer, number)
    second = end(net, optimizer)
    net, optimizer = make(overlap)
    called: list[int] = []
    hook = optimizer.register_step_post_hook(lambda *_: called.append(1))
    for number in range(STEPS):
        step(net, optimizer, number)
        if number == 4:
            hook.remove()
    logging.getLogger("star_hvd").removeHandler(handler)
    off = [record for record in records if record.startswith("overlap is off")]
    assert len(off) == (3 if overlap else 0), off
    return end(net, optimizer, called=len(called), first=first, second=second)


@program
def refused(overlap: bool) -> Facts:
    """What one rank refuses is off on all of them, with its order and its trials, until a while after; it says why."""
    net, optimizer = make("auto" if overlap else False)
    hook = optimizer.register_step_post_hook(lambda *_: None) if int(hvd.rank()) == 0 else None
    seen = []
    for number in range(40):
        if number == 12 and hook is not None:
            hook.remove()
        step(net, optimizer, number)
        optimizer.state_dict()
        if overlap and number in (0, 4, 11, 13, 39):
            held_back, said = driver_of(optimizer).engine.collective.ordered, driver_of(optimizer).overlapped.describe()
            seen.append((number, held_back, said))
    if overlap:
        why = "overlap is off: " + ("step hooks see the whole step" if hook else "another rank does not")
        assert [number for number, held_back, _ in seen if held_back] == [0, 39], seen
        assert [number for number, _, said in seen if said.startswith(why)] == [0, 4, 11, 13][hook is None :], seen
        assert seen[-1][-1] in ("", "overlap is being tried: 0 pairs of blocks of 16 steps so far"), seen
        assert ("step hooks" in str(seen[1])) == (hook is not None)
    first = end(net, optimizer)
    net, optimizer = make(overlap, max_grad_norm=0.1)
    for number in range(12):
        step(net, optimizer, number)
    said = hvd.explain()
    assert ("; overlap is off: max_grad_norm needs" in said) == (overlap and hook is not None), said
    assert "overlap='auto'" not in said or not overlap, said
    assert not hasattr(driver_of(optimizer).engine.collective, "ordered")
    return end(net, optimizer, first=first)


@program
def dropped(overlap: bool) -> Facts:
    """The optimizer is gone before its last step has ended: the parameters still get it."""
    net, optimizer = make(overlap)
    for number in range(STEPS):
        step(net, optimizer, number)
    del optimizer
    gc.collect()
    return {"params": digest(net.parameters())}


@program
def two(overlap: bool) -> Facts:
    """Two optimizers take turns."""
    first, second = make(overlap), make(overlap, "adamw")
    for number in range(STEPS):
        step(*first, number)
        step(*second, number)
        if number % 3 == 0:
            step(*first, 100 + number)
    return {"first": end(*first), "second": end(*second)}


@program
def shared(overlap: bool) -> Facts:
    """Two optimizers have a layer in common: neither overlaps as long as both are there."""
    net, first = make(overlap)
    second = hvd.DistributedOptimizer(
        torch.optim.SGD(net.other.parameters(), lr=0.05), net.other.named_parameters(), mode="sync", overlap=overlap
    )
    went_on = []
    for number in range(STEPS):
        first.zero_grad()
        loss_of(net, number).backward()
        first.step()
        second.step()
        went_on.append(pending(first) or pending(second))
    second.close()
    for number in range(STEPS):
        step(net, first, number)
        went_on.append(pending(first))
    assert went_on == [False] * STEPS + [overlap] * STEPS, went_on
    return end(net, first)


@program
def auto(overlap: bool) -> Facts:
    """Tried in blocks, by both ranks in the same steps; then decided."""
    net, optimizer = make("auto" if overlap else False)
    went_on = []
    for number in range(64 + 8 + 3 * 32 + 4):
        step(net, optimizer, number)
        went_on.append(pending(optimizer))
    assert hvd.allgather_object(went_on, name="blocks") == [went_on] * 2
    assert 0 < sum(went_on) < len(went_on) or not overlap
    assert ("overlap is" in hvd.explain()) == (overlap and int(hvd.rank()) == 0), hvd.explain()
    told = driver_of(optimizer).reporter.decisions
    assert set(told) <= {"buckets together", "overlap"} and bool(told) == (overlap and int(hvd.rank()) == 0), told
    return end(net, optimizer)


@program
def auto_again(overlap: bool) -> Facts:
    """Steps become clearly longer behind the verdict: both ranks try again, in the same steps."""
    net, optimizer = make("auto" if overlap else False)
    overlapped = driver_of(optimizer).overlapped
    number, said = 0, []
    for longer_s, steps in ((0.0, 64 + 8 + 8 * 32), (0.04, 4 * 16)):
        for _ in range(steps):
            if longer_s:
                time.sleep(longer_s)
            step(net, optimizer, number)
            number += 1
        said.append(overlapped.describe() if overlap else "")
    assert any("tried again" in text for text in said) or not overlap, said  # A busy machine may have had it earlier.
    assert hvd.allgather_object(said, name="again") == [said] * 2
    return end(net, optimizer)


@program
def switching(overlap: bool) -> Facts:
    """From `sync` to relaxed modes and back; what fixes the outcome is that replicas are equal and nothing is lost."""
    net, optimizer = make(overlap)
    number, went_on = 0, 0
    for mode in ("partial(1)", "sync", "ps(2)", "sync", "local(2)", "sync"):
        number = go_into(optimizer, mode, lambda number: step(net, optimizer, number), number)
        hvd.barrier()
        for _ in range(STEPS):
            step(net, optimizer, number)
            number += 1
            went_on += pending(optimizer) and mode == "sync"
    optimizer.close()
    stats = optimizer.stats()
    found_again = sum(stats[f"{name}_weight"] for name in ("applied", "damped", "dropped", "pending"))
    lost = stats["produced_weight"] - found_again
    found = hvd.allgather_object((digest(net.parameters()), went_on > STEPS), name="switched")
    equal = all(each == (found[0][0], overlap) for each in found)
    return {"equal": equal, "lost": abs(lost) > 1e-6, "mismatches": stats["mismatches"]}


@program
def new_group(overlap: bool) -> Facts:
    """Layers are added behind a step that is still under way."""
    net, optimizer = make(overlap)
    extra = torch.nn.Linear(12, 12)
    for number in range(2 * STEPS):
        if number == STEPS:
            assert pending(optimizer) == overlap
            optimizer.add_param_group({"params": list(extra.parameters())})
            hvd.broadcast_parameters(extra.state_dict(), root_rank=0)
        optimizer.zero_grad()
        loss = loss_of(net, number)
        (loss + extra(net.out.weight.mean(1)).sum() if number >= STEPS else loss).backward()
        optimizer.step()
    return end(net, optimizer, extra=digest(extra.parameters()))


@program
def all_frozen(overlap: bool) -> Facts:
    """No parameter is trained at first; what is added later overlaps, and the sizes of its buckets are searched for."""
    torch.manual_seed(3)
    net = Net().requires_grad_(False)
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(own, net.named_parameters(), mode="sync", overlap=overlap)
    for _ in range(STEPS):
        optimizer.zero_grad()
        optimizer.step()
        assert not pending(optimizer)
    overlapped = driver_of(optimizer).overlapped
    assert overlapped is None or overlapped.describe() == "overlap is off: there is no trained parameter"
    went_on = 0
    for number in range(24 + 6 * 10 + STEPS):
        if number == 0:
            optimizer.add_param_group({"params": list(layers.parameters())})
        optimizer.zero_grad()
        layers(torch.full((2, 8), 1.0 + number % 3 + int(hvd.rank()))).square().mean().backward()
        optimizer.step()
        went_on += pending(optimizer)
    assert (went_on > 6 * 10) == overlap, went_on
    assert overlapped is None or overlapped.describe().startswith("buckets reduced at once: "), overlapped.describe()
    return end(net, optimizer, layers=digest(layers.parameters()))


@program
def unfrozen(overlap: bool) -> Facts:
    """A layer that was frozen when the optimizer was wrapped is trained: no bucket has it."""
    net, optimizer = make(overlap)
    before = digest(net.frozen.parameters())
    for number in range(STEPS):
        net.frozen.requires_grad_(number >= STEPS // 2)
        step(net, optimizer, number)
    optimizer.synchronize()
    facts = end(net, optimizer, moved=digest(net.frozen.parameters()) != before)
    return {"own": facts.pop("params"), **facts}  # Each rank's: nothing reduces that layer, as under Horovod.


@program
def failing(overlap: bool) -> Facts:
    """The user's optimizer raises while one parameter is updated; the step counts, and the program goes on."""
    net, optimizer = make(overlap)
    state, kept, raised = optimizer.state, None, 0
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, number).backward()
        if number == 3:
            kept, state[net.other.weight]["momentum_buffer"] = state[net.other.weight]["momentum_buffer"], "damaged"
        try:
            optimizer.step()
            optimizer.state_dict()  # Waits for a step that is under way.
        except AttributeError:
            raised += 1
        if number == 3:
            state[net.other.weight]["momentum_buffer"] = kept
    return {"raised": raised > 0, "steps": optimizer.stats()["steps"]}


@program
def forked(overlap: bool) -> Facts:
    """A child that is forked while a step is under way reads the optimizer's state and ends."""
    net, optimizer = make(overlap)
    for number in range(STEPS):
        step(net, optimizer, number)
    assert pending(optimizer) == overlap
    child = os.fork()
    if child == 0:
        optimizer.state_dict()
        os._exit(7)
    began_s, status = time.monotonic(), None
    while status is None and within(began_s):
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.05)
    return end(net, optimizer, child=status)


@program
def old_graph(overlap: bool) -> Facts:
    """Backward through a graph made before `step()`: its gradient would be lost, so it is refused."""
    net, optimizer = make(overlap)
    for number in range(STEPS):
        step(net, optimizer, number)
    first, second = loss_of(net, 50), loss_of(net, 51)
    optimizer.zero_grad()
    first.backward()
    optimizer.step()
    refused = False
    if overlap:
        try:
            second.backward()
        except StarError:
            refused = True
    return {"refused": refused == overlap}


@program
def low_rank(overlap: bool) -> Facts:
    """Every form of `Compression.auto` is tried, some of them with another name for some buckets.

    None is where rank 0 hardly waits for reductions, as on a busy machine that computes slowly: the other rank is late.
    Where even that is little beside a step, the next trial shows it.
    """
    net, optimizer = make(overlap, compression=hvd.Compression.auto)
    forms, began_s, found = set(), time.monotonic(), False
    while not found:
        for number in range(60):
            time.sleep(0.02 * int(hvd.rank()))
            step(net, optimizer, number)
            forms.add(inside(optimizer).core.wire.form)
        found = not overlap or all(hvd.allgather_object(len(forms) == 3, name="all forms"))
        assert found or within(began_s), forms
    hvd.barrier()
    return {"ended": True}


@program
def compute_bound(overlap: bool) -> Facts:
    """A step in which reductions have long ended when its parameters are used: no form of them can shorten it."""
    for _ in range(5 if overlap else 1):  # A rank that loses its core waits for reductions all the same.
        net, optimizer = make(overlap, compression=hvd.Compression.auto)
        forms = set().union(*hvd.allgather_object(_wanted_forms(net, optimizer, overlap), name="wanted forms"))
        optimizer.close()
        if forms == {0}:
            break
    return {"forms": sorted(forms)}


@program
def drawn(overlap: bool) -> Facts:
    """Networks and programs drawn at random (`drawn_models`)."""
    facts, went_on = {}, 0
    for seed in range(cases(16)):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        net = DrawnNet(rng)
        optimizer = hvd.DistributedOptimizer(
            drawn_optimizer(rng, net), net.named_parameters(), mode="sync", overlap=overlap
        )
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        generator, seen = torch.Generator().manual_seed(100 * seed + int(hvd.rank())), []
        for number in range(STEPS):
            optimizer.zero_grad(set_to_none=rng.random() < 0.5)
            loss = net(torch.randn(3, net.width, generator=generator), number).square().mean()
            loss.backward()
            if seed % 8 == 7 and number == STEPS - 3:  # Ends the overlap.
                clipped_step(net, optimizer)
            else:
                optimizer.step()
            went_on += pending(optimizer)
            seen.append((float(loss.detach()), *(rng.choice(ACTIONS)(net, optimizer, digest) for _ in range(2))))
        facts[f"seed {seed}"] = end(net, optimizer, seen=seen)
    assert (went_on > len(facts)) == overlap, f"{went_on} steps overlapped"
    return facts


def _wanted_forms(net: Net, optimizer: Any, overlap: bool) -> set[int]:
    """The forms of gradients that this rank wants in steps that wait for no reduction."""
    forms, engine = set(), driver_of(optimizer).engine
    for number in range(24 if overlap else 1):
        step(net, optimizer, number)
        if overlap:
            began_s = time.monotonic()
            while within(began_s) and not all(map(engine.collective.poll, engine.own_step().all_handles())):
                time.sleep(0.001)
            time.sleep(0.05)
        forms.add(inside(optimizer).core.wire.wanted)
    return forms


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    hvd.init()
    facts: dict[str, list[Facts]] = {}
    for name, function in PROGRAMS.items():
        if not names or name in names:
            write_result({"running": name, "facts": facts})
            facts[name] = [function(False), function(True)]
    write_result({"facts": facts})
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
