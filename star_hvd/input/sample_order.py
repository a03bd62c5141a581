"""The order of an epoch's samples, equal on all ranks: our own permutation, or the order of a user's sampler."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

import torch

from scheduler.rules.runs import Span

__all__ = ["BatchOrder", "EpochOrder", "Order", "Permutation", "SamplerOrder", "chain_of"]

_MOST_INSIDE = 4  # Samplers inside each other; a sampler may also contain itself.


class EpochOrder:
    """The order of one epoch.

    Args:
        items: Per position an index of the data set, or the indices of a whole batch.
        digest: Equal for equal orders.
        whole: Whether a position is a whole batch.
        saved: Saved with a state so that an interrupted epoch continues in this order; None if it can be recomputed.
    """

    def __init__(self, items: torch.Tensor | list[Any], digest: int, *, whole: bool = False, saved: Any = None) -> None:
        self.items, self.digest, self.saved = items, digest, saved
        self._whole = whole

    def __len__(self) -> int:
        return len(self.items)

    def indices(self, start: int, stop: int) -> list[Any]:
        """Return the data set's indices at these positions."""
        part = self.items[start:stop]
        if isinstance(part, torch.Tensor):
            found: list[Any] = part.tolist()
            return found
        return [index for batch in part for index in batch] if self._whole else part

    def samples(self, spans: Iterable[Span]) -> int:
        """Return the number of samples at these positions."""
        return sum(len(self.indices(*span)) if self._whole else span[1] - span[0] for span in spans)


class Order(Protocol):
    """The orders of a loader's epochs.

    Attributes:
        seed: What they follow from; an epoch can only be continued with the same one.
    """

    @property
    def seed(self) -> int:
        """See above."""
        ...

    def of(self, epoch: int, saved: Any = None) -> EpochOrder:
        """Return the order of an epoch; `saved` is the order from a state, if the epoch was interrupted."""
        ...

    def expected(self) -> int | None:
        """Return the number of positions in a future epoch, None if only its order tells."""
        ...


class Permutation:
    """An order that depends only on seed and epoch: that of torch's `DistributedSampler` over all ranks.

    Args:
        n_samples: Samples in the data set.
        shuffle: Whether they are permuted.
        seed: Seed of the permutations.
        replaced: The sampler in whose place it is, if that has epochs.
    """

    def __init__(self, n_samples: int, *, shuffle: bool, seed: int, replaced: Any = None) -> None:
        self._n, self._shuffle, self.seed, self._replaced = n_samples, shuffle, seed, replaced

    @property
    def sampler_epoch(self) -> int:
        """The epoch that the program has set on the replaced sampler, 0 before any."""
        return int(getattr(self._replaced, "epoch", 0))

    def of(self, epoch: int, saved: Any = None) -> EpochOrder:
        """See `Order`."""
        seed = (self.seed + epoch) % (1 << 63) if self._shuffle else -1  # As in `DistributedSampler`.
        digest = _digest(f"{self._n} {seed}".encode())
        if not self._shuffle:
            return EpochOrder(torch.arange(self._n, device="cpu"), digest)
        generator = torch.Generator("cpu").manual_seed(seed)
        return EpochOrder(torch.randperm(self._n, generator=generator, device="cpu"), digest)

    def expected(self) -> int | None:
        """See `Order`."""
        return self._n


class SamplerOrder:
    """The order of a user's sampler.

    It is evaluated on every rank, with the generators of torch, NumPy and Python seeded alike. The sampler's own torch
    generator is seeded from its initial seed and the epoch meanwhile: its state would depend on how many epochs this
    process has had, and a rank that joins an elastic job has had none. It needs the same initial seed on all ranks.

    Args:
        sampler: The sampler.
        seed: Seed of the generators.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler, self.seed = sampler, seed

    def of(self, epoch: int, saved: Any = None) -> EpochOrder:
        """See `Order`."""
        items = self._evaluate(epoch) if saved is None else list(saved)
        try:
            found = torch.tensor([operator.index(index) for index in items], dtype=torch.int64, device="cpu")
        except (TypeError, ValueError):  # Keys of another type, e.g. if the data set is a mapping.
            return EpochOrder(items, _digest(repr(items).encode()), saved=items)
        return EpochOrder(found, _digest(found.numpy().tobytes()), saved=found)

    def expected(self) -> int | None:
        """See `Order`."""
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    def _evaluate(self, epoch: int) -> list[Any]:
        seed = _seed_of(self.seed, epoch)
        with _seeded(seed), _own_seeded(self._sampler, epoch), torch.device(_device_of(self._sampler)):
            items = list(self._sampler)
        expected = self.expected()
        if expected is not None and expected != len(items):
            raise ValueError(
                f"{type(self._sampler).__name__} has the length {expected} and gives {len(items)} items; shard counts "
                "on its length: correct its __len__"
            )
        return items


class BatchOrder(SamplerOrder):
    """The order of a user's batch sampler: a position is a whole batch."""

    def of(self, epoch: int, saved: Any = None) -> EpochOrder:
        """See `Order`."""
        items = [list(batch) for batch in (self._evaluate(epoch) if saved is None else saved)]
        return EpochOrder(items, _digest(repr(items).encode()), whole=True, saved=items)


def _seed_of(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch) % (1 << 63)


def _digest(data: bytes) -> int:
    """Return a number from 1 to 2^48 - 1: messages hold integers up to 2^53, and 0 means that the order is unknown."""
    return 1 + int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") % ((1 << 48) - 1)


def chain_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the ones inside it, as far as they are attributes of the usual names."""
    for _ in range(_MOST_INSIDE):
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def _device_of(sampler: Any) -> str:
    """Return the device on which a sampler draws, whatever the program's default: that of a generator of its own."""
    generators = (getattr(each, "generator", None) for each in chain_of(sampler))
    return next((each.device.type for each in generators if isinstance(each, torch.Generator)), "cpu")


@contextlib.contextmanager
def _own_seeded(sampler: Any, epoch: int) -> Iterator[None]:
    """Seed the sampler's own generators from their initial seeds and the epoch inside the block, and restore them."""
    found = [getattr(each, "generator", None) for each in chain_of(sampler)]
    states = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    for each, _ in states:
        each.manual_seed(_seed_of(each.initial_seed(), epoch))
    try:
        yield
    finally:
        for each, state in states:
            each.set_state(state)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python inside the block, and restore them afterwards."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    # A sampler may draw on a GPU, as a weighted one does if its weights are there.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])
