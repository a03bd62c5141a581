"""Addresses and CURVE keys of all ranks, created at start; the public keys are exchanged over Horovod.

All connections of a job use these keys: control, tensors, parameter servers. A secret key stays in the process that
created it; only a parameter server gets its key from its rank, over an inherited socket. Connections without a key of
this job (a wrong key, none, or another protocol) fail in ZeroMQ's handshake and are counted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from star_hvd import env
from star_hvd.channel.closing import CLOSE_S, close_within
from star_hvd.channel.connection_filter import loopback_source, resolve, route
from star_hvd.channel.handshake_limiter import DATA_BYTES, HandshakeLimiter, set_limits
from star_hvd.errors import StarError

__all__ = ["JobKey", "KeyPair", "Keyring", "Peer", "PrivateFolder", "own_address"]

logger = logging.getLogger("star_hvd")


_OUTSIDE = ("198.51.100.1", 9)  # Reserved for documentation: no host's own address.


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach a rank: its public key, host address, and ports (control only on rank 0).

    Attributes:
        public_key: The rank's public key.
        host: Its address.
        control_port: Port of the coordinator, 0 on all ranks but 0.
        tensor_port: Port of its tensor server.
        server_key: Public key of the parameter server it may start.
        tensor_path: Unix socket of its tensor server, used instead of the port if all ranks share a host.
    """

    public_key: bytes
    host: str
    control_port: int
    tensor_port: int
    server_key: bytes = b""
    tensor_path: str = ""


def own_address(*, single_host: bool) -> str:
    """Return the IPv4 address that the other ranks use for this one.

    Order: `STAR_HOST`, loopback when all ranks share a host, the interface Horovod was given, the host name, the
    address of the default route, the only address that is not loopback. With `mpirun` and `srun` no interface is given,
    and Debian's `/etc/hosts` maps the host name to 127.0.1.1, where other hosts would reach themselves.

    Raises:
        StarError: `STAR_HOST` is another host's or an IPv6 address, the interface has no IPv4 address, or no address
            can be chosen. It is no `ChannelError`: an elastic job would take it for a lost rank and try again with the
            same settings.
    """
    if chosen := env.host():
        return _checked(chosen)
    if single_host:
        return "127.0.0.1"
    interface = env.interface()
    if interface:
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise StarError(
            f"network interface {interface!r} has no IPv4 address; set STAR_INTERFACE to one of "
            f"{sorted(psutil.net_if_addrs())} or STAR_HOST to this host's address"
        )
    named = _named_address()
    return named if named and not _is_loopback(named) else _routed_address() or _only_address(named)


def _checked(chosen: str) -> str:
    """Return `STAR_HOST`, which reaches every host if it is set at the launcher, if it is an address of this host."""
    addresses = [each for found in psutil.net_if_addrs().values() for each in found]
    known = {str(each.address) for each in addresses if each.family == socket.AF_INET}
    if chosen in known or _is_loopback(chosen):  # Every address in 127/8 is this host, whatever is listed.
        return chosen
    if _is_ipv6(chosen):
        raise StarError(
            f"STAR_HOST is {chosen}, an IPv6 address; STAR's channel uses IPv4: give this host's IPv4 address, one of "
            f"{sorted(known) or 'none'}"
        )
    raise StarError(
        f"STAR_HOST is {chosen}, which is no address of host {socket.gethostname()}; set it per host, not for all, or "
        f"STAR_INTERFACE to one of {sorted(psutil.net_if_addrs())}"
    )


def _named_address() -> str | None:
    """Return the IPv4 address of the host's name, None if it has none: in containers a name is often not resolved."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except (OSError, UnicodeError):  # The latter for a name that is none of the domain name system's.
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _is_ipv6(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text.strip("[]")).version == 6
    return False


def _routed_address() -> str | None:
    """Return the address from which this host sends to others by its default route, None if it has no such route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_OUTSIDE)  # Sends nothing.
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if _is_loopback(address) else address


def _only_address(named: str | None) -> str:
    """Return the only IPv4 address of the interfaces that are up, loopback left out."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    known = [each for name, found in psutil.net_if_addrs().items() if name in up for each in found]
    addresses = {str(each.address) for each in known if each.family == socket.AF_INET}
    found = sorted(each for each in addresses if not _is_loopback(each))
    if len(found) != 1:
        has = f"the loopback address {named}, which other hosts cannot reach" if named else "no IPv4 address"
        raise StarError(
            f"the name of this host, {socket.gethostname()!r}, has {has}, and its interfaces have "
            f"{found or 'no other address'}; set STAR_INTERFACE to one of {sorted(psutil.net_if_addrs())} or STAR_HOST "
            "to this host's IPv4 address; STAR's channel does not use IPv6"
        )
    return found[0]


class KeyPair:
    """A CURVE key pair that cannot be pickled; its repr shows only the public key."""

    __slots__ = ("_secret", "public")

    def __init__(self) -> None:
        self.public, self._secret = zmq.curve_keypair()

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"

    def __reduce__(self) -> Any:
        raise TypeError("a key pair must not leave its process")

    def serve(self, sock: zmq.Socket[Any]) -> None:
        """Make a socket, which must not be bound yet, the server of encrypted connections."""
        sock.curve_server = True
        sock.curve_publickey, sock.curve_secretkey = self.public, self._secret

    def join(self, sock: zmq.Socket[Any], server_key: bytes) -> None:
        """Make a socket, which must not be connected yet, a client of the server with `server_key`."""
        sock.curve_publickey, sock.curve_secretkey = self.public, self._secret
        sock.curve_serverkey = server_key

    def hand_over(self) -> list[bytes]:
        """Return both halves, to be sent only to a child process over its inherited socket."""
        return [self.public, self._secret]

    @classmethod
    def taken_over(cls, halves: Iterable[bytes]) -> KeyPair:
        """The inverse of `hand_over`."""
        pair = cls.__new__(cls)
        pair.public, pair._secret = (bytes(half) for half in halves)
        return pair


class JobKey:
    """The keys that one process uses with the parameter servers of its job.

    Args:
        own: This process's pair.
        server: The pair of the server that this rank may start.
        admitted: Public keys that servers accept: those of all ranks and their servers.
        sources: IPv4 addresses that the job's connections come from, as far as known.
    """

    def __init__(
        self, own: KeyPair, server: KeyPair, admitted: Iterable[bytes], sources: Iterable[str] = ()
    ) -> None:
        self.own, self.server, self.admitted = own, server, frozenset(admitted)
        self.sources = frozenset(sources)

    @classmethod
    def new(cls, admitted: Iterable[bytes] = ()) -> JobKey:
        """Create new pairs on one host, which also admit each other."""
        own, server = KeyPair(), KeyPair()
        keys = {own.public, server.public, *admitted}
        return cls(own, server, keys, map(loopback_source, keys))

    def __repr__(self) -> str:
        return f"JobKey({self.own!r}, {len(self.admitted)} admitted)"

    def for_server(self) -> dict[str, Any]:
        """Return the values for this rank's server, secret key included: to be sent only over its inherited socket."""
        return {"pair": self.server.hand_over(), "admitted": sorted(self.admitted), "sources": sorted(self.sources)}

    @classmethod
    def of_server(cls, values: Mapping[str, Any]) -> JobKey:
        """The inverse of `for_server`, in the server."""
        pair = KeyPair.taken_over(values["pair"])
        return cls(pair, pair, (bytes(key) for key in values["admitted"]), map(str, values["sources"]))

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell the authenticator whether a public key belongs to this job."""
        return key in self.admitted


_MAX_FOLDER = 90  # A Unix socket's path may have 107 characters.


class PrivateFolder:
    """A folder for Unix sockets with mode 0700, so that only this user can connect."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="star-"))  # Mode 0700.
        if len(str(self.path)) > _MAX_FOLDER:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix="star-", dir="/tmp"))

    @classmethod
    def if_possible(cls) -> PrivateFolder | None:
        """Return a new folder, None if there is no place for temporary files that this process may write to."""
        try:
            return cls()
        except OSError as error:
            logger.info("no folder for Unix sockets, so ranks of this host use TCP: %s", error)
            return None

    @staticmethod
    def is_own(path: str) -> bool:
        """Return whether a folder exists, belongs to this user, and only this user can enter it."""
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


class _Known:
    """Decides for the authenticator whether a public key belongs to this job."""

    def __init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


class Keyring:
    """This rank's key pairs, its ZeroMQ context, and the public keys of the others.

    Attributes:
        limiter: Watches the connections to the sockets of `server`.
    """

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pair, self.server_pair = KeyPair(), KeyPair()
        self.peers: list[Peer] = []
        self._known = _Known()
        self.limiter = HandshakeLimiter()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._known)

    @property
    def public_key(self) -> bytes:
        """This rank's public key."""
        return self.pair.public

    @property
    def denied(self) -> int:
        """Connections rejected because they are not of this job."""
        return self.limiter.denied

    def admit(self, peers: list[Peer]) -> None:
        """Accept connections of these ranks from now on; `peers` is in order of rank."""
        self.peers = peers
        self._known.keys = frozenset(peer.public_key for peer in peers)
        self.limiter.expect(2 * len(peers))  # A rank may have one connection for fetches and one for pushes.
        self.limiter.know(self._sources())

    def _sources(self) -> frozenset[str]:
        """Addresses that the job's connections come from."""
        near = [peer for peer in self.peers if peer.host.startswith("127.")]
        hosts = {peer.host for peer in self.peers} - {peer.host for peer in near}
        keys = [key for peer in near for key in (peer.public_key, peer.server_key)]
        return frozenset(filter(None, [*map(loopback_source, keys), *map(resolve, hosts)]))

    def job_key(self) -> JobKey:
        """Return the keys for parameter servers; call after `admit`."""
        servers = {peer.server_key for peer in self.peers if peer.server_key}
        return JobKey(self.pair, self.server_pair, self._known.keys | servers, self._sources())

    def server(self, host: str, max_bytes: int = DATA_BYTES) -> tuple[zmq.Socket[Any], int]:
        """Return a bound ROUTER that accepts only ranks of this job, and its port.

        Args:
            host: Address to listen on.
            max_bytes: Largest message; a peer that announces a larger one is disconnected.
        """
        router = self._router(max_bytes)
        self.pair.serve(router)
        self.limiter.watch(router)
        port = router.bind_to_random_port(f"tcp://{host}")
        return router, int(port)

    def local_server(self, folder: Path) -> tuple[zmq.Socket[Any], str]:
        """Return a bound ROUTER on an unencrypted Unix socket in a private folder, and its path."""
        router = self._router(DATA_BYTES)
        path = str(folder / secrets.token_hex(4))
        router.bind(f"ipc://{path}")
        return router, path

    def _router(self, max_bytes: int) -> zmq.Socket[Any]:
        router: zmq.Socket[Any] = self.context.socket(zmq.ROUTER)
        router.linger = 0
        set_limits(router, max_bytes)
        # A rank that reconnects keeps its identity, although its old connection may still seem open here.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return router

    def client(
        self, rank: int, identity: bytes, *, port: int, watch: Callable[[zmq.Socket[Any]], None] = lambda _: None
    ) -> zmq.Socket[Any]:
        """Return a DEALER connected to a server of `rank`.

        Args:
            rank: The server's rank.
            identity: The client's; if empty, the server assigns one.
            port: The server's port.
            watch: Called with the socket before it connects, so that a monitor misses nothing.
        """
        peer = self.peers[rank]
        dealer: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        dealer.linger = 1000
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        set_limits(dealer, DATA_BYTES)
        watch(dealer)
        if peer.tensor_path and port == peer.tensor_port:
            dealer.connect(f"ipc://{peer.tensor_path}")
            return dealer
        self.pair.join(dealer, peer.public_key)
        dealer.connect(route(self.public_key, peer.host, port))
        return dealer

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Stop the authenticator and destroy the context, at the deadline without waiting for their end.

        Threads should have closed their sockets before.
        """
        self.limiter.stop()
        close_within(self._end, "the context of this rank's connections", deadline_s)

    def _end(self) -> None:
        self._authenticator.stop()
        self.context.destroy(linger=500)
