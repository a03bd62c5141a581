"""Who may talk on the channel: ranks of this job, and nobody else, however they knock."""

from __future__ import annotations

import socket
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from star_hvd.channel.keys import Keyring, Peer, PrivateFolder, own_address
from star_hvd.errors import StarError


@pytest.fixture
def ring() -> Any:
    ring = Keyring()
    router, port = ring.server("127.0.0.1")
    friend = Keyring()
    peers = [Peer(ring.public_key, "127.0.0.1", port, 0), Peer(friend.public_key, "127.0.0.1", 0, 0)]
    ring.admit(peers)
    friend.admit(peers)
    yield ring, router, port, friend
    router.close(linger=0)
    friend.close()
    ring.close()


def test_a_rank_of_the_job_is_heard_under_its_identity(ring: Any) -> None:
    _, router, port, friend = ring
    dealer = friend.client(0, b"1", port=port)
    dealer.send(b"hello")
    assert router.poll(60_000) and router.recv_multipart() == [b"1", b"hello"]
    router.send_multipart([b"1", b"and you"])
    assert dealer.poll(60_000) and dealer.recv() == b"and you"
    dealer.close(linger=0)


def test_without_a_place_for_temporary_files_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PrivateFolder.if_possible()
    assert made is not None and PrivateFolder.is_own(str(made.path))
    made.close()
    assert not made.path.exists()

    def refused(*args: Any, **named: Any) -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    assert PrivateFolder.if_possible() is None


def test_a_foreign_key_is_denied_and_counted(ring: Any) -> None:
    own, router, port, friend = ring
    stranger = Keyring()
    stranger.admit(friend.peers)  # It knows the server's public key, and no key the server knows.
    dealer = stranger.client(0, b"1", port=port)
    dealer.send(b"hello")
    assert not router.poll(700), "a stranger was heard"
    assert denied_within(own, 60.0), "the attempt was not counted"  # Its handshake may take longer on a busy machine.
    assert not router.poll(0) and not dealer.poll(0)
    dealer.close(linger=0)
    stranger.close()
    test_a_rank_of_the_job_is_heard_under_its_identity(ring)


def test_the_wrong_key_of_the_server_gets_nothing(ring: Any) -> None:
    _, router, port, friend = ring
    friend.peers = [Peer(zmq.curve_keypair()[0], "127.0.0.1", port, 0)]
    dealer = friend.client(0, b"1", port=port)
    dealer.send(b"hello")
    assert not router.poll(500)
    dealer.close(linger=0)


def test_a_client_without_any_key_gets_nothing_and_is_counted(ring: Any) -> None:
    own, router, port, _ = ring
    plain: Any = own.context.socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{port}")
    plain.send(b"hello")
    assert not router.poll(700) and not plain.poll(0)
    assert denied_within(own, 60.0), "the attempt was not counted"
    assert not router.poll(0) and not plain.poll(0)
    plain.close(linger=0)


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"\xff" + bytes(63), b""])
def test_junk_on_the_port_is_dropped_and_the_ranks_still_talk(ring: Any, junk: bytes) -> None:
    _, router, port, _ = ring
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port), timeout=60.0) as raw:
            try:
                raw.sendall(junk)
            except OSError:
                pass
    assert not router.poll(200)
    test_a_rank_of_the_job_is_heard_under_its_identity(ring)


def denied_within(own: Keyring, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while own.denied == 0 and time.monotonic() < end_s:
        time.sleep(0.02)
    return own.denied > 0


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAR_HOST", "STAR_INTERFACE", "HOROVOD_GLOO_IFACE"):
        monkeypatch.delenv(name, raising=False)
    assert own_address(single_host=True) == "127.0.0.1"
    monkeypatch.setenv("STAR_INTERFACE", "lo")
    assert "lo" not in psutil.net_if_addrs() or own_address(single_host=False) == "127.0.0.1"
    monkeypatch.setenv("STAR_INTERFACE", "nosuch0")
    with pytest.raises(StarError, match="'nosuch0' has no IPv4 address; set STAR_INTERFACE to one of"):
        own_address(single_host=False)


def test_an_address_set_for_the_host_has_to_be_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set at the launcher it reaches every host, and only one of them can listen there."""
    Host(monkeypatch, {"lo": ["127.0.0.1"], "eth0": ["10.1.2.3"]}, routed="10.1.2.3", named="10.1.2.3")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-b")
    for own in ("10.1.2.3", "127.0.0.2"):
        monkeypatch.setenv("STAR_HOST", own)
        assert own_address(single_host=True) == own_address(single_host=False) == own
    monkeypatch.setenv("STAR_HOST", "10.1.2.4")
    said = "STAR_HOST is 10.1.2.4, which is no address of host host-b; set it per host, .*STAR_INTERFACE to .*eth0"
    with pytest.raises(StarError, match=said):
        own_address(single_host=False)


@pytest.mark.parametrize("address", ["fe80::1", "fe80::1%eth0", "[2001:db8::7]", "::1"])
def test_an_ipv6_address_is_refused_with_what_to_give_instead(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    Host(monkeypatch, LO | {"eth0": ["10.1.2.3"]}, routed=None, named="")
    psutil.net_if_addrs()["eth0"].append(SimpleNamespace(family=socket.AF_INET6, address=address.strip("[]")))
    monkeypatch.setenv("STAR_HOST", address)
    with pytest.raises(StarError, match=r"an IPv6 address; STAR's channel uses IPv4: give .* one of .*'10\.1\.2\.3'"):
        own_address(single_host=False)


def test_a_hardware_address_is_no_address_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, LO, routed=None, named="")
    psutil.net_if_addrs()["lo"].append(SimpleNamespace(family=socket.AF_PACKET, address="02:00:00:00:00:01"))
    monkeypatch.setenv("STAR_HOST", "02:00:00:00:00:01")
    with pytest.raises(StarError, match="which is no address of host"):
        own_address(single_host=False)


class Host:
    """A host whose name has a loopback address, as Debian's installer leaves it; addresses by interface."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], *, routed: str | None, named: str
    ) -> None:
        for name in ("STAR_HOST", "STAR_INTERFACE", "HOROVOD_GLOO_IFACE"):
            monkeypatch.delenv(name, raising=False)
        made = {
            name: [SimpleNamespace(family=socket.AF_INET, address=each) for each in found]
            for name, found in addresses.items()
        }
        states = {name: SimpleNamespace(isup=not name.startswith("down")) for name in made}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: made)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
        monkeypatch.setattr(socket, "gethostbyname", lambda name: named)
        monkeypatch.setattr(socket, "socket", lambda *kind: self)
        self._routed = routed

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self._routed is None:
            raise OSError("network is unreachable")

    def getsockname(self) -> tuple[str | None, int]:
        return self._routed, 40_000


LO = {"lo": ["127.0.0.1"]}


@pytest.mark.parametrize(
    ("addresses", "routed", "expected"),
    [
        ({"eth0": ["10.0.0.5"], "eth1": ["10.1.0.5"]}, "10.1.0.5", "10.1.0.5"),
        ({"eth0": ["10.0.0.5"], "down0": ["10.1.0.5"]}, None, "10.0.0.5"),
        ({"eth0": ["10.0.0.5"]}, "127.0.0.1", "10.0.0.5"),
    ],
)
def test_a_host_name_that_is_loopback_is_not_told_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], routed: str | None, expected: str
) -> None:
    Host(monkeypatch, LO | addresses, routed=routed, named="127.0.1.1")
    assert own_address(single_host=False) == expected


@pytest.mark.parametrize("addresses", [{}, {"down0": ["10.0.0.5"]}, {"eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"]}])
def test_a_host_without_one_address_for_others_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]
) -> None:
    Host(monkeypatch, LO | addresses, routed=None, named="127.0.1.1")
    with pytest.raises(StarError, match="loopback address 127.0.1.1, .* set STAR_INTERFACE to .* STAR_HOST to .* IPv4"):
        own_address(single_host=False)


def test_a_host_name_that_is_an_address_for_others_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, LO | {"eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"]}, routed="10.1.0.5", named="10.0.0.5")
    assert own_address(single_host=False) == "10.0.0.5"


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_host_whose_name_has_no_address_is_found_by_its_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """In containers a name is often not resolved, or only to an IPv6 address."""

    def unresolved(name: str) -> str:
        raise error

    for routed, expected in (("10.1.0.5", "10.1.0.5"), (None, "10.0.0.5")):
        Host(monkeypatch, LO | {"eth0": ["10.0.0.5"]}, routed=routed, named="")
        monkeypatch.setattr(socket, "gethostbyname", unresolved)
        assert own_address(single_host=False) == expected
    Host(monkeypatch, LO, routed=None, named="")
    monkeypatch.setattr(socket, "gethostbyname", unresolved)
    with pytest.raises(StarError, match="has no IPv4 address, and its interfaces have no other address; set STAR_"):
        own_address(single_host=False)


def test_closing_does_not_hang() -> None:
    ring = Keyring()
    router, port = ring.server("127.0.0.1")
    ring.admit([Peer(ring.public_key, "127.0.0.1", port, 0)])
    dealer = ring.client(0, b"0", port=port)
    dealer.send(b"never read")
    router.close(linger=0)
    dealer.close(linger=0)
    began_s = time.monotonic()
    ring.close()
    assert time.monotonic() - began_s < 60.0
