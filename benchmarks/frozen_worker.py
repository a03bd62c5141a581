"""One rank of `benchmarks.frozen`: trains the same network under plain Horovod and under star_hvd in several modes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import star_hvd as hvd
from benchmarks.spec import write_json
from benchmarks.tasks import defaults_for, load_task, make_network
from benchmarks.training import Snapshots

__all__ = ["main"]

WARM_UP_LIMIT = 4000  # Steps in which a mode has to come into force.


def main(argv: list[str]) -> int:
    """Train every variant that `spec.json` in the folder `argv[0]` names, and write what was seen on rank 0."""
    run_dir = Path(argv[0])
    spec: dict[str, Any] = json.loads((run_dir / "spec.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    hvd.init()
    if int(hvd.rank()) == int(hvd.size()) - 1:
        (run_dir / "frozen").write_text(str(os.getpid()), encoding="utf-8")
    for variant in spec["variants"]:
        _wait_for(run_dir / f"go-{variant}", int(hvd.rank()) == 0, variant)
        times_s, accuracies, final_s = _train(spec, variant)
        if int(hvd.rank()) == 0:
            write_json(
                run_dir / f"done-{variant}.json", {"times_s": times_s, "accuracies": accuracies, "train_s": final_s}
            )
    hvd.shutdown()
    return 0


def _wait_for(path: Path, first: bool, variant: str) -> None:
    """Rank 0 asks the driver to freeze, or not to, before the variant begins."""
    import horovod.torch as horovod

    if first:
        path.with_name(f"ask-{variant}").touch()
        limit_s = time.monotonic() + 60.0
        while not path.exists() and time.monotonic() < limit_s:
            time.sleep(0.02)
    horovod.barrier()


def _train(spec: dict[str, Any], variant: str) -> tuple[list[float], list[float], float]:
    defaults, task = defaults_for("digits"), load_task("digits", spec["samples"])
    plain = variant in ("plain", "straggler_free")
    if not plain and variant != "auto":
        _bring_into_force(variant)  # Server processes take seconds to start, once per job.
    torch.manual_seed(0)
    net = make_network("digits")
    inner = torch.optim.SGD(net.parameters(), lr=defaults.learning_rate, momentum=defaults.momentum)
    snapshots = Snapshots(net, 4, int(hvd.rank()) == 0)
    loss_of = nn.CrossEntropyLoss()
    if plain:
        import horovod.torch as library

        sampler: Any = DistributedSampler(task.train, int(hvd.size()), int(hvd.rank()), seed=0)
        loader: Any = DataLoader(task.train, batch_size=defaults.batch_samples, sampler=sampler)
        optimizer: Any = library.DistributedOptimizer(inner, named_parameters=net.named_parameters())
    else:
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=variant)
        loader = hvd.shard(task.train, batch_size=defaults.batch_samples, seed=0)
    hvd.barrier()
    began_s, step = time.perf_counter(), 0
    for epoch in range(spec["epochs"]):
        if plain:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(spec["device_s"])
            loss_of(net(x), y).backward()
            optimizer.step()
            step += 1
            snapshots.maybe_take(step, time.perf_counter() - began_s)
    train_s = time.perf_counter() - began_s
    snapshots.take(step, train_s)
    if not plain:
        optimizer.close()
    return snapshots.times_s, [_accuracy(vector, task) for vector in snapshots.vectors], train_s


def _bring_into_force(mode: str) -> None:
    net = nn.Linear(4, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode)
    for _ in range(WARM_UP_LIMIT):
        if optimizer.mode != "sync":
            break
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
    optimizer.close()


def _accuracy(vector: Any, task: Any) -> float:
    net = make_network("digits")
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.from_numpy(vector), net.parameters())
        return float((net(task.test_x).argmax(1) == task.test_y).float().mean())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
