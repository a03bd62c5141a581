"""A rank that has ended is told from one that is frozen, cut off or merely silent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from star_hvd.channel.departures import Departures
from star_hvd.channel.keys import Peer
from star_hvd.errors import RankLostError

LISTEN = """
import socket, sys, time
path = sys.argv[1]
sock = socket.socket(socket.AF_UNIX) if path else socket.socket()
sock.bind(path or ("127.0.0.1", 0))
sock.listen()
print(0 if path else sock.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_frozen_rank_is_waited_for_and_one_that_was_killed_is_not(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket") if kind == "unix" else ""
    with subprocess.Popen([sys.executable, "-c", LISTEN, path], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        peer = Peer(b"", "127.0.0.1", 0, int(rank.stdout.readline()), tensor_path=path)
        found = Departures([peer, peer], first_s=0.0)
        found.note(1, False)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(rank.pid, number)
            for _ in range(3):
                found.check()
                found.check(also=[0])
        rank.kill()
        rank.wait(60.0)
        deadline_s = time.monotonic() + 60.0
        with pytest.raises(RankLostError, match="rank 1 has left the job"):
            while time.monotonic() < deadline_s:
                found.check()
        found.note(1, True)
        found.check()  # Nothing is looked at while all are heard.


def test_a_rank_is_looked_at_less_and_less_often(tmp_path: Path) -> None:
    """Connections that a frozen process has not accepted wait in a queue of finite length."""
    now_s, looked = 0.0, list[float]()
    with socket.socket(socket.AF_UNIX) as rank:
        rank.bind(str(tmp_path / "socket"))
        rank.listen()
        rank.setblocking(False)
        peer = Peer(b"", "127.0.0.1", 0, 1, tensor_path=str(tmp_path / "socket"))
        found = Departures([peer], clock=lambda: now_s)
        found.note(0, False)
        while now_s < 300.0:
            found.check()
            with contextlib.suppress(BlockingIOError):
                rank.accept()[0].close()
                looked.append(now_s)
            now_s += 0.25
    assert looked[:4] == [0.0, 0.5, 1.5, 3.5] and len(looked) < 20


def test_a_refusal_counts_only_if_others_follow(tmp_path: Path) -> None:
    """That of a host that is just coming up, say, would end the job."""
    now_s, path = 0.0, str(tmp_path / "socket")
    found = Departures([Peer(b"", "127.0.0.1", 0, 1, tensor_path=path)], clock=lambda: now_s)
    found.note(0, False)
    for listens in (False, True, False):
        with contextlib.ExitStack() as stack:
            if listens:
                rank = stack.enter_context(socket.socket(socket.AF_UNIX))
                rank.bind(path)
                rank.listen()
            limit_s = now_s + 4.0
            while now_s < limit_s:
                found.check()
                now_s += 0.25
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    with pytest.raises(RankLostError, match="rank 0 has left the job"):
        for _ in range(20):
            found.check()
            now_s += 0.25


def test_a_pause_between_two_refusals_is_no_time_in_which_it_refused(tmp_path: Path) -> None:
    now_s = 0.0
    found = Departures([Peer(b"", "127.0.0.1", 0, 1, tensor_path=str(tmp_path / "none"))], clock=lambda: now_s)
    found.note(0, False)
    found.check()
    now_s += 1000.0
    found.check()
    with pytest.raises(RankLostError):
        for _ in range(30):
            now_s += 0.25
            found.check()
