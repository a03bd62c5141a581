"""How the sockets of workers and shards are known to each other."""

from __future__ import annotations

import struct

__all__ = ["is_identity", "session_prefix", "shard_identity", "worker_identity"]

_IDENTITY = struct.Struct("<cIII")
_SESSION = struct.Struct("<cII")
_UNIQUE_BYTES = 8


def worker_identity(optimizer_id: int, session: int, rank: int) -> bytes:
    """How a worker's socket is known to the servers."""
    return _IDENTITY.pack(b"W", optimizer_id, session, rank)


def shard_identity(optimizer_id: int, session: int, index: int) -> bytes:
    """How a shard's socket is known to the primary; behind it come bytes of this connection alone."""
    return _IDENTITY.pack(b"S", optimizer_id, session, index)


def session_prefix(kind: bytes, optimizer_id: int, session: int) -> bytes:
    """How the identities of a session's workers (`W`) or shards (`S`) begin."""
    return _SESSION.pack(kind, optimizer_id, session)


def is_identity(name: bytes) -> bool:
    """Whether a peer of a server can have such an identity."""
    return len(name) == _IDENTITY.size + (_UNIQUE_BYTES if name[:1] == b"S" else 0) and name[:1] in (b"W", b"S")
