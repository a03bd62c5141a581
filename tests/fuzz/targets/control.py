"""Control messages, and the coordinator's state that they change on them."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import msgpack

from scheduler.plan.plan import Plan
from scheduler.records import StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages import joins as j
from star_hvd.channel.messages import switch as s
from star_hvd.channel.messages import waits as w
from star_hvd.channel.messages.base import decode, encode, kinds, wire_fields
from star_hvd.config import Config
from star_hvd.coordinator.job_state import JobState
from star_hvd.errors import ChannelError
from tests.fuzz.mutate import damaged, damaged_bytes, packed, weird
from tests.fuzz.run import Target

_WORLD = 3
_KNOWN = tuple(sorted(kinds()))
_CONFIG = Config(lost_after_s=10.0, plan_deadline_s=60.0)
_PLANS: tuple[dict[str, Any], ...] = tuple(
    plan.to_dict()
    for plan in (
        Plan.sync(_WORLD), Plan.partial(_WORLD, 2), Plan.subgroup(_WORLD, (0, 1)), Plan.ps(_WORLD, 2),
        Plan.ps(_WORLD, 1, servers=(0, 1)), Plan.grouped(_WORLD, 2), Plan.local(_WORLD, steps=4),
        Plan.ps(_WORLD, 1, rule="ssp", slack=2), Plan.ps(_WORLD, _WORLD),
    )
)  # fmt: skip


def _value(name: str, wanted: str, draw: random.Random) -> Any:
    """A field's value as a rank might say it."""
    if wanted == "int":
        return draw.choice((0, 0, 1, 2, draw.randrange(12), draw.randrange(-2, 200)))
    if wanted == "float":
        return draw.choice((0.0, 0.01, 0.1, 0.1, draw.random(), 2.0 * draw.random()))
    if wanted == "bool":
        return draw.random() < 0.5
    if wanted == "str":
        return draw.choice(("", "x", m.CLOSE))
    if wanted == "list[int]":
        return [draw.randrange(_WORLD) for _ in range(draw.randrange(3))]
    if wanted == "list[str]":
        return ["127.0.0.1", "4000", "key"][: draw.choice((3, 3, 3, 0, 1))]
    return dict(draw.choice((*_PLANS, {})))


def _fields(kind: str, draw: random.Random) -> list[Any]:
    return [1, kind, *(_value(name, wanted, draw) for name, wanted in wire_fields(kind))]


def _message(draw: random.Random) -> bytes:
    fields = _fields(draw.choice(_KNOWN), draw)
    kind = draw.random()
    if kind < 0.45:
        return packed(damaged(fields, draw, draw.choice((1, 1, 2, 4))))
    data = packed(fields)
    if kind < 0.95:
        return damaged_bytes(data, draw)
    return draw.randbytes(draw.randrange(40)) if kind < 0.99 else packed(weird(draw))


def _decode(data: bytes) -> None:
    message = decode(data)
    again = decode(encode(message))
    # NaN is not equal to itself.
    assert again == message or "nan" in repr(message), f"{message} came back as {again}"


# ---- the coordinator's state -----------------------------------------------------------------------------------------

_SAID = (
    m.Arrive, m.Arrive, m.Arrive, m.Late, m.Join, m.HeaderNote,
    m.ModeUnsupported, m.RequestBatch, m.RequestBatch, m.Away, m.FindStateSource, m.Finished,
    m.OptimizerDropped, m.Unregister, m.Heartbeat, m.Register, m.GradientSizes, m.TransmissionNote,
    s.Prepared, s.Prepared, s.PrepareFailed, s.ServerUp, s.ServerRestarted,
    s.Drained, s.Switched, s.StepNote, s.StepNote, s.LinkRate, s.MachineNote, s.Restart, j.JoinCalled,
    j.ProgramCollective, w.ProgramWait,
)  # fmt: skip


def _script(draw: random.Random) -> bytes:
    """A job's beginning, and then what ranks may say, in any order, a part of it damaged."""
    auto = draw.random() < 0.5
    first, wanted = _PLANS[0], {} if auto else dict(draw.choice(_PLANS))
    said: list[Any] = [[rank, encode(m.Register(0, first, wanted, 1000)), 0.0] for rank in range(_WORLD)]
    wild = draw.choice((0.0, 0.1, 0.3))
    step = 0
    for _ in range(draw.randrange(5, 60)):
        rank, step = draw.randrange(_WORLD), step + (draw.random() < 0.3)
        if draw.random() < 0.4:  # A job that goes on.
            message = encode(m.Arrive(0, step, draw.randrange(4), StepTimes(0.1 * draw.random(), 0.0, 0.05), 0.01))
        else:
            fields = _fields(draw.choice(_SAID).kind, draw)
            message = packed(damaged(fields, draw) if draw.random() < wild else fields)
        said.append([rank if draw.random() < 0.97 else draw.randrange(-1, 9), message, draw.choice((0.0, 0.05, 3.0))])
    return packed(said)


def _play(data: bytes) -> int:
    said = msgpack.unpackb(data)
    now_s = 100.0
    state = JobState(_WORLD, _CONFIG, now_s)
    for rank, message, pause_s in said:
        now_s += pause_s
        refused = False
        try:
            found = decode(message)
            before = _sizes(state)
            state.handle(rank, found, now_s)
        except ChannelError:
            refused = True
        assert not refused or state.outbox == [] or _sizes(state) == before, "a refused message changed something"
        assert state.tick(now_s) > now_s or math.isnan(now_s)
        for _, sent in state.outbox:
            assert decode(encode(sent)) == sent
        state.outbox.clear()
    return len(said)


def _sizes(state: JobState) -> tuple[int, ...]:
    """What of a state would grow if a refused message were half applied."""
    optimizers = state.optimizers.values()
    return (
        len(state.outbox), len(state.optimizers), len(state._epochs), len(state.finished),
        sum(each.rule.step for each in optimizers), sum(len(each.plans) for each in optimizers),
        sum(len(each.history[rank]) for each in optimizers for rank in range(_WORLD)),
    )  # fmt: skip


TARGETS = (
    Target("control", _message, _decode, (ChannelError,), 10.0),
    Target("state", _script, functools.partial(_play), (), 6.0),
)
