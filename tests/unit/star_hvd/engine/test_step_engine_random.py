"""Random interleavings of late, early, half-finished and finishing ranks: invariants 2 and 3 of the design."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.records import Plan
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import ReplicaMismatchError
from tests.support.effort import cases
from tests.support.world import World

pytestmark = pytest.mark.slow

SEEDS_PER_CASE = cases(60)


def check(world: World) -> None:
    """Everything that must hold once a world has come to rest."""
    first = world.engines[0]
    for engine, ears in zip(world.engines, world.ears, strict=True):
        assert engine.step == engine.next_step == first.step
        assert engine.plan == first.plan
        assert ears.mismatches == []
        assert ears.switches == world.ears[0].switches
        for mine, theirs in zip(engine.applier.buckets, first.applier.buckets, strict=True):
            for a, b in zip(mine.params, theirs.params, strict=True):
                assert torch.equal(a, b), "replicas differ"
                check_state(engine.applier.optimizer.state[a], first.applier.optimizer.state[b])
        assert [r for r, _ in ears.headers] == list(range(first.step)), "a header was seen twice or not at all"
    check_gradients(world)


def check_state(mine: dict[str, object], theirs: dict[str, object]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        other = theirs[key]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, f"optimizer state {key} differs"


def check_gradients(world: World) -> None:
    """Every gradient was applied exactly once, whole or damped, or counted as dropped, or still waits."""
    for engine in world.engines:
        c = engine.counters
        total = c.applied_weight + c.damped_weight + c.dropped_weight + engine.pending_weight
        assert c.produced_weight == pytest.approx(total)
    reduced = 0.0
    for name, sums in world.network.sums.items():
        if not name.startswith("star.b"):
            continue
        bucket = int(name.removeprefix("star.b"))
        numel = world.engines[0].applier.buckets[bucket].numel
        reduced += sum(float(total[numel]) for total in sums)
        stacked = torch.stack([total[:numel] for total in sums])
        assert int((stacked > 0).sum(0).max()) <= 1, "a gradient is in two steps"
        for (index, rank, number), version in world.given.items():
            if index != bucket:
                continue
            column = stacked[:, rank * world.max_steps + number]
            if column.max() > 0:
                step = int(column.argmax())
                allowed = {1.0, 1.0 / (1 + step - version)} | {1.0 / (1 + step - v) for v in range(version)}
                assert any(abs(float(column.max()) - value) < 1e-6 for value in allowed)
    applied = sum(engine.counters.applied_weight for engine in world.engines)
    assert reduced / len(world.engines[0].applier.buckets) == pytest.approx(applied)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_partial(world_size: int) -> None:
    folds = late = 0
    for seed in range(SEEDS_PER_CASE):
        quorum = 1 + seed % max(1, world_size - 1)
        plan = Plan.partial(world_size, quorum, plan_id=1)
        world = World(seed, world_size=world_size, plans=[plan], optimizer="adam" if seed % 5 == 0 else "sgd")
        world.run()
        check(world)
        folds += sum(engine.counters.folds for engine in world.engines)
        late += sum(engine.counters.late for engine in world.engines)
    assert folds > SEEDS_PER_CASE / 2 and late > SEEDS_PER_CASE / 2, "the schedules do not reach the late paths"


def test_switching_back_and_forth() -> None:
    switches = 0
    for seed in range(SEEDS_PER_CASE):
        plans = [
            Plan.partial(3, 2, plan_id=1),
            Plan.sync(3, plan_id=2),
            Plan.partial(3, 1, plan_id=3),
            Plan.partial(3, 2, plan_id=4),
            Plan.sync(3, plan_id=5),
        ]
        world = World(seed, steps=8, plans=plans, uneven=False, abandon_share=0.02 if seed % 2 else 0.0)
        world.run()
        check(world)
        switches += len(world.ears[0].switches)
    assert switches > SEEDS_PER_CASE


def test_fetching_instead_of_replaying() -> None:
    fetched = 0
    for seed in range(SEEDS_PER_CASE):
        world = World(seed, plans=[Plan.partial(3, 2, plan_id=1)], manual_share=0.5)
        world.run()
        check(world)
        fetched += sum(engine.counters.fetched for engine in world.engines)
    assert fetched > SEEDS_PER_CASE / 10


def test_stale_gradients_are_dropped_and_counted() -> None:
    drops = 0
    for seed in range(SEEDS_PER_CASE // 2):
        world = World(seed, plans=[Plan.partial(3, 2, plan_id=1, max_staleness=0)], steps=6)
        world.run()
        check(world)
        drops += sum(engine.counters.drops for engine in world.engines)
    assert drops > SEEDS_PER_CASE / 12


@settings(max_examples=cases(60))
@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(1, 5),
    steps=st.integers(1, 7),
    quorums=st.lists(st.integers(1, 5), max_size=4),
    manual=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_anything(seed: int, world_size: int, steps: int, quorums: list[int], manual: float) -> None:
    plans = [Plan.partial(world_size, min(m, world_size), plan_id=i + 1) for i, m in enumerate(quorums)]
    world = World(seed, world_size=world_size, steps=steps, plans=plans, manual_share=manual)
    world.run()
    check(world)


def test_sync_never_leaves_a_rank_that_is_not_away() -> None:
    for seed in range(cases(40)):
        world = World(seed, uneven=False, steps=4)
        world.run()
        check(world)
        assert all(engine.counters.late == engine.counters.folds == 0 for engine in world.engines)
        assert world.engines[0].step == 4


class Resting(World):
    """At rest, before training threads come back from wherever they are, every rank's newest state is looked at."""

    def _settle(self) -> None:
        self.on_shadows = sum(engine.replica.newest_step > engine.step for engine in self.engines)
        self.seen = [engine.replica.snapshot() for engine in self.engines]
        super()._settle()


def test_a_rank_that_is_away_gives_what_it_has_even_on_its_shadow() -> None:
    """It may wait, in a collective of the user's, for the very rank that asks."""
    on_shadows = 0
    for seed in range(SEEDS_PER_CASE):
        world = Resting(seed, plans=[Plan.partial(3, 2, plan_id=1)])
        world.run()
        check(world)
        on_shadows += world.on_shadows
        for engine, snapshot in zip(world.engines, world.seen, strict=True):
            assert snapshot is not None and snapshot.step == engine.next_step
            params = [param for bucket in engine.applier.buckets for param in bucket.params]
            for param, value, state in zip(params, snapshot.params, snapshot.state, strict=True):
                assert torch.equal(param, value)
                check_state(state, engine.applier.optimizer.state[param])
    assert on_shadows > SEEDS_PER_CASE / 10


def test_what_was_here_when_the_rounds_were_left_is_good_until_other_parameters_come() -> None:
    world = World(1, world_size=2)
    world.run()
    engine = world.engines[0]
    engine.leave_common_steps()
    kept = engine.replica.snapshot()
    assert kept is not None and kept.step == engine.step
    assert torch.equal(kept.params[0], engine.applier.buckets[0].params[0])
    with engine.replica.apply_lock:
        engine.replica.overwritten()
    assert engine.replica.snapshot() is None
    engine.leave_common_steps()
    assert engine.replica.snapshot() is None, "what is here came from elsewhere"


def test_a_step_that_ends_while_a_state_is_adopted_is_not_lost() -> None:
    """Its helper may complete the step in flight between a look at it and the adoption: they exclude each other."""
    tried = 0
    for seed in range(60):
        world = World(seed, plans=[Plan.partial(3, 2, plan_id=1), Plan.sync(3, plan_id=2)], manual_share=0.5)
        for engine in world.engines:
            adopt = engine.replica.adopt

            def adopting(snapshot: Snapshot, ended: int, engine: StepEngine = engine, adopt: Any = adopt) -> bool:
                nonlocal tried
                with ThreadPoolExecutor(1) as helper:
                    tried += 1
                    assert not helper.submit(engine.lock.acquire, blocking=False).result(), "the helper may go on"
                return bool(adopt(snapshot, ended))

            engine.replica.adopt = adopting  # type: ignore[method-assign]
        world.run()
        check(world)
    assert tried > 10


def test_a_state_from_beyond_what_began_here_is_left_alone() -> None:
    world = World(3, world_size=2)
    world.run()
    engine = world.engines[0]
    snapshot = engine.replica.snapshot()
    assert snapshot is not None
    for wrong in (engine.next_step + 1, engine.step - 1):
        snapshot.step = wrong
        assert not engine.adopt(snapshot) and engine.step == engine.next_step


@pytest.mark.parametrize("raises", [False, True])
def test_replicas_that_differ_after_a_switch_are_told_of_and_may_end_the_job(raises: bool) -> None:
    world = World(2, world_size=2, steps=8, plans=[Plan.sync(2, plan_id=1)], uneven=False, raise_on_mismatch=raises)
    with torch.no_grad():
        world.engines[1].applier.buckets[0].params[0].add_(1.0)
    if raises:
        with pytest.raises(ReplicaMismatchError, match="parameters differ between ranks at step"):
            world.run()
        return
    world.run()
    assert all(ears.mismatches for ears in world.ears)
