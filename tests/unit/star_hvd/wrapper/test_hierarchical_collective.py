"""Sums in stages: whole on all ranks, in whatever order the operations of the stages end."""

from __future__ import annotations

import random
import time

import pytest
import torch

from star_hvd.wrapper.hierarchical_collective import HierarchicalCollective
from tests.support.world import Network, Port

PATIENCE_S = 60.0


class HandOutNetwork(Network):
    """The first rank's tensor for all."""

    def result(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]


class World:
    """Hosts with so many ranks each."""

    def __init__(self, sizes: list[int]) -> None:
        self.staged = True
        self.flat, self.among = Network(sum(sizes)), Network(len(sizes))
        self.networks = [self.flat, self.among]
        self.ranks: list[HierarchicalCollective] = []
        for host, size in enumerate(sizes):
            inside, out = Network(size), HandOutNetwork(size)
            self.networks += [inside, out]
            for rank in range(size):
                among = [("among", Port(self.among, host))] if rank == 0 else []
                stages = [("in", Port(inside, rank)), *among, ("out", Port(out, rank))] if size > 1 else among
                port = Port(self.flat, len(self.ranks))
                name = f"star-hosts-test-{len(self.ranks)}"
                self.ranks.append(HierarchicalCollective(port, stages, lambda: self.staged, name))

    def end_one(self, rng: random.Random) -> None:
        ready = [(network, name) for network in self.networks for name in network.ready()]
        if ready:
            network, name = rng.choice(ready)
            network.end(name)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [1, 2, 1]])
def test_all_ranks_have_the_sum(sizes: list[int], seed: int) -> None:
    rng, world = random.Random(seed), World(sizes)
    for step in range(3):
        world.staged = step != 1  # The step of another mode is between two.
        tensors = [{name: torch.full((2,), float(10**rank)) for name in "abc"} for rank in range(len(world.ranks))]
        tickets = [
            [collective.submit(name, each[name]) for name in rng.sample("abc", 3)]
            for collective, each in zip(world.ranks, tensors, strict=True)
        ]
        limit_s = time.monotonic() + PATIENCE_S
        while any(tickets):
            assert time.monotonic() < limit_s, "ranks wait for different tensors"
            world.end_one(rng)
            for collective, left in zip(world.ranks, tickets, strict=True):
                for ticket in [ticket for ticket in left if collective.poll(ticket)]:
                    collective.finish(ticket)
                    collective.finish(ticket)  # By another thread that waited for it too.
                    left.remove(ticket)
        total = float(sum(10**rank for rank in range(len(world.ranks))))
        assert all(tensor.tolist() == [total, total] for each in tensors for tensor in each.values())
        assert bool(world.flat.sums) == (step > 0)
    world.stop()


def test_stages_go_on_while_no_thread_asks() -> None:
    world, rng = World([2, 1]), random.Random(0)
    for collective in world.ranks:
        collective.submit("a", torch.ones(1))
    limit_s = time.monotonic() + PATIENCE_S
    while not any("a.out" in network.queues for network in world.networks):
        assert time.monotonic() < limit_s, "no thread submitted the last stage"
        world.end_one(rng)
        time.sleep(0.001)
    world.stop()


def test_a_failure_is_raised_where_the_tensor_is_collected() -> None:
    class Broken(Port):
        def submit(self, name: str, tensor: torch.Tensor) -> int:
            raise RuntimeError("the world is gone")

    network = Network(1)
    stages = [("in", Port(network, 0)), ("out", Broken(network, 0))]
    collective = HierarchicalCollective(Port(network, 0), stages, lambda: True, "star-hosts-test")
    ticket = collective.submit("a", torch.ones(1))
    network.end("a.in")
    assert collective.poll(ticket)
    with pytest.raises(RuntimeError, match="the world is gone"):
        collective.finish(ticket)
    collective.stop()
