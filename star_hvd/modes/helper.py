"""The helper thread of one optimizer: does what its engine has to do without the training thread.

It looks for work whenever the engine wakes it, and polls a step it has claimed until that ends. Once the user has
dropped the optimizer it contributes for the training thread permanently, tells the coordinator where this rank is, and
ends when all ranks have dropped it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from star_hvd.channel.messages.base import OptimizerDropped, Send
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Helper"]

_IDLE_S = 1.0  # Longest wait for work.
_SLICE_S = 0.02  # Longest wait for a reduction without looking whether to stop.
_POLL_DROPPED_S = 0.02  # Slower: only other ranks wait for a step of an optimizer that was dropped here.


class Helper:
    """The helper thread; see the module docstring.

    Args:
        number: Number of the optimizer, equal on all ranks.
        send: Sends a control message to the coordinator.
        step_deadline_s: Longest time that a step may be in flight.
        leave: Ends what the training thread has in progress; called once, in this thread, after the optimizer was
            dropped.

    Attributes:
        dropped: Whether the user holds no reference to the optimizer any more.
    """

    _engine: StepEngine

    def __init__(self, number: int, send: Send, step_deadline_s: float, leave: Callable[[], None]) -> None:
        self.dropped = False
        self._number = number
        self._send = send
        self._step_deadline_s = step_deadline_s
        self._leave = leave
        self._stop = threading.Event()
        self._carries_on = False  # Whether it has replaced the training thread permanently.
        self._sent: tuple[int, bool, bool] | None = None  # This rank's position as last sent to the coordinator.
        self._thread = threading.Thread(target=self._run, name=f"star-helper-{number}", daemon=True)

    def start(self, engine: StepEngine) -> None:
        """Start the thread."""
        self._engine = engine
        self._thread.start()

    def stop(self, engine: StepEngine, deadline_s: float) -> None:
        """End the thread and wait for it; wake threads that wait for `engine`."""
        self._stop.set()
        with engine.lock:
            engine.lock.notify_all()
            engine.helper_wake.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)

    def end(self) -> None:
        """End the thread without waiting for it, since all ranks have dropped the optimizer."""
        self._stop.set()
        with self._engine.lock:
            self._engine.helper_wake.notify_all()

    @property
    def ended(self) -> bool:
        """Whether the thread has been told to end."""
        return self._stop.is_set()

    def drop(self) -> None:
        """See `StepDriver.drop`."""
        self.dropped = True
        if self._engine.lock.acquire(blocking=False):
            try:
                self._engine.helper_wake.notify_all()
            finally:
                self._engine.lock.release()

    def _run(self) -> None:
        with self._engine.streams.own():
            self._run_until_stopped()

    def _run_until_stopped(self) -> None:
        engine = self._engine
        in_flight: WaitTime | None = None
        while not self._stop.is_set():
            try:
                with engine.lock:
                    engine.helper_wake.wait_for(self._has_work, timeout=_IDLE_S)
                if self.dropped:
                    self._carry_on()
                if engine.failure is not None:
                    continue
                if engine.helper_tick() or not engine.must_poll():
                    in_flight = None
                    continue
                if not engine.helper_owns():
                    in_flight = None  # It waits for a device, to which the training thread's deadline applies.
                in_flight = in_flight or WaitTime(_IDLE_S, self._in_flight)
                if in_flight.count() > self._step_deadline_s:
                    raise DeadlineError(
                        f"{self._in_flight()} did not end within "
                        f"{self._step_deadline_s:g} s; see the log of rank 0 for the rank that is missing"
                    )
                if self.dropped:
                    time.sleep(_POLL_DROPPED_S)
                else:
                    engine.await_helpers_step(_SLICE_S)
            except BaseException as error:  # The training thread raises it, since a helper has no caller.
                engine.fail(error, unseen=not self._stop.is_set())
                if engine.ended:
                    return

    def _in_flight(self) -> str:
        return f"step {self._engine.next_step - 1}, closed without this rank,"

    def _has_work(self) -> bool:
        return self._stop.is_set() or (self.dropped and not self._carries_on) or self._engine.helper_has_work()

    def _carry_on(self) -> None:
        """Contribute for the training thread from now on, and keep the coordinator informed of this rank's position."""
        if not self._carries_on:
            self._carries_on = True
            self._leave()
        state = self._engine.under_way()
        if state != self._sent:
            self._sent = state
            self._send(OptimizerDropped(self._number, *state))
