"""The benchmark of harm: its load, and its table."""

from __future__ import annotations

import time

import psutil
import pytest

from benchmarks.harm import Load, results_table


def test_a_load_ends_with_its_block() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with Load(2, 0.5):
        pids = {child.pid for child in psutil.Process().children()} - before
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    limit_s = time.monotonic() + 120.0
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ValueError, match="expected at least 0, and 0 to 1"):
        Load(1, 1.5)


def test_the_table_tells_what_auto_tried() -> None:
    run = {"plans": [{"mode": "sync"}, {"mode": "partial(1)"}, {"mode": "sync"}], "outcomes": [{"harmful": True}]}
    one = {"ranks": 2, "load": 1, "share": 0.5, "steps": 100, "sync_s": 2.0, "auto_s": 2.06, "ratio": 1.03}
    table = results_table([{**one, "runs": {"auto": [run]}}])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["2", "1 x 50%", "20.0", "20.6", "1.030", "sync, partial(1), sync", "1"]
