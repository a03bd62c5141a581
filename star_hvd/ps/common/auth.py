"""Authenticated sockets of the parameter servers.

The keys are the job's (`star_hvd.channel.keys`): a server admits the public keys of all ranks and their servers, and
each side knows the other's before it connects, so no secret is transmitted. Everything is encrypted (CURVE) except on
Unix sockets, used by a job on one host that switched encryption off (`Config.encryption`): only processes of the same
user can open those.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from star_hvd.channel.connection_filter import route
from star_hvd.channel.handshake_limiter import HandshakeLimiter, set_limits
from star_hvd.channel.keys import JobKey
from star_hvd.errors import ChannelError
from star_hvd.ps.common.wire import MAX_MESSAGE_BYTES

__all__ = ["ServerSocket", "Endpoint", "JobKey", "connect"]

_KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: host, port and public key; for a Unix socket its path, port 0 and no key."""

    host: str
    port: int
    public_key: bytes = b""

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return self.host.startswith("/")

    @property
    def address(self) -> str:
        """The address in ZeroMQ's form."""
        return f"ipc://{self.host}" if self.local else f"tcp://{self.host}:{self.port}"

    def to_list(self) -> list[Any]:
        """Plain values for msgpack."""
        return [self.host, self.port, self.public_key]

    @classmethod
    def from_list(cls, values: Any) -> Endpoint:
        """The inverse of `to_list`.

        Raises:
            ChannelError: The values are no endpoint.
        """
        try:
            host, port, public_key = values
            found = cls(str(host), int(port), bytes(public_key))
        except (TypeError, ValueError) as error:
            raise ChannelError(f"got {str(values)[:80]!r}; expected host, port and public key: {error}") from error
        if not 0 <= found.port < 65536 or len(found.public_key) != (0 if found.local else _KEY_BYTES):
            got = f"port {found.port} and a key of {len(found.public_key)} characters"
            raise ChannelError(f"an endpoint has {got}; expected 0..65535 and {_KEY_BYTES}, or none on a Unix socket")
        return found


class ServerSocket:
    """A listening ROUTER of this job that counts rejected connections.

    Args:
        context: The process's ZeroMQ context.
        key: The job's keys; this process's own pair identifies it.
        host: Address to listen on, or a folder that only this user can open for a Unix socket.
        port: Preferred port, 0 for any; another one is taken if it is in use.
    """

    def __init__(self, context: zmq.Context[Any], key: JobKey, host: str, port: int = 0) -> None:
        self._watch = HandshakeLimiter()
        self.expect(len(key.admitted))
        self._watch.know(key.sources)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=key)
        self.router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        set_limits(self.router, MAX_MESSAGE_BYTES)
        self.router.linger = 1000
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # A client that reconnects replaces its old connection.
        if host.startswith("/"):
            self.endpoint = Endpoint(f"{host}/{secrets.token_hex(4)}" if os.path.isdir(host) else host, 0)
            self.router.bind(self.endpoint.address)
            return
        key.own.serve(self.router)
        self._watch.watch(self.router)
        self.endpoint = Endpoint(host, self._bind(host, port), key.own.public)

    def _bind(self, host: str, port: int) -> int:
        if port:
            with contextlib.suppress(zmq.ZMQError):  # In use by another process: take any.
                self.router.bind(f"tcp://{host}:{port}")
                return port
        return int(self.router.bind_to_random_port(f"tcp://{host}"))

    @property
    def denied(self) -> int:
        """Connections rejected because they are not of this job."""
        return self._watch.denied

    def expect(self, peers: int) -> None:
        """Allow `peers` of the job's own connections at once; see `HandshakeLimiter.expect`."""
        self._watch.expect(peers)

    def close(self) -> None:
        """Stop listening; called by the thread that uses the socket."""
        self.router.close()
        self._watch.stop()
        self._authenticator.stop()


def connect(context: zmq.Context[Any], key: JobKey, endpoint: Endpoint, identity: bytes) -> zmq.Socket[Any]:
    """Return a DEALER connected to a server under `identity`; ZeroMQ reconnects it."""
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    set_limits(dealer, MAX_MESSAGE_BYTES)
    dealer.linger = 500
    dealer.setsockopt(zmq.IDENTITY, identity)
    if endpoint.local:
        dealer.connect(endpoint.address)
        return dealer
    key.own.join(dealer, endpoint.public_key)
    dealer.connect(route(key.own.public, endpoint.host, endpoint.port))
    return dealer
