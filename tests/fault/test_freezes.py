"""A process that stands still: a server is killed and recovered, and nobody waits for its owner or for rank 0.

The limits are far above what is measured (a few seconds, see docs/faults.md): before, the others waited for as long as
the process stood still, or for ever.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from scheduler.plan.plan import Plan
from star_hvd.ps.common.forking import SERVER_NAME
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job
from tests.support.ps_cluster import DEADLINE_S, cluster, run_all

pytestmark = [pytest.mark.fault, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 4
LONGEST_S = 60.0  # A recovery, on the busiest machine.


def job(*args: str) -> JobResult:
    return run_job("tests.fault.freeze_job", *args, ranks=RANKS).check()


@pytest.mark.parametrize("mode", ["ps(1)", "ps(4)", "ssp(8)", "grouped(2)"])
def test_a_frozen_server_is_killed_and_the_steps_go_on(mode: str) -> None:
    result = job(mode, "server", "0", str(LONGEST_S + 10.0))
    assert "the parameter server of rank 0 is killed: no answer" in result.output, result.tail
    for rank in result.results:
        assert rank["mode"] != "sync" and rank["steps"] > 20
        assert rank["longest_s"] < LONGEST_S, "a step waited for the frozen server"


@pytest.mark.parametrize(
    ("mode", "data"), [("ps(1)", ""), ("ps(1)", "shard"), ("ssp(100000)", ""), ("ssp(100000)", "shard")]
)
def test_the_others_go_on_while_rank_0_and_its_server_s_owner_is_frozen(mode: str, data: str) -> None:
    frozen_s = 24.0
    result = job(mode, "rank", "0", str(frozen_s), data)
    assert result.results[0]["longest_s"] >= frozen_s - 1.0
    for rank in result.results[1:]:
        assert rank["longest_s"] < frozen_s / 2, "a step waited for the frozen rank"
    assert "its parameter server died" not in result.output


@pytest.mark.parametrize("frozen", [False, True])
def test_no_server_is_left_when_its_owner_is_killed(frozen: bool) -> None:
    result = run_job("tests.fault.freeze_job", "ps(1)", "orphan" if frozen else "owner", "0", "0", ranks=RANKS)
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
            forks = psutil.Process(server.pid).ppid()
            os.kill(forks, number)
            deaths = made.deaths
            if number == signal.SIGSTOP:
                server.kill()
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
            frozen.member(0, 1, "absent")
        frozen.member(0, 1, "present")
        made.wait_event("died")
        made.settled()

        def push(rank: int) -> None:
            made.clients[rank].push(step=0, version=0, flats=made.gradients(rank, 0), weight=1.0)
            assert made.clients[rank].wait(DEADLINE_S).version == 1

        run_all(*(lambda r=r: push(r) for r in range(2)))
