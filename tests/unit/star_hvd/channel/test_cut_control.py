"""The control channel through a proxy that breaks its connections: no message is lost, doubled or out of order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.records import Plan, StepTimes
from star_hvd.channel import options
from star_hvd.channel.messages import base as m
from tests.support.proxy import TO_CLIENT, TO_SERVER, Proxy
from tests.unit.star_hvd.channel.test_channel import CONFIG, Ranks, within

BATCH = 4


class CutRanks(Ranks):
    """Rank 1's agent reaches the coordinator through a proxy."""

    def __init__(self, world_size: int = 2, *, drain_s: float = 2.0, **faults: Any) -> None:
        self.proxy: Proxy | None = None
        self.drain_s, self.faults = drain_s, faults
        super().__init__(world_size, CONFIG)

    def port_for(self, rank: int) -> int:
        if rank != 1:
            return super().port_for(rank)
        self.proxy = Proxy(self.control_port, **self.faults)
        return self.proxy.port

    def agent(self, rank: int, config: Any, **settings: Any) -> Any:
        return super().agent(rank, config, drain_s=self.drain_s, **settings)

    def take(self, number: int, plan_id: int = 0) -> tuple[int, int]:
        """Ask for a batch as rank 1, and wait for the answer."""
        before = len(self.got(1, m.Grant))
        self.agents[1].send(m.RequestBatch(0, plan_id, 1 << 20, BATCH, False))
        assert within(lambda: len(self.got(1, m.Grant)) > before), f"request {number} was never answered"
        grant = self.got(1, m.Grant)[-1]
        return grant.start, grant.stop

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


@pytest.fixture
def ranks() -> Iterator[CutRanks]:
    job = CutRanks()
    try:
        yield job
    finally:
        job.close()


@pytest.mark.parametrize("inside", [False, True], ids=["between frames", "inside a frame"])
@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT], ids=["to the coordinator", "to the agent"])
def test_a_reset_at_every_frame_loses_no_grant(ranks: CutRanks, way: int, inside: bool) -> None:
    proxy = ranks.proxy
    assert proxy is not None and ranks.all_got(m.Heartbeat)
    longest_s, asked = 0.0, 0
    for frames in range(0 if inside else 1, 9):  # Five frames of the handshake behind a reset, and some of the stream.
        cuts = proxy.cuts
        proxy.arm(way, frames, inside=inside)
        began_s = time.monotonic()
        while proxy.cuts == cuts or asked % 3:
            start, stop = ranks.take(asked)
            assert (start, stop) == (asked * BATCH, (asked + 1) * BATCH), "handed out once, in order"
            longest_s = max(longest_s, time.monotonic() - began_s)
            asked += 1
            began_s = time.monotonic()
    print(f"{asked} grants, {proxy.cuts} resets, longest wait {longest_s:.2f} s")
    assert longest_s < 60.0  # A second or two, but for a machine that stands still.
    assert ranks.coordinator.malformed == ranks.agents[1].malformed == 0


def test_resets_at_any_moment_keep_a_busy_exchange_whole(ranks: CutRanks) -> None:
    proxy, count = ranks.proxy, 400
    assert proxy is not None and ranks.all_got(m.Heartbeat)
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.15):
            proxy.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for number in range(count):
            ranks.agents[1].send(m.RequestBatch(0, 0, 1 << 20, BATCH, False))
            if number % 4 == 0:
                time.sleep(0.02)
            if number == count // 2:  # Where the cutter was held up, the other half waits for it.
                assert within(lambda: proxy.cuts >= 5)
        assert within(lambda: len(ranks.got(1, m.Grant)) >= count)
    finally:
        stop.set()
        cutter.join()
    grants = [(grant.start, grant.stop) for grant in ranks.got(1, m.Grant)]
    assert grants == [(i * BATCH, (i + 1) * BATCH) for i in range(count)]


def test_orders_to_a_rank_that_cannot_be_reached_arrive_later_in_order(ranks: CutRanks) -> None:
    proxy = ranks.proxy
    assert proxy is not None and ranks.all_got(m.Heartbeat)
    ranks.register(Plan.partial(2, 1))
    assert ranks.all_got(m.PlanMessage)
    proxy.refuse()
    for step in range(20):
        ranks.agents[0].send(m.Arrive(0, step, 1, StepTimes(0.02, 0.0, 0.02), 0.0))
        assert within(lambda step=step: any(o.step == step for o in ranks.got(0, m.CloseStep)))  # type: ignore[misc]
    proxy.refuse(False)
    assert within(lambda: len(ranks.got(1, m.CloseStep)) == 20)
    assert [order.step for order in ranks.got(1, m.CloseStep)] == list(range(20))


def test_a_connection_that_swallows_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "HEARTBEAT_INTERVAL_MS", 200)
    monkeypatch.setattr(options, "HEARTBEAT_TIMEOUT_MS", 1500)
    ranks = CutRanks()
    proxy = ranks.proxy
    assert proxy is not None
    try:
        assert ranks.take(0) == (0, BATCH)
        before = proxy.connections
        proxy.stall()
        assert ranks.take(1) == (BATCH, 2 * BATCH)
        assert ranks.take(2) == (2 * BATCH, 3 * BATCH)
        assert proxy.connections > before and proxy.cuts == 0
    finally:
        ranks.close()


@pytest.mark.parametrize("faults", [{"delay_s": 0.05}, {"piece_bytes": 1}], ids=["delayed", "byte by byte"])
def test_delays_and_splits_change_nothing(faults: dict[str, Any]) -> None:
    ranks = CutRanks(**faults)
    try:
        for number in range(8):
            assert ranks.take(number) == (number * BATCH, (number + 1) * BATCH)
        assert ranks.coordinator.malformed == ranks.agents[1].malformed == 0
    finally:
        ranks.close()


@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT])
def test_a_reset_at_any_byte_of_a_new_connection(way: int) -> None:
    """In the middle of the greeting, of the handshake, of the first message."""
    ranks = CutRanks()
    proxy = ranks.proxy
    assert proxy is not None
    try:
        for number, offset in enumerate((1, 10, 63, 64, 65, 200, 264, 300, 420, 520, 600, 700)):
            proxy.arm_at_byte(way, offset)
            proxy.cut()
            assert ranks.take(number) == (number * BATCH, (number + 1) * BATCH)
            assert within(lambda: not proxy.armed), "the connection was reset there"
    finally:
        ranks.close()


def test_last_words_arrive_although_the_connection_breaks() -> None:
    ranks = CutRanks(drain_s=60.0)
    proxy = ranks.proxy

    def heard() -> bool:
        with ranks.coordinator.job_state() as job:
            return job.finished == {1}

    try:
        assert proxy is not None and ranks.all_got(m.Heartbeat)
        proxy.arm(TO_SERVER, 1, inside=True)
        ranks.agents[1].send(m.Finished(1), urgent=False)
        ranks.agents[1].stop(60.0)
        assert within(heard)
    finally:
        ranks.close()
