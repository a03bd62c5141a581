"""The owner's side of a server: starts the process, supervises it, and restarts it after a death."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scheduler.plan.plan import Plan
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.locks import ordered_condition
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.ps.common.layout import Chunk, Layout
from star_hvd.ps.common.mirror import new_memory
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.common.pipe import Pipe, PipeFull
from star_hvd.ps.common.record import check_states, make_record
from star_hvd.ps.owner.forker_process import ForkedServer, ForkerProcess
from star_hvd.ps.owner.watchdog import Health, ServerWatchdog
from star_hvd.threads import supervised

__all__ = ["ServerProcess"]

logger = logging.getLogger("star_hvd")

Event = dict[str, Any]

_PACKAGES = str(Path(__file__).resolve().parents[3])

_THREADS = 1  # A server's compute threads: ranks train on the same host.
_CHECK_S = 0.25  # Interval of checks of the process.
_IDLE_S = 60.0
_STATUS_S = 1.0  # Longest wait for the end of a process that has closed its pipe.
_GONE = (errno.EPIPE, errno.ECONNRESET)  # Errors of a pipe whose other end has ended.
_KILL_S = 5.0  # A killed process is gone within this, unless the system itself hangs.


@dataclass
class _Opened:
    """The orders of one session, to be resent to a restarted server."""

    message: dict[str, Any]
    layout: Layout
    memory: int | None
    seed: Snapshot | None = None
    cut: int | None = None
    members: dict[int, str] = field(default_factory=dict)


def _search_path() -> list[str]:
    """Return where servers look for modules: as this program does, but the current folder behind our own.

    It is the empty entry with `python -c`, and a user's `scheduler.py` there would replace ours.
    """
    found = [*(path for path in sys.path if path), _PACKAGES]
    if "" in sys.path:
        with contextlib.suppress(OSError):  # It was removed.
            found.append(os.getcwd())
    return found


class ServerProcess:
    """A parameter server that this rank owns. All methods may be called from any thread; only `start`, `ensure`,
    `recover` and `stop` block, with no lock held.

    A thread of this object starts the process, delivers its events and supervises it: a server that is frozen or hung
    is killed, which is reported as any other death. The kernel kills the process when the thread that started it ends.

    Args:
        rank: The owner, for messages.
        key: The job's keys.
        host: Address at which the other ranks reach this host, or a folder for a Unix socket.
        on_event: Called on the supervising thread with a mapping: `event` is `ready`, `seeded`, `update` (`version`,
            `ranks`, `staleness`, `gradients`, `damped`, `loss`) or `drop` (`ranks`, `reason`), both left out while the
            owner does not keep up, `refused` (`plan_id`, `reason`), `cut` (`plan_id`, final `version`), `failed`
            (`reason`) or `died` (`returncode`); all but `died` name `optimizer_id`, `session` and the shard's `index`
            if they concern one. It must not block.
        mirror: Whether the server's state outlives it; without it `recover` starts from the seed.
        faults: For tests: those of one start after the other, see `Shard`; the next is taken when a process starts.
    """

    def __init__(
        self,
        rank: int,
        key: JobKey,
        host: str,
        *,
        on_event: Callable[[Event], None] | None = None,
        mirror: bool = True,
        faults: Iterable[dict[str, Any]] = (),
    ) -> None:
        self._rank, self._key, self._host = rank, key, host
        self._on_event = on_event or (lambda event: None)
        self._mirror, self._faults = mirror, iter(faults)
        # Guards the following; never held during a blocking call.
        self._changed = ordered_condition("ServerProcess._changed")
        self._opened: dict[tuple[int, int], _Opened] = {}
        self._process: ForkedServer | None = None
        self._pipe: Pipe | None = None
        self._thread: threading.Thread | None = None
        self._wanted_s: float | None = None  # Deadline of a requested or running start.
        self._failure: DeadlineError | None = None
        self._stopping = False
        self._forker = ForkerProcess(self._environment)  # This and the following: used only by the thread.
        self._patience = 1.0
        self._owner = os.getpid()
        self.endpoint: Endpoint | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id, None before `start`."""
        process = self._process
        return process.pid if process is not None else None

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self, deadline_s: float) -> Endpoint:
        """Start the process and wait until it listens.

        Raises:
            DeadlineError: It does not listen within `deadline_s`.
            ChannelError: It runs already.
        """
        if self.alive:
            raise ChannelError(f"the parameter server of rank {self._rank} runs already; call ensure")
        return self.ensure(deadline_s)

    def recover(self, deadline_s: float) -> Endpoint:
        """Restart a process that died, at its last consistent version, and on the same port if that is free.

        The caller then calls `Client.replace` on all workers and, if this is shard 0, `replace` on the owners of the
        other shards.

        Raises:
            DeadlineError: It does not listen within `deadline_s`.
        """
        return self.ensure(deadline_s)

    def ensure(self, deadline_s: float) -> Endpoint:
        """Start the process unless it runs, with all its predecessor's orders, and wait until it listens.

        Raises:
            DeadlineError: It does not listen within `deadline_s`.
        """
        limit_s = time.monotonic() + deadline_s + _KILL_S  # The thread keeps the deadline; this is a backstop.
        with self._changed:
            if self._wanted_s is None and not self.alive:
                self._stopping, self._failure, self._wanted_s = False, None, deadline_s
                if self._thread is None or not self._thread.is_alive():
                    self._thread = supervised(self._own, "star-ps-owner")
                    self._thread.start()
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._wanted_s is None, max(0.0, limit_s - time.monotonic()))
            if self._failure is not None:
                raise self._failure
            if self._wanted_s is not None or self.endpoint is None:
                raise DeadlineError(
                    f"the parameter server of rank {self._rank} was not started within {deadline_s:g} s; its host may "
                    "lack processor time or memory"
                )
            return self.endpoint

    def stop(self, deadline_s: float = 5.0) -> None:
        """Stop the process; kill it after `deadline_s`. No effect in a forked child, which does not own it."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            process, pipe, thread = self._process, self._pipe, self._thread
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.send({"do": "stop"})
            for key in list(self._opened):
                self._release(key)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline_s)
            _kill(process)
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline_s)

    # ---- the owner's thread -------------------------------------------------------------------------------

    def _own(self) -> None:
        """Thread: start the process when requested and supervise it until it ends, repeatedly until `stop`."""
        while (deadline_s := self._await_order()) is not None:
            launched = self._launch(deadline_s)
            if launched is not None:
                self._watch(*launched)
        self._forker.stop()

    def _await_order(self) -> float | None:
        with self._changed:
            while self._wanted_s is None and not self._stopping:
                self._changed.wait(_IDLE_S)
            if self._stopping:
                self._failed("it was stopped", None)
                return None
            return self._wanted_s

    def _failed(self, why: str, cause: BaseException | None) -> None:
        """Under the lock: make the start that callers wait for fail."""
        if self._wanted_s is not None:
            self._failure = DeadlineError(
                f"the parameter server of rank {self._rank} could not be started: {why}; see its messages in "
                "that rank's output"
            )
            self._failure.__cause__ = cause
            self._wanted_s = None
            self._changed.notify_all()

    def _launch(self, deadline_s: float) -> tuple[ForkedServer, Pipe] | None:
        """Start a process and send it its predecessor's orders. Return None if it ends or does not listen in time."""
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                process, pipe = self._spawn(theirs, deadline_s), Pipe(mine)
        except Exception as error:  # No process could be started; callers wait, whatever the reason.
            mine.close()
            why = str(error) if isinstance(error, DeadlineError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._failed(why, error)
            return None
        try:
            endpoint = self._await_endpoint(process, pipe, deadline_s)
        except Exception as error:
            why = str(error) if isinstance(error, ChannelError) else self._why_silent(process, deadline_s)
            _kill(process)
            pipe.close()
            with self._changed:
                self._failed(why, error)
            return None
        with self._changed:
            self._process, self._pipe, self.endpoint = process, pipe, endpoint
            self._resend(endpoint)
            if self._stopping:  # `stop` has not seen this process.
                with contextlib.suppress(OSError):
                    pipe.send({"do": "stop"})
            self._wanted_s = None
            self._changed.notify_all()
        return process, pipe

    def _await_endpoint(self, process: ForkedServer, pipe: Pipe, deadline_s: float) -> Endpoint:
        """Configure a new process, and return where it listens; it is not waited for once it has ended."""
        pipe.send(self._configuration())
        # A process forked by the program may hold the pipe's other end, so its end may not show there.
        answer = pipe.wait(deadline_s, lambda: self._stopping or process.poll() is not None)
        if "endpoint" not in answer:
            raise ChannelError(str(answer.get("reason", answer)))
        return Endpoint.from_list(answer["endpoint"])

    def _why_silent(self, process: ForkedServer, deadline_s: float) -> str:
        """Return why a new process has not said where it listens."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if self._stopping else _STATUS_S)
            return f"its process ended with exit status {process.returncode}"
        return f"it did not listen within {deadline_s:g} s; this host may lack processor time or memory"

    def _configuration(self) -> dict[str, Any]:
        """Return a new process's first message."""
        return {
            "rank": self._rank,
            "key": self._key.for_server(),
            # The same address, so that peers which know the old one find the new process.
            "host": self._host if self.endpoint is None else self.endpoint.host,
            "port": self.endpoint.port if self.endpoint is not None else 0,
            "threads": _THREADS,
            "io_threads": 1,
            "path": _search_path(),
            "faults": next(self._faults, None),
        }

    def _spawn(self, end: socket.socket, deadline_s: float) -> ForkedServer:
        return self._forker.fork(end, deadline_s, lambda: self._stopping)

    def _environment(self) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
        found["OMP_NUM_THREADS"] = str(_THREADS)
        # Keep the memory of messages, which are allocated all the time: returning it costs page faults.
        found |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
        found["CUDA_VISIBLE_DEVICES"] = ""  # Servers compute in host memory.
        found["PYTHONPATH"] = os.pathsep.join(_search_path())
        return found

    def _resend(self, endpoint: Endpoint) -> None:
        """Under the lock: send a new process all orders of its predecessor."""
        for opened in self._opened.values():
            message = opened.message
            message["endpoints"][message["index"]] = endpoint.to_list()
            self._send({**message, "recover": True}, opened.memory)
            if opened.seed is not None:
                self._send_seed(opened)
            for rank, what in opened.members.items():
                self._send({**_named(message), "do": "member", "rank": rank, "what": what})
            if opened.cut is not None:
                self._send({**_named(message), "do": "cut", "plan_id": opened.cut})

    def _watch(self, process: ForkedServer, pipe: Pipe) -> None:
        """Deliver events until the process is gone, and kill it if it is frozen or hung."""
        watchdog = ServerWatchdog(process.pid, time.monotonic(), patience=self._patience)
        while True:
            if pipe.poll(_CHECK_S):
                watchdog.note_event()
                for event in pipe.receive():
                    if event is None:
                        self._ended(process, pipe)
                        return
                    self._handle(event)
            elif process.poll() is not None:  # A process forked by the program may hold the pipe's other end.
                self._ended(process, pipe)
                return
            if process.pid > 0 and not self._stopping:
                self._check(watchdog, process, pipe)

    def _check(self, watchdog: ServerWatchdog, process: ForkedServer, pipe: Pipe) -> None:
        now_s = time.monotonic()
        if watchdog.ping_due(now_s):
            with contextlib.suppress(OSError):
                pipe.send({"do": "ping"}, advisory=True)
        if watchdog.look(now_s) is Health.LOST and process.poll() is None:
            if not watchdog.stopped:  # It may only have been slow: give the next process more time.
                self._patience *= 2.0
            logger.error("the parameter server of rank %d is killed: %s", self._rank, watchdog.reason)
            process.kill()  # The pipe then reports its end.

    def _handle(self, event: Event) -> None:
        if event["event"] == "pong":
            return
        if event["event"] == "seeded" and self._mirror:
            with self._changed:
                opened = self._opened.get((event["optimizer_id"], event["session"]))
                if opened is not None:
                    opened.seed = None  # The mirror has it now.
        self._report(event)

    def _ended(self, process: ForkedServer, pipe: Pipe) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        _kill(process)
        pipe.close()
        with self._changed:
            if self._process is process:
                self._process = None  # Also if the system cannot end it yet: it no longer serves.
        if not self._stopping:
            self._report({"event": "died", "returncode": process.returncode})

    def _report(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the handler of a parameter server's event failed: %s", event)

    # ---- orders -------------------------------------------------------------------------------------------

    def open(
        self,
        optimizer_id: int,
        session: int,
        index: int,
        endpoints: Sequence[Endpoint],
        layout: Layout,
        plan: Plan,
        optimizer: OptimizerSpec,
        version: int,
    ) -> None:
        """Make this process shard `index` of an optimizer. Event `ready` follows, or `failed`.

        Args:
            optimizer_id: Number of the optimizer.
            session: Counted up each time the optimizer enters a mode with servers; all but the last two are closed.
            index: Which shard; 0 orders the updates.
            endpoints: Of all shards, in order.
            layout: The layout.
            plan: The active plan.
            optimizer: The user's optimizer.
            version: Version of the parameters that `seed` will bring.
        """
        message = {
            "do": "open",
            "optimizer_id": optimizer_id,
            "session": session,
            "index": index,
            "endpoints": [endpoint.to_list() for endpoint in endpoints],
            "layout": layout.to_dict(),
            "plan": plan.to_dict(),
            "spec": optimizer.to_dict(),
            "version": version,
            "mirror": self._mirror,
            "recover": False,
        }
        with self._changed:
            for key in sorted(key for key in self._opened if key[0] == optimizer_id)[:-1]:
                self._release(key)
            opened = _Opened(message, layout, new_memory() if self._mirror else None)
            self._opened[optimizer_id, session] = opened
            self._send(message, opened.memory)

    def seed(self, optimizer_id: int, session: int, snapshot: Snapshot) -> None:
        """Send the shard its part of the parameters and the optimizer state. Event `seeded` follows.

        The snapshot is kept until then, in case the server dies, and must not change.

        Raises:
            ChannelError: The state holds something that servers cannot keep.
        """
        check_states(snapshot.state)  # Here, for the caller; the messages are made later in the pipe's thread.
        with self._changed:
            opened = self._opened[optimizer_id, session]
            opened.seed = snapshot
            self._send_seed(opened)

    def _send_seed(self, opened: _Opened) -> None:
        assert opened.seed is not None
        for chunk in opened.layout.of_server(opened.message["index"]):
            head = {**_named(opened.message), "do": "seed", "chunk": chunk.index}
            self._send(functools.partial(_seed_message, head, opened.layout, opened.seed, chunk))

    def set_plan(self, optimizer_id: int, plan: Plan) -> None:
        """Continue under another plan with servers; used by shard 0. Event `refused` follows if its rule rejects it."""
        with self._changed:
            for opened in self._of(optimizer_id):
                opened.message["plan"] = plan.to_dict()
            self._send({"do": "plan", "optimizer_id": optimizer_id, "plan": plan.to_dict()})

    def cut(self, optimizer_id: int, plan_id: int) -> None:
        """Drain: shard 0 makes the last update and answers all pushes; event `cut` follows when all shards have it."""
        with self._changed:
            for opened in self._of(optimizer_id)[-1:]:
                opened.cut = plan_id
            self._send({"do": "cut", "optimizer_id": optimizer_id, "plan_id": plan_id})

    def member(self, optimizer_id: int, rank: int, what: str) -> None:
        """Report to shard 0 that a rank is `absent` or `present`.

        Raises:
            ValueError: `what` is something else.
        """
        if what not in ("absent", "present"):
            raise ValueError(f"the state of rank {rank} is {what!r}; expected absent or present")
        with self._changed:
            for opened in self._of(optimizer_id)[-1:]:
                opened.members[rank] = what
            self._send({"do": "member", "optimizer_id": optimizer_id, "rank": rank, "what": what})

    def replace(self, optimizer_id: int, session: int, index: int, endpoint: Endpoint) -> None:
        """Report another shard's new process, for one session: in others, that index may be another rank's shard."""
        with self._changed:
            opened = self._opened.get((optimizer_id, session))
            if opened is not None:
                opened.message["endpoints"][index] = endpoint.to_list()
                values = {**_named(opened.message), "do": "replace", "index": index, "endpoint": endpoint.to_list()}
                self._send(values)

    def close(self, optimizer_id: int, session: int) -> None:
        """Close an optimizer's shard."""
        with self._changed:
            if (optimizer_id, session) in self._opened:
                self._release((optimizer_id, session))
                self._send({"do": "close", "optimizer_id": optimizer_id, "session": session})

    def _release(self, key: tuple[int, int]) -> None:
        opened = self._opened.pop(key)
        if opened.memory is not None:
            os.close(opened.memory)

    def _of(self, optimizer_id: int) -> list[_Opened]:
        return [opened for (each, _), opened in sorted(self._opened.items()) if each == optimizer_id]

    def _send(self, message: Event | Callable[[], Event], descriptor: int | None = None) -> None:
        """Send an order; a server that is dead or still starting gets it from `_resend`.

        Raises:
            OSError: It could not be sent although the server is there, for want of descriptors for example.
        """
        if self._pipe is None:
            raise ChannelError(f"the parameter server of rank {self._rank} has not been started; call start")
        known = self._pipe.broken
        try:
            self._pipe.send(message, descriptor)
        except PipeFull as error:
            logger.error("the parameter server of rank %d is killed: %s", self._rank, error)
            if self._process is not None:
                self._process.kill()
        except OSError as error:
            if error is not known and error.errno not in _GONE:
                raise


def _named(message: Event) -> Event:
    return {"optimizer_id": message["optimizer_id"], "session": message["session"]}


def _seed_message(head: Event, layout: Layout, seed: Snapshot, chunk: Chunk) -> Event:
    """Return a chunk's first state as a message.

    It is cut out of the whole state here, when the pipe writes the message: what waits in the pipe takes no memory.
    """
    params, states = layout.cut_params(seed.params, chunk), layout.cut_state(seed.state, chunk)
    record = make_record(params, states, seed.step)
    data = bytearray(record.nbytes)
    record.write(torch.frombuffer(data, dtype=torch.uint8))
    return {**head, "data": data}


def _kill(process: ForkedServer) -> None:
    """Kill a process, if it still runs, and wait for its end."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
