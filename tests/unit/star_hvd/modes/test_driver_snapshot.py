"""What a rank gives to others that ask for the state of a step."""

from __future__ import annotations

from typing import Any, cast

from star_hvd.config import Config
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.driver import StepDriver
from tests.support.world import World


def served(engine: StepEngine, *, state_too: bool, min_step: int) -> int | None:
    """The step of what a rank with this engine answers."""
    driver = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
    driver.engine = engine
    found = driver.snapshot(min_step, state_too=state_too)
    return None if found is None else found.step


def test_a_rank_gives_nothing_older_than_is_asked_for() -> None:
    world = World(1, world_size=2)
    world.run()
    engine = world.engines[0]
    engine.set_inactive(False)
    for state_too in (True, False):
        assert served(engine, state_too=state_too, min_step=engine.step) == engine.step
        assert served(engine, state_too=state_too, min_step=engine.step + 1) is None


def test_while_no_rank_trains_a_child_goes_on_with_the_parameters_that_there_are() -> None:
    world = World(1, world_size=2)
    world.run()
    engine = world.engines[0]
    assert engine.inactive
    assert served(engine, state_too=False, min_step=engine.step + 1) == engine.step
    assert served(engine, state_too=True, min_step=engine.step + 1) is None, "a state that gets nobody further"
