"""Who may talk to the parameter servers, and the sockets they do it on.

By default data sockets authenticate and do not encrypt: ZeroMQ PLAIN with a random secret of the job. Whoever can read
the network between the hosts can read the gradients, and the secret; against that there is CURVE (`curve=True`), which
encrypts, tells the client that the server is the real one, and costs throughput (`python -m benchmarks.ps --curve`).
The control channel and its keys are others and always encrypted.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from star_hvd.channel.keys import DoorWatch
from star_hvd.channel.options import keep_alive
from star_hvd.ps.wire import MAX_MESSAGE_BYTES

__all__ = ["Door", "Endpoint", "JobKey", "connect"]

_USER = "star"


@dataclass(frozen=True, slots=True)
class JobKey:
    """The secret of a job's data channel; made once and handed to all ranks by the control plane.

    Attributes:
        secret: What PLAIN asks for.
        curve: Whether CURVE is used instead.
        public_key: CURVE key of every client of the job.
        secret_key: Its secret half.
    """

    secret: str
    curve: bool
    public_key: bytes
    secret_key: bytes

    @classmethod
    def new(cls, *, curve: bool = False) -> JobKey:
        """A fresh random key."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(secrets.token_hex(32), curve, public_key, secret_key)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire; they are secret."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobKey:
        """The inverse of `to_dict`."""
        return cls(str(values["secret"]), bool(values["curve"]), values["public_key"], values["secret_key"])

    def __repr__(self) -> str:
        return f"JobKey(curve={self.curve})"  # Never the secret: records end up in logs.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: host, port, and its CURVE key (empty without CURVE)."""

    host: str
    port: int
    public_key: bytes = b""

    def to_list(self) -> list[Any]:
        """Plain values, for the wire."""
        return [self.host, self.port, self.public_key]

    @classmethod
    def from_list(cls, values: Any) -> Endpoint:
        """The inverse of `to_list`."""
        host, port, public_key = values
        return cls(str(host), int(port), bytes(public_key))


class Door:
    """A listening ROUTER of this job that counts who is turned away.

    Args:
        context: The process's ZeroMQ context.
        key: The job's key.
        host: Address to listen on.
        port: Port to listen on if it is free, 0 for any.
    """

    def __init__(self, context: zmq.Context[Any], key: JobKey, host: str, port: int = 0) -> None:
        self._watch = DoorWatch()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self.router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        _unlimited(self.router)
        self.router.linger = 1000
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # A client that comes back takes its place again.
        public_key = b""
        if key.curve:
            public_key, secret_key = zmq.curve_keypair()
            self._authenticator.configure_curve_callback("*", credentials_provider=_OneKey(key.public_key))
            self.router.curve_server = True
            self.router.curve_publickey, self.router.curve_secretkey = public_key, secret_key
        else:
            self._authenticator.configure_plain("*", passwords={_USER: key.secret})
            self.router.plain_server = True
        self._watch.watch(self.router)
        self.endpoint = Endpoint(host, self._bind(host, port), public_key)

    def _bind(self, host: str, port: int) -> int:
        if port:
            try:
                self.router.bind(f"tcp://{host}:{port}")
                return port
            except zmq.ZMQError:
                pass  # Somebody else has it by now: any other will do.
        return int(self.router.bind_to_random_port(f"tcp://{host}"))

    @property
    def denied(self) -> int:
        """Connections turned away because they are not of this job."""
        return self._watch.denied

    def close(self) -> None:
        """Stop listening; called by the thread that uses the socket."""
        self._watch.stop()
        self.router.close()
        self._authenticator.stop()


class _OneKey:
    """The authenticator's question whether a CURVE key is the job's."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def connect(context: zmq.Context[Any], key: JobKey, endpoint: Endpoint, identity: bytes) -> zmq.Socket[Any]:
    """A DEALER to a server, known there as `identity`; it reconnects by itself."""
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _unlimited(dealer)
    dealer.linger = 500
    dealer.setsockopt(zmq.IDENTITY, identity)
    if key.curve:
        dealer.curve_publickey, dealer.curve_secretkey = key.public_key, key.secret_key
        dealer.curve_serverkey = endpoint.public_key
    else:
        dealer.plain_username, dealer.plain_password = _USER.encode(), key.secret.encode()
    dealer.connect(f"tcp://{endpoint.host}:{endpoint.port}")
    return dealer


def _unlimited(socket: zmq.Socket[Any]) -> None:
    """No message is lost to a full queue; a worker has one push in flight, which bounds the queues."""
    keep_alive(socket)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
