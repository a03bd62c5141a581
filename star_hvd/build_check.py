"""Checks that all ranks run the same build of Horovod, before Horovod starts and in the first collective.

Horovod's processes exchange bit vectors and messages without a version number. Patch 0004 adds a status bit to each
cycle's vector, so every bit after the third means something else on a host with the patch than on one without: tensors
are mistaken for each other, and with dynamic process sets one side starts a collective that the other does not know.
Nothing raises; the job hangs or reduces unrelated tensors. The same happens with different versions of NCCL.

The builds are compared in two places:

1. `compare_before_init`, in `star_hvd.init`, before dynamic process sets are enabled and before Horovod's first cycle.
   It uses only the key-value store of `horovodrun`'s rendezvous, so it works between any two builds. It covers jobs of
   a fixed size under Gloo; in elastic training Horovod itself assigns the ranks, and under MPI there is no store.
2. `require_equal`, in the first collective of all ranks, covers the other jobs. Horovod negotiates new tensors by name,
   not by bit, and no process set exists yet, so different builds still understand each other unless dynamic sets are
   enabled; that is why the first comparison comes before they are.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from star_hvd import patches
from star_hvd.errors import StarError

__all__ = ["Build", "BuildMismatchError", "compare_before_init", "mismatch", "own_build", "require_equal"]

logger = logging.getLogger("star_hvd")

_SCOPE = "star.build"
_RESULT = "verdict"
_REQUEST_S = 5.0
_POLL_S = (0.01, 0.25)


class BuildMismatchError(StarError):
    """Ranks run incompatible builds of Horovod."""


@dataclass(frozen=True, slots=True)
class Build:
    """The properties of a Horovod that must be equal on all ranks, and its host.

    Attributes:
        horovod: Version without the local part.
        patches: Numbers of its patches and eight digits of the digest over their contents, or `no patches`.
        nccl: Version of the NCCL it was built with, None without.
        host: Name of the host, for the message; not compared.
    """

    horovod: str
    patches: str
    nccl: str | None
    host: str

    @property
    def digest(self) -> str:
        """Digest that is equal for compatible builds."""
        return hashlib.sha256(f"{self.horovod}|{self.patches}|{self.nccl}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"Horovod {self.horovod} with {self.patches}, {f'NCCL {self.nccl}' if self.nccl else 'no NCCL'}"


def own_build() -> Build:
    """Return the build of this process, without importing Horovod."""
    facts = patches.build_list()
    entries = facts.get("patches", [])
    content = "".join(f"{entry['number']}:{entry['sha256']};" for entry in entries)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    numbers = [entry["number"] for entry in entries]
    named = f"patches {numbers[0]}-{numbers[-1]} ({digest})" if numbers else "no patches"
    nccl = facts.get("build", {}).get("nccl")
    return Build(facts.get("horovod") or patches.horovod_release() or "unknown", named, nccl, socket.gethostname())


def mismatch(builds: Iterable[Build]) -> str | None:
    """Return the error's text if these builds, by rank, are incompatible; None if they are equal."""
    groups: dict[str, list[int]] = {}
    found: dict[str, Build] = {}
    hosts: dict[str, set[str]] = {}
    for rank, build in enumerate(builds):
        groups.setdefault(build.digest, []).append(rank)
        found[build.digest] = build
        hosts.setdefault(build.digest, set()).add(build.host)
    if len(groups) < 2:
        return None
    parts = []
    for digest, ranks in groups.items():
        who = f"rank{'s' if len(ranks) > 1 else ''} {_spans(ranks)} on {', '.join(sorted(hosts[digest])[:4])}"
        parts.append(f"{who}: {found[digest]}")
    return (
        f"got {len(groups)} different builds of Horovod in one job, expected one: their messages are incompatible: "
        f"{'; '.join(parts)}. Install the same one on all hosts: python scripts/build_horovod.py, from the same state "
        f"of the project and with the same HOROVOD_GPU_OPERATIONS; star-hvd doctor shows what a host has"
    )


def require_equal(builds: Iterable[Build]) -> None:
    """Raise BuildMismatchError, on every rank, if these builds, by rank, are incompatible."""
    reason = mismatch(builds)
    if reason is not None:
        raise BuildMismatchError(reason)


def _spans(ranks: list[int]) -> str:
    """Return `0-2,5` for 0, 1, 2 and 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# ---- before Horovod starts ----------------------------------------------------------------------------------------


class _Store:
    """The launcher's key-value store."""

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port

    def put(self, key: str, value: str) -> None:
        status, _ = self._request("PUT", key, value.encode())
        if status != http.client.OK:
            raise OSError(f"the launcher's store answered {status} to {key}")

    def get(self, key: str) -> str | None:
        status, body = self._request("GET", key)
        return body.decode() if status == http.client.OK else None

    def wait(self, key: str, deadline_s: float) -> str | None:
        """Wait for a value until `deadline_s` on the monotonic clock; None if there is none by then."""
        pause_s = _POLL_S[0]
        while (value := self.get(key)) is None and time.monotonic() < deadline_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return value

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_REQUEST_S)
        try:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def compare_before_init(environ: Mapping[str, str] = os.environ) -> None:
    """Raise BuildMismatchError on all ranks if builds differ; call it before Horovod is initialized.

    Rank 0 compares the records of all ranks and publishes the result, so that every rank raises the same error. If
    there is no store, it does not answer, or a rank is late, nothing is raised: `require_equal` compares again later.

    Args:
        environ: The launcher's variables; ranks are waited for as long as in Horovod's own rendezvous.
    """
    address, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    rank, size = int(environ.get("HOROVOD_RANK", "0")), int(environ.get("HOROVOD_SIZE", "1"))
    if not address or not port or size < 2 or environ.get("HOROVOD_ELASTIC", "0") == "1":
        return
    try:
        deadline_s = time.monotonic() + float(environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        store = _Store(address, int(port))
        reason = _publish(store, size, deadline_s) if rank == 0 else _follow(store, rank, deadline_s)
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        logger.debug("the builds of the ranks are compared after the start only: %s", error)
        return
    if reason:
        raise BuildMismatchError(reason)


def _publish(store: _Store, size: int, deadline_s: float) -> str:
    builds = [own_build()]
    for rank in range(1, size):
        value = store.wait(str(rank), deadline_s)
        if value is None:
            logger.debug("rank %d has not published its build: compared after the start only", rank)
            store.put(_RESULT, "")
            return ""
        builds.append(Build(**json.loads(value)))
    reason = mismatch(builds) or ""
    store.put(_RESULT, reason)
    return reason


def _follow(store: _Store, rank: int, deadline_s: float) -> str:
    store.put(str(rank), json.dumps(asdict(own_build())))
    return store.wait(_RESULT, deadline_s) or ""
