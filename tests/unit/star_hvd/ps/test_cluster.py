"""Servers in threads and clients in threads, without Horovod: pushes in, parameters out."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq

from scheduler.plan.plan import Plan
from star_hvd.channel.link import Dealer, Router
from star_hvd.channel.reliable import TENSORS
from star_hvd.compression.pushes import shrunk
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.ps.common.auth import ServerSocket, connect
from star_hvd.ps.common.identities import is_identity, shard_identity
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.wire import Header, Kind, pack, read_meta, unpack
from star_hvd.ps.worker import client as client_module
from star_hvd.ps.worker.exchange import Exchange, Reply
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, plain_steps, run_all, sgd
from tests.unit.star_hvd.channel.test_channel import within

pytestmark = pytest.mark.timeout(900)


def worker(made: Cluster, rank: int, steps: int) -> list[Reply]:
    replies, version = [], 0
    for step in range(steps):
        row = made.hyper.read(made.optimizer.param_groups)
        flats = made.gradients(rank, step)
        made.clients[rank].push(
            step=step, version=version, flats=flats, weight=1.0, own_steps=step, row=row, loss=float(rank)
        )
        for flat in flats:
            flat.fill_(float("nan"))  # A push keeps nothing of what it was given.
        replies.append(made.clients[rank].wait(DEADLINE_S))
        version = replies[-1].version
    return replies


def assert_equal_state(made: Cluster, exact: bool = True) -> None:
    """What the servers have is what plain torch has."""
    found = made.clients[0].state(DEADLINE_S)
    close: dict[str, float] = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for mine, param, state in zip(found.params, made.ordered, found.state, strict=True):
        torch.testing.assert_close(mine, param.detach(), **close)
        assert state.keys() == made.optimizer.state[param].keys()
        for key, value in made.optimizer.state[param].items():
            torch.testing.assert_close(state[key], value, **close)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("encrypted", [False, True])
def test_x_of_n_equals_plain_torch_on_the_mean_gradient(servers: int, encrypted: bool, tmp_path: Path) -> None:
    host = "127.0.0.1" if encrypted else str(tmp_path)
    with cluster(Plan.ps(3, 3), servers=servers, host=host) as made:
        assert all(each.local != encrypted for each in made.endpoints)
        replies = run_all(*(lambda r=r: worker(made, r, 6) for r in range(3)))
        plain_steps(made, 6, 3)
        assert_equal_state(made)
        for of_rank in replies:
            assert [reply.version for reply in of_rank] == [1, 2, 3, 4, 5, 6]
            assert {reply.kind for reply in of_rank} == {"params"} and all(reply.applied for reply in of_rank)
            assert of_rank[-1].notes[-1]["ranks"] == [0, 1, 2] and of_rank[-1].notes[-1]["loss"] == 1.0
        expected = [torch.cat([p.detach().reshape(-1) for p in bucket.params]) for bucket in made.buckets]
        assert all(torch.equal(a, b) for a, b in zip(replies[0][-1].params, expected, strict=True))


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW])
def test_an_update_in_which_no_rank_has_a_gradient_changes_nothing(optimizer: Any) -> None:
    """All skipped the step (a GradScaler found infinities): no moment, counter or decayed weight may move."""
    with cluster(Plan.ps(2, 2), optimizer=optimizer) as made:

        def work(rank: int) -> list[int]:
            versions = []
            for step, weights in enumerate(((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0))):
                flats = made.gradients(rank, step if step < 2 else step - 1)
                if weights[rank] == 0.0:
                    flats = [torch.zeros_like(flat) for flat in flats]
                row = made.hyper.read(made.optimizer.param_groups)
                made.clients[rank].push(step=step, version=step, flats=flats, weight=weights[rank], row=row)
                versions.append(made.clients[rank].wait(DEADLINE_S).version)
            return versions

        assert run_all(*(lambda r=r: work(r) for r in range(2))) == [[1, 2, 3, 4]] * 2
        plain_steps(made, 2, 2)
        for bucket, flat in zip(made.buckets, made.gradients(1, 2), strict=True):  # Of the only rank with a weight.
            for param, view in zip(bucket.params, bucket.split(flat), strict=True):
                param.grad = view
        made.optimizer.step()
        assert_equal_state(made)


class Norm(torch.optim.Optimizer):
    """Scales by the norm of the whole tensor, as LARS does: it may not be cut."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["seen"] = state.get("seen", 0) + 1
                state["norm"] = param.grad.norm()
                param.sub_(group["lr"] * param.grad / state["norm"])


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "norm": lambda params: Norm(params),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_other_optimizers_equal_plain_torch(name: str) -> None:
    with cluster(Plan.ps(2, 2), servers=2, optimizer=OPTIMIZERS[name]) as made:
        run_all(*(lambda r=r: worker(made, r, 4) for r in range(2)))
        plain_steps(made, 4, 2)
        assert_equal_state(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    with cluster(Plan.ps(2, 2), servers=2, dtype=dtype, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as made:
        run_all(*(lambda r=r: worker(made, r, 3) for r in range(2)))
        start = [p.detach().clone() for p in made.ordered]
        plain_steps(made, 3, 2)
        found = made.clients[0].state(DEADLINE_S)
        for mine, param, before in zip(found.params, made.ordered, start, strict=True):
            assert mine.dtype == dtype and not torch.equal(mine, before)
            tolerance = 1e-12 if dtype == torch.float64 else 0.05
            torch.testing.assert_close(mine, param.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pushes_as_int8_count_as_what_they_are_decoded_to(dtype: torch.dtype) -> None:
    def shrunk_worker(made: Cluster, rank: int) -> None:
        client = made.clients[rank]
        for step in range(3):
            flats, small = made.gradients(rank, step), dict[int, bytes]()
            for bucket, flat in enumerate(flats):
                for chunk, start, stop in client.ranges(bucket):
                    made_small = shrunk(flat[start:stop].to(torch.promote_types(dtype, torch.float32)), dtype)
                    if chunk % 2 == 0 and made_small is not None:  # Others of the same push travel as they are.
                        small[chunk], decoded[rank, step, chunk] = made_small
                        flat[start:stop] = float("nan")
            row = made.hyper.read(made.optimizer.param_groups)
            client.push(step=step, version=step, flats=flats, weight=1.0, own_steps=step, row=row, small=small)
            assert client.wait(DEADLINE_S).kind == "params"

    decoded: dict[tuple[int, int, int], Any] = {}
    sgd: Any = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    with cluster(Plan.ps(2, 2), servers=2, dtype=dtype, optimizer=sgd) as made:
        original = made.gradients
        run_all(*(lambda r=r: shrunk_worker(made, r) for r in range(2)))
        assert decoded

        def as_sent(rank: int, step: int) -> list[torch.Tensor]:
            flats = original(rank, step)
            for bucket, flat in enumerate(flats):
                for chunk, start, stop in made.clients[0].ranges(bucket):
                    if (rank, step, chunk) in decoded:
                        flat[start:stop] = decoded[rank, step, chunk]
            return flats

        made.gradients = as_sent  # type: ignore[method-assign]
        plain_steps(made, 3, 2)
        found = made.clients[0].state(DEADLINE_S)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 0.05)
        for mine, param in zip(found.params, made.ordered, strict=True):
            torch.testing.assert_close(mine, param.detach(), rtol=tolerance, atol=tolerance)


def ones(made: Cluster, place: int) -> list[torch.Tensor]:
    """A gradient with a one at `place` of every bucket."""
    flats = [torch.zeros(b.numel + 1) for b in made.buckets]
    for flat in flats:
        flat[place] = flat[-1] = 1.0
    return flats


def counted(made: Cluster, ranks: int, steps: int, rng: random.Random) -> None:
    """Every rank pushes one-hot gradients; in the end every one must be in the parameters exactly once."""
    naps = {(r, s): rng.random() * 0.004 for r in range(ranks) for s in range(steps)}

    def work(rank: int) -> None:
        version = 0
        for step in range(steps):
            time.sleep(naps[rank, step])
            made.clients[rank].push(step=step, version=version, flats=ones(made, rank * steps + step), weight=1.0)
            reply = made.clients[rank].wait(DEADLINE_S)
            assert reply.kind == "params" and reply.version >= version, reply
            version = reply.version
        made.clients[rank].absent(True)

    before = [torch.cat([p.detach().reshape(-1) for p in bucket.params]) for bucket in made.buckets]
    run_all(*(lambda r=r: work(r) for r in range(ranks)))
    made.servers[0].cut(0, 9)
    made.wait_event("cut")
    after = made.clients[0].pull(DEADLINE_S).params
    for old, new in zip(before, after, strict=True):
        applied = (old - new)[: ranks * steps]
        torch.testing.assert_close(applied, torch.ones_like(applied), rtol=0.0, atol=1e-4)
        assert torch.equal((old - new)[ranks * steps :], torch.zeros(len(old) - ranks * steps))


RULES = {
    "x1": Plan.ps(3, 1, lr_rule="none", damping="none"),
    "x2": Plan.ps(3, 2, lr_rule="none", damping="none"),
    "groups": Plan.ps(3, 3, rule="groups", groups=((0, 2), (1,)), lr_rule="none", damping="none"),
    "ssp": Plan.ps(3, 1, rule="ssp", slack=2, lr_rule="none", damping="none"),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_push_is_applied_once_whatever_the_order(name: str) -> None:
    plain = RULES[name]
    with cluster(plain, servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as made:
        # The mean of x gradients: undo the division, to count.
        factor = {"x2": 2.0}.get(name)
        if factor is None and name != "groups":
            counted(made, 3, 8, random.Random(3))
        else:
            total_applied(made, 3, 8)


def total_applied(made: Cluster, ranks: int, steps: int) -> None:
    """Updates are means of several: every push is in exactly one, with one over their number."""
    notes: list[dict[str, Any]] = []

    def work(rank: int) -> None:
        version = 0
        for step in range(steps):
            made.clients[rank].push(step=step, version=version, flats=ones(made, rank * steps + step), weight=1.0)
            version = made.clients[rank].wait(DEADLINE_S).version
        made.clients[rank].absent(True)

    before = made.clients[0].pull(DEADLINE_S).params
    run_all(*(lambda r=r: work(r) for r in range(ranks)))
    made.servers[0].cut(0, 9)
    made.wait_event("cut")
    notes = [event for event in made.log if event["event"] == "update"]
    after = made.clients[0].pull(DEADLINE_S).params
    for old, new in zip(before, after, strict=True):
        applied = (old - new)[: ranks * steps].view(ranks, steps)
        count = [0] * ranks
        for note in notes:
            for rank in note["ranks"]:
                share = float(applied[rank, count[rank]])
                assert share == pytest.approx(1.0 / len(note["ranks"]), abs=1e-4)
                count[rank] += 1
        assert count == [steps] * ranks


@pytest.mark.parametrize("x", [1, 3])
def test_a_push_whose_buckets_were_sent_ahead_counts_from_its_announcement_on(x: int) -> None:
    with cluster(Plan.ps(3, x, damping="none"), servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as made:
        flats = [[torch.ones(b.numel + 1) for b in made.buckets] for _ in range(3)]
        for rank in range(3):
            for index, flat in enumerate(flats[rank]):
                made.clients[rank].give(0, index, flat)
        for rank in range(3):
            assert made.clients[rank].pull(DEADLINE_S).version == 0, "an update was made of what was not announced"
        for rank in range(3):
            made.clients[rank].push(step=0, version=0, flats=flats[rank], weight=1.0, keep=True)
        replies = [made.clients[rank].wait(DEADLINE_S) for rank in range(3)]
        assert all(reply.kind == "params" and reply.applied for reply in replies)
        after = made.clients[0].state(DEADLINE_S)
        assert after.step == 3 // x
        for old, new in zip(made.ordered, after.params, strict=True):
            torch.testing.assert_close(old.detach() - new, torch.ones_like(new), rtol=1e-5, atol=1e-5)


def test_parameters_that_a_rank_has_are_not_sent_again() -> None:
    with cluster(Plan.ps(2, 1, damping="none"), servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as made:
        one, other = made.clients
        whole = one.pull(DEADLINE_S)
        assert whole.kind == "params" and whole.version == 0
        for asked in ({"known": 0}, {"empty": True}, {"known": 7, "empty": True}):
            reply = one.pull(DEADLINE_S, **asked)
            assert (reply.kind, reply.version, reply.params) == ("known", 0, [])
        other.push(step=0, version=0, flats=ones(made, 0), weight=1.0)
        assert other.wait(DEADLINE_S).version == 1
        assert one.pull(DEADLINE_S, empty=True).version == 1
        for known in (0, 2, None):
            reply = one.pull(DEADLINE_S, known=known)
            assert reply.kind == "params" and reply.version == 1, "it has another version, or none"
            assert any(not torch.equal(old, new) for old, new in zip(whole.params, reply.params, strict=True))
        assert one.pull(DEADLINE_S, known=1).kind == "known"


class HalfKnown(Exchange):
    """An answer of which the first chunk is sent, although the request allows to hold it back."""

    asked: list[dict[str, Any]] = []

    def __init__(self, layout: Layout, *given: Any, **named: Any) -> None:
        super().__init__(layout, *given, **named)
        self.nbytes = layout.nbytes(layout.chunks[0])
        HalfKnown.asked.append(self.asks)

    def add(self, header: Header, data: Any) -> None:
        if header.chunk == 0 and header.size == 0:
            header, data = header._replace(size=self.nbytes), bytearray(self.nbytes)
        super().add(header, data)


def test_an_answer_of_which_a_part_is_known_is_asked_for_again_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was restarted in the middle may have executed more than the others."""
    monkeypatch.setattr(client_module, "Exchange", HalfKnown)
    HalfKnown.asked.clear()
    with cluster(Plan.ps(2, 1, damping="none"), servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as made:
        reply = made.clients[0].pull(DEADLINE_S, known=0)
        assert HalfKnown.asked == [{"known": 0, "empty": False}, {}] and reply.kind == "params"
        for bucket, flat in zip(made.buckets, reply.params, strict=True):
            torch.testing.assert_close(flat, torch.cat([p.detach().reshape(-1) for p in bucket.params]))


@pytest.mark.parametrize("complete", [False, True])
def test_a_push_that_was_begun_and_made_again_is_applied_once(complete: bool) -> None:
    """What was sent ahead is void, all of it or a part; x = 1, so that anything counted twice would show."""
    with cluster(Plan.ps(2, 1, damping="none"), servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as made:
        for step in range(6):
            client = made.clients[0]
            for index, bucket in enumerate(made.buckets[: None if complete else 1]):
                client.give(2 * step, index, torch.full((bucket.numel + 1,), 100.0))
            client.pull(DEADLINE_S)
            flats = [torch.ones(b.numel + 1) for b in made.buckets]
            client.push(step=2 * step + 1, version=step, flats=flats, weight=1.0, keep=True)
            reply = client.wait(DEADLINE_S)
            assert reply.kind == "params" and reply.applied and reply.version == step + 1
        found = client.state(DEADLINE_S)
        for old, new in zip(made.ordered, found.params, strict=True):
            torch.testing.assert_close(old.detach() - new, torch.full_like(new, 3.0), rtol=1e-5, atol=1e-5)
        job = made.server_of(0).jobs[0, 0]
        assert job.primary is not None and len(job.primary.known_pushes) <= 1, "void pushes are remembered"


def test_pushes_before_the_seed_are_kept() -> None:
    with cluster(Plan.ps(2, 2), seed=False) as made:
        done = threading.Thread(target=run_all, args=[lambda r=r: worker(made, r, 2) for r in range(2)])
        done.start()
        time.sleep(0.3)
        assert done.is_alive()
        made.seed()
        made.wait_event("seeded")
        done.join(DEADLINE_S)
        plain_steps(made, 2, 2)
        assert_equal_state(made)


def test_after_the_cut_everybody_hears_that_it_has_moved() -> None:
    with cluster(Plan.ps(2, 2), servers=2) as made:
        run_all(*(lambda r=r: worker(made, r, 2) for r in range(2)))
        made.clients[0].push(step=2, version=2, flats=made.gradients(0, 2), weight=1.0)
        with pytest.raises(DeadlineError, match="waited 0.2 s"):
            made.clients[0].wait(0.2)
        made.servers[0].cut(0, 7)
        event = made.wait_event("cut")
        assert event["plan_id"] == 7
        first = made.clients[0].wait(DEADLINE_S)
        made.clients[1].push(step=2, version=2, flats=made.gradients(1, 2), weight=1.0)
        second = made.clients[1].wait(DEADLINE_S)
        assert (first.kind, second.kind) == ("moved", "moved") and first.plan_id == second.plan_id == 7
        assert first.version == second.version == event["version"] == made.clients[0].state(DEADLINE_S).step
        assert not second.applied and first.applied == (event["version"] == 3)


def test_a_wait_can_be_interrupted_and_goes_on() -> None:
    with cluster(Plan.ps(2, 2)) as made:
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        threading.Timer(0.1, made.clients[0].wake).start()
        assert made.clients[0].wait(DEADLINE_S).kind == "interrupted"
        made.clients[1].push(step=0, version=0, flats=made.gradients(1, 0), weight=1.0)
        assert made.clients[0].wait(DEADLINE_S).kind == made.clients[1].wait(DEADLINE_S).kind == "params"


def test_hyperparameters_of_the_worker_with_most_steps_are_used() -> None:
    with cluster(Plan.ps(2, 2), servers=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)) as made:
        flats = [made.gradients(rank, 0) for rank in range(2)]
        made.clients[0].push(step=0, version=0, flats=flats[0], weight=1.0, own_steps=5, row=row(made, 0.5))
        made.clients[1].push(step=0, version=0, flats=flats[1], weight=1.0, own_steps=4, row=row(made, 9.0))
        made.clients[0].wait(DEADLINE_S)
        for group in made.optimizer.param_groups:
            group["lr"] = 0.5
        plain_steps(made, 1, 2)
        found = made.clients[0].state(DEADLINE_S)
        assert all(torch.equal(a, b.detach()) for a, b in zip(found.params, made.ordered, strict=True))


def row(made: Cluster, lr: float) -> list[float]:
    old = [group["lr"] for group in made.optimizer.param_groups]
    for group in made.optimizer.param_groups:
        group["lr"] = lr
    found = made.hyper.read(made.optimizer.param_groups)
    for group, value in zip(made.optimizer.param_groups, old, strict=True):
        group["lr"] = value
    return found


def test_a_plan_can_change_and_a_bad_one_is_refused() -> None:
    with cluster(Plan.ps(2, 2)) as made:
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        made.servers[0].set_plan(0, Plan.ps(3, 1, plan_id=1))
        assert "3 ranks" in made.wait_event("refused")["reason"]
        made.servers[0].set_plan(0, Plan.ps(2, 1, plan_id=2))  # Nobody stays blocked: one push is enough now.
        reply = made.clients[0].wait(DEADLINE_S)
        assert reply.kind == "params" and reply.plan_id == 2


def test_an_absent_rank_is_not_waited_for() -> None:
    with cluster(Plan.ps(2, 2), servers=2) as made:
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        made.servers[0].member(0, 1, "absent")
        assert made.clients[0].wait(DEADLINE_S).notes[-1]["ranks"] == [0]


def test_the_guard_rejects_what_points_against_the_recent_updates() -> None:
    plan = Plan.ps(2, 1, guard="reject", lr_rule="none")
    with cluster(plan, servers=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as made:
        kinds = []
        for step, sign in enumerate([1.0, 1.0, -1.0, 1.0]):
            flats = [sign * flat for flat in made.gradients(0, 0)]
            made.clients[0].push(step=step, version=0, flats=flats, weight=1.0)
            kinds.append(made.clients[0].wait(DEADLINE_S).kind)
        assert kinds == ["params", "params", "dropped", "params"]
        assert made.clients[0].state(DEADLINE_S).step == 3


def test_a_gradient_of_the_future_is_refused_with_a_reason() -> None:
    with cluster(Plan.ps(2, 1)) as made:
        made.clients[0].push(step=0, version=5, flats=made.gradients(0, 0), weight=1.0)
        with pytest.raises(ChannelError, match="version 5"):
            made.clients[0].wait(DEADLINE_S)
        made.clients[0].push(step=1, version=0, flats=made.gradients(0, 1), weight=1.0)
        assert made.clients[0].wait(DEADLINE_S).kind == "params"


def test_sessions_and_optimizers_follow_each_other() -> None:
    with cluster(Plan.ps(2, 2)) as made:
        run_all(*(lambda r=r: worker(made, r, 2) for r in range(2)))
        made.servers[0].cut(0, 1)
        made.wait_event("cut")
        final = made.clients[0].state(DEADLINE_S)
        for param, value, state in zip(made.ordered, final.params, final.state, strict=True):
            param.data.copy_(value)
            made.optimizer.state[param] = state
        for client in made.clients:
            client.close()
        made.clients.clear()
        made.open(session=1)
        made.seed(session=1)
        made.start_clients(1)
        run_all(*(lambda r=r: worker(made, r, 2) for r in range(2)))
        plain_steps(made, 2, 2)
        assert_equal_state(made)


def test_a_client_that_is_closed_says_so() -> None:
    with cluster(Plan.ps(2, 2)) as made:
        with pytest.raises(ChannelError, match="without a push"):
            made.clients[0].wait(1.0)
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        with pytest.raises(ChannelError, match="call wait"):
            made.clients[0].push(step=1, version=0, flats=made.gradients(0, 1), weight=1.0)
        made.clients[0].close()
        with pytest.raises(ChannelError, match="closed"):
            made.clients[0].wait(1.0)


def test_a_new_process_of_a_shard_gets_no_order_before_those_it_missed() -> None:
    with cluster(Plan.ps(1, 1), servers=2) as made:
        worker(made, 0, 1)
        context = zmq.Context()
        identity = shard_identity(0, 0, 1) + b"newcomer"
        newcomer = Dealer(connect(context, made.key, made.endpoints[0], identity), TENSORS)
        newcomer.send([pack(Header(Kind.DONE, 0, 0, 1)), msgpack.packb({})])
        made.clients[0].push(step=1, version=1, flats=made.gradients(0, 1), weight=1.0)
        made.clients[0].wait(DEADLINE_S)
        time.sleep(0.2)
        assert not list(newcomer.receive()), "it has not said what it knows"
        newcomer.send([pack(Header(Kind.JOIN, 0, 0, 1)), msgpack.packb({"since_ns": time.monotonic_ns()})])
        orders: list[Any] = []

        def joined() -> bool:
            orders.extend(read_meta(frames[1]) for frames in newcomer.receive())  # type: ignore[index]
            newcomer.tick()
            return newcomer.stream.acknowledged >= 2

        assert within(joined)  # Before the other one, which is the older one.
        # A connection that the shard had given up before, of which messages are read only now, gets none.
        former = Dealer(connect(context, made.key, made.endpoints[0], shard_identity(0, 0, 1) + b"formerly"), TENSORS)
        former.send([pack(Header(Kind.JOIN, 0, 0, 1)), msgpack.packb({"since_ns": 1})])
        time.sleep(0.2)
        made.clients[0].push(step=2, version=2, flats=made.gradients(0, 2), weight=1.0)
        while not orders or orders[-1]["op"] != "update" or orders[-1]["version"] < 2:
            assert newcomer.socket.poll(1000 * DEADLINE_S)
            orders += [read_meta(frames[1]) for frames in newcomer.receive()]  # type: ignore[index]
        numbers = [order["seq"] for order in orders]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert not list(former.receive())
        newcomer.close()
        former.close()
        context.term()


def test_a_new_server_0_is_told_of_the_others_that_were_restarted_too() -> None:
    """What the former one was told of them was lost with it, and a push would wait for their answer for ever."""
    with cluster(Plan.ps(1, 1), servers=2) as made:
        client, contexts = made.clients[0], [zmq.Context() for _ in range(2)]
        sockets = [ServerSocket(context, made.key, "127.0.0.1") for context in contexts]  # They never answer.
        client.replace(0, sockets[0].endpoint)
        client.push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        client.replace(1, made.endpoints[1])
        client.replace(0, sockets[1].endpoint)
        second, again = Router(sockets[1].router, TENSORS, is_identity), set()
        limit_s = time.monotonic() + DEADLINE_S
        while again != {0, 1}:
            assert time.monotonic() < limit_s, f"only the restart of {again} was announced"
            sockets[1].router.poll(100)
            for frames in second.receive():
                if unpack(frames[1]).kind == Kind.PUSH:  # type: ignore[index]
                    again.add(read_meta(frames[2])["again"])  # type: ignore[index]
        client.close()
        for socket, context in zip(sockets, contexts, strict=True):
            socket.close()
            context.destroy(linger=0)


def test_parameters_can_be_awaited_bucket_by_bucket() -> None:
    with cluster(Plan.ps(2, 2), servers=2) as made:
        for step in range(4):

            def one(rank: int) -> tuple[Reply, int]:
                client, flats = made.clients[rank], made.gradients(rank, step)  # noqa: B023
                row = made.hyper.read(made.optimizer.param_groups)
                client.push(step=step, version=step, flats=flats, weight=1.0, own_steps=step, row=row)  # noqa: B023
                reply = client.wait(DEADLINE_S, whole=False)
                for index in reversed(range(len(made.buckets))):
                    client.wait_bucket(index, DEADLINE_S)
                return reply, client.finish(DEADLINE_S)

            for reply, version in run_all(lambda: one(0), lambda: one(1)):
                assert (reply.kind, reply.applied, reply.version, version) == ("params", True, step + 1, step + 1)
        plain_steps(made, 4, 2)
        assert_equal_state(made)
        for client in made.clients:
            with pytest.raises(ChannelError, match="without a push"):
                client.finish(DEADLINE_S)
