"""Every rank of jobs in which one runs out of memory: `python -m tests.multiproc.memory_job SCENARIO`."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd as hvd
from tests.multiproc import shares_job
from tests.multiproc.shares_job import BATCH, CLIP, adamw, make_dataset, reference_run, run_facts, vector_of
from tests.support.launch import write_result

SHORT = 1  # The rank whose memory is short.
FITS = 20  # So many samples, where ranks have shares.


class _Memory(torch.autograd.Function):
    """Stands for layers that need memory for each sample: passes on what it gets, or raises what a GPU would."""

    fits: Callable[[str, int], bool]

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        if not _Memory.fits("forward", len(values)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not _Memory.fits("backward", len(grad)):
            time.sleep(0.3)  # The last layer's gradients, given already, are reduced meanwhile.
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad


class _Short(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Memory.apply(values)  # type: ignore[no-any-return, no-untyped-call]


def _net() -> torch.nn.Module:
    """That of `shares_job`, with the layer that needs memory in its middle."""
    torch.manual_seed(7)
    first, last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(first, torch.nn.Tanh(), _Short(), last).double()


def stays_within(epochs: list[list[list[int]]]) -> bool:
    """Whether the short rank had more than fits, and in two later epochs in a row never, though others had.

    Args:
        epochs: By epoch and step the samples of each rank.
    """
    whole = [[step for step in epoch if sum(step) == len(step) * BATCH] for epoch in epochs]
    more = [any(step[SHORT] > FITS for step in epoch) for epoch in whole]
    within = [
        any(more[:number]) and not more[number] and max(max(step[0], step[3]) for step in epoch) > FITS
        for number, epoch in enumerate(whole)
    ]
    return any(one and other for one, other in itertools.pairwise(within))


def _compared(
    mode: str,
    epochs: int,
    fits: Callable[[str, int], bool],
    until: Callable[[list[list[list[int]]]], bool] = lambda _: True,
    most: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Training with `fits` on one rank, against one process with as many samples in every step.

    `until`: there are more than `epochs`, at `most` so many, where a busy machine makes late what is waited for.
    """
    _Memory.fits = fits if hvd.rank() == SHORT else lambda _, size: True  # type: ignore[method-assign, assignment]
    net, slow, workers = _net(), options.pop("slow", -1), options.pop("workers", 0)
    clip = options.setdefault("max_grad_norm", CLIP)
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode=mode, **options)
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, num_workers=workers)
    behind: list[torch.Tensor] = []
    taken: list[list[list[list[int]]]] = []
    while len(taken) < epochs or (len(taken) < most and not until(_sizes(taken))):
        taken.append([[]])
        for inputs, wanted, numbers in loader:
            with hvd.catch_out_of_memory(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(inputs), wanted).backward()
                taken[-1][-1].append(numbers.tolist())
                time.sleep((4.0 if hvd.rank() == slow else 1.0) * 0.001 * len(numbers))
                optimizer.step()
                if optimizer.stepped:
                    behind.append(vector_of(net))
                    taken[-1].append([])
        assert not taken[-1].pop()
    everything = hvd.allgather_object(taken, name="taken")
    whole = [[[[i for part in step for i in part] for step in epoch] for epoch in rank] for rank in everything]
    shares_job.CLIP = math.inf if clip is None else clip
    expected = reference_run(whole)
    vectors = hvd.allgather(vector_of(net)[None], name="vectors")
    return run_facts(optimizer, behind, expected, whole) | {
        "parts": [[[len(part) for part in step] for step in epoch] for epoch in everything[SHORT]],
        "replicas": float((vectors - vectors[0]).abs().max()),
    }


def _sizes(taken: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """By epoch and step the samples of each rank. Collective."""
    own = [[sum(map(len, step)) for step in epoch] for epoch in taken]
    ranks = hvd.allgather_object(own, name="sizes")
    return [[list(step) for step in zip(*epoch, strict=False)] for epoch in zip(*ranks, strict=True)]


def forward() -> dict[str, Any]:
    """More than 12 samples do not fit, of which the rank has 19 and then 24; which shows in the forward pass."""
    return _compared("sync(12,24,16,24)", 2, lambda where, size: where != "forward" or size <= 12)


def backward() -> dict[str, Any]:
    """The same in the middle of the backward pass, where the last layer's gradients are on their way already."""
    return _compared("sync(12,24,16,24)", 2, lambda where, size: where != "backward" or size <= 12, workers=2)


def twice() -> dict[str, Any]:
    """Nor do the first parts fit, each of which fails in the middle."""
    return _compared("sync(12,24,16,24)", 2, lambda where, size: where != "backward" or size <= 4)


def shares() -> dict[str, Any]:
    """`sync(balanced)`: rank 2 is slow, and rank 1 cannot take what it should of that rank's samples."""
    fits: Callable[[str, int], bool] = lambda where, size: where != "backward" or size <= FITS  # noqa: E731
    return _compared("sync(balanced)", 4, fits, until=stays_within, most=30, slow=2)


def overlapped() -> dict[str, Any]:
    """Steps that go on while the program does, without clipping, which they could not."""
    fits: Callable[[str, int], bool] = lambda where, size: where != "backward" or size <= 12  # noqa: E731
    return _compared("sync(12,24,16,24)", 2, fits, overlap=True, max_grad_norm=None)


def relaxed() -> dict[str, Any]:
    """`partial(3)`: the others do not wait for a step that is repeated; its gradient may be late."""
    return _compared("partial(3)", 3, lambda where, size: where != "backward" or size <= 12, slow=SHORT)


if __name__ == "__main__":
    hvd.init()
    write_result({"rank": hvd.rank(), **globals()[sys.argv[1]]()})
    hvd.shutdown()
