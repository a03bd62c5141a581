"""`shard`: loaders over several worlds, samplers that the program still sets, and data sets that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from horovod.torch.elastic import ElasticSampler
from torch.utils.data import DataLoader, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from star_hvd.input.sample_order import SamplerOrder
from star_hvd.loader import shard
from star_hvd.runtime.runtime import Runtime
from tests.support.loaders import Numbers, World


class Counting(torch.utils.data.IterableDataset[int]):
    """A stream of numbers."""

    def __init__(self, load_s: float = 0.0) -> None:
        self._load_s = load_s

    def __iter__(self) -> Iterator[int]:
        for i in range(100):
            time.sleep(self._load_s)
            yield i


def trains(world: World, net: torch.nn.Module) -> None:
    """Give each rank an optimizer of a network."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for run in world.runs:
        engine = SimpleNamespace(applier=SimpleNamespace(optimizer=optimizer))
        reporter = SimpleNamespace(note_samples=lambda *_: None)
        driver = SimpleNamespace(engine=engine, equal_batches="", reporter=reporter)
        cast(Runtime, run).drivers[0] = cast(Any, driver)


def test_whether_a_stream_is_dealt_evenly_is_found_out_again_in_a_new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that grows from one rank, which meets nobody, to two."""
    net = torch.nn.Embedding(3, 2, sparse=True)  # Its gradients are reduced within the ranks' passes.
    trains(World(1, monkeypatch), net)
    first = shard(Counting(), 1, batches=20)
    assert len(list(first)) == 20
    world = World(2, monkeypatch)  # Horovod was initialized again.
    trains(world, net)
    world.rank = 1
    second = shard(Counting(0.02), 1, batches=20)
    assert [len(batches) for batches in world.epoch([first, second])] == [10, 10]


def numbers(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch]


@pytest.mark.parametrize("kind", [DistributedSampler, ElasticSampler])
def test_an_epoch_set_on_the_replaced_sampler_counts(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """As in a program that is changed only where it makes its loader."""
    World(1, monkeypatch)
    if kind is ElasticSampler:
        monkeypatch.setattr("horovod.torch.elastic.sampler.rank", lambda: 0)
        monkeypatch.setattr("horovod.torch.elastic.sampler.size", lambda: 1)
    data = Numbers(12)
    sampler = kind(data, seed=3) if kind is ElasticSampler else kind(data, 1, 0, seed=3)
    loader, plain = shard(DataLoader(data, 4, sampler=sampler)), shard(data, 4, seed=3)
    orders = [numbers(plain) for _ in range(8)]
    sampler.set_epoch(5)
    assert numbers(loader) == orders[5]
    assert numbers(loader) == orders[6], "an iteration without set_epoch is of the next epoch"
    sampler.set_epoch(7)
    assert numbers(loader) == orders[7]
    loader.set_epoch(2)
    assert numbers(loader) == orders[2], "the sampler's epoch is the same as before"


def test_the_replaced_sampler_s_epoch_has_to_be_that_of_a_state_of_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    World(1, monkeypatch)
    sampler = DistributedSampler(Numbers(12), 1, 0)
    loader = shard(DataLoader(Numbers(12), 4, sampler=sampler))
    sampler.set_epoch(5)
    batches = iter(loader)
    begun = numbers([next(batches)])
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    assert state["epoch"] == 5
    loader.load_state_dict(state)
    sampler.set_epoch(6)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"set_epoch\(6\) on .* is of the middle of epoch 5"):
            iter(loader)
    sampler.set_epoch(5)
    assert sorted(begun + numbers(loader)) == list(range(12))


def test_an_epoch_set_before_a_reset_does_not_contradict_the_state_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program may set it once for several iterations, of which a later one is interrupted."""
    World(1, monkeypatch)
    sampler = DistributedSampler(Numbers(12), 1, 0)
    loader = shard(DataLoader(Numbers(12), 4, sampler=sampler))
    sampler.set_epoch(3)
    list(loader)
    batches = iter(loader)
    begun = numbers([next(batches)])
    state = loader.state_dict()
    assert state["epoch"] == 4
    World(1, monkeypatch)
    loader.load_state_dict(state)
    assert sorted(begun + numbers(loader)) == list(range(12))


@pytest.mark.parametrize("alone", [False, True])
def test_a_batch_fetched_ahead_is_consumed_with_its_own_step(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Where ranks make their steps together, and where each makes its own, as with servers."""
    world = World(2, monkeypatch)
    world.ahead, world.alone = True, alone
    loaders = world.loaders(Numbers(400), 4, shuffle=False)  # Enough that no rank waits for what the other one holds.
    batches = world.iterators(loaders)

    def consumed() -> list[int]:
        world.rank = 0
        bounds = loaders[0].state_dict()["consumed"]
        return [p for start, stop in zip(bounds[::2], bounds[1::2], strict=True) for p in range(start, stop)]

    world.steps, used = [0, 0], list[int]()
    fetched = [numbers([world.next(rank, batches[rank])]) for rank in (0, 1)]
    for step in range(1, 4):
        following = [numbers([world.next(rank, batches[rank])]) for rank in (0, 1)]
        used += [i for batch in fetched for i in batch]
        world.steps, world.own_steps, fetched = [step, step], [step, step], following
        assert sorted(consumed()) == sorted(used)


class Corrupt(Numbers):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("corrupt")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_that_ends_the_epoch_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """A program may catch it and ask for the next batch, which torch's loader would give."""
    World(1, monkeypatch)
    batches = iter(shard(Corrupt(12), 2, shuffle=False, num_workers=workers))
    assert numbers([next(batches), next(batches)]) == [0, 1, 2, 3] and not caplog.messages
    with pytest.raises(ValueError, match="corrupt"):
        next(batches)
    assert next(batches, None) is None
    warned = [text for text in caplog.messages if "a batch ended this epoch on rank 0, also if the program" in text]
    assert len(warned) == 1 and ": 8 samples go to other ranks" in warned[0]


@pytest.fixture
def default_elsewhere() -> Iterator[None]:
    """The program's default device has no values, as a GPU's are not the host's."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_sampler_draws_on_the_host_whatever_the_program_s_default_device(default_elsewhere: None) -> None:
    sampler = SubsetRandomSampler(range(20))
    order = SamplerOrder(sampler, 3).of(0)
    assert sorted(order.indices(0, 20)) == list(range(20)) and order.digest == SamplerOrder(sampler, 3).of(0).digest
    again = SamplerOrder(sampler, 3).of(0, saved=order.saved)
    assert again.digest == order.digest and again.indices(0, 20) == order.indices(0, 20)


def test_a_sampler_with_a_generator_of_its_own_draws_on_that_device(default_elsewhere: None) -> None:
    drawn_on = []

    class Drawing(SubsetRandomSampler):
        """Notes where it draws."""

        def __iter__(self) -> Iterator[int]:
            drawn_on.append(torch.empty(1).device.type)
            return iter(range(3))

    class OfDevice(torch.Generator):
        """Of another device than the host."""

        device = torch.device("meta")

    for generator in (None, torch.Generator("cpu"), OfDevice()):
        SamplerOrder(Drawing(range(3), generator), 0).of(0)
    assert drawn_on == ["cpu", "cpu", "meta"]


@pytest.mark.parametrize("initialized", [True, False])
def test_generators_of_gpus_are_seeded_for_a_sampler_and_restored(
    initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose weights are on a GPU draws there. A process that does not use its GPUs does not begin to."""
    states = {0: 10, 1: 11}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.update(dict.fromkeys(states, seed)))
    drawn = []

    class Drawing(SubsetRandomSampler):
        """Notes the states of the GPUs' generators."""

        def __iter__(self) -> Iterator[int]:
            drawn.append(tuple(states.values()))
            return iter(range(3))

    for epoch in (0, 0, 1):
        SamplerOrder(Drawing(range(3)), 7).of(epoch)
    assert states == {0: 10, 1: 11}
    if initialized:
        assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != (10, 11)
    else:
        assert set(drawn) == {(10, 11)}
