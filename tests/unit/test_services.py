"""What a rank gets ready for plans: here process sets whose making fails, once or for ever."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.plans import Plan
from star_hvd import process_sets
from star_hvd.config import Config
from star_hvd.control.switch_messages import DropSet, MakeSet
from star_hvd.services import JobServices

PLAN = Plan.subgroup(4, (0, 1, 2), epoch=1)


def test_a_set_that_was_not_made_once_is_made_when_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = [True]

    def make(ranks: tuple[int, ...]) -> tuple[Any, bool]:
        time.sleep(0.1)
        if trouble[0]:
            raise RuntimeError("a rank was frozen")
        return object(), True

    monkeypatch.setattr(process_sets, "unavailable_reason", lambda: None)
    monkeypatch.setattr(process_sets, "_dynamic", lambda: True)
    monkeypatch.setattr(process_sets, "_make", make)
    monkeypatch.setattr(process_sets, "remove_process_set", lambda gone: True)
    keyring: Any = SimpleNamespace(peers=[None] * 4)
    key: Any = None
    services = JobServices(0, Config(plan_deadline_s=60.0), keyring, key, "h", lambda *unused, **also: None, {})
    services._sets.start()
    try:
        services.on_message(MakeSet([0, 1, 2]))
        assert "a rank was frozen" in str(services._await_sets(PLAN))
        trouble[0] = False
        services.on_message(MakeSet([0, 1, 2]))
        assert services._await_sets(PLAN) is None, "told what had been true before"
        services.on_message(DropSet([0, 1, 2]))
        services.on_message(MakeSet([0, 1, 2]))
        assert services._await_sets(PLAN) is None and services.process_set((0, 1, 2)) is not None
    finally:
        services._sets.stop()
