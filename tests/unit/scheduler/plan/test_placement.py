"""Where servers are placed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan.headroom import Headroom, server_cores
from scheduler.plan.placement import HostLoad, place_on_hosts, place_servers
from scheduler.plan.plan import Plan

MIB = 2**20


def load(rank: int, host: str, cores: float = 4.0, link: float = 1.25e9, straggling: bool = False) -> HostLoad:
    return HostLoad(rank=rank, host=host, free_cpu_cores=cores, link_bytes_per_s=link, straggling=straggling)


def four_hosts(**changes: HostLoad) -> list[HostLoad]:
    """Eight ranks, two per host."""
    return [changes.get(f"r{rank}", load(rank, f"node{rank // 2}")) for rank in range(8)]


def test_small_state_needs_one_server() -> None:
    decision = place_servers(four_hosts(), 4 * MIB)
    assert decision.servers == (0,)
    assert decision.reason == (
        "1 server for 4 MiB on node0 (rank 0): most idle cores and bandwidth; a round of pushes takes about 26.8 ms"
    )


def test_as_many_servers_as_bytes_and_bandwidth_ask_for() -> None:
    # 8 ranks * 32 MiB at 1.25e9 bytes/s: 215, 107 and 72 ms with one, two and three servers.
    assert place_servers(four_hosts(), 32 * MIB).servers == (0, 2, 4)
    assert place_servers(four_hosts(), 32 * MIB, round_s=0.3).servers == (0,)
    assert place_servers(four_hosts(), 32 * MIB, round_s=0.11).servers == (0, 2)
    assert place_servers(four_hosts(), 96 * MIB, push_bytes=32 * MIB).servers == (0, 2, 4)
    large = place_servers(four_hosts(), 1000 * MIB)
    assert large.servers == (0, 2, 4, 6) and "more than the 100 ms allowed" in large.reason
    assert place_servers(four_hosts(), 1000 * MIB, most=2).servers == (0, 2)


def test_free_cores_and_bandwidth_come_first() -> None:
    hosts = [load(0, "a", cores=0.2), load(1, "b", link=1e8), load(2, "c", cores=1.0), load(3, "d")]
    assert place_servers(hosts, MIB).servers == (3,)
    assert place_servers(hosts[:3], MIB).servers == (2,)
    assert place_servers(hosts[:2], MIB).servers == (0,)  # 0.2 cores serve 2e8 bytes/s


def test_a_slow_host_is_left_out_where_it_would_make_the_round_longer() -> None:
    hosts = [load(0, "a"), load(1, "b"), load(2, "slow", link=1e7)]
    assert place_servers(hosts, 1000 * MIB).servers == (0, 1)


def test_never_on_a_host_with_a_straggler() -> None:
    slow = load(1, "node0", cores=64.0, link=9e9, straggling=True)  # its neighbour is the one that is slow
    decision = place_servers(four_hosts(r1=slow), 1000 * MIB)
    assert decision.servers == (2, 4, 6)
    assert "avoiding 1 host with stragglers" in decision.reason
    everywhere = [load(rank, f"node{rank}", cores=rank + 1.0, link=1e12, straggling=True) for rank in range(3)]
    decision = place_servers(everywhere, MIB)
    assert decision.servers == (2,) and "every host has a straggler" in decision.reason


def test_one_host_gets_one_server() -> None:
    decision = place_servers([load(rank, "here", straggling=rank == 0) for rank in range(4)], 4000 * MIB)
    assert decision.servers == (1,) and "the only host" in decision.reason


def test_what_is_unknown_counts_as_usual() -> None:
    assert place_servers([HostLoad(rank=rank, host=f"n{rank}") for rank in range(3)], MIB).servers == (0,)
    hosts = [HostLoad(rank=0, host="a"), load(1, "b", cores=0.5), load(2, "c", cores=0.6), load(3, "d", cores=0.8)]
    assert place_servers(hosts, MIB).servers == (3,)
    assert place_servers([hosts[0], *hosts[1:2]], MIB).servers == (0,)
    # Two ranks of a host disagree: the lower figure counts.
    assert place_servers([load(0, "a", cores=8.0), load(1, "a", cores=0.1), load(2, "b", cores=0.3)], MIB).servers == (
        2,
    )


@given(
    data=st.lists(
        st.tuples(st.integers(0, 4), st.floats(0.0, 64.0), st.floats(1e6, 1e11), st.booleans()), min_size=1, max_size=12
    ),
    state=st.integers(0, 10**10),
    seed=st.integers(0, 99),
)
def test_whatever_the_hosts(data: list[tuple[int, float, float, bool]], state: int, seed: int) -> None:
    hosts = [load(rank, f"h{host}", cores, link, slow) for rank, (host, cores, link, slow) in enumerate(data)]
    decision = place_servers(hosts, state)
    names = [hosts[rank].host for rank in decision.servers]
    assert 1 <= len(names) == len(set(names))
    troubled = {entry.host for entry in hosts if entry.straggling}
    assert not troubled & set(names) or troubled == {entry.host for entry in hosts}
    mixed = list(hosts)
    random.Random(seed).shuffle(mixed)
    assert place_servers(mixed, state) == decision
    Plan.ps(len(hosts), 1, servers=decision.servers)


@pytest.mark.parametrize(
    ("hosts", "state", "text"),
    [
        ([], 1, "hosts is empty"),
        ([load(0, "a"), load(0, "b")], 1, "every rank once"),
        ([load(0, "a", cores=-1.0)], 1, "-1.0 free cores"),
        ([load(0, "a", link=0.0)], 1, "link of 0.0 bytes/s"),
        ([load(0, "a")], -1, "state_bytes is -1"),
    ],
)
def test_bad_input_is_refused(hosts: list[HostLoad], state: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place_servers(hosts, state)


def test_rates_that_are_not_known_count_alike() -> None:
    rates = [[1e9, unknown, 1e9, 1e9] for unknown in (math.nan, math.inf, 0.0)]
    found = [
        place_on_hosts(range(4), hosts=["a", "b", "c", "d"], slow={0}, link_bytes_per_s=rate, state_bytes=10**8)
        for rate in rates
    ]
    assert found[0] == found[1] == found[2]
    assert 0 not in found[0].servers


def test_one_server_where_hosts_are_not_known() -> None:
    placed = place_on_hosts(range(4), hosts=None, slow=(), link_bytes_per_s=[1e6] * 4, state_bytes=10**9)
    assert len(placed.servers) == 1


def test_servers_avoid_a_busy_host_whatever_its_link() -> None:
    links = {"a": 1.3e7, "b": 1.25e7, "c": 1e7}
    hosts = [load(r, host, cores=1.5 if r else 0.0, link=link) for r, (host, link) in enumerate(links.items())]
    decision = place_servers(hosts, MIB)
    assert 0 not in decision.servers and decision.avoided == "a whose cores are busy"
    assert "avoiding 1 busy host" in decision.reason
    alike = [load(rank, name, cores=0.4) for rank, name in enumerate("abc")]
    assert place_servers(alike, MIB).servers == (0,) and not place_servers(alike, MIB).avoided, "all equally busy"
    slow_link = [load(0, "a", cores=0.2), load(1, "b", link=1e8)]
    assert place_servers(slow_link, MIB).servers == (0,), "an idle host with a tenth of the bandwidth is no better"


def near(rank: int, host: str, cores: float) -> HostLoad:
    return HostLoad(rank=rank, host=host, free_cpu_cores=cores, neighbours=2)


def test_servers_avoid_hosts_where_another_job_would_get_slower() -> None:
    free, tight = load(1, "b", cores=0.6), near(0, "a", 1.0)
    assert place_servers([tight, free], MIB, need_cores=0.9).servers == (0,), "it fits into what is idle"
    decision = place_servers([tight, free], MIB, need_cores=1.4)
    assert decision.servers == (1,) and not decision.slows
    assert decision.avoided == "a where another job would get slower"
    alone = place_servers([tight], MIB, need_cores=1.4)
    assert alone.servers == (0,) and alone.slows == ("a",), "no choice: whoever offers the mode has to know"
    both = [near(0, "a", 0.8), near(1, "b", 0.8)]
    assert place_servers(both, 1000 * MIB, need_cores=1.4).servers == (0, 1), "half of the need fits on each"
    assert place_servers([HostLoad(rank=0, host="a", neighbours=2)], MIB, need_cores=9.0).slows == (), "unknown"


def test_as_many_servers_as_keep_the_neighbours_speed() -> None:
    both = [near(0, "a", 0.8), near(1, "b", 0.8), near(2, "c", 0.1)]
    decision = place_servers(both, MIB, need_cores=1.4)  # A round of one server is short enough.
    assert decision.servers == (0, 1) and not decision.slows
    one = place_servers(both, MIB, need_cores=1.4, most=1)
    assert len(one.servers) == 1 and len(one.slows) == 1, "no more than one may run"
    links = [replace(both[0], link_bytes_per_s=1e9), replace(both[1], link_bytes_per_s=1e8)]
    assert place_servers(links, MIB, need_cores=1.4).servers == (0, 1), "a slower link rather than a slower neighbour"


def test_more_servers_where_one_host_alone_would_take_the_whole_need() -> None:
    alone = load(0, "a", cores=4.0, link=1e8)
    shared = [HostLoad(rank=r, host=f"h{r}", free_cpu_cores=0.3, link_bytes_per_s=1e8, neighbours=1) for r in (1, 2, 3)]
    hosts = [replace(alone, free_cpu_cores=0.5), *shared]
    decision = place_servers(hosts, 10 * MIB, need_cores=0.8)  # 0.42 s with one server, 0.1 s with four.
    assert decision.servers == (0, 1, 2, 3) and not decision.slows
    assert place_servers(hosts, MIB, need_cores=0.8).servers == (0,), "one suffices"
    assert place_servers(hosts, 10 * MIB, need_cores=0.8, most=2).servers == (0,), "two would make one slower"
    busy = place_servers([alone, *shared], 10 * MIB, need_cores=0.8)
    assert busy.servers == (0,), "the others have a core in use, by comparison"


@given(
    cores=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=8),
    jobs=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    need=st.floats(0.0, 8.0),
)
def test_no_job_gets_slower_where_one_server_fits_elsewhere(cores: list[float], jobs: list[int], need: float) -> None:
    hosts = [HostLoad(rank=r, host=f"h{r}", free_cpu_cores=c, neighbours=jobs[r]) for r, c in enumerate(cores)]
    fits = [Headroom(free_cpu_cores=c, neighbours=jobs[r]).fits(need) for r, c in enumerate(cores)]
    decision = place_servers(hosts, 1, need_cores=need)
    assert not decision.slows or not any(fits)
    lefts = [Headroom(free_cpu_cores=c, neighbours=jobs[r]) for r, c in enumerate(cores)]
    enough = [sum(left.fits(need / k) for left in lefts) >= k for k in range(1, len(cores) + 1)]
    assert bool(decision.slows) is not any(enough), "nor where several would"


def test_what_servers_need_grows_with_pushes_and_bytes() -> None:
    assert server_cores(0.0, 1e9) == 0.0
    assert server_cores(10.0, 0.0) < server_cores(20.0, 0.0) < server_cores(20.0, 1e8)
    assert server_cores(2.0, 4_227_328) == pytest.approx(2 * 9.35e-3, rel=0.05), "as measured"
