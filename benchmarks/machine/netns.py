"""Hosts on one machine: network namespaces on a bridge with a rate limit per link, removed afterwards."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "INTERFACE",
    "Host",
    "Network",
    "NetworkError",
    "burst_bytes",
    "check_tools",
    "find_program",
    "hosts_text",
    "stale_names",
]

INTERFACE = "e0"  # Of every host, inside its namespace.
PREFIX = "slab"
NAMES = re.compile(rf"{PREFIX}([0-9a-f]+)(?:[-v]\d+)?")
SETTINGS = Path("/etc/netns")
COMMAND_DEADLINE_S = 20.0
# The kernel refills a token bucket at least 250 times a second; a bucket smaller than one refill lowers the rate.
REFILLS_PER_S = 250
LEAST_BURST_BYTES = 64 * 1024  # One segmentation-offload packet.
QUEUE_MS = 50


class NetworkError(RuntimeError):
    """Rate-limited links are unavailable here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: a namespace with one interface.

    Attributes:
        name: Host name, known inside all namespaces.
        namespace: Name of the network namespace.
        address: IPv4 address of its interface.
        outer: Name of the bridge-side end of its link.
    """

    name: str
    namespace: str
    address: str
    outer: str


def check_tools() -> None:
    """Check that namespaces are available.

    Raises:
        NetworkError: Not root, or a program is missing.
    """
    missing = [name for name in ("ip", "tc") if find_program(name) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found: on Debian or Ubuntu, apt-get install iproute2")
    if os.geteuid() != 0:
        raise NetworkError(f"network namespaces need root; this is user {os.geteuid()}: use sudo or a container")


def burst_bytes(bits_per_s: float) -> int:
    """Return the size of the token bucket filter: two refills of the kernel, at least one large packet."""
    return max(LEAST_BURST_BYTES, round(2 * bits_per_s / 8 / REFILLS_PER_S))


def hosts_text(own: Host, hosts: list[Host]) -> str:
    """Return the hosts file of a namespace; there the machine's own name resolves to the namespace's address."""
    lines = ["127.0.0.1 localhost", f"{own.address} {socket.gethostname()}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"{host.address} {host.name}" for host in hosts)])


def stale_names(names: list[str]) -> list[str]:
    """Return those of `names` that were made by a driver of this laboratory which no longer runs."""
    found = []
    for name in names:
        match = NAMES.fullmatch(name)
        if match and not psutil.pid_exists(int(match.group(1), 16)):
            found.append(name)
    return found


class Network:
    """Hosts with rate-limited links, inside the `with` block.

    Both directions of a link are limited. If a run was killed before it could remove its namespaces, the next run
    removes them.
    """

    def __init__(self, hosts: int, bits_per_s: float) -> None:
        """Choose names and addresses; nothing is created yet.

        Args:
            hosts: Number of hosts.
            bits_per_s: Rate of every link until `set_rate`.
        """
        tag = f"{PREFIX}{os.getpid():x}"
        # 198.18.0.0/15 is reserved for network benchmarks (RFC 2544), so it collides with no real address.
        subnet = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"
        self.bridge, self.gateway = tag, f"{subnet}.254"
        self.hosts = [
            Host(name=f"host{i}", namespace=f"{tag}-{i}", address=f"{subnet}.{i + 1}", outer=f"{tag}v{i}")
            for i in range(hosts)
        ]
        self._bits_per_s = bits_per_s

    def __enter__(self) -> Network:
        check_tools()
        _remove_stale()
        try:
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
            for host in self.hosts:
                self._make(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self, host: Host) -> None:
        inside = ("-n", host.namespace)
        settings = SETTINGS / host.namespace
        settings.mkdir(parents=True, exist_ok=True)
        (settings / "hosts").write_text(hosts_text(host, self.hosts), encoding="utf-8")
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.outer, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
        _ip("link", "set", host.outer, "master", self.bridge, "up")
        _ip(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip(*inside, "link", "set", INTERFACE, "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip("netns", "exec", host.namespace, "true")
        self._rate(host, "add", self._bits_per_s)

    def set_rate(self, index: int, bits_per_s: float) -> None:
        """Set the rate of both directions of a host's link."""
        self._rate(self.hosts[index], "change", bits_per_s)

    def _rate(self, host: Host, verb: str, bits_per_s: float) -> None:
        shape = ("root", "tbf", "rate", f"{round(bits_per_s)}bit", "burst", f"{burst_bytes(bits_per_s)}b")
        shape += ("latency", f"{QUEUE_MS}ms")
        for options, device in ((("-n", host.namespace), INTERFACE), ((), host.outer)):
            _run("tc", *options, "qdisc", verb, "dev", device, *shape)

    def __exit__(self, *_: object) -> None:
        """Remove everything, even if it was created only in part."""
        for host in self.hosts:
            _end_inside(host.namespace)
            _remove_namespace(host.namespace)
            _ip("link", "del", host.outer, check=False)
        _ip("link", "del", self.bridge, check=False)


def _end_inside(namespace: str) -> None:
    """Kill the processes still running in a namespace of ours, left by a job that has ended."""
    for text in _ip("netns", "pids", namespace, check=False).split():
        try:
            psutil.Process(int(text)).kill()
        except (psutil.NoSuchProcess, ValueError):
            pass


def _remove_namespace(namespace: str) -> None:
    _ip("netns", "del", namespace, check=False)
    shutil.rmtree(SETTINGS / namespace, ignore_errors=True)
    try:
        SETTINGS.rmdir()
    except OSError:  # It is missing, or holds entries of others.
        pass


def _remove_stale() -> None:
    listed = [line.split()[0] for line in _ip("netns", "list", check=False).splitlines() if line.strip()]
    kept = [path.name for path in SETTINGS.iterdir()] if SETTINGS.is_dir() else []
    for namespace in stale_names(sorted({*listed, *kept})):
        _remove_namespace(namespace)
    for link in stale_names(list(psutil.net_if_stats())):
        _ip("link", "del", link, check=False)


def find_program(name: str) -> str | None:
    """Return the path of an administrator's program, also if the user's `PATH` lacks its folder."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(name: str, *arguments: str, check: bool = True) -> str:
    try:
        done = subprocess.run(
            [find_program(name) or name, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if check:
            raise NetworkError(f"{name} {' '.join(arguments)}: {error}") from None
        return ""
    if check and done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise NetworkError(f"{name} {' '.join(arguments)}: {said}")
    return done.stdout
