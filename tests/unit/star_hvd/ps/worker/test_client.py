"""The memory that a client keeps for pushes and their answers."""

from __future__ import annotations

import gc
import time
import weakref

import torch

from scheduler.plan.plan import Plan
from star_hvd.ps.worker.client import Reply
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, plain_steps


def exchange(made: Cluster, step: int, *, keep: bool) -> Reply:
    client = made.clients[0]
    row = made.hyper.read(made.optimizer.param_groups)
    client.push(step=step, version=step, flats=made.gradients(0, step), weight=1.0, row=row, keep=keep)
    return client.wait(DEADLINE_S)


def test_the_memory_of_answers_is_released_and_taken_again_when_needed() -> None:
    """After the mode, a client is kept for the servers' final state alone, perhaps to the end of the job."""
    with cluster(Plan.ps(1, 1)) as made:
        before = exchange(made, 0, keep=False)
        kept = [weakref.ref(flat) for flat in before.params]
        assert exchange(made, 1, keep=False).params[0] is before.params[0], "used again from push to push"
        del before
        made.clients[0].release()
        gc.collect()
        assert kept and all(flat() is None for flat in kept)
        assert made.clients[0].state(DEADLINE_S).step == 2, "the state is still to be had"
        reply = exchange(made, 2, keep=False)
        plain_steps(made, 3, 1)
        joined = [torch.cat([param.detach().reshape(-1) for param in bucket.params]) for bucket in made.buckets]
        assert reply.version == 3 and all(map(torch.equal, reply.params, joined))


def test_the_memory_of_a_push_that_was_never_announced_is_released_too() -> None:
    """Its first buckets left within backward, then the mode ended."""
    with cluster(Plan.ps(1, 1)) as made:
        client = made.clients[0]
        kept = [weakref.ref(flat) for flat in exchange(made, 0, keep=True).params]
        client.give(1, 0, made.gradients(0, 1)[0])
        assert client.state(DEADLINE_S).step == 1, "the thread has sent it"
        gc.collect()
        assert kept and all(flat() is not None for flat in kept)
        client.release()
        limit_s = time.monotonic() + DEADLINE_S
        while any(flat() is not None for flat in kept) and time.monotonic() < limit_s:
            time.sleep(0.01)
            gc.collect()
        assert all(flat() is None for flat in kept)
        client.push(step=2, version=1, flats=made.gradients(0, 2), weight=1.0)
        assert client.wait(DEADLINE_S).version == 2, "another push is made as ever"
