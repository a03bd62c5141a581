"""What every rank runs to test plans that change while training threads are elsewhere: in a long step, in a collective
of the user's. See `modes.py` for the rest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.engine.records import Snapshot
from star_hvd.engine.state_source import StateSource
from star_hvd.runtime import runtime
from tests.multiproc.modes import CONFIG, OwnSGD, deadline, finish, publish, within
from tests.multiproc.scenarios import Facts, batch, compute, model, run_each
from tests.support.inside import driver_of
from tests.support.signals import PATIENCE_S

SERVED = ("ps(1)", "grouped(2)", "ps(2)", "grouped(2)", "ps(3)", "sync", "ps(1)")
"""Every one but the last but one hands over to other servers."""
LONG_STEP_S = 6.0  # At most; less where all have passed before.


class Job:
    """One optimizer, and steps on it."""

    def __init__(self, base: type[torch.optim.SGD] | None, mode: str = "sync") -> None:
        self.net, self.rank, self._number = model(), int(hvd.rank()), 0
        params = self.net.parameters()
        inner = base(params, lr=0.01, momentum=0.9) if base is not None else torch.optim.Adam(params, lr=0.001)
        named = self.net.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, mode=mode, config=CONFIG)
        hvd.barrier()  # Plans that tests publish go to all ranks at once.

    def step(self, seconds: float = 0.004, hold: Callable[[], Any] = lambda: None) -> None:
        self.optimizer.zero_grad()
        compute(self.net, batch(self._number), seconds)
        hold()
        self.optimizer.step()
        self._number += 1

    @property
    def in_force(self) -> str:
        """As the engine knows it; the training thread may not have come to it yet."""
        return str(driver_of(self.optimizer).engine.plan.label)

    def step_until(self, mode: str) -> None:
        began_s = time.monotonic()
        while within(began_s):
            publish(self.optimizer, mode)
            self.step()
            if self.optimizer.mode == mode:
                return
        raise AssertionError(f"rank {self.rank} is in {self.optimizer.mode}; {mode} did not come")

    def finish(self, **more: Any) -> Facts:
        return finish(self.net, self.optimizer) | more


def long_step(rank: int) -> Facts:
    """Modes of servers come and go while one rank, maybe one that runs a server, is inside a single step."""
    job = Job(torch.optim.SGD)
    job.step_until(SERVED[0])
    engine, passed = driver_of(job.optimizer).engine, [job.in_force]
    first = engine.plan.plan_id
    hvd.barrier()

    def walk() -> None:
        """Have all plans published, one after the other, whatever this rank's training thread does."""
        limit_s, plan_id = time.monotonic() + PATIENCE_S, first
        while time.monotonic() < limit_s and len(passed) < len(SERVED):
            publish(job.optimizer, SERVED[len(passed)])
            time.sleep(0.01)
            if engine.plan.plan_id != plan_id:
                plan_id = engine.plan.plan_id
                passed.append(job.in_force)

    walker = threading.Thread(target=walk)
    walker.start()
    if job.rank == rank:
        job.step(hold=lambda: walker.join(LONG_STEP_S))
    while walker.is_alive():
        job.step()
    hvd.barrier()
    for _ in range(20):
        job.step()
    return job.finish(passed=passed)


def await_coordinator(optimizer: Any) -> None:
    """Wait until the coordinator, on rank 0, has heard from all ranks that the plan is in force: it takes the next."""
    run, began_s, switching = runtime.current(), time.monotonic(), True
    while run is not None and run.coordinator is not None and switching:
        assert within(began_s), "the coordinator has not heard of the plan"
        time.sleep(0.002)
        with run.coordinator.job_state() as job:
            switching = job.optimizers[driver_of(optimizer).number].switching


def met(base: type[torch.optim.SGD]) -> Facts:
    """Who has the state of a subgroup waits in the user's own collective, for a rank that joins the next subgroup."""
    job, joins = Job(base), "subgroup(1,2)"
    job.step_until("subgroup(0,2,3)")
    for _ in range(5):
        job.step()
    hvd.barrier()
    await_coordinator(job.optimizer)
    publish(job.optimizer, joins)
    if job.rank in (1, 3):
        began_s = time.monotonic()
        while job.optimizer.mode != joins and within(began_s):
            job.step()
    began_s = time.monotonic()
    hvd.broadcast(torch.zeros(1), 0)
    waited_s = time.monotonic() - began_s
    for _ in range(20):
        job.step()
    return job.finish(mode=job.optimizer.mode, waited_s=waited_s)


def averaged(base: type[torch.optim.SGD] | None) -> Facts:
    """Local steps and many of `sync` pass while a rank, which came from servers, is in a collective of the user's."""
    job, away = Job(base), 2
    job.step_until("grouped(2)")
    for _ in range(5):
        job.step()
    hvd.barrier()
    if job.rank != away:
        job.step_until("local(3)")
        for _ in range(4):
            job.step()
        job.step_until("sync")
        for _ in range(20):
            job.step()
    hvd.broadcast(torch.zeros(1), 0)
    for _ in range(20):
        job.step()
    return job.finish(mode=job.optimizer.mode)


class SlowLink:
    """A source of state behind a slow link."""

    def __init__(self, source: StateSource) -> None:
        self._source = source

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        time.sleep(0.4)
        return self._source.snapshot(min_step, deadline_s)


def excluded(mode: str) -> Facts:
    """A late rank is fetching the state, since nobody can replay its optimizer, when a plan without it comes."""
    job = Job(OwnSGD)
    job.step_until("partial(3)")
    switcher, late = driver_of(job.optimizer).switcher, job.rank == 3
    if late:
        switcher.ranks = SlowLink(switcher.ranks)
    began_s = time.monotonic()
    while within(began_s):  # Servers take seconds to start.
        publish(job.optimizer, mode)
        job.step(0.03 if late else 0.01)
        if job.optimizer.mode == mode:
            break
    for _ in range(20):
        job.step(0.03 if late else 0.01)
    return job.finish(mode=job.optimizer.mode)


SCENARIOS: dict[str, Callable[[], Facts]] = {
    "long_step:3": lambda: long_step(3),
    "long_step:0": lambda: long_step(0),
    "met:replayed": lambda: met(torch.optim.SGD),
    "met:fetched": lambda: met(OwnSGD),
    "excluded:subgroup(0,1,2)": lambda: excluded("subgroup(0,1,2)"),
    "excluded:ps(2)": lambda: excluded("ps(2)"),
    "averaged:SGD": lambda: averaged(torch.optim.SGD),
    "averaged:Adam": lambda: averaged(None),
}


def main(names: list[str]) -> None:
    run_each(names, lambda name: SCENARIOS[name](), deadline)


if __name__ == "__main__":
    main(sys.argv[1:])
