"""`shard`: a loader fed by a work queue: fast ranks take more samples, and all ranks end an epoch together."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch.utils.data import DataLoader, Dataset

from scheduler.rules.microbatches import equal_passes
from scheduler.rules.runs import Span, without
from scheduler.rules.step_layout import StepLayout, grain
from star_hvd import env
from star_hvd.channel.messages.microbatches import MicrobatchOpen
from star_hvd.config import Config
from star_hvd.epochs.batches import SOON_S, EqualRanges, LeasedBatches, StreamBatches
from star_hvd.epochs.microbatches import LeasedMicrobatches
from star_hvd.epochs.passes import Coming, Interrupted, Passes, Terms, digest, end_epoch, spans
from star_hvd.errors import StarError
from star_hvd.input.batch_sizes import BatchSizes
from star_hvd.input.feeder import IN_THREAD_NOTE, Feeder
from star_hvd.input.lease_stock import BatchSizer, LeaseStock
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.input.network import meets_in_pass, normalizations, trained, warn_of_parts
from star_hvd.input.sample_order import BatchOrder, EpochOrder, Order, Permutation
from star_hvd.input.source import Source, order_of, source_of, whole_number
from star_hvd.input.stream import Stream
from star_hvd.runtime import runtime
from star_hvd.runtime.out_of_memory import Repeats
from star_hvd.wrapper.lockstep_core import unweighted

__all__ = ["ShardLoader", "shard", "weigh", "work"]

logger = logging.getLogger("star_hvd")

_EPOCHS_KEPT = 64  # In `ShardLoader.lease_waits`.
_STATE = 2  # Version of `state_dict`; 2 since the permutations are those of torch's `DistributedSampler`.


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
    """Share a dataset among the ranks through a work queue: each sample once per epoch, more for faster ranks.

    Collective: all ranks call it, in the same order if there are several loaders, and so is every iteration: to look at
    a batch on one rank, take it from the DataLoader or the data set itself. Each iteration over the result is one
    epoch with its own permutation, that of torch's `DistributedSampler` with the same seed and epoch. Where all ranks
    make every step together, as in `sync`, `sync(balanced)`, `sync(steal)` and `auto` before a relaxed mode, each step
    has the samples that it has with plain Horovod and that sampler; only a short last step does not repeat samples. The
    weight of a rank's gradient is proportional to the size of its batch, so a short last batch counts for less.

    A DataLoader keeps all its settings: workers, collate function, pinning, prefetching, persistent workers, worker
    init, generator, multiprocessing context, timeout, `drop_last`, `in_order`. Only its sampler is replaced: a random
    or sequential one, or a `DistributedSampler`, by the same order over all ranks (an epoch set on that sampler still
    counts, as with `ShardLoader.set_epoch`); any other sampler or batch sampler
    is evaluated on every rank and gives the order in which the queue hands out samples. So it has to give every rank
    the order of the whole data set: one that gives a rank its own part, as subclasses of `DistributedSampler` do, is
    refused. A sampler's generator counts by its initial seed: an epoch's order follows from that and its number. For a
    data set, pass the same settings as keywords. Each rank reads an `IterableDataset` itself, and the data set must
    give each rank a different share; the queue then counts batches.

    A loop may draw from several loaders. Each has a queue of its own, so ranks may get different numbers of batches of
    each; `zip` ends on a rank with the first loader that has no more for it. Where a gradient is of batches of several,
    all ranks get equal batches, in `sync(balanced)` too. A plain DataLoader in the same loop is not seen: if its
    batches are in the same loss, use a mode in which batches are equal, such as `sync`. A loop may fetch one batch
    ahead, as a prefetcher to the GPU does (not with `microbatches`): that is seen from the second batch before the
    first gradient.

    Ranks may have different numbers of iterations, by one in `sync` without `drop_last`, by more in relaxed modes and
    where nothing is trained. So call collectives of the program behind the loop, not in its iterations: a rank that
    has no more waits for the others at the end of the loop. Under `auto`, ranks stay in exact modes from the first
    such call on, so that they have equally many. If ranks wait in a blocking collective for others that wait in a
    loop, in an evaluation under `torch.no_grad()` for example, these raise a `StarError` that names the collective;
    else all would wait for ever.

    Args:
        data: A map-style data set, a DataLoader, or either of an `IterableDataset`.
        batch_size: Samples per batch and rank; required for a data set without batch sampler.
        shuffle: Whether the order changes from epoch to epoch. By default as with the DataLoader's sampler; yes for a
            data set.
        seed: Seed of the permutations, equal on all ranks; that of a `DistributedSampler`, or of the generator of a
            DataLoader with `shuffle=True`, takes precedence unless `shuffle` is given.
        drop_last: Whether to leave out a short last batch of the epoch. Where all ranks make every step together, a
            last step that is not whole is left out, as with Horovod: some ranks would have a batch more than others.
        collate_fn: Makes a batch from a list of samples; torch's default if omitted.
        config: Settings of the job, if no optimizer, loader or `work` has come before; give an optimizer that follows
            the same ones. In an elastic job a loader counts from its first iteration. See `Config`.
        batches: For an `IterableDataset`: batches per epoch, over all ranks.
        microbatches: Number of micro-batches into which each batch is split. Each iteration of the loop yields one;
            `optimizer.step()` accumulates gradients and makes a step at the last micro-batch of each batch
            (`optimizer.stepped` tells whether it did). In mode `sync(steal)` ranks that have finished take over
            micro-batches, or parts of them, from other ranks, and an iteration yields as many samples as are efficient
            in one pass, at most two batches. For `sync`, `sync(steal)` and `auto`.
        **options: Further keywords of `DataLoader`: `sampler`, `batch_sampler`, `num_workers`, `pin_memory` and so on.

    If a rank is late: in relaxed modes it takes fewer batches; near the end of an epoch it takes none that the others
    would have to wait for, and batches that its workers have loaded but it has not begun go to the others. In the exact
    modes it has its part of every step, which `sync(balanced)` and `sync(steal)` make small.

    Raises:
        ValueError: No batch size, data without length, a sampler that contradicts its own length or gives only this
            rank's part, or more micro-batches than a batch has samples.
        TypeError: An unknown keyword.
    """
    if collate_fn is not None:
        options["collate_fn"] = collate_fn
    seed = whole_number(seed, "seed")
    source = source_of(data, batch_size, drop_last=drop_last, options=options)
    if microbatches is not None:
        microbatches = whole_number(microbatches, "microbatches")
        if source.is_stream or "batch_sampler" in source.samplers:
            raise ValueError(
                "shard cannot cut the batches of an IterableDataset or a batch sampler; leave microbatches out, or "
                "pass a map-style data set with batch_size"
            )
    if source.is_stream:
        return _stream_loader(source, batches, config)
    if batches is not None:
        raise ValueError("shard takes `batches` for an IterableDataset only; other data sets say their length")
    if not hasattr(source.data, "__len__") or not hasattr(source.data, "__getitem__"):
        raise ValueError(f"shard needs a map-style dataset with a length; got {type(source.data).__name__}")
    order, batch_size = order_of(source, shuffle=shuffle, seed=seed)
    if microbatches is not None and not 1 <= microbatches <= batch_size:
        raise ValueError(f"shard microbatches is {microbatches}; expected 1 to the batch_size, {batch_size}")
    return ShardLoader(
        source.data, batch_size, order=order, drop_last=source.drop_last, options=source.options,
        config=config, microbatches=microbatches,
    )  # fmt: skip


def _stream_loader(source: Source, batches: int | None, config: Config | None) -> ShardLoader:
    if source.samplers:
        raise ValueError("shard got a sampler for an IterableDataset, which has its own order: leave it out")
    if batches is None:
        raise ValueError(
            "shard cannot know when an epoch of an IterableDataset ends; pass batches=, the number of batches of an "
            "epoch of all ranks together"
        )
    batches = whole_number(batches, "batches")
    if batches < 0:
        raise ValueError(f"shard batches is {batches}; expected 0 or more")
    stream = Stream(source.data, source.batch_size, drop_last=source.drop_last, options=source.options)
    return ShardLoader(source.data, 1, order=Permutation(batches, shuffle=False, seed=0), stream=stream, config=config)


class ShardLoader:
    """The loader `shard` returns; `len()` is the number of batches of an epoch on ranks of equal speed.

    Attributes:
        batch_sizer: Gives the size of each of this rank's batches, if it was set between epochs; None for equal batches
            or batch shares.
        repeats: Repeats batches that ran out of memory, see `catch_out_of_memory`.
        lease_waits: How often the training thread waited for a lease, one entry per epoch that ended or was left; the
            last 64.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        order: Order,
        drop_last: bool = False,
        options: Mapping[str, Any] | None = None,
        stream: Stream | None = None,
        config: Config | None = None,
        microbatches: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.batch_sizer: BatchSizer | None = None
        self.epoch = 0
        self.lease_waits: collections.deque[int] = collections.deque(maxlen=_EPOCHS_KEPT)
        self._order, self._seed, self._drop_last = order, order.seed, bool(drop_last)
        self._feeder = Feeder(dataset, dict(options or {})) if stream is None else None
        self._stream = stream
        self._positions = order.expected()
        self._config = config
        # A worker that joins an elastic job meets the others in the state's `sync`, and must not wait for them before.
        self._attached = None if env.elastic() else runtime.ensure(config)
        self._number = -1  # In the order in which loaders are first iterated, which is the same on all ranks.
        self._passes = Passes()  # Under this number.
        self._coming: Coming | None = None  # The iteration that is made but not begun.
        self._open: Interrupted | None = None  # The current epoch, or the one left in the middle.
        self._resume: dict[str, Any] | None = None
        self._sampler_epoch = 0  # The last one followed, see `_follow_sampler`.
        self._may_meet: bool | None = None  # Whether ranks may meet within the passes of this stream, once known.
        self._microbatches, self._warns = microbatches or 0, True
        if self._parts and self._feeder is not None and self._feeder.initializes_workers:
            logger.warning("shard with microbatches and a worker_init_fn: %s", IN_THREAD_NOTE)
        self.repeats = Repeats(unweighted)
        self._evaluates = False  # Whether this iteration is for no training: gradients are off.

    @property
    def _run(self) -> runtime.Runtime:
        assert self._attached is not None, "an iteration attaches it first"
        return self._attached

    @property
    def _world_size(self) -> int:
        # In an elastic job the world may be another one since the last iteration.
        return int(mpi_ops.size()) if self._attached is None or env.elastic() else self._attached.world_size

    @property
    def _parts(self) -> int:
        """Micro-batches per batch, 0 for whole batches; a single rank makes the same step from a whole batch."""
        return self._microbatches if self._world_size > 1 else 0

    def __len__(self) -> int:
        positions = self._positions
        if positions is None:
            raise TypeError(f"the sampler of this loader ({type(self._order).__name__}) has no length")
        if self._parts:
            size = self._world_size
            layout = StepLayout(positions, self.batch_size, self._parts, size, drop_last=self._drop_last)
            return -(-layout.total // size)
        if self._drop_last:
            return positions // (self.batch_size * self._world_size)
        return -(-positions // (self.batch_size * self._world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration, after a restart for example. Same on all ranks.

        Raises:
            ValueError: It is below 0, or a state of the middle of another epoch was loaded: what was consumed of that
                one are other samples in this one.
        """
        number = _epoch_number(epoch)
        if self._resume is not None and number != self._resume["epoch"]:
            raise ValueError(
                f"set_epoch({number}) on a shard loader whose state is of the middle of epoch "
                f"{self._resume['epoch']}; call set_epoch({self._resume['epoch']}), or leave the call out, to continue "
                f"that epoch; to begin epoch {number} instead, do not load the state"
            )
        self.epoch = number

    @property
    def _epoch_of_sampler(self) -> int:
        return self._order.sampler_epoch if isinstance(self._order, Permutation) else 0

    def _follow_sampler(self) -> None:
        """Choose the epoch that a program has set on the sampler it had before, if that is another than last time."""
        epoch = self._epoch_of_sampler
        if epoch != self._sampler_epoch:
            self.set_epoch(epoch)
            self._sampler_epoch = epoch

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._attached is None or runtime.current() is not self._attached:  # Elastic: a new world.
            # What was set before a reset is as on a rank that joins now, but for an epoch whose state all have loaded.
            known = self._attached is not None and self._resume is not None
            self._sampler_epoch = self._epoch_of_sampler if known else 0
            self._attached = runtime.ensure(self._config)
            self._number = -1
            self._passes.restart()
            self._coming = self._may_meet = None
        if self._number < 0:
            self._number = self._run.client.loader_number(self)
        # Not left to the first batch: a loop over `zip` takes none of this loader where another one has none for it,
        # and the next iteration is to be the same epoch on all ranks.
        if self._coming is not None:
            self._skip(self._coming)
        self._follow_sampler()
        coming = self._coming = Coming(
            *self._next_order(), self._order.expected(), evaluates=not torch.is_grad_enabled()
        )
        iterator = self._iterate(coming)
        coming.iterator = weakref.ref(iterator)
        return iterator

    def _iterate(self, coming: Coming) -> Generator[Any, None, None]:
        if self._coming is not coming:
            raise StarError(
                "another iteration over this hvd.shard loader was made before this one's first batch was taken, and "
                "has taken its place; make a second loader for the inner one, from the same data set"
            )
        self._coming = None
        self._evaluates = coming.evaluates
        if self._shares is not None:
            self._run.asked.check_shares(self.batch_size)
        run = self._run
        if run.reference_samples == 0 and not self._evaluates:
            run.reference_samples = self._usual_batch(coming.order)
        # Other ranks may have made steps without this one since the last epoch.
        run.catch_up()
        if not self._evaluates:
            run.memory.begin(self._number, self.batch_size, run.feeding.loader)
        run.feeding.begin(self._number)
        exhausted = False
        try:
            run.program_waits.watch()
            with run.loops.inside(parts=bool(self._parts), trains=not self._evaluates):
                yield from (self._epoch_in_parts if self._parts else self._epoch_in_batches)(coming)
            exhausted = True
        finally:
            run.feeding.end(self._number, exhausted=exhausted)

    def _skip(self, coming: Coming) -> None:
        """Leave an epoch of which this rank has taken no batch, as if its loop had ended at once."""
        self._coming, self._evaluates = None, coming.evaluates
        if self._parts:
            self._open_microbatches(coming)[0].close()
        else:
            self._stock_for(coming).leave_unbegun(digest(coming.order, coming.done), coming.done)

    def _epoch_in_batches(self, coming: Coming) -> Iterator[Any]:
        order, done = coming.order, coming.done
        self._note_network()
        stock, shares = self._stock_for(coming), self._shares
        samples = self._samples_left(len(order), done)
        if shares is not None:
            even = self._run.world_size if stock.even else 0
            shares.begin_epoch(stock.epoch, samples, self.batch_size, even=even, drop_last=self._drop_last)
        self._open = interrupted = Interrupted(coming, stock)
        stock.begin(digest(order, done), done)
        batches: LeasedBatches | StreamBatches
        if self._stream is not None:
            batches = StreamBatches(self._run, stock, self._stream, self._even_because, self._note)
        else:
            assert self._feeder is not None
            batches = LeasedBatches(
                self._run, stock, order, self._feeder, batch_size=self.batch_size, n_samples=samples,
                drop_last=self._drop_last, shares=shares, repeats=self.repeats, equal_because=self._even_because,
                note=self._note,
            )  # fmt: skip
        try:
            yield from batches
        finally:
            self.lease_waits.append(batches.leases.waits)
            interrupted.left = True
            self._passes.left(coming.expected, self._terms)
        self._open = None

        def close(meets: bool) -> None:
            stock.close(meets=meets)
            self._passes.ask_for_next(self._run, self._number, coming.expected, self._terms)

        end_epoch(self._run, self._number, stock.epoch, close)

    def _epoch_in_parts(self, coming: Coming) -> Iterator[Any]:
        assert self._feeder is not None
        self._run.asked.check_microbatches()
        self._warn_of_parts()
        order = coming.order
        stock, layout = self._open_microbatches(coming)
        self._open = interrupted = Interrupted(coming, stock)
        self.lease_waits.append(0)
        try:
            yield from LeasedMicrobatches(
                self._run, stock, order, self._feeder, layout.steps, self._note, trains=not self._evaluates,
                uneven=None if equal_passes(layout) else self._raise_if_ranks_meet,
            )  # fmt: skip
        finally:
            interrupted.left = True
        self._open = None
        end_epoch(self._run, self._number, stock.epoch, lambda meets: stock.close())

    def _raise_if_ranks_meet(self) -> None:
        reason = self._even_because
        if reason:
            raise StarError(
                f"the last step of an epoch gives {self._run.world_size} ranks with batch_size {self.batch_size} and "
                f"microbatches {self._parts} different numbers of micro-batches, which cannot be here: {reason}; leave "
                "samples out so that it has as many for every rank, or pass drop_last=True"
            )

    def _open_microbatches(self, coming: Coming) -> tuple[MicrobatchStock, StepLayout]:
        """Open the micro-batches of an epoch; return also their layout."""
        assert self._feeder is not None
        order, done = coming.order, coming.done
        size, parts, feeder = len(order), self._parts, self._feeder
        layout = StepLayout(
            size, self.batch_size, parts, self._run.world_size, drop_last=self._drop_last, done=spans(done),
            grain=grain(self.batch_size, parts),
        )  # fmt: skip
        opening = MicrobatchOpen(
            self._number, self._passes.count, size, self.batch_size, parts, self._drop_last, feeder.ahead,
            digest(order, done), done, self._run.most_in_pass(self._number, self.batch_size),
            not self._evaluates,
        )  # fmt: skip
        stock = self._run.client.open_microbatches(layout, opening)
        self._passes.count += 1
        self._positions = size
        return stock, layout

    def _warn_of_parts(self) -> None:
        """Warn, once, of what micro-batches do to the network."""
        if self._warns and self._run.rank == 0 and self._run.drivers:
            self._warns = False
            warn_of_parts(trained(driver.engine.applier.optimizer for driver in self._run.drivers.values()))

    def _note_network(self) -> None:
        """Find out, once, whether batches of one sample are too small for the network."""
        run, shares = self._run, self._shares
        if shares is not None and shares.asks_for_network and run.world_size > 1 and run.drivers:
            optimizers = [driver.engine.applier.optimizer for driver in run.drivers.values()]
            shares.note_network(normalized=normalizations(trained(optimizers)) > 0)

    def _next_order(self) -> tuple[int, EpochOrder, dict[str, Any] | None]:
        """Return number and order of the next epoch, and the state in which it was interrupted, if it was."""
        resumed, self._resume = self._resume, None
        epoch, self.epoch = self.epoch, self.epoch + 1
        if resumed is None:
            return epoch, self._order.of(epoch), None
        order = self._order.of(epoch, resumed["order"])
        if len(order) != resumed["positions"]:
            raise ValueError(
                f"the loader's state is of an epoch of {resumed['positions']} samples, the data has {len(order)}; "
                "load it where the data is the same"
            )
        return epoch, order, resumed

    def _samples_left(self, positions: int, done: list[int]) -> int:
        """Return the samples of an epoch that ranks have yet to take, a last step that is left out included."""
        end = positions - (positions % self.batch_size if self._drop_last else 0)
        return sum(stop - start for start, stop in without([(0, end)], spans(done)))

    def _stock_for(self, coming: Coming) -> LeaseStock:
        stock = self._passes.stock_for(self._run, self._number, coming, self._terms)
        self._positions = len(coming.order)
        return stock

    @property
    def _shares(self) -> BatchSizes | None:
        """The object that may change the sizes of batches; None if they cannot change, as where nothing is trained."""
        if self._feeder is None or self.batch_sizer is not None or self._parts or self._evaluates:
            return None
        return self._run.client.batch_sizes(self._number)

    def _terms(self) -> Terms:
        """Return what a stock of this loader is opened with; some of it may be set between epochs."""
        feeder, shares = self._feeder, self._shares
        return Terms(
            self.batch_size,
            self._drop_last,
            ahead=feeder.ahead if feeder is not None else 0,
            in_order=feeder is None or feeder.in_order,
            load_s=feeder.load_s if feeder is not None else 0.0,
            sizer=self.batch_sizer if shares is None else shares,
            even=self._deals_evenly,
            fixed=shares is None,
        )

    @property
    def _even_because(self) -> str:
        """Why all ranks need equally many batches, as far as known when an epoch is opened; else empty.

        A reason found in the first step, as with `SyncBatchNorm`, makes the coordinator change the shares.
        """
        return _even_because(self._run)

    @property
    def _deals_evenly(self) -> bool:
        """Whether an epoch is to be dealt evenly; of a stream that cannot be made up for when the reason is found."""
        if self._may_meet is None and self._run.drivers:  # Looked at once, as it takes tens of milliseconds.
            self._may_meet = self._stream is not None and _may_meet(self._run)
        return bool(self._even_because or self._may_meet)

    def _note(self, samples: int, input_s: float, load_s: float) -> None:
        run, size = self._run, self._reference_batch()
        run.note_input(input_s, load_s)
        if self._evaluates:
            return
        run.feeding.note(self._number, samples / run.reference_samples)
        for driver in run.drivers.values():
            driver.reporter.note_samples(self._number, samples, size, run.reference_samples)

    def _usual_batch(self, order: EpochOrder) -> float:
        """Return the samples of a usual batch; the same on all ranks, also on one that has joined an elastic job."""
        if self._stream is not None:
            return float(self._stream.batch_size)
        if isinstance(self._order, BatchOrder) and len(order):
            return max(1.0, order.samples([(0, len(order))]) / len(order))
        return float(self.batch_size)

    def _reference_batch(self) -> int:
        whole = self._stream is not None or isinstance(self._order, BatchOrder)
        return max(1, round(self._run.reference_samples)) if whole else self.batch_size

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue the epoch from here, with any number of ranks.

        Not collective: any rank may call it alone, at any time, and it waits for no training thread; the state covers
        the whole job. A sample counts as consumed if a rank took its batch for a step that this rank's parameters
        contain; without an optimizer, if its batch was delivered. So call it where the model's checkpoint is made:
        after `step` and the optimizer's `state_dict`, before the next batch. In modes in which ranks make their steps
        without each other (`ps`, `grouped`, `local`, a rank outside a `subgroup`) another rank's batches count from
        when that rank has the parameters that contain them: none is missing after a restart, but what it was told of
        only after this call is taken once more, at most a batch per rank, with `local` those of one averaging.

        Raises:
            DeadlineError: Another rank does not answer, or Horovod was initialized again.
            RankLostError: Another rank's process has ended.
            ValueError: The loader reads a stream and is in the middle of an epoch.
        """
        state: dict[str, Any] = {"version": _STATE, "epoch": self.epoch, "seed": self._seed, "consumed": []}
        state |= {"order": None, "positions": -1, "batch_sampler": isinstance(self._order, BatchOrder)}
        if self._resume is not None:
            return self._resume
        coming = self._coming
        if coming is not None and (self._open is None or self._open.left):
            return coming.resumed or state | {"epoch": coming.epoch} if coming.alive else state
        if self._open is None:
            return state
        if self._stream is not None:
            raise ValueError(
                "an IterableDataset cannot say where its ranks are; call state_dict between epochs, or save the "
                "position of the stream yourself"
            )
        here = self._open
        run = self._run
        consumed = run.client.consumed(self._number, here.key, run.steps_made(), run.own_steps())
        return state | {
            "epoch": here.epoch, "consumed": consumed, "order": here.order, "positions": here.positions
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`. On all ranks, between epochs or before the first.

        Raises:
            ValueError: The state is of another kind of loader, or has another seed.
        """
        if state.get("version") != _STATE:
            raise ValueError(f"a shard loader's state has the version {state.get('version')!r}; expected {_STATE}")
        whole = isinstance(self._order, BatchOrder)
        if state["batch_sampler"] != whole or state["seed"] != self._seed:
            raise ValueError(
                f"a shard loader's state is of seed {state['seed']}, batch sampler: {state['batch_sampler']}; this "
                f"loader has seed {self._seed}, batch sampler: {whole}; make the loader as it was"
            )
        self.epoch = _epoch_number(state["epoch"])
        self._resume = dict(state) if state["positions"] >= 0 else None
        left, self._open = self._open, None
        same_world = self._attached is not None and runtime.current() is self._attached
        if same_world:
            if self._parts and left is not None:
                left.stock.close()  # Its iterator may be kept, and the ranks would wait for this one in it.
            if self._coming is not None:
                self._skip(self._coming)  # First: its stock may be the one requested ahead.
        self._coming = None
        self._passes.forget(close=same_world)


def _even_because(run: runtime.Runtime) -> str:
    """Return why all ranks need equally many batches, as far as known now; else an empty string."""
    if run.world_size == 1:
        return ""
    known = (driver.equal_batches for driver in run.drivers.values())
    return next(filter(None, known), "") if run.drivers else unweighted()


def _may_meet(run: runtime.Runtime) -> bool:
    """Whether the networks in training have layers that may turn out to reduce over all ranks within a pass."""
    optimizers = [driver.engine.applier.optimizer for driver in run.drivers.values()]
    return run.world_size > 1 and bool(optimizers) and bool(meets_in_pass(trained(optimizers)))


def _epoch_number(epoch: Any) -> int:
    number = whole_number(epoch, "epoch")
    if number < 0:
        raise ValueError(f"epoch of a shard loader is {epoch}; expected a number from 0")
    return number


def weigh(count: float) -> None:
    """Weight the current batch's gradient by the number of items its loss averages over (such as tokens), not samples.

    Call it before `backward()`, for every batch or micro-batch and on all ranks: the gradient of a step is then the
    mean over all tokens of the step. Without it, a batch's weight is its number of samples. What was given holds until
    the next batch of a `shard` loader, or the end of its loop; in loops without one, until the next call.

        hvd.weigh(int(mask.sum()))
        loss.backward()

    With `backward_passes_per_step` above 1 this holds between ranks only: a rank's gradient has the mean of what was
    given for its passes as weight, and within it they count equally, since they are added up as they are. For the mean
    over all tokens use `shard(..., microbatches=)`, or divide the sum of each pass's losses by the tokens of all passes
    and give that number for each.

    A gradient is multiplied by its weight, `count / Config.reference_samples`, before it is reduced, and weights are
    added up. With float16 (Horovod's fp16 compressor, or a model of that type) both must stay below 65504: set
    `Config(reference_samples=...)` of `shard` and of the optimizer to a usual `count` of one batch, which makes weights
    about 1, instead of leaving it at the loader's batch size. It changes no result otherwise. `Compression.auto` scales
    both itself.

    For a loss that is a sum over the batch (`reduction="sum"`), `hvd.weigh(1)` for every batch makes the gradient of a
    step the mean of the ranks' sums, as in Horovod, also where batches differ in size, as in `sync(balanced)`; without
    it, a sample of a larger batch counts for more. With micro-batches use a mean: the number of passes varies.

    Raises:
        ValueError: `count` is not a number above 0.
        StarError: The gradient of this micro-batch is already accumulated.
    """
    if not 0.0 < count < math.inf:
        raise ValueError(f"weigh got {count!r}; expected a number above 0")
    runtime.ensure().weigh(float(count))


def work(total: int, chunk: int, *, config: Config | None = None) -> Iterator[Span]:
    """Share the numbers 0 to `total` - 1 among the ranks: an epoch of a pipeline other than a DataLoader.

        for start, stop in hvd.work(len(files), 16):
            for batch in pipeline(files[start:stop]):
                ...

    Collective: all ranks call it, in the same order. Every number is in exactly one range of one rank; fast ranks take
    more ranges, and all end together, as with `shard`. A range belongs to this rank once the loop has received it; if
    the loop is left, the remaining ranges go to the other ranks.

    Args:
        total: How many numbers, equal on all ranks.
        chunk: Numbers in a range; the last range may be shorter.
        config: Settings of the job, if no optimizer, loader or `work` has come before; give an optimizer that follows
            the same ones. In an elastic job a loader counts from its first iteration. See `Config`.

    The gradients of all batches count alike, whatever the sizes of their ranges; `hvd.weigh` changes that.

    If a rank is late: it takes fewer ranges; near the end it takes none that the others would have to wait for.

    Raises:
        ValueError: A number out of range, or not the same on all ranks.
        StarError: All ranks need equally many batches, and the numbers cannot be divided evenly; while iterating.
    """
    total, chunk = whole_number(total, "total"), whole_number(chunk, "chunk")
    if total < 0 or chunk < 1:
        raise ValueError(f"work got total {total} and chunk {chunk}; expected at least 0 and at least 1")
    run = runtime.ensure(config)
    run.reference_samples = run.reference_samples or float(chunk)
    because = _even_because(run)
    stock = run.client.open_work(total, chunk, even=bool(because) or _may_meet(run))
    return _ranges(run, stock, EqualRanges(run, stock, because, total, "numbers"))


def _ranges(run: runtime.Runtime, stock: LeaseStock, equal: EqualRanges) -> Iterator[Span]:
    run.catch_up()
    run.program_waits.watch()
    try:
        while True:
            began_s = time.monotonic()
            waits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if not stock.ready(SOON_S):
                run.program_waits.in_loop(stock.loader, stock.epoch)
                waits = run.inactive("waiting for work")
            with waits:
                span = run.client.begin_batch(stock)
            if span is None or stock.delivered == 2:
                equal.check()
            if span is None:
                break
            run.note_input(time.monotonic() - began_s)
            yield span
    except BaseException:
        stock.close()
        raise
    end_epoch(run, stock.loader, stock.epoch, lambda meets: stock.close(meets=meets))
