"""Faults of a job: processes that are stopped or killed, connections that are reset, cut off or slow.

Every rank has a network namespace of its own, so a network fault affects a single host. Every fault that persists is
undone when its block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.machine.netns import Network
from star_hvd.ps.common.forking import SERVER_NAME

__all__ = ["FAULTS", "ROLES", "Nemesis", "possible"]

USUAL_BITS_PER_S, SLOW_BITS_PER_S = 400e6, 2e6
PAUSES_S, PARTITION_S, SLOW_S, RESETS = (0.3, 1.0, 4.0), 3.0, 4.0, 6
SERVERS_S = 60.0  # Within this time a killed server is replaced, even on the busiest machine.
STACKS_S = 2.0
ROLES = ("worker", "server", "rank 0", "owner")
FAULTS = ("pause", "kill", "reset", "partition", "rate")


def possible(fault: str, role: str, mode: str) -> bool:
    """Whether a job in this mode must survive this fault in this role.

    A static job cannot lose a rank, so only servers are killed. A server has no link of its own, only its owner's.
    """
    served = mode.startswith(("ps", "grouped", "ssp", "asgd"))
    if role in ("server", "owner") and not served:
        return False
    return role == "server" if fault == "kill" else not (role == "server" and fault in ("partition", "rate", "reset"))


@dataclass
class Nemesis:
    """Injects faults into a running job.

    Args:
        network: Its hosts, one per rank.
        ready: What every rank reported once the mode was in force.
        seed: Seed of times and victims.
    """

    network: Network
    ready: list[dict[str, Any]]
    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.log: list[str] = []

    def strike(self, fault: str, role: str) -> None:
        """Inject one fault into one role, from start to end."""
        victim = self._rank(role)
        self.log.append(f"{fault} of {role} (rank {victim})")
        acts: dict[str, Callable[[int, str], None]] = {
            "pause": self._pause, "kill": self._kill, "reset": self._reset,
            "partition": self._partition, "rate": self._slow,
        }  # fmt: skip
        acts[fault](victim, role)

    def stacks(self) -> None:
        """Make every process of the job print its threads' stacks to its output; this ends servers."""
        servers = [server for rank in range(len(self.ready)) for server in self._servers(rank)]
        for rank in range(len(self.ready)):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.ready[rank]["pid"]).send_signal(signal.SIGUSR1)
        for server in servers:  # PYTHONFAULTHANDLER is set in their environment.
            with contextlib.suppress(psutil.NoSuchProcess):
                server.send_signal(signal.SIGABRT)
        time.sleep(STACKS_S)

    def _rank(self, role: str) -> int:
        if role == "rank 0":
            return 0
        if role == "worker":
            return len(self.ready) - 1
        return self.random.choice(self._owners())

    def _owners(self) -> list[int]:
        """Return the ranks that run a server, waiting if a killed server has not been replaced yet."""
        return self._awaited(lambda: [rank for rank in range(len(self.ready)) if self._servers(rank)])

    def _awaited(self, look: Callable[[], list[Any]]) -> list[Any]:
        """Return what `look` finds, waiting until it finds something."""
        limit_s = time.monotonic() + SERVERS_S
        while not (found := look()):
            assert time.monotonic() < limit_s, f"there has been no server for {SERVERS_S:g} s"
            time.sleep(0.05)
        return found

    def _servers(self, rank: int) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.ready[rank]["pid"]).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == SERVER_NAME:
                        found.append(child)
        return found

    def _process(self, rank: int, role: str) -> psutil.Process:
        if role == "server":  # That `_owners` has seen may have been killed, and its successor not be there yet.
            return self._awaited(lambda: self._servers(rank))[0]
        return psutil.Process(self.ready[rank]["pid"])

    def _pause(self, rank: int, role: str) -> None:
        process = self._process(rank, role)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(self.random.choice(PAUSES_S))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # An unresponsive server may have been killed.
                process.send_signal(signal.SIGCONT)

    def _kill(self, rank: int, role: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process(rank, role).kill()

    def _reset(self, rank: int, role: str) -> None:
        """Reset this host's connections from or to ports of the job; for rank 0 that includes those from all hosts."""
        ports = [port for each in self.ready for port in each["ports"]]
        for _ in range(RESETS):
            time.sleep(self.random.uniform(0.02, 0.3))
            port = self.random.choice(ports)
            filters = ["dport", "=", f":{port}", "or", "sport", "=", f":{port}"]
            space = self.network.hosts[rank].namespace
            command = ["ip", "netns", "exec", space, "ss", "-K", "-tn", "state", "established", "(", *filters, ")"]
            subprocess.run(command, check=True, capture_output=True, timeout=20.0)

    def _partition(self, rank: int, role: str) -> None:
        with self._link(rank, "down"):
            time.sleep(PARTITION_S)

    @contextlib.contextmanager
    def _link(self, rank: int, state: str) -> Iterator[None]:
        outer = self.network.hosts[rank].outer
        subprocess.run(["ip", "link", "set", outer, state], check=True, timeout=20.0)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "set", outer, "up"], check=True, timeout=20.0)

    def _slow(self, rank: int, role: str) -> None:
        self.network.set_rate(rank, SLOW_BITS_PER_S)
        try:
            time.sleep(SLOW_S)
        finally:
            self.network.set_rate(rank, USUAL_BITS_PER_S)
