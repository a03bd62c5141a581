"""Reductions in an order of our own: all ranks get through, whatever their speeds, and little is under way."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from star_hvd.engine.device import Streams
from star_hvd.wrapper.ordered_collective import OrderedCollective
from tests.support.world import Network, Port

PATIENCE_S = 60.0


class Recorder(Port):
    """Notes the order of submissions, and the most that was under way."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(network, rank)
        self.names: list[str] = []
        self.open: set[int] = set()
        self.most = 0

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        self.names.append(name)
        handle = super().submit(name, tensor)
        self.open.add(handle)
        self.open -= self._network.ended
        self.most = max(self.most, len(self.open))
        return handle

    def poll(self, handle: int) -> bool:
        return handle not in self.open or super().poll(handle)

    def finish(self, handle: int) -> None:
        super().finish(handle)
        self.open.discard(handle)


class Broken(Recorder):
    """Fails when `b` is submitted."""

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        if name == "b":
            raise RuntimeError("the world is gone")
        return super().submit(name, tensor)


def _collective(port: Port, most: int = 2) -> OrderedCollective:
    made = OrderedCollective(port, Streams([]), "star-transmit-test")
    made.most_under_way = most
    return made


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_get_through(seed: int) -> None:
    rng = random.Random(seed)
    ranks, buckets, steps = rng.choice([2, 3]), rng.randint(1, 7), 4
    network = Network(ranks)
    ports = [Recorder(network, rank) for rank in range(ranks)]
    collectives = [_collective(port) for port in ports]
    names = [f"b{i}" for i in range(buckets)]
    wanted: list[str] = []
    for _ in range(steps):
        order = rng.sample(names, buckets)
        wanted += order
        tickets: list[list[int]] = []
        tensors = [{name: torch.full((1,), float(rank)) for name in [*names, "h"]} for rank in range(ranks)]
        for collective in collectives:
            collective.set_order([[name] for name in order])
        for rank, collective in enumerate(collectives):  # Gradients come in another order on every rank.
            given = rng.sample([*names, "h"], buckets + 1)
            tickets.append([collective.submit(name, tensors[rank][name]) for name in given])
        _run(network, collectives, tickets, rng)
        assert all(float(tensor) == sum(range(ranks)) for each in tensors for tensor in each.values())
    for port in ports:
        assert [name for name in port.names if name != "h"] == wanted
        assert port.most <= 3  # Two buckets, and the header, which is not held.
    for collective in collectives:
        collective.stop()


def _run(
    network: Network, collectives: list[OrderedCollective], tickets: list[list[int]], rng: random.Random
) -> None:
    """End reductions in any order until everything was collected, which the threads of the collectives see to."""
    limit_s = time.monotonic() + PATIENCE_S
    while any(tickets):
        assert time.monotonic() < limit_s, "ranks wait for different buckets"
        ready = network.ready()
        if ready:
            network.end(rng.choice(ready))
        for collective, left in zip(collectives, tickets, strict=True):
            for ticket in [ticket for ticket in left if collective.poll(ticket)]:
                collective.finish(ticket)
                collective.finish(ticket)  # By another thread that waited for it too.
                left.remove(ticket)


def test_what_is_held_goes_on_while_no_thread_asks() -> None:
    network = Network(1)
    collective = _collective(Recorder(network, 0), most=1)
    collective.set_order([["a"], ["b"], ["c"]])
    for name in ("c", "b", "a"):
        collective.submit(name, torch.ones(1))
    limit_s, ended = time.monotonic() + PATIENCE_S, []
    while len(ended) < 3:
        assert time.monotonic() < limit_s, f"only {ended} were submitted"
        for name in network.ready():
            ended.append(name)
            network.end(name)
        time.sleep(0.001)
    assert ended == ["a", "b", "c"]
    collective.stop()


def test_a_group_goes_together_once_it_is_whole() -> None:
    network = Network(1)
    port = Recorder(network, 0)
    collective = _collective(port, most=1)
    collective.set_order([["a", "b"], ["c", "d"]])
    tickets = {name: collective.submit(name, torch.ones(1)) for name in ("c", "d", "b")}
    assert port.names == []
    tickets["a"] = collective.submit("a", torch.ones(1))
    assert port.names == ["a", "b"]
    for name in ("a", "b"):
        network.end(name)
        assert collective.poll(tickets[name])
    assert port.names == ["a", "b", "c", "d"]
    collective.stop()


def test_two_groups_are_under_way_whatever_their_sizes() -> None:
    """The one with the step's header is larger; small ones behind a large one would be reduced as one with others."""
    network = Network(1)
    port = Recorder(network, 0)
    collective = _collective(port)
    collective.set_order([["a"], ["b", "c"], ["d"], ["e"]])
    tickets = {name: collective.submit(name, torch.ones(9 if name == "b" else 1)) for name in "abcde"}
    under_way = []
    for name in "abcde":
        under_way.append("".join(each for each in port.names if each in network.ready()))
        network.end(name)
        assert collective.poll(tickets[name])
    assert under_way == ["abc", "bcd", "cd", "de", "e"]
    collective.stop()


def test_a_failure_is_raised_where_one_waits() -> None:
    network = Network(1)
    collective = _collective(Broken(network, 0), most=1)
    collective.set_order([["a"], ["b"]])
    first, second = collective.submit("a", torch.ones(1)), collective.submit("b", torch.ones(1))
    network.end("a")
    with pytest.raises(RuntimeError, match="the world is gone"):
        limit_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit_s:
            collective.poll(first)
            collective.poll(second)
    collective.stop()


def test_a_wait_for_a_held_tensor_ends_with_its_reduction() -> None:
    network = Network(1)
    collective = _collective(Recorder(network, 0), most=1)
    collective.set_order([["a"], ["b"]])
    tickets = {name: collective.submit(name, torch.ones(1)) for name in "ba"}
    assert not collective.wait(tickets["b"], 0.01), "it is held"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collective.wait, tickets["b"], PATIENCE_S)
        network.end("a")
        limit_s = time.monotonic() + PATIENCE_S
        while "b" not in network.ready():
            assert time.monotonic() < limit_s, "the thread did not submit what was held"
            time.sleep(0.001)
        assert not waiting.done()
        network.end("b")
        assert waiting.result(PATIENCE_S)
    collective.stop()


def test_a_failure_ends_a_wait() -> None:
    network = Network(1)
    collective = _collective(Broken(network, 0), most=1)
    collective.set_order([["a"], ["b"]])
    tickets = {name: collective.submit(name, torch.ones(1)) for name in "ab"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collective.wait, tickets["b"], PATIENCE_S)
        network.end("a")
        with pytest.raises(RuntimeError, match="the world is gone"):
            waiting.result(PATIENCE_S)
    collective.stop()
