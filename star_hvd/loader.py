"""`shard`: a loader fed by a work queue, so that fast ranks take more batches and all ranks end the epoch together."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate

from star_hvd.config import Config
from star_hvd.runtime import runtime
from star_hvd.runtime.lease_stock import LeaseStock, Spans
from star_hvd.runtime.share_warning import warn_of_shares

__all__ = ["ShardLoader", "shard"]

logger = logging.getLogger("star_hvd")

_SOON_S = 2.0  # An answer of the coordinator takes milliseconds; whoever waits longer delivers no gradient meanwhile.


def shard(
    data: Dataset[Any] | DataLoader[Any],
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
) -> ShardLoader:
    """Share a dataset among the ranks by a work queue: every sample once per epoch, more for faster ranks.

    Collective: all ranks call it, in the same order when there are several. Each iteration over the result is one
    epoch with its own permutation. The weight of a rank's gradient follows the size of its batch, so a short last
    batch counts for less.

    Args:
        data: A map-style dataset, or a DataLoader whose dataset, batch size, `drop_last` and `collate_fn` are taken
            over (its sampler and workers are not: samples are chosen by the queue).
        batch_size: Samples per batch and rank; required for a dataset.
        shuffle: Whether the order changes from epoch to epoch.
        seed: Of the permutations, equal on all ranks.
        drop_last: Leave a short last batch of the epoch out.
        collate_fn: Makes a batch of a list of samples; torch's default where left out.
        config: Settings, when no optimizer has been made yet.

    If a rank is late: it takes fewer batches; near the end of an epoch it takes none that the others would have to
    wait for.

    Raises:
        ValueError: No batch size, or data without length.
    """
    if isinstance(data, DataLoader):
        batch_size = batch_size or data.batch_size
        drop_last = drop_last or data.drop_last
        collate_fn = collate_fn or data.collate_fn
        data = data.dataset
    batch_size = _whole(batch_size, "batch_size")
    if batch_size < 1:
        raise ValueError(f"shard batch_size is {batch_size!r}; expected a positive number")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(f"shard needs a map-style dataset with a length; got {type(data).__name__}")
    return ShardLoader(
        data,
        batch_size,
        shuffle=shuffle,
        seed=_whole(seed, "seed"),
        drop_last=bool(drop_last),
        collate_fn=collate_fn,
        config=config,
    )


def _whole(value: Any, name: str) -> int:
    """A whole number of any type as Python's own: it travels to other processes.

    Raises:
        ValueError: It is none.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"shard {name} is {value!r}; expected a whole number")


class ShardLoader:
    """The loader `shard` returns; `len()` is the number of batches of an epoch on ranks of equal speed."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        config: Config | None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self.samples_taken = 0
        self._n = len(cast(Sized, dataset))
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._collate = collate_fn or default_collate
        self._config = config
        self._began_s = 0.0
        self._run = runtime.ensure(config)
        self._number = self._run.client.loader_number()
        self._passes = 0  # Iterations under this number; not the epoch, which may be chosen again.
        if self._run.reference_samples == 0:
            self._run.reference_samples = float(batch_size)
        self._reference_samples = self._run.reference_samples

    def __len__(self) -> int:
        total = self._n // self.batch_size if self._drop_last else -(-self._n // self.batch_size)
        return -(-total // self._run.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration, after a restart for example. On all ranks alike."""
        self.epoch = _whole(epoch, "epoch")
        if self.epoch < 0:
            raise ValueError(f"epoch of a shard loader is {epoch}; expected a number from 0")

    def __iter__(self) -> Iterator[Any]:
        if runtime.current() is not self._run:  # Horovod was initialized anew (elastic).
            self._run = runtime.ensure(self._config)
            self._number, self._passes = self._run.client.loader_number(), 0
            self._run.reference_samples = self._run.reference_samples or self._reference_samples
        self._run.check_shares(self.batch_size)
        order, self.epoch = self._order(self.epoch), self.epoch + 1
        epoch, self._passes = self._passes, self._passes + 1
        # Other ranks may have taken steps without this one since the last epoch, between its backward passes.
        self._run.catch_up()
        stock = self._run.client.open_stock(self._number, epoch, self._n, self.batch_size, self._drop_last)
        try:
            while (taken := self._begin_batch(stock)) is not None:
                yield self._load(order, taken, stock.batches - 1)
        finally:
            stock.close()  # The loop may be left in the middle of the epoch: the rest is for the others.
        with self._run.away("end of epoch"):
            together = self._run.client.await_epoch_end(self._number, epoch)
        if together:  # Otherwise a rank left its loop: it is elsewhere, and the ranks meet at their next collective.
            with self._run.meeting("the end of an epoch"):
                pass

    def _begin_batch(self, stock: LeaseStock) -> Spans | None:
        """The next batch's positions; None when the epoch is over for this rank."""
        self._began_s = time.monotonic()
        if not stock.ready(_SOON_S):
            # Others still work on what was leased to them, and some of it may come back.
            with self._run.away("waiting for samples"):
                return self._run.client.begin_batch(stock)
        return self._run.client.begin_batch(stock)

    def _load(self, order: torch.Tensor, spans: Spans, index: int) -> Any:
        batch = self._collate([self.dataset[int(i)] for start, stop in spans for i in order[start:stop]])
        count = sum(stop - start for start, stop in spans)
        self.samples_taken += count
        if self._run.batch_delivered(self._number, index) and self._run.rank == 0:
            optimizers = [driver.engine.applier.optimizer for driver in self._run.drivers.values()]
            warn_of_shares(p for each in optimizers for group in each.param_groups for p in group["params"])
        self._run.note_batch(count / self._run.reference_samples, time.monotonic() - self._began_s)
        for driver in self._run.drivers.values():
            driver.reporter.note_samples(self._number, count, self.batch_size, self._run.reference_samples)
        return batch

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._n, device="cpu")
        generator = torch.Generator("cpu").manual_seed((self._seed * 1_000_003 + epoch) % (1 << 63))
        return torch.randperm(self._n, generator=generator, device="cpu")
