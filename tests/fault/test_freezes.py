"""A process that stands still: a server is killed and recovered, and no rank waits for its owner or for rank 0.

Rank 0 stands still until the others have made many steps. The limit of a recovery is far above what is measured (a few
seconds, see docs/faults.md).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from scheduler.plan.plan import Plan
from star_hvd.ps.common.forking import SERVER_NAME
from tests.fault.freeze_job import FROZEN_S, RECOVERED_STEPS, STEPS_SINCE
from tests.support.launch import run_job
from tests.support.ps_cluster import DEADLINE_S, cluster, run_all
from tests.support.shared import SHARED_LIMIT_S
from tests.support.shared import facts_of as shared_facts

pytestmark = [pytest.mark.fault, pytest.mark.timeout(SHARED_LIMIT_S)]

RANKS = 4
LONGEST_S = 60.0  # A recovery, on the busiest machine.
SERVERS = ("ps(1):server", "ps(4):server", "ssp(8):server", "grouped(2):server")
OWNERS = ("ps(1):rank", "ps(1):rank:shard", "ssp(100000):rank", "ssp(100000):rank:shard")


def facts_of(names: tuple[str, ...], name: str) -> list[dict[str, Any]]:
    return shared_facts("tests.fault.freeze_job", names, name, ranks=RANKS, noted="freeze_job.py")


@pytest.mark.parametrize("name", SERVERS)
def test_a_frozen_server_is_killed_and_the_steps_go_on(name: str) -> None:
    facts = facts_of(SERVERS, name)
    assert any("the parameter server of rank 0 is killed: no answer" in text for text in facts[0]["logged"])
    for rank in facts:
        assert rank["mode"] != "sync" and rank["steps"] >= RECOVERED_STEPS
        assert rank["longest_s"] < LONGEST_S, "a step waited for the frozen server"


@pytest.mark.parametrize("name", OWNERS)
def test_the_others_go_on_while_rank_0_and_its_server_s_owner_is_frozen(name: str) -> None:
    facts = facts_of(OWNERS, name)
    assert facts[0]["went_on"], "the others made too few steps until rank 0 was let go"
    assert facts[0]["frozen_s"] >= FROZEN_S and facts[0]["longest_s"] >= FROZEN_S
    for rank in facts:
        assert not any("its parameter server died" in text for text in rank["logged"])
    for rank in facts[1:]:
        assert rank["steps"] >= STEPS_SINCE and rank["longest_s"] < facts[0]["frozen_s"]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_server_is_left_when_its_owner_is_killed(frozen: bool) -> None:
    result = run_job("tests.fault.freeze_job", "ps(1):orphan" if frozen else "ps(1):owner", ranks=RANKS)
    assert result.returncode != 0
    pids = result.results[0]["servers"]
    assert len(pids) == 2, "the server, and the process that forks them"
    limit_s = time.monotonic() + LONGEST_S
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < limit_s, "a process outlived its owner"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            process.name() == SERVER_NAME or "star_hvd.ps.server.forker" in process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_forks_servers_is_replaced_when_it_is_frozen_or_dead() -> None:
    with cluster(Plan.ps(2, 2), servers=1, processes=True) as made:
        server = made.servers[0]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            forks, deaths = psutil.Process(server.pid).ppid(), made.deaths
            os.kill(forks, number)
            if number == signal.SIGSTOP:
                made.kill(0)
            while made.deaths == deaths:
                time.sleep(0.05)
            made.settled()
            assert server.alive and psutil.Process(server.pid).ppid() != forks

        def push(rank: int) -> None:
            made.clients[rank].push(step=0, version=0, flats=made.gradients(rank, 0), weight=1.0)
            assert made.clients[rank].wait(DEADLINE_S).version == 1

        run_all(*(lambda r=r: push(r) for r in range(2)))


def test_orders_to_a_frozen_server_wait_for_nobody_and_are_told_again() -> None:
    with cluster(Plan.ps(2, 2), servers=2, processes=True) as made:
        frozen = made.servers[0]
        assert frozen.pid is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        for _ in range(20_000):  # More than the socket holds; this blocked, under a lock.
            frozen.member(0, 1, "present")
        frozen.member(0, 1, "absent")
        made.wait_event("died")
        made.settled()
        # Only where the new process knows that rank 1 is absent does it make an update without it.
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        assert made.clients[0].wait(DEADLINE_S).version == 1
