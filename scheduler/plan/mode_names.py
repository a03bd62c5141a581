"""Parses the mode names that users write, `partial(3)` for example."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from scheduler.plan.plan import Plan, PlanError
from scheduler.plan.transmission import Transmission

__all__ = [
    "MAY_WAIT", "NAMED", "NOT_LOCAL", "NOT_SERVERS", "ONLY_EXACT", "crossing", "parse_again", "parse_mode",
    "suits_some_world",
]  # fmt: skip

_EXPECTED = (
    "'auto', 'sync', 'sync(balanced)', 'sync(24,12,16,24)', 'sync(steal)', 'partial', 'partial(m)', 'subgroup(0,1,2)', "
    "'grouped(G)', 'ps(x)', 'ps(dynamic)', 'ps(ssp=s)', 'ps(backup=b)', 'ps(grace=b)', "
    "'ssgd', 'asgd', 'dynsgd', 'ssp(s)', 'local(H)', 'local(2.5s)', 'local(H,background)' or a Plan"
)
NOT_LOCAL = (
    "local needs a program with one optimizer: with several, ranks would wait for each other crosswise, each in the "
    "averaging of another one; ask for sync, partial or auto instead, or put all parameters into one optimizer"
)
NOT_SERVERS = (
    "it needs a program with one optimizer: with several, a rank at the servers may wait for pushes of ranks that wait "
    "for it in another one; ask for sync, partial, ps(1) or auto instead, or put all parameters into one optimizer"
)
ONLY_EXACT = (
    "a program with several optimizers trains in exact modes: ranks that make other steps of one of them would wait "
    "for each other in another one"
)
MAY_WAIT = (
    "the program has several optimizers: all of them must be stepped equally often, and a later return to sync may "
    "wait for ranks that are at other steps by then; ask for sync or auto to be safe"
)
_NAME = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
_BACKGROUND = re.compile(r"(?:.*,)?background")
# Modes in which some ranks may be late.
_WAITS_FOR = re.compile(r"(?:partial|ps)\((?:\d+|backup=\d+|grace=\d+)\b.*\)")
_OF_ANY_WORLD = (
    "damping", "max_staleness", "local_steps", "local_s", "lr_rule", "noise_scale", "guard", "transmission", "servers",
    "reason",
)  # fmt: skip
_MOST_RANKS_TRIED = 4096


def parse_mode(mode: str | Plan, world_size: int, **fields: Any) -> Plan | None:
    """Turn the user's mode into a plan; returns `None` for `auto`.

    Args:
        mode: `auto`, `sync`, `sync(balanced)` (batch shares by speed), `sync(24,12,16,24)` (samples of every rank),
            `sync(steal)` (micro-batches taken over inside a step), `partial` (one rank may be late), `partial(m)`,
            `subgroup(0,1,2)` (its members), `grouped(G)`, `ps(x)`, `ps(dynamic)`, `ps(ssp=s)` or `ssp(s)`,
            `ps(backup=b)`, `ps(grace=b)`, `ssgd` (x = n), `asgd` (x = 1),
            `dynsgd`, `local(H)` (steps), `local(2.5s)` (seconds), or a `Plan`. `background` as the last argument of
            `local`, `ps` or `subgroup`, as in `ps(3,background)`: transfers travel behind compute.
        world_size: Number of ranks in this job.
        fields: Further fields of a plan made from a name, such as `max_staleness`; ignored for a `Plan`. `damping`
            applies to `partial` and `subgroup`; server modes have their own defaults.

    Raises:
        PlanError: The mode is unknown, m is outside 1..n, or the plan is for another world size.
    """
    if isinstance(mode, Plan):
        if mode.world_size != world_size:
            raise PlanError(
                f"the plan is for {mode.world_size} ranks but this job has {world_size}; "
                "make it with Plan.sync(hvd.size()) or Plan.partial(hvd.size(), m)"
            )
        return mode
    if not isinstance(mode, str):
        raise PlanError(f"mode is {mode!r}; expected {_EXPECTED}")
    text = "".join(mode.split()).lower()
    if text == "auto":
        return None
    found = _NAME.fullmatch(text)
    make = NAMED.get(found.group(1)) if found else None
    if found is None or make is None:
        raise PlanError(f"mode is {mode!r}; expected {_EXPECTED}")
    given = {"reason": "asked for by the user", **fields}
    argument = found.group(2)
    if argument is not None and _BACKGROUND.fullmatch(argument):
        given["transmission"] = Transmission(background=True)
        argument = argument[: -len("background")].rstrip(",") or None
    try:
        return make(world_size, argument, given)
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"mode is {mode!r}: {error}; expected {_EXPECTED}") from None


def parse_again(mode: str | Plan, plan: Plan, world_size: int, **fields: Any) -> Plan:
    """Return the plan of the user's mode after the number of ranks has changed (elastic).

    A name means what it means in a new job, except that with `partial(m)`, `ps(x)`, `ps(backup=b)` and `ps(grace=b)` as
    many ranks may be late as before; `ps(1)` stays asynchronous. Of a `Plan`, groups are formed anew.

    Args:
        mode: The user's mode, not `auto`.
        plan: Its plan in the former world.
        world_size: Number of ranks now.
        fields: As for `parse_mode`.

    Raises:
        PlanError: The mode is not possible with so many ranks.
    """
    if isinstance(mode, Plan):
        made = parse_again(mode.label, mode, world_size)
        return made.replace(**{name: getattr(mode, name) for name in _OF_ANY_WORLD})
    text = "".join(mode.split()).lower()
    if _WAITS_FOR.fullmatch(text) and text.startswith(plan.mode) and not text.startswith(("ps(1)", "ps(1,")):
        late = plan.world_size - plan.quorum
        return plan.replace(world_size=world_size, quorum=max(1, world_size - late))
    made_again = parse_mode(mode, world_size, **fields)
    assert made_again is not None
    return made_again


def crossing(plan: Plan, *, auto: bool = False) -> str:
    """Return why ranks would wait for each other crosswise under a plan in a program with several optimizers.

    In `local`, how many steps of the program lie between two averagings of an optimizer depends on the rank, and so
    does their order among the steps of the others: one rank blocks in an averaging that another one only reaches after
    a step for which it waits. At servers a late push waits for further ones (`ps(x)`, `grace`), and a rank that is
    ahead for slower ones (`ssp`), which may wait for it in another optimizer. No rank is inactive meanwhile, so none is
    helped or excused.

    Args:
        plan: The plan of one of the optimizers.
        auto: Whether `auto` chose it. A rank that misses steps, or makes further ones, has made fewer or more passes of
            its loop than the others at the same step, and would wait for ever for these after a return to `sync`.

    Returns:
        A clause for the user, empty if the plan is possible.
    """
    if auto and plan.relaxed:
        return ONLY_EXACT
    if plan.mode == "local":
        return NOT_LOCAL
    awaits_others = plan.rule in ("grace", "ssp") or (plan.rule == "x" and 1 < plan.quorum < plan.world_size)
    return NOT_SERVERS if plan.mode == "ps" and awaits_others else ""


def suits_some_world(mode: str | Plan) -> bool:
    """Whether a mode that `parse_mode` refuses is possible with another number of ranks."""
    if isinstance(mode, Plan):
        return True
    numbers = [int(number) for number in re.findall(r"\d+", str(mode))]
    for ranks in {len(numbers), max(numbers, default=0) + 1}:  # Shares of so many ranks, or a rank of this number.
        with contextlib.suppress(PlanError):
            if ranks <= _MOST_RANKS_TRIED:
                parse_mode(mode, max(1, ranks))
                return True
    return False


def _whole(text: str | None, what: str) -> int:
    if text is None or not re.fullmatch(r"[+-]?\d+", text):
        raise ValueError(f"expected a whole number {what}")
    return int(text)


def _no_argument(argument: str | None) -> None:
    if argument is not None:
        raise ValueError("expected no argument")


def _server_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "damping"}


def _make_sync(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    if argument is None:
        return Plan.sync(n, **fields)
    if argument == "balanced":
        return Plan.sync(n, balanced=True, **fields)
    if argument == "steal":
        return Plan.sync(n, steal=True, **fields)
    shares = tuple(_whole(part, "of samples for every rank in 'sync(24,12,16,24)'") for part in argument.split(","))
    return Plan.sync(n, batch_shares=shares, **fields)


def _make_partial(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    return Plan.partial(n, max(1, n - 1) if argument is None else _whole(argument, "m in 'partial(m)'"), **fields)


def _make_subgroup(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    members = [_whole(part, "per member in 'subgroup(0,1,2)'") for part in (argument or "").split(",")]
    return Plan.subgroup(n, members, **fields)


def _make_grouped(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    count = 0 if argument is None else _whole(argument, "G in 'grouped(G)'")
    return Plan.grouped(n, count, **_server_fields(fields))


def _make_ps(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    rest = _server_fields(fields)
    if argument is None:
        return Plan.ps(n, max(1, n - 1), **rest)
    if argument == "dynamic":
        return Plan.ps(n, 1, rule="groups", **rest)
    name, equals, value = argument.partition("=")
    if equals and name == "ssp":
        return Plan.ps(n, 1, rule="ssp", slack=_whole(value, "s in 'ps(ssp=s)'"), **rest)
    if equals and name in ("backup", "grace"):
        return Plan.ps(n, n - _whole(value, f"b in 'ps({name}=b)'"), rule=name, lr_rule="none", **rest)
    return Plan.ps(n, _whole(argument, "x in 'ps(x)'"), **rest)


def _make_ssp(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    return _make_ps(n, f"ssp={argument}", fields)


def _make_ssgd(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    _no_argument(argument)
    return Plan.ps(n, n, **_server_fields(fields))


def _make_asgd(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    _no_argument(argument)
    return Plan.ps(n, 1, **{**_server_fields(fields), "damping": "none"})


def _make_dynsgd(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    _no_argument(argument)
    return Plan.ps(n, 1, **{**_server_fields(fields), "damping": "inverse", "lr_rule": "none"})


def _make_local(n: int, argument: str | None, fields: dict[str, Any]) -> Plan:
    if argument is not None and argument.endswith("s"):
        return Plan.local(n, seconds=float(argument[:-1]), **fields)
    return Plan.local(n, steps=4 if argument is None else _whole(argument, "H in 'local(H)'"), **fields)


NAMED: dict[str, Callable[[int, str | None, dict[str, Any]], Plan]] = {
    "sync": _make_sync,
    "partial": _make_partial,
    "subgroup": _make_subgroup,
    "grouped": _make_grouped,
    "ps": _make_ps,
    "ssp": _make_ssp,
    "ssgd": _make_ssgd,
    "asgd": _make_asgd,
    "dynsgd": _make_dynsgd,
    "local": _make_local,
}
"""Makes a plan, by the name of its mode: of the number of ranks, the argument and the other fields."""
