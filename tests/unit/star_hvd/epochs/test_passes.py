"""`Passes`: all ranks number the epochs of a loader alike, whatever each of them had requested ahead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from star_hvd.epochs.passes import Coming, Passes, Terms, digest, spans
from star_hvd.input.lease_stock import LeaseStock
from star_hvd.input.sample_order import EpochOrder
from star_hvd.runtime.runtime import Runtime

LOADER = 3
SAMPLES = 12


class Stock:
    """Stands for the samples leased to a rank."""

    def __init__(self, epoch: int, samples: int, batch: int, *, ask: bool) -> None:
        self.epoch, self.samples, self.batch, self.asked = epoch, samples, batch, ask
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Rank:
    """The iterations of one rank over a loader.

    Attributes:
        terms: What a stock is opened with at present.
        looks: How often that was evaluated.
        opened: All stocks, in the order in which they were opened.
    """

    def __init__(self) -> None:
        self.passes = Passes()
        self.terms = Terms(
            2, drop_last=False, ahead=0, in_order=True, load_s=0.0, sizer=None, even=False, fixed=False
        )  # fmt: skip
        self.looks = 0
        self.opened: list[Stock] = []
        self._run = cast(Runtime, SimpleNamespace(client=SimpleNamespace(open_stock=self._opened)))

    def begin(self, samples: int = SAMPLES, expected: int | None = SAMPLES) -> Stock:
        """Begin an epoch."""
        coming = Coming(0, EpochOrder(torch.arange(samples), 0), None, expected, evaluates=False)
        return cast(Stock, self.passes.stock_for(self._run, LOADER, coming, self._terms))

    def end(self, expected: int | None = SAMPLES) -> None:
        """Come to the end of the epoch that was begun, and request the next one."""
        self.leave(expected)
        self.passes.ask_for_next(self._run, LOADER, expected, self._terms)

    def leave(self, expected: int | None = SAMPLES) -> None:
        """Leave the loop."""
        self.passes.left(expected, self._terms)

    def _terms(self) -> Terms:
        self.looks += 1
        return self.terms

    def _opened(
        self, loader: int, epoch: int, samples: int, batch: int, drop_last: bool, *, ask: bool, **_: Any
    ) -> LeaseStock:
        assert loader == LOADER and not drop_last
        self.opened.append(Stock(epoch, samples, batch, ask=ask))
        return cast(LeaseStock, self.opened[-1])


def test_what_was_requested_ahead_is_the_next_epoch_if_that_is_as_expected() -> None:
    rank = Rank()
    for epoch in range(3):
        stock = rank.begin()
        assert (stock.epoch, stock.samples, stock.asked, stock.closed) == (epoch, SAMPLES, epoch > 0, False)
        rank.end()
    assert [each.epoch for each in rank.opened] == [0, 1, 2, 3]


def test_a_size_that_is_set_in_the_loop_counts_for_what_is_requested_at_its_end() -> None:
    rank = Rank()
    rank.begin()
    rank.terms = rank.terms._replace(batch_size=4)
    rank.end()
    stock = rank.begin()
    assert (stock.epoch, stock.batch, stock.asked, stock.closed) == (1, 4, True, False)


@pytest.mark.parametrize("changed", [{"batch_size": 3}, {"even": True}, {"fixed": True}, {}])
def test_an_unexpected_epoch_has_the_same_number_on_ranks_that_ended_the_one_before_and_that_left_it(
    changed: dict[str, Any],
) -> None:
    """Without another change, the epoch has another length."""
    ended, left, kept = Rank(), Rank(), Rank()
    for rank in (ended, left, kept):
        rank.begin()
    ended.end()
    left.leave()  # The iterator of `kept` is not closed, and never ends.
    samples = SAMPLES if changed else SAMPLES - 1
    for rank in (ended, left, kept):
        rank.terms = rank.terms._replace(**changed)
        stock = rank.begin(samples)
        assert (stock.epoch, stock.samples, stock.batch) == (2, samples, rank.terms.batch_size)
        assert not stock.asked and not stock.closed
    assert ended.opened[1].closed and len(left.opened) == len(kept.opened) == 2
    assert {rank.passes.count for rank in (ended, left, kept)} == {3}


def test_nothing_is_requested_of_an_epoch_whose_length_is_unknown_nor_is_any_number_left_out() -> None:
    rank = Rank()
    for epoch in range(3):
        looks = rank.looks
        stock = rank.begin(SAMPLES + epoch, expected=None)
        rank.end(expected=None)
        assert (stock.epoch, stock.samples, stock.asked) == (epoch, SAMPLES + epoch, False)
        assert rank.looks == looks + 1, "to open the stock"
    assert len(rank.opened) == 3


@pytest.mark.parametrize("close", [True, False])
def test_numbers_go_on_alike_on_all_ranks_where_another_epoch_was_chosen(close: bool) -> None:
    ended, left = Rank(), Rank()
    for rank in (ended, left):
        rank.passes.forget(close=close)
        assert rank.begin().epoch == 0, "no rank requests the first epoch ahead"
    ended.end()
    left.leave()
    for rank in (ended, left):
        rank.passes.forget(close=close)
        rank.terms = rank.terms._replace(batch_size=6)
        stock = rank.begin()
        assert (stock.epoch, stock.batch, stock.asked) == (2, 6, False)
    assert ended.opened[1].asked and ended.opened[1].closed == close


def test_a_new_world_counts_from_0_and_returns_nothing_to_the_one_before() -> None:
    rank = Rank()
    rank.begin()
    rank.end()
    rank.passes.restart()
    rank.terms = rank.terms._replace(batch_size=6)
    stock = rank.begin()
    assert (stock.epoch, stock.batch, stock.asked) == (0, 6, False)
    assert not any(each.closed for each in rank.opened)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_loader_goes_with_the_last_reference_to_it(no_collector: None) -> None:
    class Loader:
        def __init__(self) -> None:
            self.passes = Passes()

        def terms(self) -> Terms:
            return rank.terms

    rank, loader = Rank(), Loader()
    run = cast(Runtime, SimpleNamespace(client=SimpleNamespace(open_stock=lambda *_, **__: Stock(0, 1, 1, ask=True))))
    coming = Coming(0, EpochOrder([0], 0), None, 1, evaluates=False)
    loader.passes.stock_for(run, LOADER, coming, loader.terms)
    loader.passes.left(1, loader.terms)
    loader.passes.ask_for_next(run, LOADER, 1, loader.terms)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None


def test_orders_are_equal_by_what_was_consumed_of_them_before() -> None:
    order = EpochOrder(torch.arange(SAMPLES), 5)
    assert spans([0, 2, 6, 8]) == [(0, 2), (6, 8)] and spans([]) == []
    assert digest(order, []) == 5
    assert len({digest(order, done) for done in ([], [0, 2], [0, 4], [0, 2, 6, 8])}) == 4
