"""Which ranks are slow when: slowdown schedules as pure functions of the step, and the resulting bound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "FREEZE_EVERY_S",
    "FREEZE_S",
    "KILLED",
    "MEANS",
    "SCENARIOS",
    "Scenario",
    "ScenarioError",
    "baseline",
    "bound_s",
    "default_modes",
    "input_slowdown",
    "link_slowdown",
    "make_scenario",
]

# How a scenario slows a rank. Only `device` follows the schedule, through the emulated device time.
MEANS = {
    "none": "device",
    "one-slow": "device",
    "two-slow": "device",
    "rotating": "device",
    "trace": "device",
    "slow-input": "input",
    "quota": "quota",
    "slow-link": "link",
    "frozen": "freeze",
    "starved": "starve",
    "killed-worker": "kill",
    "killed-server": "kill",
}
SCENARIOS = tuple(MEANS)
KILLED = ("killed-worker", "killed-server")
ONE_SLOWDOWN = 4.0
TWO_SLOWDOWN = 2.0
LINK_SLOWDOWN = 10.0
STARVED_SLOWDOWN = 10.0  # Relative to its fair share of the cores: 5 % of a core for one of 4 ranks on 2 cores.
ROTATE_EVERY_STEPS = 5
FREEZE_S, FREEZE_EVERY_S = 2.0, 6.0
FIXED_SLOWDOWN = ("none", "trace", "frozen", *KILLED)
# A rank whose mean slowdown exceeds this counts as a straggler when the m of `partial(m)` is chosen.
STRAGGLER_SLOWDOWN = 1.5


class ScenarioError(ValueError):
    """A scenario cannot be made; the message says what was given and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Slowdown factors of all ranks, repeating over the global steps.

    Attributes:
        name: One of `SCENARIOS`.
        rows: One row per global step, one factor per rank, shape (n_steps, n_ranks); step k uses row
            k % n_steps. 1.0 is normal speed. With other means than `device` the factor applies to something else:
            CPU share, rate of the link, cost of a sample, share of time in which the rank is not stopped.
    """

    name: str
    rows: tuple[tuple[float, ...], ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.rows[0])

    @property
    def means(self) -> str:
        """Return how ranks are slowed, a value of `MEANS`."""
        return MEANS[self.name]

    def slowdown(self, rank: int, step: int) -> float:
        """Return the factor by which `rank` is slower than normal in global step `step`."""
        return self.rows[step % len(self.rows)][rank]

    def device_slowdown(self, rank: int, step: int) -> float:
        """Return the factor on the emulated device time: 1 if the scenario slows by other means."""
        return self.slowdown(rank, step) if self.means == "device" else 1.0

    def input_slowdown(self, rank: int) -> float:
        """Return the factor on the cost of loading a sample: 1 if the scenario slows by other means."""
        return self.slowdown(rank, 0) if self.means == "input" else 1.0

    def capacity(self, fixed_part: float = 0.0) -> float:
        """Return the speed of all ranks in units of one normal rank, averaged over the schedule.

        Args:
            fixed_part: Part of a normal step that a rank needs even for an empty batch. A rank for which this part
                alone takes longer than the whole step of the others is left out.
        """
        return sum(_capacity(row, fixed_part) for row in self.rows) / len(self.rows)

    def stragglers(self) -> int:
        """Return how many ranks are slow at the same time: the number that `partial(m)` has to do without.

        For a schedule with many rows, the median over the rows.
        """
        counts = sorted(sum(factor > STRAGGLER_SLOWDOWN for factor in row) for row in self.rows)
        return counts[len(counts) // 2]

    def quorum(self) -> int:
        """Return the m of `partial(m)` that fits this scenario: all but the stragglers, at least one left out."""
        return max(1, self.ranks - max(1, self.stragglers()))

    def without_stragglers(self) -> Scenario:
        """Return the same job with every rank at normal speed."""
        return Scenario(name="none", rows=((1.0,) * self.ranks,))


def _capacity(row: Sequence[float], fixed_part: float) -> float:
    """Return the best capacity over the k fastest ranks; with shares so that all end together, a step of n batches
    takes ((1 - fixed_part) n + fixed_part k) / sum(1 / slowdown) normal steps."""
    n, speeds = len(row), sorted((1.0 / factor for factor in row), reverse=True)
    sums = itertools.accumulate(speeds)
    return max(n * total / ((1.0 - fixed_part) * n + fixed_part * k) for k, total in enumerate(sums, start=1))


def make_scenario(
    name: str, ranks: int, trace: Sequence[Sequence[float]] | None = None, slowdown: float | None = None
) -> Scenario:
    """Return the schedule called `name` for `ranks` ranks.

    Args:
        name: One of `SCENARIOS`.
        ranks: Number of ranks of the job.
        trace: Rows of the trace, for `trace` only; columns beyond `ranks` are ignored.
        slowdown: Factor that replaces the scenario's own; not for `none`, `trace`, `frozen` and the killed ones.

    Raises:
        ScenarioError: Unknown name, too few ranks, or a trace that does not fit.
    """
    if name not in SCENARIOS:
        raise ScenarioError(f"scenario is {name!r}; expected one of {', '.join(SCENARIOS)}")
    least_ranks = 3 if name in ("two-slow", *KILLED) else 1 if name == "none" else 2
    if ranks < least_ranks:
        raise ScenarioError(f"scenario {name} with {ranks} ranks; it needs at least {least_ranks}: raise --ranks")
    if slowdown is not None and not 1.0 <= slowdown <= 1000.0:
        raise ScenarioError(f"slowdown is {slowdown}; expected 1 to 1000")
    if slowdown is not None and name in FIXED_SLOWDOWN:
        raise ScenarioError(f"slowdown is {slowdown}; scenario {name} takes none: leave --slowdown out")
    if name == "trace":
        return _from_trace(ranks, trace)
    if name in ("none", *KILLED):
        rows = [[1.0] * ranks]
    elif name == "two-slow":
        rows = [[1.0] * (ranks - 2) + [slowdown or TWO_SLOWDOWN] * 2]
    elif name == "rotating":
        rows = [
            [(slowdown or ONE_SLOWDOWN) if rank == turn else 1.0 for rank in range(ranks)]
            for turn in range(ranks)
            for _ in range(ROTATE_EVERY_STEPS)
        ]
    else:
        rows = [[1.0] * (ranks - 1) + [slowdown or _last_slowdown(name)]]
    return Scenario(name=name, rows=tuple(tuple(row) for row in rows))


def _last_slowdown(name: str) -> float:
    special = {
        "slow-link": LINK_SLOWDOWN,
        "starved": STARVED_SLOWDOWN,
        "frozen": FREEZE_EVERY_S / (FREEZE_EVERY_S - FREEZE_S),
    }
    return special.get(name, ONE_SLOWDOWN)


def _from_trace(ranks: int, trace: Sequence[Sequence[float]] | None) -> Scenario:
    if not trace:
        raise ScenarioError(
            "scenario trace needs slowdowns: give --trace FILE (python -m benchmarks.traces writes one)"
        )
    columns = len(trace[0])
    if columns < ranks:
        raise ScenarioError(f"the trace has {columns} ranks, the job {ranks}: use --ranks {columns} or another trace")
    return Scenario(name="trace", rows=tuple(tuple(float(v) for v in row[:ranks]) for row in trace))


def default_modes(scenario: Scenario) -> tuple[str, ...]:
    """Return the fixed modes worth comparing with `auto`: few, so that a run stays short."""
    m, name = scenario.quorum(), scenario.name
    if name in ("none", "trace"):
        return ()
    if name == "slow-link":
        return (f"subgroup({','.join(map(str, range(m)))})", f"ps({m})")
    if name == "killed-server":
        return (f"ps({m})", "asgd")
    if name == "killed-worker":
        return (f"ps({max(1, scenario.ranks // 2)})",)
    if name in ("one-slow", "frozen", "starved"):
        return (f"partial({m})", f"ps({m})", "asgd")
    return (f"partial({m})", f"ps({m})")


def baseline(name: str, stragglers: int) -> str:
    """Return the mode for a name from the literature; other names are returned unchanged.

    Args:
        name: `ASGD`, `SSP` (bound 3), `DynSGD` (Jiang et al. 2017),
            `Sync-opt` (Chen et al. 2016: synchronous with backup workers), or a mode of star_hvd.
        stragglers: Ranks that are slow at the same time, which is the number of backup workers.
    """
    return {"ssp": "ssp(3)", "sync-opt": f"ps(backup={max(1, stragglers)})"}.get(name.lower(), name)


def bound_s(straggler_free_s: float, capacity: float, ranks: int) -> float:
    """Return the time of a job in which every rank always works at its own speed and nothing is lost.

    Args:
        straggler_free_s: Time with every rank at normal speed, in seconds.
        capacity: Sum of 1 / slowdown over the ranks.
        ranks: Number of ranks.
    """
    if not capacity > 0.0:
        raise ScenarioError(f"capacity is {capacity}; expected more than 0")
    return straggler_free_s * ranks / capacity


def link_slowdown(free_step_s: float, model_bytes: float, fast_bits_per_s: float, slow_bits_per_s: float) -> float:
    """Return how much slower the steps of a rank with a slow link are, if it sends and receives the model once a step.

    A link is full duplex, so a step needs the model's bytes over its rate; the fast link's part is already in
    `free_step_s`.
    """
    if not (free_step_s > 0.0 and 0.0 < slow_bits_per_s <= fast_bits_per_s):
        raise ScenarioError(
            f"step of {free_step_s} s, links of {fast_bits_per_s:g} and {slow_bits_per_s:g} bit/s; expected more than "
            "0, and the second link no faster than the first"
        )
    return 1.0 + 8.0 * model_bytes * (1.0 / slow_bits_per_s - 1.0 / fast_bits_per_s) / free_step_s


def input_slowdown(free_step_s: float, batch_input_s: float, workers: int, factor: float) -> float:
    """Return how much slower the steps of a rank are whose samples cost `factor` times as much to load.

    Args:
        free_step_s: A step with no rank slow, including input, in seconds.
        batch_input_s: Cost of a batch's samples on a normal rank, loaded one after another.
        workers: Processes that load ahead of the training thread; with 0, the step waits for every sample.
        factor: Factor of the slow rank.
    """
    if not free_step_s > 0.0:
        raise ScenarioError(f"step of {free_step_s} s; expected more than 0")
    if not workers:
        return 1.0 + batch_input_s * (factor - 1.0) / free_step_s
    return max(1.0, batch_input_s * factor / workers / free_step_s)
