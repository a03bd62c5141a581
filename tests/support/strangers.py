"""Strangers at a port, in a process of their own: `python -m tests.support.strangers KIND COUNT HOST PORT [KEY]`.

As many connections as `COUNT` are kept open at once; one that is closed is made again at once. It says `ready` when
each was made once, and ends when its standard input does, with the number of connections it has made.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

__all__ = ["KINDS", "strangers"]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + bytes(32)
FLOOD = GREETING + b"\x06" + (1 << 20).to_bytes(8, "big")  # Then as many bytes of a command.
KINDS = {
    "silent": (b"", b""),
    "slow": (GREETING[:30], b""),  # It stops in the middle of its greeting.
    "greeting": (GREETING, b""),
    "junk": (b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 200, b"\0" * 65536),
    "flood": (FLOOD, b"\0" * 65536),
    "huge": (GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), b"\0" * 65536),
}
"""What each kind says first, and what it repeats for as long as it can."""


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
        """Everything that is due within a moment."""
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


def main(kind: str, count: int, host: str, port: int) -> None:
    """Stand at the port until standard input ends."""
    crowd = _Crowd(kind, count, (host, port))
    watch = selectors.DefaultSelector()
    watch.register(sys.stdin.fileno(), selectors.EVENT_READ)
    limit_s = time.monotonic() + 2.0
    said = False
    while not watch.select(0):
        crowd.run(0.05)
        if not said and time.monotonic() > limit_s:
            said = True
            print("ready", flush=True)
    print(crowd.made, flush=True)


@contextlib.contextmanager
def strangers(kind: str, count: int, host: str, port: int) -> Iterator[list[int]]:
    """A crowd at a port; the list gets the number of connections it made, at its end."""
    command = [sys.executable, "-m", "tests.support.strangers", kind, str(count), host, str(port)]
    made: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield made
        finally:
            process.stdin.close()
            made.extend(int(line) for line in process.stdout.read().split())
            process.wait(60.0)


def parse(arguments: Sequence[str]) -> None:
    kind, count, host, port = arguments
    main(kind, int(count), host, int(port))


if __name__ == "__main__":
    parse(sys.argv[1:])
