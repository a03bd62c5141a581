"""A server that dies before it has all of its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.errors import DeadlineError
from star_hvd.ps.common.record import make_record
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, plain_steps, run_all
from tests.unit.star_hvd.channel.test_channel import within


def push(made: Cluster, rank: int, step: int) -> None:
    row = made.hyper.read(made.optimizer.param_groups)
    made.clients[rank].push(
        step=step, version=step, flats=made.gradients(rank, step), weight=1.0, own_steps=step, row=row
    )


def seed_part(made: Cluster, chunks: int) -> None:
    """Give shard 0 the state of its first chunks only."""
    snapshot = made.snapshot()
    shard = made.server_of(0).jobs[0, 0].shard
    for chunk in list(made.layout.of_server(0))[:chunks]:
        params, states = made.layout.cut_params(snapshot.params, chunk), made.layout.cut_state(snapshot.state, chunk)
        record = make_record(params, states, snapshot.step)
        data = torch.empty(record.nbytes, dtype=torch.uint8)
        record.write(data)
        assert not shard.seed(chunk.index, data)


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_first_server_that_dies_while_it_is_seeded_numbers_its_orders_on(chunks: int) -> None:
    """Other shards, seeded before, have executed its orders, and would ignore others of the same numbers."""

    def work(rank: int) -> Any:
        replies = [made.clients[rank].wait(DEADLINE_S)]
        for step in (1, 2):
            push(made, rank, step)
            replies.append(made.clients[rank].wait(DEADLINE_S))
        return [(reply.kind, reply.version) for reply in replies]

    with cluster(Plan.ps(2, 2), servers=2, seed=False) as made:
        made.servers[1].seed(0, 0, made.snapshot())
        assert within(lambda: (0, 0) in made.server_of(0).jobs)
        seed_part(made, chunks)
        with pytest.raises(DeadlineError):
            made.clients[0].pull(0.1, empty=True)  # An order that is not given again.
        for rank in range(2):
            push(made, rank, 0)
        other = made.server_of(1).jobs[0, 0].shard
        assert within(lambda: other.finished == 2)
        owner: Any = made.servers[0]
        owner.processes[-1].end()
        assert within(lambda: made.deaths == 1)
        made.settled()
        made.servers[0].seed(0, 0, made.snapshot())
        assert run_all(*(lambda r=r: work(r) for r in range(2))) == [[("params", n) for n in (1, 2, 3)]] * 2
        plain_steps(made, 3, 2)
        found = made.clients[0].state(DEADLINE_S)
        assert found.step == 3
        for mine, param in zip(found.params, made.ordered, strict=True):
            torch.testing.assert_close(mine, param.detach())
