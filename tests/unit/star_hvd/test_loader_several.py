"""Loops that draw from several `shard` loaders, and programs that make new loaders again and again."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scheduler.records import Plan
from star_hvd.channel.messages.base import Away
from star_hvd.input.batch_sizes import BatchSizes
from star_hvd.input.lease_stock import LeaseStock
from star_hvd.loader import ShardLoader, shard
from tests.support.job_states import state_of
from tests.support.loaders import Numbers, World

PATIENCE_S = 120.0  # A lost wake-up shows; the waits of a client have a far longer deadline.


def plan_of(mode: str, ranks: int) -> Plan:
    return Plan.sync(ranks) if mode == "sync" else Plan.partial(ranks, 1)


def pairs(
    world: World, outer: list[ShardLoader], inner: list[ShardLoader], epochs: int = 2, slow: float = 0.0
) -> list[list[list[tuple[int, int]]]]:
    """Epochs of a loop over `zip`: for each rank what it drew."""
    found: list[list[list[tuple[int, int]]]] = [[] for _ in outer]

    def program(rank: int) -> None:
        for _ in range(epochs):
            found[rank].append([])
            for a, b in zip(outer[rank], inner[rank], strict=False):
                found[rank][-1].append((int(a[0]), int(b[0])))
                time.sleep(slow * rank)

    world.run(program, PATIENCE_S)
    return found


@pytest.mark.parametrize("mode", ["sync", "partial"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1, 2, 4])
def test_ranks_end_a_loop_over_two_loaders_whichever_is_longer(
    monkeypatch: pytest.MonkeyPatch, mode: str, ranks: int, more: int
) -> None:
    world = World(ranks, monkeypatch, plan_of(mode, ranks))
    outer, inner = world.loaders(Numbers(9 + more), 1), world.loaders(Numbers(9), 1)
    found = pairs(world, outer, inner, slow=0.002)
    for epoch in range(2):
        firsts, seconds = zip(*(pair for each in found for pair in each[epoch]), strict=True)
        assert max(Counter(firsts).values()) == 1 and max(Counter(seconds).values()) == 1
        assert len(firsts) >= min(9, 9 + more) - (ranks - 1), "a rank draws at most one batch in vain"
    if mode == "sync" and more > 0:
        assert all(each == [True, True] for each in world.meetings), "whichever end a rank waits at, all meet"


def test_ranks_meet_at_no_end_that_only_some_of_them_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch, plan_of("sync", 2))
    world.in_training_threads = False
    a, b = world.loaders(Numbers(10), 1), world.loaders(Numbers(10), 1)

    def program(rank: int) -> None:
        for loader in (a, b):
            list(loader[rank])

    world.run(program, PATIENCE_S)
    assert world.meetings == [[True, True], [True, True]], "two loops, one behind the other"


@pytest.mark.parametrize("mode", ["sync", "partial"])
@pytest.mark.parametrize(
    ("ranks", "lengths"), [(2, (8, 3)), (3, (17, 4)), (2, (21, 5)), (4, (40, 3, 7)), (4, (14, 4, 6))]
)
def test_shorter_loaders_that_are_restarted_inside_the_loop_over_a_longer_one(
    monkeypatch: pytest.MonkeyPatch, mode: str, ranks: int, lengths: tuple[int, ...]
) -> None:
    """Behind each epoch ranks meet in a collective; one may still lack samples for its last step."""
    world = World(ranks, monkeypatch, plan_of(mode, ranks))
    longer, *shorter = [world.loaders(Numbers(length), 1) for length in lengths]
    seen: list[list[list[int]]] = [[[], []] for _ in range(ranks)]
    barrier = threading.Barrier(ranks)

    def program(rank: int) -> None:
        labels = [iter(each[rank]) for each in shorter]
        for epoch in range(2):
            for batch in longer[rank]:
                for i, each in enumerate(shorter):
                    if next(labels[i], None) is None:
                        labels[i] = iter(each[rank])
                        next(labels[i], None)  # None if the other ranks have had all of it.
                seen[rank][epoch] += batch.tolist()
                time.sleep(0.001 * rank)
            world.say(rank, Away(True, False, "barrier"))
            barrier.wait(PATIENCE_S)
            world.say(rank, Away(False, False, "barrier"))

    world.run(program, PATIENCE_S)
    for epoch in range(2):
        drawn = sorted(number for each in seen for number in each[epoch])
        assert drawn == list(range(lengths[0]))


def test_a_rank_evaluates_where_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many batches of its own, as in relaxed modes; the others go on with what it holds."""
    world = World(2, monkeypatch, plan_of("partial", 2))
    train, check = world.loaders(Numbers(40), 2), world.loaders(Numbers(12), 2)
    seen: list[list[int]] = [[], []]
    checked: list[int] = []
    evaluates = threading.Event()

    def program(rank: int) -> None:
        for count, batch in enumerate(train[rank], 1):
            seen[rank] += batch.tolist()
            if rank == 1:  # However long the other one is held up, this one leaves it five batches.
                assert evaluates.wait(PATIENCE_S)
            elif count == 5:
                evaluates.set()
                checked.extend(int(i) for each in check[0] for i in each)

    world.run(program, PATIENCE_S)
    assert sorted(seen[0] + seen[1]) == list(range(40)) and sorted(checked) == list(range(12))


class Scattered:
    """Pauses of ranks, a different order of events for each seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        time.sleep(self._random.choice((0.0, 0.0, 0.001, 0.004)))


@pytest.mark.parametrize("seed", range(6))
def test_three_loaders_in_one_loop_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4))
    world = World(ranks, monkeypatch, plan_of(draw.choice(("sync", "partial")), ranks))
    lengths = [draw.randrange(ranks, 20) for _ in range(3)]
    loaders = [world.loaders(Numbers(length), draw.choice((1, 2))) for length in lengths]
    pauses = [Scattered(seed + 10 * rank) for rank in range(ranks)]
    seen: list[list[Any]] = [[] for _ in range(ranks)]

    def program(rank: int) -> None:
        for epoch in range(3):
            for batches in zip(*(each[rank] for each in loaders), strict=False):
                seen[rank].append((epoch, [batch.tolist() for batch in batches]))
                pauses[rank]()

    world.run(program, PATIENCE_S)
    for one in range(3):
        drawn = Counter((epoch, batches[one][0]) for each in seen for epoch, batches in each)
        assert max(drawn.values(), default=1) == 1


def test_a_rank_that_has_taken_no_batch_in_an_epoch_begins_the_next_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the second loader of a `zip`, whose first one had none for this rank."""
    world = World(2, monkeypatch)
    loaders = world.loaders(Numbers(12), 2, shuffle=False)
    for epoch in range(2):
        iterators = world.iterators(loaders)
        assert epoch or world.next(0, iterators[0]) is not None
        del iterators
    assert [loader.epoch for loader in loaders] == [2, 2]
    drawn = world.epoch(loaders)
    assert sorted(int(i) for each in drawn for batch in each for i in batch) == list(range(12))


def begun(world: World, loaders: list[ShardLoader], ranks: tuple[int, ...], *, ends: bool = True) -> list[Any]:
    """An iteration of which only some ranks take batches: all, or one. Returns iterators that are still kept."""
    iterators = world.iterators(loaders)
    for rank in ranks:
        while world.next(rank, iterators[rank]) is not None and ends:
            pass
    return [] if ends else iterators


@pytest.mark.parametrize("first", [(0, 1), (0,)])
def test_iterations_of_which_a_rank_takes_nothing_are_counted_whatever_they_are_for(
    monkeypatch: pytest.MonkeyPatch, first: tuple[int, ...]
) -> None:
    """Training, evaluation, a state that is loaded, an iterator that is kept: all ranks number the next alike."""
    world = World(2, monkeypatch)
    loaders = world.loaders(Numbers(12), 2, shuffle=False)

    def check() -> None:
        drawn = world.epoch(loaders)
        assert sorted(int(i) for each in drawn for batch in each for i in batch) == list(range(12))

    def load() -> None:
        for world.rank, loader in enumerate(loaders):
            loader.load_state_dict({**loader.state_dict(), "epoch": 7, "consumed": [], "positions": -1})

    begun(world, loaders, first)
    load()
    check()
    for ranks in ((0,), (0, 1), (1,)):
        with torch.no_grad():
            begun(world, loaders, ranks)
        begun(world, loaders, ranks)
        check()
        with torch.no_grad():
            kept = begun(world, loaders, ranks, ends=False)
            begun(world, loaders, (0, 1))
        del kept
        check()
        begun(world, loaders, ranks)
        load()
        check()


class Bucketed(torch.utils.data.Sampler[int]):
    """A sampler whose length follows its epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 12 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_a_sampler_s_next_length_does_not_count_for_the_epoch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    samplers = [Bucketed(), Bucketed()]
    loaders = []
    for world.rank in (0, 1):
        loaders.append(shard(Numbers(40), 2, sampler=samplers[world.rank]))
    for epoch in range(4):
        for sampler in samplers:
            sampler.epoch = epoch
        if epoch == 1:
            begun(world, loaders, (0,))
            continue
        drawn = world.epoch(loaders)
        assert sorted(int(i) for each in drawn for batch in each for i in batch) == list(range(12 + 2 * epoch))


def test_the_state_of_an_iteration_that_has_not_begun_is_the_one_it_begins_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(1, monkeypatch)
    (loader,) = world.loaders(Numbers(12), 2)
    batches = iter(loader)
    assert loader.state_dict()["epoch"] == 0
    next(batches)
    state = loader.state_dict()
    (restored,) = world.loaders(Numbers(12), 2)
    restored.load_state_dict(state)
    rest = iter(restored)
    assert restored.state_dict() == state
    assert len(list(rest)) == 5
    loose = iter(restored)
    assert restored.state_dict()["epoch"] == 1
    del loose
    assert restored.state_dict()["epoch"] == 2, "a loop over `zip` has ended without a batch of this loader"
    left = iter(restored)
    next(left)
    loose = iter(restored)
    assert restored.state_dict()["epoch"] == 2 and restored.state_dict()["consumed"], "the loop goes on"
    left.close()  # type: ignore[attr-defined]
    del loose
    assert restored.state_dict()["epoch"] == 4


def kept(world: World) -> tuple[int, int]:
    """How much the coordinator holds, and how many stocks and batch sizes the ranks."""
    held = [each for each in gc.get_objects() if isinstance(each, (LeaseStock, BatchSizes))]
    return len(repr(state_of(world.state))), len(held)


def test_a_loader_that_is_gone_is_gone_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a garbage collector, which many programs switch off."""
    world = World(2, monkeypatch, plan_of("sync", 2))

    def program(rank: int) -> None:
        for number in range(100):
            loader = shard(Numbers(4), 1)
            for epoch in range(2):
                for _ in loader:
                    if number % 3 == rank and epoch:
                        break

    gc.disable()
    try:
        found = []
        for _ in range(3):
            world.run(program, PATIENCE_S)
            found.append(kept(world))
    finally:
        gc.enable()
    assert found[2][0] < 1.1 * found[0][0] and found[2][1] <= found[0][1] + 4
