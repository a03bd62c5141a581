"""Hosts with rated links on one machine: a job starts on them, its ranks know their addresses, and rates hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan
from tests.multiproc.netns_job import FLOATS
from tests.support.forkserver import ADDRESS, server_address
from tests.support.launch import FORKED

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).resolve().parents[2]
FAST_BITS_PER_S, SLOW_BITS_PER_S = 400e6, 20e6
BYTES = 4 * FLOATS  # What an all-reduce of two ranks sends over each link.
TRIES = 8


def test_a_job_on_two_hosts_feels_the_rate_of_the_slower_link(tmp_path: Path) -> None:
    try:
        with Network(2, FAST_BITS_PER_S) as network:
            network.set_rate(1, SLOW_BITS_PER_S)
            slow_s = _reduction_s(network, tmp_path)
            network.set_rate(1, FAST_BITS_PER_S)
            fast_s = _reduction_s(network, tmp_path)
            for _ in range(TRIES):  # A busy machine makes any link look slow; one fast reduction is proof.
                if slow_s > 4.0 * fast_s:
                    break
                fast_s = min(fast_s, _reduction_s(network, tmp_path))
            made = {network.bridge, *(host.outer for host in network.hosts)}
            assert made <= set(psutil.net_if_stats())
    except NetworkError as error:
        pytest.skip(f"no hosts with rated links here: {error}")
    assert slow_s > 0.8 * 8 * BYTES / SLOW_BITS_PER_S, f"{BYTES} bytes crossed the slow link in {slow_s:.3f} s"
    assert slow_s > 4.0 * fast_s, f"20 times less rate made {fast_s:.3f} s into {slow_s:.3f} s"
    assert not made & set(psutil.net_if_stats()), "interfaces were left behind"


def _reduction_s(network: Network, folder: Path) -> float:
    """Time of an all-reduce of 2 MB under the launcher, on the rank where it is shortest."""
    write_plan(folder / "hosts.json", network)
    command = netns_command(folder / "hosts.json", "tests.multiproc.netns_job", str(folder), start=FORKED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "STAR_RUN_LOG": "0"}
    environment[ADDRESS] = server_address()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    times_s = []
    for rank, host in enumerate(network.hosts):
        told, time_s = (folder / f"rank{rank}").read_text(encoding="utf-8").split()
        assert told == host.address
        times_s.append(float(time_s))
    return min(times_s)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    try:
        with Network(2, FAST_BITS_PER_S) as network:
            write_plan(tmp_path / "hosts.json", network)
            command = netns_command(tmp_path / "hosts.json", "tests.multiproc.no_such_module")
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    except NetworkError as error:
        pytest.skip(f"no hosts with rated links here: {error}")
    assert done.returncode == 1
    assert "no_such_module" in done.stdout + done.stderr
