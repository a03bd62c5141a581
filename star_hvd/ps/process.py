"""A server from its owner's side: a rank starts the process, watches it, and can start it again where it died."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scheduler.plans import Plan
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.execute.state import Snapshot
from star_hvd.ps.auth import Endpoint, JobKey
from star_hvd.ps.layout import Layout
from star_hvd.ps.mirror import new_memory
from star_hvd.ps.pipe import Pipe
from star_hvd.ps.store import OptimizerSpec, make_record

__all__ = ["ServerProcess"]

logger = logging.getLogger("star_hvd")

Event = dict[str, Any]


@dataclass
class _Opened:
    """What a server has to be told again after a death."""

    message: dict[str, Any]
    layout: Layout
    memory: int | None
    seed: Snapshot | None = None
    seeded: bool = False
    cut: int | None = None
    members: dict[int, str] = field(default_factory=dict)


class ServerProcess:
    """A parameter server that this rank owns. All methods may be called from any thread; none of them waits but
    `start`, `recover` and `stop`.

    Args:
        rank: The owner, for messages.
        key: The job's keys.
        host: Address under which the others reach this host, or a folder for a Unix socket.
        on_event: Called on the supervising thread with a mapping: `event` is `ready`, `seeded`, `update` (`version`,
            `ranks`, `staleness`, `gradients`, `damped`, `loss`), `drop` (`ranks`, `reason`), `refused` (a plan;
            `epoch`, `reason`), `cut` (`epoch`, final `version`), `failed` (`reason`) or `died` (`returncode`); all but
            `died` name `engine`, `session` and the shard's `index` where they concern one. It must only note and
            return.
        mirror: Whether the server's state outlives it; without it `recover` starts from the seed.
        threads: Threads a server computes with.
        faults: For tests, see `Shard`.
    """

    def __init__(
        self,
        rank: int,
        key: JobKey,
        host: str,
        *,
        on_event: Callable[[Event], None] | None = None,
        mirror: bool = True,
        threads: int = 1,
        faults: dict[str, Any] | None = None,
    ) -> None:
        self._rank, self._key, self._host = rank, key, host
        self._on_event = on_event or (lambda event: None)
        self._mirror, self._threads, self._faults = mirror, threads, faults
        self._lock = threading.RLock()
        self._opened: dict[tuple[int, int], _Opened] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.endpoint: Endpoint | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id, None before `start`."""
        return self._process.pid if self._process is not None else None

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self, deadline_s: float) -> Endpoint:
        """Start the process and wait until it listens.

        Raises:
            DeadlineError: It does not listen within `deadline_s`.
            ChannelError: It runs already.
        """
        with self._lock:
            if self.alive:
                raise ChannelError(f"the parameter server of rank {self._rank} runs already")
            self._stopping = False
            mine, theirs = socket.socketpair()
            with theirs:
                self._process = self._spawn(theirs)
            self._pipe = Pipe(mine)
            self.endpoint = self._greet(deadline_s)
            self._thread = threading.Thread(
                target=self._supervise, args=(self._process, self._pipe), name="star-ps-owner", daemon=True
            )
            self._thread.start()
            return self.endpoint

    def _spawn(self, end: socket.socket) -> subprocess.Popen[bytes]:
        # At the usual priority: at the lowest one a job of four ranks on two cores stalled more, not less.
        command = [sys.executable, "-m", "star_hvd.ps.server"]
        return subprocess.Popen(command, stdin=end.fileno(), env=self._environment())

    def _greet(self, deadline_s: float) -> Endpoint:
        assert self._pipe is not None
        config = {
            "rank": self._rank,
            "key": self._key.for_server(),
            "host": self._host,
            "port": self.endpoint.port if self.endpoint is not None else 0,
            "threads": self._threads,
            "io_threads": 1,
            "path": [path for path in sys.path if path],
            "faults": self._faults,
        }
        try:
            self._pipe.send(config)
            return Endpoint.from_list(self._pipe.wait(deadline_s)["endpoint"])
        except (DeadlineError, OSError) as error:
            code = self._process.poll() if self._process is not None else None
            self._kill()
            raise DeadlineError(
                f"the parameter server of rank {self._rank} did not listen within {deadline_s:g} s (exit code {code}); "
                "its messages are in the output of this rank"
            ) from error

    def _environment(self) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
        found["OMP_NUM_THREADS"] = str(self._threads)
        # Messages come and go all the time: do not give their memory back to the system and take page faults anew.
        found |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
        found["CUDA_VISIBLE_DEVICES"] = ""  # Servers compute in host memory.
        found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return found

    def recover(self, deadline_s: float) -> Endpoint:
        """Start a new process where the old one died, at its last whole version; on the same port if that is free.

        The caller then tells all clients (`Client.replace`) and, if this is shard 0, the owners of the other shards
        (`ServerProcess.replace`).

        Raises:
            DeadlineError: It does not listen within `deadline_s`.
            ChannelError: The old one still runs.
        """
        with self._lock:
            self._faults = None
            endpoint = self.start(deadline_s)
            for opened in self._opened.values():
                message = opened.message
                message["endpoints"][message["index"]] = endpoint.to_list()
                self._send({**message, "recover": True}, opened.memory)
                if opened.seed is not None:
                    self._send_seed(opened)
                for rank, what in opened.members.items():
                    self._send({**_named(message), "do": "member", "rank": rank, "what": what})
                if opened.cut is not None:
                    self._send({**_named(message), "do": "cut", "epoch": opened.cut})
            return endpoint

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the process: ask, then kill."""
        with self._lock:
            self._stopping = True
            with contextlib.suppress(OSError):
                if self._pipe is not None:
                    self._pipe.send({"do": "stop"})
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(deadline_s)
            self._kill()
            for opened in self._opened.values():
                if opened.memory is not None:
                    os.close(opened.memory)
            self._opened.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)

    def kill(self) -> None:
        """Kill the process as if by accident; for tests."""
        assert self._process is not None
        self._process.kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(5.0)

    # ---- orders -------------------------------------------------------------------------------------------

    def open(
        self,
        engine: int,
        session: int,
        index: int,
        endpoints: Sequence[Endpoint],
        layout: Layout,
        plan: Plan,
        optimizer: OptimizerSpec,
        version: int,
    ) -> None:
        """Make this process shard `index` of an optimizer. `ready` follows, or `failed`.

        Args:
            engine: Number of the optimizer.
            session: Counts up each time the optimizer enters a mode of servers; all but the last two are closed.
            index: Which shard; 0 orders the updates.
            endpoints: Of all shards, in order.
            layout: The layout.
            plan: The plan in force.
            optimizer: The user's optimizer.
            version: Version of the parameters that `seed` will bring.
        """
        message = {
            "do": "open",
            "engine": engine,
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
        with self._lock:
            for key in sorted(key for key in self._opened if key[0] == engine)[:-1]:
                self._release(key)
            opened = _Opened(message, layout, new_memory() if self._mirror else None)
            self._opened[engine, session] = opened
            self._send(message, opened.memory)

    def seed(self, engine: int, session: int, snapshot: Snapshot) -> None:
        """Give the shard its part of the parameters and the optimizer state. `seeded` follows.

        The snapshot is kept until then, in case the server dies, and must not change.
        """
        with self._lock:
            opened = self._opened[engine, session]
            opened.seed, opened.seeded = snapshot, False
            self._send_seed(opened)

    def _send_seed(self, opened: _Opened) -> None:
        assert opened.seed is not None
        for chunk in opened.layout.of_server(opened.message["index"]):
            params = opened.layout.cut_params(opened.seed.params, chunk)
            states = opened.layout.cut_state(opened.seed.state, chunk)
            record = make_record(params, states, opened.seed.version)
            data = bytearray(record.nbytes)
            record.write(torch.frombuffer(data, dtype=torch.uint8))
            self._send({**_named(opened.message), "do": "seed", "chunk": chunk.index, "data": data})

    def set_plan(self, engine: int, plan: Plan) -> None:
        """Go on under another plan of servers; matters on shard 0. `refused` follows if the rule does not take it."""
        with self._lock:
            for opened in self._of(engine):
                opened.message["plan"] = plan.to_dict()
            self._send({"do": "plan", "engine": engine, "plan": plan.to_dict()})

    def cut(self, engine: int, epoch: int) -> None:
        """End the mode: shard 0 makes the last update and answers everybody; `cut` follows when all shards have it."""
        with self._lock:
            for opened in self._of(engine)[-1:]:
                opened.cut = epoch
            self._send({"do": "cut", "engine": engine, "epoch": epoch})

    def member(self, engine: int, rank: int, what: str) -> None:
        """Tell shard 0 that a rank is `absent`, `present`, `lost` (its process died) or to `forget` (a new process
        has the rank and counts its steps anew).

        Raises:
            ValueError: Something else.
        """
        if what not in ("absent", "present", "lost", "forget"):
            raise ValueError(f"rank {rank} is said to be {what!r}; expected absent, present, lost or forget")
        with self._lock:
            for opened in self._of(engine)[-1:]:
                if what != "forget":
                    opened.members[rank] = what
            self._send({"do": "member", "engine": engine, "rank": rank, "what": what})

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """Another shard has a new process."""
        with self._lock:
            for opened in self._opened.values():
                opened.message["endpoints"][index] = endpoint.to_list()
                values = {**_named(opened.message), "do": "replace", "index": index, "endpoint": endpoint.to_list()}
                self._send(values)

    def close(self, engine: int, session: int) -> None:
        """Give an optimizer's shard up."""
        with self._lock:
            if (engine, session) in self._opened:
                self._release((engine, session))
                self._send({"do": "close", "engine": engine, "session": session})

    def _release(self, key: tuple[int, int]) -> None:
        opened = self._opened.pop(key)
        if opened.memory is not None:
            os.close(opened.memory)

    def _of(self, engine: int) -> list[_Opened]:
        return [opened for (each, _), opened in sorted(self._opened.items()) if each == engine]

    def _send(self, message: Event, descriptor: int | None = None) -> None:
        """Send an order; to a dead server it is told again by `recover`."""
        if self._pipe is None:
            raise ChannelError(f"the parameter server of rank {self._rank} has not been started")
        with contextlib.suppress(OSError):
            self._pipe.send(message, descriptor)

    # ---- events -------------------------------------------------------------------------------------------

    def _supervise(self, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        """Thread: pass events on until the process is gone."""
        while True:
            for event in pipe.receive():
                if event is None:
                    self._ended(process, pipe)
                    return
                if event["event"] == "seeded":
                    self._seeded(event["engine"], event["session"])
                self._report(event)

    def _seeded(self, engine: int, session: int) -> None:
        opened = self._opened.get((engine, session))
        if opened is not None and self._mirror:
            opened.seed, opened.seeded = None, True  # From here on the mirror has it.

    def _ended(self, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        limit_s = time.monotonic() + 5.0
        while process.poll() is None and time.monotonic() < limit_s:
            time.sleep(0.01)
        if process.poll() is None:
            process.kill()
            process.wait(5.0)
        pipe.close()
        if not self._stopping:
            self._report({"event": "died", "returncode": process.returncode})

    def _report(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("an event of a parameter server could not be handled: %s", event)


def _named(message: Event) -> Event:
    return {"engine": message["engine"], "session": message["session"]}

