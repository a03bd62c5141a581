"""Lossy forms inside engines of several ranks, in random interleavings: folds, proxies, switches, late ranks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from scheduler.records import Plan
from scheduler.transmission.decision import Decision
from scheduler.transmission.wire import FORMS, HALF, LOW_RANK, NONE, WireChoice
from star_hvd.compression.lossy_wire import LossyWire
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, Wire, pack
from star_hvd.engine.device import Streams
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.step_engine import StepEngine
from tests.support.effort import cases
from tests.support.residuals import left_of
from tests.support.world import Port, World

SIDE = 36  # Of matrices that are large enough for factors.


class AnyForm(WireChoice):
    """Asks for another form whenever a step has ended; `observe` is what ends it."""

    def __init__(self, seed: int, forms: list[int]) -> None:
        super().__init__()
        self._random, self._forms = random.Random(seed), forms

    def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
        self.wanted = self._random.choice(self._forms)
        return False


class Recorded(LossyWire):
    """Keeps the decoded sums."""

    def __init__(self, buckets: list[Bucket], choice: WireChoice) -> None:
        super().__init__(buckets, choice)
        self.sums: list[tuple[int, torch.Tensor]] = []
        self.used: set[int] = set()

    def decode(self, bucket: Bucket, reduced: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        total = super().decode(bucket, reduced, flat)
        self.used.add(self.form)
        self.sums.append((bucket.index, total.double().clone()))
        return total


class LossyWorld(World):
    """A world whose ranks may compress; the leader asks for forms at random."""

    forms = [NONE, HALF, LOW_RANK, LOW_RANK]

    def _engine(self, rank: int, seed: int, optimizer: str) -> StepEngine:
        torch.manual_seed(seed)
        gaps = random.Random(100 * seed + rank)
        params = [torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(3)]
        opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        buckets = pack(params, 4 * SIDE * SIDE)
        return StepEngine(
            rank=rank,
            plan=self.first,
            applier=Applier(opt, torch.optim.SGD, buckets, HyperRow(opt.param_groups)),
            collective=Port(self.network, rank),
            listener=self.ears[rank],
            replay_queue=4,
            noise_interval_steps=2,
            clock=lambda: gaps.uniform(0.0, 0.02),
            wire=Recorded(buckets, AnyForm(seed + rank, self.forms)),
        )


def wire_of(engine: StepEngine) -> Recorded:
    assert isinstance(engine.wire, Recorded)
    return engine.wire


def check(world: LossyWorld) -> None:
    first = world.engines[0]
    for engine, ears in zip(world.engines, world.ears, strict=True):
        assert engine.step == engine.next_step == first.step and ears.mismatches == []
        assert all(0 <= header.wire < len(FORMS) for _, header in ears.headers), "more than one rank asks for a form"
        for mine, theirs in zip(engine.applier.buckets, first.applier.buckets, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.params, theirs.params, strict=True)), "replicas differ"
        for (i, mine_sum), (j, their_sum) in zip(wire_of(engine).sums, wire_of(first).sums, strict=True):
            assert i == j and torch.equal(mine_sum, their_sum), "ranks decoded different sums"
    for bucket in first.applier.buckets:
        sums = sum(total for index, total in wire_of(first).sums if index == bucket.index)
        assert isinstance(sums, torch.Tensor)
        left = sum(left_of(wire_of(engine), engine.applier.buckets[bucket.index]) for engine in world.engines)
        wanted = torch.zeros(SIDE * SIDE, dtype=torch.float64)
        for index, rank, number in world.given:
            if index == bucket.index:
                wanted[rank * world.max_steps + number] += 1.0
        for engine in world.engines:  # What came after the last step waits.
            kept = engine.late.kept.get(bucket.index)
            wanted -= 0.0 if kept is None else kept.flat[:-1].double()
        assert float((sums[:-1] + left - wanted).abs().max()) < 5e-3, "a gradient was lost or applied twice"
        waiting = sum(engine.pending_weight for engine in world.engines)
        assert float(sums[-1]) == pytest.approx(len(world.given) / len(first.applier.buckets) - waiting)


@pytest.mark.slow
def test_every_gradient_is_applied_once_or_still_to_be_sent() -> None:
    used: set[int] = set()
    folds = proxied = 0
    for seed in range(cases(60)):
        size = 2 + seed % 3
        plans = [
            Plan.partial(size, 1 + seed % size, plan_id=1, damping="none"),
            Plan.sync(size, plan_id=2, damping="none"),
            Plan.partial(size, 1, plan_id=3, damping="none"),
        ]
        world = LossyWorld(seed, world_size=size, steps=8, plans=plans[: seed % 4], manual_share=0.3 * (seed % 2))
        world.run()
        check(world)
        used |= wire_of(world.engines[0]).used
        folds += sum(engine.counters.folds for engine in world.engines)
        proxied += sum(engine.counters.proxied for engine in world.engines)
    assert used == set(range(len(FORMS))) and folds > 0 and proxied > 0


class InTurn(WireChoice):
    """Asks for all forms in turn."""

    def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
        self.wanted = (self.wanted + 1) % len(FORMS)
        return False


class ChangingWorld(LossyWorld):
    """A world whose leader asks for one form after another."""

    def _engine(self, rank: int, seed: int, optimizer: str) -> StepEngine:
        engine = super()._engine(rank, seed, optimizer)
        wire_of(engine).choice = InTurn()
        return engine


def test_weights_that_count_tokens_change_no_mean() -> None:
    worlds = [ChangingWorld(3, steps=12, uneven=False) for _ in range(2)]
    for world, weight in zip(worlds, (1.0, 65_536.0), strict=True):
        for engine in world.engines:
            engine.own.weight = weight
        world.run()
        assert wire_of(world.engines[0]).used == {NONE, HALF, LOW_RANK}
        assert world.ears[0].headers[-1][1].weight == 3 * weight
    pairs = zip(*[world.engines[0].applier.buckets for world in worlds], strict=True)
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one.params, other.params, strict=True))


def test_ranks_say_how_many_bytes_a_step_sent() -> None:
    world = ChangingWorld(3, steps=12, uneven=False)
    world.run()
    forms = [NONE] + [header.wire for _, header in world.ears[0].headers][:-1]  # A header asks for the next step's.
    whole, numel = 4 * 3 * SIDE * SIDE, 3 * SIDE * SIDE
    small = {NONE: whole, HALF: 2 * numel, LOW_RANK: whole / 4}
    assert set(forms) == set(small)
    for form, sent_bytes in zip(forms, world.ears[0].sent_bytes, strict=True):
        besides = 2_000  # Weights, and the header behind one bucket.
        assert 0 < sent_bytes <= small[form] + besides, FORMS[form]
        assert form == LOW_RANK or sent_bytes >= small[form], FORMS[form]


def test_a_new_plan_begins_without_compression() -> None:
    """A rank that joins has not read what was asked for before."""
    world = LossyWorld(3, steps=4, uneven=False)
    world.run()
    engine = world.engines[0]
    wire_of(engine).ended(LOW_RANK)
    assert engine.wire.lossy
    engine.resume(Plan.sync(3, plan_id=9), engine.step)
    assert not engine.wire.lossy and engine.wire.wanted == NONE and engine.wire.has_tail


def wire(rank: int = 0, world_size: int = 2) -> tuple[LossyWire, dict[torch.nn.Parameter, int], list[Bucket]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(2)]
    buckets = pack(params, 1 << 20)
    made = LossyWire(buckets)
    made.begin(Streams(buckets), rank, world_size)
    return made, {param: i for i, param in enumerate(params)}, buckets


def used(made: LossyWire, buckets: list[Bucket]) -> dict[str, Any]:
    made.ended(LOW_RANK)
    buckets[0].flat.normal_()
    made.encode(buckets[0], buckets[0].flat, weight=1.0)
    return {}


def test_state_goes_back_to_its_own_rank_only() -> None:
    made, indices, buckets = wire(rank=1)
    assert made.state(indices) is None, "a job that compresses nothing has no such state"
    used(made, buckets)
    state = made.state(indices)
    assert state is not None and set(state["residuals"]) == {0, 1}
    again, places, _ = wire(rank=1)  # The job was started again.
    again.load(state, places)
    found = again.state(places)
    assert found is not None
    assert all(torch.equal(found["residuals"][i], state["residuals"][i]) for i in (0, 1))
    for rank, size in ((0, 2), (1, 3)):
        other, places, _ = wire(rank=rank, world_size=size)
        other.load(state, places)
        assert other.state(places) is None, "what rank 1 has to send would be sent twice"
    made.begin(Streams(buckets), 0, 3)  # An elastic job whose ranks were renumbered.
    made.load(None, indices)
    made.load(state, indices)
    assert made.state(indices) is not None


def test_a_world_that_begins_anew_keeps_what_is_left_to_send() -> None:
    made, indices, buckets = wire()
    used(made, buckets)
    made.begin(Streams(buckets), 1, 4)
    assert not made.lossy and made.state(indices) is not None


def test_state_loaded_before_the_first_world_is_taken_when_it_begins() -> None:
    made, indices, buckets = wire()
    used(made, buckets)
    state = made.state(indices)
    late = LossyWire(buckets)
    late.load(state, indices)
    assert late.state(indices) is None
    late.begin(Streams(buckets), 0, 2)
    assert late.state(indices) is not None


@pytest.mark.parametrize("weight", [1e-9, 1.0, 40_000.0, 5e6])
def test_float16_is_relative_to_the_mean_weight_of_the_step_before(weight: float) -> None:
    ranks = [wire(rank) for rank in range(2)]
    for after in (weight, 0.0, math.inf):  # Of a step without gradients nothing is known.
        sent = []
        for made, _, (bucket,) in ranks:
            made.ended(HALF, after)
            bucket.flat.fill_(weight)  # Every gradient is 1.
            sent.append(made.encode(bucket, bucket.flat, weight=weight))
        for made, _, (bucket,) in ranks:
            made.decode(bucket, sent[0] + sent[1], bucket.flat)
            assert torch.allclose(bucket.flat[:-1] / bucket.flat[-1], torch.ones(1), rtol=1e-2)
            assert torch.allclose(bucket.flat, torch.full((1,), 2 * weight), rtol=2e-3)
    ranks[0][0].restart()  # A rank that joins has not read the weights before.
    ranks[0][0].ended(HALF)
    bucket = ranks[0][2][0]
    assert float(ranks[0][0].encode(bucket, bucket.flat.fill_(1.0), weight=1.0)[-1]) == 1.0


def test_who_forbids_loss_asks_for_none() -> None:
    made, _, _ = wire()
    made.choice.wanted = LOW_RANK
    made.ended(NONE)
    assert made.wanted == LOW_RANK
    made.forbid("they are: a GradScaler decides")
    assert made.wanted == NONE and "GradScaler" in made.explain()


def test_a_wait_for_a_device_is_none_for_the_reduction() -> None:
    """Kernels run on behind `arrived`; that the wait for them is long says nothing about how gradients travel."""
    waits: list[float] = []

    class Heard(WireChoice):
        def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
            waits.append(exposed_s)
            return False

    now_s = [0.0]
    wire = LossyWire([], Heard(), clock=lambda: now_s[0])
    wire.begin(Streams([]), 0, 2)
    wire.ended(NONE)
    for computed_ago_s in (2.0, 9.0, None):
        now_s[0] += 10.0
        wire.arrived()
        now_s[0] += 5.0
        if computed_ago_s is not None:
            wire.computed(computed_ago_s)
        wire.ended(NONE)
    assert waits == [2.0, 5.0, 5.0]
    wire.computed(1.0)  # Of a step that this rank was late for: nobody waits.
    wire.ended(NONE)
    assert len(waits) == 3


def test_a_rank_whose_helper_completes_all_steps_asks_for_no_lossy_form() -> None:
    made, _, _ = wire()
    made.choice.wanted = LOW_RANK  # Chosen when the rank was on time.
    for _ in range(7):
        made.ended(made.wanted)
    assert made.wanted == LOW_RANK and made.lossy
    for _ in range(2):
        made.ended(made.wanted)
    assert made.wanted == NONE and not made.lossy and "too late" in made.explain()


def test_low_rank_is_not_tried_where_ranks_compute_differently() -> None:
    made, _, buckets = wire()
    assert made.choice.lossiest == LOW_RANK and "low rank" not in made.explain()
    made.compared(equal=False)
    made.begin(Streams(buckets), 0, 2)
    assert made.choice.lossiest == HALF and "low rank is not tried" in made.explain()
    made.compared(equal=True)  # Another world of an elastic job.
    assert made.choice.lossiest == LOW_RANK and "low rank" not in made.explain()


def test_a_push_is_a_quarter_of_the_gradient_where_loss_is_allowed() -> None:
    made, _, _ = wire()
    assert 0.25 < made.pushed_part < 0.26
    made.forbid("they are: the clipping needs them")
    assert made.pushed_part == 1.0 == Wire().pushed_part


@pytest.mark.parametrize("rank", [0, 1])
def test_the_form_is_logged_and_explained_as_the_rank_that_leads_has_decided(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In a subgroup without rank 0 another rank leads."""

    class Decides(WireChoice):
        def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
            self.reason = "decided here"
            return True

    made, _, _ = wire(rank=rank)
    told = list[Decision]()
    made.report_to(told.append)
    made.choice, made.leader = Decides(), 1
    made.restart()
    assert ("rank 1 asks" in made.explain()) == (rank == 0)
    assert made.decided == (rank == 0), "a rank that follows decides nothing"
    with caplog.at_level("INFO", logger="star_hvd"):
        for _ in range(2):
            made.arrived()
            made.ended(HALF)
    assert ("decided here" in caplog.text) == (rank == 1) == bool(told)
    assert ("decided here" if rank == 1 else "fp16, as rank 1 asks") in made.explain() and made.decided
    made.restart()  # Another plan.
    assert "decided here" not in made.explain() and "fp16" not in made.explain()
    pushes = made.server_pushes()
    assert not made.decided, "each rank tries its own pushes"
    pushes.switch.decided = True
    assert made.decided


def test_the_first_member_leads_its_subgroup() -> None:
    world = LossyWorld(3, steps=2, uneven=False)
    world.run()
    engine = world.engines[0]
    assert engine.wire.leader == 0
    engine.resume(Plan.subgroup(3, (1, 2), plan_id=9), engine.step)
    assert engine.wire.leader == 1 and "rank 1 asks" in engine.wire.explain()
