"""ZeroMQ identities of the sockets of workers and shards."""

from __future__ import annotations

import struct

__all__ = ["is_identity", "session_prefix", "shard_identity", "worker_identity"]

_IDENTITY = struct.Struct("<cIII")
_SESSION = struct.Struct("<cII")
_UNIQUE_BYTES = 8


def worker_identity(optimizer_id: int, session: int, rank: int) -> bytes:
    """Return the identity of a worker's socket at the servers."""
    return _IDENTITY.pack(b"W", optimizer_id, session, rank)


def shard_identity(optimizer_id: int, session: int, index: int) -> bytes:
    """Return the identity of a shard's socket at the primary; each connection appends random bytes to it."""
    return _IDENTITY.pack(b"S", optimizer_id, session, index)


def session_prefix(kind: bytes, optimizer_id: int, session: int) -> bytes:
    """Return the common prefix of the identities of a session's workers (`W`) or shards (`S`)."""
    return _SESSION.pack(kind, optimizer_id, session)


def is_identity(name: bytes) -> bool:
    """Return whether `name` has the form of a worker's or a shard's identity."""
    return len(name) == _IDENTITY.size + (_UNIQUE_BYTES if name[:1] == b"S" else 0) and name[:1] in (b"W", b"S")
