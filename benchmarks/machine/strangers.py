"""Crowds of strangers at a port, from another process: `python -m benchmarks.machine.strangers KIND COUNT HOST PORT`.

It keeps `COUNT` connections open and immediately replaces a closed one. It prints `ready` once each was opened, ends
when its standard input closes, and then prints the number of connections it made. With `KIND` `listen` it instead opens
`COUNT` ports that do the least work a listening socket can do for a crowd.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["KINDS", "idle_listeners", "strangers"]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + bytes(32)
FLOOD = GREETING + b"\x06" + (1 << 20).to_bytes(8, "big")  # Announces a command of 1 MiB.
KINDS = {
    "silent": (b"", b""),
    "slow": (GREETING[:30], b""),  # Stops in the middle of the greeting.
    "greeting": (GREETING, b""),
    "junk": (b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 200, b"\0" * 65536),
    "flood": (FLOOD, b"\0" * 65536),
    "huge": (GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), b"\0" * 65536),
}
"""What each kind says first, and what it repeats for as long as it can."""

LISTEN, _KEPT = "listen", 16


class _Crowd:
    def __init__(self, kind: str, count: int, address: tuple[str, int]) -> None:
        self.first, self.again = KINDS[kind]
        self.address = address
        self.made = 0
        self.selector = selectors.DefaultSelector()
        for _ in range(count):
            self.connect()

    def connect(self) -> None:
        end = socket.socket()
        end.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            end.connect(self.address)
        self.made += 1
        self.selector.register(end, selectors.EVENT_READ | selectors.EVENT_WRITE, self.first)

    def run(self, limit_s: float) -> None:
        """Handle the sockets that are ready within `limit_s`."""
        for key, events in self.selector.select(limit_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            try:
                if events & selectors.EVENT_READ and not end.recv(4096):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    self._write(end, key.data)
            except BlockingIOError:
                pass
            except OSError:
                self.selector.unregister(end)
                end.close()
                self.connect()

    def _write(self, end: socket.socket, rest: bytes) -> None:
        rest = (rest or self.again)[end.send(rest or self.again) if rest or self.again else 0 :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rest or self.again else 0)
        self.selector.modify(end, wanted, rest)


class _Listeners:
    """Ports that accept every connection: each keeps the latest 16 and discards what they send."""

    def __init__(self, count: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.ends = [socket.create_server(("127.0.0.1", 0), backlog=100) for _ in range(count)]
        self._kept: dict[socket.socket, collections.deque[socket.socket]] = {}
        self._buffer = bytearray(1 << 20)
        for end in self.ends:
            end.setblocking(False)
            self._kept[end] = collections.deque()
            self.selector.register(end, selectors.EVENT_READ)

    def run(self, limit_s: float) -> None:
        for key, _ in self.selector.select(limit_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            with contextlib.suppress(OSError, ValueError):  # Just closed.
                if end in self._kept:
                    self._accept(end)
                else:
                    end.recv_into(self._buffer)

    def _accept(self, listener: socket.socket) -> None:
        made, kept = listener.accept()[0], self._kept[listener]
        made.setblocking(False)
        self.selector.register(made, selectors.EVENT_READ)
        kept.append(made)
        if len(kept) > _KEPT:
            self.selector.unregister(kept[0])
            kept.popleft().close()


def stand(kind: str, count: int, host: str, port: int) -> None:
    """Keep the connections, or the ports, open until standard input ends."""
    crowd = _Listeners(count) if kind == LISTEN else _Crowd(kind, count, (host, port))
    watch = selectors.DefaultSelector()
    watch.register(sys.stdin.fileno(), selectors.EVENT_READ)
    limit_s = time.monotonic() + (2.0 if isinstance(crowd, _Crowd) else 0.0)
    said = False
    while not watch.select(0):
        crowd.run(0.05)
        if not said and time.monotonic() >= limit_s:
            said = True
            print("ready", flush=True)
            if isinstance(crowd, _Listeners):
                print(*(end.getsockname()[1] for end in crowd.ends), flush=True)
    print(crowd.made if isinstance(crowd, _Crowd) else 0, flush=True)


@contextlib.contextmanager
def _process(kind: str, count: int, host: str, port: int, cpus: Iterable[int]) -> Iterator[subprocess.Popen[str]]:
    """Start the process and wait until it is ready; its standard input is closed at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.machine.strangers", kind, str(count), host, str(port)]
    bound = set(cpus)

    def bind() -> None:
        if bound:
            os.sched_setaffinity(0, bound)

    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=bind) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()


@contextlib.contextmanager
def strangers(kind: str, count: int, host: str, port: int, cpus: Iterable[int] = ()) -> Iterator[list[int]]:
    """Keep a crowd at a port, on the given processors; at its end the list receives its number of connections."""
    made: list[int] = []
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(_process(kind, count, host, port, cpus))
        try:
            yield made
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            made.extend(int(line) for line in process.stdout.read().split())
            process.wait(60.0)


@contextlib.contextmanager
def idle_listeners(count: int, cpus: Iterable[int] = ()) -> Iterator[list[tuple[str, int]]]:
    """Open ports in another process, where a crowd costs as little as possible; yield their addresses."""
    with _process(LISTEN, count, "127.0.0.1", 0, cpus) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield [("127.0.0.1", int(port)) for port in process.stdout.readline().split()]
        finally:
            process.stdin.close()
            process.stdout.read()


def parse(arguments: Sequence[str]) -> None:
    kind, count, host, port = arguments
    stand(kind, int(count), host, int(port))


if __name__ == "__main__":
    parse(sys.argv[1:])
