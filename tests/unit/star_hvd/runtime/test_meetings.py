"""Meetings of all ranks: when a rank is inactive, and under which condition they meet."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from star_hvd.channel.messages.base import Away
from star_hvd.engine.meeting import Position
from star_hvd.runtime import meetings
from star_hvd.runtime.meetings import Meetings


@pytest.mark.parametrize("together", [True, False])
def test_ranks_meet_under_a_condition_and_are_inactive_once(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an epoch the condition is a wait for all ranks, in which this one must not be waited for."""
    sent, met = list[Any](), list[str]()

    def gathered(own: list[Position], check: Any, deadline_s: float, what: str) -> list[Position]:
        met.append(what)
        return own

    class Driver:
        dropped = False

        class timer:
            @staticmethod
            def add_outside(time_s: float) -> None:
                """The meeting is not the program's own work."""

        def position(self) -> Position:
            return Position(0, 0, 3, 3, whole=True, out_of_common_steps=False, mid_step=False)

        def finish_step(self) -> None: ...
        def set_inactive(self, inactive: bool) -> None: ...
        def confirm_inactive(self) -> None: ...

    drivers: Any = {0: Driver()}
    made = Meetings(drivers, sent.append, lambda: None)
    monkeypatch.setattr(meetings, "gather_positions", gathered)

    def condition() -> bool:
        assert [message.away for message in sent] == [True] and not met
        return together

    with made.meeting("the end", 1.0, out_of_data=True, if_true=condition):
        assert met == ["the end"] * together
    assert [(type(message), message.away) for message in sent] == [(Away, True), (Away, False)]


@pytest.mark.parametrize(("in_pass", "broadcasts"), [(True, False), (True, True), (False, False)])
def test_what_a_forward_pass_has_used_is_left_alone_in_a_collective_of_the_program(
    in_pass: bool, broadcasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where parameters are broadcast, nor where the program closes an optimizer or adds parameters."""
    caught_up, spared = list[int](), in_pass and not broadcasts

    class Driver:
        dropped, makes_local_steps, active_mode = False, False, object()

        def __init__(self) -> None:
            self.broadcasts = broadcasts

        def position(self) -> Position:
            return Position(0, 0, 3, 4, whole=True, out_of_common_steps=bool(caught_up), mid_step=False)

        def mid_pass(self) -> bool:
            return True

        def catch_up(self) -> None:
            caught_up.append(0)

        def finish_step(self) -> None: ...
        def set_inactive(self, inactive: bool) -> None: ...
        def confirm_inactive(self) -> None: ...

    def gather(own: list[Position], check: Any, deadline_s: float, what: str) -> list[Position]:
        assert [position.mid_step for position in own] == [spared]
        return [dataclasses.replace(position, step=4) for position in own] if caught_up else own

    monkeypatch.setattr(meetings, "gather_positions", gather)
    drivers: Any = {0: Driver()}
    made = Meetings(drivers, lambda message: None, lambda: None)
    made.meet("an allreduce", 60.0, out_of_data=False, in_pass=in_pass)
    assert bool(caught_up) is not spared


@pytest.mark.parametrize("within", [False, True])
def test_a_rank_that_stays_inactive_leaves_averagings_of_its_other_optimizers_to_their_helpers(
    within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An averaging by the training thread and one by the helper would get into each other's way."""
    caught_up, gathered = list[int](), list[list[bool]]()

    class Driver:
        dropped, makes_local_steps, active_mode = False, True, object()

        def __init__(self, number: int) -> None:
            self.number = number

        def position(self) -> Position:
            inside = within and self.number == 0
            return Position(0, self.number, 3, 3, whole=True, out_of_common_steps=True, mid_step=inside)

        def catch_up(self) -> None:
            caught_up.append(self.number)

        def finish_step(self) -> None: ...
        def set_inactive(self, inactive: bool) -> None: ...
        def confirm_inactive(self) -> None: ...

    def gather(own: list[Position], check: Any, deadline_s: float, what: str) -> list[Position]:
        gathered.append([position.mid_step for position in own])
        return own

    monkeypatch.setattr(meetings, "gather_positions", gather)
    drivers: Any = {number: Driver(number) for number in range(2)}
    Meetings(drivers, lambda message: None, lambda: None).meet("a barrier", 60.0, out_of_data=False)
    assert gathered == [[within, within]] * 2 and caught_up == ([] if within else [0, 1])
