"""Optimizers that were dropped: what the coordinator makes of it, and that nothing of the job keeps them alive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages.base import Arrive, Away, CloseStep, OptimizerDropped, OptimizerOver
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import ChannelError
from star_hvd.wrapper.dropped import note_dropped, release_dropped
from tests.support.job_states import Job, only
from tests.support.world import World


def dropped(step: int = 4, *, begun: bool = False, in_flight: bool = False) -> OptimizerDropped:
    return OptimizerDropped(0, step, begun, in_flight)


def job(world_size: int = 2) -> Job:
    made = Job(world_size)
    made.register(Plan.sync(world_size))
    for rank in range(world_size):
        made.arrive(rank, 3)
    made.sent()
    return made


def test_it_is_over_when_all_ranks_have_dropped_it() -> None:
    subject = job()
    assert only(subject.say(0, dropped()), OptimizerOver) == []
    assert only(subject.say(1, dropped()), OptimizerOver) == [OptimizerOver(0)]
    assert subject.state.optimizers == {}
    subject.say(0, Arrive(0, 9, 0, StepTimes(0.1), 0.0))  # What was on its way says nothing any more.
    assert subject.state.optimizers == {}


def test_a_rank_that_waits_in_a_step_is_helped_out() -> None:
    subject = job()
    subject.say(1, dropped())
    subject.arrive(0, 4)
    assert [each.step for each in only(subject.tick(), CloseStep)] == [4]


@pytest.mark.parametrize("back", [Away(False, False, "allreduce"), Away(False, False, "epoch")])
def test_a_rank_never_comes_back_to_it(back: Away) -> None:
    subject = job()
    subject.say(1, dropped())
    subject.say(1, Away(True, True, back.reason))
    subject.say(1, back)
    subject.arrive(0, 4)
    assert [each.step for each in only(subject.tick(), CloseStep)] == [4]


def test_a_step_that_some_ranks_have_begun_is_ended_first() -> None:
    subject = job()
    subject.say(0, dropped(4, begun=True))
    heard = subject.say(1, dropped(4))
    assert [each.step for each in only(heard, CloseStep)] == [4] and not only(heard, OptimizerOver)
    assert not only(subject.say(0, dropped(5, in_flight=True)), OptimizerOver)
    assert not only(subject.say(1, dropped(5, in_flight=True)), OptimizerOver)
    assert not only(subject.say(1, dropped(5)), OptimizerOver), "rank 0's part of it is still in flight"
    assert only(subject.say(0, dropped(5)), OptimizerOver) == [OptimizerOver(0)]


def test_ranks_at_different_steps_come_to_the_same_one() -> None:
    subject = job()
    subject.say(0, dropped(6))
    heard = subject.say(1, dropped(4))
    assert [each.step for each in only(heard, CloseStep)] == [5]
    assert only(subject.say(1, dropped(6)), OptimizerOver) == [OptimizerOver(0)]


def test_servers_have_no_steps_in_common() -> None:
    subject = job()
    subject.say(0, dropped(-1))
    assert only(subject.say(1, dropped(-1)), OptimizerOver) == [OptimizerOver(0)]


@pytest.mark.parametrize("step", [-2, 1 << 40])
def test_a_step_that_cannot_be_is_refused(step: int) -> None:
    with pytest.raises(ChannelError, match="dropped message is of step"):
        job().say(0, dropped(step))


class _Core:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_what_was_dropped_is_released_once() -> None:
    core = _Core()
    note_dropped(core)
    release_dropped()
    release_dropped()
    assert core.released == 1


class Dropping(World):
    """Some ranks drop their optimizer at a random place, in the middle of a step for example."""

    droppers: tuple[int, ...] = (0,)

    def _train(self, rank: int) -> Iterator[None]:
        program = super()._train(rank)
        if rank not in self.droppers:
            yield from program
            return
        for _ in range(self.random.randrange(40)):
            if next(program, "end") == "end":
                return
            yield
        self.engines[rank].drop()
        self.inbox.append(("leave", rank, ()))

    def _settle(self) -> None:
        for engine in self.staying:
            for _ in self._catch_up(engine):
                pass

    @property
    def staying(self) -> list[StepEngine]:
        return [engine for rank, engine in enumerate(self.engines) if rank not in self.droppers]


@pytest.mark.parametrize("quorum", [None, 2])
@pytest.mark.parametrize("droppers", [(0,), (1, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_the_others_train_on(seed: int, droppers: tuple[int, ...], quorum: int | None) -> None:
    plans = [Plan.partial(3, quorum).replace(plan_id=1)] if quorum else []
    world = Dropping(seed, steps=6, plans=plans, manual_share=0.2 if seed % 2 else 0.0)
    world.droppers = droppers
    world.run()
    for rank, engine in enumerate(world.engines):
        assert engine.failure is None
        assert rank in droppers or engine.own.steps == world.lengths[rank]
    first, *others = [[p.detach() for b in e.applier.buckets for p in b.params] for e in world.staying]
    for params in others:
        assert all(torch.equal(a, b) for a, b in zip(first, params, strict=True))
