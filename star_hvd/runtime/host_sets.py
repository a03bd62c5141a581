"""Process sets for hierarchical reductions: the ranks of each host, and one leading rank of every host.

Made by `star_hvd.init`, on all ranks in one order and before any other thread makes sets; only if the user asks for
hierarchical reductions (`HOROVOD_HIERARCHICAL_ALLREDUCE=1`, which Horovod itself uses with NCCL only).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.process_sets import add_process_set
from horovod.torch import mpi_ops
from horovod.torch.functions import allgather_object

from star_hvd import env
from star_hvd.runtime.process_sets import unavailable_reason

__all__ = ["HostSets", "groups_of", "host_sets", "make_host_sets"]

logger = logging.getLogger("star_hvd")


@dataclass(frozen=True, slots=True)
class HostSets:
    """The sets that this rank is in.

    Attributes:
        leader: Leading rank of this rank's host.
        inside: Set of this host's ranks, None if this rank is alone on it.
        leaders: Set of the leading ranks of all hosts, None if this rank does not lead.
    """

    leader: int
    inside: Any
    leaders: Any


_made: HostSets | None = None


def host_sets() -> HostSets | None:
    """Return what `make_host_sets` made in this world; None for reductions over all ranks at once."""
    return _made


def groups_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of every host, ordered by first rank; `hosts` has the host of every rank."""
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def make_host_sets() -> None:
    """Make the sets if they are wanted and possible. Collective; called once Horovod is initialized."""
    global _made
    _made = None
    if not env.hierarchical() or int(mpi_ops.size()) == 1:
        return
    if (reason := _reason()) is not None:
        logger.warning("reductions are not hierarchical: %s", reason)
        return
    own = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    groups = groups_of(allgather_object(own, name="star.hosts"))
    if len(groups) == 1 or all(len(ranks) == 1 for ranks in groups):
        return
    rank, inside = int(mpi_ops.rank()), None
    for ranks in groups:
        made = add_process_set(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            inside, leader = made, ranks[0]
    leaders = add_process_set([ranks[0] for ranks in groups])
    _made = HostSets(leader, inside, leaders if rank == leader else None)


def _reason() -> str | None:
    if env.elastic():
        return "an elastic job loses its process sets at every reset"
    return unavailable_reason()
