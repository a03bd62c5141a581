"""`Replica` under its calls in any order: what it holds, what it gives away, and its table of transitions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from star_hvd.engine import replica as module
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Counters, Result, Snapshot
from star_hvd.engine.replica import Replica, ReplicaState
from tests.support.effort import cases

SIZE = 3
Values = tuple[list[torch.Tensor], list[dict[str, object]]]


def transitions() -> dict[str, dict[ReplicaState, set[ReplicaState]]]:
    """The table in the module's text: per call and state the states that can follow."""
    found: dict[str, dict[ReplicaState, set[ReplicaState]]] = {}
    for call, before, after in re.findall(r"^    (\w+)  +(\S.*?)   +(\S.*)$", module.__doc__ or "", re.MULTILINE):
        known = found.setdefault(call, {})
        others = [state for state in ReplicaState if state not in known]
        for state in others if before.startswith("any") else [ReplicaState[name] for name in before.split(", ")]:
            known[state] = {state if a == "the same" else ReplicaState[a] for a in after.split(", ")}
    return found


TABLE = transitions()


def test_two_steps_that_were_not_to_be_replayed_leave_what_has_to_be_fetched() -> None:
    calls = Calls()
    calls.begin()
    for _ in range(2):
        calls.step_without_it()
        calls.catch_up()
        calls.the_last_one_was_not_to_be_replayed()
        calls.complete_parameters_are_those_of_their_step()
        assert calls.replica.state is ReplicaState.STALE


@pytest.mark.parametrize("by_helper", [False, True])
def test_steps_are_not_applied_to_what_the_program_has_loaded(by_helper: bool) -> None:
    applier = new_applier()
    lock = threading.Condition(threading.RLock())
    replica = Replica(applier, lock, Counters(), lambda: None)
    with replica.writing():
        pass  # The end of a step.
    with torch.no_grad():
        for param in applier.buckets[0].params:
            param.fill_(3.0)
    assert replica.loaded and replica.left_alone
    replica.set_aside(state_loaded=True)
    assert replica.left_alone and replica.state_loaded and not replica.displaced
    with lock:
        replica.push(Result(0, [bucket.new_flat() for bucket in applier.buckets], None))
    if by_helper:
        replica.replay_one()
    else:
        replica.catch_up()
    assert replica.state is ReplicaState.STALE, "it has to be fetched"
    assert all(float(param.detach().min()) == 3.0 for param in applier.buckets[0].params)
    replica.accept()
    assert not replica.left_alone and not replica.state_loaded


def test_the_table_of_transitions_is_complete() -> None:
    assert len(TABLE) >= 12
    for call, known in TABLE.items():
        assert set(known) == set(ReplicaState), f"{call} says nothing of {set(ReplicaState) - set(known)}"
        assert hasattr(Replica, call)


def new_applier() -> Applier:
    torch.manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(SIZE)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return Applier(optimizer, torch.optim.SGD, pack(params, 4 * SIZE), HyperRow(optimizer.param_groups))


def values_of(applier: Applier) -> Values:
    params = [param for bucket in applier.buckets for param in bucket.params]
    states = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in applier.optimizer.state.get(p, {}).items()}
        for p in params
    ]
    return [param.detach().clone() for param in params], states


def same(mine: Values, theirs: Values) -> bool:
    if not all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True)):
        return False
    return all(
        a.keys() == b.keys()
        and all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)
        for a, b in zip(mine[1], theirs[1], strict=True)
    )


class Calls(RuleBasedStateMachine):
    """One rank's replica beside a job that never falls behind.

    `history[k]` is what parameters and optimizer state are after k steps of the job. `ended` is how many of them have
    ended as far as this rank knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job = new_applier()
        self.history = [values_of(self.job)]
        self.lock = threading.Condition(threading.RLock())
        self.counters = Counters()
        self.replica = Replica(new_applier(), self.lock, self.counters, lambda: None)
        self.outside = False  # At servers or at a parent.
        self.dropped = False
        self.average: int | None = None  # The step of an averaging that this rank has to write.
        self.last_pushed: int | None = None
        self.has_wrong_step = False  # Whether the live parameters contain a step that was not to be replayed.

    @initialize()
    def begin(self) -> None:
        """The momentum of the first step is there on all ranks."""
        self.own_step()

    @property
    def ended(self) -> int:
        return len(self.history) - 1

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Make a call, and check the transition against the module's table."""
        before = self.replica.state
        found = function()
        after = self.replica.state
        assert after in TABLE[name][before], f"{name}: {before.name} -> {after.name} is not in the table"
        return found

    def job_steps(self, *, manual: bool = False) -> list[torch.Tensor]:
        """The job makes a step: its means."""
        means = [torch.randn(bucket.flat.shape) for bucket in self.job.buckets]
        self.job.step_with([mean * (0.5 if manual else 1.0) for mean in means], None)
        self.history.append(values_of(self.job))
        self.last_pushed = None
        return means

    # ---- common steps -----------------------------------------------------------------------------------------

    @precondition(lambda self: not self.outside and not self.dropped and self.replica.state is ReplicaState.CURRENT)
    @rule()
    def own_step(self) -> None:
        """The training thread's gradient is in the step."""
        self.replica.computing = False
        means = self.job_steps()
        with self.replica.apply_lock:
            with self.replica.writing():
                self.replica.applier.step_with(means, None)
            self.call("advance", self.replica.advance)
        self.replica.computing = True

    @precondition(lambda self: not self.outside)
    @rule()
    def step_without_it(self) -> None:
        result = Result(self.ended, self.job_steps(), None)
        self.call("push", lambda: self.replica.push(result))
        self.last_pushed = result.step

    @precondition(lambda self: not self.outside)
    @rule()
    def step_that_cannot_be_replayed(self) -> None:
        step = self.ended
        self.job_steps(manual=True)
        self.call("cannot_replay", lambda: self.replica.cannot_replay(step))
        self.average = None if not self.replica.state.queues else self.average

    @precondition(lambda self: self.last_pushed is not None)
    @rule()
    def the_last_one_was_not_to_be_replayed(self) -> None:
        """Its members worked on the mean, which becomes known one step later."""
        # It was replayed on the live parameters already; or an earlier one was, and nothing has been fetched since.
        self.has_wrong_step |= self.replica.step == self.ended
        self.history[-1] = ([value + 1.0 for value in self.history[-1][0]], self.history[-1][1])
        self.job_goes_on_from_history()
        self.last_pushed = None
        self.call("cannot_replay", self.replica.cannot_replay)
        self.average = None

    def job_goes_on_from_history(self) -> None:
        params = [param for bucket in self.job.buckets for param in bucket.params]
        with torch.no_grad():
            for param, value in zip(params, self.history[-1][0], strict=True):
                param.copy_(value)

    @rule(step=st.integers(0, 3))
    def word_of_a_step_that_is_here_already(self, step: int) -> None:
        before = self.replica.state
        if self.replica.step > step:
            self.replica.cannot_replay(step)
            assert self.replica.state is before

    @rule()
    def helper(self) -> None:
        self.call("replay_one", self.replica.replay_one)

    @precondition(lambda self: not self.dropped)
    @rule()
    def catch_up(self) -> None:
        self.replica.computing = False
        self.call("catch_up", self.replica.catch_up)
        if self.replica.state is ReplicaState.CURRENT and not self.outside:
            assert self.replica.step == self.ended, "it has caught up with something else"
        self.replica.computing = True

    # ---- averagings -------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.outside)
    @rule()
    def averaging_without_it(self) -> None:
        step = self.ended + 1
        self.history.append(([value * 0.5 for value in self.history[-1][0]], self.history[-1][1]))
        self.job_goes_on_from_history()
        self.last_pushed = None
        if self.call("replaced", lambda: self.replica.replaced(step)):
            self.average = step
        else:  # As after any step that ends without this rank and cannot be applied here.
            assert not self.replica.state.queues

    @precondition(lambda self: self.average is not None)
    @rule(shadow=st.booleans())
    def averaging_is_used(self, shadow: bool) -> None:
        step, self.average = self.average, None
        assert step is not None
        values, states = self.history[step]

        def write(buckets: Any, optimizer: torch.optim.Optimizer) -> None:
            params = [param for bucket in buckets for param in bucket.params]
            for param, value, state in zip(params, values, states, strict=True):
                with torch.no_grad():
                    param.copy_(value)
                optimizer.state[param] = {
                    k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()
                }

        with self.replica.apply_lock:
            if shadow or self.dropped:
                self.replica.shadow_with(write)
            else:
                with self.replica.writing():
                    write(self.replica.applier.buckets, self.replica.applier.optimizer)
            self.call("average_used", lambda: self.replica.average_used(step))

    # ---- elsewhere --------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.outside and not self.dropped and self.average is None)
    @rule()
    def leave(self) -> None:
        self.outside = True
        self.last_pushed = None
        self.call("leave", self.replica.leave)

    @precondition(lambda self: self.outside)
    @rule()
    def parameters_come(self) -> None:
        self.call("overwritten", self.replica.overwritten)
        with self.replica.apply_lock, self.replica.writing(), torch.no_grad():
            for bucket in self.replica.applier.buckets:
                for param in bucket.params:
                    param.add_(1.0)
            self.replica.step += 1
        while self.ended < self.replica.step:
            self.job_steps()

    @precondition(lambda self: self.outside)
    @rule()
    def common_steps_again(self) -> None:
        self.outside = False
        while self.ended < self.replica.step:
            self.job_steps()
        self.call("resume", self.replica.resume)

    # ---- fetching ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.dropped and not self.outside)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(min(self.replica.step, self.ended), self.ended))
        params, state = self.history[step]
        needed, live = self.replica.state.needs_fetch, values_of(self.replica.applier)
        snapshot = Snapshot(step, [value.clone() for value in params], [dict(entry) for entry in state])
        with self.replica.apply_lock, self.lock:
            took = self.call("adopt", lambda: self.replica.adopt(snapshot, self.ended))
        assert took == needed
        if took and step == self.ended:
            self.last_pushed = None  # What was fetched is what the members have made of the last step.
        if not took:
            assert same(live, values_of(self.replica.applier)), "what is not needed changes nothing"

    @precondition(lambda self: not self.outside)
    @rule()
    def drop(self) -> None:
        self.dropped = True
        self.call("drop", lambda: self.replica.drop(ended=self.ended))
        if not self.replica.state.queues:
            self.average = None

    # ---- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def a_snapshot_is_of_a_complete_step(self) -> None:
        snapshot = self.replica.snapshot()
        if snapshot is None:
            return
        assert self.replica.state.servable and not self.replica.queue
        assert same((snapshot.params, snapshot.state), self.history[snapshot.step]), "it is of no step of the job"
        assert self.replica.snapshot(snapshot.step) is not None
        assert self.replica.snapshot(snapshot.step + 1) is None, "less than was asked for"
        bare = self.replica.snapshot(state_too=False)
        assert bare is not None and not any(bare.state)

    @invariant()
    def complete_parameters_are_those_of_their_step(self) -> None:
        state = self.replica.state
        self.has_wrong_step = self.has_wrong_step and state is ReplicaState.STALE  # Until they are fetched.
        if (state.in_common_steps or state is ReplicaState.LEFT) and not self.has_wrong_step:
            assert same(values_of(self.replica.applier), self.history[self.replica.step]), state.name

    @invariant()
    def nothing_is_missing_between_the_parameters_and_what_waits(self) -> None:
        state, first = self.replica.state, self.replica.newest_step
        waiting = [result.step for result in self.replica.queue]
        assert waiting == list(range(first, first + len(waiting)))
        if state in (ReplicaState.CURRENT, ReplicaState.REPLAYABLE, ReplicaState.AVERAGE_PENDING) and not self.outside:
            assert first + len(waiting) == self.ended, "a step is neither applied nor waiting"
        if waiting or first != self.replica.step:
            assert state in (ReplicaState.REPLAYABLE, ReplicaState.AVERAGE_PENDING)
        if state is ReplicaState.CURRENT:
            assert not waiting and first == self.replica.step and self.replica.is_whole


TestCalls = pytest.mark.slow(Calls.TestCase)
TestCalls.settings = settings(max_examples=cases(60), stateful_step_count=40, deadline=None)


def ready() -> Replica:
    return Replica(new_applier(), threading.Condition(threading.RLock()), Counters(), lambda: None)


def a_step(replica: Replica, step: int) -> Result:
    return Result(step, [torch.ones_like(bucket.flat) for bucket in replica.applier.buckets], None)


def test_a_dropped_rank_keeps_the_steps_behind_an_averaging_that_its_helper_has_yet_to_use() -> None:
    replica = ready()
    assert replica.replaced(1)
    replica.drop(ended=1)
    replica.push(a_step(replica, 1))
    with replica.apply_lock:
        replica.shadow_with(lambda buckets, optimizer: None)
        replica.average_used(1)
    replica.push(a_step(replica, 2))
    assert replica.replay_one() and replica.replay_one()
    given = replica.snapshot()
    assert given is not None and given.step == 3


def test_an_averaging_that_a_later_one_has_replaced_leaves_that_one_pending() -> None:
    replica = ready()
    assert replica.replaced(1) and replica.replaced(2)
    replica.average_used(1)  # Written meanwhile by the training thread.
    assert replica.state is ReplicaState.AVERAGE_PENDING and replica.snapshot() is None
    replica.average_used(2)
    assert replica.state is ReplicaState.CURRENT and replica.step == 2


def test_steps_behind_an_averaging_are_not_applied_to_what_was_before_it() -> None:
    replica = ready()
    before = values_of(replica.applier)
    assert replica.replaced(1)
    replica.push(a_step(replica, 1))
    replica.catch_up()
    assert same(before, values_of(replica.applier)) and len(replica.queue) == 1


@pytest.mark.parametrize("by_helper", [False, True])
def test_catching_up_outside_a_step_leaves_the_program_s_gradients(by_helper: bool) -> None:
    """It has cleared some, and the next backward pass adds to the others; both are of no step that others have made."""
    replica = ready()
    buckets = replica.applier.buckets
    params = [param for bucket in buckets for param in bucket.params]
    kept, foreign = torch.full((SIZE,), 5.0), torch.full((SIZE,), 7.0)
    for grad in (kept, foreign, None):
        params[0].grad, params[1].grad = None, None if grad is None else grad.clone()
        if grad is kept:
            for bucket in buckets:
                for position in range(len(bucket.params)):
                    bucket.adopt(position)
            params[0].grad = None
        before, flats = values_of(replica.applier), [bucket.flat.clone() for bucket in buckets]
        replica.push(a_step(replica, replica.newest_step))
        replica.computing = True
        assert replica.replay_one() == by_helper or not by_helper
        replica.catch_up()
        assert params[0].grad is None and (params[1].grad is None) == (grad is None)
        assert grad is None or torch.equal(params[1].grad, grad)  # type: ignore[arg-type]
        assert all(torch.equal(bucket.flat, flat) for bucket, flat in zip(buckets, flats, strict=True))
        assert not same(before, values_of(replica.applier)), "the step was applied"
    replica.push(a_step(replica, replica.newest_step))
    replica.catch_up(show_mean=True)
    assert all(torch.equal(param.grad, torch.ones(SIZE)) for param in params)  # type: ignore[arg-type]


def test_a_step_that_fetched_parameters_contain_already_is_not_applied_again() -> None:
    """Their source saw its end before this rank did."""
    replica = ready()
    replica.cannot_replay(0)
    with replica.apply_lock, replica.lock:
        params, state = values_of(replica.applier)
        assert replica.adopt(Snapshot(2, params, state), ended=1)
    replica.push(a_step(replica, 1))
    assert replica.state is ReplicaState.CURRENT and not replica.queue
    replica.push(a_step(replica, 2))
    replica.catch_up()
    assert replica.state is ReplicaState.CURRENT and replica.step == 3


@pytest.mark.parametrize("ended_since", [0, 1])
@pytest.mark.parametrize("on_shadow", [False, True])
def test_an_averaging_is_discarded_with_the_steps_behind_it(ended_since: int, on_shadow: bool) -> None:
    replica = ready()
    assert replica.replaced(1)
    with replica.apply_lock:
        if on_shadow:
            replica.shadow_with(lambda buckets, optimizer: None)
    for step in range(ended_since):
        replica.push(a_step(replica, 1 + step))
        assert replica.replay_one() == on_shadow
    replica.discard_average()
    before = values_of(replica.applier)
    replica.catch_up()
    assert same(before, values_of(replica.applier)) and not replica.queue
    assert replica.state is (ReplicaState.STALE if ended_since else ReplicaState.CURRENT) and replica.step == 1
    replica.discard_average()
    assert replica.state.needs_fetch == bool(ended_since), "with none pending it changes nothing"


@pytest.mark.parametrize(("where", "replayed_before"), [("__init__", 0), ("apply", 0), ("apply", 1)])
def test_without_memory_for_a_shadow_the_state_is_fetched(
    where: str, replayed_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    applier = new_applier()
    replica = Replica(applier, threading.Condition(threading.RLock()), Counters(), lambda: None)
    before = [param.detach().clone() for bucket in applier.buckets for param in bucket.params]
    for number in range(replayed_before + 1):
        with replica.lock:
            replica.push(Result(number, [torch.ones_like(bucket.flat) for bucket in applier.buckets], None))
        if number == replayed_before:
            monkeypatch.setattr(module.Shadow, where, fails)
        assert replica.replay_one()
    assert replica.state is ReplicaState.STALE and not replica.queue and not replica.replay_one()
    live = [param.detach() for bucket in applier.buckets for param in bucket.params]
    assert all(map(torch.equal, live, before)) and replica.snapshot() is None
    with replica.apply_lock, replica.lock:
        assert replica.adopt(Snapshot(9, [torch.full_like(param, 3.0) for param in live], [{} for _ in live]), ended=9)
    assert replica.state is ReplicaState.CURRENT


def test_a_replay_that_finds_no_memory_leaves_alone_what_has_happened_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training thread has gone to servers, whose parameters need no state of the common steps."""
    replica = ready()
    replica.push(a_step(replica, 0))

    def fails(*args: object) -> None:
        replica.leave()
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.Shadow, "apply", fails)
    assert replica.replay_one()
    assert replica.state is ReplicaState.PARAMETERS_ONLY and not replica.queue


def test_a_replay_without_memory_is_known_by_the_error_s_name_in_all_supported_versions_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.OutOfMemoryError` is newer than the oldest of them."""
    replica, error = ready(), torch.cuda.OutOfMemoryError("CUDA out of memory")
    monkeypatch.delattr(torch, "OutOfMemoryError", raising=False)
    replica.push(a_step(replica, 0))

    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(module.Shadow, "apply", fails)
    assert replica.replay_one()
    assert replica.state is ReplicaState.STALE
