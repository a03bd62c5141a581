"""Inactive periods of the training thread, and meetings, after which all replicas are equal.

`Inactivity` lets the other ranks continue without this one; `star_hvd/engine/meeting.py` decides when a meeting is
over. `Meetings` is what the training thread does in between: gather positions, catch up, and gather again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from star_hvd.channel.messages.base import Away, Message
from star_hvd.engine.meeting import Position, gather_positions, leaving_servers, settled, unsettled_text
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_lock
from star_hvd.modes.driver import StepDriver
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Inactivity", "Meetings"]

_POLL_S = 0.002


class Pausable(Protocol):
    """The part of `star_hvd.modes.driver.StepDriver` that `Inactivity` uses."""

    def set_inactive(self, inactive: bool) -> None: ...
    def confirm_inactive(self) -> None: ...


class Inactivity:
    """Periods in which the training thread delivers no gradients: at the end of its data, or in a user's collective.

    They may be nested, and any thread may start one, which the same thread ends. Engines, servers and the coordinator
    hear only of the outermost period, of its start and its end in this order. Servers confirm the start, so that when a
    rank leaves the user's collective they wait for no rank that is still inside; this rank waits for the confirmation
    outside the lock.

    Args:
        drivers: Drivers of all optimizers, by number; filled by others.
        send: Sends a message to the coordinator.
    """

    def __init__(self, drivers: Mapping[int, Pausable], send: Callable[[Message], None]) -> None:
        self._drivers = drivers
        self._send = send
        self._lock = ordered_lock("Inactivity._lock")
        self._depth = 0  # Of all threads.
        self._of_thread = threading.local()

    # Ranks that decide whether to meet must not depend on what other threads of theirs do just then.

    @property
    def inside(self) -> bool:
        """Whether a period of the calling thread is in progress."""
        return self._own_depth > 0

    @property
    def nested(self) -> bool:
        """Whether a period of the calling thread is inside another of its own."""
        return self._own_depth > 1

    @property
    def _own_depth(self) -> int:
        return getattr(self._of_thread, "depth", 0)

    @contextlib.contextmanager
    def during(self, reason: str, *, out_of_data: bool) -> Iterator[None]:
        """Make the block a period of inactivity."""
        try:
            self.enter(reason, out_of_data=out_of_data)
            yield
        finally:
            self.leave(reason)

    def enter(self, reason: str, *, out_of_data: bool) -> None:
        """Start a period; the caller must end it with `leave` even if this raises.

        Raises:
            DeadlineError: The servers did not confirm it.
        """
        self._of_thread.depth = self._own_depth + 1
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
            if outermost:
                self._tell(True, out_of_data, reason)
        if outermost:
            for driver in list(self._drivers.values()):
                driver.confirm_inactive()

    def leave(self, reason: str) -> None:
        """End a period."""
        self._of_thread.depth = self._own_depth - 1
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._tell(False, False, reason)

    def _tell(self, inactive: bool, out_of_data: bool, reason: str) -> None:
        """Notify engines, servers and coordinator; called under the lock, which keeps the order. Never waits."""
        for driver in list(self._drivers.values()):
            driver.set_inactive(inactive)
        if self._drivers:
            self._send(Away(inactive, out_of_data, reason))


class Meetings:
    """Meetings of all ranks. The thread that creates it counts as the training thread until another one makes a step.

    Args:
        drivers: Drivers of all optimizers, by number; filled by others.
        send: Sends a message to the coordinator.
        check: Raises what stopped this process's engines or threads, if anything did.
    """

    def __init__(
        self, drivers: Mapping[int, StepDriver], send: Callable[[Message], None], check: Callable[[], None]
    ) -> None:
        self._drivers = drivers
        self._check = check
        self._inactivity = Inactivity(drivers, send)
        self._training_thread = threading.current_thread()

    def note_training_thread(self) -> None:
        """Note that the calling thread is the one that trains."""
        self._training_thread = threading.current_thread()

    @property
    def training_thread(self) -> threading.Thread:
        """The thread that trains."""
        return self._training_thread

    def in_training_thread(self) -> bool:
        """Whether the calling thread trains; the main thread counts too once the training thread has ended."""
        caller, trains = threading.current_thread(), self._training_thread
        return caller is trains or (caller is threading.main_thread() and not trains.is_alive())

    @property
    def meets(self) -> bool:
        """Whether `meeting` would meet, and not only be inactive."""
        return not self._inactivity.inside and self.in_training_thread()

    @contextlib.contextmanager
    def inactive(self, reason: str, *, out_of_data: bool) -> Iterator[None]:
        """See `Runtime.inactive`."""
        for driver in list(self._drivers.values()):
            driver.finish_step()
        began_s = time.monotonic()
        try:
            with self._inactivity.during(reason, out_of_data=out_of_data):
                yield
        finally:
            for driver in self._drivers.values():
                driver.timer.add_outside(time.monotonic() - began_s)

    @contextlib.contextmanager
    def meeting(
        self,
        reason: str,
        deadline_s: float,
        *,
        out_of_data: bool,
        if_true: Callable[[], bool] = lambda: True,
        in_pass: bool = False,
    ) -> Iterator[None]:
        """See `Runtime.meeting`."""
        with self.inactive(reason, out_of_data=out_of_data):
            if if_true() and not self._inactivity.nested and self.in_training_thread():
                # The others are in it too, and will leave it: who is inactive again after catching up has data.
                self.meet(reason, deadline_s, out_of_data=False, in_pass=in_pass)
            yield

    def finished(self) -> None:
        """Make the training thread inactive from now on."""
        self._inactivity.enter("finished", out_of_data=True)

    @torch.inference_mode(False)  # The program may be in it to evaluate; tensors made in it could not be changed later.
    def meet(self, reason: str, deadline_s: float, *, out_of_data: bool, in_pass: bool = False) -> None:
        """Wait, inactive, until all ranks are at one step, catching up with them.

        Args:
            reason: What they meet for, for the log.
            deadline_s: Longest wait.
            out_of_data: Whether the rank has no data to train on for now.
            in_pass: Whether the program may be between forward and backward, see `Runtime.meeting`.

        Raises:
            DeadlineError: They did not reach it in time.
        """
        found: list[Position] = []
        all_ranks = f"all ranks to come to {reason}"

        def awaited() -> str:
            return f"all ranks to get to one step at {reason}: {unsettled_text(found)}" if found else all_ranks

        wait, asked = WaitTime(what=awaited, lasts=True), False
        check = self._counting(wait)

        while True:
            # A dropped optimizer has no reference left, and its helper may already have ended on some ranks.
            own = self._left_out_together(self._positions(in_pass=in_pass))
            wait.count_work()
            found = gather_positions(own, check, deadline_s, reason)
            leaving = leaving_servers(found)
            if leaving:
                self._leave_servers(leaving, reason, out_of_data=out_of_data)
            elif settled(found, asked=asked):
                return
            for position in found:
                if position.manual_step >= 0 and position.optimizer in self._drivers:
                    self._drivers[position.optimizer].engine.note_manual(position.manual_step)
            if wait.passed_s > deadline_s:
                raise DeadlineError(
                    f"ranks did not get to one step within {deadline_s:g} s at {reason}: {unsettled_text(found)}; see "
                    "the logs of those behind, or raise Config.step_deadline_s"
                )
            if leaving:
                continue
            if asked:
                time.sleep(_POLL_S)  # Wait for something in flight: the end of a step, or the message about it.
            self._catch_up(own, reason, out_of_data=out_of_data)
            asked = True

    def _counting(self, wait: WaitTime) -> Callable[[], None]:
        """Return what to call during a wait."""

        def check() -> None:
            wait.count()
            self._check()

        return check

    def _positions(self, *, in_pass: bool = False) -> list[Position]:
        """Return where this rank is; with `in_pass`, what a forward pass has used must not be changed either."""
        found = []
        for driver in [driver for driver in list(self._drivers.values()) if not driver.dropped]:
            position = driver.position()
            if in_pass and not driver.broadcasts and driver.mid_pass():  # A broadcast of parameters changes them.
                position = dataclasses.replace(position, mid_step=True)
            found.append(position)
        return found

    def _left_out_together(self, own: list[Position]) -> list[Position]:
        """If nothing of an optimizer may be changed, this rank stays inactive: helpers then average for the others."""
        if not any(position.mid_step for position in own):
            return own
        return [
            dataclasses.replace(each, mid_step=each.mid_step or self._drivers[each.optimizer].makes_local_steps)
            for each in own
        ]

    @torch.inference_mode(False)
    def leave_servers(self, reason: str, driver: StepDriver, deadline_s: float) -> None:
        """See `Runtime.leave_servers`."""
        with self.inactive(reason, out_of_data=False):
            driver.loads_state = True
            try:
                check = self._counting(WaitTime(what=f"all ranks to come to {reason}", lasts=True))
                found = gather_positions(self._positions(), check, deadline_s, reason)
                self._leave_servers(leaving_servers(found), reason, out_of_data=False)
            finally:
                driver.loads_state = False

    def _leave_servers(self, numbers: list[int], reason: str, *, out_of_data: bool) -> None:
        """Leave the servers of these optimizers, active: no rank makes a step meanwhile."""
        self._inactivity.leave(reason)
        try:
            for driver in (self._drivers[number] for number in numbers if number in self._drivers):
                if not driver.dropped:
                    driver.bring_state_home()
        finally:
            self._inactivity.enter(reason, out_of_data=out_of_data)

    def _catch_up(self, own: list[Position], reason: str, *, out_of_data: bool) -> None:
        """Catch up, and be active meanwhile unless in the middle of a step: `local`, for one, averages active ranks."""
        stays_inactive = any(position.mid_step for position in own)
        if not stays_inactive:
            self._inactivity.leave(reason)
        try:
            for position in own:
                driver = self._drivers.get(position.optimizer)
                if driver is not None and not position.mid_step:
                    behind = not position.out_of_common_steps and position.step < position.next_step
                    driver.catch_up()
                    if behind and driver.active_mode is None:
                        driver.engine.note_joined()
        finally:
            if not stays_inactive:
                self._inactivity.enter(reason, out_of_data=out_of_data)
