"""The sample of a step: what belongs to it, when it ends, and that nothing is noted between samples."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from star_hvd.engine.collective import poll_for
from star_hvd.telemetry.step_timeline import EVERY, StepSample, StepTimeline, TimedClient, TimedCollective, exposure

FIRST = 8


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Wire:
    """A collective whose reductions end when the test says so."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.ended: set[int] = set()

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        self.sent.append(name)
        return len(self.sent)

    def hurry(self) -> None:
        pass

    def poll(self, handle: int) -> bool:
        return handle in self.ended

    def wait(self, handle: int, longest_s: float) -> bool:
        return poll_for(self, handle, longest_s)

    def finish(self, handle: int) -> None:
        assert handle in self.ended


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> StepTimeline:
    return StepTimeline(clock)


def only(timeline: StepTimeline) -> StepSample:
    assert len(timeline.latest) == 1
    return timeline.latest[0]


def test_a_step_of_sync(clock: Clock, timeline: StepTimeline) -> None:
    wire = Wire()
    collective = TimedCollective(wire, timeline)
    got: list[StepSample] = []
    timeline.on_sample = got.append
    timeline.start(FIRST, "sync")
    for index in range(2):
        clock.now_s += 1.0
        timeline.ready(index)
        clock.now_s += 0.25
        collective.submit(f"star.0.b{index}", torch.zeros(10))
    wire.ended = {1}
    clock.now_s += 0.5
    timeline.look()
    began_s = clock.now_s
    clock.now_s += 2.0
    wire.ended = {1, 2}
    assert collective.poll(2)
    timeline.waited(1, began_s)
    clock.now_s += 1.0
    timeline.start(FIRST + 1, "sync")
    sample = only(timeline)
    assert got == [sample] and not timeline.sampling
    assert (sample.step, sample.mode, sample.steps) == (FIRST, "sync", 1)
    assert sample.interval_s == pytest.approx(6.0) and sample.exposed_s == pytest.approx(2.0)
    assert sample.share == pytest.approx(1 / 3)
    first, second = sample.buckets
    assert (first.index, first.bytes, first.waited_s) == (0, 40, 0.0)
    assert [first.ready_s, first.submitted_s, first.arrived_s] == pytest.approx([1.0, 1.25, 3.0])
    assert [second.ready_s, second.submitted_s, second.arrived_s] == pytest.approx([2.25, 2.5, 5.0])
    assert second.waited_s == pytest.approx(2.0)
    assert sample.as_record()["buckets"][1] == [1, 40, 2250000, 2500000, 5000000, 2000000]


def test_between_samples_nothing_is_noted(clock: Clock, timeline: StepTimeline) -> None:
    wire = Wire()
    collective = TimedCollective(wire, timeline)
    for step in range(FIRST):
        timeline.start(step, "sync")
        timeline.ready(0)
        collective.submit("star.0.b0", torch.zeros(1))
        timeline.waited(0, clock.now_s)
        assert not timeline.sampling and not timeline.due(step)
    assert not timeline.latest and wire.sent == ["star.0.b0"] * FIRST


def test_the_same_steps_are_sampled_on_all_ranks(clock: Clock, timeline: StepTimeline) -> None:
    for step in range(3 * EVERY):
        timeline.start(step, "sync")
        clock.now_s += 1.0
    assert [sample.step for sample in timeline.latest] == [FIRST, FIRST + EVERY, FIRST + 2 * EVERY]


def test_with_overlap_a_sample_ends_in_the_next_step(clock: Clock, timeline: StepTimeline) -> None:
    """What is held back leaves in the next step; waits count where they are, and for the bucket that they are for."""
    wire = Wire()
    collective = TimedCollective(wire, timeline)
    timeline.start(FIRST, "sync", "overlap")
    collective.submit("star.0.b1", torch.zeros(10))  # Of the step before, held back until now.
    wire.ended.add(1)
    clock.now_s += 1.0
    assert collective.poll(1)
    timeline.waited(1, clock.now_s - 1.0)
    for index in (1, 0):
        timeline.ready(index)
    clock.now_s += 1.0
    collective.submit("star.0.b0", torch.zeros(1))
    timeline.start(FIRST + 1, "sync", "overlap")
    assert timeline.sampling
    clock.now_s += 1.0
    collective.submit("star.0.b1", torch.zeros(10))
    began_s = clock.now_s
    clock.now_s += 4.0
    wire.ended |= {2, 3}
    timeline.look()
    timeline.waited(1, began_s)
    timeline.ready(0)  # Of the next step.
    collective.submit("star.0.b0", torch.zeros(1))
    timeline.start(FIRST + 2, "sync", "overlap")
    sample = only(timeline)
    assert sample.interval_s == pytest.approx(2.0) and sample.exposed_s == pytest.approx(1.0)
    assert [(b.index, b.bytes) for b in sample.buckets] == [(0, 4), (1, 40)]
    assert [b.submitted_s for b in sample.buckets] == pytest.approx([2.0, 3.0])
    assert [b.arrived_s for b in sample.buckets] == pytest.approx([7.0, 7.0])
    assert [b.waited_s for b in sample.buckets] == pytest.approx([0.0, 4.0])


def test_a_sample_of_local_ends_with_an_averaging(clock: Clock, timeline: StepTimeline) -> None:
    wire = Wire()
    collective = TimedCollective(wire, timeline)
    for step in range(5):
        timeline.start(FIRST + step // 4, "local(4)", whole=step % 4 == 0)
        assert timeline.sampling == (step < 4)
        clock.now_s += 1.0
        if step == 3:
            for name in ("a0", "m0.exp_avg"):
                collective.submit(f"star.0.{name}", torch.zeros(10))
            wire.ended = {1, 2}
            clock.now_s += 1.0
            timeline.look()
            timeline.waited(0, clock.now_s - 1.0)
    sample = only(timeline)
    assert (sample.steps, sample.interval_s) == (4, pytest.approx(5.0))
    assert [(b.index, b.bytes) for b in sample.buckets] == [(0, 80)] and sample.share == pytest.approx(0.2)


def test_a_reduction_that_another_thread_collects(timeline: StepTimeline) -> None:
    class Collected(Wire):
        def poll(self, handle: int) -> bool:
            raise ValueError("Handle was not created or has been cleared.")

    collective = TimedCollective(Collected(), timeline)
    timeline.start(FIRST, "partial(3)")
    collective.submit("star.0.b0", torch.zeros(1))
    timeline.look()
    timeline.start(FIRST + 1, "partial(3)")
    timeline.start(FIRST + 2, "partial(3)")
    assert only(timeline).buckets[0].arrived_s is None


def test_pushes_within_backward_and_parameters_behind_compute(timeline: StepTimeline) -> None:
    class Client:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def give(self, step: int, index: int, flat: torch.Tensor, small: dict[int, bytes]) -> None:
            assert not small or index == 2
            self.calls.append(f"give {index}")

        def push(self, *, flats: list[torch.Tensor], step: int) -> None:
            self.calls.append(f"push {step}")

        def wait_bucket(self, index: int, deadline_s: float) -> None:
            self.calls.append(f"wait {index}")

        def finish(self, deadline_s: float) -> int:
            return 7

        def ranges(self, index: int) -> list[tuple[int, int, int]]:
            return [(2 * index, 0, 2), (2 * index + 1, 2, 3)]

    inner = Client()
    timeline = StepTimeline()
    client = TimedClient(inner, timeline)
    timeline.start(FIRST, "ps(2)", "background")
    client.give(1, 1, torch.zeros(3))
    client.give(1, 2, torch.zeros(3), small={4: b"abc", 5: b"de"})
    client.push(flats=[torch.zeros(2), torch.zeros(3), torch.zeros(3)], step=1)
    timeline.start(FIRST + 1, "ps(2)", "background")
    for index in (0, 1, 2):
        client.wait_bucket(index, 1.0)
    assert client.finish(1.0) == 7
    timeline.start(FIRST + 2, "ps(2)", "background")
    assert inner.calls == ["give 1", "give 2", "push 1", "wait 0", "wait 1", "wait 2"]
    buckets = {b.index: b for b in only(timeline).buckets}
    assert {index: b.bytes for index, b in buckets.items()} == {0: 8, 1: 12, 2: 5}
    assert all(b.arrived_s is not None and b.arrived_s >= (b.submitted_s or 0.0) for b in buckets.values())


def test_compressed_pushes_count_with_what_is_sent_of_each_chunk(timeline: StepTimeline) -> None:
    """Of every bucket one chunk is compressed and one is not; the first bucket is sent ahead, the last is unchanged."""

    class Client:
        def ranges(self, index: int) -> list[tuple[int, int, int]]:
            return [(2 * index, 0, 6), (2 * index + 1, 6, 10)]

        def give(self, step: int, index: int, flat: torch.Tensor, small: dict[int, bytes]) -> None: ...

        def push(self, *, flats: list[torch.Tensor], small: dict[int, bytes]) -> None: ...

        def wait(self, deadline_s: float, *, whole: bool) -> SimpleNamespace:
            return SimpleNamespace(kind="params", params=[None] * 3)

    client = TimedClient(Client(), timeline)
    timeline.start(FIRST, "ps(2)")
    flat = torch.zeros(10)
    client.give(1, 0, flat, small={0: b"abc"})
    client.push(flats=[flat] * 3, small={0: b"abc", 3: b"d"})
    client.wait(1.0)
    timeline.start(FIRST + 1, "ps(2)")
    timeline.start(FIRST + 2, "ps(2)")
    assert {b.index: b.bytes for b in only(timeline).buckets} == {0: 3 + 4 * 4, 1: 6 * 4 + 1, 2: 10 * 4}


def test_exposed_is_never_negative_nor_more_than_the_step(clock: Clock) -> None:
    random.seed(3)
    for _ in range(200):
        timeline = StepTimeline(clock)
        timeline.start(FIRST, "sync", "overlap")
        for step in (1, 2, 3):
            for _ in range(random.randrange(12)):
                began_s = clock.now_s
                clock.now_s += random.random()
                index = random.randrange(3)
                kind = random.randrange(4)
                if kind == 0:
                    timeline.ready(index)
                elif kind == 1:
                    timeline.submitted(index, 5)
                elif kind == 2:
                    timeline.arrived(index)
                else:
                    timeline.waited(index, began_s)
            timeline.start(FIRST + step, "sync", "overlap")
        sample = only(timeline)
        assert 0.0 <= sample.exposed_s <= sample.interval_s + 1e-9
        for bucket in sample.buckets:
            times = [t for t in (bucket.ready_s, bucket.submitted_s, bucket.arrived_s) if t is not None]
            assert times == sorted(times) and bucket.waited_s >= 0.0


def sampled(mode: str, means: str, exposed_s: float) -> StepSample:
    return StepSample(FIRST, mode, means, 0.0, interval_s=0.4, steps=4, exposed_s=exposed_s)


@pytest.mark.parametrize(
    ("mode", "means", "exposed_s", "comm_s", "text"),
    [
        ("sync", "", 0.2, 0.02, "20 % of a step of 100 ms is exposed communication, which overlap='auto' may hide"),
        ("sync", "overlap", 0.02, math.nan, "5 % of a step of 100 ms is exposed communication, the rest goes on beside "
         "backward and the next forward pass (overlap)"),
        ("local(4)", "", 0.1, math.nan, "25 % of a step of 100 ms is exposed communication, which "
         "Config(background=True) may hide"),
        ("ps(2)", "background", 0.0, math.nan, "0 % of a step of 100 ms is exposed communication, the rest goes on "
         "behind compute (background)"),
        ("sync", "", 0.004, math.nan, "1 % of a step of 100 ms is exposed communication, which is left as it is"),
    ],
)  # fmt: skip
def test_the_sentence(mode: str, means: str, exposed_s: float, comm_s: float, text: str) -> None:
    """Of what a rank waits, what is for slower ranks is no communication."""
    assert exposure([sampled("partial(3)", "", 0.4), sampled(mode, means, exposed_s)], mode, comm_s) == text


def test_no_advice_to_do_what_is_done_or_impossible() -> None:
    text = exposure([sampled("sync", "", 0.2)], "sync", math.nan, advise_overlap=False)
    assert text == "50 % of a step of 100 ms is exposed communication, which is left as it is"


def test_no_sentence_without_a_sample_of_the_mode() -> None:
    assert exposure([sampled("sync", "", 0.1)], "local(4)", math.nan) == ""


def test_a_wait_within_another_is_exposed_once(clock: Clock) -> None:
    timeline = StepTimeline(clock)
    timeline.start(FIRST, "ps(3)", "background")
    began_s = clock.now_s
    for bucket in (0, 1):
        clock.now_s += 1.0
        timeline.waited(bucket, clock.now_s - 1.0)
    clock.now_s += 1.0
    timeline.waited(-1, began_s)
    timeline.start(FIRST + 1, "ps(3)", "background")
    timeline.start(FIRST + 2, "ps(3)", "background")
    assert only(timeline).exposed_s == pytest.approx(3.0)
