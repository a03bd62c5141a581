"""`shard` and `work` over ranks in one process: the user's loader, orders, streams, states."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from scheduler.records import Plan
from scheduler.rules.step_layout import StepLayout
from star_hvd.channel.messages.microbatches import MicrobatchOpen, MicrobatchShares
from star_hvd.config import Config
from star_hvd.engine.buckets import pack
from star_hvd.engine.device import Streams
from star_hvd.epochs.microbatches import LeasedMicrobatches
from star_hvd.errors import StarError
from star_hvd.input.lease_stock import BatchSizer
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.input.sample_order import SamplerOrder
from star_hvd.loader import ShardLoader, shard, work
from star_hvd.runtime.runtime import Runtime
from tests.support.device_world import running
from tests.support.effort import cases
from tests.support.fake_device import CUDA0
from tests.support.loaders import Numbers, ReadyBatches, World


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> World:
    """A job of one rank."""
    return World(1, monkeypatch)


def numbers(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch]


def with_process(samples: list[int]) -> tuple[int, list[int]]:
    """Collates in the process that loads."""
    return os.getpid(), samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_all_of_a_loader_s_options_are_kept_and_every_sample_is_there_once(
    alone: World, workers: int, in_order: bool
) -> None:
    found: list[int] = []
    processes: list[set[int]] = []
    options: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    own = DataLoader(
        Numbers(50), batch_size=4, shuffle=True, num_workers=workers, in_order=in_order, collate_fn=with_process,
        **options,
    )  # fmt: skip
    loader = shard(own)
    for _ in range(3):
        batches = list(loader)
        processes.append({process for process, _ in batches})
        taken = numbers(samples for _, samples in batches)
        assert sorted(taken) == list(range(50))
        found += taken
    assert len(processes[0]) == max(1, workers) and processes[0] == processes[1] == processes[2], "workers are kept"
    assert (os.getpid() in processes[0]) == (not workers)
    assert found[:50] != found[50:100]
    assert len(loader.lease_waits) == 3


def epoch_of(world: World, loaders: list[ShardLoader], until: int | None = None) -> list[int]:
    """The numbers that all ranks take of an epoch, or of its first `until` batches of each rank."""
    return [i for batches in world.epoch(loaders, until) for i in numbers(batches)]


def test_orders_of_torch_s_own_samplers_are_taken_over(alone: World, caplog: pytest.LogCaptureFixture) -> None:
    data = Numbers(20)
    assert numbers(shard(DataLoader(data, batch_size=3))) == list(range(20)), "not shuffled"
    assert numbers(shard(DataLoader(data, batch_size=3, drop_last=True))) == list(range(18))
    assert numbers(shard(DataLoader(data, batch_size=3, shuffle=True), seed=4)) == numbers(shard(data, 3, seed=4))
    shared = DistributedSampler(data, num_replicas=2, rank=1, seed=4)
    with caplog.at_level("INFO", "star_hvd"):
        loader = shard(DataLoader(data, batch_size=3, sampler=shared))
    assert "replaces a DistributedSampler" in caplog.text
    assert numbers(loader) == numbers(shard(data, 3, seed=4))


class Balancing(DistributedSampler[int]):
    """A rank's part of an order in which every third sample comes twice."""

    def __iter__(self) -> Iterator[int]:
        order = [i for i in range(12) for _ in range(2 - (i % 3 > 0))]
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return 16 // self.num_replicas


class PartOnly(torch.utils.data.Sampler[int]):
    """A rank's part too, of a class that is not torch's."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 12, 2))


def test_a_sampler_that_gives_a_rank_its_own_part_is_refused_with_what_to_do(alone: World) -> None:
    """Replaced by a permutation, it would lose what it is for; taken as it is, samples would be missing."""
    data = Numbers(12)
    within = torch.utils.data.BatchSampler(DistributedSampler(data, 2, 0), 3, drop_last=False)
    for options, name in (
        ({"batch_size": 3, "sampler": Balancing(data, 2, 0)}, "Balancing"),
        ({"batch_size": 3, "sampler": PartOnly()}, "PartOnly"),
        ({"batch_sampler": within}, "DistributedSampler"),
        ({"batch_sampler": torch.utils.data.BatchSampler(PartOnly(), 3, drop_last=False)}, "PartOnly"),
    ):
        with pytest.raises(ValueError, match=f"a {name}, which gives each rank its own part.*over the whole data set"):
            shard(DataLoader(data, **options))
    whole = numbers(shard(DataLoader(data, batch_size=3, sampler=Balancing(data, 1, 0))))
    assert whole == [i for i in range(12) for _ in range(2 - (i % 3 > 0))]


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "batches"])
def test_an_order_does_not_depend_on_what_a_process_has_drawn_from_the_sampler_s_generator(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As of the ranks of an elastic job, of which one has just joined."""
    data, world, loaders, generators = Numbers(20), World(2, monkeypatch), [], []
    for world.rank in (0, 1):
        generator = torch.Generator().manual_seed(5)
        generators.append(generator)
        weighted = WeightedRandomSampler([1.0] * 20, 20, replacement=False, generator=generator)
        options: dict[str, Any] = {
            "shuffle": {"batch_size": 2, "shuffle": True, "generator": generator},
            "weighted": {"batch_size": 2, "sampler": weighted},
            "batches": {"batch_sampler": torch.utils.data.BatchSampler(weighted, 2, drop_last=False)},
        }[kind]
        loaders.append(shard(DataLoader(data, **options)))
    torch.rand(3, generator=generators[0])
    state = generators[0].get_state()
    first, second = epoch_of(world, loaders), epoch_of(world, loaders)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert torch.equal(generators[0].get_state(), state) and generators[0].initial_seed() == 5
    if kind == "shuffle":
        world = World(1, monkeypatch)
        assert numbers(loaders_of(world, data, seed=5)[0]) == numbers(
            loaders_of(world, DataLoader(data, 2, shuffle=True, generator=generators[0]))[0]
        )


def loaders_of(world: World, data: Any, **options: Any) -> list[ShardLoader]:
    return world.loaders(data, **({"batch_size": 2} if isinstance(data, Numbers) else {}), **options)


def test_other_samplers_give_the_order_equally_on_all_ranks(alone: World) -> None:
    weighted = WeightedRandomSampler([1.0] * 10 + [5.0] * 10, 50)
    state = torch.get_rng_state()
    orders = [SamplerOrder(weighted, 3).of(epoch) for epoch in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state), "the program's own generator is as it was"
    assert orders[0].digest == orders[1].digest != orders[2].digest
    loader = shard(DataLoader(Numbers(20), batch_size=4, sampler=weighted), seed=3)
    assert len(loader) == 13
    assert numbers(loader) == orders[0].indices(0, 50) and numbers(loader) == orders[2].indices(0, 50)


def test_a_batch_sampler_s_batches_are_handed_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    batches = [[0, 1, 2], [9], [3, 4], [5, 6, 7, 8], [10, 11]]
    loaders = world.loaders(DataLoader(Numbers(12), batch_sampler=batches))
    assert sorted(epoch_of(world, loaders)) == list(range(12))
    assert sorted(weight * world.runs[0].reference_samples for weight in world.weights) == [1, 2, 2, 3, 4]


class Wrong(torch.utils.data.Sampler[int]):
    """It does not have the length it says."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Stream(torch.utils.data.IterableDataset[int]):
    """One rank's share."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (Numbers(4), {}, ValueError, "batch_size is None"),
        (Numbers(4), {"batch_size": 0}, ValueError, "expected a positive number"),
        (DataLoader(Numbers(4), batch_size=None), {}, ValueError, "batch_size=None; give it a batch_size"),
        (Stream(4), {"batch_size": 2}, ValueError, "pass batches="),
        (Stream(4), {"batch_size": 2, "batches": -1}, ValueError, "expected 0 or more"),
        (Numbers(4), {"batch_size": 2, "batches": 3}, ValueError, "for an IterableDataset only"),
        (iter([1]), {"batch_size": 2}, ValueError, "map-style dataset with a length"),
        (Numbers(4), {"batch_size": 2, "batch_sampler": [[1]]}, ValueError, "leave them out"),
        (Numbers(4), {"batch_size": 2, "workers": 2}, TypeError, "workers"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    alone: World, data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shard(data, **options)


def test_a_sampler_that_contradicts_its_length_is_refused(alone: World) -> None:
    with pytest.raises(ValueError, match="has the length 7 and gives 5 items"):
        list(shard(Numbers(9), 2, sampler=Wrong()))


def test_ranks_with_different_orders_or_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other_order, other_length = range(5, -1, -1), range(5)
    for samplers, message in (((range(6), other_order), "different orders"), ((range(6), other_length), "of the same")):
        world = World(2, monkeypatch)
        batches = []
        for world.rank, sampler in enumerate(samplers):
            batches.append(iter(shard(Numbers(6), 2, sampler=sampler)))
        assert world.next(0, batches[0]) is not None
        with pytest.raises(ValueError, match=message):
            world.next(1, batches[1])


def test_with_drop_last_all_ranks_have_as_many_batches_as_len_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program that meets in every tenth iteration, say, would meet in different ones after some epochs."""
    world = World(3, monkeypatch, Plan.sync(3))
    loaders = world.loaders(Numbers(3 * 4 * 5 + 4 + 1), 4, drop_last=True)
    for _ in range(2):
        found = world.epoch(loaders)
        assert [len(each) for each in found] == [len(loader) for loader in loaders] == [5] * 3


def test_a_stream_goes_on_until_the_queue_has_counted_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    loaders = world.loaders(Stream(100), 4, batches=10)
    assert len(loaders[0]) == 5
    for _ in range(3):
        assert len(epoch_of(world, loaders)) == 40
    short = world.loaders(Stream(8), 4, batches=10)
    assert len(epoch_of(world, short)) == 16, "both shares are used up before"
    assert len(epoch_of(world, short)) == 16
    batches = iter(short[0])
    assert world.next(0, batches) is not None
    with pytest.raises(ValueError, match="cannot say where its ranks are"):
        short[0].state_dict()


def by_time(sequences: list[list[int]]) -> torch.Tensor:
    """Collate sequences with time as the first dimension."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in sequences])


@pytest.mark.parametrize("collate", [by_time, list, lambda samples: tuple(zip(samples, strict=True))])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_stream_weighs_as_many_samples_as_it_has_however_they_are_collated(
    alone: World, collate: Any, workers: int
) -> None:
    """Sequences of 1 to 7 items: the size of the first thing in a batch says nothing about its samples."""
    sequences = [[0] * length for length in (7, 1, 2, 3, 1, 1, 5)]
    loader = shard(Listed(sequences), 3, batches=3, collate_fn=collate, num_workers=workers)
    assert len(list(loader)) == 3
    assert [weight * alone.runs[0].reference_samples for weight in alone.weights] == [3, 3, 1]


def test_a_batch_of_a_stream_weighs_a_usual_one_where_its_samples_cannot_be_counted(alone: World) -> None:
    """Workers that import their program anew would have to import this package too."""
    options: dict[str, Any] = {"collate_fn": by_time, "num_workers": 1, "multiprocessing_context": "forkserver"}
    list(shard(Listed([[0] * 7, [0], [0, 0]]), 2, batches=2, **options))
    assert [weight * alone.runs[0].reference_samples for weight in alone.weights] == [2, 2]


class Listed(torch.utils.data.IterableDataset[list[int]]):
    """A stream of what is in a list."""

    def __init__(self, items: list[list[int]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._items)


class SlowStream(Stream):
    """The other rank would take its batches."""

    def __iter__(self) -> Iterator[int]:
        for i in range(self._length):
            time.sleep(0.02)
            yield i


def fed(world: World, reason: str, net: torch.nn.Module | None = None) -> None:
    """Give every rank an optimizer, which has that reason to meet all ranks within a pass, and has made a step."""
    params = list((net or torch.nn.Linear(1, 1)).parameters())
    for run in world.runs:
        applier = SimpleNamespace(optimizer=torch.optim.SGD(params, lr=0.1))
        run.drivers = {
            0: SimpleNamespace(
                equal_batches=reason,
                engine=SimpleNamespace(applier=applier),
                reporter=SimpleNamespace(note_samples=lambda *_: None),
            )
        }


def stepping(world: World, rank: int, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with a step behind each."""
    while (batch := world.next(rank, batches)) is not None:
        yield batch
        world.runs[rank].steps_ended += 1


@pytest.mark.parametrize("found", ["before", "by its layers"])
def test_a_stream_and_work_are_dealt_evenly_where_ranks_meet_within_their_passes(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    world = World(2, monkeypatch)
    net = torch.nn.Embedding(3, 2, sparse=True)
    fed(world, "sparse gradients" if found == "before" else "", None if found == "before" else net)
    streams = []
    for world.rank, kind in enumerate((Stream, SlowStream)):
        streams.append(shard(kind(100), 1, batches=20))
    for _ in range(2):
        assert [len(batches) for batches in world.epoch(streams)] == [10, 10]
    ranges = []
    for world.rank in (0, 1):
        ranges.append(work(20, 2))
    taken = [span for _ in range(5) for span in [world.next(0, ranges[0])]]
    assert taken == [(0, 2), (4, 6), (8, 10), (12, 14), (16, 18)], "rank 1 has not begun"


@pytest.mark.parametrize(
    ("batches", "found", "length", "message"),
    [
        (11, "before", 100, "11 batches cannot be divided evenly.*sparse gradients; take a multiple of 2"),
        (20, "in the first step", 100, "found out only after the epoch had begun"),
        (20, "before", 4, "rank 0 ended after 4 of 10"),
        (20, "never", 4, ""),
        (11, "never", 100, ""),
    ],
)
def test_a_stream_that_cannot_be_divided_evenly_is_refused_where_ranks_meet_within_their_passes(
    monkeypatch: pytest.MonkeyPatch, batches: int, found: str, length: int, message: str
) -> None:
    world = World(2, monkeypatch)
    fed(world, "sparse gradients" if found == "before" else "")
    for trains in (False, True):
        loaders = world.loaders(Stream(length), 1, batches=batches)
        world.rank = 0
        steps = stepping(world, 0, iter(loaders[0])) if trains else iter(loaders[0])
        assert world.next(0, steps) is not None
        if found == "in the first step":
            fed(world, "sparse gradients")
        if trains and message:
            with pytest.raises(StarError, match=message):
                for _ in range(5):
                    next(steps)
        else:  # Without steps no rank waits.
            assert [next(steps) for _ in range(3)]
        steps.close()  # type: ignore[attr-defined]
        fed(world, "sparse gradients" if found == "before" else "")


def test_work_that_cannot_be_divided_evenly_is_refused_where_ranks_meet_within_their_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(2, monkeypatch)
    fed(world, "sparse gradients")
    world.rank = 0
    steps = stepping(world, 0, work(21, 2))
    with pytest.raises(StarError, match="21 numbers cannot be divided evenly.*take a multiple of 2"):
        for _ in range(5):
            next(steps)


def test_a_second_iteration_inside_a_loop_over_the_same_loader_is_refused(alone: World) -> None:
    """It takes the place of the first, which waited for batches that nobody forms."""
    loader = shard(Numbers(12), 2)
    with pytest.raises(StarError, match="make a second loader for the inner one"):
        for _ in loader:
            next(iter(loader))
    with pytest.raises(StarError, match="make a second loader for the inner one"):
        list(zip(loader, loader, strict=True))
    assert sorted(numbers(loader)) == list(range(12)), "it can be iterated again"


def test_loaders_are_known_by_the_order_in_which_they_are_first_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins an elastic job makes all of its loaders anew; the others have theirs, or make some."""
    World(2, monkeypatch)
    unused, first, second = (shard(Numbers(length), 2) for length in (20, 8, 4))
    list(first)
    world = World(2, monkeypatch)  # Horovod was initialized again.
    world.rank = 1
    theirs = [shard(Numbers(length), 2) for length in (4, 8)]
    first.set_epoch(0)
    found = []
    for mine, other in ((second, theirs[0]), (first, theirs[1])):
        found.append(sorted(i for batches in world.epoch([mine, other]) for i in numbers(batches)))
    assert found == [list(range(4)), list(range(8))] and len(unused) == 5


def test_the_batch_of_weight_1_is_a_usual_one_of_the_loader_that_trains_first(alone: World) -> None:
    """Not that of a loader for evaluation that was made before, nor 1 for batches that a sampler forms."""
    evaluation = shard(Numbers(64), 32)
    batches = [[0], [1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11]]
    training = shard(DataLoader(Numbers(12), batch_sampler=batches))
    with torch.no_grad():
        list(evaluation)
    list(training)
    assert alone.runs[0].reference_samples == 3.0 and sorted(alone.weights) == [1 / 3, 1.0, 1.0, 5 / 3]
    list(evaluation)
    assert alone.runs[0].reference_samples == 3.0, "weights of different loaders are in one unit"


class Augmenting(DataLoader[int]):
    """Does something with its batches that is known to it alone."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 100


def test_what_a_loader_does_in_its_own_iteration_is_lost_with_a_warning(
    alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert sorted(numbers(shard(Augmenting(Numbers(4), 2)))) == [0, 1, 2, 3]
    assert "of a Augmenting, but not its own __iter__" in caplog.text
    caplog.clear()
    shard(DataLoader(Numbers(4), 2))
    assert not caplog.messages


def test_keys_that_look_like_numbers_stay_keys(alone: World) -> None:
    keys = ["000", "001", "002"]
    data: Any = {key: int(key) + 7 for key in keys}
    assert sorted(numbers(shard(data, 2, sampler=keys))) == [7, 8, 9]


class Growing(BatchSizer):
    """Batch sizes 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def size(self, batch_index: int) -> int:
        self.asked.append(batch_index)
        return batch_index + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hook_says_the_size_of_every_batch(alone: World, workers: int) -> None:
    loader = shard(Numbers(30), 4, num_workers=workers)
    loader.batch_sizer = sizer = Growing()
    sizes = [len(batch) for batch in loader]
    assert sizes[:-1] == list(range(1, len(sizes))) and sum(sizes) == 30
    assert list(dict.fromkeys(sizer.asked)) == list(range(len(sizes)))


@settings(max_examples=cases(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.integers(0, 60),
    batch=st.integers(1, 7),
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    until=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    sampler=st.booleans(),
)
def test_an_epoch_goes_on_from_its_state_with_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, samples: int, batch: int, ranks: list[int], until: list[int], sampler: bool
) -> None:
    """Interrupted again and again, each time with another number of ranks."""
    found: list[int] = []
    state: dict[str, Any] | None = None
    order = random.Random(3).sample(range(samples), samples)
    for part, count in enumerate(ranks):
        world = World(count, monkeypatch)
        options = {"sampler": order} if sampler else {"seed": 2}
        loaders = world.loaders(Numbers(samples), batch, **options)
        if state is not None:
            for world.rank, loader in enumerate(loaders):
                loader.load_state_dict(state)
        last = part == len(ranks) - 1
        found += epoch_of(world, loaders, None if last else until[part])
        world.rank = 0
        state = loaders[0].state_dict()
        if state["epoch"] == 1:  # They came to the end of the epoch before they were to be interrupted.
            break
    assert sorted(found) == list(range(samples))
    assert state is not None and state["consumed"] == [] and state["epoch"] == 1


def test_only_batches_for_the_steps_of_the_checkpoint_count_as_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    loaders = world.loaders(Numbers(40), 4, shuffle=False)
    batches = world.iterators(loaders)
    seen: list[int] = []
    for step in range(2):
        world.steps = [step, step]
        seen += [i for rank in (0, 1) for i in numbers([world.next(rank, batches[rank])])]
    world.steps = [2, 2]
    assert world.next(1, batches[1]) is not None, "rank 1 has begun its third step, rank 0 saves after its second"
    world.rank = 0
    consumed = loaders[0].state_dict()["consumed"]
    spans = zip(consumed[::2], consumed[1::2], strict=True)
    assert sorted(p for start, stop in spans for p in range(start, stop)) == sorted(seen)


def test_where_ranks_step_alone_a_batch_counts_as_consumed_with_the_parameters_that_contain_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with servers: rank 1 is in the middle of its first batch while rank 0 makes two steps."""
    world = World(2, monkeypatch)
    loaders = world.loaders(Numbers(40), 4, shuffle=False)
    batches = world.iterators(loaders)
    world.steps, world.alone = [0, 0], True

    def consumed() -> list[int]:
        world.rank = 0
        bounds = loaders[0].state_dict()["consumed"]
        return [p for start, stop in zip(bounds[::2], bounds[1::2], strict=True) for p in range(start, stop)]

    slow = numbers([world.next(1, batches[1])])
    seen: list[int] = []
    for step in (1, 2):
        seen += numbers([world.next(0, batches[0])])
        world.steps[0], world.own_steps[0] = step, step
    assert consumed() == sorted(seen)
    world.steps[1], world.own_steps[1] = 3, 1  # Its gradient is in version 3, which rank 0 has not got.
    assert consumed() == sorted(seen)
    world.steps[0] = 3
    assert consumed() == sorted(seen + slow)
    seen += numbers([world.next(0, batches[0])])
    world.own_steps[0] = 3  # A step by itself, without a new version, as between two averagings.
    helped = numbers([world.next(1, batches[1])])
    assert consumed() == sorted(seen + slow)
    world.steps = [4, 4]  # An averaging that rank 1's helper made while its training thread was computing.
    assert consumed() == sorted(seen + slow)
    world.own_steps[1], world.lacking[1] = 2, {1: 4}
    world.next(1, batches[1])
    assert consumed() == sorted(seen + slow), "the step came after the averaging"
    world.steps = [5, 5]
    assert consumed() == sorted(seen + slow + helped)


def test_another_epoch_cannot_be_chosen_for_a_state_of_the_middle_of_one(alone: World) -> None:
    """What was consumed would be other samples: some would be missing, and some taken twice."""
    loader = shard(Numbers(12), 2, seed=1)
    loader.set_epoch(3)
    batches = iter(loader)
    seen = numbers([next(batches), next(batches)])
    state = loader.state_dict()
    for again in range(2):
        other = shard(Numbers(12), 2, seed=1)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=r"of the middle of epoch 3; call set_epoch\(3\)"):
            other.set_epoch(4)
        assert other.epoch == 3
        if again:
            other.load_state_dict(state)
        other.set_epoch(3)  # As `for epoch in range(start, epochs)` does.
        assert sorted(seen + numbers(other)) == list(range(12)) and other.epoch == 4
        other.set_epoch(7)
        assert sorted(numbers(other)) == list(range(12))


def test_a_state_is_of_the_seed_that_the_order_follows_from(alone: World) -> None:
    """Which `DistributedSampler` and the generator of a DataLoader bring along."""
    data = Numbers(12)

    def sampled(seed: int) -> ShardLoader:
        return shard(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=seed)))

    def generated(seed: int) -> ShardLoader:
        return shard(DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(seed)))

    for make in (sampled, generated):
        loader = make(4)
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(ValueError, match="is of seed 4.*this loader has seed 5"):
            make(5).load_state_dict(state)
        make(4).load_state_dict(state)


def test_a_state_of_another_loader_is_refused(alone: World) -> None:
    state = shard(Numbers(8), 2, seed=1).state_dict()
    with pytest.raises(ValueError, match="make the loader as it was"):
        shard(Numbers(8), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="version None"):
        shard(Numbers(8), 2).load_state_dict({})
    loader = shard(Numbers(8), 2, shuffle=False)
    next(iter(loader))
    other = shard(Numbers(9), 2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="epoch of 8 samples, the data has 9"):
        list(other)


def test_micro_batches_with_workers_that_are_initialized_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that is taken over is loaded in the training process; whether the data set is open there is not known."""
    for ranks, options in (
        (2, {"num_workers": 1, "worker_init_fn": print, "microbatches": 2}),
        (2, {"num_workers": 1, "worker_init_fn": print}),
        (2, {"num_workers": 1, "microbatches": 2}),
        (1, {"num_workers": 1, "worker_init_fn": print, "microbatches": 2}),
    ):
        World(ranks, monkeypatch)
        shard(Numbers(8), 4, **options)
    assert caplog.text.count("worker_init_fn is not called") == 1


def test_ranges_of_work(alone: World) -> None:
    for _ in range(3):
        assert list(work(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    outer = work(100, 4)
    assert next(outer) == (0, 4)
    for _ in range(3):
        assert sum(stop - start for start, stop in work(7, 3)) == 7, "evaluated inside the loop"
    assert [start for start, _ in outer] == list(range(4, 100, 4))
    with pytest.raises(ValueError, match="expected at least 0 and at least 1"):
        work(5, 0)


def stock_of_two() -> MicrobatchStock:
    """A rank's two micro-batches of an epoch of one step."""
    opening = MicrobatchOpen(0, 0, 8, 8, 2, False, 0, 7, [])
    stock = MicrobatchStock(0, StepLayout(8, 8, 2, 1), opening, send=lambda message: None)
    stock.on_message(MicrobatchShares(0, 0, 0, [2], [1, 1]))
    return stock


def test_a_pass_ends_when_its_device_has_computed_it_not_when_its_kernels_are_queued() -> None:
    """Else a slow rank begins its whole share at once, and nothing of it can be taken over; and its times are none."""
    with running() as device:
        (bucket,) = pack([torch.nn.Parameter(torch.zeros(3, device=CUDA0))], 1 << 10)
        engine = SimpleNamespace(streams=Streams([bucket], device))
        timer = SimpleNamespace(add_outside=lambda seconds: None)
        driver = SimpleNamespace(engine=engine, timer=timer, forget_parts=lambda: None)
        run: Any = SimpleNamespace(drivers={0: driver}, config=Config(), reference_samples=8.0, in_hand=None)
        run.await_devices = functools.partial(Runtime.await_devices, run)
        run.steps_made = lambda: 0
        left: list[int] = []

        def await_microbatch(stock: MicrobatchStock, steps_made: int) -> bool:
            left.append(len(device.current.queue))
            stock.decided(0.0)
            found = bool(stock.reserve(steps_made))
            assert not stock.at_work
            return found

        run.client = SimpleNamespace(await_microbatch=await_microbatch)
        stock, order, feeder = stock_of_two(), cast(Any, SimpleNamespace(indices=None)), cast(Any, ReadyBatches())
        parts = iter(LeasedMicrobatches(run, stock, order, feeder, 1, lambda *_: None))
        device.finish()
        bucket.flat.fill_(2.0)  # Something else: no pass is under way.
        assert next(parts) == "data" and left == [1] and stock.at_work
        bucket.flat.fill_(1.0)  # The pass.
        assert not run.in_hand.is_last and left == [1, 0]
        assert not stock.at_work and not device.faults
        parts.close()
