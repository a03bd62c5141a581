"""Steps at servers in the background: buckets sent within backward, parameters that arrive behind `step`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError, RankLostError, StarError
from star_hvd.modes.ps_worker import Compressed, ServerSteps, StepInfo
from star_hvd.ps.worker.exchange import Reply
from star_hvd.telemetry import wait_time
from star_hvd.telemetry.wait_time import warn_after
from star_hvd.wrapper.forward_gates import ForwardGates
from tests.support.world import Ears, Network, Port, World

DEADLINE_S = 60.0


class FakeClient:
    """Servers whose result is there at once, and whose parameters arrive when the test says so."""

    takes_buckets = True

    def __init__(self, n_buckets: int) -> None:
        self.given: list[tuple[int, int, float]] = []
        self.small: dict[int, bytes] = {}  # Of the last push.
        self.weights: list[float] = []
        self.pushed: list[tuple[int, list[torch.Tensor]]] = []
        self.here = [threading.Event() for _ in range(n_buckets)]
        self.version = 0
        self.finished = 0
        self.released = False
        self.whole: list[bool] = []  # Per push, whether all its parameters were waited for together with its result.

    def give(self, step: int, index: int, flat: torch.Tensor, small: Mapping[int, bytes]) -> None:
        self.given.append((step, index, float(flat[0])))

    def ranges(self, index: int) -> list[tuple[int, int, int]]:
        return [(2 * index, 0, 8), (2 * index + 1, 8, 16)]

    def push(self, *, step: int, flats: Sequence[torch.Tensor], small: Mapping[int, bytes], **given: Any) -> None:
        self.small = dict(small)
        self.weights.append(given["weight"])
        self.pushed.append((step, [flat.clone() for flat in flats]))

    def wait(self, deadline_s: float, *, whole: bool = True) -> Reply:
        self.version += 1
        self.whole.append(whole)
        flats = [torch.full((len(flat) - 1,), float(self.version)) for flat in self.pushed[-1][1]]
        return Reply("params", self.version, 1, applied=True, params=flats)

    def wait_bucket(self, index: int, deadline_s: float) -> None:
        if not self.here[index].wait(deadline_s):
            raise DeadlineError("it did not come")

    def describe(self) -> str:
        return ""

    def release(self) -> None:
        self.released = True

    def finish(self, deadline_s: float) -> int:
        for index in range(len(self.here)):
            self.wait_bucket(index, deadline_s)
        self.finished += 1
        return self.version


class Rank:
    """One rank at servers: a model of three layers, a bucket each."""

    def __init__(
        self,
        *,
        gated: bool = False,
        max_grad_norm: float | None = None,
        compressed: Compressed | None = None,
        look_s: float = 5.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(3)))
        params = list(self.model.parameters())
        optimizer = torch.optim.SGD(params, lr=1.0)
        buckets = pack(params, 64)
        hyper = HyperRow(optimizer.param_groups)
        self.engine = StepEngine(
            rank=0, plan=Plan.sync(1), applier=Applier(optimizer, torch.optim.SGD, buckets, hyper, max_grad_norm),
            collective=Port(Network(1), 0), listener=Ears(World(1, world_size=1), 0),
        )
        with self.engine.lock:
            self.engine.agreement.plan = Plan.ps(1, 1, servers=(0,)).replace(plan_id=1)
        self.engine.leave_common_steps()
        self.client, self.infos = FakeClient(len(buckets)), list[StepInfo]()
        self.gates = ForwardGates(lambda index: None) if gated else None
        self.waits_s: list[float] = []
        self.lost: RankLostError | None = None
        self.steps = ServerSteps(
            self.engine, self.engine.plan, cast(Any, self.client), deadline_s=DEADLINE_S, on_step=self.infos.append,
            on_notes=lambda notes: None, plan_of=lambda plan_id: None, same_session=lambda one, other: True,
            early=True, gates=self.gates, compressed=compressed, on_wait=self.waits_s.append,
            check_ranks=self.check_ranks, look_s=look_s,
        )

    def check_ranks(self) -> None:
        if self.lost is not None:
            raise self.lost

    def backward(self, value: float) -> None:
        for bucket in self.engine.applier.buckets:
            bucket.flat.fill_(value)
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
            self.steps.give(bucket)


@pytest.mark.parametrize("skip", [False, True])
def test_the_weight_of_bfloat16_gradients_is_not_rounded(skip: bool) -> None:
    """The servers divide by it, and the counters must agree with what was produced; 1.1 would be 1.1015625."""
    rank = Rank(dtype=torch.bfloat16)
    engine = rank.engine
    engine.own.weight = 1.1
    late = [torch.full_like(bucket.flat, 0.3) for bucket in engine.applier.buckets]
    engine.keep_late(late, engine.step, weights=[0.3] * len(late))
    rank.backward(2.0)
    rank.steps.step(skip=skip)
    expected = pytest.approx(0.3 if skip else 1.4, abs=1e-12)
    assert rank.client.weights == [expected] and engine.counters.applied_weight == expected


def test_buckets_are_sent_within_backward_and_the_push_has_their_number() -> None:
    rank = Rank()
    for number in (1, 2):
        rank.backward(float(number))
        assert rank.client.given[-3:] == [(number, index, float(number)) for index in range(3)]
        assert len(rank.client.pushed) == number - 1, "only step() announces it"
        rank.steps.step(skip=False)
        assert rank.client.pushed[-1][0] == number


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda grad: grad.mul_(0.5),
    "data": lambda grad: grad.data.mul_(0.5),  # Has a version of its own.
    "numpy": lambda grad: np.multiply(grad.numpy(), 0.5, out=grad.numpy()),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("changed", ["all", "one"])
def test_gradients_changed_before_the_step_are_pushed_as_they_are_then(how: str, changed: str) -> None:
    rank = Rank()
    rank.backward(2.0)
    params = list(rank.model.parameters())
    for param in params if changed == "all" else params[:1]:
        assert param.grad is not None
        CHANGES[how](param.grad)
    expected = [[1.0] * 16 if changed == "all" or params[0] is bucket.params[0] else [2.0] * 16
                for bucket in rank.engine.applier.buckets]  # fmt: skip
    rank.steps.step(skip=False)
    number, flats = rank.client.pushed[-1]
    assert number == 2 and [flat[:-1].tolist() for flat in flats] == expected
    rank.backward(2.0)
    assert len(rank.client.given) == 3, "a program that does so once is taken to do so again"
    rank.steps.step(skip=False)
    assert rank.client.pushed[-1][0] == 3


class Halving:
    """Servers get half of what they are sent, in a form of its own for the first range of every bucket."""

    def __init__(self) -> None:
        self.steps = 0

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        bucket.flat[:-1].mul_(0.5)
        return [f"{bucket.index}".encode(), *[None for _ in ranges[1:]]]

    def ended(self) -> None:
        self.steps += 1


def test_what_is_pushed_is_what_compression_makes_of_it() -> None:
    halving = Halving()
    rank = Rank(compressed=halving)
    rank.backward(2.0)
    rank.steps.step(skip=False)
    assert [value for _, _, value in rank.client.given] == [1.0] * 3, "no change after the hook, so it was sent ahead"
    assert rank.client.small == {0: b"0", 2: b"1", 4: b"2"} and halving.steps == 1
    rank.backward(2.0)
    for param in rank.model.parameters():
        assert param.grad is not None
        param.grad.mul_(3.0)
    rank.steps.step(skip=False)
    assert rank.client.small == {}, "made of other gradients"
    assert all(float(flat[0]) == 3.0 for flat in rank.client.pushed[-1][1])


@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_with_infinities_is_not_pushed_but_its_push_is(early: bool) -> None:
    """The servers' rule may wait for a push of this rank."""
    rank = Rank(max_grad_norm=None if early else 1.0)  # Clipping waits for the whole gradient.
    rank.backward(float("inf"))
    assert bool(rank.client.given) is early
    rank.steps.step(skip=True)
    (number, flats), counters = rank.client.pushed[-1], rank.engine.counters
    assert number == (2 if early else 1), "what was sent within backward is void"
    assert all(torch.equal(flat, torch.zeros_like(flat)) for flat in flats), "of weight 0 too"
    assert (counters.drops, counters.dropped_weight, counters.applied_weight) == (1, 1.0, 0.0)
    assert counters.produced_weight == pytest.approx(1.0)
    rank.backward(3.0)
    rank.steps.step(skip=False)
    norm = 3.0 if early else 1.0 / 48**0.5  # Clipped.
    assert [float(flat[0]) for flat in rank.client.pushed[-1][1]] == pytest.approx([norm] * 3, rel=1e-4)


def test_a_backward_pass_without_a_step_is_void() -> None:
    rank = Rank()
    rank.backward(2.0)
    rank.backward(3.0)
    rank.steps.step(skip=False)
    number, flats = rank.client.pushed[-1]
    assert number == 2 and all(bool((flat[:-1] == 3.0).all()) for flat in flats)


@pytest.mark.parametrize("why", ["clipped", "late"])
def test_what_needs_the_whole_gradient_waits_for_the_step(why: str) -> None:
    rank = Rank(max_grad_norm=1.0 if why == "clipped" else None)
    if why == "late":
        late = [torch.ones(bucket.numel + 1) for bucket in rank.engine.applier.buckets]
        rank.engine.keep_late(late, 0)
    rank.backward(2.0)
    assert not rank.client.given
    rank.steps.step(skip=False)
    assert len(rank.client.pushed) == 1


def test_a_use_of_parameters_waits_for_their_own_bucket_alone() -> None:
    rank = Rank(gated=True)
    rank.backward(1.0)
    rank.steps.step(skip=False)  # Nothing has arrived: a wait for it would not end.
    assert rank.engine.step == 1 and rank.infos[-1].version == 1
    first = rank.engine.applier.buckets[-1]
    rank.client.here[first.index].set()
    inputs = torch.ones(1, 4)
    assert rank.model[0](inputs).tolist() == [[4.0] * 4], "the first layer's are the last bucket's"
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(rank.model, inputs)
        with pytest.raises(TimeoutError):
            whole.result(timeout=0.2)
        for event in rank.client.here:
            event.set()
        assert whole.result(timeout=DEADLINE_S).tolist() == [[64.0] * 4]
    assert all(type(param) is torch.nn.Parameter for param in rank.model.parameters())
    rank.backward(1.0)
    rank.steps.step(skip=False)
    assert rank.client.finished == 1 and rank.engine.step == 2


def test_compiled_code_finds_all_parameters_arrived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes no gate: `@torch.compile` on a function that calls the model."""
    rank, compiler = Rank(gated=True), SimpleNamespace(FRAME_COUNTER=0)
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", compiler)
    for event in rank.client.here:
        event.set()
    rank.backward(1.0)
    rank.steps.step(skip=False)
    compiler.FRAME_COUNTER = 1  # The first parameters are still behind gates.
    with caplog.at_level(logging.INFO, "star_hvd"):
        for version in (2, 3):
            rank.backward(1.0)
            rank.steps.step(skip=False)
            assert all(type(param) is torch.nn.Parameter for param in rank.model.parameters())
            assert rank.model(torch.ones(1, 4)).tolist() == [[64.0 * version**3] * 4]
            assert not rank.steps.program_wrote(), "what came is known"
    assert rank.client.whole == [False, True, True] and rank.client.finished == 1
    assert caplog.text.count("torch.compile") == 1


@pytest.mark.parametrize("how", ["forward", "catch_up"])
def test_a_forked_process_keeps_the_parameters_that_it_has(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread there receives anything, and whatever was locked at the fork stays locked."""
    rank = Rank(gated=True)
    before = [param.detach().clone() for param in rank.model.parameters()]
    rank.backward(1.0)
    rank.steps.step(skip=False)
    parent, locked, ended = os.getpid(), threading.Event(), threading.Event()

    def hold() -> None:
        with rank.engine.replica.apply_lock:
            locked.set()
            ended.wait(2.0 * DEADLINE_S)  # Longer than the child may take.

    def child() -> list[torch.Tensor]:
        if how == "forward":
            rank.model(torch.ones(1, 4))
        else:
            rank.client.pull = lambda deadline_s, known, **checks: Reply("interrupted")  # type: ignore[attr-defined]
            rank.steps.catch_up()
        return [param.detach().clone() for param in rank.model.parameters()]

    with ThreadPoolExecutor(2) as others:
        others.submit(hold)
        assert locked.wait(DEADLINE_S)
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        try:
            kept = others.submit(child).result(timeout=DEADLINE_S)
        finally:
            ended.set()
            for event in rank.client.here:
                event.set()
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    assert all(type(param) is torch.nn.Parameter for param in rank.model.parameters())
    assert rank.client.finished == 0


def arrive_once_awaited(client: FakeClient) -> None:
    """Let each bucket's parameters arrive 50 ms after this thread has begun to wait for one, and not before."""
    wait_bucket, me = client.wait_bucket, threading.current_thread()

    def awaited(index: int, deadline_s: float) -> None:
        if threading.current_thread() is me:
            client.wait_bucket = wait_bucket  # type: ignore[method-assign]
            for event in client.here:
                threading.Timer(0.05, event.set).start()
        wait_bucket(index, deadline_s)

    client.wait_bucket = awaited  # type: ignore[method-assign]


def test_waits_for_parameters_are_the_steps_communication_and_no_work_of_the_rank() -> None:
    rank = Rank(gated=True)
    rank.backward(1.0)
    rank.steps.step(skip=False)
    with ThreadPoolExecutor(1) as other:  # It waits longest, and is not the thread that steps.
        other.submit(lambda: rank.model.state_dict()["0.weight"].clone())
        arrive_once_awaited(rank.client)
        rank.model(torch.ones(1, 4))
    waited_s = sum(rank.waits_s)
    assert waited_s > 0.0
    rank.backward(1.0)
    rank.steps.step(skip=False)
    assert rank.infos[-1].comm_s >= waited_s
    before = len(rank.waits_s)  # Those at the begin of the second step are its own.
    rank.backward(1.0)
    rank.steps.step(skip=False)
    assert len(rank.waits_s) > before and rank.infos[-1].comm_s >= sum(rank.waits_s[before:])


@pytest.mark.parametrize("what", ["catch_up", "refresh_state", "state_dict", "step"])
def test_everything_else_waits_for_all_parameters(what: str) -> None:
    rank = Rank(gated=True)
    rank.backward(1.0)
    rank.steps.step(skip=False)

    def use() -> None:
        if what == "state_dict":
            rank.model.state_dict()["2.weight"].clone()
        elif what == "step":
            rank.steps.step(skip=False)
        else:
            rank.client.pull = lambda deadline_s, known, **checks: Reply("interrupted")  # type: ignore[attr-defined]
            rank.client.state = lambda deadline_s, **checks: Snapshot(1, [], [])  # type: ignore[attr-defined]
            rank.engine.adopt_state = lambda snapshot: None  # type: ignore[method-assign]
            getattr(rank.steps, what)()

    with ThreadPoolExecutor(1) as other:
        used = other.submit(use)
        with pytest.raises(TimeoutError):
            used.result(timeout=0.2)
        for event in rank.client.here:
            event.set()
        used.result(timeout=DEADLINE_S)
    assert all(float(param.detach().min()) >= 1.0 for param in rank.model.parameters())


def test_a_step_refuses_parameters_that_the_program_changed_for_good() -> None:
    rank = Rank()
    rank.backward(1.0)
    rank.steps.step(skip=False)
    params = list(rank.model.parameters())
    own = [param.detach().clone() for param in params]
    for param in params:
        param.data = torch.full_like(param, 7.0)
    assert rank.steps.program_wrote()
    for param, value in zip(params, own, strict=True):
        param.data = value  # As after an evaluation of other weights.
    assert not rank.steps.program_wrote()
    rank.backward(1.0)
    rank.steps.step(skip=False)
    with torch.no_grad():
        params[-1].fill_(7.0)  # As a model that is loaded.
    rank.backward(1.0)
    with pytest.raises(StarError, match="broadcast_parameters"):
        rank.steps.step(skip=False)


def test_a_checkpoint_leaves_what_the_program_wrote_and_what_came_with_it_is_known() -> None:
    rank = Rank()
    rank.backward(1.0)
    rank.steps.step(skip=False)
    params = list(rank.model.parameters())
    state_there: list[dict[str, object]] = [{"momentum_buffer": torch.ones(4, 4)} for _ in params]
    came = Snapshot(5, [torch.full((4, 4), 5.0) for _ in params], state_there)
    rank.client.state = lambda deadline_s, **checks: came  # type: ignore[attr-defined]
    params[0].data.fill_(7.0)
    rank.steps.refresh_state()
    state = rank.engine.applier.optimizer.state
    assert float(params[0].detach().min()) == 7.0 and rank.engine.step == 1
    assert float(state[params[0]]["momentum_buffer"].min()) == 1.0
    params[0].data.fill_(1.0)
    rank.steps.refresh_state()
    assert float(params[0].detach().min()) == 5.0 and rank.engine.step == 5
    assert not rank.steps.program_wrote()


def test_parameters_that_are_not_numbers_are_not_taken_for_the_programs() -> None:
    rank = Rank()
    rank.client.wait = lambda deadline_s, whole: Reply(  # type: ignore[assignment, misc]
        "params", 1, 1, applied=True, params=[torch.full((16,), float("nan")) for _ in range(3)]
    )
    rank.backward(1.0)
    rank.steps.step(skip=False)
    assert not rank.steps.program_wrote()


@pytest.mark.parametrize("gated", [False, True])
def test_at_a_meeting_only_newer_parameters_come(gated: bool) -> None:
    rank = Rank(gated=gated)
    for event in rank.client.here:
        event.set()
    known: list[int | None] = []

    def pull(deadline_s: float, known_: int | None, **checks: Any) -> Reply:
        known.append(known_)
        if known_ == 3:
            return Reply("known", 3)
        flats = [torch.full((bucket.numel,), 3.0) for bucket in rank.engine.applier.buckets]
        return Reply("params", 3, params=flats)

    rank.client.pull = lambda deadline_s, known, **checks: pull(deadline_s, known, **checks)  # type: ignore[attr-defined]
    rank.steps.catch_up()  # Nothing is known of the parameters here.
    for _ in range(2):
        rank.steps.catch_up()
    assert known == [None, 3, 3] and rank.engine.step == 3
    weight = next(iter(rank.model.parameters()))
    with torch.no_grad():
        weight.zero_()  # As in `broadcast_parameters`.
    rank.steps.catch_up()
    assert known[3:] == [None] and float(weight.detach().min()) == 3.0
    weight.data.clamp_(max=0.5)  # The version of the tensor does not tell of it.
    rank.steps.catch_up()
    assert known[4:] == [None] and float(weight.detach().min()) == 3.0
    rank.client.version = 0
    rank.backward(1.0)
    rank.steps.step(skip=False)
    rank.steps.catch_up()
    assert known[5:] == [1], "what came with the answer to a push is known too"


def test_the_end_of_the_mode_waits_for_nothing() -> None:
    """The state comes from elsewhere then, or the job has failed and restores one."""
    rank = Rank(gated=True)
    rank.backward(1.0)
    rank.steps.step(skip=False)
    assert not rank.client.released
    rank.steps.exit()
    assert rank.client.released, "the client stays for the final state, its memory for pushes does not"
    for param in rank.model.parameters():
        assert type(param) is torch.nn.Parameter
        param.detach().fill_(5.0)
    assert rank.model(torch.ones(1, 4)).tolist() == [[8000.0] * 4]


@pytest.mark.parametrize("gated", [False, True])
def test_a_wait_for_servers_ends_as_a_rank_is_lost(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(gated=gated, look_s=0.01)
    if gated:  # The push's result has come, and no parameters do.
        rank.backward(1.0)
        rank.steps.step(skip=False)
    else:
        monkeypatch.setattr(rank.client, "wait", no_answer)
        rank.backward(1.0)
    rank.lost = RankLostError("rank 1 has left the job")
    with pytest.raises(RankLostError, match="rank 1"):
        if gated:
            rank.model(torch.zeros(1, 4))
        else:
            rank.steps.step(skip=False)
    rank.steps.exit()  # Else traced modules of later tests wait at its gates.


def test_servers_that_never_answer_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`ssgd` and `ssp` wait for the push of a rank that is stuck in the user's code."""
    rank, now_s = Rank(), 0.0
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    missing = "3 messages of servers [0, 2] are missing"

    def wait(deadline_s: float, *, whole: bool = True) -> Reply:
        nonlocal now_s
        now_s += deadline_s
        if now_s == 15.0:
            rank.lost = RankLostError("rank 1 has left the job")
        raise DeadlineError("no answer")

    monkeypatch.setattr(rank.client, "wait", wait)
    monkeypatch.setattr(rank.client, "describe", lambda: missing)
    rank.backward(1.0)
    warn_after(10.0, 4)
    try:
        with pytest.raises(RankLostError):
            rank.steps.step(skip=False)
    finally:
        warn_after()
    text = f"rank 4 has been waiting for the parameter servers of {rank.engine.plan.label} ({missing}) for 10 s"
    assert caplog.messages == [text]


def no_answer(deadline_s: float, *, whole: bool = True) -> Reply:
    raise DeadlineError("no answer")


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("what", ["catch_up", "refresh_state", "confirm_inactive"])
def test_a_read_from_servers_ends_as_a_rank_is_lost_or_this_one_fails(what: str, failed: bool) -> None:
    """A lost rank may have taken its server with it; then no answer comes within `step_deadline_s`."""

    def unanswered(deadline_s: float, *, check: Callable[[], None], look_s: float, **asks: Any) -> None:
        assert (deadline_s, look_s) == (DEADLINE_S, 0.01)
        check()
        raise DeadlineError("the wait went on")

    rank = Rank(look_s=0.01)
    rank.client.pull = rank.client.state = unanswered  # type: ignore[attr-defined]
    error = RankLostError("rank 1 has left the job")
    if failed:
        rank.engine.fail(error)
    else:
        rank.lost = error
    with pytest.raises(RankLostError, match="rank 1"):
        getattr(rank.steps, what)()
