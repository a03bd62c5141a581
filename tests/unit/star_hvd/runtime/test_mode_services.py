"""What a rank gets ready for plans: here process sets whose making fails, once or for ever."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.switch import DropSet, MakeSet
from star_hvd.config import Config
from star_hvd.errors import DeadlineError, RankLostError, StarError
from star_hvd.ps.common.layout import LayoutError
from star_hvd.runtime import mode_services, process_sets, server_sessions
from star_hvd.runtime.mode_services import ModeServices
from star_hvd.telemetry import wait_time

PLAN = Plan.subgroup(4, (0, 1, 2), plan_id=1)


def test_a_set_that_was_not_made_once_is_made_when_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = [True]

    def add(made: Any) -> Any:
        time.sleep(0.1)
        if trouble[0]:
            raise RuntimeError("a rank was frozen")
        return made

    monkeypatch.setattr(process_sets, "unavailable_reason", lambda: None)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    monkeypatch.setattr(process_sets, "add_process_set", add)
    monkeypatch.setattr(process_sets, "remove_process_set", lambda gone: True)
    keyring: Any = SimpleNamespace(peers=[None] * 4)
    key: Any = None
    services = ModeServices(0, Config(plan_deadline_s=60.0), keyring, key, "h", lambda *unused, **also: None, {})
    services.sets.start()
    try:
        services.on_message(MakeSet([0, 1, 2]))
        assert "a rank was frozen" in str(services.prepare(0, PLAN))
        trouble[0] = False
        services.on_message(MakeSet([0, 1, 2]))
        assert services.prepare(0, PLAN) is None, "told what had been true before"
        services.on_message(DropSet([0, 1, 2]))
        services.on_message(MakeSet([0, 1, 2]))
        assert services.prepare(0, PLAN) is None and services.process_set((0, 1, 2)) is not None
    finally:
        services.sets.stop()


def preparing(monkeypatch: pytest.MonkeyPatch, plan_deadline_s: float) -> ModeServices:
    """Rank 3's services, for an optimizer whose servers need nothing."""
    keyring: Any = SimpleNamespace(peers=[None] * 4)
    key: Any = None
    applier = SimpleNamespace(buckets=[], optimizer=SimpleNamespace(param_groups=[]), base=None, hyper=None)
    drivers: Any = {0: SimpleNamespace(engine=SimpleNamespace(plan=Plan.sync(4), applier=applier))}
    monkeypatch.setattr(server_sessions, "Client", lambda *unused: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(server_sessions, "Layout", SimpleNamespace(build=lambda *unused, **also: None))
    spec = SimpleNamespace(check_rebuilt=lambda optimizer: None)
    monkeypatch.setattr(server_sessions, "OptimizerSpec", SimpleNamespace(of=lambda *unused: spec))
    config = Config(plan_deadline_s=plan_deadline_s)
    return ModeServices(3, config, keyring, key, "h", lambda *unused, **also: None, drivers)


@pytest.mark.parametrize("plan", [PLAN, Plan.ps(4, 3, servers=(0,), plan_id=1)], ids=["sets", "servers"])
@pytest.mark.parametrize("how", ["give_up", "forget"])
def test_a_plan_that_is_given_up_does_not_hold_up_the_next_one(
    plan: Plan, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = preparing(monkeypatch, plan_deadline_s=600.0)
    found: list[str | None] = []
    waiting = threading.Thread(target=lambda: found.append(services.prepare(0, plan)), daemon=True)
    waiting.start()
    services.give_up(0, plan.plan_id - 1)
    waiting.join(0.2)
    assert waiting.is_alive(), "an earlier plan was given up, not this one"
    services.give_up(0, plan.plan_id) if how == "give_up" else services.forget(0)
    waiting.join(60.0)
    assert found and found[0] is not None, "it still waits for what nobody will make"


@pytest.mark.parametrize("plan", [PLAN, Plan.ps(4, 3, servers=(0,), plan_id=1)], ids=["sets", "servers"])
def test_a_pause_of_this_process_does_not_end_the_preparation_of_a_plan(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, jump_s, found = [0], [0.0], list[str | None]()

    def monotonic() -> float:
        reads[0] += 1
        return time.monotonic() + jump_s[0]

    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=monotonic))
    services = preparing(monkeypatch, plan_deadline_s=3600.0)
    waiting = threading.Thread(target=lambda: found.append(services.prepare(0, plan)), daemon=True)
    waiting.start()
    for _ in range(2):
        seen, limit_s = reads[0], time.monotonic() + 60.0
        while reads[0] <= seen + 1 and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert reads[0] > seen + 1
        jump_s[0] += 10_000.0
    assert waiting.is_alive() and not found
    services.give_up(0, plan.plan_id)
    waiting.join(60.0)
    assert found and found[0] is not None


@pytest.mark.parametrize("background", [None, True, False])
def test_pushes_begin_early_unless_the_settings_say_no(
    background: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bucket is then spread over all servers: else all ranks send the same one to the same server."""
    spread: list[bool] = []

    def build(*unused: Any, each_spread: bool) -> Any:
        spread.append(each_spread)
        raise LayoutError("this is enough")

    monkeypatch.setattr(server_sessions, "Layout", SimpleNamespace(build=build))
    monkeypatch.setattr(mode_services, "ServerSteps", lambda *unused, **given: given)
    applier = SimpleNamespace(buckets=[], optimizer=SimpleNamespace(param_groups=[]), base=None, hyper=None)
    wire = SimpleNamespace(server_pushes=lambda: None)
    driver = SimpleNamespace(
        engine=SimpleNamespace(plan=Plan.sync(4), applier=applier, wire=wire), gates="gates", timeline=None,
        timer=SimpleNamespace(add_outside=None),
        reporter=SimpleNamespace(note_step=None, note_updates=None), switcher=SimpleNamespace(plan_of=None),
    )  # fmt: skip
    keyring: Any = SimpleNamespace(peers=[None] * 4)
    key: Any = None
    drivers: Any = {0: driver}
    config = Config(background=background)
    services = ModeServices(0, config, keyring, key, "h", lambda *unused, **also: None, drivers)
    monkeypatch.setattr(services.sessions, "client", lambda *unused: None)
    plan = Plan.ps(4, 3, servers=(1,), plan_id=1)
    given: Any = services.steps(0, plan)
    assert given["early"] is (background is not False) and given["gates"] == ("gates" if background else None)
    assert services.sessions.prepare(0, plan) == "this is enough" and spread == [background is not False]


def test_no_other_modes_steps_are_made_for_a_mode_that_has_none() -> None:
    keyring, key = cast(Any, SimpleNamespace(peers=[None] * 4)), cast(Any, None)
    services = ModeServices(0, Config(), keyring, key, "h", lambda *unused, **also: None, {})
    plan = Plan.ps(4, 3, servers=(0,), plan_id=1)
    object.__setattr__(plan, "mode", "new")
    with pytest.raises(StarError, match="mode new"):
        services.steps(0, plan)


@pytest.mark.parametrize("lost", [True, False], ids=["a rank has left", "this rank failed"])
def test_ended_servers_that_never_answer_hold_nobody_up(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.ps(4, 3, servers=(1,), plan_id=1)
    engine = SimpleNamespace(failure=None)
    gone = RankLostError("rank 1 has left the job")

    def check_ranks() -> None:
        if lost:
            raise gone

    class Silent:
        """A connection to servers of which one has gone; its wait calls `check` as `Line.wait` does."""

        def state(self, deadline_s: float, *, check: Any = lambda: None) -> Any:
            engine.failure = None if lost else StarError("this rank failed")
            check()
            raise DeadlineError("no state in time")

    keyring, key = cast(Any, SimpleNamespace(peers=[None] * 4)), cast(Any, None)
    drivers: Any = {0: SimpleNamespace(engine=engine)}
    services = ModeServices(
        0, Config(), keyring, key, "h", lambda *unused, **also: None, drivers, check_ranks=check_ranks
    )
    monkeypatch.setattr(services.sessions, "client", lambda *unused: Silent())
    with pytest.raises(RankLostError if lost else StarError) as raised:
        services.final_state(0, plan, 5, 60.0)
    assert raised.value is (gone if lost else engine.failure)
    assert services.final_state(1, plan, 5, 60.0) is None, "an optimizer that was closed"
