"""Checks of messages from ranks, before they change any state."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from scheduler.diagnosis.machine import MachineStats
from scheduler.records import Plan, PlanError
from scheduler.transmission.decision import WHAT
from star_hvd.channel.messages.base import (
    MOST_TEXT,
    Arrive,
    Away,
    FindStateSource,
    Finished,
    GradientSizes,
    HeaderNote,
    Heartbeat,
    Hello,
    Join,
    Late,
    Message,
    ModeUnsupported,
    OptimizerDropped,
    Register,
    RequestBatch,
    TransmissionNote,
    Unregister,
    wire_fields,
)
from star_hvd.channel.messages.joins import JoinCalled, ProgramCollective
from star_hvd.channel.messages.leases import Consumed, ConsumedRequest, LeaseAsk, LeaseReturn, LoaderClosed
from star_hvd.channel.messages.microbatches import MicrobatchBegin, MicrobatchOpen, MicrobatchReturn
from star_hvd.channel.messages.shares import EPOCH_START, Feeds, MemoryLimit, ShareReady
from star_hvd.channel.messages.switch import (
    Drained,
    LinkRate,
    MachineNote,
    Prepared,
    PrepareFailed,
    Restart,
    ServerRestarted,
    ServerUp,
    StepNote,
    Switched,
)
from star_hvd.channel.messages.waits import ProgramWait
from star_hvd.errors import ChannelError

__all__ = ["FROM_RANKS", "check"]

FROM_RANKS: tuple[type[Message], ...] = (
    Arrive,
    Away,
    Consumed,
    ConsumedRequest,
    PrepareFailed,
    Drained,
    Feeds,
    Finished,
    GradientSizes,
    Heartbeat,
    Hello,
    Join,
    JoinCalled,
    Late,
    LeaseAsk,
    LeaseReturn,
    LinkRate,
    LoaderClosed,
    MachineNote,
    MemoryLimit,
    MicrobatchBegin,
    MicrobatchOpen,
    MicrobatchReturn,
    OptimizerDropped,
    Prepared,
    ModeUnsupported,
    ProgramCollective,
    ProgramWait,
    Register,
    Restart,
    HeaderNote,
    ServerRestarted,
    ServerUp,
    ShareReady,
    FindStateSource,
    StepNote,
    Switched,
    RequestBatch,
    TransmissionNote,
    Unregister,
)
_MAX_AHEAD = 1 << 16  # Steps between two reports of a rank, which reports every step within 0.1 s.
_MAX_OPTIMIZERS = 1 << 20  # Made by a job one after another.
_TIMES = frozenset({"compute_s", "input_s", "cpu_s", "runqueue_s", "load_s", "previous_wait_s", "comm_s"})
_TIMES_OF: dict[type[Message], tuple[tuple[str, Callable[[Any], float]], ...]] = {
    cls: tuple(
        (name, operator.attrgetter(name))
        for name, _ in wire_fields(cls.kind)
        if name.rpartition(".")[2] in _TIMES
    )
    for cls in FROM_RANKS
}
_STEP_OF: dict[type[Message], str] = {
    **dict.fromkeys((Arrive, GradientSizes, HeaderNote, Drained, Switched, TransmissionNote), "step"),
    **dict.fromkeys((Late, Join, StepNote), "version"),
    OptimizerDropped: "step",
}
_ADDRESS_PARTS, _MAX_ADDRESS = 3, 1024  # A server's host, port and public key; total characters.
_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float16", "float32", "float64"})
_MAX_DIMS, _MAX_ELEMENTS = 64, 1 << 34
_MAX_NAME = 200  # Characters of a function's name.
_NO_STEP = -1  # Step in the message of an optimizer that is dropped while servers make its updates.


def check(message: Message, world_size: int, step_of: Callable[[int], int]) -> None:
    """Check a message of a rank. Called for every message, so checks are looked up by class.

    Args:
        message: Message from a rank.
        world_size: Number of ranks.
        step_of: Returns the current step of an optimizer by its number, 0 if there is none.

    Raises:
        ChannelError: A field has an impossible value, or only the coordinator sends this kind.
    """
    kind = type(message)
    times = _TIMES_OF.get(kind)
    if times is None:
        raise ChannelError(f"a {message.kind} message came from a rank; only the coordinator sends those")
    optimizer_id = getattr(message, "optimizer_id", 0)
    if not 0 <= optimizer_id < _MAX_OPTIMIZERS:
        raise ChannelError(f"optimizer number is {optimizer_id}; expected 0..{_MAX_OPTIMIZERS - 1}")
    for name, get in times:
        value = get(message)
        if not 0.0 <= value < 1e9:
            raise ChannelError(f"{name} of a {message.kind} message is {value!r}; expected seconds from 0 to 1e9")
    if kind in _STEP_OF:
        step, now_at = getattr(message, _STEP_OF[kind]), step_of(optimizer_id)
        least = _NO_STEP if kind is OptimizerDropped else 0
        if not least <= step <= now_at + _MAX_AHEAD:
            most = now_at + _MAX_AHEAD
            raise ChannelError(f"a {message.kind} message is of step {step}; expected {least}..{most}, now at {now_at}")
    if kind in _SPECIAL:
        _SPECIAL[kind](message, world_size)


def _register(message: Register, world_size: int) -> None:
    for values in (message.initial, message.plan or message.initial):
        # Checked before `Plan.from_dict`, whose time grows with the number of ranks.
        claimed = values.get("world_size")
        if isinstance(claimed, int) and claimed != world_size:
            raise ChannelError(f"a plan is for {claimed} ranks; this job has {world_size}")
    _sizes(message, world_size)
    try:
        for values in (message.initial, message.plan or message.initial):
            Plan.from_dict(values)
    except (PlanError, TypeError) as error:
        raise ChannelError(f"a plan in a register message is invalid: {str(error)[:200]}") from error


def _sizes(message: Register | GradientSizes, _: int) -> None:
    size = message.gradient_bytes
    if size < 0:
        raise ChannelError(f"gradient_bytes of a {message.kind} message is {size}; expected 0 or more")
    for name in ("edge_part", "pushed_part"):
        part = getattr(message, name)
        if not 0.0 < part <= 1.0:
            raise ChannelError(f"{name} of a {message.kind} message is {part!r}; expected above 0, at most 1")


def _transmission(message: TransmissionNote, _: int) -> None:
    if message.what not in WHAT or len(message.chosen) > MOST_TEXT or len(message.text) > MOST_TEXT:
        raise ChannelError(
            f"a transmission message is about {message.what[:20]!r}, with {len(message.chosen)} and "
            f"{len(message.text)} characters; expected one of {', '.join(WHAT)}, and at most {MOST_TEXT}"
        )


def _link_rate(message: LinkRate, _: int) -> None:
    if not 0.0 < message.bytes_per_s < 1e15:
        raise ChannelError(
            f"bytes_per_s of a {message.kind} message is {message.bytes_per_s!r}; expected a rate above 0"
        )


def _machine(message: MachineNote, _: int) -> None:
    for name in MachineStats.names():
        value = getattr(message, name)
        if not (math.isnan(value) or 0.0 <= value < 1e9):
            raise ChannelError(f"{name} of a machine message is {value!r}; expected a number from 0 to 1e9, or NaN")


def _address(message: ServerUp | ServerRestarted, world_size: int) -> None:
    # A plan has at most one server per rank.
    if not 0 <= message.index < world_size:
        raise ChannelError(f"server index of {message.kind} is {message.index}; expected 0..{world_size - 1}")
    if len(message.address) != _ADDRESS_PARTS or sum(map(len, message.address)) > _MAX_ADDRESS:
        raise ChannelError(
            f"the address in a {message.kind} message has {len(message.address)} parts and "
            f"{sum(map(len, message.address))} characters; expected {_ADDRESS_PARTS} and at most {_MAX_ADDRESS}"
        )


def _request_batch(message: RequestBatch, _: int) -> None:
    if min(message.loader, message.epoch, message.samples, message.batch - 1, message.number) < 0:
        raise _negative(message)


def _lease_ask(message: LeaseAsk, _: int) -> None:
    whole = (message.loader, message.epoch, message.samples, message.batch - 1, message.begun, message.ahead)
    if min(*whole, message.digest, message.undelivered) < 0 or not 0.0 <= message.load_s < math.inf:
        raise _negative(message)


def _lease_return(message: LeaseReturn, _: int) -> None:
    if min(message.loader, message.epoch, message.begun, message.kept, message.undelivered) < 0:
        raise _negative(message)


def _loader_closed(message: LoaderClosed, _: int) -> None:
    if message.loader < 0:
        raise ChannelError(f"loader {message.loader} is closed; expected a number from 0")


def _microbatch_open(message: MicrobatchOpen, _: int) -> None:
    whole = (message.loader, message.epoch, message.samples, message.batch - 1, message.ahead, message.digest)
    if min(*whole, message.parts - 1, message.most) < 0:
        raise _negative(message)


def _microbatch(message: MicrobatchBegin | MicrobatchReturn, _: int) -> None:
    if min(message.loader, message.epoch, message.step, message.task + 1, message.tasks) < 0:
        raise ChannelError(f"got {message}; expected numbers from 0")


def _negative(message: Message) -> ChannelError:
    return ChannelError(f"got {message}; expected a batch size from 1 and all other numbers from 0")


def _consumed(message: Consumed | ConsumedRequest, _: int) -> None:
    if min(message.loader, message.epoch, message.step + 1, message.number) < 0:
        raise ChannelError(
            f"samples of epoch {message.epoch} consumed up to step {message.step}, loader {message.loader}, request "
            f"{message.number}; expected a step from -1 and the others from 0"
        )


def _share_ready(message: ShareReady, _: int) -> None:
    least = min(message.loader, message.number, message.epoch, message.step - EPOCH_START, message.batches - 1)
    planned = message.ahead
    if min(least, message.taken, message.most, *planned) < 0 or not planned or len(planned) % 2 or planned[0]:
        raise ChannelError(
            f"a rank would change its batches at step {message.step} of epoch {message.epoch}, {message.batches} a "
            f"step; expected a step from {EPOCH_START}, at least 1, and in `ahead` pairs of numbers, the first at 0"
        )


def _memory_limit(message: MemoryLimit, _: int) -> None:
    if message.loader < 0 or message.most < 1:
        raise ChannelError(f"a rank can have {message.most} samples of loader {message.loader}; expected at least 1")


def _feeds(message: Feeds, _: int) -> None:
    if message.loader < -1 or message.step < 0:
        raise ChannelError(
            f"loader {message.loader} feeds the training from step {message.step} on; expected numbers from -1 and 0"
        )


def _program_collective(message: ProgramCollective, _: int) -> None:
    """Check the description of tensors, of which joined ranks make as many and as large ones."""
    left, sizes = list(message.shapes), []
    for _dtype in message.dtypes:
        dims, left = left[0] if left else -1, left[1:]
        if not 0 <= dims <= min(len(left), _MAX_DIMS) or min(left[:dims], default=0) < 0:
            raise ChannelError(f"got shapes {message.shapes[:20]} of {len(message.dtypes)} tensors; expected as many")
        sizes.append(math.prod(left[:dims]))
        left = left[dims:]
    if left or sum(sizes) > _MAX_ELEMENTS or not set(message.dtypes) <= _DTYPES or message.number < 1:
        raise ChannelError(
            f"got tensors of {sum(sizes)} elements, types {message.dtypes[:20]}, {len(left)} more sizes, operation "
            f"{message.number}; expected at most {_MAX_ELEMENTS} elements, of {sorted(_DTYPES)}, operations from 1"
        )
    if message.device not in ("", "cpu", "cuda"):
        raise ChannelError(f"got tensors on {message.device[:20]!r}; expected cpu or cuda")


def _program_wait(message: ProgramWait, _: int) -> None:
    numbers = (message.calls, message.joins, message.loader + 1, message.epoch + 1)
    in_loop = message.loader >= 0
    if min(numbers) < 0 or in_loop != (message.epoch >= 0) or (in_loop and message.operation):
        raise ChannelError(
            f"a program waits in {message.operation[:20]!r} and in epoch {message.epoch} of loader {message.loader}, "
            f"behind {message.calls} calls and {message.joins} joins; expected one place, and numbers from 0"
        )
    if len(message.operation) > _MAX_NAME:
        raise ChannelError(f"an operation's name has {len(message.operation)} characters; expected {_MAX_NAME} at most")


_SPECIAL: dict[type[Message], Callable[[Any, int], None]] = {
    ProgramCollective: _program_collective,
    ProgramWait: _program_wait,
    Register: _register,
    GradientSizes: _sizes,
    TransmissionNote: _transmission,
    ServerUp: _address,
    ServerRestarted: _address,
    LinkRate: _link_rate,
    MachineNote: _machine,
    RequestBatch: _request_batch,
    LeaseAsk: _lease_ask,
    LeaseReturn: _lease_return,
    LoaderClosed: _loader_closed,
    Consumed: _consumed,
    ConsumedRequest: _consumed,
    ShareReady: _share_ready,
    Feeds: _feeds,
    MemoryLimit: _memory_limit,
    MicrobatchOpen: _microbatch_open,
    MicrobatchBegin: _microbatch,
    MicrobatchReturn: _microbatch,
}
