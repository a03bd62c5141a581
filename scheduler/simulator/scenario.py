"""Scenarios to simulate: machines, a network to train, and contention; drawn at random or given.

Networks differ in what a predictor has to learn: gradient bytes, compute time, noise scale and its growth, learning
rate, price of staleness, and the limits beyond which the target is missed. Families correlate these, imperfectly, with
what can be observed (bytes, compute time, noise scale). The ranges are chosen, not measured; they contain STAR's noise
tables (100 to 10,000 samples over ten epochs, batches of 128) and Sync-Switch's runs (ASP never reaches the target, 5 %
of BSP first suffices).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.balance.share_policy import FIXED
from scheduler.simulator.episodes import ContentionError, Episode, Rows, generate

__all__ = ["FAMILIES", "Cluster", "Network", "Scenario", "draw_cluster", "draw_network", "draw_scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network, and its sensitivity to noise and staleness. Formulas: `scheduler.cost.progress`.

    Attributes:
        name: Key for train/test splits by network.
        family: One of `FAMILIES`, or `given`.
        comm_bytes: Gradient bytes.
        compute_s: Usual compute time of a gradient.
        noise: Noise scale phi at the start, in gradients of one rank.
        noise_growth: phi grows to (1 + this) times its initial value at the target.
        lr_ratio: rho, the learning rate relative to the best one for a synchronous step.
        price: c, the price of drift.
        target_steps: Synchronous steps to the target.
        drift_limit: Mean drift beyond which harm accumulates.
        early_part: Fraction of the way to the target in which drift counts in full; later it counts a tenth.
        noise_limit: Noise of updates relative to synchronous steps beyond which the final accuracy is missed.
    """

    name: str = "network"
    family: str = "given"
    comm_bytes: int = 25_000_000
    compute_s: float = 0.1
    noise: float = 4.0
    noise_growth: float = 4.0
    lr_ratio: float = 0.6
    price: float = 0.8
    target_steps: float = 1000.0
    drift_limit: float = 0.9
    early_part: float = 0.06
    noise_limit: float = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a job.

    Attributes:
        world_size: Ranks.
        relative_s: Usual compute time of every rank relative to the network's; () for all 1.
        jitter: Standard deviation of the logarithm of a compute time.
        common_jitter: The same for the part that all ranks share in a step.
        link_bytes_per_s: Bandwidth of every rank's link; () for all 1.25e9 (10 Gb/s).
        latency_s: Latency of a message.
        cycle_s: Negotiation time of a collective.
        overlap: Fraction of the compute time that can hide communication.
        server_s: Time of a server per update, without transfer.
        starved_pause_s: Longest time a starved process gets no processor (a cgroup period).
        switch_s: Time of a switch between modes of collectives (sync, partial, local, subgroup).
        handover_s: Time of a switch to or from servers, without the transfer of the state.
        set_s: Time to create a process set.
    """

    world_size: int
    relative_s: tuple[float, ...] = ()
    jitter: float = 0.03
    common_jitter: float = 0.01
    link_bytes_per_s: tuple[float, ...] = ()
    latency_s: float = 1e-4
    cycle_s: float = 1.5e-3
    overlap: float = 0.4
    server_s: float = 5e-4
    starved_pause_s: float = 0.1
    switch_s: float = 0.01
    handover_s: float = 0.3
    set_s: float = 0.3

    def __post_init__(self) -> None:
        n = self.world_size
        if n < 1:
            raise ContentionError(f"a cluster has {n} ranks; expected at least 1")
        for name, usual in (("relative_s", 1.0), ("link_bytes_per_s", 1.25e9)):
            values = getattr(self, name) or (usual,) * n
            if len(values) != n or not all(0.0 < value < math.inf for value in values):
                raise ContentionError(f"cluster {name} has {len(values)} values; expected {n} above 0")
            object.__setattr__(self, name, tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job to simulate.

    Attributes:
        cluster: The machines.
        network: The network to train.
        episodes: Contention by time.
        rows: Contention by step: one row per step with a slowdown per rank, repeating; a rank that does not wait for
            others takes row k for its k-th gradient. () for none.
        seed: Seed of jitter and of measurement noise.
        allowed: Modes the job can run.
        batch: Samples of a rank's batch if `shard` forms the batches, so that `sync(balanced)` is possible; else 0.
        fixed_part: Fraction of a rank's time that does not depend on its batch size.
        microbatches: Micro-batches of a rank's batch if `shard` cuts it, so that `sync(steal)` is possible; else 0.
        has_link_rates: Whether the job measures its links; one on one host does not.
        records_loss: Whether the user records the loss, from which the price of staleness is learned.
    """

    cluster: Cluster
    network: Network = field(default_factory=Network)
    episodes: tuple[Episode, ...] = ()
    rows: Rows = ()
    seed: int = 0
    allowed: frozenset[str] = frozenset(("sync", "partial", "subgroup", "grouped", "ps", "local"))
    batch: int = 0
    fixed_part: float = FIXED
    microbatches: int = 0
    has_link_rates: bool = True
    records_loss: bool = True

    def __post_init__(self) -> None:
        n = self.cluster.world_size
        bad = [episode for episode in self.episodes if episode.rank >= n]
        if bad or any(len(row) < n for row in self.rows):
            raise ContentionError(f"contention is {bad[:1] or self.rows[:1]}; expected ranks 0..{n - 1}")

    @property
    def world_size(self) -> int:
        return self.cluster.world_size


@dataclass(frozen=True, slots=True)
class _Family:
    """Ranges (low, high) of a family: bytes, seconds and phi log-uniform; growth, rho and c / rho uniform."""

    bytes: tuple[float, float]
    compute_s: tuple[float, float]
    noise: tuple[float, float]
    growth: tuple[float, float]
    lr_ratio: tuple[float, float]
    price: tuple[float, float]
    drift_limit: float


_EXPOSED = 0.3
"""Largest exposed communication, as a fraction of the compute time."""

FAMILIES: dict[str, _Family] = {
    "small_cnn": _Family((1e6, 8e6), (0.03, 0.2), (0.5, 4.0), (1.0, 6.0), (0.4, 0.9), (1.0, 1.6), 0.8),
    "big_cnn": _Family((3e7, 2.5e8), (0.1, 1.0), (1.0, 10.0), (2.0, 10.0), (0.3, 0.8), (1.1, 2.0), 0.7),
    "recurrent": _Family((2e7, 1.5e8), (0.05, 0.3), (4.0, 40.0), (3.0, 12.0), (0.2, 0.7), (1.5, 3.5), 0.5),
    "transformer": _Family((1e8, 8e8), (0.15, 1.5), (8.0, 100.0), (2.0, 8.0), (0.15, 0.6), (1.2, 2.4), 0.9),
    "perceptron": _Family((1e4, 1e6), (0.005, 0.05), (0.3, 8.0), (0.5, 3.0), (0.2, 0.6), (1.0, 1.5), 1.5),
}


def _log_uniform(rng: np.random.Generator, span: tuple[float, float]) -> float:
    return math.exp(rng.uniform(math.log(span[0]), math.log(span[1])))


def draw_network(rng: np.random.Generator, name: str = "network") -> Network:
    """Draw a network of a random family."""
    chosen = str(rng.choice(list(FAMILIES)))
    ranges = FAMILIES[chosen]
    lr_ratio = float(rng.uniform(*ranges.lr_ratio))
    return Network(
        name=name,
        family=chosen,
        comm_bytes=int(_log_uniform(rng, ranges.bytes)),
        compute_s=_log_uniform(rng, ranges.compute_s),
        noise=_log_uniform(rng, ranges.noise),
        noise_growth=float(rng.uniform(*ranges.growth)),
        lr_ratio=lr_ratio,
        price=lr_ratio * float(rng.uniform(*ranges.price)) + 0.1,
        target_steps=_log_uniform(rng, (300.0, 1500.0)),
        drift_limit=ranges.drift_limit * float(rng.lognormal(0.0, 0.3)),
        early_part=float(rng.uniform(0.03, 0.12)),
        noise_limit=float(1.2 + rng.lognormal(0.2, 0.4)),
    )


def draw_cluster(rng: np.random.Generator, world_size: int = 0) -> Cluster:
    """Draw a cluster: 3 to 32 ranks of equal or slightly unequal speed, links of 1 to 25 Gb/s."""
    n = world_size or int(rng.choice((3, 4, 8, 16, 32), p=(0.08, 0.2, 0.36, 0.2, 0.16)))
    unequal = float(rng.choice((0.0, 0.02, 0.15), p=(0.6, 0.25, 0.15)))
    rate = float(rng.choice((1.25e8, 1.25e9, 3.1e9), p=(0.2, 0.5, 0.3)))
    return Cluster(
        world_size=n,
        relative_s=tuple(float(v) for v in np.exp(unequal * rng.standard_normal(n))),
        jitter=float(rng.choice((0.01, 0.03, 0.08, 0.15), p=(0.25, 0.4, 0.25, 0.1))),
        common_jitter=float(rng.uniform(0.0, 0.05)),
        link_bytes_per_s=tuple(float(v) for v in rate * np.exp(0.05 * rng.standard_normal(n))),
        overlap=float(rng.uniform(0.2, 0.6)),
        handover_s=float(rng.uniform(0.1, 0.6)),
    )


_LOADERS = ("own", "sharded", "cut")
"""Who forms the batches: the user's loader, `shard`, or `shard` with micro-batches."""


def _draw_program(rng: np.random.Generator, scenario: Scenario) -> Scenario:
    """Draw what the user's program lets the job know and do: its loader, links, and whether it records the loss."""
    loader = str(rng.choice(_LOADERS, p=(0.5, 0.35, 0.15)))
    batch = round(_log_uniform(rng, (8.0, 256.0)))
    fixed_part = float(rng.uniform(0.02, 0.4))
    parts = int(rng.choice((2, 4, 8)))
    scenario = replace(
        scenario, has_link_rates=bool(rng.random() < 0.7), records_loss=bool(rng.random() < 0.6), fixed_part=fixed_part
    )
    if loader == "own":
        return scenario
    if loader == "sharded":
        return replace(scenario, batch=batch)
    return replace(scenario, batch=batch, microbatches=parts, allowed=frozenset({"sync"}))


def draw_scenario(
    seed: int, *, network: Network | None = None, world_size: int = 0, pattern: str = "", steps: float = 0.0
) -> Scenario:
    """Draw a scenario, deterministically by seed.

    Args:
        seed: Seed of everything drawn.
        network: The network; drawn if None.
        world_size: Ranks; drawn if 0.
        pattern: Pattern of contention (`episodes.PATTERNS`); drawn if empty.
        steps: Synchronous steps to the target; the network's own if 0.
    """
    rng = np.random.default_rng(seed)
    chosen = draw_network(rng, f"network{seed}") if network is None else network
    chosen = replace(chosen, target_steps=steps) if steps else chosen
    cluster = draw_cluster(rng, world_size)
    # Links far too slow for the network make every mode equally bad: such clusters get faster links.
    wire_s = (cluster.overlap + _EXPOSED) * chosen.compute_s
    slowest = min(cluster.link_bytes_per_s)
    faster = max(1.0, 2.0 * chosen.comm_bytes / slowest / wire_s)
    cluster = replace(cluster, link_bytes_per_s=tuple(faster * rate for rate in cluster.link_bytes_per_s))
    comm_s = 2.0 * chosen.comm_bytes / min(cluster.link_bytes_per_s)
    step_s = max(chosen.compute_s + comm_s * 0.2, chosen.compute_s * (1.0 - cluster.overlap) + comm_s)
    episodes = generate(
        rng, cluster.world_size, step_s=step_s, horizon_s=1.3 * step_s * chosen.target_steps, pattern=pattern
    )
    return _draw_program(rng, Scenario(cluster=cluster, network=chosen, episodes=episodes, seed=seed))
