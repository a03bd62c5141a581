"""The plan: how the ranks synchronize from one step on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.plan.transmission import BACKGROUND_MODES, Transmission

__all__ = ["LOCAL_COPIES", "MAX_RANKS", "MODES", "RULES", "SET_IDLE_S", "Plan", "PlanError"]

MODES = ("sync", "partial", "subgroup", "grouped", "ps", "local")
RULES = ("x", "groups", "ssp", "backup", "grace")
_KEYS = {"plan_id": "epoch"}  # Fields with another name in logs and messages.
_REMOVED = frozenset(("fan_in",))  # Fields of older logs, without effect where they are 0.
_FIELDS = {key: name for name, key in _KEYS.items()}
_INTEGERS = ("world_size", "quorum", "plan_id", "max_staleness", "group_count", "slack", "local_steps")
_DAMPINGS = ("inverse", "relative", "none")
_LR_RULES = ("linear", "noise", "none")
_GUARDS = ("none", "damp", "reject")

SET_IDLE_S = 60.0
"""Time after which a process set that no plan needs is removed: it costs its members time in every Horovod cycle."""

LOCAL_COPIES = 2.0
"""Bytes that an averaging of `local` moves, relative to the parameters': with momentum; Adam adds a third copy."""

MAX_RANKS = 1 << 20
"""Most ranks of a job: a plan for more is corrupt, and lists of its ranks would exhaust memory."""

_MOST = 1 << 53  # Limit of other integers, which may be sent as floats.

Ranks = tuple[int, ...]


class PlanError(ValueError):
    """A plan is invalid or cannot be executed; the message says what was found, what was expected and what to do."""


Family = Literal["all_ranks", "subgroup", "ps", "grouped"]
_FAMILIES: dict[str, Family] = {"subgroup": "subgroup", "ps": "ps", "grouped": "grouped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the ranks synchronize, from one step on until the next plan.

    The coordinator publishes a plan, every rank prepares it, and it becomes active on all of them at the same step.

    Attributes:
        mode: One of `MODES`.
        world_size: Number of ranks the plan was made for.
        quorum: Gradients a step waits for: m in `partial`, x in `ps`, the number of members in `subgroup`; always
            `world_size` in `sync` and `local`, 1 in `grouped`.
        plan_id: Position in the sequence of published plans; a rank rejects a plan older than its active one.
        damping: Weight of a late gradient of staleness s: `inverse` 1 / (1 + s) (DynSGD, Jiang et al. 2017),
            `relative` min(1, (n / x) / (1 + s)), which is 1 for equally fast workers, `none` 1.
        max_staleness: Late gradients staler than this many steps are dropped and counted (in `ps` the rule decides).
        members: `subgroup`: the ranks that all-reduce, ascending.
        parents: (child, parent) pairs. `subgroup`: every rank that is no member has one, a member.
        groups: `grouped` and rule `groups`: all ranks, each in one group; a group waits for its own members only.
        group_count: Groups to form where `groups` is empty, 0 for `grouping.progressive_groups`.
        rule: `ps`: `x` any x arrivals make an update, `groups` (dynamic x-order), `ssp` every arrival does and
            ranks more than `slack` steps ahead wait, `backup` the first x make it and later ones are dropped,
            `grace` the same, but ranks that are usually in time are waited for a little.
        slack: Steps a rank may be ahead of the slowest one, rule `ssp`.
        servers: `ps` and `grouped`: ranks that run a server each; empty lets the coordinator place them.
        local_steps: `local`: steps between two averagings, 0 if `local_s` is set.
        local_s: `local`: seconds between two averagings, 0 if `local_steps` is set.
        lr_rule: `ps` and `grouped`: factor on an update of x of n gradients: `linear` x / n (STAR's division by
            n), `noise` (1 + phi / n) / (1 + phi / x), `none` 1.
        noise_scale: phi for `noise`, in gradients of one rank.
        balanced: `sync`: batch shares follow the ranks' speed (`batch_shares`); the global batch does not change.
        batch_shares: `sync`: samples of every rank in a step, one number per rank. With `balanced` the shares at the
            time the plan was made, empty for equal ones; without it the user's fixed shares.
        steal: `sync`: micro-batches of a step are taken over from the rank that would end last; the global batch does
            not change.
        guard: What a server does with a gradient that points against the recent updates (after Zeno++, Xie et
            al. 2020): `none`, `damp` or `reject`.
        transmission: When transfers travel, a `Transmission` or its values; None to follow the user's settings.
        reason: One sentence for people.
    """

    mode: str
    world_size: int
    quorum: int
    plan_id: int = 0
    damping: str = "inverse"
    max_staleness: int = 16
    members: Ranks = ()
    parents: tuple[tuple[int, int], ...] = ()
    groups: tuple[Ranks, ...] = ()
    group_count: int = 0
    rule: str = "x"
    slack: int = 0
    servers: Ranks = ()
    local_steps: int = 0
    local_s: float = 0.0
    lr_rule: str = "linear"
    noise_scale: float = 0.0
    guard: str = "none"
    balanced: bool = False
    batch_shares: tuple[int, ...] = ()
    steal: bool = False
    transmission: Transmission | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        if not isinstance(self.reason, str):
            raise PlanError(f"plan reason is {self.reason!r}; expected a string")
        for name, ranks in (("members", self.members), ("servers", self.servers)):
            object.__setattr__(self, name, self._ranks(name, ranks))
        object.__setattr__(self, "groups", tuple(self._ranks("groups", group) for group in self._tuple("groups")))
        object.__setattr__(self, "parents", tuple(self._ranks("parents", pair) for pair in self._tuple("parents")))
        self._check_parents()
        self._check_groups()
        self._check_shares()
        self._check_transmission()
        check: Callable[[], None] | None = getattr(self, f"_check_{self.mode}", None)
        if check is not None:
            check()

    # ---- validation -----------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        for name, known in (
            ("mode", MODES),
            ("damping", _DAMPINGS),
            ("rule", RULES),
            ("lr_rule", _LR_RULES),
            ("guard", _GUARDS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise PlanError(f"plan {name} is {value!r}; expected one of {', '.join(known)}")

    def _check_numbers(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"plan field {name} is {value!r}; expected an integer")
            least = 1 if name == "world_size" else 0
            if value < least:
                raise PlanError(f"plan {name} is {value}; expected at least {least}")
            most = MAX_RANKS if name in ("world_size", "quorum") else _MOST
            if value > most:
                raise PlanError(f"plan {name} is too large; expected at most {most}")
        if not 1 <= self.quorum <= self.world_size:
            raise PlanError(
                f"plan quorum m is {self.quorum}; expected 1 <= m <= {self.world_size} (the number of ranks)"
            )
        if self.group_count > self.world_size:
            raise PlanError(f"plan group_count is {self.group_count}; expected at most {self.world_size}, the ranks")
        for name in ("local_s", "noise_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < _MOST:
                raise PlanError(f"plan {name} is {str(value)[:40]}; expected a number from 0 to {_MOST}")

    def _tuple(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise PlanError(f"plan {name} is {value!r}; expected a sequence")
        return tuple(value)

    def _ranks(self, name: str, ranks: Any) -> Ranks:
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise PlanError(f"plan {name} has {ranks!r}; expected ranks")
        found = tuple(ranks)
        # Fast path for valid ranks: plans with a thousand ranks are made by the dozen.
        whole = set(map(type, found)) == {int} and 0 <= min(found) <= max(found) < self.world_size
        if not found or (whole and len(set(found)) == len(found)):
            return found
        bad = [r for r in found if not isinstance(r, int) or isinstance(r, bool) or not 0 <= r < self.world_size]
        if bad or len(set(found)) != len(found):
            raise PlanError(f"plan {name} has {list(found)}; expected different ranks of 0..{self.world_size - 1}")
        return found

    def _check_parents(self) -> None:
        if any(len(pair) != 2 for pair in self.parents):
            raise PlanError(f"plan parents is {self.parents}; expected pairs (child, parent)")
        children = [child for child, _ in self.parents]
        if len(set(children)) != len(children):
            raise PlanError(f"plan parents is {self.parents}; expected one parent per child")
        if any(parent in children for _, parent in self.parents):
            raise PlanError(f"plan parents is {self.parents}; expected a tree of one level: no parent is a child")

    def _check_groups(self) -> None:
        count = sum(map(len, self.groups))
        if self.groups and not count == len(set().union(*self.groups)) == self.world_size:
            raise PlanError(f"plan groups is {self.groups}; expected every rank of 0..{self.world_size - 1} once")

    def _check_shares(self) -> None:
        if not isinstance(self.balanced, bool):
            raise PlanError(f"plan balanced is {self.balanced!r}; expected True or False")
        if not isinstance(self.steal, bool):
            raise PlanError(f"plan steal is {self.steal!r}; expected True or False")
        shares = self._tuple("batch_shares")
        object.__setattr__(self, "batch_shares", shares)
        if self.mode != "sync" and (shares or self.balanced):
            raise PlanError(f"plan batch_shares is for mode sync; the mode is {self.mode}: leave it out")
        if self.steal and (self.mode != "sync" or shares or self.balanced):
            raise PlanError("plan steal is for mode sync without batch shares; leave one of them out")
        if not shares:
            return
        if len(shares) != self.world_size:
            raise PlanError(
                f"plan batch_shares has {len(shares)} numbers; expected one for each of the {self.world_size} ranks"
            )
        bad = [b for b in shares if not isinstance(b, int) or isinstance(b, bool) or not 1 <= b < _MOST]
        if bad:
            raise PlanError(
                f"plan batch_shares is {shares}; expected whole numbers of at least 1: a rank without samples has no "
                "gradient, so leave it out of the job or give it 1"
            )

    def _check_transmission(self) -> None:
        given: Any = self.transmission
        if given is None:
            return
        try:
            given = given if isinstance(given, Transmission) else Transmission.from_dict(_mapping(given))
        except ValueError as error:
            raise PlanError(f"plan {error}") from None
        if given.background and self.mode not in BACKGROUND_MODES:
            raise PlanError(f"plan transmission is {given} in mode {self.mode}; expected {', '.join(BACKGROUND_MODES)}")
        object.__setattr__(self, "transmission", given)

    def _check_sync(self) -> None:
        if self.quorum != self.world_size:
            raise PlanError(
                f"plan quorum is {self.quorum} in mode sync; expected {self.world_size}: use mode partial"
            )

    def _check_subgroup(self) -> None:
        members, children = set(self.members), {child for child, _ in self.parents}
        if not members or self.members != tuple(sorted(members)) or self.quorum != len(members):
            raise PlanError(
                f"plan members is {self.members} with quorum {self.quorum} in mode subgroup; expected ascending ranks "
                "and as many as the quorum"
            )
        missing = set(range(self.world_size)) - members - children
        if missing or children & members or not {parent for _, parent in self.parents} <= members:
            raise PlanError(
                f"plan parents is {self.parents} with members {self.members}; expected one pair (child, member) for "
                "every rank that is no member"
            )

    def _check_ps(self) -> None:
        if self.parents:
            raise PlanError(f"plan parents is {self.parents} in mode ps; expected none: all ranks push to servers")
        if self.rule == "ssp" and self.quorum != 1:
            raise PlanError(f"plan quorum is {self.quorum} with rule ssp; expected 1: every arrival makes an update")

    def _check_grouped(self) -> None:
        if self.quorum != 1:
            raise PlanError(f"plan quorum is {self.quorum} in mode grouped; expected 1: every group makes an update")

    def _check_local(self) -> None:
        if self.quorum != self.world_size or (self.local_steps > 0) == (self.local_s > 0.0):
            raise PlanError(
                f"plan quorum is {self.quorum}, local_steps {self.local_steps} and local_s {self.local_s} in mode "
                f"local; expected {self.world_size} and one of local_steps and local_s above 0"
            )

    # ---- constructors ---------------------------------------------------------------------------------------

    @classmethod
    def sync(cls, world_size: int, **fields: Any) -> Plan:
        """The plan in which every step waits for all ranks."""
        return cls(mode="sync", world_size=world_size, quorum=world_size, **fields)

    @classmethod
    def partial(cls, world_size: int, quorum: int, **fields: Any) -> Plan:
        """The plan in which a step waits for `quorum` of `world_size` ranks and folds the late gradients."""
        return cls(mode="partial", world_size=world_size, quorum=quorum, **fields)

    @classmethod
    def subgroup(cls, world_size: int, members: Iterable[int], **fields: Any) -> Plan:
        """The plan in which `members` all-reduce and every other rank sends late gradients to one of them.

        The i-th of the other ranks is attached to member i modulo their number (STAR).
        """
        chosen = tuple(sorted(members))
        inside = frozenset(chosen)
        others = [rank for rank in range(world_size) if rank not in inside]
        parents = tuple((child, chosen[i % len(chosen)]) for i, child in enumerate(others)) if chosen else ()
        fields.setdefault("parents", parents)
        return cls(mode="subgroup", world_size=world_size, quorum=max(1, len(chosen)), members=chosen, **fields)

    @classmethod
    def ps(cls, world_size: int, x: int, **fields: Any) -> Plan:
        """The plan in which parameter servers make an update of every `x` gradients, in order of arrival."""
        fields.setdefault("damping", "relative")
        return cls(mode="ps", world_size=world_size, quorum=x, **fields)

    @classmethod
    def grouped(cls, world_size: int, groups: int | Iterable[Iterable[int]], **fields: Any) -> Plan:
        """The plan in which groups all-reduce inside and update central parameters asynchronously (HiPC 2018).

        Args:
            world_size: Number of ranks.
            groups: The groups, or how many to form by speed.
            **fields: Further fields of the plan.
        """
        fields.setdefault("damping", "relative")
        if isinstance(groups, int):
            return cls(mode="grouped", world_size=world_size, quorum=1, group_count=groups, **fields)
        chosen = tuple(tuple(sorted(group)) for group in groups)
        return cls(
            mode="grouped", world_size=world_size, quorum=1, groups=chosen, group_count=len(chosen), **fields
        )

    @classmethod
    def local(cls, world_size: int, *, steps: int = 0, seconds: float = 0.0, **fields: Any) -> Plan:
        """The plan in which ranks step on their own and average after `steps` steps or `seconds` seconds."""
        return cls(
            mode="local", world_size=world_size, quorum=world_size, local_steps=steps, local_s=seconds, **fields
        )

    # ---- reading --------------------------------------------------------------------------------------------

    @property
    def lockstep(self) -> bool:
        """Whether every step contains a fresh gradient of every rank, as in Horovod."""
        return self.mode in ("sync", "partial") and self.quorum == self.world_size

    @property
    def relaxed(self) -> bool:
        """Whether steps may lack fresh gradients of some ranks."""
        return not self.lockstep

    @property
    def uneven(self) -> bool:
        """Whether ranks may have batches of different sizes: `sync(balanced)`, or shares set by the user."""
        return self.balanced or bool(self.batch_shares)

    @property
    def plain(self) -> bool:
        """Whether this is `sync` as Horovod has it, all batches of one size."""
        return self.mode == "sync" and not self.uneven and not self.steal

    @property
    def may_close(self) -> bool:
        """Whether the coordinator closes steps without late ranks: in `partial` only."""
        return self.mode == "partial" and self.quorum < self.world_size

    @property
    def family(self) -> Family:
        """`all_ranks` (all ranks reduce together), `subgroup`, `ps` or `grouped`.

        A switch within `all_ranks` or within `ps` only changes a rule; all others transfer the state.
        """
        return _FAMILIES.get(self.mode, "all_ranks")

    @property
    def updates_per_step(self) -> float:
        """Updates, each a global step, that take as many gradients as a step of `sync`; 1 where all ranks reduce.

        n / x in `ps`, the number of groups where a group makes an update.
        """
        if self.mode == "grouped" or (self.mode == "ps" and self.rule == "groups"):
            return float(max(1, len(self.groups) or self.group_count))
        return self.world_size / self.quorum if self.mode == "ps" else 1.0

    def steps_per_report(self, step_s: float) -> float:
        """Steps of a rank per global step, which is an averaging in `local`; 1 in other modes.

        Args:
            step_s: Time of a step of the fastest rank.
        """
        if self.mode != "local":
            return 1.0
        return float(self.local_steps) or max(1.0, self.local_s / step_s)

    def in_background(self, default: bool | None) -> bool:
        """Whether transfers travel behind compute.

        Args:
            default: The user's setting; None if there is none, which means no.
        """
        if self.mode not in BACKGROUND_MODES:
            return False
        return bool(default) if self.transmission is None else self.transmission.background

    def pushes_early(self, default: bool | None) -> bool:
        """Whether pushes to servers start within backward: in the background, or if neither plan nor settings decide.

        Unlike parameters that arrive behind `step` (only in the background), this requires nothing of the program.

        Args:
            default: As in `in_background`.
        """
        unsaid = default is None and self.transmission is None
        return self.mode == "ps" and (unsaid or self.in_background(default))

    @property
    def members_or_all(self) -> Ranks:
        """The ranks that reduce together."""
        return self.members or tuple(range(self.world_size))

    @property
    def sources(self) -> Ranks:
        """Ranks that provide the state for this plan, so that they must be current at its first step."""
        return self.members if self.mode == "subgroup" else self.servers

    @property
    def sets(self) -> tuple[Ranks, ...]:
        """Process sets this plan needs."""
        if self.mode == "subgroup":
            return (self.members,)
        return tuple(group for group in self.groups if len(group) > 1) if self.mode == "grouped" else ()

    @property
    def label(self) -> str:
        """Short name for tables and logs, such as `partial(3)`; `parse_mode` accepts it."""
        name = self._name
        return f"{name[:-1]},background)" if self.transmission and self.transmission.background else name

    @property
    def _name(self) -> str:
        """The label without the suffix for the transmission."""
        if self.steal:
            return "sync(steal)"
        if self.uneven:
            return "sync(balanced)" if self.balanced else f"sync({','.join(map(str, self.batch_shares))})"
        if self.mode == "partial":
            return f"partial({self.quorum})"
        if self.mode == "subgroup":
            return f"subgroup({','.join(map(str, self.members))})"
        if self.mode == "grouped":
            return f"grouped({len(self.groups) or self.group_count})"
        if self.mode == "local":
            return f"local({self.local_steps})" if self.local_steps else f"local({self.local_s:g}s)"
        if self.mode == "ps":
            argument = {
                "x": str(self.quorum),
                "ssp": f"ssp={self.slack}",
                "groups": "dynamic",
                "backup": f"backup={self.world_size - self.quorum}",
                "grace": f"grace={self.world_size - self.quorum}",
            }
            return f"ps({argument[self.rule]})"
        return self.mode

    def parent_of(self, rank: int) -> int | None:
        """The rank that `rank` sends its gradients to, None without a parent."""
        return dict(self.parents).get(rank)

    def replace(self, **changes: Any) -> Plan:
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for messages and logs; fields with their default value are omitted."""
        values = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                plain = [list(v) if isinstance(v, tuple) else v for v in value] if isinstance(value, tuple) else value
                plain = value.to_dict() if isinstance(value, Transmission) else plain
                values[_KEYS.get(item.name, item.name)] = plain
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`.

        Raises:
            PlanError: A field is missing, unknown or out of range.
        """
        if not isinstance(values, dict):
            raise PlanError(f"a plan is of type {type(values).__name__}; expected a mapping")
        values = {key: value for key, value in values.items() if value or key not in _REMOVED}
        known = {_KEYS.get(item.name, item.name) for item in dataclasses.fields(cls)}
        unknown = sorted(set(map(str, values)) - known)
        if unknown:
            raise PlanError(f"plan has unknown fields {unknown}; expected some of {sorted(known)}")
        missing = sorted({"mode", "world_size", "quorum"} - set(values))
        if missing:
            raise PlanError(f"a plan has the fields {sorted(values)}; expected also {missing}")
        return cls(**{_FIELDS.get(key, key): value for key, value in values.items()})


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"transmission is {value!r}; expected a Transmission or a mapping")
    return value
