"""The process of a parameter server, started by `ServerProcess` through `forker`.

Its standard input is a socket to its owner, which carries configuration, secrets, orders and events, so nothing secret
is in the process list or the environment. When the owner dies, the socket closes and the server ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch
import zmq

from scheduler.plan.plan import Plan
from star_hvd.channel.link import Dealer, Router
from star_hvd.channel.reliable import TENSORS
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.ps.common.auth import Endpoint, JobKey, ServerSocket, connect
from star_hvd.ps.common.forking import end_with_parent
from star_hvd.ps.common.identities import is_identity, session_prefix, shard_identity, worker_identity
from star_hvd.ps.common.layout import Layout, LayoutError
from star_hvd.ps.common.mirror import Mirror
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.common.pipe import Pipe
from star_hvd.ps.common.record import Record
from star_hvd.ps.common.validation import check_presence, check_products, check_pull, check_push, is_whole
from star_hvd.ps.common.wire import Header, Kind, pack, read_meta, unpack
from star_hvd.ps.server.chunk_store import ChunkStore
from star_hvd.ps.server.early_messages import EarlyMessages
from star_hvd.ps.server.no_compiler import leave_out
from star_hvd.ps.server.outbox import Outbox
from star_hvd.ps.server.primary import Links, Primary
from star_hvd.ps.server.shard import Outlet, Shard, ShardError

__all__ = ["Job", "Server", "main", "serve"]

logger = logging.getLogger("star_hvd")

_BATCH = 64  # Messages taken from one socket before the others are served.
_LOGGED = 10  # Dropped messages that are logged; further ones are only counted.
_BETWEEN = frozenset((Kind.JOIN, Kind.ARRIVED, Kind.DONE, Kind.ORDER))  # From shard to shard.
_CONFIG_S = 600.0  # Longest wait for the owner's configuration.
_FLUSH_S = 2.0  # Longest wait for the owner to read the last events.
Key = tuple[int, int]


class Job(Outlet):
    """One optimizer in one session on this server."""

    def __init__(self, server: Server, values: dict[str, Any], mirror: Mirror | None, recover: bool) -> None:
        self.server = server
        self.optimizer_id, self.session, self.index = values["optimizer_id"], values["session"], values["index"]
        self.endpoints = [Endpoint.from_list(each) for each in values["endpoints"]]
        self.mirror = mirror
        self.peers: dict[int, bytes] = {}
        self.joined_ns: dict[int, int] = {}
        layout = Layout.from_dict(values["layout"])
        spec = OptimizerSpec.from_dict(values["spec"])
        plan = Plan.from_dict(values["plan"])
        self.world_size, self.n_servers = plan.world_size, layout.n_servers
        if layout.device_type != "cpu":
            spec = spec.on_host()
        faults = server.faults
        self.shard = Shard(self.index, layout, spec, mirror, self, guard=plan.guard != "none", faults=faults)
        if recover:
            self.shard.recover()
        self.link: Dealer | None = None
        self.primary: Primary | None = None
        if self.index == 0:
            links = Links(self._order, self._push_result, self._event, self._journal)
            # Also if this shard has to be seeded again: it has executed nothing then, so the log has all orders, while
            # others may have executed some and would ignore orders of the same numbers.
            n, journal = layout.n_servers, self._old_journal() if recover else None
            self.primary = Primary(plan, values["version"], n, layout.holders, links, journal)
            self.primary.join(0, self.shard.seq)
            self.primary.adopt_newer_plan()
        else:
            self.join()
        self._event({"event": "ready"})
        if self.shard.seeded:
            self._event({"event": "seeded"})

    # ---- between servers ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Connect to the primary, or its restarted process, and report the orders and pushes received so far."""
        if self.link is not None:
            self.server.drop_link(self.link)
        # Random suffix: a restarted process must not get orders queued for the old one before those it missed.
        identity = shard_identity(self.optimizer_id, self.session, self.index) + os.urandom(8)
        self.link = Dealer(connect(self.server.context, self.server.key, self.endpoints[0], identity), TENSORS)
        self.server.add_link(self.link, self)
        # The restarted primary may read an older connection's JOIN after this one; the time tells it which is current.
        # A shard's process restarts on the same host, so all its times are of one clock.
        self._report(Kind.JOIN, version=self.shard.seq, meta={"since_ns": time.monotonic_ns()})
        self._report(Kind.DONE, version=self.shard.finished)
        for rank, step, products in self.shard.whole():
            self.arrived(rank, step, products)

    def _report(self, kind: Kind, *, step: int = 0, version: int = 0, meta: Any = None) -> None:
        assert self.link is not None
        header = Header(kind, self.optimizer_id, self.session, self.index, step, version=version)
        if self.link.stream.broken is None:  # Otherwise `join` reports everything to the restarted primary.
            self.link.send([pack(header), msgpack.packb(meta or {})])

    def arrived(self, rank: int, step: int, products: Sequence[float] | None) -> None:
        if self.primary is not None:
            self.primary.arrived(0, rank, step, products)
        else:
            self._report(Kind.ARRIVED, step=step, meta={"rank": rank, "products": products})

    def done(self, seq: int) -> None:
        if self.primary is not None:
            self.primary.done(0, seq)
        elif self.link is not None:
            self._report(Kind.DONE, version=seq)

    def _order(self, shard: int, order: dict[str, Any]) -> None:
        if shard == 0:
            self.shard.order(order)
        elif shard in self.peers:  # Others get the log when they join.
            header = Header(Kind.ORDER, self.optimizer_id, self.session, shard)
            self.server.outbox.meta(self.peers[shard], header, order)

    # ---- to workers and the owner -------------------------------------------------------------------------

    def send(self, rank: int, kind: Kind, step: int, store: ChunkStore) -> None:
        header = Header(kind, self.optimizer_id, self.session, rank, step, store.chunk.index, store.version)
        self.server.outbox.chunk(worker_identity(self.optimizer_id, self.session, rank), header, store)

    def send_none(self, rank: int, step: int, store: ChunkStore) -> None:
        header = Header(Kind.PULLED, self.optimizer_id, self.session, rank, step, store.chunk.index, store.version)
        self.server.outbox.none(worker_identity(self.optimizer_id, self.session, rank), header)

    def _push_result(self, rank: int, step: int, result: dict[str, Any]) -> None:
        identity = worker_identity(self.optimizer_id, self.session, rank)
        self.server.outbox.meta(identity, Header(Kind.VERDICT, self.optimizer_id, self.session, rank, step), result)

    def _event(self, event: dict[str, Any]) -> None:
        self.server.event({**event, "optimizer_id": self.optimizer_id, "session": self.session, "index": self.index})

    def _journal(self, data: bytes) -> None:
        if self.mirror is not None:
            self.mirror.write(0, Record(data, []))
        if self.primary is not None:
            self.shard.fault("after_journal", self.primary.version - 1)

    def _old_journal(self) -> bytes | None:
        data = self.mirror.read(0) if self.mirror is not None else None
        if data is None:
            return None
        (length,) = struct.unpack("<Q", bytes(data[:8].numpy()))
        return bytes(data[8 : 8 + length].numpy())

    # ---- messages -----------------------------------------------------------------------------------------

    def take(self, header: Header, payload: Any) -> None:
        """Handle a message of a worker or of another shard.

        Raises:
            ChannelError: The message is invalid, or not one for this shard.
        """
        kind, rank, step = header.kind, header.rank, header.step
        if rank >= (self.n_servers if kind in _BETWEEN else self.world_size):
            raise ChannelError(f"a message is of {rank}; there are {self.world_size} ranks, {self.n_servers} servers")
        if kind == Kind.CHUNK:
            self.shard.part(rank, step, header.chunk, header.offset, header.size, payload.buffer)
        elif kind == Kind.ORDER:
            if self.primary is not None:
                raise ChannelError("the primary got an order; it only sends those")
            self.shard.order(read_meta(payload))
        elif kind == Kind.HELLO:
            pass
        elif self.primary is None:
            raise ChannelError(f"shard {self.index} got a message of kind {Kind(kind).name}; expected it at shard 0")
        elif kind == Kind.PUSH:
            meta = read_meta(payload)
            check_push(meta, self.shard.row_size)
            self.shard.check_row(meta.get("row"))
            self.primary.push(rank, step, meta)
        elif kind in (Kind.PULL, Kind.STATE):
            meta = read_meta(payload)
            check_pull(meta)
            what = "pull" if kind == Kind.PULL else "state"
            self.primary.read(what, rank, step, known=meta.get("known"), empty=meta.get("empty", False))
        elif kind == Kind.PRESENCE:
            meta = read_meta(payload)
            check_presence(meta)
            self.primary.member(rank, meta["what"], own=True)
        elif kind == Kind.ARRIVED:
            meta = read_meta(payload)
            products = meta.get("products")
            check_products(products)
            if not is_whole(meta.get("rank"), most=self.world_size - 1):
                got = str(meta.get("rank"))[:40]
                raise ChannelError(f"shard {rank} reports a push of rank {got}; expected 0..{self.world_size - 1}")
            self.primary.arrived(rank, meta["rank"], step, products)
        elif kind == Kind.DONE:
            self.primary.done(rank, header.version)
        else:
            raise ChannelError(f"a server got a message of kind {Kind(kind).name}, which only workers get")

    def joins(self, identity: bytes, header: Header, payload: Any) -> None:
        """Handle a shard's connection under this identity: send it the orders it missed, and all later ones.

        Raises:
            ChannelError: The message is invalid, or this is not shard 0.
        """
        if self.primary is None or header.rank >= self.n_servers:
            raise ChannelError(f"shard {header.rank} joins shard {self.index}; expected 1..{self.n_servers - 1} at 0")
        since_ns = read_meta(payload).get("since_ns")
        if since_ns is None or not is_whole(since_ns):
            raise ChannelError(f"shard {header.rank} joins since {str(since_ns)[:40]}; expected nanoseconds")
        if since_ns < self.joined_ns.get(header.rank, 0):
            self.server.outbox.forget(identity)  # The shard has a newer connection.
            return
        self.joined_ns[header.rank] = since_ns
        before = self.peers.get(header.rank, identity)
        self.server.outbox.welcome(identity)
        self.peers[header.rank] = identity
        if before != identity:
            self.server.outbox.forget(before)
        self.primary.join(header.rank, header.version)

    def close(self) -> None:
        """Close the connection to the primary and the mirror."""
        if self.link is not None:
            self.server.drop_link(self.link)
        if self.mirror is not None:
            self.mirror.close()


class Server:
    """One server process with all its optimizers.

    Args:
        pipe: The socket to the owner.
        config: The owner's first message.

    Attributes:
        jobs: The open optimizers, by optimizer and session.
        malformed: Messages that were dropped because they were invalid.
    """

    def __init__(self, pipe: Pipe, config: dict[str, Any]) -> None:
        self.key = JobKey.of_server(config["key"])
        self.faults: dict[str, Any] = config.get("faults") or {}
        self.context = zmq.Context(io_threads=int(config["io_threads"]))
        self.socket = ServerSocket(self.context, self.key, config["host"], config["port"])
        self.peers = Router(self.socket.router, TENSORS, is_identity)
        self.outbox = Outbox(self.peers)
        self.malformed = 0
        self._pipe = pipe
        self.jobs: dict[Key, Job] = {}
        self._links: dict[Dealer, Job] = {}
        self._early = EarlyMessages()
        self._poller = zmq.Poller()
        self._poller.register(self.socket.router, zmq.POLLIN)
        self._poller.register(pipe.fileno(), zmq.POLLIN)
        self.event({"event": "listening", "endpoint": self.socket.endpoint.to_list()})

    def event(self, event: dict[str, Any]) -> None:
        """Send an event to the owner; frequent ones are dropped if it does not keep up."""
        self._pipe.send(event, advisory=event["event"] in ("update", "drop", "pong"))

    def add_link(self, link: Dealer, job: Job) -> None:
        """Poll the connection to a job's primary."""
        self._links[link] = job
        link.register(self._poller)

    def drop_link(self, link: Dealer) -> None:
        """Stop polling a connection and close it."""
        link.unregister(self._poller)
        del self._links[link]
        link.close()

    def run(self) -> None:
        """Serve until the owner sends `stop` or is gone."""
        while True:
            ready = dict(self._poller.poll(self._tick()))
            if self._pipe.fileno() in ready and not self._control():
                return
            if self.socket.router in ready:
                self._drain(self.peers, None)
            for link, job in list(self._links.items()):
                if not ready.keys().isdisjoint(link.sockets):
                    self._drain(link, job)

    def _tick(self) -> int | None:
        """Run all connections' due timers. Return the milliseconds until the next one, None if there is none."""
        ends: list[Dealer | Router] = [self.peers, *self._links]
        for end in ends:
            if end.next_s <= time.monotonic():
                end.tick()
        primaries = [job.primary for job in self.jobs.values() if job.primary is not None]
        for primary in primaries:
            if primary.next_s <= time.monotonic():
                primary.tick()
        for link in self._links:  # A broken link ends the process; the owner's next one gets the missed orders.
            if link.stream.broken is not None and not link.stream.replaced and not link.stream.ended:
                raise ChannelError(link.stream.broken)
        next_s = min(each.next_s for each in (*ends, *primaries))
        return None if math.isinf(next_s) else max(0, math.ceil(1e3 * (next_s - time.monotonic())))

    def close(self) -> None:
        """Close all sockets."""
        for job in self.jobs.values():
            job.close()
        self.peers.bye()
        self.socket.close()
        self.context.destroy(linger=500)

    # ---- messages of workers and shards -------------------------------------------------------------------

    def _drain(self, source: Router | Dealer, job: Job | None) -> None:
        for frames in source.receive(_BATCH):
            self._guarded(lambda frames=frames: self._received(job, frames))  # type: ignore[misc]

    def _received(self, job: Job | None, frames: list[Any] | ChannelError) -> None:
        if isinstance(frames, ChannelError):
            raise frames
        if job is not None:
            job.take(*_two(frames))
        else:
            self._message(frames)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Handle a message by `act`; if it raises, count and drop the message."""
        try:
            act()
        except (ShardError, OSError, MemoryError):
            raise  # Not the message's fault: an update was not made, or not mirrored.
        except Exception as error:  # A peer's message must not end the server, whatever it raises.
            self.malformed += 1
            if self.malformed <= _LOGGED:
                declared = isinstance(error, ChannelError)
                logger.warning("a parameter server dropped a message: %s", error, exc_info=not declared)

    def _message(self, frames: list[Any]) -> None:
        header, _ = _two(frames[1:])
        identity = frames[0].bytes
        key, between = (header.optimizer_id, header.session), header.kind in (Kind.JOIN, Kind.ARRIVED, Kind.DONE)
        expected = (shard_identity if between else worker_identity)(*key, header.rank)
        if between:
            identity = identity[: len(expected)]
        if header.kind == Kind.ORDER:
            raise ChannelError(f"an order came from {identity!r}; expected orders from the primary only")
        if identity != expected:
            raise ChannelError(f"a message of sender {header.rank} came from {identity!r}; expected {expected!r}")
        job = self.jobs.get(key)
        if job is None:
            self._keep(key, frames)
            return
        if header.kind == Kind.JOIN:
            job.joins(frames[0].bytes, header, frames[2])
            return
        if header.kind == Kind.HELLO:
            self.outbox.welcome(frames[0].bytes)
        job.take(header, frames[2])

    @property
    def early_sessions(self) -> int:
        """Number of sessions that are not open yet and have queued messages."""
        return len(self._early)

    def _keep(self, key: Key, frames: list[Any]) -> None:
        """Queue a message whose session is not open here yet.

        Where the queue is full, the message is not acknowledged, and its sender repeats it: a restarted server may get
        a large push before its owner has opened the session.

        Raises:
            ChannelError: The session is over.
        """
        newest = max((session for optimizer_id, session in self.jobs if optimizer_id == key[0]), default=-1)
        if key[1] <= newest:
            raise ChannelError(f"a message is for optimizer {key[0]}, session {key[1]}, which is over here")
        surplus = self._early.surplus(key)
        if surplus is not None:
            self._drop_early(surplus)  # Its plan was abandoned.
        if not self._early.add(key, frames):
            self.peers.refuse(frames[0].bytes)

    def _drop_early(self, key: Key) -> None:
        """Forget the queued messages of a session that will not be opened, and their senders' streams."""
        self._early.pop(key)
        for kind in (b"W", b"S"):
            self.outbox.forget(session_prefix(kind, *key))

    # ---- orders of the owner ------------------------------------------------------------------------------

    def _control(self) -> bool:
        """Execute the owner's orders; False when the server should end."""
        for message in self._pipe.receive():
            if message is None or message["do"] == "stop":
                return False
            if message["do"] == "ping":
                self.event({"event": "pong"})
                self.outbox.discard_sent()
                continue
            try:
                self._do(message)
            except (LayoutError, ChannelError, ValueError) as error:
                named: dict[str, Any] = {k: message[k] for k in ("optimizer_id", "session") if k in message}
                self.event({**named, "event": "failed", "reason": str(error), "while": message["do"]})
        return True

    def _do(self, message: dict[str, Any]) -> None:
        what, optimizer_id = message["do"], int(message["optimizer_id"])
        if what == "open":
            self._open(message)
            return
        sessions = [s for e, s in self.jobs if e == optimizer_id]
        session = message.get("session")
        key = (optimizer_id, max(sessions, default=-1) if session is None else int(session))
        job = self.jobs.get(key)
        if job is None:
            if what not in ("close", "member"):  # Absent ranks are reported again once the session is open.
                raise ChannelError(f"optimizer {optimizer_id} is not open here (session {key[1]})")
        elif what == "seed":
            data = torch.frombuffer(bytearray(message["data"]), dtype=torch.uint8)
            before = job.shard.seeded
            if job.shard.seed(message["chunk"], data) and not before:
                self.event({"event": "seeded", "optimizer_id": optimizer_id, "session": key[1], "index": job.index})
        elif what == "replace":
            job.endpoints[message["index"]] = Endpoint.from_list(message["endpoint"])
            if message["index"] == 0 and job.primary is None:
                job.join()
        elif what == "close":
            del job  # This frame must not keep it alive past `_end`.
            self._end(key)
        elif job.primary is not None:
            if what == "plan":
                job.primary.set_plan(Plan.from_dict(message["plan"]))
            elif what == "cut":
                job.primary.cut(message["plan_id"])
            elif what == "member":
                job.primary.member(message["rank"], message["what"])

    def _end(self, key: Key) -> None:
        self.jobs.pop(key).close()
        self.outbox.forget(session_prefix(b"W", *key))
        self.outbox.forget(session_prefix(b"S", *key))
        gc.collect()  # Its reference cycles hold descriptors and large buffers.

    def _open(self, message: dict[str, Any]) -> None:
        key = (int(message["optimizer_id"]), int(message["session"]))
        descriptor = self._pipe.descriptor() if message["mirror"] else None
        mirror = None
        if descriptor is not None:
            mirror = Mirror(descriptor, len(message["layout"]["chunks"]) + 1)
        for old in sorted(each for each in self.jobs if each[0] == key[0])[:-1]:
            self._end(old)
        if key in self.jobs:
            raise ChannelError(f"optimizer {key[0]} is open here already in session {key[1]}")
        self.jobs[key] = Job(self, message, mirror, bool(message["recover"]))
        early = self._early.pop(key)
        for old in self._early.older(key):
            self._drop_early(old)
        for frames in early:
            self._guarded(lambda frames=frames: self._message(frames))  # type: ignore[misc]


def _two(frames: list[Any]) -> tuple[Header, Any]:
    if len(frames) != 2:
        raise ChannelError(f"a message has {len(frames)} frames; expected a header and a payload")
    return unpack(frames[0]), frames[1]


def main(parent: int) -> int:
    """Run a server for the owner at the other end of standard input. Return the exit status.

    Args:
        parent: Process id of the parent, with which this process ends.
    """
    if not end_with_parent(parent):
        return 0
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        sys.stderr.write("this is a parameter server, which star_hvd starts; it cannot be started by hand\n")
        return 2
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # Each mapping of the mirror holds a descriptor.
    pipe = Pipe(socket.socket(fileno=0))
    try:
        config = pipe.wait(_CONFIG_S)
    except DeadlineError:
        return 0  # The owner is gone, or did not need this process.
    logging.basicConfig(format=f"parameter server of rank {config['rank']}: %(message)s", level=logging.WARNING)
    sys.path.extend(path for path in config["path"] if path not in sys.path)
    torch.set_num_threads(int(config["threads"]))
    leave_out()
    try:
        server = Server(pipe, config)
    except Exception as error:  # Whatever it is, the owner says so.
        with contextlib.suppress(OSError):  # The owner may be gone.
            pipe.send({"event": "failed", "reason": f"{type(error).__name__}: {error}", "while": "starting"})
            pipe.close(_FLUSH_S)
        return 1
    return serve(server, pipe)


def serve(server: Server, pipe: Pipe) -> int:
    """Serve until the owner sends `stop` or is gone, then close server and pipe. Return the exit status."""
    try:
        server.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # The owner is gone.
    except Exception as error:
        logger.exception("a parameter server failed")
        with contextlib.suppress(OSError):
            pipe.send({"event": "failed", "reason": f"{type(error).__name__}: {error}", "while": "serving"})
        return 1
    finally:
        server.close()
        pipe.close(_FLUSH_S)
    return 0


if __name__ == "__main__":
    code = main(os.getppid())
    sys.stderr.flush()
    os._exit(code)  # An orderly shutdown of the interpreter and torch takes seconds.
