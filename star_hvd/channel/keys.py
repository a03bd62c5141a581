"""Addresses and CURVE keys of all ranks, made at start and exchanged over Horovod.

Whoever knows no key of this job gets no further than ZeroMQ's handshake; such attempts are counted, with the wrong key,
without any, or not speaking ZeroMQ's protocol at all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from star_hvd import env
from star_hvd.channel.options import keep_alive
from star_hvd.errors import ChannelError
from star_hvd.threads import supervised

__all__ = ["DoorWatch", "Keyring", "Peer", "own_address"]


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

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


class DoorWatch:
    """Thread that counts who came to the servers of a ring and who was let in.

    The authenticator alone would not do: it never hears of a connection without a key.
    """

    _EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

    def __init__(self) -> None:
        self._count = dict.fromkeys((zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED), 0)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def denied(self) -> int:
        """Connections that ended without having been let in; one in the middle of its handshake may count early."""
        accepted, succeeded, disconnected = self._count.values()
        return max(0, min(accepted - succeeded, disconnected))

    def watch(self, router: zmq.Socket[Any]) -> None:
        """Count what happens at a server from now on, before it is bound."""
        monitor = router.get_monitor_socket(self._EVENTS)
        thread = supervised(self._run, "star-door", args=(monitor,), critical=False)
        self._threads.append(thread)
        thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the threads and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(deadline_s)

    def _run(self, monitor: zmq.Socket[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The context ends before this thread notices.
            while not self._stop.is_set():
                if monitor.poll(250):
                    event = zmq.Event(recv_monitor_message(monitor)["event"])
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        break
                    self._count[event] += 1
            monitor.close(linger=0)


class Keyring:
    """This rank's key pair, its ZeroMQ context, and the public keys of the others."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.public_key, self._secret_key = zmq.curve_keypair()
        self.peers: list[Peer] = []
        self._known = _Known()
        self._door = DoorWatch()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._known)

    @property
    def denied(self) -> int:
        """Connections turned away because they are not of this job."""
        return self._door.denied

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
        # A rank whose connection broke comes back under its name while the old one may still seem open here.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keep_alive(router)
        router.setsockopt(zmq.MAXMSGSIZE, 64 * 1024 * 1024)
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        self._door.watch(router)
        port = router.bind_to_random_port(f"tcp://{host}")
        return router, int(port)

    def client(self, rank: int, identity: bytes, *, port: int) -> zmq.Socket[Any]:
        """A DEALER connected to a server of `rank`; with an empty `identity` the server gives it one."""
        peer = self.peers[rank]
        dealer: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        dealer.linger = 1000
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        keep_alive(dealer)
        dealer.setsockopt(zmq.MAXMSGSIZE, 64 * 1024 * 1024)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.curve_publickey, dealer.curve_secretkey = self.public_key, self._secret_key
        dealer.curve_serverkey = peer.public_key
        dealer.connect(f"tcp://{peer.host}:{port}")
        return dealer

    def close(self) -> None:
        """Stop the authenticator and drop all sockets of this ring. Sockets must be closed by their threads."""
        self._door.stop()
        self._authenticator.stop()
        self.context.destroy(linger=500)
