"""Ranks that leave their loops over micro-batches are epochs ahead of the others; nobody waits in vain for another."""

from __future__ import annotations

import math

import pytest

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.microbatches import MicrobatchBegin, MicrobatchGrant, MicrobatchOpen, MicrobatchShares
from star_hvd.coordinator.lease_service import MicrobatchService

RANKS = 2


class Service(MicrobatchService):
    """With the messages it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        super().__init__(RANKS, lambda to, message: self.sent.append((to, message)))

    def opens(self, rank: int, epoch: int) -> None:
        self.open(rank, MicrobatchOpen(0, epoch, 64, 8, 2, False, 0, 7), 0.0)

    def leaves(self, rank: int, epoch: int) -> None:
        self.leave(rank, 0.0, (0, epoch))

    def told(self, epoch: int) -> set[int]:
        """Ranks that have got shares of an epoch."""
        return {to for to, each in self.sent if isinstance(each, MicrobatchShares) and each.epoch == epoch}

    @property
    def held_back(self) -> int:
        return len(self._early) + len(self._left_early)


@pytest.fixture
def service() -> Service:
    return Service()


def test_who_leaves_an_epoch_that_is_held_back_has_left_it(service: Service) -> None:
    service.opens(0, 0), service.opens(1, 0)
    for epoch in (0, 1):
        service.leaves(0, epoch), service.opens(0, epoch + 1)
    assert service.told(1) == service.told(2) == set(), "rank 1 is still in the first epoch"
    service.leaves(1, 0), service.opens(1, 1)
    assert 1 in service.told(1), "it takes the second epoch alone"
    assert service.told(2) == set(), "and the third one waits for it"
    service.leaves(1, 1), service.opens(1, 2)
    assert service.told(2) == {0, 1}
    assert not service.held_back


def test_a_finished_rank_is_not_waited_for_in_an_epoch_that_it_has_left_while_it_was_held_back(
    service: Service,
) -> None:
    service.opens(0, 0), service.opens(1, 0)
    service.leaves(0, 0), service.opens(0, 1), service.leaves(0, 1)
    service.leave(0, 0.0)
    assert not service.held_back
    for epoch in (0, 1):
        service.leaves(1, epoch), service.opens(1, epoch + 1)
    assert service.told(2) == {1}
    shares = next(each for _, each in service.sent if isinstance(each, MicrobatchShares) and each.epoch == 2)
    service.begin(1, MicrobatchBegin(0, 2, 0, shares.counts[0], 0.0, shares.sizes[0]), 0.0)
    for number, size in enumerate(shares.sizes[1:], 1):
        service.begin(1, MicrobatchBegin(0, 2, 0, shares.counts[0] + sum(shares.sizes[:number]), 0.1, size), 0.1)
    service.begin(1, MicrobatchBegin(0, 2, 0, -1, 0.1), 0.2)
    assert any(isinstance(each, MicrobatchGrant) for _, each in service.sent), "it gets the other one's share too"


def test_a_forgotten_epoch_is_held_back_no_longer(service: Service) -> None:
    service.opens(0, 0), service.opens(1, 0)
    service.leaves(0, 0), service.opens(0, 1), service.leaves(0, 1)
    assert service.held_back == 2
    service.forget((0, 1))
    assert not service.held_back


def _passes(
    service: Service, loader: int, paces_s: tuple[float, float], epoch: int = 0, *, trains: bool = True
) -> list[MicrobatchShares]:
    """Let both ranks open a loader's epoch and make the passes of its first step; return rank 0's shares."""
    for rank in range(RANKS):
        service.open(rank, MicrobatchOpen(loader, epoch, 640, 16, 4, False, 0, 7, most=64, trains=trains), 0.0)
    told = [(to, each) for to, each in service.sent if isinstance(each, MicrobatchShares)]
    told = [(to, each) for to, each in told if (each.loader, each.epoch) == (loader, epoch)]
    found = [each for to, each in told if to == 0]
    for rank, pace_s in enumerate(paces_s):
        counts, task, took_s = found[0].counts, sum(found[0].counts[:rank]), 0.0
        sizes = next(each.sizes for to, each in told if to == rank and each.step == 0)
        assert sum(sizes) == counts[rank]
        for size in sizes:
            service.begin(rank, MicrobatchBegin(loader, epoch, 0, task, took_s, size), 1.0)
            task, took_s = task + size, pace_s * (1.0 + size)
        service.begin(rank, MicrobatchBegin(loader, epoch, 0, -1, took_s), 1.0)
    return found


@pytest.mark.parametrize("closed", [False, True])
def test_the_next_loader_of_a_program_starts_with_the_pace_that_is_known(service: Service, closed: bool) -> None:
    service.steals = True
    first = _passes(service, 0, (1.0, 3.0))
    assert len(set(first[0].counts)) == 1
    known = service.fixed_part
    if closed:
        service.forget((0, 0))
    second = _passes(service, 1, (1.0, 3.0))
    assert second[0].counts[0] > second[0].counts[1], "rank 1 is slow"
    assert service.fixed_part == pytest.approx(known)


def test_a_loader_with_other_batches_starts_without_a_pace_and_the_fixed_part_known_before(service: Service) -> None:
    service.steals = True
    _passes(service, 0, (1.0, 3.0))
    known = service.fixed_part
    assert known > 0.0
    service.forget((0, 0))
    service.open(0, MicrobatchOpen(1, 0, 640, 32, 4, False, 0, 7, most=64), 0.0)
    assert service.fixed_part == known
    shares = [each for _, each in service.sent if isinstance(each, MicrobatchShares) and each.loader == 1]
    assert len(set(shares[0].counts)) == 1


@pytest.mark.parametrize("closed", [False, True])
def test_a_training_takes_no_pace_from_an_evaluation(service: Service, closed: bool) -> None:
    """Passes without gradients take another time, and what slows a rank in them may not slow its training."""
    service.steals = True
    _passes(service, 0, (1.0, 3.0), trains=False)
    assert math.isnan(service.fixed_part)
    if closed:
        service.forget((0, 0))
    assert len(set(_passes(service, 1, (1.0, 3.0))[0].counts)) == 1
    known = service.fixed_part
    assert known > 0.0
    _passes(service, 2, (3.0, 1.0), trains=False)
    if closed:
        service.forget((1, 0))
        service.forget((2, 0))
    assert service.fixed_part == known
    third = _passes(service, 3, (1.0, 3.0))
    assert third[0].counts[0] > third[0].counts[1], "as in the training before"


def test_an_epoch_of_evaluation_with_the_same_loader_does_not_change_the_pace_of_training(service: Service) -> None:
    service.steals = True
    _passes(service, 0, (1.0, 3.0))
    for rank in range(RANKS):
        service.leave(rank, 2.0, (0, 0))
    _passes(service, 0, (3.0, 1.0), 1, trains=False)
    for rank in range(RANKS):
        service.leave(rank, 3.0, (0, 1))
    again = _passes(service, 0, (1.0, 3.0), 2)
    assert again[0].counts[0] > again[0].counts[1]
