"""When a server that says nothing counts as lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from star_hvd.ps.owner.watchdog import Health, ServerWatchdog, thread_state

LOOK_S = 0.25


class Server:
    """A process as the system shows it, on a clock of its own."""

    def __init__(self, *, patience: float = 1.0) -> None:
        self.state, self.ticks, self.now_s = "S", 0, 0.0
        self.watchdog = ServerWatchdog(1, 0.0, patience=patience, read=lambda pid: (self.state, self.ticks))

    def lost_after(self, limit_s: float, *, ticks: int = 0, look_s: float = LOOK_S) -> float | None:
        """Seconds until it counts as lost, None if that takes longer."""
        began_s = self.now_s
        while self.now_s - began_s < limit_s:
            self.now_s += look_s
            self.ticks += ticks
            if self.watchdog.look(self.now_s) is Health.LOST:
                return self.now_s - began_s
        return None


def test_a_stopped_process_is_lost_at_once() -> None:
    server = Server()
    assert server.lost_after(0.5) is None
    server.state = "T"
    lost_s = server.lost_after(10.0)
    assert lost_s is not None and lost_s <= 1.5 and server.watchdog.stopped
    assert "state T" in server.watchdog.reason


def test_a_process_that_waits_for_something_is_lost_after_three_seconds() -> None:
    lost_s = Server().lost_after(60.0)
    assert lost_s is not None and 3.0 <= lost_s <= 4.5
    lost_s = Server(patience=4.0).lost_after(60.0)
    assert lost_s is not None and 12.0 <= lost_s <= 14.0


@pytest.mark.parametrize(("state", "ticks"), [("R", 0), ("R", 1), ("S", 1), ("D", 0)])
def test_a_starved_or_busy_one_gets_much_longer(state: str, ticks: int) -> None:
    server = Server()
    server.state = state
    assert server.lost_after(100.0, ticks=ticks) is None
    assert server.lost_after(100.0, ticks=ticks) is not None, "a loop without end is found some time"


def test_any_sign_of_life_begins_anew() -> None:
    server = Server()
    for _ in range(10):
        assert server.lost_after(2.5) is None
        server.watchdog.note_event()


def test_a_pause_of_the_owner_is_not_held_against_the_server() -> None:
    server = Server()
    assert server.lost_after(120.0, look_s=30.0) is None
    assert server.lost_after(10.0) is not None


def test_a_process_that_is_gone_is_the_pipe_s_business() -> None:
    watchdog = ServerWatchdog(1, 0.0, read=lambda pid: None)
    assert all(watchdog.look(0.25 * look) is Health.FINE for look in range(1000))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_state_of_a_real_process() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        limit_s = time.monotonic() + 60.0
        while (found := thread_state(process.pid)) is not None and found[0] != "T":
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        assert found is not None and found[1] >= 0
    finally:
        process.kill()
        process.wait()
    assert thread_state(process.pid) is None
    own = thread_state(os.getpid())
    assert own is not None and own[1] > 0
