"""Plans, names of modes, settings, targets, and the pure state machines that decide by them."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgpack

from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan, PlanError
from scheduler.rules.leasing import LeaseQueue
from scheduler.rules.server_rule import Drop, Push, Release, ServerRule, Update
from scheduler.rules.step_closing import ClosingRule
from scheduler.target import Target as Bound
from star_hvd import env
from star_hvd.config import Config
from tests.fuzz.mutate import damaged, odd, packed, weird
from tests.fuzz.run import Target

_WORLD = 4
_PLANS = (
    Plan.sync(_WORLD), Plan.partial(_WORLD, 3), Plan.subgroup(_WORLD, (0, 1, 3)), Plan.ps(_WORLD, 2),
    Plan.ps(_WORLD, 1, servers=(0, 1), rule="ssp", slack=3), Plan.grouped(_WORLD, ((0, 1), (2, 3))),
    Plan.local(_WORLD, seconds=2.5), Plan.ps(_WORLD, _WORLD),
    Plan.ps(_WORLD, 1, rule="groups"), Plan.ps(_WORLD, 3, rule="backup"), Plan.ps(_WORLD, 2, rule="grace"),
)  # fmt: skip
_NAMES = (
    "auto", "sync", "sync(balanced)", "sync(24,12,16,24)", "sync(steal)", "partial", "partial(3)", "subgroup(0,1,2)",
    "grouped(2)", "ps(2)", "ps(dynamic)", "ps(ssp=3)",
    "ps(backup=1)", "ps(grace=1)", "ssgd", "asgd", "dynsgd", "ssp(3)", "local(4)", "local(2.5s)",
)  # fmt: skip


def _as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda other: repr(other)).encode("utf-8", errors="surrogatepass")


def _plan(draw: random.Random) -> bytes:
    values = draw.choice(_PLANS).to_dict()
    fields = {item: getattr(draw.choice(_PLANS), item) for item in Plan.__dataclass_fields__}
    chosen = draw.choice((values, fields, {**values, draw.choice(list(fields)): weird(draw)}))
    return _as_json(damaged(chosen, draw, draw.choice((0, 1, 1, 2, 3))))


def _read_plan(data: bytes) -> None:
    plan = Plan.from_dict(json.loads(data))
    assert Plan.from_dict(msgpack.unpackb(msgpack.packb(plan.to_dict()))) == plan
    assert plan.label and plan.sets is not None and len(plan.members_or_all) > 0


def _mode(draw: random.Random) -> bytes:
    text = draw.choice(_NAMES)
    letters = list(text)
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        at = draw.randrange(len(letters) + 1)
        letters[at:at] = draw.choice(("9" * 30, "9" * 5000, "-", "(", ")", ",", "=", "1e999", "s", "é", "\x00", "0"))
        if draw.random() < 0.5 and letters:
            del letters[draw.randrange(len(letters))]
    return "".join(letters).encode()


def _read_mode(data: bytes) -> None:
    plan = parse_mode(data.decode(), _WORLD)
    if plan is not None:
        msgpack.packb(plan.to_dict())
    Bound.parse(data.decode())


def _config(draw: random.Random) -> bytes:
    names = [*Config.__dataclass_fields__, "nothing"]
    return _as_json({draw.choice(names): weird(draw) for _ in range(draw.randrange(1, 4))})


def _read_config(data: bytes) -> None:
    given = json.loads(data)
    given.pop("nothing", None)
    Config(**given)


_VARIABLES = ("STAR_MODE", "STAR_HOST", "STAR_INTERFACE", "STAR_POLICY", "STAR_LEAST_QUORUM", "STAR_TARGET",
              "STAR_RUN_TAGS")  # fmt: skip
_SETTINGS = ("", "0.5", "nan", "1e999", "-1", "eth0,eth1", "a=b,c", "=", ",,", "accuracy>=0.95", "loss<0", "x>=",
             "9" * 400, "é=ü", "sync")  # fmt: skip


def _environment(draw: random.Random) -> bytes:
    chosen = [name for name in _VARIABLES if draw.random() < 0.6]
    return _as_json({name: draw.choice(_SETTINGS) + draw.choice(_SETTINGS) for name in chosen})


def _read_environment(data: bytes) -> None:
    given = json.loads(data)
    before = {name: os.environ.pop(name, None) for name in _VARIABLES}
    try:
        os.environ.update(given)
        least = env.least_quorum()
        env.mode(), env.host(), env.interface(), env.policy(), env.target(), env.tags()
        Bound.parse(env.target() or "")
        if least is not None:
            Config(least_quorum=least)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# ---- state machines -------------------------------------------------------------------------------------------------


def _rule_script(draw: random.Random) -> bytes:
    plan = draw.choice([plan for plan in _PLANS if plan.mode in ("ps", "grouped")])
    said: list[Any] = [plan.to_dict()]
    steps = [0] * _WORLD
    for _ in range(draw.randrange(5, 50)):
        rank = draw.randrange(_WORLD) if draw.random() < 0.95 else draw.randrange(-2, 9)
        kind = draw.choice(("push", "push", "push", "push", "absent", "present", "plan", "cut"))
        if kind == "push":
            steps[rank % _WORLD] += 1
            push = [rank, steps[rank % _WORLD], draw.randrange(3), draw.random(), 1, draw.choice((None, 0.5, -0.9))]
            said.append([kind, damaged(push, draw) if draw.random() < 0.2 else push])
        elif kind == "plan":
            said.append([kind, draw.choice(_PLANS).to_dict()])
        else:
            said.append([kind, rank])
    return packed(said)


def _numbers(push: Any) -> Push:
    """What `Primary` makes of a push's fields."""
    rank, step, version, weight, count, cosine = push
    return Push(
        rank=int(rank), step=int(step), version=int(version), weight=float(weight), count=int(count),
        cosine=None if cosine is None else float(cosine),
    )  # fmt: skip


def _play_rule(data: bytes) -> int:
    first, *said = msgpack.unpackb(data)
    rule = ServerRule(Plan.from_dict(first), version=0)
    waiting: set[int] = set()
    for kind, value in said:
        before = rule.version
        try:
            if kind == "push":
                push = _numbers(value)
                if push.rank in waiting:
                    continue  # A worker has one push in flight.
                events = rule.push(push)
                waiting.add(push.rank)
            elif kind == "plan":
                events = rule.set_plan(Plan.from_dict(value))
            elif kind == "cut":
                events = rule.drain()
            else:
                events = getattr(rule, kind)(value)
        except (ValueError, TypeError, OverflowError) as error:
            assert isinstance(error, ValueError) or kind == "push", error
            assert rule.version == before, "a refused event changed the version"
            continue
        for event in events:
            assert isinstance(event, (Update, Drop, Release))
            waiting -= set(event.ranks if isinstance(event, Release) else event.release)
            if isinstance(event, Update):
                assert 0.0 <= event.lr_factor < float("inf")
                assert all(part.factor == part.factor and abs(part.factor) != float("inf") for part in event.parts)
    return len(said)


def _queue_script(draw: random.Random) -> bytes:
    size = [draw.choice((0, 1, 10, 100, 1 << 40, odd(draw))), draw.choice((1, 4, 7, odd(draw)))]
    said = [
        [draw.choice(("ask", "ask", "ask", "leave", "give_back", "forecast")),
         draw.randrange(_WORLD) if draw.random() < 0.95 else odd(draw),
         draw.choice((0.0, 0.1, 1.0, 5e-324, 1e300, odd(draw)))]
        for _ in range(draw.randrange(5, 60))
    ]  # fmt: skip
    return packed([size, draw.random() < 0.3, said])


def _play_queue(data: bytes) -> int:
    (samples, batch), drop_last, said = msgpack.unpackb(data)
    if not all(isinstance(value, int) for value in (samples, batch)):
        return 1
    try:
        queue = LeaseQueue(samples, batch, _WORLD, drop_last=drop_last)
    except ValueError:
        return 1
    now_s, begun, total = 0.0, [0] * _WORLD, queue.free
    for kind, rank, value in said:
        if not isinstance(rank, int) or isinstance(rank, bool):
            continue
        try:
            held = queue.held(rank)
            if kind == "ask":
                now_s += abs(value) if isinstance(value, float) and abs(value) < 1e6 else 0.1
                queue.ask(rank, begun[rank] + held // 2, now_s)
                begun[rank] += held // 2
            elif kind == "leave":
                queue.leave(rank)
            elif kind == "give_back":
                queue.give_back(rank, begun[rank], now_s)
            elif isinstance(value, float):
                queue.forecast(rank, value)
        except ValueError:
            continue
        _ = list(queue.answers(now_s)), list(queue.recalls(now_s))
        assert queue.free + sum(map(queue.held, range(_WORLD))) + sum(begun) == total
    return len(said)


def _closing_script(draw: random.Random) -> bytes:
    said, step = [], 0
    for _ in range(draw.randrange(5, 80)):
        step += draw.random() < 0.3
        kind = draw.choice(("arrive", "arrive", "arrive", "late", "join", "leave", "back", "align", "skip", "plan"))
        said.append([kind, draw.randrange(_WORLD), step + draw.randrange(-2, 3),
                     draw.choice((0.1, 0.1, 0.3, 0.0, 5e-324, 1e8)), draw.choice((0.0, 0.05, 1.0))])  # fmt: skip
    return packed(said)


def _play_closing(data: bytes) -> int:
    said, now_s = msgpack.unpackb(data), 10.0
    rule = ClosingRule(Plan.partial(_WORLD, 3))
    for kind, rank, step, compute_s, pause_s in said:
        now_s += pause_s
        if kind == "arrive":
            rule.arrive(rank, max(0, step), compute_s, now_s)
        elif kind == "late":
            rule.late(rank, compute_s)
        elif kind == "join":
            rule.join(rank, max(0, step), now_s)
        elif kind == "leave":
            rule.deactivate(rank, out_of_data=step % 2 == 0)
        elif kind == "back":
            rule.activate(rank, now_s)
        elif kind == "align":
            rule.align(now_s)
        elif kind == "skip":
            rule.skip_to(step)
        else:
            rule.plan = _PLANS[step % len(_PLANS)]
        order, again_s = rule.evaluate(now_s)
        assert order is None or order.step <= rule.step
        assert again_s is None or again_s >= now_s
    return len(said)


TARGETS = (
    Target("plan", _plan, _read_plan, (PlanError,), 4.0),
    Target("mode", _mode, _read_mode, (PlanError,), 2.0),
    Target("config", _config, _read_config, (ValueError,), 2.0),
    Target("environment", _environment, _read_environment, (ValueError,), 1.0),
    Target("server-rule", _rule_script, _play_rule, (), 4.0),
    Target("work-queue", _queue_script, _play_queue, (), 4.0),
    Target("closing", _closing_script, _play_closing, (), 4.0),
)
