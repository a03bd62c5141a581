"""What every rank of a test of process sets runs: `python -m tests.multiproc.sets_job SCENARIO`."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime.process_sets import SetKeeper, unavailable_reason
from tests.support.launch import write_result
from tests.support.signals import await_marks, freeze, mark, marked

DEADLINE_S = 240.0
FROZEN_AT_MOST_S = 120.0  # Horovod gives a rank up after 180 s.
TRIALS = 3
BEATS = 20  # Of a thread that sleeps 10 ms between two.


class Told:
    """A keeper and what it told."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[tuple[int, ...], str | None]] = queue.SimpleQueue()
        self.keeper = SetKeeper(int(hvd.size()), lambda ranks, reason: self.news.put((ranks, reason)))
        self.keeper.start()

    def add(self, *ranks: int) -> str | None:
        self.keeper.add(ranks)
        told, reason = self.news.get(timeout=DEADLINE_S)
        assert told == tuple(sorted(ranks))
        return reason


def total(value: float, name: str, process_set: Any = hvd.global_process_set) -> float:
    """The sum of one number per rank."""
    done = hvd.allreduce(torch.tensor([value]), op=hvd.Sum, name=name, process_set=process_set)
    return float(done.item())


def keeper() -> dict[str, Any]:
    """Sets come and go while the training thread reduces; `total` tells whether a set has the right members."""
    told, rank = Told(), int(hvd.rank())
    stop, reduced = threading.Event(), []

    def train() -> None:
        while total(0.0 if stop.is_set() else 1.0, "train") == hvd.size():
            reduced.append(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    reasons, sums = [], {}
    for ranks in ((1, 0), (1, 2), (2,), (0, 1, 2), (0, 1), (0, 3), ()):
        reasons.append(told.add(*ranks))
    for ranks in ((0, 1), (1, 2), (2,), (0, 1, 2)):
        found = told.keeper.get(ranks)
        if rank in ranks:
            sums[str(ranks)] = total(10.0**rank, f"sum{ranks}", found)
    told.keeper.remove((1, 2))
    again = told.add(0, 2)
    if rank != 1:
        sums["again"] = total(10.0**rank, "again", told.keeper.get((0, 2)))
    stop.set()
    trainer.join(DEADLINE_S)
    told.keeper.stop(DEADLINE_S)
    gone = told.keeper.get((1, 2)) is None
    return {"reasons": reasons, "sums": sums, "again": again, "gone": gone, "trained": len(reduced)}


def taken_over() -> dict[str, Any]:
    """A set of the user's is found and left alone."""
    users = hvd.add_process_set([0, 1])
    told = Told()
    reason = told.add(0, 1)
    found = told.keeper.get((0, 1))
    told.keeper.remove((0, 1))
    told.keeper.add((0, 2))
    told.news.get(timeout=DEADLINE_S)
    sums = total(1.0, "users", users) if hvd.rank() < 2 else 0.0
    same = found is not None and found.process_set_id == users.process_set_id
    told.keeper.stop(DEADLINE_S)
    return {"reason": reason, "same": same, "sum": sums}


def users() -> dict[str, Any]:
    """The program changes sets while orders reach the ranks at different times."""
    told, rank, sums, numbers = Told(), int(hvd.rank()), [], []
    orders = [("add", (0, 1)), ("add", (1, 2)), ("remove", (0, 1)), ("add", (0, 2)), ("remove", (1, 2))] * TRIALS

    def give() -> None:
        for place, (what, ranks) in enumerate(orders):
            time.sleep(0.1 * ((place + rank) % 3))
            getattr(told.keeper, what)(ranks)

    giver = threading.Thread(target=give)
    giver.start()
    for trial in range(2 * TRIALS):
        time.sleep(0.1 * ((trial * rank) % 3))
        made = told.keeper.add_users([0, 1] if trial % 2 else [2])
        if rank in made.ranks:
            sums.append(total(10.0**rank, f"users{trial}", made))
        numbers.append(told.keeper.remove_users(made) and made.process_set_id is None)
    giver.join(DEADLINE_S)
    reasons = {told.news.get(timeout=DEADLINE_S)[1] for what, _ in orders if what == "add"}
    found = total(10.0**rank, "found", told.keeper.get((0, 2))) if rank != 1 else 0.0
    told.keeper.stop(DEADLINE_S)
    return {"sums": sums, "removed": all(numbers), "reasons": sorted(map(str, reasons)), "found": found}


def static() -> dict[str, Any]:
    """Horovod without dynamic sets: those made at the start can be used, others not."""
    told = Told()
    reasons = [told.add(0, 1), told.add(1, 2), told.add(2)]
    found = told.keeper.get((0, 1))
    told.keeper.remove((0, 1))
    sums = total(1.0, "static", found) if hvd.rank() < 2 else 0.0
    told.keeper.stop(DEADLINE_S)
    return {"reasons": reasons, "sum": sums}


def over_hosts() -> dict[str, Any]:
    """Four ranks on two hosts, in sets that leave out different ranks on each."""
    told, rank, sums = Told(), int(hvd.rank()), {}
    for ranks in ((1, 2, 3), (0, 1, 3), (0, 3)):
        assert told.add(*ranks) is None
        if rank in ranks:
            sums[str(ranks)] = total(10.0**rank, f"sum{ranks}", told.keeper.get(ranks))
    return {"sums": sums, "hosts": int(hvd.cross_size())}


def while_frozen(name: str, ranks: list[int], submits: bool) -> dict[str, bool]:
    """Freeze the last rank, and submit a tensor on the others, until those `ranks` have got on meanwhile.

    Args:
        name: Of this trial.
        ranks: Ranks whose other Python threads must run on.
        submits: Whether they must also have submitted the tensor.

    Returns: on the last rank, whether they got on while it was frozen; on the others, whether their other threads ran
        on before the tensor was submitted.
    """
    total(1.0, f"{name}.ready")
    if hvd.rank() == hvd.size() - 1:
        got_on = freeze(name, ranks, at_most_s=FROZEN_AT_MOST_S)
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), name=name))
        return {"got_on": got_on}
    stop, submitted = threading.Event(), threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(0.01):
            beats += 1
            if beats >= BEATS and (submitted.is_set() or not submits):
                mark(name)

    assert await_marks(f"{name}.stopped")
    time.sleep(0.2)  # Horovod's own thread comes to wait for the frozen rank.
    heart = threading.Thread(target=beat)
    heart.start()
    handle = hvd.allreduce_async(torch.ones(1), name=name)
    held_up = marked(name, [int(hvd.rank())])
    submitted.set()
    hvd.synchronize(handle)
    stop.set()
    heart.join()
    return {"held_up": held_up}


def frozen() -> dict[str, Any]:
    """Dynamic sets, and none is being changed."""
    survivors = list(range(int(hvd.size()) - 1))
    return {"trials": [while_frozen(f"frozen{i}", survivors, submits=True) for i in range(TRIALS)]}


def frozen_in_a_change() -> dict[str, Any]:
    """A set was added on rank 0 and not yet on the others.

    In which part of a cycle of Horovod's the last rank is frozen is chance, and in some parts the others wait for it
    without the lock of the table of sets: there are trials until rank 0 has been held up in one.
    """
    rank, trials, over, limit_s = int(hvd.rank()), list[dict[str, bool]](), False, time.monotonic() + DEADLINE_S
    adder = threading.Thread(target=hvd.add_process_set, args=([0, 1],))
    if rank == 0:
        adder.start()
        time.sleep(1.0)  # As a rule it waits inside by then, also on a busy machine.
    while len(trials) < TRIALS or not over:
        trials.append(while_frozen(f"change{len(trials)}", [0], submits=False))
        held_up, stood_still = rank == 0 and trials[-1]["held_up"], not trials[-1].get("got_on", True)
        over |= total(float(held_up or stood_still or time.monotonic() > limit_s), f"over{len(trials)}") > 0.0
    if rank != 0:
        adder.start()
    adder.join(DEADLINE_S)
    return {"trials": trials}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f for f in (keeper, taken_over, users, static, over_hosts, frozen, frozen_in_a_change)
}


def main(scenario: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    write_result(SCENARIOS[scenario]() | {"unavailable": unavailable_reason()})
    hvd.barrier()  # A rank that leaves early would shut Horovod down for the others.


if __name__ == "__main__":
    main(sys.argv[1])
