"""Commits inside a step of micro-batches: each is made once, behind the step, in the order of the other ranks.

Also what the state continues from when hosts were added or removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch import elastic as horovod_elastic
from horovod.torch.elastic import sampler

from star_hvd import elastic
from star_hvd.channel.keys import own_address
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.input.program_waits import ProgramWaits
from star_hvd.loader import ShardLoader
from star_hvd.runtime import runtime


class Running:
    """The part of a runtime that knows where in a step the loop is."""

    end_step_of_parts = runtime.Runtime.end_step_of_parts

    def __init__(self) -> None:
        self.drivers: dict[int, Any] = {}
        self.inside_step = False
        self.behind_step: Any = None
        self.noted: list[str] = []
        self.loops = SimpleNamespace(note_collective=self.noted.append)
        self.program_waits = ProgramWaits(lambda message, *, urgent=True: None)

    def inactive(self, reason: str, *, out_of_data: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    made = Running()
    monkeypatch.setattr(runtime, "current", lambda: made)
    return made


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Horovod's state was asked for."""
    found: list[str] = []
    monkeypatch.setattr(ObjectState, "save", lambda self: found.append("save"))
    monkeypatch.setattr(horovod_elastic.TorchState, "check_host_updates", lambda self: found.append("check"))
    return found


def _state() -> elastic.TorchState:
    return elastic.TorchState()


def test_outside_a_step_a_commit_is_made_at_once(running: Running, done: list[str]) -> None:
    _state().commit()
    assert done == ["save", "check"] and running.behind_step is None


@pytest.mark.parametrize("trains", [False, True])
def test_a_commit_counts_as_a_collective_of_the_programs_loop(
    running: Running, done: list[str], trains: bool
) -> None:
    """Under `auto` ranks with different numbers of iterations would wait for each other in one of them."""
    running.drivers = {0: None} if trains else {}
    state = _state()
    state.commit()
    state.check_host_updates()
    assert done == ["save", "check", "check"]
    assert running.noted == ["elastic.TorchState.commit or check_host_updates"] * (2 * trains)


def test_inside_a_step_it_is_made_behind_it_and_once(running: Running, done: list[str]) -> None:
    state = _state()
    running.inside_step = True
    state.check_host_updates()
    state.commit()
    state.check_host_updates()  # Part of the commit.
    assert done == []
    running.inside_step = False
    running.end_step_of_parts()
    running.end_step_of_parts()
    assert done == ["save", "check"]


def test_that_of_a_step_that_was_left_comes_before_the_next(running: Running, done: list[str]) -> None:
    state = _state()
    running.inside_step = True
    state.commit()
    running.inside_step = False  # The loop has ended early; the other ranks wait in their first commit.
    state.commit()
    assert done == ["save", "check"] * 2 and running.behind_step is None


@pytest.mark.parametrize("only_removed", [False, True])
def test_after_a_change_of_hosts_attributes_continue_where_the_parameters_do(
    monkeypatch: pytest.MonkeyPatch, only_removed: bool
) -> None:
    """The parameters stay; attributes of the last commit would have batches trained twice."""

    def changed(self: Any) -> None:
        raise HostsUpdatedInterrupt(only_removed)

    monkeypatch.setattr(runtime, "current", lambda: None)
    monkeypatch.setattr(horovod_elastic.TorchState, "check_host_updates", changed)
    state = elastic.TorchState(batch=10)
    state.batch = 15
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.check_host_updates()
    assert not interrupt.value.skip_sync, "ranks may be at different steps"
    horovod_elastic.TorchState.restore(state)  # What `sync` would broadcast.
    assert state.batch == 15


class Behind(torch.optim.SGD):
    """An optimizer whose `state_dict` brings its rank to the newest step, as in modes whose state is elsewhere."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__([weight], lr=0.1)
        self.weight, self.newest = weight, 0

    def state_dict(self) -> dict[str, Any]:
        with torch.no_grad():
            self.weight.fill_(self.newest)
        self.state[self.weight]["step"] = torch.tensor(float(self.newest))
        return super().state_dict()


def test_a_commit_holds_a_model_and_an_optimizer_of_one_step() -> None:
    """Horovod saves the model first."""
    net = torch.nn.Linear(1, 1, bias=False)
    optimizer = Behind(net.weight)
    state = elastic.TorchState(model=net, optimizer=optimizer)
    optimizer.newest = 7  # Others have made steps meanwhile.
    state.save()
    with torch.no_grad():
        net.weight.fill_(9.0)
    horovod_elastic.TorchState.restore(state)
    assert net.weight.item() == optimizer.state[net.weight]["step"].item() == 7.0


def test_a_commit_saves_what_the_samples_are_counted_by_last(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    monkeypatch.setattr(sampler, "size", lambda: 1)
    monkeypatch.setattr(sampler, "rank", lambda: 0)
    net = torch.nn.Linear(1, 1)
    samples = elastic.ElasticSampler([0])
    state = elastic.TorchState(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), samples=samples, batch=1)
    for kind in (torch.nn.Linear, torch.optim.SGD, elastic.ElasticSampler):
        monkeypatch.setattr(kind, "state_dict", lambda self: saved.append(type(self).__name__))
    state.save()
    assert saved == ["SGD", "Linear", "ElasticSampler"]


@pytest.mark.parametrize("error", [None, RankLostError("rank 1 has left"), HorovodInternalError("gone")])
def test_after_a_change_of_hosts_the_optimizer_continues_where_the_parameters_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Servers hold its state until their world ends; the rank's own is of when it was last asked for."""
    asked: list[str] = []

    def refresh_state() -> None:
        asked.append("state")
        if error is not None:
            raise error

    def changed(self: Any) -> None:
        raise HostsUpdatedInterrupt(False)

    monkeypatch.setattr(runtime, "current", lambda: None)
    monkeypatch.setattr(horovod_elastic.TorchState, "check_host_updates", changed)
    monkeypatch.setattr(ObjectState, "save", lambda self: asked.append("attributes"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    wrapped = SimpleNamespace(_star=SimpleNamespace(refresh_state=refresh_state))
    vars(optimizer)["_star_wrapped"] = lambda: wrapped
    with pytest.raises(HostsUpdatedInterrupt):
        elastic.TorchState(optimizer=optimizer).check_host_updates()
    assert asked == ["state", "attributes"]


class Asked(ShardLoader):
    """A loader whose state another rank knows, which may be lost."""

    def __init__(self) -> None:
        self.consumed, self.lost = 0, False

    def state_dict(self) -> dict[str, Any]:
        if self.lost:
            raise RankLostError("rank 1 has left")
        return {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.consumed = state["consumed"]


class Job:
    """The state of an elastic job with a loader; after `steps` all its parts have that number.

    Args:
        monkeypatch: Of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runtime, "current", lambda: None)
        self.net, self.loader = torch.nn.Linear(1, 1, bias=False), Asked()
        self.optimizer = Behind(self.net.weight)
        self.state = elastic.TorchState(model=self.net, optimizer=self.optimizer, loader=self.loader, batch=0)

    def steps(self, count: int) -> None:
        self.optimizer.newest = self.loader.consumed = self.state.batch = count

    def restored(self) -> tuple[float, float, int, int]:
        """Return the steps of model, optimizer, loader and attributes after a failure."""
        self.loader.lost = False
        horovod_elastic.TorchState.restore(self.state)
        step = self.optimizer.state[self.net.weight]["step"].item()
        return self.net.weight.item(), step, self.loader.consumed, self.state.batch


def test_a_commit_that_fails_halfway_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of the new one with the samples of the old would have samples trained twice."""
    job = Job(monkeypatch)
    job.steps(3)
    job.state.save()
    job.steps(7)
    job.loader.lost = True
    with pytest.raises(RankLostError):
        job.state.save()
    assert job.restored() == (3, 3, 3, 3)


def _interrupted(monkeypatch: pytest.MonkeyPatch, state: elastic.TorchState, error: type[Exception]) -> None:
    """Hosts are changed; `error` comes of it."""

    def changed(self: Any) -> None:
        raise HostsUpdatedInterrupt(False)

    monkeypatch.setattr(horovod_elastic.TorchState, "check_host_updates", changed)
    with pytest.raises(error):
        state.check_host_updates()


@pytest.mark.parametrize(("lost", "steps"), [(False, 7), (True, 3)])
def test_after_a_change_of_hosts_a_failure_takes_all_parts_back_to_one_step(
    monkeypatch: pytest.MonkeyPatch, lost: bool, steps: int
) -> None:
    """Before the first commit of the new world: parameters of the last commit would lack the samples since."""
    job = Job(monkeypatch)
    job.steps(3)
    job.state.save()
    job.steps(7)
    job.loader.lost = lost  # The interrupt is a failure then.
    _interrupted(monkeypatch, job.state, RankLostError if lost else HostsUpdatedInterrupt)
    assert job.restored() == (steps, steps, steps, steps)


def test_a_state_that_cannot_be_fetched_at_a_change_of_hosts_is_that_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    job.steps(3)
    job.state.save()
    job.steps(7)
    known = torch.optim.SGD.state_dict
    job.optimizer.state_dict()  # This rank has made the steps.

    def lost(*given: Any) -> None:
        raise RankLostError("rank 1 has left")

    local = SimpleNamespace(refresh_state=lost, local_state=lambda: known(job.optimizer))
    vars(job.optimizer).update(_star=local, _star_wrapped=lambda: job.optimizer, state_dict=lost)
    _interrupted(monkeypatch, job.state, HostsUpdatedInterrupt)
    assert job.restored() == (7, 7, 7, 7)


# ---- what ends the job, and what only a world ---------------------------------------------------------------------


def _run_once(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], object]) -> None:
    """Train as an elastic job does in one world."""
    monkeypatch.setattr(horovod_elastic, "run", lambda decorated: decorated)
    elastic.run(function)(SimpleNamespace(register_reset_callbacks=lambda callbacks: None))


@pytest.mark.parametrize("kind", [ChannelError, DeadlineError])
def test_a_failure_of_the_channel_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch, kind: type[StarError]) -> None:
    def fails(state: Any) -> None:
        raise kind("rank 1 is unreachable")

    with pytest.raises(RankLostError, match=f"{kind.__name__}: rank 1 is unreachable"):
        _run_once(monkeypatch, fails)


@pytest.mark.parametrize(("name", "value"), [("STAR_HOST", "198.51.100.1"), ("STAR_INTERFACE", "nosuch0")])
def test_a_wrong_address_in_the_settings_is_no_lost_rank(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Horovod would form one world after the other with the same settings."""
    monkeypatch.delenv("STAR_HOST", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(StarError, match=rf"{name} is {value}|'{value}' has no IPv4 address"):
        _run_once(monkeypatch, lambda state: own_address(single_host=False))
