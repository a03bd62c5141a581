"""Ranks in a collective and ranks in a loop that wait for each other: found for certain, and never without cause."""

from __future__ import annotations

import contextlib
import random
from collections import deque

import pytest

from star_hvd.channel.messages.base import EpochEnd, Finished, Message
from star_hvd.channel.messages.joins import JoinCalled
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseRecall, LeaseReturn
from star_hvd.channel.messages.waits import Deadlock, ProgramWait
from star_hvd.config import Config
from star_hvd.coordinator.job_state import ALL, JobState
from star_hvd.coordinator.lease_service import LeaseService
from star_hvd.input.deadlocks import SURE_S, Deadlocks
from star_hvd.input.lease_stock import LeaseStock
from star_hvd.input.program_waits import ProgramWaits

TICK_S = 0.1
LONG_S = 60.0


class Rank:
    """A program of one rank: loops over a loader, with collectives in their iterations or behind them.

    Attributes:
        now: What it does: "takes", "computes", "calls" (a collective) or "ends" (waits at the end of an epoch).
        called: Collectives it has called.
        told: Why it can never go on.
    """

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._waits = ProgramWaits(self._send)
        self.outbox: deque[Message] = deque()
        if rank == world.ahead:
            self._call_alone(raises=world.raises)
        self._waits.watch()
        self._call = contextlib.ExitStack()
        self.inbox: deque[Message] = deque()
        self.now, self.called, self.told = "", 0, ""
        self.left_s = 0.0
        self._behind = self._reported = False
        self._open(0)

    def _call_alone(self, *, raises: bool) -> None:
        """Call a collective that ends at once and that no other rank calls, so that this rank counts one more."""
        with contextlib.suppress(TypeError), self._waits.during("broadcast_object"):
            if raises:
                raise TypeError

    def _send(self, message: Message, *, urgent: bool = True) -> None:
        self.outbox.append(message)

    def _open(self, epoch: int) -> None:
        world = self._world
        self.epoch, self.over, self.batches, self._behind = epoch, epoch == world.epochs, 0, False
        if not self.over:
            self._stock = LeaseStock(
                self._rank, 0, epoch, samples=world.samples, batch=1, drop_last=False, send=self._send,
                fixed=world.fixed, clock=lambda: world.now_s,
            )  # fmt: skip
            self.now, self._reported = "takes", False
            self._stock.begin(1, [])

    def hear(self) -> None:
        """Let the agent's thread read a message."""
        message = self.inbox.popleft()
        if isinstance(message, Deadlock):
            self.told = message.reason
        elif isinstance(message, EpochEnd) and message.epoch == self.epoch and self.now == "ends":
            self._behind = True
            self._enter()
        elif isinstance(message, (Lease, LeaseRecall)) and message.epoch == self.epoch:
            self._stock.on_message(message)

    def _enter(self) -> None:
        self.now, self.called = "calls", self.called + 1
        self._call.enter_context(self._waits.during("allreduce"))

    def go_on(self) -> bool:
        """Let the program make a step, if it can; return whether it did."""
        if self.over:
            return False
        if self.now == "computes" and self._world.now_s >= self.left_s:
            if self._world.inside and self.batches % self._world.every == 0:
                self._enter()
            else:
                self.now, self._reported = "takes", False
            return True
        if self.now == "calls" and min(each.called for each in self._world.ranks) >= self.called:
            self._call.close()
            if self._behind:
                self._open(self.epoch + 1)
            else:
                self.now, self._reported = "takes", False
            return True
        return self.now == "takes" and self._take()

    def _take(self) -> bool:
        if not self._stock.ready(0.0):
            if not self._reported:
                self._reported = True
                self._waits.in_loop(0, self.epoch)
            return False
        if self._stock.next(1.0, lambda: None, lambda: 0.0) is None:
            self.now = "ends"
            self._stock.close(meets=True)
            self._waits.in_loop(0, self.epoch)
        else:
            self.now, self.batches = "computes", self.batches + 1
            self.left_s = self._world.now_s + self._world.draw.choice((0.0, 0.01, 0.5, self._world.slowest_s))
        return True


class World:
    """All ranks and the coordinator; messages arrive in order, but as late as the draw has it."""

    def __init__(
        self, draw: random.Random, *, ranks: int, samples: int, epochs: int, inside: bool, every: int = 1,
        slowest_s: float = 0.5, fixed: bool = True, ahead: int = -1, raises: bool = False,
    ) -> None:  # fmt: skip
        self.fixed, self.ahead, self.raises = fixed, ahead, raises
        self.draw, self.samples, self.epochs, self.inside, self.every = draw, samples, epochs, inside, every
        self.slowest_s, self.now_s = slowest_s, 0.0
        self.state = JobState(ranks, Config(), 0.0)
        self.told: list[int] = []
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            self.ranks.append(Rank(self, rank))

    def run(self) -> float:
        """Run until all have ended or no rank has gone on for `LONG_S`; return how long the last one could not."""
        moved_s = 0.0
        while not all(rank.over for rank in self.ranks) and self.now_s - moved_s < LONG_S and not self.told:
            if self._events():
                moved_s = self.now_s
            self.now_s += TICK_S
            self.state.tick(self.now_s)
            self._post()
            if any(rank.now == "computes" for rank in self.ranks):
                moved_s = self.now_s
        return self.now_s - moved_s

    def _events(self) -> bool:
        moved = False
        for _number in range(self.draw.randrange(30)):
            rank = self.draw.randrange(len(self.ranks))
            each, kind = self.ranks[rank], self.draw.randrange(3)
            if kind == 0 and each.outbox:
                self.state.handle(rank, each.outbox.popleft(), self.now_s)
                self._post()
            elif kind == 1 and each.inbox:
                each.hear()
            elif kind == 2:
                moved = each.go_on() or moved
        return moved

    def _post(self) -> None:
        for to, message in self.state.outbox:
            if isinstance(message, Deadlock):
                self._check(to)
            for each in self.ranks if to == ALL else [self.ranks[to]]:
                each.inbox.append(message)
        self.state.outbox.clear()

    def _check(self, rank: int) -> None:
        """The condition is certain: no program can go on, and no message would change that."""
        self.told.append(rank)
        assert self.ranks[rank].now in ("takes", "ends")
        for each in self.ranks:
            assert each.now != "computes" and not each.over
            assert each.now != "calls" or each.called > min(other.called for other in self.ranks)
            assert not any(isinstance(message, Lease | EpochEnd | LeaseRecall) for message in each.inbox)
            assert not each.outbox


@pytest.mark.parametrize("fixed", [True, False], ids=["evaluates", "trains"])
@pytest.mark.parametrize("seed", range(60))
def test_ranks_that_wait_for_each_other_are_told_and_no_others(seed: int, fixed: bool) -> None:
    """Whether it comes to that is a matter of who takes the last batches. Those of a training may get shares."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4))
    world = World(
        draw, ranks=ranks, samples=draw.randrange(1, 12), epochs=draw.choice((1, 3)), inside=True,
        every=draw.choice((1, 1, 2)), fixed=fixed,
    )  # fmt: skip
    stuck_s = world.run()
    ended = all(rank.over for rank in world.ranks)
    assert ended != bool(world.told), "every job ends, or is told why it cannot"
    if ended:
        return
    assert stuck_s < SURE_S + 20.0
    assert world.told == [rank for rank, each in enumerate(world.ranks) if each.now != "calls"]
    with contextlib.suppress(IndexError):
        while True:
            world.ranks[world.told[0]].hear()
    assert "in hvd.allreduce for ranks" in world.ranks[world.told[0]].told


def test_both_happens() -> None:
    """Else the test above would show nothing."""
    found = set()
    for seed in range(12):
        draw = random.Random(seed)
        world = World(draw, ranks=2, samples=4 + seed % 2, epochs=1, inside=True)
        world.run()
        found.add(bool(world.told))
    assert found == {False, True}


@pytest.mark.parametrize("seed", range(30))
def test_a_collective_behind_the_loop_is_left_alone_however_slow_a_rank_is(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        draw, ranks=draw.choice((2, 3, 4)), samples=draw.randrange(1, 12), epochs=3, inside=False, slowest_s=30.0
    )
    world.run()
    assert all(rank.over for rank in world.ranks) and world.told == []


@pytest.mark.parametrize("raises", [True, False], ids=["raised", "of nothing"])
@pytest.mark.parametrize("seed", range(15))
def test_a_rank_that_counts_one_more_does_not_seem_to_wait_while_it_computes(seed: int, raises: bool) -> None:
    draw = random.Random(seed)
    world = World(
        draw, ranks=draw.choice((2, 3)), samples=draw.randrange(1, 12), epochs=3, inside=False, slowest_s=30.0,
        ahead=draw.choice((0, 1)), raises=raises,
    )  # fmt: skip
    world.run()
    assert all(rank.over for rank in world.ranks) and world.told == []


AT_END = LeaseReturn(0, 0, 1, True)


def _job(world_size: int = 2) -> JobState:
    """Rank 0 has ended an epoch of one sample behind 3 collectives."""
    state = JobState(world_size, Config(), 0.0)
    for rank in range(world_size):
        state.handle(rank, LeaseAsk(0, 0, 1, 1, False, 0, fixed=True), 0.0)
    state.handle(0, LeaseAsk(0, 0, 1, 1, False, 1, fixed=True, idle=True), 0.0)
    state.handle(0, AT_END, 0.0)
    state.handle(0, ProgramWait(3, loader=0, epoch=0), 0.0)
    return state


def _told(state: JobState, from_s: float = 0.0) -> list[int]:
    state.outbox.clear()
    for after_s in (0.0, 0.9 * SURE_S, SURE_S, 100.0):
        state.tick(from_s + after_s)
    return [to for to, message in state.outbox if isinstance(message, Deadlock)]


def test_the_rank_in_the_loop_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    state = _job()
    state.handle(1, ProgramWait(4, operation="barrier"), 0.0)
    assert _told(state) == [0] and _told(state, 200.0) == []
    assert "ranks [1] wait in hvd.barrier for ranks [0], which wait for them in a loop" in caplog.text


def test_a_rank_that_waits_again_is_told_again_and_one_that_does_not_is_left_alone() -> None:
    """It caught the error."""
    state = _job()
    state.handle(1, ProgramWait(4, operation="barrier"), 0.0)
    assert _told(state) == [0]
    state.handle(1, ProgramWait(4), 200.0)
    state.handle(1, ProgramWait(5, operation="barrier"), 200.0)
    assert _told(state, 200.0) == [], "rank 0 computes"
    state.handle(0, ProgramWait(4, loader=0, epoch=0), 400.0)
    assert _told(state, 400.0) == [0]


def test_a_rank_that_may_get_samples_by_a_change_of_shares_is_not_told() -> None:
    leases = LeaseService(2, lambda rank, message: None)
    for rank in range(2):
        leases.ask(rank, LeaseAsk(0, 0, 1, 1, False, 0), None, 0.0)
    leases.ask(1, LeaseAsk(0, 0, 1, 1, False, 0, idle=True, again=True), None, 0.0)
    assert leases.stuck == {1: (0, 0)}
    leases.changes = lambda loader: loader == 0
    assert leases.stuck == {}


@pytest.mark.parametrize(
    "report",
    [
        ProgramWait(3, operation="barrier"),  # Rank 0 has called that one, too: this rank is about to go on.
        ProgramWait(4),  # It has raised an error.
        ProgramWait(4, loader=0, epoch=0),  # It will get an answer.
        None,
    ],
)
def test_a_rank_that_may_go_on_is_waited_for(report: ProgramWait | None) -> None:
    state = _job()
    if report is not None:
        state.handle(1, report, 0.0)
    assert _told(state) == []


def test_a_rank_that_computes_is_waited_for_by_all() -> None:
    state = _job(3)
    state.handle(1, ProgramWait(4, operation="barrier"), 0.0)
    assert _told(state) == []
    state.handle(2, ProgramWait(4, operation="barrier"), 200.0)
    assert _told(state, 200.0) == [0]


@pytest.mark.parametrize("message", [Finished(2), JoinCalled()], ids=lambda each: each.kind)
def test_ranks_without_data_call_no_collective(message: Message) -> None:
    state = _job(3)
    state.handle(1, ProgramWait(4, operation="barrier"), 0.0)
    state.handle(2, message, 0.0)
    assert _told(state) == [0]


def test_a_report_of_an_earlier_wait_says_nothing_of_this_one() -> None:
    state = _job()
    state.handle(0, ProgramWait(3, loader=0, epoch=7), 0.0)
    state.handle(1, ProgramWait(4, operation="barrier"), 0.0)
    assert _told(state) == []


def test_a_rank_that_has_left_the_loop_lets_the_others_go_on() -> None:
    """In `sync`, where a collective is not a period without gradients."""
    state = _job(3)
    state.handle(1, LeaseAsk(0, 0, 1, 1, False, 0, fixed=True, idle=True), 0.0)
    state.handle(1, LeaseReturn(0, 0, 0, True, True), 0.0)
    state.handle(2, LeaseReturn(0, 0, 0, True, True), 0.0)
    assert _told(state) == []


def test_a_pause_of_the_coordinator_proves_nothing() -> None:
    looks = Deadlocks(2)
    looks.note(0, ProgramWait(3, loader=0, epoch=0))
    looks.note(1, ProgramWait(4, operation="barrier"))
    assert looks.look({0: (0, 0)}, (), 0.0) is None
    looks.look_anew()
    assert looks.look({0: (0, 0)}, (), 100.0) is None and looks.look({0: (0, 0)}, (), 100.0 + SURE_S) is not None
