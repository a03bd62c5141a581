"""Messages for switches between families of modes, parameter servers, and asynchronous steps.

A switch that hands over the state: `PlanMessage` -> `Prepared` from all ranks -> `Commit` -> the old mode drains at an
agreed step (by a header, or at the servers' last update) -> `PlanActive`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from scheduler.records import StepTimes
from star_hvd.channel.messages.base import Message, message_kind

__all__ = [
    "PrepareFailed",
    "Commit",
    "Drained",
    "DropSet",
    "LinkRate",
    "MachineNote",
    "MakeSet",
    "PlanActive",
    "Presence",
    "Probe",
    "Prepared",
    "Restart",
    "ServerRestarted",
    "ServerUp",
    "Servers",
    "StepNote",
    "Switched",
    "WarmServers",
]


@message_kind
@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """A rank has prepared the plan of this id: its process sets exist, its servers are open."""

    kind: ClassVar[str] = "ready"
    optimizer_id: int
    plan_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class PrepareFailed(Message):
    """A rank failed to prepare the plan of this id; other plans may be possible."""

    kind: ClassVar[str] = "cannot"
    optimizer_id: int
    plan_id: int
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """All ranks have prepared the plan of this id: drain the active mode."""

    kind: ClassVar[str] = "commit"
    optimizer_id: int
    plan_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class Drained(Message):
    """The servers have made their last update: the next plan begins at step `step`."""

    kind: ClassVar[str] = "cut_done"
    optimizer_id: int
    plan_id: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class Restart(Message):
    """All ranks are about to get a loaded state: leave the servers' mode, and enter it again with that state."""

    kind: ClassVar[str] = "restart"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class Switched(Message):
    """The members of a subgroup activated the plan of this id at step `step`; the coordinator informs the others."""

    kind: ClassVar[str] = "switched"
    optimizer_id: int
    plan_id: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class PlanActive(Message):
    """The plan of this id is active from step `step` on; a rank without that step's state fetches it."""

    kind: ClassVar[str] = "moved"
    optimizer_id: int
    plan_id: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class MakeSet(Message):
    """Make a Horovod process set; all ranks get these orders in the same sequence."""

    kind: ClassVar[str] = "make_set"
    ranks: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class DropSet(Message):
    """Remove a Horovod process set."""

    kind: ClassVar[str] = "drop_set"
    ranks: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class WarmServers(Message):
    """Order to these ranks to start their server processes, for a plan that may follow."""

    kind: ClassVar[str] = "warm_servers"
    ranks: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class ServerUp(Message):
    """A rank runs a server: shard `index` of the plan of this id is at `address`."""

    kind: ClassVar[str] = "server_up"
    optimizer_id: int
    plan_id: int
    index: int
    address: list[str]


@message_kind
@dataclass(frozen=True, slots=True)
class Servers(Message):
    """Addresses of all servers of a plan; the list is flat, with as many entries per server as in `ServerUp`."""

    kind: ClassVar[str] = "servers"
    optimizer_id: int
    plan_id: int
    addresses: list[str]


@message_kind
@dataclass(frozen=True, slots=True)
class ServerRestarted(Message):
    """A server was restarted after a death; sent by its rank to the coordinator, which sends it to all ranks."""

    kind: ClassVar[str] = "server_moved"
    optimizer_id: int
    plan_id: int
    index: int
    address: list[str]


@message_kind
@dataclass(frozen=True, slots=True)
class Presence(Message):
    """A rank is silent, so that servers do not wait for it, or sends messages again."""

    kind: ClassVar[str] = "presence"
    rank: int
    present: bool


@message_kind
@dataclass(frozen=True, slots=True)
class MachineNote(Message):
    """CPU, GPU and network readings of a rank's machine, once per second, see `MachineStats`."""

    kind: ClassVar[str] = "machine"
    throttled_share: float
    pressure_share: float
    gpu_clock_share: float
    gpu_throttled: float
    gpu_temperature_c: float
    nic_drops_per_s: float
    free_cpu_cores: float = math.nan
    own_cpu_cores: float = math.nan
    usable_cpu_cores: float = math.nan
    neighbour_ranks: float = math.nan


@message_kind
@dataclass(frozen=True, slots=True)
class StepNote(Message):
    """A rank's step in a mode without a common reduction: its measurements, and the staleness of its gradient."""

    kind: ClassVar[str] = "step"
    optimizer_id: int
    version: int
    plan_id: int
    times: StepTimes
    comm_s: float
    loss: float
    staleness: int


@message_kind
@dataclass(frozen=True, slots=True)
class Probe(Message):
    """Order to measure the rate of this rank's link by sending `size_bytes` to rank `target`."""

    kind: ClassVar[str] = "probe"
    target: int
    size_bytes: int


@message_kind
@dataclass(frozen=True, slots=True)
class LinkRate(Message):
    """A measured rate of the sender's link."""

    kind: ClassVar[str] = "link_rate"
    bytes_per_s: float
