"""A job of ranks that `shard` feeds by worker processes: epochs, a loop that one rank leaves, a state in the middle.

    python -m tests.multiproc.loader_job first FOLDER       epochs, then a checkpoint in the middle of one
    python -m tests.multiproc.loader_job second FOLDER      goes on from it, with any number of ranks
    python -m tests.multiproc.loader_job several FOLDER     loops that draw from two loaders of different lengths
    python -m tests.multiproc.loader_job short FOLDER       many epochs of few steps, that end together or with join
    python -m tests.multiproc.loader_job alone FOLDER       states in the middle of epochs in which ranks step alone
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import star_hvd as hvd
from star_hvd.input.sample_order import Permutation
from star_hvd.runtime import meetings
from tests.multiproc.modes import deadline
from tests.multiproc.scenarios import compute, digest, model
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, mark, marked

SAMPLES, BATCH = 403, 4
OTHERS_TAKE = 78  # Batches, of 101, behind which the slow rank of an epoch goes on: one of the three has 26 or more.
STOPS_AT = 9  # Steps into the epoch that is interrupted.
FAST_S, SLOW_S = 0.004, 0.02


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def own_loader() -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)


class Training:
    """A network that is trained on whatever a loader gives.

    Args:
        mode: Of the optimizer.
    """

    def __init__(self, mode: str) -> None:
        self.net = model()
        inner = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(inner, self.net.named_parameters(), mode=mode)
        last = int(hvd.rank()) == int(hvd.size()) - 1
        self._pause_s = SLOW_S if last and mode != "sync" else FAST_S
        self._held = last

    def step(self, rows: torch.Tensor) -> None:
        """A step on these inputs."""
        self.optimizer.zero_grad()
        compute(self.net, rows, self._pause_s)
        self.optimizer.step()

    def epoch_beside_a_slow_rank(self, loader: Any) -> list[int]:
        """Numbers of the samples of an epoch whose first batch the last rank has until the others took most of it.

        A pause of some milliseconds makes no rank the slowest: the machine may hold up another one for longer.
        """
        began_s = time.monotonic()
        while self.optimizer.mode == "sync" and time.monotonic() - began_s < PATIENCE_S:
            self.step(torch.zeros(BATCH, 8))  # In lockstep nobody could go on.
        seen: list[int] = []
        for count, (numbers, rows) in enumerate(loader, 1):
            if self._held and count == 1:
                _await_batches(OTHERS_TAKE)
            mark(f"batch{count}")
            self.step(rows)
            seen += numbers.tolist()
        return seen

    def epoch(self, loader: Any, leave_after: int = 0) -> list[int]:
        """Numbers of the samples of an epoch, or of its first batches."""
        seen: list[int] = []
        for count, (numbers, rows) in enumerate(loader, 1):
            self.step(rows)
            seen += numbers.tolist()
            if count == leave_after:
                break
        return seen


def _await_batches(wanted: int) -> None:
    """Wait until the other ranks have marked so many batches together."""
    counts, limit_s = [0] * (int(hvd.size()) - 1), time.monotonic() + PATIENCE_S
    while sum(counts) < wanted:
        assert time.monotonic() < limit_s, f"the others have taken {counts} batches"
        for rank, count in enumerate(counts):
            counts[rank] += marked(f"batch{count + 1}", [rank])
        time.sleep(0.001)


def first(folder: Path) -> dict[str, Any]:
    rank = int(hvd.rank())
    relaxed = Training("partial")
    loader = hvd.shard(own_loader(), seed=7)
    epochs = [relaxed.epoch(loader, leave_after=3 if rank == epoch and epoch < 2 else 0) for epoch in range(3)]
    epochs.append(relaxed.epoch_beside_a_slow_rank(loader))
    facts = {"epochs": epochs, "waits": list(loader.lease_waits), "digest": digest(relaxed.net)}
    relaxed.optimizer.close()
    weighted = WeightedRandomSampler(torch.arange(1.0, 51.0), 120)
    drawn = hvd.shard(Numbered(), 8, sampler=weighted, num_workers=1)
    facts["weighted"] = [[int(i) for numbers, _ in drawn for i in numbers] for _ in range(2)]
    facts["ranges"] = [list(hvd.work(SAMPLES, 10)) for _ in range(2)]
    exact = Training("sync")
    seen: list[int] = []
    for count, (numbers, rows) in enumerate(loader, 1):
        exact.step(rows)
        seen += numbers.tolist()
        if count == STOPS_AT:  # Every rank has had so many: the queue has enough for all.
            if rank == 0:  # Alone, as many programs save.
                torch.save({"loader": loader.state_dict(), "model": exact.net.state_dict()}, folder / "checkpoint")
            break
    hvd.barrier()
    exact.optimizer.close()
    return facts | {"seen": seen}


def second(folder: Path) -> dict[str, Any]:
    exact = Training("sync")
    loader = hvd.shard(own_loader(), seed=7)
    saved = torch.load(folder / "checkpoint")
    exact.net.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
    epochs = [exact.epoch(loader), exact.epoch(loader)]
    facts = {"epochs": epochs, "digest": digest(exact.net), "epoch": loader.epoch}
    exact.optimizer.close()
    return facts


SEVERAL = ("sync", "partial")
OUTER, INNER, LABELLED = 11, 9, 5  # Batches: of three ranks some wait at the end of one loader, some at the other's.


def samples_of(batches: int) -> int:
    """So many that three ranks in step have unequal numbers of batches: the last step has one sample for each."""
    return (batches - batches % 3) * BATCH + batches % 3


def several(folder: Path) -> dict[str, Any]:
    """Two epochs over `zip` of two loaders, and two of one in which a shorter one is started again and again."""
    found = {}
    for mode in SEVERAL:
        training = Training(mode)
        outer, inner, labelled = (
            hvd.shard(torch.utils.data.Subset(Numbered(), range(samples_of(count))), BATCH)
            for count in (OUTER, INNER, LABELLED)
        )
        pairs, digests, restarted = [list[tuple[int, int]]() for _ in range(2)], [], [list[int]() for _ in range(2)]
        for epoch in range(2):
            for (first, rows), (second, _) in zip(outer, inner, strict=False):
                training.step(rows)
                pairs[epoch].append((int(first[0]), int(second[0])))
            digests.append(digest(training.net))
        labels = iter(labelled)
        for epoch in range(2):
            for numbers, rows in outer:
                if next(labels, None) is None:
                    labels = iter(labelled)
                    next(labels, None)
                training.step(rows)
                restarted[epoch] += numbers.tolist()
        del labels
        hvd.barrier()
        found[mode] = {"pairs": pairs, "digests": digests, "restarted": restarted, "last": digest(training.net)}
        training.optimizer.close()
    return found


SHORT = ("shard", "join")
SHORT_EPOCHS, SHORT_STEPS = 20, 2


class _LeavesLate(meetings.Inactivity):
    """An inactive period whose end comes later on one of two ranks, as if it were suspended there."""

    late = False

    def leave(self, reason: str) -> None:
        if self.late:
            time.sleep(SLOW_S)
        super().leave(reason)


def short(folder: Path) -> dict[str, Any]:
    """The optimizer's steps, and how many of them lacked a rank, in epochs of equally many batches on both ranks.

    A rank leaves the end of an epoch later than the other one has its first gradient.
    """
    meetings.Inactivity = _LeavesLate  # type: ignore[misc]
    rank, size, found = int(hvd.rank()), int(hvd.size()), {}
    samples = torch.arange(float(SHORT_STEPS * size * BATCH)).unsqueeze(1)
    for how in SHORT:
        net = torch.nn.Linear(1, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), mode="sync", accuracy="exact")
        loader = hvd.shard(torch.utils.data.TensorDataset(samples), BATCH, shuffle=False)
        for epoch in range(SHORT_EPOCHS):
            own = ([each] for each in samples.chunk(SHORT_STEPS * size)[rank::size])
            batches: Any = loader if how == "shard" else own
            _LeavesLate.late = epoch % 2 == rank
            for (batch,) in batches:
                optimizer.zero_grad()
                net(batch).sum().mul(1e-6).backward()
                optimizer.step()
            if how == "join":
                hvd.join()
        stats = optimizer.stats()
        found[how] = {key: stats[key] for key in ("steps", "fresh", "late")}
        optimizer.close()
    return found


ALONE = ("asgd", "local(3)", "local(3,background)", "subgroup(0,1)")
WHOLE = hvd.Config(damping="none", max_staleness=SAMPLES)
"""However late a gradient is, it is seen in the parameters: who is held up for a second is a hundred steps late."""


def alone(folder: Path) -> dict[str, Any]:
    """What a state of the middle of an epoch says was consumed, and what the parameters of that moment contain.

    Each sample has a parameter of its own, which changes where its gradient is applied.
    """
    rank, found = int(hvd.rank()), {}
    for mode in ALONE:
        net = torch.nn.Embedding(SAMPLES, 1)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=WHOLE)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        loader = hvd.shard(own_loader(), seed=7)
        states: list[dict[str, Any]] = []
        while not states:
            active = set(hvd.allgather_object(optimizer.mode, name="mode")) == {mode if mode != "asgd" else "ps(1)"}
            before = net.weight.detach().clone()
            for count, (numbers, _) in enumerate(loader, 1):
                optimizer.zero_grad()
                time.sleep(SLOW_S if rank == 2 else FAST_S)
                net(numbers).mean().backward()
                optimizer.step()
                if rank == 0 and active and count % 4 == 0:
                    optimizer.state_dict()
                    changed = (net.weight.detach() - before).abs() > 0.01  # An averaging rounds.
                    contained = changed.flatten().nonzero().flatten().tolist()
                    state = loader.state_dict()
                    order = Permutation(SAMPLES, shuffle=True, seed=7).of(state["epoch"])
                    bounds = state["consumed"]
                    consumed = [i for each in zip(bounds[::2], bounds[1::2], strict=True) for i in order.indices(*each)]
                    states.append({"consumed": consumed, "contained": contained})
            states = hvd.broadcast_object(states, 0, name="states")
        found[mode] = states
        optimizer.close()
    return found


def main(part: str, folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    with deadline():
        parts = {"first": first, "second": second, "several": several, "short": short, "alone": alone}
        write_result(parts[part](folder))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
