"""Classic BPF at a listening socket: what the kernel drops before anybody has shown a key.

Connections inherit the filter of the socket they were accepted from. Messages of a CURVE handshake are small, so a
connection takes no larger segment before `lift`: who sends as much as it can, as fast as it can, gets nothing in.
"""

from __future__ import annotations

import ctypes
import socket
import struct

__all__ = ["HANDSHAKE_SEGMENT_BYTES", "limit", "lift"]

HANDSHAKE_SEGMENT_BYTES = 1024
"""The largest message of a handshake is INITIATE: 257 bytes and the metadata, of which the identity has 255 at most."""

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux; Python names neither.
_INSTRUCTION = struct.Struct("=HBBI")  # Code, jump if true, jump if false, operand.
_LOAD_BYTE, _LOAD_LENGTH, _SHIFT_RIGHT, _SHIFT_LEFT = 0x30, 0x80, 0x74, 0x64
_TO_INDEX, _SUBTRACT_INDEX, _JUMP_SET, _JUMP_GREATER, _RETURN = 0x07, 0x1C, 0x45, 0x25, 0x06
_OFFSET_AT, _FLAGS_AT, _SYN = 12, 13, 2  # In the header of TCP, at which the filter's view of a segment begins.
_ALL, _NOTHING = 0xFFFFFFFF, 0


def limit(connection: socket.socket, *, admit: bool = True) -> None:
    """Drop segments with more than a handshake's payload; without `admit` requests for connections too.

    Raises:
        OSError: This system has no such filters, or the socket is closed.
    """
    program = ctypes.create_string_buffer(
        b"".join(
            _INSTRUCTION.pack(*instruction)
            for instruction in (
                (_LOAD_BYTE, 0, 0, _FLAGS_AT),
                (_JUMP_SET, 7, 0, _SYN),
                (_LOAD_BYTE, 0, 0, _OFFSET_AT),
                (_SHIFT_RIGHT, 0, 0, 4),
                (_SHIFT_LEFT, 0, 0, 2),
                (_TO_INDEX, 0, 0, 0),
                (_LOAD_LENGTH, 0, 0, 0),
                (_SUBTRACT_INDEX, 0, 0, 0),
                (_JUMP_GREATER, 1, 2, HANDSHAKE_SEGMENT_BYTES),
                (_RETURN, 0, 0, _ALL if admit else _NOTHING),
                (_RETURN, 0, 0, _NOTHING),
                (_RETURN, 0, 0, _ALL),
            )
        )
    )
    count = len(program) // _INSTRUCTION.size
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", count, ctypes.addressof(program)))


def lift(connection: socket.socket) -> None:
    """Take every segment from now on; what was dropped is sent again.

    Raises:
        OSError: The connection has no filter, or is closed.
    """
    connection.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
