"""When a step's header leaves, what travels in an averaging, and who may replay what: engines without processes."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, Wire, pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.meeting import Position, leaving_servers, settled
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import StarError
from star_hvd.modes.local_sgd import LocalSteps
from tests.support.world import Ears, Network, Port, World


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def engines(
    plan: Plan, clock: Clock, *, fp16: bool = False, lr: float = 0.5, wire: type[Wire] = Wire
) -> tuple[Network, list[StepEngine]]:
    world = World(1, world_size=2)
    network, made = Network(2), []
    for rank in range(2):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = torch.optim.SGD(params, lr=lr)
        applier = Applier(optimizer, torch.optim.SGD, pack(params, 16, fp16=fp16), HyperRow(optimizer.param_groups))
        engine = StepEngine(
            rank=rank, plan=plan, applier=applier, collective=Port(network, rank), listener=Ears(world, rank),
            clock=clock, wire=wire(),
        )
        made.append(engine)
    return network, made


def gradients(engine: StepEngine, value: float = 1.0) -> None:
    for bucket in engine.applier.buckets:
        bucket.flat.fill_(value)
        for param, view in zip(bucket.params, bucket.views, strict=True):
            param.grad = view
        engine.gradient_ready(bucket.index)


def finish(engine: StepEngine) -> None:
    for handle in engine.own_step().all_handles():
        assert engine.collective.poll(handle)
        engine.collective.finish(handle)
    engine.apply_own(engine.finish_own())
    assert engine.catch_up(engine.next_step)


def reduce_all(network: Network) -> list[str]:
    names = network.ready()
    for name in names:
        network.end(name)
    return names


def test_in_lockstep_everything_is_on_its_way_before_the_training_thread_arrives() -> None:
    network, pair = engines(Plan.sync(2), Clock())
    for _ in range(3):
        for engine in pair:
            gradients(engine)
        assert reduce_all(network) == ["star.b0", "star.b1"], "something waits for step()"
        for engine in pair:
            assert engine.arrive()
            finish(engine)
    values = [param.detach() for engine in pair for bucket in engine.applier.buckets for param in bucket.params]
    assert all(torch.equal(value, torch.full((4,), -0.5)) for value in values)
    assert [engine.own.steps for engine in pair] == [3, 3]


def test_in_partial_the_last_bucket_waits_for_its_header_only_until_ranks_say_that_this_is_long() -> None:
    clock = Clock()
    network, pair = engines(Plan.partial(2, 1), clock)
    seen = []
    for step in range(6):
        for engine in pair:
            gradients(engine)
        before = reduce_all(network)
        clock.now_s += 0.06 if step < 4 else 0.0001  # What the program does between backward and step.
        for engine in pair:
            assert engine.arrive()
        seen.append((before, reduce_all(network)))
        for engine in pair:
            finish(engine)
    carried, alone = (["star.b0"], ["star.b1"]), (["star.b0", "star.b1"], ["star.h"])
    assert seen == [carried, carried, alone, alone, alone, carried]


def test_a_program_that_works_on_the_mean_for_the_first_time_says_so_where_a_helper_made_the_step() -> None:
    """Rank 1 is away; its helper replays a step whose mean rank 0's program halves, which the header cannot know."""
    network, (member, away) = engines(Plan.sync(2), Clock())
    away.set_inactive(True)
    away.close(0)
    gradients(member)
    assert away.helper_tick()
    reduce_all(network)
    assert away.helper_tick() and away.helper_tick(), "the helper completes and replays it"
    assert member.arrive(manual=True) and member.unreported_manual == 0
    for handle in member.own_step().all_handles():
        member.collective.finish(handle)
    result = member.finish_own()
    for mean in result.means:
        mean[:-1].mul_(0.5)
    member.apply_own(result)
    assert member.unreported_manual == 0, "no header has said so yet"
    assert not away.needs_fetch
    away.note_manual(0)
    assert away.needs_fetch, "what was replayed here is not what the members have"


def test_whoever_waits_for_the_next_step_gets_the_claimed_one_from_the_helper_of_a_rank_that_is_elsewhere() -> None:
    network, (waiting, elsewhere) = engines(Plan.sync(2), Clock())
    for engine in (waiting, elsewhere):
        gradients(engine)
    reduce_all(network)
    elsewhere.set_inactive(True)  # A collective of the user's between backward and step.
    assert waiting.arrive()
    finish(waiting)
    assert not elsewhere.helper_tick(), "nobody needs it yet"
    gradients(waiting)
    elsewhere.close(1)
    for _ in range(8):
        elsewhere.helper_tick()
        reduce_all(network)
    assert waiting.arrive()
    finish(waiting)
    elsewhere.set_inactive(False)
    assert not elsewhere.arrive(), "its gradient is in step 0; others are two steps on"
    while not elsewhere.catch_up(elsewhere.next_step):
        elsewhere.helper_tick()
    for mine, theirs in zip(elsewhere.applier.buckets, waiting.applier.buckets, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.params, theirs.params, strict=True))
    assert elsewhere.own.steps == 1 and elsewhere.counters.produced_weight == elsewhere.counters.applied_weight == 1.0


class Weighed(Wire):
    """Notes which weight each contribution is said to have."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def encode(self, bucket: Bucket, flat: torch.Tensor, *, weight: float) -> torch.Tensor:
        self.weights.append(weight)
        assert weight == float(flat[-1])
        return super().encode(bucket, flat, weight=weight)


def test_a_contribution_is_encoded_for_the_weight_that_it_has() -> None:
    """That of a short batch, of a late gradient alone, damped, of both, or none."""
    network, pair = engines(Plan.partial(2, 1), Clock(), wire=Weighed)
    member, away = pair
    away.set_inactive(True)
    member.own.weight = 1 / 32
    late = [torch.full((5,), 0.5) for _ in away.applier.buckets]
    for step in range(3):
        if step == 1:
            away.keep_late([flat.clone() for flat in late], 0)
        elif step == 2:
            member.keep_late([flat.clone() for flat in late], 2)
        gradients(member)
        away.close(step)
        for _ in range(4):
            away.helper_tick()
        assert member.arrive()
        reduce_all(network)
        finish(member)
    wires = [engine.wire for engine in pair]
    assert all(isinstance(wire, Weighed) for wire in wires)
    assert [wire.weights for wire in wires] == [4 * [1 / 32] + 2 * [17 / 32], [0.0, 0.0, 0.25, 0.25, 0.0, 0.0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fp16", [False, True])
def test_an_averaging_never_rounds_parameters(fp16: bool) -> None:
    """40 steps of 1e-4 from 1.0; with parameters sent as float16 it gave 0.99541."""
    network, pair = engines(Plan.local(2, steps=1), Clock(), fp16=fp16, lr=1e-4)

    def train(engine: StepEngine) -> None:
        def wait() -> None:
            handles = engine.own_step().all_handles()
            while not all(engine.collective.poll(handle) for handle in handles):
                with network_lock:
                    reduce_all(network)
                time.sleep(0.0001)
            for handle in handles:
                engine.collective.finish(handle)

        steps = engine.averaging = LocalSteps(engine, wait)
        steps.begin()
        for _ in range(40):
            for bucket in engine.applier.buckets:
                bucket.flat.fill_(1.0)
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    param.grad = view
                steps.give(bucket)
            steps.step(skip=False)

    network_lock, submit = threading.Lock(), network.submit

    def one_by_one(rank: int, name: str, tensor: torch.Tensor) -> int:
        with network_lock:  # Elsewhere one thread runs all ranks.
            return submit(rank, name, tensor)

    network.submit = one_by_one  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, engine) for engine in pair]:
            done.result(timeout=300.0)
    for engine in pair:
        for bucket in engine.applier.buckets:
            for param in bucket.params:
                assert torch.allclose(param.detach(), torch.full((4,), 0.996), atol=1e-6)


def position(rank: int, step: int, next_step: int | None = None, **more: bool) -> Position:
    told = {"whole": True, "out_of_common_steps": False, "mid_step": False} | more
    return Position(rank, 0, step, step if next_step is None else next_step, **told)


@pytest.mark.parametrize(
    ("positions", "asked", "expected"),
    [
        ([position(0, 5), position(1, 5)], False, True),
        ([position(0, 5), position(1, 4)], True, False),
        ([position(0, 5, 6), position(1, 6)], False, False),
        ([position(0, 5, whole=False), position(1, 5)], True, False),
        ([position(0, 5, out_of_common_steps=True), position(1, 5, out_of_common_steps=True)], False, False),
        ([position(0, 5, out_of_common_steps=True), position(1, 5, out_of_common_steps=True)], True, True),
        ([position(0, 5), position(1, 4, mid_step=True)], False, True),
        ([Position(0, 0, 5, 5, True, False, False, 4), position(1, 5)], False, False),
        ([Position(0, 0, 5, 5, True, False, False, 4), position(1, 5)], True, True),
        ([position(0, 5), position(1, 5), Position(0, 1, 2, 2, True, False, False)], False, True),
    ],
)
def test_who_has_to_catch_up(positions: list[Position], asked: bool, expected: bool) -> None:
    assert settled(positions, asked=asked) is expected


def served(
    rank: int, values: int = -1, *, at_servers: bool = True, leaves: bool = False, optimizer: int = 0
) -> Position:
    return Position(
        rank, optimizer, 5, 5, whole=True, out_of_common_steps=True, mid_step=values >= 0, at_servers=at_servers,
        values=values, leaves=leaves,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([served(0), served(1)], []),
        ([served(0, 7), served(1, 7)], [0]),  # Both have loaded a model.
        ([served(0, 7), served(1, 8)], []),  # Each may evaluate an average of its own.
        ([served(0, 7), served(1)], []),
        ([served(0, 7), served(1, 7, at_servers=False)], [0]),  # Rank 1 has left them already.
        ([served(0, 7, at_servers=False), served(1, 7, at_servers=False)], []),
        ([served(0, 7, leaves=True), served(1)], [0]),  # Rank 0 broadcasts what it has loaded.
        ([served(1, leaves=True)], []),  # Rank 0 has dropped the optimizer.
        ([served(0), served(1), served(0, leaves=True, optimizer=3), served(1, optimizer=3)], [3]),
    ],
)
def test_who_leaves_servers_for_a_loaded_state(positions: list[Position], expected: list[int]) -> None:
    assert leaving_servers(positions) == expected


def test_no_state_is_loaded_within_a_step() -> None:
    within = dataclasses.replace(served(1), mid_step=True)
    with pytest.raises(StarError, match=r"ranks \[1\] are between backward"):
        leaving_servers([served(0, leaves=True), within])


def test_a_checksum_is_computed_while_the_helper_may_act(monkeypatch: pytest.MonkeyPatch) -> None:
    network, pair = engines(Plan.partial(2, 1), Clock())
    held = []

    def take(engine: StepEngine) -> bool:
        if taken := engine.lock.acquire(blocking=False):
            engine.lock.release()
        return taken

    def checksum(engine: StepEngine) -> int:
        with ThreadPoolExecutor(1) as helper:
            held.append(not helper.submit(take, engine).result())
        return 7

    for engine in pair:
        engine.agreement.resume(engine.plan, 0)
        monkeypatch.setattr(engine.applier, "checksum", lambda engine=engine: checksum(engine))
    for _ in range(3):
        for engine in pair:
            gradients(engine)
        for engine in pair:
            assert engine.arrive()
        reduce_all(network)
        for engine in pair:
            finish(engine)
    assert held == [False, False]


def test_what_a_thread_without_a_caller_finds_behind_the_last_step_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, (ended, training) = engines(Plan.sync(2), Clock())
    ended.ended = True
    for engine in (ended, training):
        engine.fail(StarError("Horovod has been shut down"), unseen=True)
    assert ended.failure is None and training.failure is not None
    assert caplog.messages == ["rank 1: Horovod has been shut down"]
