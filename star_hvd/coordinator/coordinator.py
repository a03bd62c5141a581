"""The thread on rank 0 that feeds the ranks' messages and timeouts to `JobState` and sends its answers.

Messages survive broken connections (`channel.link`); heartbeats may be lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from scheduler.policy.cost_policy import Ranker
from star_hvd.channel.link import Router
from star_hvd.channel.messages.base import Heartbeat, decode, encode
from star_hvd.channel.reliable import CONTROL
from star_hvd.channel.wakeup import Wakeup
from star_hvd.config import Config
from star_hvd.coordinator.job_state import ALL, JobState
from star_hvd.errors import ChannelError
from star_hvd.locks import ordered_lock

__all__ = ["Coordinator"]

logger = logging.getLogger("star_hvd")

_PAUSED_S = 2.0  # Four times the longest poll: a longer gap means this process was stopped, not the ranks.


class Coordinator:
    """Owns the ROUTER that all agents are connected to.

    Args:
        router: Bound socket; used by the coordinator's thread alone from `start` on.
        world_size: Number of ranks.
        config: Settings.
        hosts: Address of every rank's host; if empty, all ranks are on one host.
        ranker: The predictor behind mode `auto`, None for the cost model.
    """

    def __init__(
        self,
        router: zmq.Socket[Any],
        world_size: int,
        config: Config,
        hosts: Sequence[str] = (),
        ranker: Ranker | None = None,
    ) -> None:
        self.malformed = 0
        self._router = Router(router, CONTROL, lambda name: name.isdigit() and int(name[:10]) < world_size, copy=True)
        self._names = [str(rank).encode() for rank in range(world_size)]
        self._config = config
        self._job = JobState(world_size, config, time.monotonic(), hosts, ranker)
        self._read_s = time.monotonic()  # When the clock was last read for the state.
        self._lock = ordered_lock("Coordinator._lock")
        self._stop = threading.Event()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="star-coordinator", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the thread and wait for it, at most `deadline_s` seconds."""
        self._stop.set()
        self._wakeup.end(self._thread, deadline_s)

    @property
    def repeated(self) -> int:
        """Control messages sent again after a connection broke."""
        return self._router.repeated

    @property
    def lost(self) -> int:
        """Messages for ranks that had exited or whose link was abandoned."""
        return self._router.lost

    @contextlib.contextmanager
    def job_state(self) -> Iterator[JobState]:
        """Yield the job's state, locked for reading from another thread."""
        with self._lock:
            yield self._job

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        next_beat_s, self._read_s = 0.0, time.monotonic()
        try:
            while not self._stop.is_set():
                # Drain the socket first: after a pause of this process, ranks must not be taken for silent.
                with self._lock:
                    self._receive()
                    while not self._router.drained:  # `receive` returns a limited number at a time.
                        self._receive()
                with self._lock:
                    now_s = self._now_s()
                    wake_s = min(self._job.tick(now_s), now_s + 0.5)
                    self._send_all()
                if now_s >= next_beat_s:
                    next_beat_s = now_s + self._config.heartbeat_s
                    self._beat()
                self._router.tick()
                wake_s = min(wake_s, self._router.next_s)
                poller.poll(max(0, math.ceil(1e3 * (wake_s - time.monotonic()))))
        except Exception:
            # Without a coordinator no step closes early: training goes on in lockstep.
            logger.exception("the coordinator failed; training goes on, but every step waits for all ranks from now on")
        finally:
            self._router.bye()
            self._router.socket.close(linger=1000)

    def _now_s(self) -> float:
        """Return the time, of which the state does not count a pause of this process; called under the lock."""
        now_s = time.monotonic()
        paused_s, self._read_s = now_s - self._read_s, now_s
        if paused_s > _PAUSED_S:
            self._job.paused(paused_s)
        return now_s

    def _receive(self) -> None:
        for frames in self._router.receive():
            try:
                if isinstance(frames, ChannelError):
                    raise frames
                if len(frames) != 2:
                    raise ChannelError(f"a control message has {len(frames)} frames; expected a rank and a message")
                self._job.handle(int(frames[0]), decode(frames[1]), self._now_s())
            except (ChannelError, ValueError) as error:
                self.malformed += 1
                logger.warning("dropped a control message: %s", error)

    def _send_all(self) -> None:
        outbox, self._job.outbox = self._job.outbox, []
        for destination, message in outbox:
            data = [encode(message)]
            ranks = range(self._job.world_size) if destination == ALL else (destination,)
            for rank in ranks:
                self._router.send(self._names[rank], data)

    def _beat(self) -> None:
        data = [encode(Heartbeat(0))]
        for name in self._names:
            self._router.note(name, data)
