"""Which exact modes a loader allows, and what it lacks for others."""

from __future__ import annotations

import math

import pytest

from scheduler.records import Plan
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.microbatches import MicrobatchOpen
from star_hvd.coordinator.feeding_loader import FeedingLoader

SYNC = Plan.sync(3)
BALANCED, STEAL = Plan.sync(3, balanced=True), Plan.sync(3, steal=True)


def leased(samples: int = 240, batch: int = 8, *, fixed: bool = False) -> FeedingLoader:
    loader = FeedingLoader()
    loader.leased(LeaseAsk(0, 0, samples, batch, False, 0, fixed=fixed))
    return loader


def opened(*most: int) -> FeedingLoader:
    """A loader with micro-batches, with the most samples in a pass of each rank that has opened it."""
    loader = FeedingLoader()
    for rank, each in enumerate(most):
        loader.opened(rank, MicrobatchOpen(0, 0, 240, 8, 4, False, 0, 0, most=each))
    return loader


@pytest.mark.parametrize(
    ("loader", "balanced", "steal"),
    [
        (FeedingLoader(), "hvd.shard, which forms the batches", "microbatches=k"),
        (leased(samples=0), "hvd.shard, which forms the batches", "microbatches=k"),
        (leased(batch=1), "whose sizes hvd.shard can choose", "microbatches=k"),
        (leased(fixed=True), "whose sizes hvd.shard can choose", "microbatches=k"),
        (leased(), "", "microbatches=k"),
        (opened(16), "not for micro-batches; use sync(steal)", ""),
    ],
)
def test_what_a_mode_lacks_is_said(loader: FeedingLoader, balanced: str, steal: str) -> None:
    for plan, lack in ((BALANCED, balanced), (STEAL, steal), (SYNC, ""), (Plan.partial(3, 2), "")):
        found = loader.lack(plan)
        assert lack in found and bool(lack) == bool(found)


def test_the_exact_mode_is_the_one_that_the_loader_allows() -> None:
    assert FeedingLoader().exact_mode(SYNC) is None and leased(fixed=True).exact_mode(SYNC) is None
    balanced, steal = leased().exact_mode(SYNC), opened(16, 16).exact_mode(SYNC)
    assert balanced is not None and balanced.balanced and steal is not None and steal.steal


def test_a_pass_of_more_than_a_batch_has_to_fit_on_all_ranks_that_have_opened_the_loader() -> None:
    loader = opened(16, 8)
    assert loader.splits and loader.exact_mode(SYNC) is None
    loader.opened(1, MicrobatchOpen(0, 1, 240, 8, 4, False, 0, 0, most=9))
    assert loader.exact_mode(SYNC) is not None


def test_where_batches_must_be_equal_they_have_no_other_sizes() -> None:
    for loader in (leased(), opened(16)):
        assert loader.microbatches == (4 if loader.splits else 0)
        loader.equal_batches = "ranks meet within the passes"
        assert loader.exact_mode(SYNC) is None and loader.batch == loader.microbatches == 0


def test_times_are_those_of_usual_batches_without_shares() -> None:
    loader = leased()
    assert loader.scale is None and loader.scale_of(0, 5) is None and loader.batch == 0
    assert math.isnan(loader.fixed_part)
