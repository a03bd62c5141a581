"""Server processes and their owner: starting, events, ending, and what a person who starts one by hand sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.ps import main as benchmark
from benchmarks.ps import summarize
from scheduler.plan.plan import Plan
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.ps.common.auth import JobKey
from star_hvd.ps.common.forking import SERVER_NAME
from star_hvd.ps.owner.server_process import ServerProcess
from star_hvd.ps.worker.client import Client
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, run_all

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(900)]


def push(made: Cluster, client: Client, step: int) -> int:
    client.push(step=step, version=step, flats=made.gradients(client.rank, step), weight=1.0, loss=2.0)
    return client.wait(DEADLINE_S).version


def test_a_server_process_from_its_start_to_its_end() -> None:
    with cluster(Plan.ps(2, 2), servers=2, processes=True) as made:
        for index, server in enumerate(made.servers):
            process = psutil.Process(server.pid)
            assert server.alive and process.cmdline()[-2:] == ["star_hvd.ps.server.forker", str(os.getpid())]
            assert process.name() == SERVER_NAME
            secrets = [pair.hand_over()[1].decode() for pair in (made.key.own, made.key.server)]
            shown = " ".join([*process.cmdline(), *process.environ().values()])
            assert not any(secret in shown for secret in secrets), f"server {index} shows its secret"
        run_all(*(lambda c=c: push(made, c, 0) for c in made.clients))
        note = made.wait_event("update")
        assert note["ranks"] == [0, 1] and note["version"] == 1 and note["loss"] == 2.0
        # A second optimizer in the same processes.
        for index, server in enumerate(made.servers):
            server.open(1, 5, index, made.endpoints, made.layout, made.plan, made.spec(), 3)
            server.seed(1, 5, Snapshot(3, [torch.ones_like(p) for p in made.ordered], [{} for _ in made.ordered]))
        other = Client(0, 1, 5, made.endpoints, made.layout, made.key)
        other.start()
        reply = other.pull(DEADLINE_S)
        assert reply.version == 3 and all(bool((flat == 1.0).all()) for flat in reply.params)
        other.close()
        pids = [server.pid for server in made.servers]
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


def test_an_optimizer_that_fails_ends_the_server_with_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(Plan.ps(1, 1), processes=True, optimizer=Failing) as made:
        made.recovers = False
        made.clients[0].push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        assert "the user's own mistake" in made.wait_event("failed")["reason"]
        assert made.wait_event("died")["returncode"] == 1
        with pytest.raises(DeadlineError, match="is a server dead"):
            made.clients[0].wait(0.2)
    assert "the user's own mistake" in capfd.readouterr().err, "shown in the output of its rank"


class Failing(torch.optim.SGD):
    """Fails in its first step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("the user's own mistake")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("exit 0", "exit status 0; see"),
        ("echo a warning >&2; echo ImportError: two >&2; exit 3", "exit status 3 (ImportError: two); see"),
        ("sleep 60 <&0 & exit 4", "exit status 4; see"),  # Another process holds its connection.
        ("kill -9 $$", "exit status -9; see"),
        (None, "PermissionError: "),
    ],
)
def test_a_server_that_cannot_start_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str | None, why: str
) -> None:
    """Whatever ends it, nobody waits for the deadline."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    script.chmod(0o600 if program is None else 0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    server = ServerProcess(3, JobKey.new(), "127.0.0.1")
    for _ in range(2):
        with pytest.raises(DeadlineError) as caught:
            server.ensure(DEADLINE_S)
        assert str(caught.value).startswith("the parameter server of rank 3 could not be started: ")
        assert why in str(caught.value) and not server.alive
    server.stop()
    assert capfd.readouterr().err.count("a warning\n") == 2 * ("warning" in str(program)), "shown in the rank's output"


def test_a_server_that_cannot_listen_says_why() -> None:
    server = ServerProcess(3, JobKey.new(), "192.0.2.1")  # Reserved for documentation.
    with pytest.raises(DeadlineError, match=r"could not be started: \w+Error: .*[Aa]ssign requested address"):
        server.ensure(DEADLINE_S)
    assert not server.alive
    server.stop()


def test_orders_to_a_server_that_was_never_started_are_refused() -> None:
    with pytest.raises(ChannelError, match="has not been started"):
        ServerProcess(3, JobKey.new(), "127.0.0.1").set_plan(0, Plan.ps(1, 1))


def test_nobody_starts_a_server_by_hand() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "star_hvd.ps.server.server"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300.0,
    )
    assert run.returncode == 2 and b"cannot be started by hand" in run.stderr


def test_the_benchmark_takes_both_sides_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "ps.json"
    options = ["--mbytes", "1", "--chunk-kib", "64", "--blocks", "2", "--exchanges", "2", "--json", str(target)]
    assert benchmark(options) == 0
    found = json.loads(target.read_text(encoding="utf-8"))
    again = summarize(found["blocks_s"], found["model_bytes"])
    assert found["ratio"] == again["ratio"] == pytest.approx(found["tcp_exchange_s"] / found["ps_exchange_s"])
    assert found["model_bytes"] == pytest.approx(1e6, rel=0.1) and "ratio" in capsys.readouterr().out
    assert benchmark(["--workers", "0"]) == 2
