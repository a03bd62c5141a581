"""Servers and workers of one optimizer for a test: server processes, or servers in threads of the test process."""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from scheduler.plan.plan import Plan
from star_hvd.engine.buckets import Bucket, pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Snapshot
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.common.pipe import Pipe
from star_hvd.ps.owner.server_process import ServerProcess
from star_hvd.ps.server.server import Server, serve
from star_hvd.ps.worker.client import Client

__all__ = ["DEADLINE_S", "Cluster", "ThreadServer", "cluster", "plain_steps", "run_all", "sgd"]

DEADLINE_S = 240.0  # Reached only by a hang.
SHAPES = ((40, 30), (40,), (7, 40), (7,))
Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make SGD with all features enabled, in two groups."""
    groups = [{"params": params[:1], "weight_decay": 0.01}, {"params": params[1:], "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


class _ThreadProcess:
    """A server in a thread, with the part of the process interface that `ServerProcess` uses."""

    pid = -1
    returncode: int | None = None

    def __init__(self, pipe: Pipe) -> None:
        self._descriptor = pipe.fileno()
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pipe,), daemon=True)
        self._thread.start()

    def _run(self, pipe: Pipe) -> None:
        config = pipe.wait(DEADLINE_S)
        self._server = Server(pipe, config)
        self._made.set()
        self.returncode = serve(self._server, pipe)

    @property
    def server(self) -> Server:
        """The server, once its thread has made it."""
        assert self._made.wait(DEADLINE_S)
        return self._server

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.returncode

    def wait(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("server", timeout)

    def kill(self) -> None:
        raise AssertionError("a server in a thread cannot be killed")

    def end(self) -> None:
        """Let the server end as if its owner were gone; its owner takes that for a death."""
        with socket.socket(fileno=os.dup(self._descriptor)) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.wait(DEADLINE_S)


class ThreadServer(ServerProcess):
    """A server in a thread of this process: starts immediately and is visible in a debugger.

    Attributes:
        processes: Everything that was started, the latest last.
    """

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self.processes: list[_ThreadProcess] = []

    def _spawn(self, end: socket.socket, deadline_s: float) -> Any:
        self.processes.append(_ThreadProcess(Pipe(end.dup())))
        return self.processes[-1]


class Cluster:
    """See the module's docstring.

    Args:
        plan: The plan of the servers.
        servers: Number of shards.
        optimizer: Makes the optimizer.
        shapes: Shapes of the parameters.
        processes: Whether servers are processes; these are restarted when they die.
        faults: Per shard, the faults that kill its processes, one per start; later starts have none.
        settings: Of `ServerProcess`.
        host: Address the servers listen on, or a folder for Unix sockets.
        chunk_bytes: Size of a chunk.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        servers: int = 1,
        optimizer: Optimizer = sgd,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        processes: bool = False,
        faults: dict[int, list[dict[str, Any]]] | None = None,
        host: str = "127.0.0.1",
        chunk_bytes: int = 1024,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
        self.optimizer = optimizer(self.params)
        self.base = type(self.optimizer)
        self.buckets: list[Bucket] = pack(self.params, 4000)
        self.ordered = [param for bucket in self.buckets for param in bucket.params]
        self.hyper = HyperRow(self.optimizer.param_groups)
        self.layout = Layout.build(self.buckets, self.optimizer.param_groups, self.base, servers, chunk_bytes)
        self.plan, self.key = plan, JobKey.new()
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log: list[dict[str, Any]] = []
        self.deaths = 0
        self.recovers = True
        kind: Any = ServerProcess if processes else ThreadServer
        self.servers: list[ServerProcess] = [
            kind(i, self.key, host, on_event=lambda e, i=i: self.note(i, e), faults=(faults or {}).get(i, ()))
            for i in range(servers)
        ]
        self.endpoints: list[Endpoint] = []
        self.clients: list[Client] = []
        self._guards: list[threading.Thread] = []
        self.failures: list[Exception] = []  # Of restarts.

    def start(self, *, seed: bool = True, session: int = 0, clients: bool = True) -> None:
        """Start the servers, seed them and connect a client per rank."""
        starters = [threading.Thread(target=server.start, args=(DEADLINE_S,)) for server in self.servers]
        for thread in starters:
            thread.start()
        for thread in starters:
            thread.join(DEADLINE_S)
        self.endpoints = [server.endpoint for server in self.servers if server.endpoint is not None]
        assert len(self.endpoints) == len(self.servers)
        self.open(session)
        if seed:
            self.seed(session)
        if clients:
            self.start_clients(session)

    def make_clients(self, session: int = 0) -> None:
        for rank in range(self.plan.world_size):
            self.clients.append(Client(rank, 0, session, self.endpoints, self.layout, self.key))

    def start_clients(self, session: int = 0) -> None:
        self.make_clients(session)
        for client in self.clients:
            client.start()

    def spec(self) -> OptimizerSpec:
        return OptimizerSpec.of(self.base, self.optimizer.param_groups, self.hyper)

    def open(self, session: int = 0) -> None:
        self.session = session
        for index, server in enumerate(self.servers):
            server.open(0, session, index, self.endpoints, self.layout, self.plan, self.spec(), 0)

    def seed(self, session: int = 0) -> None:
        for server in self.servers:
            server.seed(0, session, self.snapshot())

    def snapshot(self, version: int = 0) -> Snapshot:
        state = [copy.deepcopy(dict(self.optimizer.state.get(p, {}))) for p in self.ordered]
        return Snapshot(version, [p.detach().clone() for p in self.ordered], state)

    def note(self, index: int, event: dict[str, Any]) -> None:
        if event["event"] == "died" and self.recovers:
            guard = threading.Thread(target=self.recover, args=(index,), daemon=True)
            self._guards.append(guard)
            self.deaths += 1
            guard.start()  # Last: on a busy machine a step may end before this thread goes on.
        self.log.append({**event, "of": index})
        self.events.put(self.log[-1])

    def recover(self, index: int) -> None:
        try:
            endpoint = self.servers[index].recover(DEADLINE_S)
        except Exception as error:
            self.failures.append(error)
            raise
        for other in self.servers:
            if other is not self.servers[index]:
                other.replace(0, self.session, index, endpoint)
        for client in self.clients:
            client.replace(index, endpoint)

    def kill(self, index: int) -> None:
        """Kill a shard's process."""
        pid = self.servers[index].pid
        assert pid is not None and pid > 0, "a server in a thread cannot be killed"
        with contextlib.suppress(ProcessLookupError):  # It has died already.
            os.kill(pid, signal.SIGKILL)

    def server_of(self, index: int) -> Server:
        """Return the server object of a shard that runs in a thread."""
        owner = self.servers[index]
        assert isinstance(owner, ThreadServer), "a server in a process of its own cannot be looked into"
        return owner.processes[-1].server

    def settled(self) -> None:
        """Wait until all dead servers have been restarted."""
        for guard in list(self._guards):
            limit_s = time.monotonic() + DEADLINE_S
            while guard.ident is None and time.monotonic() < limit_s:
                time.sleep(0.01)  # About to be started.
            guard.join(DEADLINE_S)
            assert not guard.is_alive(), "a server did not come back in time"
        assert not self.failures, "a server could not be restarted"

    def wait_event(self, name: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the next event of that name, discarding events before it."""
        limit_s = time.monotonic() + deadline_s
        while True:
            try:
                event = self.events.get(timeout=max(0.01, limit_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no event {name!r} within {deadline_s:g} s; there were {self.log}") from None
            if event["event"] == name:
                return event

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        """Return random gradients for a rank and step: one flat tensor per bucket, with the weight at its end."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        flats = [torch.randn(b.numel + 1, generator=generator).to(b.flat.dtype) for b in self.buckets]
        for flat in flats:
            flat[-1] = 1.0
        return flats

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.settled()
        for server in self.servers:
            server.stop()


@contextlib.contextmanager
def cluster(plan: Plan, *, seed: bool = True, **settings: Any) -> Iterator[Cluster]:
    """Start a cluster, and end it in any case."""
    made = Cluster(plan, **settings)
    try:
        made.start(seed=seed)
        yield made
    finally:
        made.close()


def run_all(*works: Callable[[], Any]) -> list[Any]:
    """Run the functions in threads of their own; return their results, or raise the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker did not end in time"
    return results


def plain_steps(cluster: Cluster, steps: int, ranks: int, first: int = 0) -> None:
    """Make the steps `first` to `steps` on the cluster's own optimizer: plain torch with the mean of the gradients."""
    for step in range(first, steps):
        grads = [cluster.gradients(rank, step) for rank in range(ranks)]
        for index, bucket in enumerate(cluster.buckets):
            total = grads[0][index].mul(1.0 / ranks)
            for other in grads[1:]:
                total.add_(other[index], alpha=1.0 / ranks)
            for param, view in zip(bucket.params, bucket.split(total), strict=True):
                param.grad = view
        cluster.optimizer.step()
