"""Parameter servers that are killed: nothing is lost, nothing is applied twice, the result is that without the kill."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.ps.common.pipe import Pipe
from star_hvd.ps.owner import server_process
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, plain_steps, run_all

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]


PLACES = ("in_push", "before_mirror", "after_mirror", "after_reply", "after_journal")
# Only shard 0 has a journal.
KILLS = [(index, at) for at in PLACES for index in (0, 1) if (index, at) != (1, "after_journal")]
STEPS = 5  # With one kill each.


def train(made: Cluster, rank: int, steps: int, first: int = 0) -> None:
    version = first
    for step in range(first, steps):
        made.clients[rank].push(
            step=step, version=version, flats=made.gradients(rank, step), weight=1.0, own_steps=step
        )
        reply = made.clients[rank].wait(DEADLINE_S)
        assert reply.kind == "params" and reply.version == version + 1, (rank, step, reply.kind, reply.version)
        version = reply.version


def train_ahead(made: Cluster, rank: int, steps: int, first: int = 0) -> None:
    """Buckets are sent one by one; each one's memory is used again as soon as its own parameters are back."""
    client, version = made.clients[rank], first
    for step in range(first, steps):
        flats = made.gradients(rank, step)
        for index, flat in enumerate(flats):
            client.give(step, index, flat)
            time.sleep(0.001)
        client.push(step=step, version=version, flats=flats, weight=1.0, own_steps=step, keep=True)
        reply = client.wait(DEADLINE_S, whole=False)
        assert reply.kind == "params" and reply.applied
        for index in reversed(range(len(flats))):
            client.wait_bucket(index, DEADLINE_S)
            flats[index].fill_(float("nan"))
        version = client.finish(DEADLINE_S)
        assert version == step + 1


TRAIN = {"whole pushes": train, "buckets ahead": train_ahead}


def assert_equals_plain(made: Cluster, steps: int, ranks: int, first: int = 0, kill: str = "") -> None:
    plain_steps(made, steps, ranks, first)
    found = made.clients[0].state(DEADLINE_S)
    assert found.step == steps, kill
    for mine, param, state in zip(found.params, made.ordered, found.state, strict=True):
        assert torch.equal(mine, param.detach()), kill
        assert torch.equal(state["momentum_buffer"], made.optimizer.state[param]["momentum_buffer"]), kill


@pytest.mark.parametrize("how", TRAIN)
def test_a_server_killed_in_the_middle_of_an_update_changes_nothing(how: str) -> None:
    """Each server in turn at each place: the processes, which take long to start, are those of one cluster."""
    faults: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for number, (index, at) in enumerate(KILLS):
        faults[index].append({"at": at, "update": number * STEPS + 2})
    with cluster(Plan.ps(2, 2), servers=2, processes=True, faults=faults) as made:
        for number, (index, at) in enumerate(KILLS):
            first, kill = number * STEPS, f"server {index} killed {at}"
            run_all(*(lambda r=r, f=first: TRAIN[how](made, r, f + STEPS, f) for r in range(2)))
            made.settled()
            assert [event["of"] for event in made.log if event["event"] == "died"][number:] == [index], kill
            assert_equals_plain(made, first + STEPS, 2, first, kill)


@pytest.mark.parametrize("how", TRAIN)
def test_servers_killed_again_and_again_at_any_moment_change_nothing(how: str) -> None:
    rng, kills = random.Random(7), 4
    with cluster(Plan.ps(2, 2), servers=2, processes=True) as made:

        def kill() -> None:
            for deaths in range(kills):
                time.sleep(rng.random() * 0.5)
                made.kill(rng.randrange(2))
                while made.deaths == deaths:
                    time.sleep(0.01)
                made.settled()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        steps, more = 0, 50
        while killer.is_alive() or steps < 300:  # It may be held up, and strikes while there are steps all the same.
            run_all(*(lambda r=r, first=steps: TRAIN[how](made, r, first + more, first) for r in range(2)))
            steps += more
        assert made.deaths == kills
        assert_equals_plain(made, steps, 2)


def test_every_push_is_applied_once_in_any_order_though_servers_die() -> None:
    ranks, steps, rng = 3, 60, random.Random(5)
    plan = Plan.ps(ranks, 1, lr_rule="none", damping="none")
    naps = {(r, s): 0.005 + rng.random() * 0.01 for r in range(ranks) for s in range(steps)}
    shapes = ((100, 20), (2000,))

    with cluster(
        plan, servers=2, processes=True, shapes=shapes, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    ) as made:

        def work(rank: int) -> None:
            version = 0
            for step in range(steps):
                time.sleep(naps[rank, step])
                flats = [torch.zeros(b.numel + 1) for b in made.buckets]
                for flat in flats:
                    flat[rank * steps + step] = 1.0
                made.clients[rank].push(step=step, version=version, flats=flats, weight=1.0)
                version = made.clients[rank].wait(DEADLINE_S).version

        def kill() -> None:
            for index in (1, 0):
                time.sleep(0.2)
                made.kill(index)
                made.wait_event("died")
                made.settled()

        before = made.clients[0].pull(DEADLINE_S).params
        run_all(*(lambda r=r: work(r) for r in range(ranks)), kill)
        after = made.clients[0].pull(DEADLINE_S)
        assert made.deaths == 2 and after.version == ranks * steps
        for old, new in zip(before, after.params, strict=True):
            applied = (old - new)[: ranks * steps]
            torch.testing.assert_close(applied, torch.ones_like(applied), rtol=0.0, atol=1e-4)


def test_a_kill_before_the_seed_or_after_the_cut_loses_nothing() -> None:
    with cluster(Plan.ps(2, 2), servers=2, processes=True, seed=False) as made:
        made.kill(1)
        made.wait_event("died")
        made.settled()
        made.seed()
        run_all(*(lambda r=r: train(made, r, 2) for r in range(2)))
        made.clients[0].push(step=2, version=2, flats=made.gradients(0, 2), weight=0.0)
        made.servers[0].cut(0, 4)
        made.wait_event("cut")
        assert made.clients[0].wait(DEADLINE_S).kind == "moved"
        made.kill(0)
        made.wait_event("died")
        made.settled()
        event = made.wait_event("cut")
        made.clients[1].push(step=2, version=2, flats=made.gradients(1, 2), weight=1.0)
        reply = made.clients[1].wait(DEADLINE_S)
        assert (reply.kind, reply.version, reply.plan_id) == ("moved", event["version"], 4)
        assert made.clients[0].state(DEADLINE_S).step == event["version"]


def _drained(pause_s: float, *, killed: bool) -> list[torch.Tensor] | None:
    """Parameters behind a last update of one of two ranks, which uses its gradient's memory again at its result.

    None where the gradient was not at all servers when they were drained.
    """
    faults = {1: [{"at": "before_mirror", "update": 2}]} if killed else None
    with cluster(Plan.ps(2, 2), servers=2, processes=killed, faults=faults) as made:
        run_all(*(lambda r=r: train(made, r, 2) for r in range(2)))
        flats = made.gradients(0, 2)
        made.clients[0].push(step=2, version=2, flats=flats, weight=1.0, keep=True)
        time.sleep(pause_s)
        made.servers[0].cut(0, 4)
        reply = made.clients[0].wait(DEADLINE_S)
        assert reply.kind == "moved"
        for flat in flats:
            flat.fill_(float("nan"))
        if not reply.applied:
            return None
        assert made.wait_event("cut", 60.0)["version"] == 3
        made.settled()
        assert made.deaths == killed
        return made.clients[1].state(DEADLINE_S).params


def test_a_server_other_than_the_first_that_dies_in_the_last_update_makes_it_all_the_same() -> None:
    found: dict[bool, list[torch.Tensor] | None] = {}
    for killed in (True, False):
        found[killed] = next(filter(None, (_drained(pause_s, killed=killed) for pause_s in (0.3, 5.0, 30.0))), None)
    assert found[True] is not None and found[False] is not None
    assert all(map(torch.equal, found[True], found[False]))


def test_a_server_ends_with_its_owner_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes: list[Pipe] = []
    monkeypatch.setattr(server_process, "Pipe", lambda end: pipes.append(Pipe(end)) or pipes[-1])
    with cluster(Plan.ps(1, 1), processes=True) as made:
        made.clients[0].state(DEADLINE_S)  # Only then has the server made its mirror.
        process = psutil.Process(made.servers[0].pid)
        mapped = [item.path for item in process.memory_maps() if "star-ps" in item.path]
        assert mapped and not any(os.path.exists(path) for path in mapped), "the mirror has no name to be left behind"
        made.recovers = False
        with socket.socket(fileno=os.dup(pipes[0].fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # What the kernel does when the owner dies.
        process.wait(120.0)
        assert made.wait_event("died")["returncode"] == 0, "by itself"
