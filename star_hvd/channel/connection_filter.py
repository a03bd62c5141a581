"""Limits how many connection requests per second a listening socket accepts from addresses outside the job.

ZeroMQ accepts every connection, which costs 0.1 to 0.2 ms of processor time each. If more than `RATE_PER_S` arrive, the
kernel drops a share of the requests (a classic BPF filter on the listening socket), which costs a microsecond each; a
dropped request is repeated after a second. Connections that are let in may only send messages of handshake size until
`lift`, always: a thousand that each announced a message of a megabyte could otherwise fill it before anybody reacts.
Nothing from the job's addresses is dropped. Ranks that share a host connect from addresses in 127.0.0.0/8 derived from
their public keys, which distinguishes them from other users.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Iterable

__all__ = [
    "BLOCK_ADDRESSES",
    "LEAST_SHARE",
    "RATE_PER_S",
    "SEGMENT_BYTES",
    "Share",
    "lift",
    "limit",
    "loopback_source",
    "resolve",
    "route",
]

RATE_PER_S = 15.0
SEGMENT_BYTES = 512
"""A handshake's largest message is INITIATE: 257 bytes plus metadata, of which a rank's name is the longest part."""

LEAST_SHARE = 2.0**-12
"""Of foreign requests, at least this share is let through, however many come: each one's turn comes."""

BLOCK_ADDRESSES = 128
"""Addresses per block of the filter's program: a conditional jump skips 255 instructions at most."""

_WINDOW_S = 0.25
_FASTEST = 8.0  # Largest divisor of one adaptation: connections counted now may have been let in under earlier shares.

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux; Python names neither.
_INSTRUCTION = struct.Struct("=HBBI")  # Code, jump if true, jump if false, operand.
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH, _SHIFT_RIGHT, _SHIFT_LEFT = 0x30, 0x20, 0x80, 0x74, 0x64
_TO_INDEX, _SUBTRACT_INDEX, _JUMP, _RETURN = 0x07, 0x1C, 0x05, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_NOT_LESS, _JUMP_SET = 0x15, 0x25, 0x35, 0x45
_OFFSET_AT, _FLAGS_AT, _SYN = 12, 13, 2  # In TCP's header, at which the filter's view of a segment begins.
_SOURCE_AT = 0xFFF00000 + 12  # In IP's header.
_RANDOM_AT = 0xFFFFF000 + 56
_MOST_ADDRESSES = 1000  # A program has at most 4096 instructions.


class Share:
    """The share of foreign connection requests that is let through; used by one thread.

    Args:
        now_s: Time in seconds, of any clock.
    """

    def __init__(self, now_s: float) -> None:
        self.value = 1.0
        self._spent, self._since_s, self._count = 0.0, now_s, 0  # Of the burst.

    def note(self) -> None:
        """Count an accepted foreign connection."""
        self._count += 1

    def turn(self, now_s: float, burst: int) -> None:
        """Adapt the share to the connections since it was last adapted; `burst` may come at once after a quiet time."""
        lasted_s, due = now_s - self._since_s, RATE_PER_S * (now_s - self._since_s)
        spent = self._spent + self._count - due
        flooded = spent > burst
        if lasted_s < _WINDOW_S and not (flooded and self._count > 2.0 * RATE_PER_S * _WINDOW_S):
            return
        factor = min(2.0, max(1.0 / _FASTEST, due / max(1, self._count)))
        if flooded or factor > 1.0:
            self.value = min(1.0, max(LEAST_SHARE, self.value * factor))
        self._spent = min(float(burst), max(0.0, spent))
        self._since_s, self._count = now_s, 0


def limit(listener: socket.socket, share: float, known: Iterable[str]) -> None:
    """Let a share of the connection requests through, and everything from known addresses.

    Accepted connections inherit the filter: from foreign addresses they take segments of at most `SEGMENT_BYTES`.

    Args:
        listener: A listening TCP socket.
        share: 0 to 1; with 1 only the segments' size is limited.
        known: IPv4 addresses.

    Raises:
        OSError: This system has no such filters, or the socket is closed.
    """
    code = _program(share, sorted({int(ipaddress.IPv4Address(address)) for address in known})[:_MOST_ADDRESSES])
    program = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*instruction) for instruction in code))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(code), ctypes.addressof(program)))


def lift(connection: socket.socket) -> None:
    """Accept everything from now on; TCP resends what was dropped.

    Raises:
        OSError: This system has no such filters, or the socket is closed.
    """
    with contextlib.suppress(FileNotFoundError):  # It has none.
        connection.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _program(share: float, known: list[int]) -> list[tuple[int, int, int, int]]:
    take, drop = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
    code = [(_LOAD_WORD, 0, 0, _SOURCE_AT)]
    for begin in range(0, len(known), BLOCK_ADDRESSES):
        block = known[begin : begin + BLOCK_ADDRESSES]
        code += [(_JUMP_EQUAL, len(block) - index, 0, address) for index, address in enumerate(block)]
        code += [(_JUMP, 0, 0, 1), take]
    code += [(_LOAD_BYTE, 0, 0, _FLAGS_AT), (_JUMP_SET, 0, 4, _SYN)]
    code += [(_LOAD_WORD, 0, 0, _RANDOM_AT), (_JUMP_NOT_LESS, 1, 0, int(min(share, 1.0) * 0xFFFFFFFF)), take, drop]
    code += [(_LOAD_BYTE, 0, 0, _OFFSET_AT), (_SHIFT_RIGHT, 0, 0, 4), (_SHIFT_LEFT, 0, 0, 2), (_TO_INDEX, 0, 0, 0)]
    code += [(_LOAD_LENGTH, 0, 0, 0), (_SUBTRACT_INDEX, 0, 0, 0), (_JUMP_GREATER, 1, 0, SEGMENT_BYTES), take, drop]
    return code


def loopback_source(public_key: bytes) -> str:
    """Return the address in 127.0.0.0/8 from which the owner of a key connects to its own host."""
    digest = hashlib.sha256(public_key).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def resolve(host: str) -> str | None:
    """Return the IPv4 address of a host, None if it cannot be resolved."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return None


def route(public_key: bytes, host: str, port: int) -> str:
    """Return the ZeroMQ endpoint to which the owner of a key connects, its source address included."""
    source = loopback_source(public_key)
    own = f"{source}:0;" if host.startswith("127.") and _usable(source) else ""
    return f"tcp://{own}{host}:{port}"


@functools.cache
def _usable(source: str) -> bool:
    """Return whether this system has all of 127.0.0.0/8, as Linux does."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((source, 0))
        return True
    return False
