"""Late gradients that a thread sends: the training thread never waits, and nothing is lost or counted twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from star_hvd.channel.late_sender import LateSender
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError

DEADLINE_S = 60.0


class SlowLink:
    """A parent that takes a push when the test lets it."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, int]] = []
        self.begun = threading.Semaphore(0)
        self.free = threading.Semaphore(0)
        self.broken = False
        self.weights: list[list[float]] = []
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()

    def push(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int:
        self.weights.append(list(weights))
        self.begun.release()
        assert self.free.acquire(timeout=DEADLINE_S)
        if self.broken:
            raise ChannelError("the parent is gone")
        self.taken.append((float(flats[0][0]), float(flats[0][-1]), version))
        return version + 2


def gradient(value: float) -> list[torch.Tensor]:
    return [torch.tensor([value, 1.0])]


def test_gradients_made_while_one_is_on_its_way_go_together_and_count_as_old_as_the_oldest() -> None:
    link = SlowLink()
    sender = LateSender(link, "late", lambda contained: Snapshot(contained, [torch.ones(1)], [{}]))
    sender.add(gradient(1.0), 5, [1.0])
    assert link.begun.acquire(timeout=DEADLINE_S)
    for number in (2.0, 4.0, 8.0):  # None of these waits: nothing has been taken.
        sender.add(gradient(number), 5 + int(number), [1.0])
    assert sender.take_results() == ([], None)
    with pytest.raises(DeadlineError):
        sender.flush(0.05)
    link.free.release(2)
    sender.flush(DEADLINE_S)
    assert link.taken == [(1.0, 1.0, 5), (14.0, 3.0, 7)]
    sent, snapshot = sender.take_results()
    assert [(each.version, each.contained, each.count) for each in sent] == [(5, 7, 1), (7, 9, 3)]
    assert snapshot is not None and snapshot.step == 9
    assert sender.close(DEADLINE_S) is None


def test_at_the_end_what_is_on_its_way_arrives_and_the_rest_is_given_back() -> None:
    link = SlowLink()
    sender = LateSender(link, "late", lambda contained: None)
    sender.add(gradient(1.0), 1, [1.0])
    assert link.begun.acquire(timeout=DEADLINE_S)
    sender.add(gradient(2.0), 2, [1.0])
    sender.add(gradient(4.0), 3, [1.0])
    unsent = sender.close(0.0)
    assert sender.closes_link and not link.closed.is_set(), "a push is on its way"
    link.free.release()
    assert sender.close(DEADLINE_S) is None
    assert unsent is not None and (unsent.version, unsent.count, unsent.weight) == (2, 2, 2.0)
    assert float(unsent.flats[0][0]) == 6.0 and link.taken == [(1.0, 1.0, 1)]
    assert link.closed.wait(DEADLINE_S), "nobody else would"


def test_a_link_that_nothing_uses_any_more_is_left_to_the_caller() -> None:
    link = SlowLink()
    sender = LateSender(link, "late", lambda contained: None)
    assert sender.close(DEADLINE_S) is None
    assert not sender.closes_link and not link.closed.is_set()


def test_a_failure_is_raised_where_training_goes_on() -> None:
    link = SlowLink()
    link.broken = True
    sender = LateSender(link, "late", lambda contained: None)
    sender.add(gradient(1.0), 1, [1.0])
    link.free.release()
    with pytest.raises(ChannelError, match="the parent is gone"):
        sender.flush(DEADLINE_S)
    with pytest.raises(ChannelError):
        sender.add(gradient(1.0), 2, [1.0])


def test_a_push_that_fails_while_it_is_closed_is_named_and_not_given_back() -> None:
    link = SlowLink()
    link.broken = True
    sender = LateSender(link, "late", lambda contained: None)
    sender.add(gradient(1.0), 1, [1.0])
    assert link.begun.acquire(timeout=DEADLINE_S)
    sender.add(gradient(2.0), 2, [1.0])
    unsent = sender.close(0.0)
    assert sender.closes_link, "a push is on its way"
    link.free.release()
    assert sender.close(DEADLINE_S) is None
    assert unsent is not None and unsent.version == 2
    assert link.closed.wait(DEADLINE_S) and sender.unanswered is not None
    assert (sender.unanswered.version, sender.unanswered.weight) == (1, 1.0)


def test_all_of_the_thread_is_on_streams_of_its_own() -> None:
    """What compression has left to send is on the device: read on the default stream it would wait for the training."""
    here = threading.local()
    found: list[bool] = []

    class Link:
        def push(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int:
            found.append(getattr(here, "own", False))
            return version + 1

        def close(self) -> None:
            """The caller closes it."""

    @contextlib.contextmanager
    def own() -> Iterator[None]:
        here.own = True
        yield
        here.own = False

    def receive(contained: int) -> None:
        found.append(getattr(here, "own", False))

    sender = LateSender(Link(), "late", receive, own)
    sender.add(gradient(1.0), 5, [1.0])
    sender.flush(DEADLINE_S)
    assert sender.close(DEADLINE_S) is None and not sender.closes_link
    assert found == [True, True]


def test_what_is_discarded_is_not_sent_and_parameters_from_before_are_not_handed_over() -> None:
    link = SlowLink()
    sender = LateSender(link, "late", lambda contained: Snapshot(contained, [torch.ones(1)], [{}]))
    assert sender.discard() is None
    sender.add(gradient(1.0), 5, [1.0])
    link.free.release()
    sender.flush(DEADLINE_S)
    sender.add(gradient(2.0), 6, [1.0])
    for _ in range(2):
        assert link.begun.acquire(timeout=DEADLINE_S)
    sender.add(gradient(4.0), 7, [1.0])
    unsent = sender.discard()  # Parameters have come, and others will with the push that is under way.
    assert unsent is not None and (unsent.version, unsent.count, unsent.weight) == (7, 1, 1.0)
    link.free.release()
    sender.flush(DEADLINE_S)
    sent, snapshot = sender.take_results()
    assert [each.version for each in sent] == [5, 6] and snapshot is None and len(link.taken) == 2
    sender.add(gradient(8.0), 8, [1.0])
    link.free.release()
    sender.flush(DEADLINE_S)
    (_, snapshot) = sender.take_results()
    assert snapshot is not None and snapshot.step == 10
    assert sender.close(DEADLINE_S) is None


def test_weights_are_summed_and_sent_in_full_precision() -> None:
    """A buffer of bfloat16 rounds 1.001 to 1, and the sum of 300 ones to 256."""
    link = SlowLink()
    sender = LateSender(link, "late", lambda contained: None)
    buffer = [torch.ones(2, dtype=torch.bfloat16)]
    for _ in range(301):
        sender.add(buffer, 1, [1.001])
        assert sender.take_results()[0] is not None and (link.weights or link.begun.acquire(timeout=DEADLINE_S))
    link.free.release(2)
    sender.flush(DEADLINE_S)
    assert [len(each) for each in link.weights] == [1, 1]
    assert sum(each[0] for each in link.weights) == pytest.approx(301 * 1.001)
    sender.close(DEADLINE_S)
