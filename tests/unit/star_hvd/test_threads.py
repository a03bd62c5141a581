"""A thread that ends by an exception is noticed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import star_hvd
from star_hvd.threads import on_death, supervised

LIMIT_S = 60.0


def broken(reason: str) -> None:
    raise ArithmeticError(reason)


@pytest.mark.parametrize("critical", [False, True])
def test_the_end_of_a_thread_is_told_where_it_matters(caplog: pytest.LogCaptureFixture, critical: bool) -> None:
    heard: list[str] = []
    undo = on_death(lambda name, error: heard.append(f"{name}: {error}"))
    with caplog.at_level(logging.WARNING, logger="star_hvd"):
        for again in ("first", "second"):
            thread = supervised(broken, "star-test", args=(again,), critical=critical)
            thread.start()
            thread.join(LIMIT_S)
            undo()
    assert heard == (["star-test: first"] if critical else [])
    assert caplog.text.count("the thread star-test ended by an exception") == 2
    assert "ArithmeticError: second" in caplog.text


def test_all_threads_are_started_that_way() -> None:
    own = {"threads.py", "connection.py", "helper.py", "coordinator.py", "shipper.py"}  # Handle their end themselves.
    for path in Path(star_hvd.__file__).parent.rglob("*.py"):
        if path.name not in own:
            assert not re.search(r"threading\.Thread\(\s*(target|$)", path.read_text("utf-8")), path
