"""An elastic job with a process set in use, in which one rank is killed: `python -m tests.fault.elastic_sets_job`."""

from __future__ import annotations

import os
import queue
import signal
import time
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime.process_sets import SetKeeper, unavailable_reason
from tests.support.launch import write_result

STEPS, COMMIT_EVERY, STRIKES_AT, VICTIM = 40, 5, 13, 3
DEADLINE_S = 240.0


def make_set(ranks: tuple[int, ...]) -> tuple[SetKeeper, str | None]:
    """A keeper for the present world, with one set, and why there is no set."""
    news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    keeper = SetKeeper(int(hvd.size()), lambda _, reason: news.put(reason))
    keeper.start()
    keeper.add(ranks)
    return keeper, news.get(timeout=DEADLINE_S)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    net = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(net, step=0, total=0.0)
    resumed: list[tuple[int, int, str | None]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        rank, size = int(hvd.rank()), int(hvd.size())
        members = tuple(range(1, size))  # The victim is one of them.
        keeper, reason = make_set(members)
        resumed.append((state.step, size, reason or unavailable_reason()))
        while state.step < STEPS:
            if size == 4 and state.step == STRIKES_AT and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            found = keeper.get(members)
            if found is not None and rank in members:
                inside = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="inside", process_set=found)
                assert float(inside.item()) == len(members)
            state.total += float(hvd.allreduce(torch.ones(1), op=hvd.Average, name="all").item())
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        keeper.stop(DEADLINE_S)

    train(state)
    write_result({"resumed": resumed, "step": state.step, "total": state.total, "size": int(hvd.size())})


if __name__ == "__main__":
    main()
