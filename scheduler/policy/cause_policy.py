"""The answer to links, to starved and to frozen ranks: `subgroup` and `ps`, and the way back.

What waits for a rank tells what helps against its slowness. `partial` needs every rank's network and a processor for
its helper in every step, so it isolates a job from slow compute only. `subgroup` needs neither of the ranks outside,
and `ps` needs nothing at all of a rank that does not push. Hence: a slow link leaves the all-reduce for a subgroup, or
the job goes to servers away from it; a starved or repeatedly frozen rank sends the job to servers with x = n less the
slow ranks. The way back is `sync`, once nobody was slow for `quiet` steps.

Links and silence have no history in a window, so this part of the rule remembers who was in trouble at which step.
Its hysteresis: a link is slow below half of the usual rate and calm above three quarters of it; a plan is left after
`quiet` calm steps and entered after `persistence` steps of trouble.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.diagnosis.stragglers import LINK_CALM, Straggler, link_ratio
from scheduler.plan.placement import HostLoad, place_servers
from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = ["Answer", "CausePolicy", "listing"]

_FROZEN_MEMORY = 4
"""In units of `quiet`: two silences within it are a rank that freezes repeatedly. One may be a debugger, and a plan
that isolates a frozen rank cannot be taken up before it thaws."""

_PLACING_S = 0.05
"""Time a round of pushes may take the servers: a good part of the steps of small networks, a small one of those of
large ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether this part of the rule decides about the window; the plan to switch to, None to keep the active one."""

    mine: bool
    plan: Plan | None = None


class CausePolicy:
    """Chooses between `subgroup`, `ps` and the return to `sync`; leaves compute to `partial`.

    Args:
        world_size: Number of ranks.
        quiet: Steps without trouble before a plan is left.
        persistence: Steps a link must be slow before it is answered; compute times persist by themselves.
        damping: Damping of the plans returned to from `ps`, which has its own.
        hosts: Host of every rank, to place servers; unknown if None, then there is one server.
    """

    def __init__(
        self,
        world_size: int,
        *,
        quiet: int,
        persistence: int,
        damping: str = "inverse",
        hosts: Sequence[str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._quiet = quiet
        self._persistence = persistence
        self._damping = damping
        self._hosts = hosts
        self._forget()

    def _forget(self) -> None:
        self._history: deque[tuple[int, frozenset[int]]] = deque()
        self._link_since: dict[int, int] = {}
        self._links: set[int] = set()
        self._silent: set[int] = set()
        self._freezes: dict[int, list[int]] = {}

    # ---- who is in trouble ----------------------------------------------------------------------------------

    def note(self, window: Window, found: Sequence[Straggler]) -> dict[int, Straggler]:
        """Remember a window; the ranks that `partial` cannot help against, with their stragglers' records."""
        if self._history and window.step < self._history[-1][0]:
            self._forget()  # another run
        named = {straggler.rank: straggler for straggler in found}
        links = {rank for rank, straggler in named.items() if straggler.cause == "link"}
        self._links = {r for r in self._links | links if not link_ratio(window, r) >= LINK_CALM}
        self._link_since = {r: self._link_since.get(r, window.step) for r in links}
        frozen = self._note_silence(window, found)
        self._remember(window.step, {*named, *self._links, *frozen})
        hard = {r: named[r] for r, since in self._link_since.items() if window.step - since >= self._persistence}
        hard.update({s.rank: s for s in found if s.cause == "starved" and not s.silent})
        return {**hard, **frozen}

    def _note_silence(self, window: Window, found: Sequence[Straggler]) -> dict[int, Straggler]:
        """The ranks that froze repeatedly of late."""
        silent = {straggler.rank for straggler in found if straggler.silent}
        for rank in silent - self._silent:
            self._freezes.setdefault(rank, []).append(window.step)
        self._silent = silent
        horizon = window.step - _FROZEN_MEMORY * self._quiet
        self._freezes = {r: kept for r, s in self._freezes.items() if (kept := [step for step in s if step > horizon])}
        return {
            rank: Straggler(
                rank=rank,
                slowdown=math.inf,
                since_step=steps[0],
                cause="starved",
                evidence=f"has frozen {len(steps)} times since step {steps[0]}",
                silent=True,
            )
            for rank, steps in self._freezes.items()
            if len(steps) >= 2
        }

    def _remember(self, step: int, troubled: Iterable[int]) -> None:
        now = frozenset(troubled)
        if self._history and self._history[-1][0] == step:
            now |= self._history.pop()[1]
        self._history.append((step, now))
        # One entry from before the period stays, to tell that it has been seen in full.
        while len(self._history) > 1 and self._history[1][0] <= step - self._quiet:
            self._history.popleft()

    def _recent(self) -> list[frozenset[int]]:
        """Who was in trouble, window by window, over the last `quiet` steps."""
        begin = self._history[-1][0] - self._quiet
        return [troubled for step, troubled in self._history if step > begin]

    def _seen_in_full(self) -> bool:
        return self._history[0][0] <= self._history[-1][0] - self._quiet

    def _still(self, ranks: Iterable[int]) -> set[int]:
        """Those of the ranks that were in trouble during the last `quiet` steps, or not watched for as long."""
        if not self._seen_in_full():
            return set(ranks)
        return set(ranks) & set().union(*self._recent())

    # ---- what to do about it --------------------------------------------------------------------------------

    def decide(self, window: Window, active: Plan, found: Sequence[Straggler]) -> Answer:
        """The plan that the causes ask for; not `mine` where compute is all there is to it.

        Args:
            window: Recent reports of all ranks, of a later step than in the call before.
            active: The plan in force.
            found: The window's stragglers.
        """
        hard = self.note(window, found)
        if active.mode in ("sync", "partial"):
            if not hard:
                return Answer(mine=False)
            plan = self._isolate(window, active, found, hard)
            return Answer(mine=plan is not None, plan=plan)
        if active.mode == "subgroup":
            return Answer(mine=True, plan=self._adjust_subgroup(window, active, found, hard))
        if active.mode == "ps":
            return Answer(mine=True, plan=self._adjust_servers(window, active, found, hard))
        return Answer(mine=True)  # nothing this rule has chosen

    def replace_partial(self, window: Window, active: Plan, found: Sequence[Straggler], wanted: Plan) -> Plan | None:
        """What to do about slow compute where `partial` cannot run: a subgroup of the others, or servers."""
        if found and "subgroup" in window.allowed:
            return self._subgroup(active, self._choose(found, {}), found)
        if "ps" in window.allowed:
            return self._servers(window, active, wanted.quorum, found)
        return None

    def _isolate(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `sync` and `partial`: a plan that does not need the ranks in trouble."""
        causes = {straggler.cause for straggler in hard.values()}
        everybody = [*{**{s.rank: s for s in found}, **hard}.values()]
        outside = self._choose(everybody, hard)
        if "ps" in window.allowed and ("starved" in causes or "subgroup" not in window.allowed):
            return self._servers(window, active, self.world_size - len(outside), everybody)
        if "link" in causes and "subgroup" in window.allowed:
            return self._subgroup(active, outside, everybody)
        return None

    def _adjust_subgroup(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `subgroup`: more ranks out, calm ranks in again, to servers for a starved one, or back to `sync`."""
        if any(straggler.cause == "starved" for straggler in hard.values()) and "ps" in window.allowed:
            return self._isolate(window, active, found, hard)
        children = {child for child, _ in active.parents}
        # A link counts from its persistence on; all other causes persist when they are named.
        named = [straggler for straggler in found if straggler.cause != "link" or straggler.rank in hard]
        still = self._still(children)
        outside = self._choose(named, {}, first=still)
        if not outside:
            return self._back(window, active)
        if set(active.members) == set(range(self.world_size)) - outside:
            return None
        return self._subgroup(active, outside, [s for s in named if s.rank not in children], children - outside)

    def _adjust_servers(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `ps`: another x, other servers where one is on a rank in trouble, or back to `sync`."""
        if not self._still(range(self.world_size)):
            return self._back(window, active)
        everybody = [*{**{s.rank: s for s in found}, **hard}.values()]
        if set(active.servers) & set(hard) and len(hard) < self.world_size:
            moved = self._servers(window, active, active.quorum, everybody)
            return moved if moved.servers != active.servers else None
        if active.rule != "x":
            return None
        now = self.world_size - len(self._choose(everybody, hard))
        if now < active.quorum:
            return self._servers(window, active, now, everybody)
        most = max(len(troubled) for troubled in self._recent())
        wanted = max(self._least(), self.world_size - max(1, most))
        if self._seen_in_full() and wanted > active.quorum:
            reason = f"at most {most} ranks were slow at once for {self._quiet} steps: {{label}}"
            return self._finish(active.replace(quorum=wanted, plan_id=active.plan_id + 1), reason)
        return None

    # ---- plans ----------------------------------------------------------------------------------------------

    def _least(self) -> int:
        """Ranks a plan keeps at least: a majority or, of an even number, half."""
        return max(1, self.world_size // 2)

    def _choose(
        self, stragglers: Iterable[Straggler], hard: dict[int, Straggler], *, first: Iterable[int] = ()
    ) -> set[int]:
        """The ranks to leave out: those in `first`, those in `hard`, then the slowest, but never most of them."""
        slowdown = {straggler.rank: straggler.slowdown for straggler in stragglers}
        kept = set(first)
        order = sorted(kept | set(slowdown), key=lambda r: (r not in kept, r not in hard, -slowdown.get(r, 0.0), r))
        return set(order[: self.world_size - self._least()])

    def _subgroup(self, active: Plan, outside: set[int], why: Sequence[Straggler], back: Iterable[int] = ()) -> Plan:
        members = [rank for rank in range(self.world_size) if rank not in outside]
        plan = Plan.subgroup(
            self.world_size,
            members,
            damping=self._rounds_damping(active),
            max_staleness=active.max_staleness,
            plan_id=active.plan_id + 1,
        )
        named = [straggler.sentence for straggler in why if straggler.rank in outside]
        calm = [f"{listing(sorted(back))} calm for {self._quiet} steps"] if back else []
        return self._finish(
            plan,
            f"{'; '.join([*named, *calm])}: {{label}} all-reduces, gradients of {listing(sorted(outside))} come late",
        )

    def _servers(self, window: Window, active: Plan, x: int, why: Sequence[Straggler]) -> Plan:
        slow = {straggler.rank for straggler in why}
        loads = [
            HostLoad(
                rank=rank,
                host=self._hosts[rank] if self._hosts is not None else f"rank {rank}",
                link_bytes_per_s=stats.link_bytes_per_s if stats.link_bytes_per_s > 0.0 else math.nan,
                straggling=rank in slow,
            )
            for rank, stats in enumerate(window.ranks)
        ]
        # Where hosts are unknown several servers might share one.
        most = 0 if self._hosts is not None else 1
        placed = place_servers(loads, window.comm_bytes, round_s=_PLACING_S, most=most)
        plan = Plan.ps(
            self.world_size,
            x,
            damping="none" if active.damping == "none" else "relative",
            max_staleness=active.max_staleness,
            servers=placed.servers,
            plan_id=active.plan_id + 1,
        )
        sentences = "; ".join(straggler.sentence for straggler in why) or "ranks are slow in turn"
        return self._finish(
            plan, f"{sentences}: {{label}} waits for any {x} gradients, with servers at {listing(placed.servers)}"
        )

    def _back(self, window: Window, active: Plan) -> Plan | None:
        if "sync" not in window.allowed:
            return None
        return self.sync(active, f"no rank was slow for {self._quiet} steps: back to {{label}}")

    def sync(self, active: Plan, reason: str) -> Plan:
        """The plan of mode `sync` that follows `active`; `reason` may name it by `{label}`."""
        plan = Plan.sync(
            self.world_size,
            damping=self._rounds_damping(active),
            max_staleness=active.max_staleness,
            plan_id=active.plan_id + 1,
        )
        return self._finish(plan, reason)

    def _rounds_damping(self, active: Plan) -> str:
        """Servers have a damping of their own, unless there is to be none."""
        return active.damping if active.mode != "ps" or active.damping == "none" else self._damping

    def _finish(self, plan: Plan, reason: str) -> Plan:
        return plan.replace(reason=reason.replace("{label}", plan.label))


def listing(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 4`; at most four are named."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:4]))} and {len(ranks) - 4} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
