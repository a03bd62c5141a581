"""The user's input to `shard`: a data set, or a DataLoader with its options, and the order of the samples."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.torch.elastic import ElasticSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from star_hvd.input.feeder import loader_options
from star_hvd.input.sample_order import BatchOrder, Order, Permutation, SamplerOrder, chain_of

__all__ = ["Source", "order_of", "source_of", "whole_number"]

logger = logging.getLogger("star_hvd")

_OF_WORKERS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout")


@dataclass(frozen=True)
class Source:
    """A data set and how it is to be loaded.

    Attributes:
        data: The data set.
        batch_size: Samples per batch and rank, None if unknown.
        samplers: The user's own samplers, by keyword: `sampler` or `batch_sampler`.
        drop_last: Whether a short last batch of the epoch is dropped.
        options: Further keyword arguments of `DataLoader`.
    """

    data: Any
    batch_size: int | None
    samplers: Mapping[str, Any]
    drop_last: bool
    options: Mapping[str, Any]

    @property
    def is_stream(self) -> bool:
        """Whether each rank reads it on its own."""
        return isinstance(self.data, IterableDataset)


def source_of(
    data: Dataset[Any] | DataLoader[Any], batch_size: int | None, *, drop_last: bool, options: Mapping[str, Any]
) -> Source:
    """Return the source given to `shard`; its arguments override what was set on a DataLoader.

    Raises:
        ValueError: A DataLoader forms no batches.
    """
    rest = dict(options)
    samplers = {name: rest.pop(name) for name in ("sampler", "batch_sampler") if rest.get(name) is not None}
    if not isinstance(data, DataLoader):
        return Source(data, batch_size, samplers, drop_last, rest)
    _warn_of_own_iteration(data)
    is_stream = isinstance(data.dataset, IterableDataset)
    if data.batch_sampler is None and not is_stream:
        raise ValueError(
            "shard got a DataLoader with batch_size=None; give it a batch_size: the queue hands out batches"
        )
    if not samplers and batch_size is None and data.batch_size is None and data.batch_sampler is not None:
        samplers["batch_sampler"] = data.batch_sampler
    elif not samplers and not is_stream:
        samplers["sampler"] = data.sampler
    return Source(
        data.dataset,
        batch_size or data.batch_size,
        samplers,
        drop_last or bool(data.drop_last),
        {**_kept_options(data, rest), **rest},
    )


def _kept_options(loader: DataLoader[Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DataLoader's options; those of its workers only if there are to be any, else torch refuses them."""
    kept = loader_options(loader)
    workers = rest.get("num_workers", kept["num_workers"])
    return {name: value for name, value in kept.items() if workers or name not in _OF_WORKERS}


def _warn_of_own_iteration(loader: DataLoader[Any]) -> None:
    """Warn if the loader's class does something with batches that is lost, since `shard` loads them itself."""
    names = ("__iter__", "_get_iterator")
    own = [name for name in names if getattr(type(loader), name) is not getattr(DataLoader, name)]
    if own:
        logger.warning(
            "shard uses data set, collate function and options of a %s, but not its own %s: what that does to batches "
            "is lost; do it in collate_fn or in the loop",
            type(loader).__name__,
            " and ".join(own),
        )


def order_of(source: Source, *, shuffle: bool | None, seed: int) -> tuple[Order, int]:
    """Return the order of the samples, and how many of its positions form a batch."""
    data, samplers = source.data, source.samplers
    if "batch_sampler" in samplers:
        if source.batch_size is not None or source.drop_last or shuffle is not None or "sampler" in samplers:
            raise ValueError(
                "shard got a batch_sampler and batch_size, sampler, shuffle or drop_last; a batch sampler says all of "
                "these: leave them out"
            )
        _refuse_parts(samplers["batch_sampler"], "batch_sampler")
        return BatchOrder(samplers["batch_sampler"], seed), 1
    batch_size = whole_number(source.batch_size, "batch_size")
    if batch_size < 1:
        raise ValueError(f"shard batch_size is {batch_size!r}; expected a positive number")
    sampler = samplers.get("sampler")
    replaced = sampler if type(sampler) in (DistributedSampler, ElasticSampler) else None
    if shuffle is not None or sampler is None:
        return Permutation(len(data), shuffle=shuffle is not False, seed=seed, replaced=replaced), batch_size
    if replaced is not None:
        logger.info("shard replaces a %s: the queue shares the samples among the ranks", type(replaced).__name__)
        shuffle, seed = bool(replaced.shuffle), int(replaced.seed)
        return Permutation(len(data), shuffle=shuffle, seed=seed, replaced=replaced), batch_size
    _refuse_parts(sampler, "sampler")
    if type(sampler) is SequentialSampler:
        return Permutation(len(data), shuffle=False, seed=seed), batch_size
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data)
    if whole:  # The generator's state would depend on how many epochs this process has had, since a reset for example.
        own = sampler.generator
        return Permutation(len(data), shuffle=True, seed=seed if own is None else own.initial_seed()), batch_size
    return SamplerOrder(sampler, seed), batch_size


def _refuse_parts(sampler: Any, name: str) -> None:
    """Refuse a sampler that gives this rank only its own part of the samples: the order of all is not known from that.

    Raises:
        ValueError: It is one, or contains one.
    """
    for each in chain_of(sampler):
        ranks = getattr(each, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise ValueError(
                f"shard got a {name} with a {type(each).__name__}, which gives each rank its own part of an order that "
                f"shard does not know; pass a {name} over the whole data set, equal on all ranks (num_replicas=1, "
                "rank=0 if it has these), since the queue shares the samples among the ranks. Only torch's own "
                "DistributedSampler is taken over, as sampler= beside batch_size="
            )


def whole_number(value: Any, name: str) -> int:
    """Convert a whole number of any type to `int`, since it is sent to other processes.

    Raises:
        ValueError: It is not a whole number.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"shard {name} is {value!r}; expected a whole number")
