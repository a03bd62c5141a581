"""The machine behind the channels: every message exactly once and in order, whatever a network does."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from star_hvd.channel.reliable import ENVELOPE_BYTES, Frames, Kind, Limits, Stream
from star_hvd.errors import ChannelError
from tests.support.effort import cases

LIMITS = Limits(messages=400, nbytes=1 << 20, ack_delay_s=0.05, ack_messages=8, ack_bytes=1 << 12)
TINY = Limits(messages=5, nbytes=60, ack_delay_s=0.05, ack_messages=8, ack_bytes=1 << 12)


class End:
    """One side: its stream, what its application sent to the present peer, and what it got."""

    def __init__(self, *, accepts: bool, limits: Limits = LIMITS) -> None:
        self.stream = Stream(limits, accepts=accepts)
        self.wire: deque[Frames] = deque()  # Towards the other side.
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.counter = 0
        self.full = False  # Has no room for a message at present.

    def flush(self) -> None:
        self.wire.extend(self.stream.emitted())

    def send(self, now_s: float, name: str) -> None:
        self.counter += 1
        text = f"{name}{self.counter}".encode()
        self.sent.append(text)
        self.stream.send([text, b"payload"], now_s)
        self.flush()

    def take(self, frames: Frames, now_s: float) -> None:
        message = self.stream.receive(frames, now_s)
        if message is not None:
            assert message[1] == b"payload"
            if self.full:
                self.stream.refuse()
                return self.flush()
            self.got.append(message[0])
        self.flush()


class Network:
    """Two sides and what is on its way between them; the test decides what happens to it."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now_s = 0.0
        self.limits = limits
        self.client, self.server = End(accepts=False, limits=limits), End(accepts=True, limits=limits)
        self.lives = 0
        self.up = True

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def deliver(self, end: End, count: int = 1) -> None:
        """What `end` sent arrives."""
        for _ in range(min(count, len(end.wire))):
            self.other(end).take(end.wire.popleft(), self.now_s)

    def cut(self) -> None:
        """The connection breaks: what is on its way is gone."""
        self.client.wire.clear()
        self.server.wire.clear()
        self.up = False

    def connect(self) -> None:
        self.server.wire.clear()  # A ROUTER drops what it sends to a peer that is not there.
        self.up = True
        self.client.stream.connected(self.now_s)
        self.client.flush()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for end in (self.client, self.server):
            end.stream.tick(self.now_s)
            end.flush()

    def restart_client(self) -> None:
        """A new process takes the client's place: it knows nothing, and what it sends begins anew."""
        self.cut()
        unmet = not self.server.stream.peer
        self.lives += 1
        self.client = End(accepts=False, limits=self.limits)
        self.connect()
        self.deliver(self.client, 1 << 30)
        assert self.server.stream.peer == self.client.stream.own
        self.server.got = []
        if not unmet:  # What was for the old process is not for the new one; what was for whoever comes first is.
            self.server.sent = []

    def settle(self) -> None:
        """From now on nothing is lost; everything arrives within a bounded time."""
        if not self.up:
            self.connect()
        self.client.full = self.server.full = False
        for _ in range(40):
            for _ in range(10):  # A frame that answers a frame that answers a frame: there is an end to it.
                self.deliver(self.client, 1 << 30)
                self.deliver(self.server, 1 << 30)
            assert not self.client.wire and not self.server.wire
            self.pass_time(0.3)

    def check(self) -> None:
        assert self.server.got == self.client.sent
        assert self.client.got == self.server.sent
        for end in (self.client, self.server):
            assert end.stream.unacknowledged == 0
            assert end.stream.next_s == float("inf"), "nothing is left to do"
            assert end.stream.broken is None


class Machine(RuleBasedStateMachine):
    """Any interleaving of sends, cuts, delays, duplicates, reorderings, restarts and refused messages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    @rule(from_client=st.booleans(), count=st.integers(1, 6))
    def send(self, from_client: bool, count: int) -> None:
        end = self.net.client if from_client else self.net.server
        for _ in range(count):
            end.send(self.net.now_s, f"{'c' if from_client else 's'}{self.net.lives}.")

    @rule(from_client=st.booleans(), count=st.integers(1, 10))
    def deliver(self, from_client: bool, count: int) -> None:
        if self.net.up:
            self.net.deliver(self.net.client if from_client else self.net.server, count)

    @rule(of_client=st.booleans(), full=st.booleans())
    def full(self, of_client: bool, full: bool) -> None:
        (self.net.client if of_client else self.net.server).full = full

    @rule()
    def cut(self) -> None:
        self.net.cut()

    @rule()
    def connect(self) -> None:
        if not self.net.up:
            self.net.connect()

    @rule(from_client=st.booleans(), at=st.integers(0, 50))
    def duplicate(self, from_client: bool, at: int) -> None:
        wire = (self.net.client if from_client else self.net.server).wire
        if wire:
            wire.append(wire[at % len(wire)])

    @rule(from_client=st.booleans(), at=st.integers(0, 50), to=st.integers(0, 50))
    def reorder(self, from_client: bool, at: int, to: int) -> None:
        wire = (self.net.client if from_client else self.net.server).wire
        if wire:
            moved = wire[at % len(wire)]
            del wire[at % len(wire)]
            wire.insert(to % (len(wire) + 1), moved)

    @rule(from_client=st.booleans(), at=st.integers(0, 50))
    def lose(self, from_client: bool, at: int) -> None:
        wire = (self.net.client if from_client else self.net.server).wire
        if wire:
            del wire[at % len(wire)]

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.06, 0.3, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.net.pass_time(seconds)

    @rule()
    def restart(self) -> None:
        self.net.restart_client()

    @invariant()
    def a_prefix_has_arrived(self) -> None:
        assert self.net.server.got == self.net.client.sent[: len(self.net.server.got)]
        assert self.net.client.got == self.net.server.sent[: len(self.net.client.got)]

    @invariant()
    def memory_is_bounded(self) -> None:
        for end in (self.net.client, self.net.server):
            assert end.stream.unacknowledged <= LIMITS.messages
            probes, incarnations = end.stream.remembered
            assert probes <= 16 and incarnations <= 8
            assert end.stream.emitted() == [], "nothing is held back"

    def teardown(self) -> None:
        self.net.settle()
        self.net.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=cases(150), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(30))
def test_long_histories_with_cuts_at_any_message(seed: int) -> None:
    rng, net = random.Random(seed), Network()
    for step in range(600):
        end = rng.choice([net.client, net.server])
        if end.stream.unacknowledged < 300:
            end.send(net.now_s, "x" if end is net.client else "y")
        if net.up:
            net.deliver(rng.choice([net.client, net.server]), rng.randrange(4))
        if rng.random() < 0.05:
            net.cut()
        if not net.up and rng.random() < 0.3:
            net.connect()
        net.pass_time(rng.choice([0.0, 0.02, 0.2]))
        if step % 100 == 99:
            net.settle()
            net.check()


@pytest.mark.parametrize("cut_at", range(30))
def test_a_cut_after_each_message_of_a_scripted_exchange(cut_at: int) -> None:
    """Ten requests, each answered: the connection breaks when so many frames have crossed, with one more on its way."""
    net, crossed = Network(), 0
    for number in range(10):
        net.client.send(net.now_s, f"request {number} ")
        while net.client.wire or net.server.wire:
            for end in (net.client, net.server):
                if end.wire:
                    crossed += 1
                    if crossed == cut_at:
                        net.cut()
                        net.connect()
                        break
                    asked = len(net.server.got)
                    net.deliver(end)
                    if len(net.server.got) > asked:
                        net.server.send(net.now_s, f"answer {number} ")
    net.settle()
    net.check()


def test_an_idle_connection_costs_nothing_and_an_acknowledgement_rides_on_the_answer() -> None:
    net = Network()
    for _ in range(100):
        net.client.send(net.now_s, "request ")
        net.deliver(net.client)
        net.server.send(net.now_s, "answer ")
        net.deliver(net.server)
        net.now_s += 0.01
        for end in (net.client, net.server):
            if end.stream.next_s <= net.now_s:
                end.stream.tick(net.now_s)
                end.flush()
        assert not net.client.wire and not net.server.wire, "one message each way and nothing else"
    net.pass_time(0.1)
    assert [len(end.wire) for end in (net.client, net.server)] == [1, 0], "the last answer is acknowledged at last"
    net.deliver(net.client)
    net.pass_time(100.0)
    assert not net.client.wire and not net.server.wire


def test_a_slow_peer_is_sent_nothing_twice() -> None:
    net = Network()
    for _ in range(20):
        net.client.send(net.now_s, "large ")
    for _ in range(100):  # Everything is still on its way, but nothing is lost.
        net.pass_time(0.5)
    assert net.client.stream.resent == 0
    probes = len(net.client.wire) - 20
    assert 40 <= probes <= 110, "small ones, at most one per second"
    net.settle()
    net.check()
    assert net.client.stream.resent == 0 and net.server.stream.duplicates == 0


def test_what_was_sent_before_the_peer_was_ever_there_arrives() -> None:
    net = Network()
    for _ in range(3):
        net.server.send(net.now_s, "early ")
    net.server.wire.clear()  # Nobody is connected.
    net.connect()
    net.settle()
    net.check()
    assert len(net.client.got) == 3


def test_a_new_process_gets_nothing_that_was_meant_for_the_old_one() -> None:
    net = Network()
    net.client.send(net.now_s, "old ")
    net.settle()
    late = net.client
    net.server.send(net.now_s, "for the old one ")
    net.restart_client()
    assert net.server.stream.unacknowledged == 0
    net.server.send(net.now_s, "for the new one ")
    net.client.send(net.now_s, "new ")
    late.send(net.now_s, "from beyond ")
    got = list(net.server.got)
    assert late.wire
    for frames in late.wire:
        net.server.take(frames, net.now_s)
    assert net.server.got == got
    net.settle()
    net.check()
    assert net.client.got == [b"for the new one 1"] or net.client.got == [b"for the new one 2"]


def test_a_server_that_was_started_again_ends_the_stream_of_its_clients() -> None:
    net = Network()
    net.client.send(net.now_s, "x")
    net.settle()
    net.cut()
    net.server = End(accepts=True)
    net.client.send(net.now_s, "x")
    net.client.wire.clear()
    net.connect()
    net.settle()
    assert net.client.stream.replaced and "was restarted" in str(net.client.stream.broken)
    assert net.server.got == [] and net.client.stream.unacknowledged == 0
    with pytest.raises(ChannelError, match="was restarted"):
        net.client.send(net.now_s, "x")


def test_an_answer_to_the_old_connection_does_not_end_the_new_one() -> None:
    """A server is started again; its client's old connection reconnects by itself while a new one is being made.

    The new process makes no stream for the old connection's probe, and both connections have one identity: its answer
    can reach the new one.
    """
    net = Network()
    net.client.send(net.now_s, "x")
    net.settle()
    old, new, server = net.client.stream, Stream(LIMITS, accepts=False), Stream(LIMITS, accepts=True)
    old.connected(net.now_s)
    for frames in old.emitted():
        nobodys = Stream(LIMITS, accepts=True)
        assert nobodys.receive(frames, net.now_s) is None and not nobodys.peer
        for answer in nobodys.emitted():
            assert new.receive(answer, net.now_s) is None
            assert old.receive(answer, net.now_s) is None
    assert old.replaced, "the answer was for it"
    new.send([b"push", b"payload"], net.now_s)
    got = [server.receive(frames, net.now_s) for frames in new.emitted()]
    assert [[bytes(part) for part in message] for message in got if message] == [[b"push", b"payload"]]
    server.ask(net.now_s)
    for frames in server.emitted():
        new.receive(frames, net.now_s)
    assert not new.replaced and new.broken is None and new.acknowledged == 1


@pytest.mark.parametrize("accepts", [False, True])
def test_a_stream_that_cannot_keep_more_ends_with_a_reason_on_both_sides(accepts: bool) -> None:
    net = Network(TINY)
    net.client.send(0.0, "x")
    net.settle()
    end = net.server if accepts else net.client
    net.cut()
    with pytest.raises(ChannelError, match="are not acknowledged"):
        for _ in range(10):
            end.send(net.now_s, "x")
    assert end.stream.unacknowledged == 0
    end.wire.clear()
    net.connect()
    net.settle()
    assert "has abandoned this stream" in str(net.other(end).stream.broken)


def test_a_side_that_says_good_bye_is_not_waited_for() -> None:
    net = Network()
    net.server.send(0.0, "x")
    net.client.stream.bye()
    net.client.flush()
    net.deliver(net.client)
    assert net.server.stream.ended and net.server.stream.unacknowledged == 0
    assert net.server.stream.next_s == float("inf")


def test_a_note_is_delivered_once_or_never_and_kept_by_nobody() -> None:
    net = Network()
    net.client.stream.note([b"beat", b"payload"])
    assert net.client.stream.unacknowledged == 0
    net.client.flush()
    net.deliver(net.client)
    assert net.server.got == [b"beat"]


@settings(max_examples=cases(500), deadline=None)
@given(st.lists(st.binary(max_size=2 * ENVELOPE_BYTES), max_size=3))
def test_junk_is_refused_and_changes_nothing(frames: list[bytes]) -> None:
    net = Network()
    net.client.send(0.0, "x")
    net.settle()
    before = vars(net.server.stream).copy()
    with pytest.raises(ChannelError):
        net.server.stream.receive(frames, 0.0)
    assert vars(net.server.stream) == before


@settings(max_examples=cases(500), deadline=None)
@given(st.data())
def test_damaged_envelopes_never_raise_anything_else(data: Any) -> None:
    net = Network()
    net.client.send(0.0, "x")
    net.server.send(0.0, "y")
    frame = bytearray(net.client.wire[0][0])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        net.server.stream.receive([bytes(frame), b"payload"], 0.0)
    except ChannelError:
        pass


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    one, two = Stream(LIMITS, accepts=False), Stream(LIMITS, accepts=True)
    for _ in range(3):
        two.send([b"x"], 0.0)
    for frames in two.emitted():
        one.receive(frames, 0.0)
    one.acknowledge()
    (ack,) = one.emitted()
    other = Stream(LIMITS, accepts=True, own=two.own)
    with pytest.raises(ChannelError, match="at most 0"):
        other.receive(ack, 0.0)
    assert Kind.ACK == 3
