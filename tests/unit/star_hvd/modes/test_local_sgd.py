"""Averagings of local steps: what the host waits for, and under which locks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.replica import ReplicaState
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.local_sgd import LocalSteps
from tests.support.world import Ears, Network, Port, World


def alone() -> tuple[World, StepEngine, LocalSteps]:
    """The only rank of a job, which has entered `local(1)`."""
    world = World(1, world_size=1, steps=2)
    world.run()
    engine = world.engines[0]

    def end_reductions() -> None:
        for name in world.network.ready():
            world.network.end(name)
        for handle in engine.own_step().all_handles():
            engine.collective.finish(handle)

    steps = LocalSteps(engine, end_reductions)
    engine.averaging = steps
    with engine.lock:
        engine.agreement.plan = Plan.local(1, steps=1, plan_id=1)
    return world, engine, steps.begin()


def watch_waits(engine: StepEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether another thread could have `apply_lock`, at every wait of the host for the device."""
    free: list[bool] = []

    def try_lock() -> bool:
        taken = engine.replica.apply_lock.acquire(blocking=False)
        if taken:
            engine.replica.apply_lock.release()
        return taken

    def await_host(deadline_s: float = 0.0) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(try_lock).result())

    monkeypatch.setattr(engine.streams, "await_host", await_host)
    return free


def test_an_averaging_of_the_training_thread_waits_for_the_device_without_a_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, engine, steps = alone()
    before = [param.detach().clone() for bucket in engine.applier.buckets for param in bucket.params]
    free, step = watch_waits(engine, monkeypatch), engine.step
    steps.average()
    assert free and all(free), "the helper and the tensor server wait for a device here"
    after = [param for bucket in engine.applier.buckets for param in bucket.params]
    assert engine.step == step + 1
    assert all(torch.allclose(a, b) for a, b in zip(before, after, strict=True)), "the mean of one rank is its own"


def test_step_hooks_are_left_to_the_caller() -> None:
    """They run around what happens in every mode, so once more here would be twice in a step."""
    _, engine, steps = alone()
    called: list[str] = []
    optimizer = engine.applier.optimizer
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    of_all = [
        register_optimizer_step_pre_hook(lambda *_: called.append("pre of all")),
        register_optimizer_step_post_hook(lambda *_: called.append("post of all")),
    ]
    try:
        steps.step(skip=False)
        assert called == []
        engine.applier.step(None)
        assert called == ["pre of all", "pre", "post", "post of all"]
    finally:
        for each in of_all:
            each.remove()


@pytest.mark.parametrize(
    ("local_s", "step_s", "counts"),
    [
        (1.0, [0.3] * 9, [3, 3, 3]),
        (0.6, [0.101] * 12, [6, 6]),
        (1.0, [0.6] * 3, [1, 1, 1]),
        (1.0, [4.0, 0.25, 0.25, 0.25, 0.25, 4.0], [1, 4, 1]),
        (1.0, [0.25, 0.5, 0.25, 0.25, 0.25, 0.25], [2, 4]),
    ],
)
def test_a_rank_makes_the_steps_that_fit_into_the_time(
    local_s: float, step_s: list[float], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("star_hvd.modes.local_sgd.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    _, engine, steps = alone()
    with engine.lock:
        engine.agreement.plan = Plan.local(1, seconds=local_s, plan_id=1)
    steps.begin()
    made, found = 0, []
    for each_s in step_s:
        now_s[0] += each_s
        steps.step(skip=False)
        made += 1
        if steps.just_averaged:
            found.append(made)
            made = 0
    assert found == counts


def averaging_without_the_training_thread(world: World, engine: StepEngine) -> None:
    engine.set_inactive(True)
    engine.close(engine.next_step)
    while engine.helper_has_work() and engine.replica.state is not ReplicaState.AVERAGE_PENDING:
        engine.helper_tick()
        for name in world.network.ready():
            world.network.end(name)
    engine.set_inactive(False)


@pytest.mark.parametrize("by_helper", [True, False])
def test_an_averaging_that_ended_without_it_waits_for_the_device_without_a_lock(
    monkeypatch: pytest.MonkeyPatch, by_helper: bool
) -> None:
    world, engine, steps = alone()
    averaging_without_the_training_thread(world, engine)
    assert steps.waiting and engine.replica.snapshot() is None
    free = watch_waits(engine, monkeypatch)
    if by_helper:
        assert steps.absorb() and not steps.waiting
        assert engine.replica.snapshot() is not None, "what the helper has on its shadow may be fetched"
    steps.take_over()
    assert engine.replica.state is ReplicaState.CURRENT and engine.step == engine.next_step
    assert free and free[0], "the other threads wait for a device here"


def test_a_gradient_outlives_an_averaging_that_ended_while_its_rank_was_inactive() -> None:
    pair = Pair()
    pair.engines[1].set_inactive(True)
    for _ in range(2):
        pair.step(0)
    help_for(pair, 1)
    pair.engines[1].set_inactive(False)
    assert not pair.steps[1].waiting, "the helper has written it to a shadow"
    pair.step(1)
    assert pair.value(1) == 2.0 + 3.0, "the mean is that of rank 0's steps alone, and this rank's own is made on it"


# ---- in the background ---------------------------------------------------------------------------------------------


class Pair:
    """Two ranks in `local(every)` whose gradients differ: -1 on rank 0 and -3 on rank 1, learning rate 1.

    Args:
        momentum: That of SGD.
        make: Returns another optimizer for some parameters.
        shapes: The parameters' shapes.
        every: Steps from one averaging to the next.
    """

    def __init__(
        self,
        momentum: float = 0.0,
        *,
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        shapes: tuple[tuple[int, ...], ...] = ((4,), (4,)),
        every: int = 2,
    ) -> None:
        self.network = Network(2)
        world = World(1, world_size=2)
        self.ears = [Ears(world, rank) for rank in range(2)]
        self.engines: list[StepEngine] = []
        self.steps: list[LocalSteps] = []
        for rank in range(2):
            params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
            optimizer = make(params) if make else torch.optim.SGD(params, lr=1.0, momentum=momentum)
            applier = Applier(optimizer, type(optimizer), pack(params, 16), HyperRow(optimizer.param_groups))
            engine = StepEngine(
                rank=rank, plan=Plan.sync(2), applier=applier, collective=Port(self.network, rank),
                listener=self.ears[rank],
            )
            with engine.lock:
                engine.agreement.plan = Plan.local(2, steps=every, plan_id=1)
            self.engines.append(engine)
            self.steps.append(LocalSteps(engine, lambda engine=engine: self.wait(engine), background=True).begin())
            engine.averaging = self.steps[-1]

    def wait(self, engine: StepEngine) -> None:
        """Only the reductions that the other rank has submitted too can end."""
        for handle in engine.own_step().all_handles():
            if not engine.collective.poll(handle):
                self.reduce()
            engine.collective.finish(handle)

    def reduce(self) -> None:
        for name in self.network.ready():
            self.network.end(name)

    def step(self, rank: int) -> None:
        for bucket in self.engines[rank].applier.buckets:
            bucket.flat.fill_(-1.0 - 2.0 * rank)
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
            self.steps[rank].give(bucket)
        self.steps[rank].step(skip=False)

    def value(self, rank: int) -> float:
        values = {float(x) for b in self.engines[rank].applier.buckets for p in b.params for x in p.detach()}
        assert len(values) == 1
        return values.pop()


def test_in_the_background_nothing_waits_and_later_steps_stay_in_the_parameters() -> None:
    pair = Pair()
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)  # Nothing has ended: a wait here would fail.
    assert (pair.value(0), pair.value(1)) == (2.0, 6.0) and pair.network.ready()
    pair.step(1)
    pair.reduce()
    assert pair.value(1) == 9.0, "parameters change in step() only"
    pair.step(0)
    pair.step(1)  # Its next averaging is due: it uses the one before first.
    assert pair.value(0) == 4.0 + 1.0, "mean of 2 and 6, and the step made since"
    assert pair.value(1) == 4.0 + 2 * 3.0
    assert [engine.step for engine in pair.engines] == [1, 1] and pair.engines[1].next_step == 2


def meet(pair: Pair) -> None:
    """Both ranks come to where all ranks meet, each in a thread of its own."""
    lock, limit_s = threading.Lock(), time.monotonic() + 60.0
    submit, pair.network.submit = pair.network.submit, None  # type: ignore[assignment,method-assign]

    def one_by_one(rank: int, name: str, tensor: torch.Tensor) -> int:
        with lock:
            return submit(rank, name, tensor)

    def wait(engine: StepEngine) -> None:
        for handle in engine.own_step().all_handles():
            while not engine.collective.poll(handle):
                assert time.monotonic() < limit_s
                with lock:
                    pair.reduce()
                time.sleep(0.0001)
            engine.collective.finish(handle)

    pair.network.submit = one_by_one  # type: ignore[method-assign]
    pair.wait = wait  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(steps.catch_up) for steps in pair.steps]:
            done.result()


def test_a_meeting_leaves_equal_replicas() -> None:
    pair = Pair(momentum=0.5)
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)
    pair.step(1)
    meet(pair)
    assert pair.value(0) == pair.value(1)
    momenta = [
        [engine.applier.optimizer.state[p]["momentum_buffer"] for b in engine.applier.buckets for p in b.params]
        for engine in pair.engines
    ]
    assert all(torch.equal(one, other) for one, other in zip(*momenta, strict=True))


def test_an_averaging_reports_no_gradient_norms() -> None:
    """The noise scale would take the norm of the averaged parameters for that of a gradient."""
    pair = Pair()
    for _ in range(4):
        for rank in range(2):
            pair.step(rank)
        pair.reduce()
    pair.steps[0].refresh_state()
    ears = pair.ears[0]
    assert [step for step, _ in ears.headers] == [0, 1], "norms of gradients would be due in step 0"
    assert [header.local_count for _, header in ears.headers] == [0, 0] and all(map(math.isnan, ears.mean_sqrs))
    assert all(header.weight == 4.0 for _, header in ears.headers), "two steps of two ranks"


def test_the_helper_of_an_inactive_rank_completes_an_averaging_and_adds_it_to_the_next() -> None:
    pair = Pair()
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)
    pair.step(1)  # 9: one step since its copy of 6.
    first, second = pair.engines
    second.set_inactive(True)
    assert not second.helper_has_work(), "as long as no other rank waits the training thread will do it"
    pair.reduce()
    pair.step(0)
    pair.step(0)  # 4 + 2, and its next averaging is due.
    assert pair.value(0) == 6.0
    second.close(second.next_step)
    for _ in range(20):
        second.helper_tick()
        pair.reduce()
    second.set_inactive(False)
    pair.steps[0].refresh_state()
    pair.steps[1].take_over()
    # Rank 1 had 4 + 3, of one step; rank 0 had 6, of two.
    assert pair.value(0) == pair.value(1) == pytest.approx((2 * 6.0 + 1 * 7.0) / 3)
    assert first.step == second.step == 2


def test_an_averaging_that_may_be_the_modes_last_is_waited_for() -> None:
    pair = Pair()
    for engine in pair.engines:
        assert engine.agreement.prepare(Plan.sync(2, plan_id=2)) is None
    for rank in range(2):
        pair.step(rank)
    waited: list[int] = []

    def wait(engine: StepEngine) -> None:
        waited.append(engine.rank)
        raise InterruptedError

    pair.wait = wait  # type: ignore[method-assign]
    for rank in range(2):
        with pytest.raises(InterruptedError):
            pair.step(rank)
    assert waited == [0, 1]


# ---- the optimizer's state ------------------------------------------------------------------------------------------


class Third(torch.optim.Adam):
    """Keeps plain numbers in its state, as optimizers outside torch do."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                self.state[param]["scale"] = self.state[param].get("scale", 1.0) * 0.9
        return value


OPTIMIZERS = [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad,
    torch.optim.ASGD, torch.optim.Adafactor, Third,
]  # fmt: skip


def states(pair: Pair, rank: int) -> list[Any]:
    """Parameters and state, in an order that both ranks share."""
    params = [param for bucket in pair.engines[rank].applier.buckets for param in bucket.params]
    state = pair.engines[rank].applier.optimizer.state
    values = [[param.detach(), *(state[param][key] for key in sorted(state[param]))] for param in params]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for each in values for value in each]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("in_flight", [False, True])
def test_ranks_that_made_different_numbers_of_steps_continue_equal(kind: Any, in_flight: bool) -> None:
    """An update depends on step counts too, so ranks whose counts differ would make others of the same gradient."""
    pair = Pair(make=lambda params: kind(params, lr=0.1), shapes=((2, 3), (4,), ()), every=2 if in_flight else 9)
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)
    pair.reduce()  # If one is due, an averaging in the background, whose mean rank 1 adds to a further step.
    pair.step(1)
    meet(pair)
    assert states(pair, 0) == states(pair, 1)
    for engine in pair.engines:  # What `sync` does next, with the mean of the gradients.
        for bucket in engine.applier.buckets:
            bucket.flat.fill_(0.5)
        engine.applier.step(None)
    assert states(pair, 0) == states(pair, 1)


def test_equal_step_counts_stay_whole_and_a_difference_keeps_the_steps_made_meanwhile() -> None:
    pair = Pair(make=lambda params: Third(params, lr=0.1))
    for rank in range(2):
        for _ in range(2):
            pair.step(rank)
    pair.step(1)
    pair.reduce()
    pair.step(0)
    for rank, count in ((0, 3), (1, 3)):
        state = pair.engines[rank].applier.optimizer.state
        if rank == 1:
            pair.steps[1].refresh_state()
        assert {float(values["step"]) for values in state.values()} == {count}
        assert {values["count"] for values in state.values()} == {count}
        assert all(type(values["count"]) is int for values in state.values())


def test_a_difference_that_an_inactive_rank_has_not_added_is_part_of_what_its_helper_contributes() -> None:
    pair = Pair(make=lambda params: torch.optim.NAdam(params, lr=0.1))
    for rank in range(2):
        for _ in range(2):
            pair.step(rank)
    pair.step(1)
    second = pair.engines[1]
    second.set_inactive(True)
    pair.reduce()
    pair.step(0)
    pair.step(0)
    second.close(second.next_step)
    for _ in range(20):
        second.helper_tick()
        pair.reduce()
    second.set_inactive(False)
    pair.steps[0].refresh_state()
    pair.steps[1].take_over()
    assert states(pair, 0) == states(pair, 1)
    counts = {float(values["step"]) for values in pair.engines[0].applier.optimizer.state.values()}
    assert counts == {float(torch.tensor((2 * 4 + 1 * 3) / 3))}


# ---- a state that the program loads ----------------------------------------------------------------------------------


def load(engine: StepEngine, value: float, *, state_too: bool) -> None:
    """The program loads parameters and, as `load_state_dict` of the optimizer says, its state."""
    with torch.no_grad():
        for bucket in engine.applier.buckets:
            for param in bucket.params:
                param.fill_(value)
    if state_too:
        engine.replica.set_aside(state_loaded=True)


@pytest.mark.parametrize("state_too", [False, True])
@pytest.mark.parametrize("before", [1.0, float("nan")])
def test_an_averaging_in_flight_is_not_added_to_what_all_ranks_have_loaded_since(
    state_too: bool, before: float
) -> None:
    pair = Pair()
    for _ in range(2):
        for rank in range(2):
            load(pair.engines[rank], before, state_too=False)
            pair.step(rank)
    for rank in range(2):
        load(pair.engines[rank], 10.0, state_too=state_too)
    pair.reduce()
    for rank in range(2):
        pair.step(rank)
    assert (pair.value(0), pair.value(1)) == (11.0, 13.0), "the steps made since, on what was loaded"
    assert [engine.step for engine in pair.engines] == [1, 1] and not any(steps.in_flight for steps in pair.steps)
    meet(pair)
    assert pair.value(0) == pair.value(1) == 12.0


def test_an_averaging_in_flight_has_ended_on_all_ranks_once_the_mode_is_shut_down() -> None:
    """Seen on a quarter of the ranks: one rank had counted the step, another had not, as if replicas differed."""
    pair = Pair()
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)
    for rank in range(2):
        load(pair.engines[rank], 10.0, state_too=True)
    pair.reduce()
    pair.step(1)  # It has seen the averaging end; the other rank has not.
    load(pair.engines[1], 10.0, state_too=True)
    for steps in pair.steps:
        steps.shutdown()
    assert [engine.step for engine in pair.engines] == [1, 1] and not any(steps.in_flight for steps in pair.steps)
    assert (pair.value(0), pair.value(1)) == (10.0, 10.0)


def test_a_rank_that_alone_loads_a_state_is_equal_to_the_others_after_the_next_averaging() -> None:
    pair = Pair()
    for _ in range(2):
        for rank in range(2):
            pair.step(rank)
    load(pair.engines[1], 10.0, state_too=True)
    pair.reduce()
    for rank in range(2):
        pair.step(rank)
    assert (pair.value(0), pair.value(1)) == (5.0, 13.0)
    meet(pair)
    assert pair.value(0) == pair.value(1)
    assert states(pair, 0) == states(pair, 1)


@pytest.mark.parametrize("by_helper", [False, True])
def test_an_averaging_that_ended_without_it_does_not_replace_what_a_rank_has_loaded_since(by_helper: bool) -> None:
    world, engine, steps = alone()
    steps.step(skip=False)
    averaging_without_the_training_thread(world, engine)
    assert steps.waiting
    if by_helper:
        assert steps.absorb() and not steps.waiting
    load(engine, 10.0, state_too=True)
    steps.take_over()
    assert all(bool((param == 10.0).all()) for bucket in engine.applier.buckets for param in bucket.params)
    assert engine.replica.state is ReplicaState.CURRENT and engine.step == engine.next_step and not steps.waiting


# ---- other values in the parameters' place, for a while --------------------------------------------------------------


def help_for(pair: Pair, rank: int) -> None:
    """The coordinator closes the step that this inactive rank is missing in."""
    engine = pair.engines[rank]
    engine.close(engine.next_step)
    for _ in range(20):
        engine.helper_tick()
        pair.reduce()


def averaged_without_the_second(times: int = 1) -> Pair:
    """Rank 1 has made a step and evaluates other values, inactive, while rank 0 comes to averagings."""
    pair = Pair(momentum=0.5)
    pair.step(1)
    load(pair.engines[1], 1000.0, state_too=False)
    pair.engines[1].set_inactive(True)
    for _ in range(times):
        for _ in range(2):
            pair.step(0)
        help_for(pair, 1)
        pair.steps[0].refresh_state()
    assert pair.value(1) == 1000.0, "nothing is written in their place"
    return pair


def test_values_that_a_rank_evaluates_in_the_parameters_place_get_into_no_average() -> None:
    pair = averaged_without_the_second()
    assert pair.value(0) == 1.0 + 1.5 and pair.engines[0].step == 1
    load(pair.engines[1], 3.0, state_too=False)  # The former ones.
    pair.engines[1].set_inactive(False)
    pair.steps[1].take_over()
    assert pair.value(1) == pytest.approx((2 * 2.5 + 1 * 3.0) / 3), "as if it had been in the averaging"
    assert pair.engines[1].replica.state is ReplicaState.CURRENT and pair.engines[1].step == 1
    mine = pair.value(1)
    pair.step(0)
    meet(pair)
    assert pair.value(0) == pair.value(1) == pytest.approx((4.25 + mine) / 2), "its step counts here"
    assert states(pair, 0) == states(pair, 1)


def test_after_several_averagings_a_rank_that_was_left_out_counts_as_much_less() -> None:
    pair = averaged_without_the_second(times=2)
    load(pair.engines[1], 3.0, state_too=False)
    pair.engines[1].set_inactive(False)
    theirs = pair.value(0)
    pair.steps[1].take_over()
    assert pair.value(1) == pytest.approx((2 * theirs + 0.5 * 3.0) / 2.5)


def test_the_helper_uses_no_averaging_to_which_a_rank_is_adding_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = averaged_without_the_second()
    load(pair.engines[1], 3.0, state_too=False)
    second = pair.engines[1]
    second.set_inactive(False)
    copying = second.replica.copying

    @contextlib.contextmanager
    def then_the_helper() -> Iterator[None]:
        with copying():
            yield
        second.helper_tick()

    monkeypatch.setattr(second.replica, "copying", then_the_helper)
    pair.steps[1].take_over()
    assert pair.value(1) == pytest.approx((2 * 2.5 + 1 * 3.0) / 3)


def test_a_mode_that_ends_with_such_an_averaging_leaves_equal_replicas() -> None:
    pair = averaged_without_the_second()
    second = pair.engines[1]
    with second.lock:
        second.agreement.plan = Plan.sync(2, plan_id=2)
    load(second, 3.0, state_too=False)
    second.set_inactive(False)
    pair.steps[1].exit()
    assert states(pair, 0) == states(pair, 1)


def test_an_averaging_without_any_rank_changes_nothing() -> None:
    pair = Pair()
    for rank in range(2):
        pair.step(rank)
        load(pair.engines[rank], 1000.0, state_too=False)
        pair.engines[rank].set_inactive(True)
        pair.engines[rank].close(0)
    for _ in range(20):
        for engine in pair.engines:
            engine.helper_tick()
        pair.reduce()
    for rank, engine in enumerate(pair.engines):
        load(engine, 1.0 + 2.0 * rank, state_too=False)
        engine.set_inactive(False)
        with engine.lock:
            engine.agreement.plan = Plan.sync(2, plan_id=2)  # Else a rank takes what it would have contributed.
        pair.steps[rank].take_over()
        assert pair.value(rank) == 1.0 + 2.0 * rank and engine.step == 1
