"""Messages of a switch between families of modes, of parameter servers, and of asynchronous steps.

A switch that hands the state over goes: plan -> ready from all ranks -> commit -> the old mode ends at an agreed step
(in band, or at a server's last update) -> moved.
"""

from __future__ import annotations

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
    """A rank cannot prepare the plan of this id, because of what there is and is not; others may be possible."""

    kind: ClassVar[str] = "cannot"
    optimizer_id: int
    plan_id: int
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """All ranks are ready for the plan of this id: end the present mode."""

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
    """All ranks are about to load a state: end the servers' mode, and begin it again with what was loaded."""

    kind: ClassVar[str] = "restart"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class Switched(Message):
    """The members of a subgroup took up the plan of this id at step `step`; the others have to be told."""

    kind: ClassVar[str] = "switched"
    optimizer_id: int
    plan_id: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class PlanActive(Message):
    """The plan of this id is in force from step `step` on; whoever lacks the state of that step fetches it."""

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
    """Order to these ranks to start their server processes: a plan that needs them may come."""

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
    """Where all servers of a plan are; `addresses` is flat, as many entries per server as in `ServerUp`."""

    kind: ClassVar[str] = "servers"
    optimizer_id: int
    plan_id: int
    addresses: list[str]


@message_kind
@dataclass(frozen=True, slots=True)
class ServerRestarted(Message):
    """A server died and was started again; told by its rank to the coordinator, and by that to everybody."""

    kind: ClassVar[str] = "server_moved"
    optimizer_id: int
    plan_id: int
    index: int
    address: list[str]


@message_kind
@dataclass(frozen=True, slots=True)
class Presence(Message):
    """A rank is lost, or is heard again: servers do not wait for the lost."""

    kind: ClassVar[str] = "presence"
    rank: int
    present: bool


@message_kind
@dataclass(frozen=True, slots=True)
class MachineNote(Message):
    """What a rank's process gets of its machine, once per second: see `scheduler.diagnosis.machine.MachineStats`."""

    kind: ClassVar[str] = "machine"
    throttled_share: float
    pressure_share: float
    gpu_clock_share: float
    gpu_throttled: float
    gpu_temperature_c: float
    nic_drops_per_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class StepNote(Message):
    """A rank's step in a mode without a common reduction: what was measured, and what became of its gradient."""

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
