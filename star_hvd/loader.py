"""`shard`: a loader fed by a work queue, so that fast ranks take more batches and all ranks end the epoch together."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from horovod.torch.elastic import ElasticSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from scheduler.rules.leasing import Span, without
from scheduler.rules.step_layout import StepLayout, grain
from star_hvd.channel.messages.microbatches import MicrobatchOpen
from star_hvd.config import Config
from star_hvd.errors import StarError
from star_hvd.input.feeder import Feeder, loader_options
from star_hvd.input.lease_stock import Batch, BatchSizer, LeaseStock
from star_hvd.input.microbatches import Microbatch, MicrobatchInHand, MicrobatchStock
from star_hvd.input.sample_order import BatchOrder, EpochOrder, Order, Permutation, SamplerOrder
from star_hvd.input.share_warning import warn_of_shares
from star_hvd.runtime import runtime
from star_hvd.runtime.out_of_memory import Repeats, cut_batch

__all__ = ["ShardLoader", "shard", "weigh", "work"]

logger = logging.getLogger("star_hvd")

_SOON_S = 0.25  # An answer takes milliseconds; a rank that waits for longer delivers no gradient, and says so.
_LOOK_S = 0.002  # Between two looks whether a helper has made a step.
_EPOCHS_KEPT = 64  # Of which the waits for leases are known.
_STATE = 1  # Version of `state_dict`.


def shard(
    data: Dataset[Any] | DataLoader[Any],
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    batches: int | None = None,
    microbatches: int | None = None,
    **options: Any,
) -> ShardLoader:
    """Share a dataset among the ranks by a work queue: every sample once per epoch, more for faster ranks.

    Collective: all ranks call it, in the same order when there are several. Each iteration over the result is one
    epoch with its own permutation. The weight of a rank's gradient follows the size of its batch, so a short last
    batch counts for less.

    A DataLoader keeps everything that was set on it: workers, collate function, pinning, prefetching, persistent
    workers, worker init, generator, multiprocessing context, timeout, `drop_last`, `in_order`. Only its sampler is
    replaced: a random or sequential one, or a `DistributedSampler`, by the same order over all ranks; any other
    sampler or batch sampler is evaluated on every rank and gives the order in which the queue hands out samples. A
    data set takes the same keywords. An `IterableDataset` is read by each rank for itself, and has to give each rank
    a share of its own; the queue then counts batches.

    Args:
        data: A map-style data set, a DataLoader, or either of an `IterableDataset`.
        batch_size: Samples per batch and rank; required for a data set without batch sampler.
        shuffle: Whether the order changes from epoch to epoch. Left out: as the DataLoader's sampler does, yes for a
            data set.
        seed: Of the permutations, equal on all ranks.
        drop_last: Leave a short last batch of the epoch out.
        collate_fn: Makes a batch of a list of samples; torch's default where left out.
        config: Settings, when no optimizer has been made yet.
        batches: For an `IterableDataset`: batches of an epoch, of all ranks together.
        microbatches: Parts into which each batch is cut. An iteration of the loop is one of them; `optimizer.step()`
            makes a step of the last one of each batch and accumulates the others, `optimizer.stepped` tells. In mode
            `sync(steal)` ranks that have done theirs take over others', in whole or part, and an iteration is as many
            samples as pay in one pass, never more than a batch. For `sync`, `sync(steal)` and `auto`.
        **options: Further keywords of `DataLoader`: `sampler`, `batch_sampler`, `num_workers`, `pin_memory` and so on.

    If a rank is late: it takes fewer batches; near the end of an epoch it takes none that the others would have to
    wait for, and what its workers have loaded and it has not begun is given to the others.

    Raises:
        ValueError: No batch size, data without length, a sampler that contradicts its own length, or more parts than
            a batch has samples.
        TypeError: An unknown keyword.
    """
    if collate_fn is not None:
        options["collate_fn"] = collate_fn
    seed = _whole(seed, "seed")
    samplers = {name: options.pop(name) for name in ("sampler", "batch_sampler") if options.get(name) is not None}
    if isinstance(data, DataLoader):
        options = {**loader_options(data), **options}
        drop_last = drop_last or bool(data.drop_last)
        if data.batch_sampler is None and not isinstance(data.dataset, IterableDataset):
            raise ValueError(
                "shard got a DataLoader with batch_size=None; give it a batch_size: the queue hands out batches"
            )
        if not samplers and batch_size is None and data.batch_size is None and data.batch_sampler is not None:
            samplers["batch_sampler"] = data.batch_sampler
        elif not samplers and not isinstance(data.dataset, IterableDataset):
            samplers["sampler"] = data.sampler
        batch_size = batch_size or data.batch_size
        data = data.dataset
    if microbatches is not None:
        microbatches = _whole(microbatches, "microbatches")
        if isinstance(data, IterableDataset) or "batch_sampler" in samplers:
            raise ValueError(
                "shard cannot cut the batches of an IterableDataset or a batch sampler; leave microbatches out, or "
                "pass a map-style data set with batch_size"
            )
    if isinstance(data, IterableDataset):
        return _stream(data, batch_size, samplers, drop_last, options, batches, config)
    if batches is not None:
        raise ValueError("shard takes `batches` for an IterableDataset only; other data sets say their length")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(f"shard needs a map-style dataset with a length; got {type(data).__name__}")
    order, batch_size = _order(data, batch_size, samplers, shuffle, seed, drop_last)
    if microbatches is not None and not 1 <= microbatches <= batch_size:
        raise ValueError(f"shard microbatches is {microbatches}; expected 1 to the batch_size, {batch_size}")
    return ShardLoader(
        data, batch_size, order=order, seed=seed, drop_last=drop_last, options=options, config=config,
        microbatches=microbatches,
    )  # fmt: skip


def _order(
    data: Any, batch_size: int | None, samplers: Mapping[str, Any], shuffle: bool | None, seed: int, drop_last: bool
) -> tuple[Order, int]:
    """The order of the samples, and how many positions of it a batch has."""
    if "batch_sampler" in samplers:
        if batch_size is not None or drop_last or shuffle is not None or "sampler" in samplers:
            raise ValueError(
                "shard got a batch_sampler and batch_size, sampler, shuffle or drop_last; a batch sampler says all of "
                "these: leave them out"
            )
        return BatchOrder(samplers["batch_sampler"], seed), 1
    batch_size = _whole(batch_size, "batch_size")
    if batch_size < 1:
        raise ValueError(f"shard batch_size is {batch_size!r}; expected a positive number")
    sampler = samplers.get("sampler")
    if shuffle is not None or sampler is None:
        return Permutation(len(data), shuffle=shuffle is not False, seed=seed), batch_size
    if isinstance(sampler, (DistributedSampler, ElasticSampler)):
        logger.info("shard replaces a %s: the queue shares the samples among the ranks", type(sampler).__name__)
        return Permutation(len(data), shuffle=bool(sampler.shuffle), seed=int(sampler.seed)), batch_size
    if type(sampler) is SequentialSampler:
        return Permutation(len(data), shuffle=False, seed=seed), batch_size
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data)
    if whole and sampler.generator is None:
        return Permutation(len(data), shuffle=True, seed=seed), batch_size
    return SamplerOrder(sampler, seed), batch_size


def _stream(
    data: IterableDataset[Any],
    batch_size: int | None,
    samplers: Mapping[str, Any],
    drop_last: bool,
    options: Mapping[str, Any],
    batches: int | None,
    config: Config | None,
) -> ShardLoader:
    if samplers:
        raise ValueError("shard got a sampler for an IterableDataset, which has its own order: leave it out")
    if batches is None:
        raise ValueError(
            "shard cannot know when an epoch of an IterableDataset ends; pass batches=, the number of batches of an "
            "epoch of all ranks together"
        )
    batches = _whole(batches, "batches")
    if batches < 0:
        raise ValueError(f"shard batches is {batches}; expected 0 or more")
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last, **options)
    return ShardLoader(data, 1, order=Permutation(batches, shuffle=False, seed=0), stream=loader, config=config)


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
    """The loader `shard` returns; `len()` is the number of batches of an epoch on ranks of equal speed.

    Attributes:
        batch_sizer: Says the size of each batch of this rank, where it was set between epochs; None for equal batches,
            or batch shares.
        repeats: Repeats batches that ran out of memory, see `catch_out_of_memory`.
        lease_waits: How often the training thread waited for a lease, per epoch; of the last epochs only.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        order: Order,
        seed: int = 0,
        drop_last: bool = False,
        options: Mapping[str, Any] | None = None,
        stream: DataLoader[Any] | None = None,
        config: Config | None = None,
        microbatches: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.batch_sizer: BatchSizer | None = None
        self.epoch = 0
        self.samples_taken = 0
        self.lease_waits: collections.deque[int] = collections.deque(maxlen=_EPOCHS_KEPT)
        self._order, self._seed, self._drop_last = order, seed, bool(drop_last)
        self._feeder = Feeder(dataset, dict(options or {})) if stream is None else None
        self._stream = _Stream(stream) if stream is not None else None
        self._positions = order.expected()
        self._config = config
        self._began_s = 0.0
        self._samples_of_epoch = self._steps_before = 0  # That this epoch has; steps ended when it began.
        self._run = runtime.ensure(config)
        self._number = self._run.client.loader_number()
        self._passes = 0  # Iterations under this number; not the epoch, which may be chosen again.
        self._next_stock: LeaseStock | None = None
        self._open: _Interrupted | None = None  # The epoch in work, or left in the middle.
        self._resume: dict[str, Any] | None = None
        reference = batch_size if stream is None else stream.batch_size or 1
        if self._run.reference_samples == 0:
            self._run.reference_samples = float(reference)
        self._reference_samples = self._run.reference_samples
        self._microbatches = microbatches or 0
        self.repeats = Repeats()

    @property
    def _parts(self) -> int:
        """Parts into which a batch is cut, 0 for whole ones; one rank alone makes the same step of a whole batch."""
        return self._microbatches if self._run.world_size > 1 else 0

    def __len__(self) -> int:
        positions = self._positions
        if positions is None:
            raise TypeError(f"the sampler of this loader ({type(self._order).__name__}) has no length")
        if self._parts:
            size = self._run.world_size
            layout = StepLayout(positions, self.batch_size, self._parts, size, drop_last=self._drop_last)
            return -(-layout.total // self._run.world_size)
        total = positions // self.batch_size if self._drop_last else -(-positions // self.batch_size)
        return -(-total // self._run.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration, after a restart for example. On all ranks alike."""
        self.epoch = _whole(epoch, "epoch")
        if self.epoch < 0:
            raise ValueError(f"epoch of a shard loader is {epoch}; expected a number from 0")

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if runtime.current() is not self._run:  # Horovod was initialized anew (elastic).
            self._run = runtime.ensure(self._config)
            self._number, self._passes, self._next_stock = self._run.client.loader_number(), 0, None
            self._run.reference_samples = self._run.reference_samples or self._reference_samples
        if self._has_shares:
            self._run.check_shares(self.batch_size)
        epoch, order, done = self._next_order()
        # Other ranks may have taken steps without this one since the last epoch, between its backward passes.
        self._run.catch_up()
        if self._parts:
            self._run.check_microbatches()
            yield from self._epoch_in_parts(order, epoch, done)
            return
        stock = self._begin(order, epoch, done)
        self.lease_waits.append(0)
        try:
            if self._stream is not None:
                yield from self._tickets(stock, self._stream)
            else:
                assert self._feeder is not None
                self._feeder.begin(stock, order.indices)
                yield from self._samples(stock, order, self._feeder)
        finally:
            stock.close()  # The loop may be left in the middle of the epoch: the rest is for the others.
            if self._feeder is not None:
                self._feeder.end(stock)
            if self._has_shares:
                self._run.client.batch_sizes(self._number).end_epoch(stock.epoch)
        self._open = None
        self._ask_for_next()
        _end_epoch(self._run, self._number, stock.epoch)

    def _next_order(self) -> tuple[int, EpochOrder, list[int]]:
        """Number and order of the epoch that begins, and what was consumed of it before."""
        resumed, self._resume = self._resume, None
        epoch, self.epoch = self.epoch, self.epoch + 1
        if resumed is None:
            return epoch, self._order.of(epoch), []
        order = self._order.of(epoch, resumed["order"])
        if len(order) != resumed["positions"]:
            raise ValueError(
                f"the loader's state is of an epoch of {resumed['positions']} samples, the data has {len(order)}; "
                "load it where the data is the same"
            )
        return epoch, order, resumed["consumed"]

    def _begin(self, order: EpochOrder, epoch: int, done: list[int]) -> LeaseStock:
        stock, self._next_stock = self._next_stock, None
        if stock is not None and (stock.samples, stock.batch) != (len(order), self.batch_size):
            stock.close()
            stock, self._passes = None, self._passes + 1
        if stock is None:
            stock = self._new_stock(len(order), ask=False)
        self._passes += 1
        self._positions = len(order)
        spans = list(zip(done[::2], done[1::2], strict=True))
        end = len(order) - (len(order) % self.batch_size if self._drop_last else 0)
        samples = sum(stop - start for start, stop in without([(0, end)], spans))
        self._samples_of_epoch, self._steps_before = samples, self._run.steps_ended
        if self._has_shares:
            self._run.client.batch_sizes(self._number).begin_epoch(stock.epoch, samples, self.batch_size)
        self._open = _Interrupted(epoch, stock.epoch, order.saved, len(order))
        stock.begin(order.digest + len(done) + sum(done) % (1 << 32), done)
        return stock

    @property
    def _has_shares(self) -> bool:
        """Whether batch shares may give the batches other sizes."""
        return self._feeder is not None and self.batch_sizer is None and not self._parts

    def _new_stock(self, positions: int, *, ask: bool) -> LeaseStock:
        ahead, in_order = (self._feeder.ahead, self._feeder.in_order) if self._feeder is not None else (0, True)
        return self._run.client.open_stock(
            self._number,
            self._passes,
            positions,
            self.batch_size,
            self._drop_last,
            ahead=ahead,
            in_order=in_order,
            load_s=self._load_s(),
            sizer=self._run.client.batch_sizes(self._number) if self._has_shares else self.batch_sizer,
            ask=ask,
        )

    def _load_s(self) -> float:
        return self._feeder.load_s if self._feeder is not None else 0.0

    def _ask_for_next(self) -> None:
        """Ask for the first samples of the next epoch: they are here when it begins."""
        positions = self._order.expected()
        if positions is not None:
            self._next_stock = self._new_stock(positions, ask=True)

    def _samples(self, stock: LeaseStock, order: EpochOrder, feeder: Feeder) -> Iterator[Any]:
        """The batches that the workers load of leased samples."""
        self._began_s = time.monotonic()
        while True:
            found = feeder.next(lambda number: stock.take(number, self._run.steps_made()))
            if found is not None:
                batch, data = found
                self._note(order.samples(batch.spans))
                if self._has_shares:
                    self._note_delivery(stock.delivered - 1)
                yield from self._whole_or_parts(batch, data, order, feeder)
                self._began_s = time.monotonic()
            elif self._await_samples(stock):
                feeder.start()
            else:
                feeder.load_s = stock.load_s
                self._raise_if_uneven(at_end=True)
                return

    def _whole_or_parts(self, batch: Batch, data: Any, order: EpochOrder, feeder: Feeder) -> Iterator[Any]:
        """A batch, or its parts where it does not fit in memory."""
        size = order.samples(batch.spans)

        def load(start: int, stop: int) -> Any:
            if feeder.collates_by_default:
                return cut_batch(data, start, stop, size)
            return feeder.load([index for span in batch.spans for index in order.indices(*span)][start:stop])

        return self.repeats.deliver(self._run, self._number, size, data, load)

    def _note_delivery(self, index: int) -> None:
        """Batches differ from here on, maybe: what the user should know of it."""
        if index == 1:
            self._raise_if_uneven()
        if self._run.batch_delivered(self._number, index) and self._run.rank == 0:
            optimizers = [driver.engine.applier.optimizer for driver in self._run.drivers.values()]
            warn_of_shares(p for each in optimizers for group in each.param_groups for p in group["params"])

    def _raise_if_uneven(self, *, at_end: bool = False) -> None:
        """Where ranks meet within their passes, all need as many batches: one without would be waited for in vain.

        Equal batch shares see to that, where the epoch's last step has a sample for every rank.

        Args:
            at_end: This rank has had its last batch.

        Raises:
            StarError: The epoch cannot be divided so.
        """
        reason = next((driver.equal_batches for driver in self._run.drivers.values() if driver.equal_batches), "")
        if not reason or self._run.steps_ended == self._steps_before:  # Without steps no rank is waited for.
            return
        ranks, rest = self._run.world_size, self._samples_of_epoch % (self._run.world_size * self.batch_size)
        divided = self._has_shares and (not at_end or self._run.client.batch_sizes(self._number).balanced)
        if (0 < rest < ranks) if divided else -(-rest // self.batch_size) % ranks:
            raise StarError(
                f"an epoch of {self._samples_of_epoch} samples gives {ranks} ranks with batch_size {self.batch_size} "
                f"different numbers of batches, which cannot be here: {reason}; leave samples out so that the last "
                "step has one for every rank, or pass drop_last=True with a whole number of steps"
            )

    def _tickets(self, stock: LeaseStock, stream: _Stream) -> Iterator[Any]:
        """Batches of this rank's own stream, as many as the queue allows."""
        stream.begin_epoch()
        self._began_s = time.monotonic()
        while stream.load():
            if not self._await_samples(stock) or self._run.client.begin_batch(stock) is None:
                return  # What was loaded is the first batch of the next epoch.
            data = stream.take()
            self._note(stream.samples(data))
            yield data
            self._began_s = time.monotonic()
        stock.end()  # Its share is used up; the others go on.

    # ---- an epoch in micro-batches ----------------------------------------------------------------------------------

    def _epoch_in_parts(self, order: EpochOrder, epoch: int, done: list[int]) -> Iterator[Any]:
        assert self._feeder is not None
        size, parts, feeder = len(order), self._parts, self._feeder
        spans = list(zip(done[::2], done[1::2], strict=True))
        layout = StepLayout(
            size, self.batch_size, parts, self._run.world_size, drop_last=self._drop_last, done=spans,
            grain=grain(self.batch_size, parts),
        )  # fmt: skip
        digest = order.digest + len(done) + sum(done) % (1 << 32)
        opening = MicrobatchOpen(
            self._number, self._passes, size, self.batch_size, parts, self._drop_last, feeder.ahead, digest, done,
            self._run.config.max_batch,
        )  # fmt: skip
        stock = self._run.client.open_microbatches(layout, opening)
        self._passes, self._positions = self._passes + 1, size
        self._open = _Interrupted(epoch, stock.epoch, order.saved, size)
        self.lease_waits.append(0)
        feeder.begin(stock, order.indices)
        ended = False
        try:
            yield from self._parts_of(stock, order, feeder, layout.steps)
            ended = True
        finally:
            stock.close()
            feeder.end(stock)
            self._run.in_hand = None
            if not ended:  # What is accumulated of a step that was left belongs to no other step.
                for driver in self._run.drivers.values():
                    driver.forget_parts()
        self._open = None
        _end_epoch(self._run, self._number, stock.epoch)

    def _parts_of(self, stock: MicrobatchStock, order: EpochOrder, feeder: Feeder, steps: int) -> Iterator[Any]:
        """This rank's micro-batches of an epoch, step by step."""
        loaded: collections.deque[tuple[Batch, Any]] = collections.deque()  # Of later steps, maybe.
        while steps:
            if not self._await_part(stock):
                if not stock.next_step():
                    return
                continue
            began_s, part = time.monotonic(), stock.take()
            data = self._load(part, stock, order, feeder, loaded)
            self._note_part(part, stock, time.monotonic() - began_s)
            yield data

    def _await_part(self, stock: MicrobatchStock) -> bool:
        """Reserve the next micro-batch of this step; False where it is over for this rank."""
        if stock.at_work:  # Kernels of a whole share are launched in no time: nothing of it could be taken over.
            self._run.await_devices()
        began_s = time.monotonic()
        if not stock.begun and (not stock.decided(0.0 if stock.left_out else _SOON_S) or stock.went_by):
            # This rank has nothing of the step, and gives no gradient unless it takes over something.
            with self._run.inactive("waiting for samples"):
                steps = self._run.steps_begun()
                while not stock.decided(_SOON_S):
                    self._run.client.check_wait(began_s, "micro-batches")
                # Where the step went by, its helper makes it. Before that no gradient of a later one may be given.
                while stock.went_by and steps and self._run.steps_begun() == steps:
                    self._run.client.check_wait(began_s, "the other ranks' gradients")
                    time.sleep(_LOOK_S)
            self._run.catch_up()
            return not stock.went_by and self._await_part(stock)
        found = self._run.client.await_microbatch(stock, self._run.steps_made())
        for driver in self._run.drivers.values():
            driver.timer.add_outside(time.monotonic() - began_s)
        return found

    def _load(
        self,
        part: Microbatch,
        stock: MicrobatchStock,
        order: EpochOrder,
        feeder: Feeder,
        loaded: collections.deque[tuple[Batch, Any]],
    ) -> Any:
        """The data of a micro-batch: out of the workers, or loaded here where it was another rank's."""
        if not part.own:
            return feeder.load([index for span in part.spans for index in order.indices(*span)])
        while True:
            for _ in range(len(loaded)):
                batch, data = loaded.popleft()
                found = stock.is_in(batch.number, part)
                if found:
                    stock.delivered(batch.number)
                    return data
                if found is False:  # Of a later step; else it was called back.
                    loaded.append((batch, data))
            more = feeder.next(stock.formed)
            if more is None:
                feeder.start()
            else:
                loaded.append(more)

    def _note_part(self, part: Microbatch, stock: MicrobatchStock, input_s: float) -> None:
        samples = sum(stop - start for start, stop in part.spans)
        run = self._run
        self.samples_taken += samples
        run.note_batch(samples / run.reference_samples, input_s)
        more = lambda: self._await_part(stock)  # noqa: E731
        run.in_hand = MicrobatchInHand(samples, run.reference_samples, more, stock.own_part)
        for driver in run.drivers.values():
            driver.reporter.note_samples(self._number, samples, self.batch_size, run.reference_samples)

    def _await_samples(self, stock: LeaseStock) -> bool:
        """Whether there is something in stock; False when the epoch is over for this rank."""
        if stock.ready(0.0):
            return self._run.client.await_samples(stock)
        if not stock.had_share and stock.ready(_SOON_S):
            more = self._run.client.await_samples(stock)
        else:  # Others still work on what was leased to them, and some of it may come back.
            with self._run.inactive("waiting for samples"):
                more = self._run.client.await_samples(stock)
        self.lease_waits[-1] += more  # Not the wait for the others at the end.
        return more

    def _note(self, samples: int) -> None:
        self.samples_taken += samples
        self._run.note_batch(samples / self._run.reference_samples, time.monotonic() - self._began_s)
        size = self._reference_batch()
        for driver in self._run.drivers.values():
            driver.reporter.note_samples(self._number, samples, size, self._run.reference_samples)

    def _reference_batch(self) -> int:
        whole = self._stream is not None or isinstance(self._order, BatchOrder)
        return max(1, round(self._run.reference_samples)) if whole else self.batch_size

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that the epoch goes on behind it, with any number of ranks.

        Not collective: any rank may call it, alone, at any time, and it waits for no training thread; the state is of
        the whole job. Consumed are the samples of all batches that ranks took for the steps this rank's parameters
        have had, all batches delivered where there is no optimizer. So call it where the checkpoint of the model is
        made: behind `step`, before the next batch.

        Raises:
            DeadlineError: Another rank does not answer, or Horovod has been initialized anew.
            RankLostError: Another rank's process has ended.
            ValueError: The epoch of a stream is in the middle.
        """
        state: dict[str, Any] = {"version": _STATE, "epoch": self.epoch, "seed": self._seed, "consumed": []}
        state |= {"order": None, "positions": -1, "batch_sampler": isinstance(self._order, BatchOrder)}
        if self._resume is not None:
            return self._resume
        if self._open is None:
            return state
        if self._stream is not None:
            raise ValueError(
                "an IterableDataset cannot say where its ranks are; call state_dict between epochs, or save the "
                "position of the stream yourself"
            )
        here = self._open
        consumed = self._run.client.consumed(self._number, here.key, self._run.steps_made())
        return state | {
            "epoch": here.epoch, "consumed": consumed, "order": here.order, "positions": here.positions
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. On all ranks alike, between epochs, before the first one for example.

        Raises:
            ValueError: The state is of another kind of loader, or of another seed.
        """
        if state.get("version") != _STATE:
            raise ValueError(f"a shard loader's state has the version {state.get('version')!r}; expected {_STATE}")
        whole = isinstance(self._order, BatchOrder)
        if state["batch_sampler"] != whole or state["seed"] != self._seed:
            raise ValueError(
                f"a shard loader's state is of seed {state['seed']}, batch sampler: {state['batch_sampler']}; this "
                f"loader has seed {self._seed}, batch sampler: {whole}; make the loader as it was"
            )
        self.set_epoch(state["epoch"])
        self._resume = dict(state) if state["positions"] >= 0 else None
        self._open = None
        if self._next_stock is not None and runtime.current() is self._run:
            self._next_stock.close()
        self._next_stock = None
        self._passes += self._passes > 0  # Not all ranks need have asked for that one; none has before the first.


class _Interrupted:
    """An epoch in work, as far as a state needs it: number, key at the coordinator, order and length."""

    def __init__(self, epoch: int, key: int, order: Any, positions: int) -> None:
        self.epoch, self.key, self.order, self.positions = epoch, key, order, positions


class _Stream:
    """Batches of an iterable data set: one pass goes on over the ends of epochs until it is used up.

    Args:
        loader: The loader of this rank's share.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._pass: Iterator[Any] | None = None
        self._next: list[Any] = []
        self._may_begin = False

    def begin_epoch(self) -> None:
        """The next pass may begin, where this one has ended."""
        self._may_begin = True

    def load(self) -> bool:
        """Load the next batch; False where this rank's share is used up for this epoch."""
        if self._next:
            self._may_begin = False
            return True
        goes_on = self._pass is not None and self._may_begin
        if self._pass is None:
            if not self._may_begin:
                return False
            self._pass = iter(self._loader)
        self._may_begin = False
        try:
            self._next.append(next(self._pass))
        except StopIteration:  # Where the last epoch took all of it, this shows only now.
            self._pass, self._may_begin = None, goes_on
            return goes_on and self.load()
        return True

    def take(self) -> Any:
        """The batch that was loaded."""
        return self._next.pop()

    def samples(self, data: Any) -> int:
        """Samples in a batch, by its first tensor."""
        if isinstance(data, torch.Tensor) and data.ndim:
            return int(data.shape[0])
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
        found = next((self.samples(part) for part in parts), 0)
        return found or self._loader.batch_size or 1


def weigh(count: float) -> None:
    """Weigh the gradient of the present batch by what its loss is a mean over, tokens for example, not by its samples.

    Called before `backward()`, for every batch or micro-batch and on all ranks: the gradient of a step is then the mean
    over all tokens of the step. Without it a batch weighs as many as it has samples.

        hvd.weigh(int(mask.sum()))
        loss.backward()

    Raises:
        ValueError: Not a number above 0.
        StarError: The gradient of this micro-batch is accumulated already.
    """
    if not 0.0 < count < math.inf:
        raise ValueError(f"weigh got {count!r}; expected a number above 0")
    runtime.ensure().weigh(float(count))


def work(total: int, chunk: int, *, config: Config | None = None) -> Iterator[Span]:
    """Share the numbers from 0 to `total` among the ranks: an epoch of a pipeline that is no DataLoader.

        for start, stop in hvd.work(len(files), 16):
            for batch in pipeline(files[start:stop]):
                ...

    Collective: all ranks call it, in the same order. Every number is in exactly one range of one rank; fast ranks take
    more ranges, and all end together, as with `shard`. A range is this rank's when it is handed out; if the loop is
    left, ranges not handed out are given to the others.

    Args:
        total: How many numbers, equal on all ranks.
        chunk: Numbers in a range; the last one may be shorter.
        config: Settings, when no optimizer has been made yet.

    If a rank is late: it takes fewer ranges; near the end it takes none that the others would have to wait for.

    Raises:
        ValueError: A number out of range, or not the same on all ranks.
    """
    total, chunk = _whole(total, "total"), _whole(chunk, "chunk")
    if total < 0 or chunk < 1:
        raise ValueError(f"work got total {total} and chunk {chunk}; expected at least 0 and at least 1")
    run = runtime.ensure(config)
    run.reference_samples = run.reference_samples or float(chunk)
    return _ranges(run, run.client.open_work(total, chunk))


def _ranges(run: runtime.Runtime, stock: LeaseStock) -> Iterator[Span]:
    run.catch_up()
    try:
        while True:
            began_s = time.monotonic()
            waits = contextlib.nullcontext() if stock.ready(_SOON_S) else run.inactive("waiting for work")
            with waits:
                span = run.client.begin_batch(stock)
            if span is None:
                break
            run.note_batch((span[1] - span[0]) / run.reference_samples, time.monotonic() - began_s)
            yield span
    finally:
        stock.close()
    _end_epoch(run, stock.loader, stock.epoch)


def _end_epoch(run: runtime.Runtime, loader: int, epoch: int) -> None:
    """All ranks have come to the end of the epoch; they meet, unless one has left its loop."""
    with run.inactive("end of epoch"):
        together = run.client.await_epoch_end(loader, epoch)
    if together:  # Otherwise a rank left its loop: it is elsewhere, and the ranks meet at their next collective.
        with run.meeting("the end of an epoch"):
            pass
