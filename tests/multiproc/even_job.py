"""Every rank of jobs with what needs all ranks in every step: `python -m tests.multiproc.even_job SCENARIO`."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from tests.multiproc.shares_job import make_dataset, make_net
from tests.support.launch import write_result

BATCH = 19


def _train(net: torch.nn.Module, *optimizers: Any, samples: int = 995, batch: int = BATCH) -> dict[str, Any]:
    """Two epochs, of which neither divides evenly."""
    data = torch.utils.data.Subset(make_dataset(), range(samples))
    loader = hvd.shard(data, batch_size=batch, seed=11)
    taken: list[list[list[int]]] = []
    for _ in range(2):
        taken.append([])
        for inputs, wanted, numbers in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), wanted).backward()
            for optimizer in optimizers:
                optimizer.step()
            taken[-1].append(numbers.tolist())
    everything = hvd.allgather_object(taken, name="taken")
    return {
        "batches": [[len(rank[epoch]) for rank in everything] for epoch in range(2)],
        "sizes": [
            [[len(batch) for batch in step] for step in zip(*(rank[epoch] for rank in everything), strict=False)]
            for epoch in range(2)
        ],
        "once": [
            sorted(i for rank in everything for batch in rank[epoch] for i in batch) == list(range(samples))
            for epoch in range(2)
        ],
        "explain": hvd.explain() if hvd.rank() == 0 else "",
    }


def _optimizer(params: Any, **options: Any) -> Any:
    names = [(f"p{i}", param) for i, param in enumerate(params)]
    return hvd.DistributedOptimizer(torch.optim.SGD([param for _, param in names], lr=0.01), names, **options)


class _Table(torch.nn.Module):
    """A network with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = torch.nn.Embedding(5, 6, sparse=True)
        self.rest = make_net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.rest(inputs + self.table((inputs[:, 0] > 0).long()).double())
        return output


class _Meets(hvd.SyncBatchNorm):
    """Horovod's layer works on a GPU only: this one meets all ranks as that does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ValueError):
            super().forward(inputs)
        mpi_ops.allreduce(torch.ones(1), name="statistics")
        return inputs


def sparse(**given: int) -> dict[str, Any]:
    """Sparse gradients, which Horovod gathers from all ranks."""
    net = _Table()
    return _train(net, _optimizer(net.parameters(), mode="sync"), **given)


def few() -> dict[str, Any]:
    """The same where the last step would have two samples for four ranks."""
    try:
        return sparse(samples=13 * 4 * BATCH + 2)
    except hvd.StarError as error:
        return {"error": str(error)}


def lbfgs() -> dict[str, Any]:
    """Rank 0 has a batch less than the others, of their own loader, and joins."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(torch.ones(4, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    for _ in range(2 if hvd.rank() == 0 else 3):
        optimizer.step(closure)
    hvd.join()
    return {}


def joined() -> dict[str, Any]:
    """Rank 0 has fewer batches than the others, of their own loader, and joins; one of two optimizers is Horovod's."""
    result: dict[str, Any] = {"weights": []}
    for options in ({"groups": 1}, {"gradient_predivide_factor": 2.0}):
        net = make_net()
        both = [_optimizer(net[0].parameters()), _optimizer(net[2].parameters(), **options)]
        for number in range(2 if hvd.rank() == 0 else 6):
            for optimizer in both:
                optimizer.zero_grad()
            (net(torch.full((4, 6), 1.0 + number, dtype=torch.float64)) - 1.0).square().mean().backward()
            for optimizer in both:
                optimizer.step()
        hvd.join()
        # A rank that joins adds zeros, but makes no step of this optimizer, as under Horovod.
        hvd.broadcast_parameters(dict(net[2].named_parameters()), root_rank=1)
        result["weights"].append([float(param.detach().sum()) for param in net.parameters()])
        for optimizer in both:
            optimizer.close()
    return result


def short() -> dict[str, Any]:
    """Five batches for four ranks, in two steps: the epoch is over before batch shares can be ordered."""
    return sparse(samples=5 * BATCH)


def normalized() -> dict[str, Any]:
    """`SyncBatchNorm`, which meets all ranks within a forward pass."""
    net = torch.nn.Sequential(_Meets(6), make_net())
    return _train(net, _optimizer(net.parameters(), mode="sync"))


def beside() -> dict[str, Any]:
    """An optimizer that reduces as Horovod does, without weights, beside one for which batch shares are asked for."""
    net = make_net()
    last = list(net[2].parameters())
    return _train(net, _optimizer(net[0].parameters(), mode="sync(24,12,16,24)"), _optimizer(last, groups=1))


def native() -> dict[str, Any]:
    """An optimizer that reduces as Horovod does, alone; the last step of an epoch has not a batch for every rank."""
    net = make_net()
    optimizer = _optimizer(net.parameters(), groups=1)
    result = _train(net, optimizer, samples=12 * 4 * BATCH + BATCH + 3)
    stream = hvd.shard(_Endless(), batch_size=4, batches=40)
    for numbers in (stream, (torch.arange(start, stop) for start, stop in hvd.work(160, 4))):
        count = 0
        for inputs in numbers:
            time.sleep(0.02 * (hvd.rank() == 2))  # Before its pass the others wait only for their own batches.
            optimizer.zero_grad()
            net(inputs.double()[:, None].expand(-1, 6)).sum().backward()
            optimizer.step()
            count += 1
        result["batches"].append(hvd.allgather_object(count, name="count"))
    return result


class _Endless(torch.utils.data.IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def native_later() -> dict[str, Any]:
    """The same, with an epoch of the loader before there is an optimizer, for statistics of the data for example."""
    data = torch.utils.data.Subset(make_dataset(), range(12 * 4 * BATCH + BATCH + 3))
    loader = hvd.shard(data, batch_size=BATCH, seed=11)
    for _ in loader:
        pass
    net = make_net()
    optimizer = _optimizer(net.parameters(), groups=1)
    batches = []
    for _ in range(2):
        count = 0
        for inputs, wanted, _ in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), wanted).backward()
            optimizer.step()
            count += 1
        batches.append(hvd.allgather_object(count, name="count"))
    return {"batches": batches, "once": []}


def native_few() -> dict[str, Any]:
    """The same where the last step would have two samples for four ranks."""
    net = make_net()
    try:
        return _train(net, _optimizer(net.parameters(), groups=1), samples=3 * 4 * BATCH + 2)
    except hvd.StarError as error:
        return {"error": str(error)}


def averaging() -> dict[str, Any]:
    """A program that averages its loss every fifth iteration."""
    net = make_net()
    return _auto(net, _optimizer(net.parameters()), lambda loss: hvd.allreduce(loss, name="loss"))


def committing() -> dict[str, Any]:
    """A program that commits every fifth iteration, as in an elastic job."""
    net = make_net()
    optimizer = _optimizer(net.parameters())
    state = hvd.elastic.TorchState(net, optimizer)
    return _auto(net, optimizer, lambda loss: state.commit())


def _auto(net: torch.nn.Module, optimizer: Any, collective: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    """Train under `auto` with a slow rank, and a collective with the loss every fifth iteration."""
    loader = hvd.shard(torch.utils.data.Subset(make_dataset(), range(995)), batch_size=5, seed=11)
    batches, modes = [], []
    for _ in range(3):
        count = 0
        for inputs, wanted, _ in loader:
            time.sleep(0.02 * (1 + 3 * (hvd.rank() == 2)))
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs), wanted)
            loss.backward()
            optimizer.step()
            count += 1
            if count % 5 == 0:
                collective(loss.detach())
        batches.append(hvd.allgather_object(count, name="count"))
        modes.append(optimizer.mode)
    return {"batches": batches, "once": [], "modes": modes}


if __name__ == "__main__":
    hvd.init()
    write_result({"rank": hvd.rank(), **globals()[sys.argv[1]]()})
    hvd.shutdown()
