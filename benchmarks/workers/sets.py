"""Runs under horovodrun: what process sets cost, with plain Horovod; `python -m benchmarks.workers.sets RUN_DIR`.

With `HOROVOD_DYNAMIC_PROCESS_SETS` set to 1, dynamic process sets are used; otherwise the one set is made at the start.
It has all ranks except the last.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.lab.spec import write_json
from benchmarks.lab.worker import progress, register

IDLE_S = 3.0
REDUCTIONS = 200
CHANGES = 4
FREEZE_S = 2.0
BEAT_S = 0.01
SMALL_ELEMENTS = 1024  # 4 KB
IDLE_SETS = (1, 4, 8)
PAUSE_S = 0.01  # Between two reductions, in place of a short step's computation.


def reduce_s(name: str, process_set: Any = hvd.global_process_set, elements: int = 1) -> tuple[float, float]:
    """Return the seconds of one all-reduce, and of its submission alone."""
    began_s = time.perf_counter()
    handle = hvd.allreduce_async(torch.ones(elements), op=hvd.Sum, name=name, process_set=process_set)
    submitted_s = time.perf_counter()
    hvd.synchronize(handle)
    return time.perf_counter() - began_s, submitted_s - began_s


def idle_cpu() -> float:
    """Return the CPU time per second of an idle process, as a share of one core."""
    hvd.barrier()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    time.sleep(IDLE_S)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
    hvd.barrier()
    return share


def change_sets(ranks: list[int]) -> dict[str, float]:
    """Add and remove a set repeatedly while the training thread reduces; return seconds.

    The training thread's reductions are matched by number, so all ranks stop after the same one.
    """
    add_s, remove_s, hiccups_s = [], [], []
    done = threading.Event()

    def change() -> None:
        for _ in range(CHANGES):
            began_s = time.perf_counter()
            made = hvd.add_process_set(list(ranks))
            add_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            hvd.remove_process_set(made)
            remove_s.append(time.perf_counter() - began_s)
        done.set()

    changer = threading.Thread(target=change)
    changer.start()
    finished = torch.zeros(1)
    while finished.item() < hvd.size():
        began_s = time.perf_counter()
        finished = hvd.allreduce(torch.tensor([float(done.is_set())]), op=hvd.Sum, name="beside")
        hiccups_s.append(time.perf_counter() - began_s)
    changer.join()
    return {
        "add_s": statistics.median(add_s),
        "remove_s": statistics.median(remove_s),
        "hiccup_s": max(hiccups_s),
        "beside_s": statistics.median(hiccups_s),
    }


def beside_idle_sets(known: list[int]) -> dict[str, float]:
    """Return the mean seconds of an all-reduce over all ranks, with an increasing number of unused sets."""
    size = hvd.size()
    subsets = [ranks for n in range(size - 1, 1, -1) for ranks in itertools.combinations(range(size), n)]
    others = (list(ranks) for ranks in subsets if list(ranks) != known)
    facts, idle = {}, 1
    for number in IDLE_SETS:
        for ranks in itertools.islice(others, number - idle):
            hvd.add_process_set(ranks)
            idle += 1
        if idle < number:
            break
        hvd.barrier()
        took_s = []
        for _ in range(REDUCTIONS):
            time.sleep(PAUSE_S)
            took_s.append(reduce_s("idle", elements=SMALL_ELEMENTS)[0])
        facts[f"idle_{number}_s"] = statistics.mean(took_s)
    return facts


def frozen(process_set: Any) -> dict[str, float]:
    """Stop the last rank, which is not in the set, while the others use the set and the global set."""
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        subprocess.Popen(["sh", "-c", f"sleep {FREEZE_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        reduce_s("after")
        return {}
    beats, stop = [time.perf_counter()], threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_S):
            beats.append(time.perf_counter())

    heart = threading.Thread(target=beat)
    heart.start()
    time.sleep(FREEZE_S / 10)
    small = [reduce_s("small", process_set, SMALL_ELEMENTS) for _ in range(20)]
    reduce_s("after")
    stop.set()
    heart.join()
    beats.append(time.perf_counter())
    return {
        "frozen_subgroup_s": max(took_s for took_s, _ in small),
        "frozen_submit_s": max(submit_s for _, submit_s in small),
        "frozen_beat_gap_s": max(after - before for before, after in itertools.pairwise(beats)),
    }


def measure(ranks: list[int]) -> dict[str, float]:
    """Return all figures of this rank."""
    dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    made = hvd.ProcessSet(ranks)
    hvd.init(process_sets=None if dynamic else [made])
    facts: dict[str, float] = {}
    if dynamic:
        facts |= change_sets(ranks)
        hvd.add_process_set(made)
    for _ in range(10):
        reduce_s("empty")
    times_s = sorted(reduce_s("empty")[0] for _ in range(REDUCTIONS))
    facts |= {"idle_cpu_share": idle_cpu(), "empty_s": times_s[REDUCTIONS // 2], "empty_p95_s": times_s[-10]}
    facts |= frozen(made)
    return facts | (beside_idle_sets(ranks) if dynamic else {})


def gathered(facts: list[dict[str, float]]) -> dict[str, float]:
    """Return one value per figure: the mean of shares, the median of typical times, the maximum of worst-case times."""
    typical: dict[str, Callable[[list[float]], float]] = {"idle_cpu_share": statistics.mean}
    typical |= dict.fromkeys(("empty_s", "empty_p95_s", "add_s", "remove_s", "beside_s"), statistics.median)
    typical |= {f"idle_{number}_s": statistics.median for number in IDLE_SETS}
    names = {name for each in facts for name in each}
    return {name: typical.get(name, max)([each[name] for each in facts if name in each]) for name in sorted(names)}


def main(run_dir: Path) -> None:
    torch.set_num_threads(1)
    register(run_dir)
    size = int(os.environ["HOROVOD_SIZE"])
    facts = hvd.allgather_object(measure(list(range(size - 1))), name="facts")
    if hvd.rank() == 0:
        write_json(run_dir / "sets.json", gathered(facts))
        progress(done=1)
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
