"""Epochs of several loaders at the coordinator: ranks that wait for each other, and what is forgotten."""

from __future__ import annotations

import pytest

from scheduler.records import Plan, StepTimes
from scheduler.rules.runs import samples, spans
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.leases import (
    Consumed,
    Lease,
    LeaseAsk,
    LeaseRecall,
    LeaseReturn,
    LoaderClosed,
    runs_of,
)
from star_hvd.channel.messages.microbatches import MicrobatchOpen
from star_hvd.channel.messages.shares import ShareOrder, ShareProposal, ShareReady
from tests.support.job_states import Job, only, state_of

A, B, C = 0, 1, 2
LOADERS = 3000


class Loaders(Job):
    """A job, and what its ranks say of the epochs of their loaders; batches have one sample."""

    def __init__(self, world_size: int = 2, plan: Plan | None = None) -> None:
        super().__init__(world_size)
        self.register(plan or Plan.sync(world_size))

    def heard(self, rank: int, message: m.Message) -> list[tuple[int, m.Message]]:
        """What the ranks hear when one says this."""
        found = self.say(rank, message)
        return [pair for pair in zip(self.destinations, found, strict=True) if not isinstance(pair[1], m.PlanMessage)]

    def ask(
        self, rank: int, loader: int, total: int, begun: int = 0, *, waits: bool = False, late: int = 0, epoch: int = 0
    ) -> list[tuple[int, m.Message]]:
        return self.heard(rank, LeaseAsk(loader, epoch, total, 1, False, begun, undelivered=late, idle=waits))

    def end(
        self, rank: int, loader: int, begun: int, *, early: bool = False, meets: bool = True, epoch: int = 0
    ) -> list[tuple[int, m.Message]]:
        return self.heard(rank, LeaseReturn(loader, epoch, begun, True, early, meets=meets))

    def draw(self, loader: int, begun: tuple[int, ...], *, epoch: int = 0) -> None:
        """Let each rank begin so many samples of an epoch, and all of them be begun."""
        for rank in range(self.world_size):
            self.ask(rank, loader, sum(begun), epoch=epoch)
        for rank, count in enumerate(begun):
            self.ask(rank, loader, sum(begun), count, epoch=epoch)


def test_ranks_that_wait_at_the_ends_of_different_loaders_meet_and_go_on() -> None:
    job = Loaders()
    job.draw(A, (5, 5))
    job.draw(B, (5, 4))
    assert job.end(0, A, 5) == []
    assert sorted(job.end(1, B, 4)) == [(0, m.EpochEnd(A, 0)), (1, m.EpochEnd(B, 0))]
    assert job.end(1, A, 5, early=True) == [] == job.end(0, B, 5, early=True), "they leave the loop"


def test_a_rank_in_the_middle_is_waited_for() -> None:
    job = Loaders(3)
    job.draw(A, (4, 4, 3))
    job.draw(B, (3, 3, 3))
    assert job.end(2, A, 3) == [] == job.end(0, B, 3)
    assert len(only([message for _, message in job.end(1, B, 3)], m.EpochEnd)) == 3


def test_a_rank_that_has_left_the_loop_is_not_waited_for_and_the_others_do_not_meet() -> None:
    job = Loaders(3)
    job.draw(A, (4, 4, 3))
    job.draw(B, (3, 3, 3))
    for loader, begun in ((A, 4), (B, 3)):
        assert job.end(1, loader, begun, early=True) == []
    assert job.end(2, A, 3) == []
    assert sorted(job.end(0, B, 3)) == [(0, m.EpochEnd(B, 0, False)), (2, m.EpochEnd(A, 0, False))]


def test_a_thread_that_does_not_train_does_not_count_as_a_rank_that_waits() -> None:
    job = Loaders()
    job.draw(A, (5, 5))
    job.draw(B, (5, 4))
    assert job.end(0, A, 5, meets=False) == [] == job.end(1, B, 4)
    assert job.end(0, B, 5) == [(-1, m.EpochEnd(B, 0))]


def test_who_comes_to_an_end_that_the_others_have_left_goes_on_at_once() -> None:
    job = Loaders()
    job.draw(A, (5, 5))
    job.draw(B, (5, 4))
    job.end(0, A, 5)
    job.end(1, B, 4)
    assert job.end(1, A, 5) == [(1, m.EpochEnd(A, 0, False))]
    assert job.end(0, B, 5) == [(0, m.EpochEnd(B, 0, False))]
    job.draw(C, (5, 5))
    assert job.end(0, C, 5) == []
    assert job.end(1, C, 5) == [(-1, m.EpochEnd(C, 0))], "later ends are common ones again"


def test_who_is_behind_does_not_wait_for_ranks_in_a_collective() -> None:
    job = Loaders()
    job.draw(A, (5, 5))
    job.draw(B, (5, 4))
    job.end(0, A, 5)
    job.end(1, B, 4)
    job.draw(B, (5, 4), epoch=1)
    assert job.end(1, B, 4, epoch=1) == [], "rank 0 may come"
    assert (1, m.EpochEnd(B, 1, False)) in job.heard(0, m.Away(True, False, "barrier"))


def test_at_the_end_of_a_common_loop_a_rank_waits_for_one_in_a_collective() -> None:
    job = Loaders()
    job.draw(A, (5, 5))
    job.end(1, A, 5)
    assert only([message for _, message in job.heard(0, m.Away(True, False, "barrier"))], m.EpochEnd) == []
    job.heard(0, m.Away(False, False, "barrier"))
    assert job.end(0, A, 5) == [(-1, m.EpochEnd(A, 0))]


def test_samples_of_a_rank_that_waits_elsewhere_go_to_the_rank_that_waits_for_them_also_in_rows() -> None:
    job = Loaders()
    for rank in (0, 1):
        job.ask(rank, A, 8)
    job.draw(B, (2, 1))
    assert job.ask(0, A, 8, 4, waits=True) == [], "its part is used up"
    assert job.end(1, B, 1) == [(1, LeaseRecall(A, 0, 0))], "rank 1 has begun two of its four"
    ((rank, lease),) = job.heard(1, LeaseReturn(A, 0, 2, False))
    assert rank == 0 and isinstance(lease, Lease) and samples(runs_of(lease.runs)) == 1
    ((rank, last),) = job.ask(1, A, 8, 2)
    assert rank == 1 and isinstance(last, Lease)
    assert sorted(spans([*runs_of(lease.runs), *runs_of(last.runs)])) == [(5, 6), (7, 8)]
    assert sorted(job.end(0, B, 2)) == [(-1, m.EpochEnd(B, 0))]


def test_what_was_dealt_to_a_rank_that_has_not_come_is_handed_out() -> None:
    job = Loaders()
    for rank in (0, 1):
        job.ask(rank, A, 8)
    job.ask(0, B, 4)
    assert job.ask(0, B, 4, 2, waits=True) == [], "rank 1 has its part of B, and asks for it when it comes"
    found = job.ask(1, A, 8, 4, waits=True)
    assert (0, LeaseRecall(A, 0, 0)) in found
    ((rank, lease),) = [each for each in found if isinstance(each[1], Lease)]
    assert rank == 0 and isinstance(lease, Lease) and samples(runs_of(lease.runs)) == 1
    assert len(job.ask(0, B, 4, 3)) == 1
    assert job.ask(1, B, 4) == [], "the last one is rank 0's"
    assert (1, Lease(B, 0, [], True)) in job.ask(0, B, 4, 4)


def test_where_loaded_batches_cannot_be_had_one_rank_ends_and_the_others_get_what_it_leaves() -> None:
    """Batches that may overtake each other count as begun when they are formed, and cannot be called back."""
    job = Loaders()
    for loader in (A, B):
        for rank in (0, 1):
            job.ask(rank, loader, 8)
    job.ask(0, A, 8, 4)
    job.ask(1, B, 8, 4)
    job.ask(0, B, 8, 4, late=2)
    job.ask(1, A, 8, 4, late=2)
    assert job.ask(0, A, 8, 4, waits=True) == []
    found = job.ask(1, B, 8, 4, waits=True)
    assert found == [(0, Lease(A, 0, [], True, even=True))]
    assert job.end(0, A, 4) == [(0, m.EpochEnd(A, 0, False))], "it does not wait for the other one"
    back = job.heard(0, LeaseReturn(B, 0, 4, True, True, undone=[4, 5, 6, 7]))
    assert [rank for rank, each in back if isinstance(each, Lease) and each.runs] == [1]


@pytest.mark.parametrize(
    ("plan", "left_at", "warns"),
    [(Plan.sync(2), 1, True), (Plan.sync(2), 4, False), (Plan.partial(2, 1), 1, False)],
)
def test_a_rank_that_looks_at_a_batch_is_a_whole_iteration_ahead(
    caplog: pytest.LogCaptureFixture, plan: Plan, left_at: int, *, warns: bool
) -> None:
    """What they wait for at the end is hard to find. But all ranks may leave a loop at the same step."""
    job = Loaders(2, plan)
    for rank in (0, 1):
        job.ask(rank, A, 20)
    job.end(0, A, left_at, early=True)
    job.ask(0, A, 20, epoch=1)
    job.ask(1, A, 20, 5)
    with caplog.at_level("WARNING", "star_hvd"):
        job.end(1, A, 5)
    assert ("take it from the DataLoader" in caplog.text) == warns


def test_ranks_that_all_leave_a_loop_are_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    job = Loaders(2)
    for rank in (0, 1):
        job.ask(rank, A, 20)
    for rank in (0, 1):
        job.end(rank, A, 1 + rank, early=True)
        job.ask(rank, A, 20, epoch=1)
    for rank in (0, 1):
        job.ask(rank, A, 20, 10, epoch=1)
        job.end(rank, A, 10, epoch=1)
    assert "DataLoader" not in caplog.text


def size(job: Job) -> int:
    return len(repr(state_of(job.state)))


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_program_may_make_a_new_loader_for_every_evaluation(epochs: int) -> None:
    job, sizes = Loaders(), []
    for loader in range(LOADERS):
        for epoch in range(epochs):
            job.draw(loader, (2, 1), epoch=epoch)
            for rank in (0, 1):
                job.end(rank, loader, 2 - rank, epoch=epoch, early=loader % 3 == 0)
        for rank in (0, 1) if loader % 2 else (0,):  # A rank that leaves a loop requests no further epoch.
            job.ask(rank, loader, 3, epoch=epochs)
        if loader:
            for rank in (0, 1):
                job.end(rank, loader - 1, 0, early=True, epoch=epochs)
                job.heard(rank, LoaderClosed(loader - 1))
        if loader in (100, LOADERS - 1):
            sizes.append(size(job))
    assert sizes[1] < 1.1 * sizes[0]


def test_ended_epochs_of_loaders_that_stay_are_forgotten_after_others() -> None:
    job, sizes = Loaders(), []
    for loader in range(LOADERS):
        job.draw(loader, (2, 1))
        for rank in (0, 1):
            job.end(rank, loader, 2 - rank)
        if loader in (100, LOADERS - 1):
            sizes.append(size(job))
    assert sizes[1] < 1.1 * sizes[0]


def test_a_rank_may_close_loaders_long_before_the_others() -> None:
    job, sizes = Loaders(), []
    for loader in range(600):
        job.draw(loader, (2, 1))
        for rank in (0, 1):
            job.end(rank, loader, 2 - rank)
        job.heard(0, LoaderClosed(loader))
        if loader >= 100:
            job.heard(1, LoaderClosed(loader - 100))
        if loader in (200, 599):
            sizes.append(size(job))
    assert sizes[1] < 1.1 * sizes[0]


def test_ended_epochs_in_micro_batches_are_forgotten_too() -> None:
    job, sizes = Loaders(), []
    for loader in range(300):
        for rank in (0, 1):
            job.heard(rank, MicrobatchOpen(loader, 0, 8, 4, 2, False, 0, 0))
        for rank in (0, 1):
            job.end(rank, loader, 0)
        if loader in (100, 299):
            sizes.append(size(job))
            for rank in (0, 1):
                job.heard(rank, LoaderClosed(loader))
    assert sizes[1] < 1.1 * sizes[0]


def test_late_messages_of_a_forgotten_epoch_do_no_harm() -> None:
    job = Loaders()
    job.draw(A, (2, 1))
    for rank in (0, 1):
        job.end(rank, A, 2 - rank)
        job.heard(rank, LoaderClosed(A))
    before = size(job)
    for message in (
        LeaseReturn(A, 0, 2, False), LeaseReturn(A, 0, 2, True, True), Consumed(A, 0, 3, []), LoaderClosed(A)
    ):  # fmt: skip
        assert job.heard(0, message) == []
    assert job.end(0, A, 2) == [(0, m.EpochEnd(A, 0, False))], "it would wait"
    assert size(job) == before


def test_a_loader_is_kept_until_all_ranks_have_closed_it_or_finished() -> None:
    job = Loaders()
    for rank in (0, 1):
        job.ask(rank, A, 8)
    job.end(0, A, 1, early=True)
    job.heard(0, LoaderClosed(A))
    ((_, lease),) = job.ask(1, A, 8, 4)
    assert isinstance(lease, Lease) and lease.runs, "what rank 0 gave back"
    before = size(job)
    job.heard(1, m.Finished(1))
    assert size(job) < before


def test_a_rank_that_closes_what_it_waits_for_breaks_nothing() -> None:
    job = Loaders()
    for loader in (A, B):
        for rank in (0, 1):
            job.ask(rank, loader, 8)
    job.ask(0, A, 8, 4, waits=True)
    for rank in (0, 1):
        job.heard(rank, LoaderClosed(A))
    job.ask(1, B, 8, 4, waits=True)
    job.end(0, B, 1)


def test_auto_starts_with_taking_over_only_where_no_rank_lacks_memory_for_longer_passes() -> None:
    job = Job(2)
    job.register(None)
    small = MicrobatchOpen(0, 0, 1000, 16, 4, False, 0, 0, most=16)
    large = MicrobatchOpen(0, 0, 1000, 16, 4, False, 0, 0, most=32)
    assert only(job.say(0, small), m.PlanMessage) == []
    assert only(job.say(1, large), m.PlanMessage) == [], "rank 0 lacks it"
    (published,) = only(job.say(0, large), m.PlanMessage)
    assert Plan.from_dict(published.plan).steal


def test_steps_of_an_optimizer_that_replaces_the_first_one_have_the_present_shares() -> None:
    job = Job(2)
    job.register(Plan.sync(2))
    job.say(0, LeaseAsk(A, 0, 20_000, 10, False, 0))
    shares = job.state.shares
    shares.state.propose((5, 15), job.now_s)
    (proposal,) = only(job.sent(), ShareProposal)
    for rank in range(2):
        job.say(rank, ShareReady(A, proposal.number, 0, 500, 1, 5000, [0, 10], 0))
    assert shares.state.shares == (5, 15) and shares.state.samples(0, 499) == 10
    shares.state.propose((10, 10), job.now_s)
    job.register(Plan.sync(2), optimizer_id=1)
    heard = job.say(0, m.OptimizerDropped(0, 600, False, False))
    assert [each.accepted for each in only(heard, ShareOrder)] == [False], "a rank may answer by either's steps"
    assert only(job.pass_time(1.0), ShareProposal) == []
    heard = job.say(1, m.OptimizerDropped(0, 600, False, False))
    assert only(heard, m.OptimizerOver) and shares.state.samples(0, 0) == shares.state.samples(0, 499) == 5
    for step in range(4):
        for rank in range(2):
            job.say(rank, m.Arrive(1, step, 0, StepTimes(1.0), 0.0))
    assert shares.policy is not None and shares.policy.curves.levels_s(2) == pytest.approx([2.0, 2.0 / 3.0])
    assert only(job.tick(), ShareProposal)
