"""The objects that exist once per process: channel, agent, coordinator on rank 0, and the optimizers' drivers."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import gc
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import zmq
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from horovod.torch.functions import allgather_object

from scheduler.records import Plan
from scheduler.rules.step_layout import LONGEST
from star_hvd import env, threads
from star_hvd.build_check import own_build, require_equal
from star_hvd.channel.agent import Agent
from star_hvd.channel.departures import Departures
from star_hvd.channel.handshake_limiter import CONTROL_BYTES, SLACK_BYTES
from star_hvd.channel.keys import Keyring, Peer, PrivateFolder, own_address
from star_hvd.channel.late_push import MAX_PROBE_BYTES, PROBE, LatePushes, weights_size_bytes
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages.joins import JoinedRanks, ProgramCollective
from star_hvd.channel.messages.leases import Consumed, Lease, LeaseRecall, ReportConsumed
from star_hvd.channel.messages.microbatches import (
    MicrobatchesClosed,
    MicrobatchGrant,
    MicrobatchRecall,
    MicrobatchShares,
)
from star_hvd.channel.messages.shares import Feeds, ShareOrder, ShareProposal
from star_hvd.channel.messages.switch import (
    Commit,
    DropSet,
    MakeSet,
    PlanActive,
    Presence,
    Probe,
    ServerRestarted,
    Servers,
    WarmServers,
)
from star_hvd.channel.messages.waits import Deadlock
from star_hvd.channel.state_transfer import OtherRanks, TensorServer
from star_hvd.config import OWN_SETTINGS, Config
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.input.feeding import SURE, Feeding
from star_hvd.input.joined import Joined
from star_hvd.input.microbatches import MicrobatchInHand
from star_hvd.input.program_waits import ProgramWaits
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.step_reporter import sizes_of
from star_hvd.run_log import new_run_name
from star_hvd.runtime import program_end
from star_hvd.runtime.asked_plans import AskedPlans
from star_hvd.runtime.coordinator_client import CoordinatorClient
from star_hvd.runtime.job_log import JobLog, check_curves, forget_unlogged
from star_hvd.runtime.loops import ProgramLoops
from star_hvd.runtime.machine_notes import MachineNotes
from star_hvd.runtime.meetings import Meetings
from star_hvd.runtime.memory_limits import MemoryLimits
from star_hvd.runtime.mode_services import ModeServices
from star_hvd.runtime.model_loader import ModelLoader
from star_hvd.telemetry.resources import gpu_identity
from star_hvd.telemetry.wait_time import WaitTime, warn_after
from star_hvd.telemetry.whereabouts import Whereabouts

__all__ = ["Runtime", "current", "ensure", "on_reset", "shutdown"]

logger = logging.getLogger("star_hvd")

_FOR_A_DRIVER = (
    messages.CloseStep, messages.PlanMessage, messages.Abandon, messages.OptimizerOver, Commit, PlanActive
)

_current: Runtime | None = None


def current() -> Runtime | None:
    """Return the running runtime of this process, None if there is none."""
    return _current


def ensure(config: Config | None = None) -> Runtime:
    """Return the running runtime; start one if there is none. Collective: all ranks call it at the same point.

    Args:
        config: Settings of a runtime that starts here. If one runs, its settings stay, and those that differ are named
            in a warning.

    Raises:
        StarError: Horovod is not initialized.
    """
    global _current
    if not mpi_ops.is_initialized():
        raise StarError("Horovod is not initialized; call star_hvd.init() first")
    if _current is None:
        _current = Runtime(config or Config())
        try:
            _current.start()
        except BaseException:  # Another rank was lost while the ranks met: leave nothing half initialized.
            on_reset()
            raise
    elif config is not None:
        _current.warn_of_other(config)
    return _current


_inside_elastic = 0  # Functions decorated with `star_hvd.elastic.run` that are running.


@contextlib.contextmanager
def inside_elastic() -> Iterator[None]:
    """Allow, inside the block, what is collective: all ranks of an elastic job begin its function together."""
    global _inside_elastic
    _inside_elastic += 1
    try:
        yield
    finally:
        _inside_elastic -= 1


def may_start() -> bool:
    """Whether all ranks are at this point of the program, so that the runtime can start here."""
    return not env.elastic() or _inside_elastic > 0


_AFTER_ERROR_S = 60.0
"""Longest wait for the other ranks within the handling of an error: on one rank alone it has to end the job, as under
plain Horovod; an early end of the training that is an exception, too, comes on all ranks within some steps."""

_continues = False  # Whether the training of a world that is gone goes on (elastic).


def on_reset() -> None:
    """Stop the runtime of a world that is gone (elastic), without waiting for other ranks."""
    global _current, _continues
    if _current is not None:
        _continues |= _current.steps_ended > 0
        _current.stop(drain=False)
        _current = None


def shutdown() -> None:
    """Wait until all ranks have finished, contributing to the steps of those that have not; then stop.

    A rank that is here within a `finally` or `except` may be so because of an error, or because its training has ended
    early, as the others' has: it waits for them for a minute at most.
    """
    global _current, _continues
    forget_unlogged()
    _continues &= env.elastic()  # What is trained after a new `init` is another training.
    if _current is not None:
        longest_s = _current.config.shutdown_deadline_s
        if program_end.handling_error():
            longest_s = min(longest_s, _AFTER_ERROR_S)
        _current.stop(drain=not program_end.failed(), longest_s=longest_s)
        _current = None


_FOR_CLIENT = (
    Lease, LeaseRecall, ShareProposal, ShareOrder, Consumed, ReportConsumed, messages.Grant, messages.EpochEnd,
    MicrobatchShares, MicrobatchRecall, MicrobatchGrant, MicrobatchesClosed,
)  # fmt: skip


def _with_environment(config: Config) -> Config:
    """Return the settings with those that the environment sets instead."""
    chosen = {"policy": env.policy(), "least_quorum": env.least_quorum(), "encryption": env.encryption()}
    changes: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    return dataclasses.replace(config, **changes)


class Runtime:
    """See the module's text.

    Args:
        config: Settings, equal on all ranks.
    """

    def __init__(self, config: Config) -> None:
        # Read here, on every rank: an invalid name must end the job, not only rank 0's coordinator.
        self.config = _with_environment(config)
        self.rank = int(mpi_ops.rank())
        self.world_size = int(mpi_ops.size())
        self.keyring = Keyring()
        self.coordinator: Coordinator | None = None
        self.drivers: dict[int, StepDriver] = {}
        self.asked = AskedPlans(self.world_size, self.config.max_batch)
        self.feeding = Feeding(self._feeds, self._mixes, self.steps_made)
        self.in_hand: MicrobatchInHand | None = None  # The micro-batch whose gradient is being accumulated.
        self.behind_step: Callable[[], None] | None = None  # Called behind the step of micro-batches in progress.
        self.memory = MemoryLimits(self.config.max_batch)
        self.steps_ended = 0  # How often the gradients of a step were collected, over all optimizers.
        self._had_shares = False
        self.thread_failure: StarError | RankLostError | None = None  # Why a thread of this process ended, if one did.
        self.agent: Agent
        self.client: CoordinatorClient
        self.tensors: TensorServer
        self.services: ModeServices
        self.run_name = ""  # Name of the run log, equal on all ranks.
        self._folder: PrivateFolder | None = None
        self._ranker: ModelLoader | None = None
        self._machine = MachineNotes(
            self.rank, lambda message, urgent: self.agent.send(message, urgent=urgent), self.drivers
        )
        self._curves: set[str] = set()
        self.user_calls: collections.Counter[str] = collections.Counter()
        self.reference_samples = float(config.reference_samples)
        self._meetings = Meetings(self.drivers, lambda message: self.agent.send(message), self.raise_failure)
        self.loops = ProgramLoops(
            self.rank, self.world_size, self.drivers, lambda: self.steps_ended, self.in_training_thread
        )
        self.joined = Joined(
            lambda message: self.agent.send(message), self.raise_failure,
            lambda what: self._meetings.meet(what, self.config.step_deadline_s, out_of_data=True), self.user_calls,
            lambda: sum(driver.engine.next_step for driver in list(self.drivers.values())),
        )  # fmt: skip
        self.program_waits = ProgramWaits(lambda message, urgent=True: self.agent.send(message, urgent=urgent))
        self._deadlock = ""  # Why the loop over `shard` in which the program waits can never go on, if it cannot.
        self._had_dropped = self._had_mixed = False
        self._sources: queue.SimpleQueue[messages.StateSource] = queue.SimpleQueue()
        self._bye = threading.Event()
        self._next_optimizer_id = 0
        self._stopped = self._warned_of_config = False
        self._pid = os.getpid()
        self._unwatch_threads = threads.on_death(self._thread_died)

    def warn_of_other(self, config: Config) -> None:
        """Warn, once, of settings in a later `Config` that have no effect, since the runtime has started without them.

        Args:
            config: What was given to a loader or an optimizer that is not the first one of the job.
        """
        wanted = _with_environment(config)
        names = (item.name for item in dataclasses.fields(Config) if item.name not in OWN_SETTINGS)
        ignored = [name for name in names if getattr(wanted, name) != getattr(self.config, name)]
        if not ignored or self._warned_of_config or self.rank != 0:
            return
        self._warned_of_config = True
        logger.warning(
            "Config(%s) has no effect: these settings are the whole job's and are those of the first hvd.shard, "
            "hvd.work or DistributedOptimizer. Give the same config= to each of them",
            ", ".join(f"{name}={getattr(wanted, name)!r}" for name in ignored),
        )

    def start(self) -> None:
        """Exchange addresses and keys over Horovod and start the threads. Collective."""
        warn_after(self.config.stall_warning_s, self.rank)
        if self.rank == 0:
            env.warn_misspelled()
        if self.rank == 0 and self.config.policy == "learned":
            self._ranker = ModelLoader(self.world_size)
        single_host = int(mpi_ops.local_size()) == self.world_size
        host = own_address(single_host=single_host)
        control, control_port = self.keyring.server(host, CONTROL_BYTES) if self.rank == 0 else (None, 0)
        router, data_host, port, path = self._data_server(host, single_host=single_host)
        own = (self.keyring.public_key, host, control_port, port, self.keyring.server_pair.public, path)
        job = new_run_name() if self.rank == 0 else None
        gathered = allgather_object((own, job, own_build()), name="star.peers")
        require_equal(build for _, _, build in gathered)
        peers, self.run_name = [Peer(*item) for item, _, _ in gathered], gathered[0][1]
        self.keyring.admit(peers)
        self._departures = Departures(peers)
        self._whereabouts = Whereabouts()
        # A connection refused because its key is not known yet is never retried, so all ranks admit, then connect.
        mpi_ops.barrier()
        if control is not None:
            hosts = [peer.host for peer in peers]
            self.coordinator = Coordinator(control, self.world_size, self.config, hosts, self._ranker)
            self.coordinator.start()
        self._late_pushes = LatePushes(self._accept_late, self._most_late_bytes)
        self.tensors = TensorServer(router, self._snapshot, self.config.chunk_bytes, self._late_pushes.take)
        self.tensors.start()
        identity = str(self.rank).encode()
        self.agent = Agent(
            self.rank,
            lambda: self.keyring.client(0, identity, port=peers[0].control_port),
            self._on_message,
            self.config.heartbeat_s,
        )
        self.client = CoordinatorClient(
            self.config, self.rank, self.agent, self._raise_what_ends_loops, self._first_step, self._most_samples,
            lambda: self.meets, self.lacking, self.feeding.fetches_ahead,
        )  # fmt: skip
        self.services = ModeServices(
            self.rank, self.config, self.keyring, self.keyring.job_key(), data_host, self.agent.send, self.drivers,
            self._raise_what_ends_waits,
        )  # fmt: skip
        self.services.start()
        self.agent.start()
        _install_exit_hooks()

    def _data_server(self, host: str, *, single_host: bool) -> tuple[Any, str, int, str]:
        """Return the tensor socket, the host or folder where this rank's servers listen, the socket's port and path."""
        if self.config.encryption == "network" and single_host:
            self._folder = _shared_folder(wanted=host == "127.0.0.1")
        if self._folder is not None:
            router, path = self.keyring.local_server(self._folder.path)
            return router, str(self._folder.path), 0, path
        router, port = self.keyring.server(host, self.config.chunk_bytes + SLACK_BYTES)
        return router, host, port, ""

    def new_driver(self) -> StepDriver:
        """Return a driver for the next optimizer; all ranks must create optimizers in the same order."""
        for driver in [driver for driver in self.drivers.values() if driver.over]:
            self._end(driver)
        self._next_optimizer_id += 1
        return StepDriver(
            self._next_optimizer_id - 1,
            self.config,
            self.agent.send,
            OtherRanks(self.keyring, self._next_optimizer_id - 1, self.agent.send, self._sources, self.raise_failure),
            self.diagnose,
            self.services.later,
        )

    def attach(
        self, driver: StepDriver, engine: StepEngine, initial: Plan, plan: Plan | None, *, exact: bool = False
    ) -> None:
        """Start an optimizer's engine and register it with its first plan and the plan the user asked for."""
        if driver.number > 0:
            gc.collect()  # The parts of a closed optimizer refer to each other and hold its buffers.
        self.drivers[driver.number] = driver
        driver.others = lambda: any(
            other is not driver and not other.dropped for other in list(self.drivers.values())
        )
        driver.auto = plan is None
        if plan is not None:
            self.asked.add(driver.number, plan)
        driver.start(engine, self.services)
        if self._ranker is not None and plan is None:
            first = engine.step
            self._ranker.load_after(lambda: engine.step > first)
        wanted = plan.to_dict() if plan is not None else {}
        hosts = [peer.host for peer in self.keyring.peers]
        facts = {"policy": self.config.policy, "mode": "auto" if plan is None else plan.label}
        facts |= {"continues": "reset"} if _continues else {}
        ranker = None if plan else self._ranker
        reporter = driver.reporter
        reporter.log = JobLog(self.run_name, reporter, hosts, self.coordinator, facts, ranker, self._curves)
        reporter.log.start()
        engine.wire.report_to(reporter.note_transmission)
        self._machine.start(self.run_name, gpu_identity(engine.applier.optimizer))
        size, *parts = sizes_of(engine)
        self.agent.send(messages.Register(driver.number, initial.to_dict(), wanted, size, exact, *parts))

    def detach(self, driver: StepDriver) -> None:
        """End an optimizer's work.

        Collective: waits until all ranks are here; until then this rank's helper contributes to the others' steps.
        """
        with self.meeting(messages.CLOSE, out_of_data=True):
            self._fetch_state(driver, "closes")
            driver.shutdown()
            # A rank that runs a server keeps it until all groups have received their last answers.
            self.client.await_all("the last answers of an optimizer's servers", self.config.step_deadline_s)
        self._end(driver)
        self.agent.send(messages.Unregister(driver.number))

    @torch.inference_mode(False)
    def _fetch_state(self, driver: StepDriver, does: str) -> None:
        """Get the state of an optimizer that ends, if it is not here: all ranks have met, and keep it until then.

        A rank that cannot get it goes on to where the others wait for it.

        Args:
            driver: The optimizer's driver.
            does: What the rank does, for the log.
        """
        try:
            if driver.state_is_remote and not driver.dropped:
                driver.refresh_state()
        except Exception as error:  # The others wait all the same; a failure of the job is raised there.
            logger.error("rank %d %s with the optimizer state it has: %s", self.rank, does, error)

    def _end(self, driver: StepDriver) -> None:
        """Release an optimizer that no rank waits for any more."""
        self.drivers.pop(driver.number, None)
        self.asked.forget(driver.number)
        self._had_dropped |= driver.dropped
        self._had_mixed |= driver.engine.agreement.mixed
        driver.stop()
        self.services.forget(driver.number)
        _close_log(driver, ended=True)

    def note_step(self, number: int) -> None:
        """Note that the calling thread, which is the one that trains, has collected the gradients of a step.

        Args:
            number: Number of the optimizer.
        """
        self.steps_ended += 1
        self._meetings.note_training_thread()
        program_end.note_step()
        first = self._first_driver
        self.loops.note_step(number, number if first is None else first.number)

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer, or was one that was dropped; ranks learn of a drop at different times."""
        return bool(self.drivers) or self._had_dropped

    @property
    def mixed(self) -> bool:
        """Whether ranks may be at different steps; all of them learn this after the same step."""
        return self._had_mixed or any(driver.engine.agreement.mixed for driver in list(self.drivers.values()))

    # ---- the training thread is inactive ------------------------------------------------------------------------

    @contextlib.contextmanager
    def inactive(self, reason: str, *, out_of_data: bool = True) -> Iterator[None]:
        """Deliver no gradients inside the block, and tell the other ranks so that they do not wait for this one.

        Args:
            reason: For the log.
            out_of_data: Whether there is no data to train on for now. False inside a collective of the user's.
        """
        with self._meetings.inactive(reason, out_of_data=out_of_data):
            yield

    @contextlib.contextmanager
    def meeting(
        self,
        reason: str,
        *,
        out_of_data: bool = False,
        if_true: Callable[[], bool] = lambda: True,
        in_pass: bool = False,
    ) -> Iterator[None]:
        """Meet all ranks, inactive: inside the block all replicas are equal, at the furthest step.

        Collective. Ranks in the middle of a step take part and keep their state. Inside another inactive block, and in
        threads that do not train, it is the same as `inactive`.

        Args:
            reason: For the log.
            out_of_data: As for `inactive`.
            if_true: Called first, inactive; the ranks meet only if it returns True, which it does on all ranks or none.
            in_pass: Whether the program may be between forward and backward; then ranks that are keep theirs, too.

        Raises:
            DeadlineError: Not all ranks came, or they did not reach one step, within `step_deadline_s`.
        """
        deadline_s = self.config.step_deadline_s
        with self._meetings.meeting(reason, deadline_s, out_of_data=out_of_data, if_true=if_true, in_pass=in_pass):
            yield

    @property
    def meets(self) -> bool:
        """Whether `meeting` would meet now."""
        return self._meetings.meets

    def join(self) -> int:
        """Wait, inactive, until all ranks have no more data, and meet them; see `Joined`. Return the last to join.

        Raises:
            DeadlineError: Not all ranks came, nor was a step made, within `step_deadline_s`.
            StarError: Another rank is in a collective that needs this rank's data.
        """
        last = -1

        def all_joined() -> bool:
            nonlocal last
            last = self.joined.wait(self.world_size, self.config.step_deadline_s)
            return True

        with self.meeting("join", out_of_data=True, if_true=all_joined):
            return last

    def leave_servers(self, reason: str, driver: StepDriver) -> None:
        """Leave the servers of an optimizer, whose state is about to be loaded, together with the other ranks.

        Collective: the other ranks load it, too, or are in a meeting.

        Raises:
            DeadlineError: Not all ranks came within `step_deadline_s`, or the mode did not end.
        """
        self._meetings.leave_servers(reason, driver, self.config.step_deadline_s)

    def in_training_thread(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return self._meetings.in_training_thread()

    # ---- steps of micro-batches ---------------------------------------------------------------------------------

    @property
    def inside_step(self) -> bool:
        """Whether the training thread has given some micro-batches of a step, but not all."""
        return self.in_hand is not None and any(driver.mid_step() for driver in self.drivers.values())

    def end_step_of_parts(self) -> None:
        """Called by the loader when the loop asks for the first micro-batch of its next step."""
        task, self.behind_step = self.behind_step, None
        if task is not None:
            task()

    # ---- looking after the job -----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def finish_steps(self) -> None:
        """Wait for the ends of overlapped steps."""
        for driver in list(self.drivers.values()):
            driver.finish_step()

    @torch.inference_mode(False)
    def catch_up(self) -> None:
        """Bring the parameters of all optimizers up to date; only outside forward and backward."""
        for driver in self.drivers.values():
            driver.catch_up()

    def note_input(self, input_s: float, load_s: float = 0.0) -> None:
        """Note the input of a batch.

        Args:
            input_s: How long the training thread waited for it.
            load_s: Least time in which this rank can load it beside its other work, 0 if unknown.
        """
        for driver in self.drivers.values():
            driver.timer.add_input(input_s, load_s)

    def _feeds(self, loader: int) -> None:
        """A loader was found to feed the training, -1 for none: shares are for its batches, and reports count them."""
        for driver in self.drivers.values():  # Each from its own step of the loader's first gradient.
            driver.reporter.feeds(loader, max(0, driver.steps - (SURE - 1)))
        if self.rank == 0:
            self.agent.send(Feeds(loader, max(0, self._first_step() - (SURE - 1))))

    def _mixes(self, loader: int) -> None:
        """Gradients were found to be of another loader's batches too."""
        if self.rank == 0:
            self.agent.send(Feeds(loader, max(0, self._first_step()), mixed=True))

    def weigh(self, count: float) -> None:
        """Note that the loss of the current batch, or micro-batch, is a mean over `count` items."""
        if self.in_hand is not None:
            self.in_hand.weigh(count)
        else:
            self.feeding.weigh(count / (self.reference_samples or 1.0))

    def steps_made(self) -> int:
        """Return the step of this rank's parameters, for the first optimizer; -1 without one."""
        driver = self._first_driver
        return -1 if driver is None else driver.steps

    def own_steps(self) -> int:
        """Return the number of steps that the first optimizer has made on this rank, one in progress included."""
        driver = self._first_driver
        return 0 if driver is None else driver.engine.own.steps

    def lacking(self, own: int) -> float:
        """See `Consumption.by`."""
        driver = self._first_driver
        if driver is None:
            return -1
        return math.inf if own >= driver.engine.own.steps else driver.local.lacking(own)

    def batch_begins(self) -> tuple[int, int]:
        """Return what `Consumption` notes of a batch that begins now: the step of this rank's contribution, and `own`.

        While an averaging is in flight that is the next one's, which will contain the batch. `own` is -1 unless this
        rank makes its steps without the others: with servers, with a parent, or by itself.
        """
        driver = self._first_driver
        active = None if driver is None else driver.active_mode
        if driver is None or active is None:
            return self.steps_made(), -1
        return driver.steps + (active is driver.local and driver.local.in_flight), driver.engine.own.steps

    @property
    def _first_driver(self) -> StepDriver | None:
        return next((driver for driver in list(self.drivers.values()) if not driver.dropped), None)

    def steps_begun(self) -> list[int]:
        """Return, for each optimizer in use, the first step that this rank has not wholly submitted."""
        return [driver.engine.next_step for driver in list(self.drivers.values()) if not driver.dropped]

    def await_devices(self) -> None:
        """Wait until the devices have finished the kernels queued by the training thread, which calls this.

        Raises:
            DeadlineError: They have not finished within `step_deadline_s`.
        """
        for driver in list(self.drivers.values()):
            driver.engine.streams.await_host(self.config.step_deadline_s)

    def batch_delivered(self, loader: int, index: int) -> bool:
        """Note a batch handed to the training loop; return whether it is the first one since batch sizes differ."""
        sizes = self.client.batch_sizes(loader)
        sizes.delivered(index)
        first = sizes.uneven and not self._had_shares
        self._had_shares |= first
        return first

    def _first_step(self) -> int:
        """Return the step of the first optimizer in use, by which a loader's batches are counted."""
        driver = self._first_driver
        return 0 if driver is None else driver.steps

    def _most_samples(self, loader: int) -> int:
        """Return the maximum samples in a batch of a loader, see `MemoryLimits`; 0 if unknown."""
        fed, largest = self.feeding.loader, round(self.feeding.largest * self.reference_samples)
        buckets = [bucket for driver in list(self.drivers.values()) for bucket in driver.engine.applier.buckets]
        return self.memory.most(loader, fed, largest, buckets[0].flat.device if buckets else None)

    def most_in_pass(self, loader: int, batch: int) -> int:
        """Return the maximum samples in a pass over micro-batches of a loader.

        That is `Config.max_batch` if set, else two batches on a CPU, else what fits in memory, but at least a batch.

        Args:
            loader: Number of the loader.
            batch: Samples of a rank in a step, as given by the user.
        """
        if self.config.max_batch:
            return self.config.max_batch
        buckets = [bucket for driver in list(self.drivers.values()) for bucket in driver.engine.applier.buckets]
        if buckets and all(bucket.flat.device.type == "cpu" for bucket in buckets):
            return LONGEST * batch
        return max(batch, self._most_samples(loader))

    def raise_failure(self) -> None:
        """Raise what stopped one of this process's engines or threads, if anything did.

        An engine's own failure came before the thread's, or it would have that: it may name the lost rank, from which
        an elastic job recovers.
        """
        failures = [driver.failure for driver in self.drivers.values()]
        own = [failure for failure in failures if failure is not None and failure is not self.thread_failure]
        if own:
            raise own[0]
        if self.thread_failure is not None:
            raise self.thread_failure

    def _raise_what_ends_waits(self) -> None:
        """Raise what makes a wait for other ranks pointless; outside collectives Horovod does not notice dead ranks."""
        self.raise_failure()
        unheard = time.monotonic() - self.agent.last_heard_s > self.config.absent_after_s
        self._departures.check((0,) if unheard and self.rank else ())

    def _raise_what_ends_loops(self) -> None:
        """Raise what makes a wait of a loop over `shard` pointless; that it cannot go on, once.

        A program that catches the error goes on elsewhere, and its later waits are others. The thread that reported the
        wait has to hear of it, not one that asks for something else meanwhile.
        """
        self._raise_what_ends_waits()
        if self._deadlock and self.program_waits.in_its_thread:
            reason, self._deadlock = self._deadlock, ""
            raise StarError(reason)

    def _thread_died(self, name: str, error: Exception) -> None:
        """Make the training thread raise the error that ended a critical thread of this process."""
        self.thread_failure = _kind_of_failure(error)(
            f"rank {self.rank} cannot go on: its thread {name} ended by {type(error).__name__}: {error}"
        )
        for driver in list(self.drivers.values()):
            driver.engine.fail(self.thread_failure)
            if driver.active_mode is not None:
                driver.active_mode.wake()

    def diagnose(self) -> str:
        """Return a sentence on which ranks give no sign of life. Waits a moment so that silence becomes noticeable."""
        time.sleep(2.5 * self.config.heartbeat_s)
        silent_for_s = 2.0 * self.config.heartbeat_s
        if self.coordinator is None:
            silent_s = time.monotonic() - self.agent.last_heard_s
            if silent_s > silent_for_s:
                return f"rank 0 has given no sign of life for {silent_s:.1f} s"
            return "rank 0 is alive; its log names the rank that is gone"
        with self.coordinator.job_state() as job:
            silence_s = job.silent_for_s(time.monotonic())
        gone = [f"rank {r} ({s:.1f} s)" for r, s in enumerate(silence_s) if s > silent_for_s]
        sentence = f"no sign of life from {', '.join(gone)}" if gone else "all ranks still give signs of life"
        logger.error("a collective failed: %s", sentence)
        return sentence

    # ---- end ------------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether it has been stopped: Horovod was shut down, or this rank's world is gone."""
        return self._stopped

    def stop(self, *, drain: bool, longest_s: float | None = None) -> None:
        """Stop the threads and close the sockets.

        Args:
            drain: First wait until all ranks have finished; until then the helpers contribute for this rank.
            longest_s: For so long at most; `Config.shutdown_deadline_s` if None.
        """
        if self._stopped or os.getpid() != self._pid:
            return
        if drain and not any(d.failure for d in self.drivers.values()):
            try:
                self.finish_steps()
            except Exception as error:  # Whatever stopped a step, threads and sockets still have to be closed.
                logger.error("rank %d leaves with the parameters it has: %s", self.rank, error)
        self._stopped = True
        self._unwatch_threads()
        limit_s, finished = self.config.shutdown_deadline_s, False
        after_error = longest_s is not None and longest_s < limit_s
        limit_s = limit_s if longest_s is None else longest_s
        if drain and self.trains and not self._has_failed():
            try:
                finished = self._drain(limit_s)
            except Exception as error:  # As above; servers may confirm nothing any more, for example.
                logger.error("rank %d leaves with the parameters it has: %s", self.rank, error)
        for driver in self.drivers.values():
            driver.stop()
            _close_log(driver, ended=drain, failed=after_error and not finished)
        if drain and self.rank == 0 and self._next_optimizer_id:
            check_curves(self._curves)
        if hasattr(self, "services"):  # `start` may have failed halfway.
            self.services.stop()
        self._machine.stop(0.5)
        for name in ("agent", "tensors"):
            if hasattr(self, name):
                getattr(self, name).stop()
        if self.coordinator is not None:
            self.coordinator.stop()
        self.keyring.close()
        if self._folder is not None:
            self._folder.close()
        warn_after()

    def _has_failed(self) -> bool:
        """Whether an engine has failed, which is logged: the program, if it has ended, raises it no more."""
        failure = next((driver.failure for driver in self.drivers.values() if driver.failure is not None), None)
        if failure is not None:
            logger.error("rank %d leaves without waiting for the others: %s", self.rank, failure)
        return failure is not None

    def _drain(self, longest_s: float) -> bool:
        """Wait until all ranks have finished; return whether they have.

        Raises:
            RankLostError: A rank has left the job without finishing.
        """
        self._meetings.finished()
        self.agent.send(messages.Finished(self.rank))
        wait = WaitTime(what="all ranks to finish", lasts=True)
        while not self._bye.wait(0.2):
            if self._has_failed():
                return False
            if wait.count() > longest_s:
                logger.error(
                    "rank %d leaves although other ranks still train: they took longer than %g s after its end",
                    self.rank,
                    longest_s,
                )
                return False
            unheard = time.monotonic() - self.agent.last_heard_s > self.config.lost_after_s
            if unheard and self.agent.coordinator_ended:
                logger.error("rank %d leaves without waiting for the others: the coordinator has ended", self.rank)
                return False
            # A rank that is only silent may come back, and would fail if this one left: it shuts Horovod down.
            self._raise_what_ends_waits()
        # Parameters and state read after `shutdown` are those of the last step, the same on every rank. To get them, a
        # rank on a slow link may need as long as for a step.
        self._meetings.meet("shutdown", self.config.step_deadline_s, out_of_data=True)
        self._fetch_states()
        return True

    def _fetch_states(self) -> None:
        """Get the states that are not here, and wait until all ranks have theirs; other ranks take them from this one.

        When the program has ended nothing reads them, and only the other ranks are waited for.
        """
        for driver in [] if program_end.ended() else list(self.drivers.values()):
            self._fetch_state(driver, "leaves")
        for driver in list(self.drivers.values()):  # The first rank to go on shuts Horovod down, for all.
            driver.engine.ended = True
        self._meetings.meet("shutdown", self.config.step_deadline_s, out_of_data=True)

    # ---- agent thread ---------------------------------------------------------------------------------------

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, _FOR_A_DRIVER):
            driver = self.drivers.get(message.optimizer_id)
            if driver is not None:
                driver.on_message(message)
        elif isinstance(message, _FOR_CLIENT):
            self.client.on_message(message)
        elif isinstance(message, (JoinedRanks, ProgramCollective)):
            self.joined.on_message(message)
        elif isinstance(message, messages.ReportImmediately):
            for driver in list(self.drivers.values()):
                driver.reporter.immediately = message.now
        elif isinstance(message, messages.StepWaits):
            if self.rank in message.ranks:
                thread, step, waited_s = self._meetings.training_thread, message.step, message.waited_s
                self._whereabouts.log(thread, rank=self.rank, step=step, waited_s=waited_s)
        elif isinstance(message, messages.StateSource):
            self._sources.put(message)
        elif isinstance(message, (MakeSet, DropSet, WarmServers, Servers, ServerRestarted, Presence, Probe)):
            if isinstance(message, Presence):
                self._departures.note(message.rank, message.present)
            self.services.on_message(message)
        elif isinstance(message, Deadlock):
            self._deadlock = message.reason
        elif isinstance(message, messages.Bye):
            self._bye.set()

    # ---- what other ranks ask for -----------------------------------------------------------------------------

    def _snapshot(self, optimizer_id: int, state_too: bool, min_step: int) -> Snapshot | None:
        driver = self.drivers.get(optimizer_id)
        return None if driver is None else driver.snapshot(min_step, state_too=state_too)

    def _accept_late(self, optimizer_id: int, rank: int, version: int, body: bytearray) -> int:
        if optimizer_id == PROBE:
            return 0
        driver = self.drivers.get(optimizer_id)
        if driver is None:
            raise ChannelError(f"a late gradient of rank {rank} is for optimizer {optimizer_id}, which is not here")
        return driver.accept_late(rank, version, body)

    def _most_late_bytes(self, optimizer_id: int) -> int:
        if optimizer_id == PROBE:
            return MAX_PROBE_BYTES
        driver = self.drivers.get(optimizer_id)
        buckets = driver.engine.applier.buckets if driver is not None else []
        size = sum((bucket.numel + 1) * bucket.flat.element_size() for bucket in buckets)
        return size + weights_size_bytes(len(buckets))


def _kind_of_failure(error: Exception) -> type[StarError | RankLostError]:
    """Return as what the end of a thread is raised; an elastic job recovers from all but a plain `StarError`."""
    if isinstance(error, HorovodInternalError):
        return RankLostError
    if isinstance(error, DeadlineError):
        return DeadlineError
    return ChannelError if isinstance(error, (ChannelError, OSError, zmq.ZMQError)) else StarError


def _shared_folder(*, wanted: bool) -> PrivateFolder | None:
    """Return a folder for this rank's Unix sockets; None, on all ranks, if not all reach each other's. Collective.

    Args:
        wanted: Whether this rank should use one. If the user set addresses, of network namespaces for example, ranks of
            one host use these instead.
    """
    folder = PrivateFolder.if_possible()
    own = wanted and folder is not None, "" if folder is None else str(folder.path)
    folders = allgather_object(own, name="star.folders")
    # In containers, ranks may share a host's name and address but no files.
    reached = all(each and PrivateFolder.is_own(path) for each, path in folders)
    if all(allgather_object(reached, name="star.reached")):
        return folder
    if folder is not None:
        folder.close()
    return None


def _close_log(driver: StepDriver, *, ended: bool, failed: bool = False) -> None:
    """Close an optimizer's log; one that has not `ended` goes on in a new world, with a log of its own."""
    log = driver.reporter.log
    if log is not None:
        failed = failed or program_end.failed() or driver.engine.failure is not None
        log.close("FAILED" if failed else "FINISHED" if ended else "KILLED")


_hooks_installed = False


def _install_exit_hooks() -> None:
    """Run `shutdown` before Horovod's own exit handler, which would end the other ranks' steps."""
    global _hooks_installed
    program_end.watch()
    leave_before_horovod()
    if not _hooks_installed:
        _hooks_installed = True
        os.register_at_fork(after_in_child=_forget_parent)


def leave_before_horovod() -> None:
    """Have `shutdown` called before the exit handler that Horovod registers at every initialization."""
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def _forget_parent() -> None:
    """Forget the runtime in a forked child: its threads, sockets and servers remain the parent's."""
    global _current
    _current = None
    program_end.forget()
    atexit.unregister(mpi_ops._basics.shutdown)  # Horovod would wait forever for a thread that the child lacks.
