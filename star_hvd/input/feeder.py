"""Load batches ahead: a torch DataLoader of ours with all options the user set, fed from a stock of leases.

Only the sampler is ours. It forms a batch whenever the loader requests indices for its workers, and reports that it is
exhausted while nothing is in stock; torch then delivers the batches in progress, and the loader is iterated again. Its
worker processes are kept for that in any case; if the user did not request persistent workers they end with the epoch.

A delivered batch is identified by the order or, where batches may overtake each other (`in_order=False`), by a number
that travels with the indices and comes back beside the collated batch. The time in which a worker loaded the batch
comes back too: a rank whose input is slow waits for nothing while its batches are small, and must not look fast then.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate

from star_hvd.errors import StarError
from star_hvd.input.lease_stock import Batch, LeaseStock
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.patches import forks_can_hang, horovod_patches

__all__ = ["IN_THREAD_NOTE", "Feeder", "Indices", "collates_here", "loader_options", "warn_of_forks"]

logger = logging.getLogger("star_hvd")

Stock = LeaseStock | MicrobatchStock

Indices = Callable[[int, int], list[Any]]
"""Returns the data set's indices at the positions from start to stop of the epoch's order."""

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",  # Since torch 2.6.
)
_IN_THREAD = ("collate_fn", "pin_memory", "pin_memory_device")  # Options that a loader without workers accepts.

IN_THREAD_NOTE = (
    "star_hvd loads a part of a batch that is taken over from another rank, or that is repeated because it did not fit "
    "in memory, in the training process, where worker_init_fn is not called; open files or databases in __getitem__ "
    "where they are not open yet, and not in worker_init_fn"
)

_PACE_BATCHES = 16  # Batches whose mean loading time is a rank's pace.
_PACE_EVERY = 4  # Batches after which it is computed again: that takes tens of microseconds of the training thread.
_OUTLIER = 4.0  # A batch counts as at most so many times the median one: a worker's first includes what is done once.


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a DataLoader's options as keyword arguments, except data set, batches and sampler."""
    return {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}


class Feeder:
    """Turns leased positions into loaded batches.

    Args:
        dataset: The user's map-style data set.
        options: Keyword arguments of `DataLoader`; see `loader_options`.
    """

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._options = dict(options)
        self.load_s = 0.0  # Seconds to load a batch when no other is in progress; of the last epoch.
        self._persistent = bool(options.get("persistent_workers")) or not options.get("num_workers")
        self.in_order = bool(options.get("in_order", True))
        self.collates_by_default = options.get("collate_fn") in (None, default_collate)
        forks = bool(options.get("num_workers")) and collates_here(options)
        self._numbered = forks or not self.in_order
        self._sampler = _Sampler(numbered=self._numbered)
        if self._numbered:
            self._options["collate_fn"] = _Numbering(options.get("collate_fn") or default_collate)
        if options.get("num_workers"):
            self._options["persistent_workers"] = True
        if forks:
            warn_of_forks()
        if options.get("generator") is not None:  # A copy: it also seeds the user's sampler, equally on all ranks.
            self._options["generator"] = torch.Generator().set_state(options["generator"].get_state())
        self._dataset = dataset
        self._loader: DataLoader[Any] | None = self._make()
        self._batches: Iterator[Any] = iter(())
        self._direct: DataLoader[Any] | None = None
        self._direct_indices: list[list[Any]] = []
        workers, prefetch = self._loader.num_workers, self._loader.prefetch_factor or 0
        self.ahead = workers * prefetch + 1 if workers else 0  # One batch more than the workers load ahead.
        self._sampler.workers = workers
        self._paces_s: deque[float] = deque(maxlen=_PACE_BATCHES)  # Seconds per sample of the latest batches.
        self._pace_s, self._since_pace = 0.0, _PACE_EVERY  # Their mean, and batches since it was computed.

    def pace_s(self, samples: int) -> float:
        """Return the least seconds between two batches of so many samples that the workers can load; 0 if unknown."""
        workers = self._sampler.workers
        if not workers or len(self._paces_s) < min(_PACE_BATCHES, 2 * workers):
            return 0.0
        if self._since_pace >= _PACE_EVERY:
            most_s = _OUTLIER * statistics.median(self._paces_s)
            self._pace_s = statistics.fmean(min(pace_s, most_s) for pace_s in self._paces_s)
            self._since_pace = 0
        return samples * self._pace_s / workers

    def _make(self) -> DataLoader[Any]:
        return DataLoader(self._dataset, batch_sampler=self._sampler, **self._options)

    def begin(self, stock: Stock, indices: Indices) -> None:
        """Start an epoch, or continue it."""
        self._sampler.begin(stock, indices)
        self._batches = iter(())

    def next(self, stock: Stock, begin: Callable[[int], Batch | None]) -> tuple[Batch, Any] | None:
        """Return the next batch that was not called back; None if no more are in progress.

        Args:
            stock: That of the loop that asks.
            begin: Begins the batch with a given number; returns None if it was called back.

        Raises:
            StarError: Another loop over the same loader has begun since this one did.
        """
        if not self._sampler.serves(stock):
            raise StarError(
                "another iteration over this hvd.shard loader began inside this loop over it, and has taken its place; "
                "make a second loader for the inner one, from the same data set"
            )
        on_their_way = self._sampler.on_their_way
        while True:
            try:
                data = next(self._batches)
            except StopIteration:
                return None
            except BaseException:
                if on_their_way:
                    on_their_way.popleft()
                raise
            number = on_their_way.popleft()  # Out of order it only counts: batches carry their numbers themselves.
            if self._numbered:
                own_number, data, samples, load_s = data
                number = number if self.in_order else own_number
                self._paces_s.append(load_s / max(1, samples))
                self._since_pace += 1
            batch = begin(number)
            if batch is not None:
                return batch, data

    @property
    def initializes_workers(self) -> bool:
        """Whether something is done in every worker that is not done in this process."""
        return bool(self._options.get("num_workers")) and self._options.get("worker_init_fn") is not None

    def load(self, indices: list[Any]) -> Any:
        """Load a batch in this thread instead of in the workers, which are at later batches.

        `worker_init_fn` is not called here: it may seed the generators of its process, and its worker's data set is
        a copy.
        """
        if self._direct is None:
            options = {name: self._options[name] for name in _IN_THREAD if name in self._options}
            self._direct = DataLoader(self._dataset, batch_sampler=self._direct_indices, **options)
        self._direct_indices[:] = [indices]
        try:
            data = next(iter(self._direct))
        except Exception as error:
            if self.initializes_workers:
                if hasattr(error, "add_note"):  # Since Python 3.11.
                    error.add_note(IN_THREAD_NOTE)
                else:
                    logger.error("%s", IN_THREAD_NOTE)
            raise
        return data[1] if self._numbered else data

    def start(self) -> None:
        """Request batches again after a time in which nothing was in stock; none are in progress."""
        if self._loader is None:
            self._loader = self._make()
        self._sampler.restart()
        self._batches = iter(self._loader)

    def end(self, stock: Stock) -> None:
        """End the epoch of this stock, or an abandoned loop: workers end unless they are to be kept."""
        if not self._sampler.end(stock):
            return  # The next epoch has begun: an error kept the abandoned loop alive for a while.
        self._batches = iter(())
        if not self._persistent:
            self._loader = None


class _Sampler:
    """The batch sampler of the inner loader: yields indices of what is in stock."""

    def __init__(self, *, numbered: bool) -> None:
        self.on_their_way: deque[int] = deque()
        self.workers = 0
        self._was_dry = False
        self._numbered = numbered
        self._source: tuple[Stock, Indices] | None = None

    def begin(self, stock: Stock, indices: Indices) -> None:
        self._source = (stock, indices)

    def restart(self) -> None:
        self.on_their_way.clear()
        self._was_dry = False

    def serves(self, stock: Stock) -> bool:
        """Whether batches are formed from this stock."""
        return self._source is not None and self._source[0] is stock

    def end(self, stock: Stock) -> bool:
        if not self.serves(stock):
            return False
        self._source = None
        self.on_their_way.clear()
        return True

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """May be exhausted for now and have more later; torch asks again with every batch it delivers."""
        if self._source is None:
            raise StopIteration
        stock, indices = self._source
        # torch requests one batch per delivered batch, so idle workers get work only if the loader is iterated again.
        idle = self._was_dry and len(self.on_their_way) < self.workers
        batch = None if idle and stock.in_stock >= self.workers * stock.batch else stock.form()
        if batch is None:
            self._was_dry = True
            raise StopIteration
        self.on_their_way.append(batch.number)
        found = [index for start, stop in batch.spans for index in indices(start, stop)]
        return _Numbered(batch.number, found) if self._numbered else found


def collates_here(options: Mapping[str, Any]) -> bool:
    """Whether batches are collated in this process or in forked ones.

    Workers that are started in another way would have to import this package for a collate function of it.
    """
    return not options.get("num_workers") or _start_method(options.get("multiprocessing_context")) == "fork"


def _start_method(context: Any) -> str:
    """Return how a loader with this `multiprocessing_context` starts its workers."""
    if isinstance(context, str):
        return context
    if context is None:  # Asking in any other way would settle the default, which the program may still want to set.
        return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method: str = context.get_start_method()
    return method


@functools.cache
def warn_of_forks() -> None:
    """Warn, once, if a worker that is forked can hang."""
    if forks_can_hang(horovod_patches()):
        logger.warning(
            "this Horovod was built without patch 0013, and Python is older than 3.12: a loading worker that is forked "
            "during a reduction can hang, and the job with it; build Horovod with scripts/build_horovod.py, or pass "
            "multiprocessing_context='forkserver'"
        )


# ---- batches with their numbers and loading times ----------------------------------------------------------------

_number, _size, _began_s = 0, 0, 0.0  # In a worker process: the batch being loaded, its samples, and since when.


class _Numbered(list[Any]):
    """Indices that set the current batch number when they are unpickled, which a worker does right before it loads."""

    def __init__(self, number: int, indices: list[Any]) -> None:
        super().__init__(indices)
        self._arrived = number
        _arrive(number, indices)  # Without workers the batch is loaded here, immediately.

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._arrived, list(self))


def _arrive(number: int, indices: list[Any]) -> list[Any]:
    global _number, _size, _began_s
    _number, _size, _began_s = number, len(indices), time.monotonic()
    return indices


class _Numbering:
    """A collate function that returns number, batch, number of samples, and the seconds that loading it took.

    They are a plain tuple, which is pickled and unpickled faster than an object, and whose contents torch pins.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any, int, float]:
        batch = self._collate(samples)  # Of any type: `__getitems__` of the data set may return something else.
        return _number, batch, _size, time.monotonic() - _began_s
