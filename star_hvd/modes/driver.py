"""Run a `StepEngine`: the training thread's waits, and changes of mode between two steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from scheduler.plan.mode_names import crossing
from scheduler.records import Plan
from star_hvd.channel.late_push import take_weights
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages.base import Send
from star_hvd.channel.messages.switch import Commit, PlanActive, Prepared, PrepareFailed, Restart
from star_hvd.compression.pushes import unpack
from star_hvd.config import Config
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.collective import wait_all
from star_hvd.engine.meeting import Position
from star_hvd.engine.records import Result, Snapshot
from star_hvd.engine.state_source import StateSource
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError, RankLostError, StarError
from star_hvd.modes.arriving import Gates
from star_hvd.modes.helper import Helper
from star_hvd.modes.loaded_values import LoadedValues
from star_hvd.modes.local_sgd import LocalSteps
from star_hvd.modes.mode_switcher import ModeSwitcher, Services, Steps
from star_hvd.modes.own_work import OwnWork
from star_hvd.modes.phase import Phase
from star_hvd.modes.ps_worker import ServerSteps
from star_hvd.modes.step_reporter import StepReporter
from star_hvd.modes.subgroup_child import ChildSteps
from star_hvd.telemetry.step_timeline import StepTimeline
from star_hvd.telemetry.timer import StepTimer
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["StepDriver"]

logger = logging.getLogger("star_hvd")

_POLL_S = 0.0003
_CATCH_UP_S = 1.0  # Longest wait for the helper without another look at what is missing.
_MODES_BEHIND = 16  # Far more modes than a rank can be behind by: none starts before this rank has prepared for it.


class Overlapped(Protocol):
    """Steps that end after `step()` has returned."""

    @property
    def pending(self) -> bool:
        """Whether one is in progress."""
        ...

    def finish(self) -> None:
        """Wait until it has ended."""
        ...

    def describe(self) -> str:
        """Describe what was decided about them; empty if nothing was."""
        ...

    def stop(self) -> None:
        """End: no further step follows, and one in progress is not completed."""
        ...


class StepDriver:
    """Drives one optimizer's engine and its helper thread.

    Args:
        number: Number of the optimizer, equal on all ranks.
        config: Settings.
        send: Sends a control message to the coordinator.
        ranks: The other ranks as a source of state.
        diagnose: Names the lost ranks in a sentence; called after a collective failed.
        preparer: Runs preparations for a plan in a thread of their own.

    Attributes:
        reporter: Reports the optimizer's steps; the engine's listener.
        gates: Gates in front of the parameters, if the wrapper has any.
        mid_step: Returns whether the user is between backward and the end of `step()`, where nothing may be changed.
        mid_pass: Returns whether a forward pass has begun since the last step, whose graph may need the parameters.
        forget_parts: Discards the gradients of micro-batches whose step the loop has abandoned.
        forget_writes: Called after a broadcast: what it wrote to the parameters is not the program's own change.
        has_parts: Returns whether gradients of micro-batches are accumulated for a step that was not made.
        whole_only: Returns why a batch cannot be repeated in parts, empty if it can.
        hold_gradients: Prepares for the repetition; returns the parameters that keep the batch's gradient.
        equal_batches: Why batches that differ between ranks are refused, empty if they are not.
        others: Returns whether the program has other optimizers on this rank.
        auto: Whether the coordinator chooses the mode.
        makes_room: Whether the program makes another optimizer now: servers are left that are not possible beside it.
        overlapped: Its overlapped steps, if it has any.
        asks_overlap: Whether the program asks for them.
        no_overlap: Why it cannot have any, whether or not they were asked for; empty if nothing is known against them.
        loaded: What the program has loaded into the parameters.
        loads_state: Whether the program loads or broadcasts this optimizer's state now.
        broadcasts: Whether it broadcasts parameters or a state now.
        on_stop: Functions called when it ends.
        timeline: Samples when buckets travel and how long the training thread waits for them.
    """

    def __init__(
        self,
        number: int,
        config: Config,
        send: Send,
        ranks: StateSource,
        diagnose: Callable[[], str],
        preparer: Callable[[Callable[[], None]], None],
    ) -> None:
        self.number = number
        self.reporter = StepReporter(number, send, self._on_switch)
        self.timer = StepTimer()
        self.timeline = StepTimeline()
        self.timeline.on_sample = self.reporter.log_sample
        self.gates: Gates | None = None
        self._send = send
        self._config = config
        self.ranks = ranks
        self._diagnose = diagnose
        self._preparer = preparer
        self.mid_step: Callable[[], bool] = lambda: False
        self.mid_pass: Callable[[], bool] = lambda: False
        self.forget_parts: Callable[[], None] = lambda: None
        self.forget_writes: Callable[[], None] = lambda: None
        self.has_parts: Callable[[], bool] = lambda: False
        self.whole_only: Callable[[], str] = lambda: ""
        self.hold_gradients: Callable[[], frozenset[torch.nn.Parameter]] = frozenset
        self.overlapped: Overlapped | None = None
        self.asks_overlap, self.no_overlap = False, ""
        self.on_stop: list[Callable[[], None]] = []
        self._loss = self._arrived_s = math.nan
        self._phase = Phase(config.grace_fraction)
        self._own_work = OwnWork(self.timer, self.reporter, config.step_deadline_s)
        self.equal_batches = ""
        self.others: Callable[[], bool] = lambda: False
        self.auto = self.makes_room = False
        self.loads_state = self.broadcasts = False
        self._helper = Helper(number, send, config.step_deadline_s, self._leave)
        self.engine: StepEngine
        self.loaded: LoadedValues
        self.switcher: ModeSwitcher
        self.local: LocalSteps

    def start(self, engine: StepEngine, services: Services) -> None:
        """Take charge of an engine and start its helper."""
        self.engine = engine
        self.reporter.start(engine)
        self.loaded = LoadedValues(engine, self._program_wrote)
        self.local = engine.averaging = LocalSteps(engine, self._await_own, background=self._config.background)
        self.switcher = ModeSwitcher(
            self.number,
            engine,
            services,
            report=self._report_prepared,
            unsupported=self._report_unsupported,
            ranks=self.ranks,
            local=self.local.begin,
            later=self._preparer,
            deadline_s=self._config.control_deadline_s,
            push_deadline_s=self._config.step_deadline_s,
        )
        self._helper.start(engine)

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the helper, and count gradients that never got into a step as dropped."""
        self.engine.ended = True
        self._helper.stop(self.engine, deadline_s)
        active = self.active_mode
        if active is not None and active is not self.local:
            # This closes connections. `local` has none, and would wait for an averaging in flight in vain, since the
            # helper that completes it has ended.
            active.exit()
        if self.overlapped is not None:
            self.overlapped.stop()
        for stop in self.on_stop:
            stop()
        self.engine.drop_pending()
        self.timer.close()

    # ---- an optimizer that was dropped -----------------------------------------------------------------------

    def drop(self) -> None:
        """The user holds no reference to the optimizer any more; called by the garbage collector, in any thread.

        The helper does the rest within its longest sleep, or at once if the engine's lock is free.
        """
        self._helper.drop()

    @property
    def dropped(self) -> bool:
        """Whether the user holds no reference to the optimizer any more."""
        return self._helper.dropped

    @property
    def over(self) -> bool:
        """Whether all ranks have dropped the optimizer, so that nothing waits for its helper."""
        return self.dropped and self._helper.ended

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine; None if the program has dropped the optimizer."""
        return None if self.dropped else self.engine.failure

    def _leave(self) -> None:
        """End the training thread's part, since it makes no further step. Called in the helper's thread."""
        self.finish_step()  # The program may still use the parameters.
        self.engine.drop()
        self.switcher.set_inactive(True)
        self.switcher.confirm_inactive()

    # ---- training thread ------------------------------------------------------------------------------------

    def give(self, bucket: Bucket) -> None:
        """Handle a bucket whose gradients are in its buffer, or will be once the work queued on its device is done.

        On a GPU backward returns long before its kernels end. A relaxed step must not claim a gradient that does
        not exist yet, since no rank can leave a reduction once it is enqueued; so a fence marks when it is complete.
        In `sync` Horovod itself waits for the device on the stream, as always.
        """
        if self.timeline.sampling:
            self.timeline.look()
            self.timeline.ready(bucket.index)
        queued = self.engine.streams.queues(bucket.flat)
        if queued:
            fence = self._own_work.gradient_queued(self.engine.streams, bucket.flat)
        active = self.active_mode
        if active is not None:
            active.give(bucket)
        elif queued and self.engine.plan.relaxed:
            self.engine.defer(bucket.index, fence)
        else:
            self.engine.gradient_ready(bucket.index)

    @property
    def active_mode(self) -> Steps | None:
        """What makes this rank's steps if its gradients are not reduced with those of all members, else None."""
        return self.switcher.active_mode

    def arrive(self, *, manual: bool) -> bool:
        """Contribute this rank's gradient. Return whether it is in the step; if so, `complete` has to follow."""
        with self.named_failures():
            self._await_deferred()
            self._loss, step = self.engine.own.loss, self.engine.step
            if self.overlapped is not None:
                now_s = time.monotonic()
                self.engine.own.interval_s, self._arrived_s = now_s - self._arrived_s, now_s
            self.reporter.begin_timing()
            self._own_work.look()
            if self.engine.arrive(manual=manual):
                return True
            self._own_work.look(wait=True)
            self.reporter.log_step(step, self._loss, 0.0, late=True)
            return False

    def complete(self) -> Result:
        """Wait for the mean of the step that contains this rank's gradient."""
        with self.named_failures():
            self._await_own()
            self._own_work.look(wait=True)
            if self.engine.streams.devices:
                self.engine.wire.computed(self._own_work.since_done_s)
            result = self.engine.finish_own()
        self.reporter.wait_s = self._own_work.since_done_s
        self.reporter.log_step(result.step, self._loss, self.reporter.wait_s, late=False)
        return result

    def begin_overlapped(self) -> None:
        """Called instead of `complete`: the program continues with the work of its next step."""
        self._own_work.look(wait=True)
        self._start_clocks("overlap")

    def end_overlapped(self, step: int, wait_s: float) -> None:
        """Note that a step that overlapped the program has ended.

        Args:
            step: Its number.
            wait_s: How long the program waited for it in total.
        """
        self.reporter.wait_s = wait_s
        self.reporter.log_step(step, self._loss, wait_s, late=False)
        if not self.dropped:
            with self.named_failures():
                self._change_mode()
        self.engine.replica.reuse_buckets()

    def finish_step(self) -> None:
        """Wait for an overlapped step to end, before anything else is done."""
        if self.overlapped is not None:
            self.overlapped.finish()

    @property
    def steps(self) -> int:
        """Steps the program has made, including one in progress."""
        return self.engine.step + (self.overlapped is not None and self.overlapped.pending)

    def _await_deferred(self) -> None:
        wait = WaitTime(what=lambda: f"the device to finish the gradient of step {self.engine.step}")
        with self.engine.streams.own():  # On the program's, a complete bucket would wait for the rest of backward.
            while not self.engine.flush_deferred():
                if wait.count() > self._config.step_deadline_s:
                    raise DeadlineError(
                        f"the device did not finish the gradient of step {self.engine.step} within "
                        f"{self._config.step_deadline_s:g} s; a kernel hangs, or other processes have the device"
                    )
                time.sleep(_POLL_S)
        self.engine.replica.reuse_buckets()  # The program may change gradients before `_start_step`.

    def _await_own(self) -> None:
        handles, buckets = self.engine.own_step().all_handles(), len(self.engine.applier.buckets)
        what, look = f"the reduction of step {self.engine.step}", self._own_work.look if self.reporter.timing else None
        if not self.timeline.sampling:
            wait_all(self.engine.collective, handles, self._config.step_deadline_s, what, look)
            return
        wait = WaitTime(what=what)
        for index, handle in enumerate(handles):  # Buckets first, then the header and state.
            began_s = time.monotonic()
            deadline_s = self._config.step_deadline_s
            wait_all(self.engine.collective, [handle], deadline_s, what, self._look_while_sampling, wait)
            self.timeline.waited(index if index < buckets else -1, began_s)

    def _look_while_sampling(self) -> bool:
        self.timeline.look()
        self._own_work.look()
        return True

    def step_in_mode(self, *, skip: bool) -> Any:
        """Make a whole step in the active mode; see the `Steps` classes."""
        active = self.active_mode
        assert active is not None
        with self.named_failures():
            self.reporter.begin_timing()
            self._own_work.look(wait=True)
            loss = self.engine.own.loss  # Read now: an averaging sends and clears it.
            logged = self.reporter.steps_logged
            began_s = time.monotonic()
            value = active.step(skip=skip)
            # The coordinator hears of local steps at averagings, the log of each. The log alone also gets a gradient
            # that came after its servers' mode had ended and is folded into a step of the next mode.
            if self.reporter.steps_logged != logged and self.reporter.wait_s:
                # Waits of the forward pass, which `wait_s` contains, are noted where they happen.
                self.timeline.waited(-1, max(began_s, time.monotonic() - self.reporter.wait_s))
            if self.reporter.steps_logged == logged:
                self.reporter.log_step(self.engine.step, loss, 0.0, late=active is not self.local)
            self._change_mode()
        self._start_step()
        return value

    def catch_up(self) -> None:
        """Bring the parameters up to date where all ranks meet, e.g. at the end of an epoch.

        Not where they are behind and the program has others in their place: it will put those of an earlier step back.
        """
        if self.dropped or self._cannot_catch_up:
            return
        self.finish_step()
        for _ in range(_MODES_BEHIND):
            active = self.active_mode
            if active is None:
                self.end_of_step(was_late=False)
            else:
                with self.named_failures():
                    active.catch_up()
                    self._change_mode()
            if self.active_mode is active:  # Else the mode ended meanwhile, and the newest state is in the next one.
                break
        self._start_step()

    @property
    def makes_local_steps(self) -> bool:
        """Whether this rank is in `local`."""
        return isinstance(self.active_mode, LocalSteps)

    @property
    def _swapped(self) -> bool:
        """Whether the program has swapped in other weights in a mode that leaves them alone (`SwapDetector`)."""
        engine, active = self.engine, self.active_mode
        here = active is None and engine.agreement.mixed and engine.replica.state.in_common_steps
        return (here or self.makes_local_steps) and not self.broadcasts and engine.replica.left_alone

    @property
    def _cannot_catch_up(self) -> bool:
        """Whether the parameters are outdated while the program has swapped in, or loaded, other weights."""
        engine, active = self.engine, self.active_mode
        if isinstance(active, ServerSteps):
            return active.program_wrote()
        local = self.makes_local_steps  # There parameters are outdated wherever ranks meet.
        if (active is not None and not local) or not engine.agreement.mixed:
            return False
        with engine.lock:
            behind = local or not engine.replica.is_whole or engine.step != engine.next_step
        return behind and not self.broadcasts and engine.replica.left_alone

    def _program_wrote(self) -> bool:
        """Whether the program has written to the parameters since the last step, or since they were received."""
        active = self.active_mode
        return active.program_wrote() if isinstance(active, ServerSteps) else self.engine.replica.loaded

    @property
    def at_servers(self) -> bool:
        """Whether servers hold the parameters and the state, or have done so and this rank has yet to leave them."""
        return self.state_is_elsewhere or isinstance(self.active_mode, ServerSteps)

    def position(self) -> Position:
        """Return where this rank is, for a meeting of all ranks."""
        engine, active = self.engine, self.active_mode
        within, wrote, at_servers = self.mid_step(), self._program_wrote(), self.at_servers
        mid_step = within or self._cannot_catch_up
        values = engine.applier.checksum() if wrote and not within else -1
        crosses = self.makes_room and bool(crossing(engine.plan, auto=self.auto))
        with engine.lock:
            local = engine.plan.mode == "local"
            reduced = engine.taking_part and not local  # Else other ranks know which step is the newest.
            # A child may hold what was the newest step a moment ago; the members' positions show whether it still is.
            follows = isinstance(active, ChildSteps) and active.holds_step
            whole = engine.replica.is_whole if reduced or local else True
            if active is not None or not reduced:
                whole = whole and active is not None and not active.over
            return Position(
                rank=engine.rank,
                optimizer=self.number,
                step=engine.step,
                next_step=engine.next_step,
                whole=whole and not self.local.waiting,
                out_of_common_steps=not follows and (active is not None or not reduced),
                mid_step=mid_step,
                manual_step=-1 if engine.unreported_manual is None else engine.unreported_manual,
                at_servers=at_servers,
                values=values,
                leaves=at_servers and not within and (self.loads_state or (self.broadcasts and wrote) or crosses),
            )

    def refresh_state(self) -> None:
        """Get the newest parameters and optimizer state that this rank can get without all ranks, for a checkpoint.

        In `local` they are this rank's own, since the next averaging needs all ranks. While the program has swapped in
        other weights, which it will replace by the parameters of the present step, state stays that of this step, too.
        In the middle of a step no step of the others is applied, and no mode is changed.
        """
        if self._swapped:  # Though this rank is not behind: a step may end at any moment.
            return
        within = self.mid_step()
        for _ in range(_MODES_BEHIND):
            active = self.active_mode
            if within and (active is None or active.over):
                break
            if active is None:
                self.end_of_step(was_late=False)  # Steps may have ended since this rank's own, during an evaluation.
                if self.active_mode is None:
                    break
                continue
            with self.named_failures():
                active.refresh_state()
                if within or not active.over:
                    break
                self._change_mode()  # The mode ended meanwhile, and with it the requested state.

    def state_loaded(self) -> None:
        """The program has loaded the optimizer's state, and loads parameters before or behind this.

        Gradients of the former parameters that wait for a step are dropped.
        """
        if self.reporter.log is not None:
            self.reporter.log.state_loaded()
        self.engine.replica.set_aside(state_loaded=True)
        self.engine.drop_pending()
        active = self.active_mode
        if isinstance(active, ChildSteps):
            active.discard()

    def accept_late(self, rank: int, version: int, body: bytearray) -> int:
        """Take over a gradient of a rank outside the subgroup; return the first step whose parameters will contain it.

        Called in the tensor server's thread.
        """
        weights = take_weights(body, len(self.engine.applier.buckets))
        parts = unpack(body, self.engine.applier.buckets)
        with self.engine.streams.own():
            buckets = self.engine.applier.buckets
            flats = [part.to(bucket.flat.device) for part, bucket in zip(parts, buckets, strict=True)]
            return self.engine.keep_late(flats, version, taken_over=True, weights=weights)

    def snapshot(self, min_step: int, *, state_too: bool) -> Snapshot | None:
        """Return the state for another rank that asks, on the host; None if there is none since `min_step` here now.

        Called in the tensor server's thread.
        """
        if self.engine.inactive and not state_too:
            min_step = 0  # A child continues with this state: nothing newer comes while no rank trains.
        with self.engine.streams.own():
            snapshot = self.engine.replica.snapshot(min_step, state_too=state_too)
            # Here, where the device is done with it: outside, a copy would queue behind the training thread's kernels.
            return None if snapshot is None else snapshot.on_host()

    @property
    def state_is_elsewhere(self) -> bool:
        """Whether servers hold the optimizer's state, so that loading one here would have no effect."""
        return self.engine.plan.family in ("ps", "grouped")

    @property
    def state_is_remote(self) -> bool:
        """Whether servers or the members of a subgroup make the steps, so that the optimizer's state here is old."""
        return self.active_mode is not None and not self.makes_local_steps

    def bring_state_home(self) -> None:
        """Leave servers and fetch the state from them, on all ranks alike; afterwards the plan is `sync`.

        What the program has loaded into the parameters stays there.

        Raises:
            DeadlineError: The mode did not end in time.
        """
        loaded = self.loaded.copy()
        if self.engine.rank == 0:
            self._send(Restart(self.number))
        wait = WaitTime(what=self._end_of_mode)
        with self.named_failures():
            while self.state_is_elsewhere or self.active_mode is not None:
                if wait.count() > self._config.control_deadline_s:
                    raise DeadlineError(
                        f"{self.engine.plan.label} did not end within {self._config.control_deadline_s:g} s; "
                        "a state is loaded on all ranks alike, or on one rank that broadcasts it"
                    )
                time.sleep(_POLL_S)
                if not self.state_is_elsewhere:
                    if self.active_mode is not None:
                        self.active_mode.drain()
                    self._change_mode()
            if loaded is not None and self.engine.replica.state.needs_fetch:
                self._catch_up()  # Now, since it would replace what is written next.
        self.loaded.write(loaded)

    def leave_local(self) -> None:
        """Leave `local`, on all ranks alike, before the program goes on: it has made another optimizer.

        The coordinator, which knows of that one, has `sync` follow. It comes into force at the end of an averaging, and
        ranks make these here, where none of them can be in a step of the other optimizer.

        Raises:
            DeadlineError: The mode did not end in time.
        """
        wait = WaitTime(what=self._end_of_mode)
        with self.named_failures():
            while self.engine.plan.mode == "local" or self.makes_local_steps:
                if wait.count() > self._config.control_deadline_s:
                    raise DeadlineError(
                        f"{self.engine.plan.label} did not end within {self._config.control_deadline_s:g} s for "
                        "another optimizer; create optimizers on all ranks alike, best before the first step"
                    )
                self._change_mode()
                if self.makes_local_steps:
                    self.local.catch_up()
                    self._change_mode()
                time.sleep(_POLL_S)

    def _end_of_mode(self) -> str:
        return f"the end of {self.engine.plan.label}"

    def set_inactive(self, inactive: bool) -> None:
        """Note that the training thread, which calls this, leaves or re-enters its loop. Does not wait for others."""
        if self.dropped:
            return  # It never returns to this optimizer.
        self.engine.set_inactive(inactive)
        self.switcher.set_inactive(inactive)

    def confirm_inactive(self) -> None:
        """Wait until servers know that the training thread is inactive, and thus end steps without it."""
        if not self.dropped:
            self.switcher.confirm_inactive()

    def shutdown(self) -> None:
        """End the modes: all ranks are inactive and will make no further step of this optimizer."""
        self.switcher.shutdown()

    def _change_mode(self, *, show_mean: bool = False) -> None:
        """At the end of a step: leave a mode that has ended, get the state, enter the mode in force.

        Args:
            show_mean: See `Replica.catch_up`.
        """
        for _ in range(_MODES_BEHIND):
            self.switcher.leave()
            self.local.take_over(show_mean=show_mean)
            if self.switcher.needs_state:
                self._catch_up(show_mean=show_mean)
            self.switcher.enter()
            if not self.switcher.must_drain:  # Else a mode was skipped meanwhile in which others wait for this rank.
                break

    def end_of_step(self, *, was_late: bool) -> None:
        """Bring the parameters up to date after a step, waiting for a step in flight, and follow a change of mode.

        Args:
            was_late: Whether this rank's gradient missed its step. If the rank is only out of phase, not slow, it
                waits here once for the next step to end, so that it starts together with the others again.
        """
        with self.named_failures():
            self._change_mode(show_mean=was_late)
            if was_late and self.active_mode is None and self._phase.is_out(self.reporter.times.compute_s):
                ended = self.engine.next_step
                self._wait_until(lambda: self.engine.next_step > ended, 1.5 * self._phase.typical_s)
                if not self.engine.needs_fetch:  # Else others may apply that step only after this rank has arrived.
                    self._change_mode(show_mean=True)
        if was_late:
            self.engine.note_joined()
        self._start_step()

    def _start_step(self) -> None:
        """Start the rank's own work, whose kernels may write into the buckets."""
        self.engine.replica.reuse_buckets()
        self._start_clocks()

    def _start_clocks(self, means: str = "") -> None:
        self.timer.start()
        if not self.timeline.due(self.steps):
            return
        plan, active = self.engine.plan, self.active_mode
        if not means and plan.in_background(self._config.background):
            means = "background"
        whole = active is not self.local or self.local.just_averaged
        self.timeline.start(self.steps, plan.label, means, whole=whole)

    def _catch_up(self, *, show_mean: bool = False) -> None:
        engine = self.engine
        target = engine.next_step
        wait = WaitTime(_CATCH_UP_S, lambda: f"the end of the steps up to {target}, this rank being at {engine.step}")
        while not engine.catch_up(target, show_mean=show_mean):
            if wait.count() > self._config.step_deadline_s:
                raise DeadlineError(
                    f"steps up to {target} did not end within {self._config.step_deadline_s:g} s on a rank at "
                    f"step {engine.step}; see the log of rank 0 for the rank that is missing"
                )
            if not self.switcher.needs_state:
                return  # A plan without this rank came into force; its missing state comes from elsewhere.
            if engine.needs_fetch:
                snapshot = self.switcher.state_for(self.number)
                wait.count_work()  # It has a deadline of its own.
                if snapshot is not None and not engine.adopt(snapshot):
                    time.sleep(_POLL_S)
            else:
                self._wait_until(lambda: not engine.helper_owns(), _CATCH_UP_S)

    def _wait_until(self, done: Callable[[], bool], limit_s: float) -> None:
        with self.engine.lock:
            self.engine.lock.wait_for(lambda: done() or self.engine.failure is not None, limit_s)

    # ---- agent thread ---------------------------------------------------------------------------------------

    def on_message(self, message: messages.Message) -> None:
        """Handle a message of the coordinator about this optimizer."""
        if isinstance(message, messages.OptimizerOver):
            self._helper.end()
        elif isinstance(message, messages.CloseStep):
            self._phase.closed(message.typical_compute_s)
            self.engine.close(message.step)
        elif isinstance(message, messages.PlanMessage):
            self._offer(Plan.from_dict(message.plan), message.active)
        elif isinstance(message, Commit):
            self.switcher.commit(message.plan_id)
            if self.others():  # One may have been made just now, before this raised the flag.
                self.refuse_crossing()
        elif isinstance(message, PlanActive):
            self.switcher.announce(message.plan_id, message.step)
        elif isinstance(message, messages.Abandon):
            self.switcher.abandon(message.plan_id)

    def _offer(self, plan: Plan, active: int) -> None:
        unsuited = self.engine.unsuited(plan)
        if unsuited is None and self.others():
            unsuited = crossing(plan, auto=self.auto) or None
        if unsuited is not None:
            self._report_prepared(plan, unsuited)
            return
        self.switcher.offer(plan, active)
        if self.others():  # Another one may have been made just now, by the training thread.
            self.refuse_crossing()

    def refuse_crossing(self) -> None:
        """Take back this rank's consent to a coming plan that is not possible beside another optimizer, made now."""
        with self.engine.lock:
            prepared = self.engine.agreement.prepared
        if prepared is not None and crossing(prepared, auto=self.auto):
            self.switcher.abandon(prepared.plan_id)

    def _report_prepared(self, plan: Plan, reason: str | None) -> None:
        if reason is None:
            self._send(Prepared(self.number, plan.plan_id))
        elif pinned := self.engine.agreement.pinned:
            self._report_unsupported(plan, pinned)  # It stays so; `reason` may be one that passes.
        else:
            self._send(PrepareFailed(self.number, plan.plan_id, reason))

    def _report_unsupported(self, plan: Plan, reason: str) -> None:
        self._send(messages.ModeUnsupported(self.number, plan.plan_id, reason))

    def pin(self, reason: str, *, equal_batches: bool = False) -> None:
        """Reduce in lockstep like Horovod from now on.

        Args:
            reason: Why.
            equal_batches: Whether it also forbids batches, or numbers of micro-batches, that differ between ranks.
        """
        agreement, narrower = self.engine.agreement, equal_batches and not self.equal_batches
        if agreement.pinned is None or narrower:
            prepared = agreement.prepared  # Pinning clears it.
            self.equal_batches = reason if narrower else self.equal_batches
            agreement.pin(agreement.pinned or reason)
            refused = prepared.plan_id if prepared else self.engine.plan.plan_id
            self._send(messages.ModeUnsupported(self.number, refused, reason, equal_batches))

    # ---- inside ---------------------------------------------------------------------------------------------

    def _on_switch(self, plan: Plan) -> None:
        """Called under the engine's lock."""
        self.switcher.taken_up(plan)

    def named_failures(self) -> _NamedFailures:
        """Return a context in which the failure of a collective names the lost rank."""
        return _NamedFailures(self)


class _NamedFailures:
    """Turns the failure of a collective into one that names the lost rank."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, (RankLostError, StarError)):
            return
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(error, HorovodInternalError):
            named = RankLostError(f"{error}; {self._driver._diagnose()}")
            self._driver.engine.fail(named)
            raise named from error
