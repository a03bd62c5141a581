"""Addresses and CURVE keys of all ranks, made at start and exchanged over Horovod.

Whoever knows no key of this job gets no further than ZeroMQ's handshake; such attempts are counted.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from star_hvd import env
from star_hvd.errors import ChannelError

__all__ = ["Keyring", "Peer", "own_address"]


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach a rank: its public key, host address, and ports (control only on rank 0)."""

    public_key: bytes
    host: str
    control_port: int
    tensor_port: int


def own_address(*, single_host: bool) -> str:
    """The IPv4 address the other ranks use for this one.

    Order: `STAR_HOST`, loopback when all ranks share a host, the interface Horovod was given, the host name.

    Raises:
        ChannelError: The interface has no IPv4 address.
    """
    if env.host():
        return str(env.host())
    if single_host:
        return "127.0.0.1"
    interface = env.interface()
    if interface:
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise ChannelError(
            f"network interface {interface!r} has no IPv4 address; set STAR_INTERFACE to one of "
            f"{sorted(psutil.net_if_addrs())} or STAR_HOST to this host's address"
        )
    return socket.gethostbyname(socket.gethostname())


class _Known:
    """Decides for the authenticator whether a public key belongs to this job."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.denied = 0

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self.keys:
            return True
        self.denied += 1
        return False


class Keyring:
    """This rank's key pair, its ZeroMQ context, and the public keys of the others."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.public_key, self._secret_key = zmq.curve_keypair()
        self.peers: list[Peer] = []
        self._known = _Known()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._known)

    @property
    def denied(self) -> int:
        """Connections refused because their key is not of this job."""
        return self._known.denied

    def admit(self, peers: list[Peer]) -> None:
        """Accept these ranks, in order of rank, from now on."""
        self.peers = peers
        self._known.keys = {peer.public_key for peer in peers}

    def server(self, host: str) -> tuple[zmq.Socket[Any], int]:
        """A bound ROUTER that only ranks of this job can talk to, and its port."""
        router: zmq.Socket[Any] = self.context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = self.public_key, self._secret_key
        router.setsockopt(zmq.MAXMSGSIZE, 64 * 1024 * 1024)
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        port = router.bind_to_random_port(f"tcp://{host}")
        return router, int(port)

    def client(self, rank: int, identity: bytes, *, port: int) -> zmq.Socket[Any]:
        """A DEALER connected to a server of `rank`."""
        peer = self.peers[rank]
        dealer: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        dealer.linger = 1000
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.MAXMSGSIZE, 64 * 1024 * 1024)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.curve_publickey, dealer.curve_secretkey = self.public_key, self._secret_key
        dealer.curve_serverkey = peer.public_key
        dealer.connect(f"tcp://{peer.host}:{port}")
        return dealer

    def close(self) -> None:
        """Stop the authenticator and drop all sockets of this ring. Sockets must be closed by their threads."""
        self._authenticator.stop()
        self.context.destroy(linger=500)
