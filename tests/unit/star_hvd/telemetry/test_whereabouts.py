"""Where a rank's training thread is while the other ranks wait for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from star_hvd.telemetry.whereabouts import Whereabouts, place_of


def _deep(depth: int, line: int) -> None:
    if depth:
        _deep(depth - 1, line)
    else:
        _stand(line)


def _stand(line: int) -> None:
    os.write(line, bytes(1 << 22))  # More than a pipe holds.


@pytest.fixture(params=[0, 40])
def standing(request: pytest.FixtureRequest) -> Iterator[threading.Thread]:
    """A thread that waits in a call of that depth."""
    read, write = os.pipe()
    thread = threading.Thread(target=_deep, args=(request.param, write))
    thread.start()
    assert os.read(read, 1)  # An event that it sets before it waits would not say that it has come to its wait.
    yield thread
    os.close(read)
    thread.join(60.0)
    assert not thread.is_alive()
    os.close(write)


def test_a_place_is_the_programs_own_call_and_where_it_stands(standing: threading.Thread) -> None:
    place = place_of(standing)
    assert place.split(" > ")[0].endswith("_bootstrap") and place.endswith(" in _stand")
    assert "star_hvd/telemetry/test_whereabouts.py:" in place and " in _deep" in place
    assert len(place.split(" > ")) <= 9


def test_a_thread_that_does_not_move_is_logged_once_a_minute(
    standing: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    whereabouts = Whereabouts(lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="star_hvd"):
        for now[0] in (10.0, 20.0, 30.0, 75.0):
            whereabouts.log(standing, rank=2, step=14, waited_s=now[0])
    waited = [record.getMessage() for record in caplog.records]
    assert len(waited) == 2
    assert waited[0].startswith("step 14 has been waiting for this rank, 2, for 10 s; its training thread is at ")


def test_a_thread_that_has_ended_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    Whereabouts().log(ended, rank=1, step=-1, waited_s=10.0)
    waits = "the end of the job has been waiting for this rank, 1, for 10 s; its training thread has ended"
    assert waits in caplog.text
