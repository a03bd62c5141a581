"""The keeper of process sets against an imagined Horovod, and what `init` prepares."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from star_hvd import patches
from star_hvd.errors import DeadlineError, StarError
from star_hvd.runtime import process_sets
from star_hvd.runtime.process_sets import MAX_SETS, SetKeeper, prepare_init, static_catalogue, unavailable_reason
from tests.support.effort import cases

ALL = frozenset({"0003", "0004", "0005", "0006"})
WORLD = 4
WAIT_S = 120.0


class Horovod:
    """Numbers sets as Horovod does: a removed set's number is given to the next one."""

    def __init__(self) -> None:
        self.sets: dict[tuple[int, ...], int] = {}
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()

    def add(self, made: Any) -> Any:
        assert self.go.wait(WAIT_S)
        ranks = tuple(made.ranks)
        self.threads.add(threading.current_thread().name)
        if ranks in self.sets:
            raise ValueError("Attempted to add a duplicate process set")
        made.process_set_id = min(set(range(1, 100)) - set(self.sets.values()))
        self.sets[ranks] = made.process_set_id
        self.log.append(("add", ranks))
        return made

    def remove(self, gone: Any) -> bool:
        self.log.append(("remove", tuple(gone.ranks)))
        return self.sets.pop(tuple(gone.ranks), None) is not None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {number: list(ranks) for ranks, number in self.sets.items()}


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Horovod]:
    found = Horovod()
    monkeypatch.setattr(process_sets, "add_process_set", found.add)
    monkeypatch.setattr(process_sets, "remove_process_set", found.remove)
    monkeypatch.setattr(process_sets.mpi_ops, "_basics", found)
    monkeypatch.setattr(process_sets.mpi_ops, "is_initialized", lambda: False)
    monkeypatch.setattr(process_sets.mpi_ops, "nccl_built", lambda: False)
    monkeypatch.setattr(process_sets, "_static", {})
    monkeypatch.setattr(patches, "horovod_patches", lambda: ALL)
    for name in ("HOROVOD_ELASTIC", "HOROVOD_SIZE", "HOROVOD_CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    yield found


class Told:
    def __init__(self, check: Callable[[], None] = lambda: None, **settings: float) -> None:
        self.news: queue.SimpleQueue[tuple[tuple[int, ...], str | None]] = queue.SimpleQueue()
        self.keeper = SetKeeper(WORLD, lambda ranks, reason: self.news.put((ranks, reason)), check, **settings)
        self.keeper.start()

    def add(self, *ranks: int) -> str | None:
        self.keeper.add(ranks)
        told, reason = self.news.get(timeout=WAIT_S)
        assert told == tuple(sorted(ranks))
        return reason


def test_adds_run_in_order_in_another_thread_and_are_told(horovod: Horovod) -> None:
    told = Told()
    for ranks in ((2, 0), (1, 2), (3,)):
        assert told.add(*ranks) is None
    assert horovod.log == [("add", (0, 2)), ("add", (1, 2)), ("add", (3,))]
    assert horovod.threads == {"star-sets"}
    found = told.keeper.get([2, 0])
    assert found is not None and found.process_set_id == 1
    told.keeper.stop(WAIT_S)


def test_adding_again_is_told_again_and_done_once(horovod: Horovod) -> None:
    told = Told()
    assert [told.add(0, 1), told.add(1, 0)] == [None, None]
    assert horovod.log == [("add", (0, 1))]
    told.keeper.stop(WAIT_S)


def test_the_whole_world_is_the_global_set(horovod: Horovod) -> None:
    told = Told()
    assert told.add(3, 2, 1, 0) is None
    assert told.keeper.get(range(WORLD)) is process_sets.global_process_set
    told.keeper.remove(range(WORLD))
    told.keeper.stop(WAIT_S)
    assert horovod.log == []


@pytest.mark.parametrize("ranks", [(), (0, 0), (-1, 1), (1, WORLD)])
def test_bad_ranks_never_reach_horovod(horovod: Horovod, ranks: tuple[int, ...]) -> None:
    told = Told()
    reason = told.add(*ranks)
    assert reason is not None and f"got the ranks {list(ranks)}; expected different ranks of 0..3" in reason
    told.keeper.stop(WAIT_S)
    assert horovod.log == []


def test_an_error_of_horovods_is_told_and_the_keeper_goes_on(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(made: Any) -> Any:
        raise ValueError("shutting down")

    told = Told()
    monkeypatch.setattr(process_sets, "add_process_set", refuse)
    assert "Horovod did not make the set [0, 1]: shutting down" in str(told.add(0, 1))
    assert told.keeper.get((0, 1)) is None
    monkeypatch.setattr(process_sets, "add_process_set", horovod.add)
    assert told.add(0, 1) is None
    told.keeper.stop(WAIT_S)


def test_an_error_of_who_is_told_does_not_end_the_keeper(horovod: Horovod) -> None:
    done = threading.Event()

    def on_done(ranks: tuple[int, ...], reason: str | None) -> None:
        if ranks == (0, 1):
            raise RuntimeError("not my day")
        done.set()

    keeper = SetKeeper(WORLD, on_done)
    keeper.start()
    keeper.add((0, 1))
    keeper.add((1, 2))
    assert done.wait(WAIT_S)
    keeper.stop(WAIT_S)


def test_a_users_set_is_taken_over_and_never_removed(horovod: Horovod) -> None:
    horovod.sets[0, 1] = 7
    told = Told()
    assert told.add(0, 1) is None
    found = told.keeper.get((0, 1))
    assert found is not None and found.process_set_id == 7
    told.keeper.remove((0, 1))
    told.keeper.stop(WAIT_S)
    assert horovod.log == []


def test_a_removed_set_is_gone_and_can_be_made_again(horovod: Horovod) -> None:
    told = Told()
    for ranks in ((0, 1), (1, 2), (2, 3)):
        told.add(*ranks)
    told.keeper.remove((2, 1))
    told.add(0, 1)  # Already there; answered after the removal.
    assert told.keeper.get((1, 2)) is None and told.keeper.get((2, 3)) is not None
    assert told.add(1, 2) is None and told.keeper.get((1, 2)) is not None
    told.keeper.stop(WAIT_S)
    assert horovod.log[-2:] == [("remove", (1, 2)), ("add", (1, 2))]


@pytest.mark.parametrize("patched", [False, True])
def test_under_nccl_sets_are_removed_if_their_communicators_go_too(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    monkeypatch.setattr(process_sets.mpi_ops, "nccl_built", lambda: 22809)
    monkeypatch.setattr(patches, "horovod_patches", lambda: ALL | ({patches.NCCL_REMOVAL} if patched else set()))
    told = Told()
    told.add(0, 1)
    told.keeper.remove((0, 1))
    told.add(1, 2)
    told.keeper.stop(WAIT_S)
    assert [what for what, _ in horovod.log] == (["add", "remove", "add"] if patched else ["add", "add"])
    assert (told.keeper.get((0, 1)) is None) is patched


def test_there_is_an_end_to_the_number_of_sets(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sets, "MAX_SETS", 2)
    told = Told()
    assert [told.add(0, 1), told.add(1, 2)] == [None, None]
    assert "2 process sets exist" in str(told.add(2, 3))
    told.keeper.remove((0, 1))
    assert told.add(2, 3) is None
    told.keeper.stop(WAIT_S)
    assert MAX_SETS >= 8


def test_stopping_waits_no_longer_than_told_and_drops_the_rest(horovod: Horovod) -> None:
    horovod.go.clear()
    told = Told()
    told.keeper.add((0, 1))
    told.keeper.add((1, 2))
    told.keeper.stop(0.2)
    assert told.news.empty() and horovod.log == []
    horovod.go.set()
    told.keeper.stop(WAIT_S)
    assert told.news.get(timeout=WAIT_S) == ((0, 1), None)
    assert len(horovod.log) <= 2 and horovod.log[0] == ("add", (0, 1))


RANK_SETS = st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
ORDERS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), RANK_SETS), max_size=20)


@settings(max_examples=cases(50), deadline=None)
@given(orders=ORDERS)
def test_two_ranks_with_the_same_orders_make_the_same_calls(orders: list[tuple[str, tuple[int, ...]]]) -> None:
    logs = []
    for uses in (0, 3):  # How often a rank looks its sets up must not matter.
        with pytest.MonkeyPatch.context() as patch:
            found = Horovod()
            patch.setattr(process_sets, "add_process_set", found.add)
            patch.setattr(process_sets, "remove_process_set", found.remove)
            patch.setattr(process_sets.mpi_ops, "nccl_built", lambda: False)
            patch.setattr(process_sets, "unavailable_reason", lambda: None)
            patch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
            keeper = SetKeeper(WORLD, lambda ranks, reason: None)
            keeper.start()
            for what, ranks in orders:
                getattr(keeper, what)(ranks)
                for _ in range(uses):
                    keeper.get(ranks)
            keeper.stop(WAIT_S)
            assert keeper.made == set(found.sets)
            logs.append(found.log)
    assert logs[0] == logs[1]


# ---- changes of the user's -----------------------------------------------------------------------------------------


def _alone(monkeypatch: pytest.MonkeyPatch, begun_elsewhere: int = 0) -> None:
    """The other ranks are in the same call of the user's, and have begun so many orders."""
    monkeypatch.setattr(process_sets.mpi_ops, "barrier", lambda: None)
    monkeypatch.setattr(process_sets, "allgather_object", lambda begun, name: [begun, begun_elsewhere])


def test_a_users_set_comes_behind_the_last_order_begun_on_any_rank(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise ranks register sets in different orders, and Horovod ends the job."""
    _alone(monkeypatch, begun_elsewhere=2)
    looks, done = threading.Semaphore(0), threading.Event()
    told = Told(looks.release)
    assert told.add(0, 1) is None
    changed: list[Any] = []

    def program() -> None:
        changed.append(told.keeper.add_users([2, 3]))
        done.set()

    thread = threading.Thread(target=program)
    thread.start()
    for _ in range(2):
        assert looks.acquire(timeout=WAIT_S)
    assert horovod.log == [("add", (0, 1))], "the second order has not come yet"
    add = horovod.add

    def slow(made: Any) -> Any:  # The third order comes while the user's call is under way.
        if tuple(made.ranks) == (2, 3):
            told.keeper.add((0, 3))
            assert not done.wait(0.2)
        return add(made)

    monkeypatch.setattr(process_sets, "add_process_set", slow)
    told.keeper.add((1, 2))
    thread.join(WAIT_S)
    told.keeper.stop(WAIT_S)
    assert [ranks for _, ranks in horovod.log] == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert changed[0].process_set_id == horovod.sets[2, 3]


def test_orders_go_on_when_a_users_change_fails(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    _alone(monkeypatch)
    told = Told()
    told.keeper.add_users([0, 1])
    with pytest.raises(ValueError, match="duplicate"):
        told.keeper.add_users([0, 1])
    assert told.add(1, 2) is None
    told.keeper.stop(WAIT_S)


def test_what_ends_waits_ends_a_users_change(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    _alone(monkeypatch, begun_elsewhere=1)

    def lost() -> None:
        raise StarError("rank 0 is gone")

    told = Told(lost)
    with pytest.raises(StarError, match="rank 0 is gone"):
        told.keeper.add_users([0, 1])
    assert horovod.log == []
    assert told.add(1, 2) is None
    told.keeper.stop(WAIT_S)


def test_a_users_change_does_not_wait_for_ever_for_an_order_that_never_comes(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    _alone(monkeypatch, begun_elsewhere=1)
    told = Told(orders_deadline_s=0.0)
    with pytest.raises(DeadlineError, match="0 of 1 changes of process sets"):
        told.keeper.add_users([0, 1])
    assert told.add(1, 2) is None, "orders go on"
    told.keeper.stop(WAIT_S)


def test_the_keepers_set_is_shared_with_a_user_who_adds_it(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program cannot know which sets plans use: without STAR it would be the first to add this one."""
    _alone(monkeypatch)
    told = Told()
    told.add(0, 1)
    made = told.keeper.add_users([1, 0])
    assert made.process_set_id == horovod.sets[0, 1] and horovod.log == [("add", (0, 1))]
    told.keeper.remove((0, 1))
    told.add(1, 2)
    assert (0, 1) in horovod.sets, "it is the user's now"
    told.keeper.stop(WAIT_S)


def test_a_set_that_the_user_removes_is_the_keepers_from_then_on(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may use it; under its old number Horovod would soon have another set, or none."""
    _alone(monkeypatch)
    told = Told()
    users = told.keeper.add_users([0, 1])
    assert told.add(0, 1) is None
    assert told.keeper.remove_users(users) and users.process_set_id is None
    found = told.keeper.get((0, 1))
    assert found is not None and horovod.sets == {(0, 1): found.process_set_id}
    again = told.keeper.add_users([0, 1])
    assert again.process_set_id == found.process_set_id and told.keeper.remove_users(again)
    told.keeper.remove((0, 1))
    told.keeper.stop(WAIT_S)
    assert horovod.log == [("add", (0, 1)), ("remove", (0, 1))]


def test_a_users_set_that_no_plan_needs_any_more_is_the_users_alone(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    _alone(monkeypatch)
    told = Told()
    users = told.keeper.add_users([0, 1])
    told.add(0, 1)
    told.keeper.remove((0, 1))
    told.add(2, 3)
    assert told.keeper.get((0, 1)) is None
    assert told.keeper.remove_users(users)
    assert told.add(0, 1) is None and (0, 1) in horovod.sets, "it is made anew"
    told.keeper.stop(WAIT_S)
    assert [ranks for what, ranks in horovod.log if what == "remove"] == [(0, 1)]


# ---- init ---------------------------------------------------------------------------------------------------------


def test_dynamic_sets_are_switched_on_where_they_cost_nothing(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
    assert prepare_init(None, None) is None
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"
    assert unavailable_reason() is None


def test_an_unpatched_horovod_gets_a_few_sets_at_the_start(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
    monkeypatch.setattr(patches, "horovod_patches", frozenset)
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    made = prepare_init(None, None)
    assert [tuple(each.ranks) for each in made] == [(0, 1), (0, 2), (1, 2)]
    assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ
    assert unavailable_reason() is None


@pytest.mark.parametrize(
    ("env", "comm", "given_sets"),
    [
        ({"HOROVOD_SIZE": "3", "HOROVOD_ELASTIC": "1"}, None, None),
        ({"HOROVOD_SIZE": "9"}, None, None),
        ({}, None, None),
        ({"HOROVOD_SIZE": "4", "HOROVOD_CROSS_SIZE": "2"}, None, None),
        ({"HOROVOD_SIZE": "3"}, [0, 1], None),
        ({"HOROVOD_SIZE": "3"}, None, ["the user's own"]),
        ({"HOROVOD_SIZE": "3", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, None, None),
    ],
)
def test_no_sets_are_made_at_the_start_where_they_do_harm(
    horovod: Horovod, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], comm: Any, given_sets: Any
) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
    monkeypatch.setattr(patches, "horovod_patches", frozenset)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert prepare_init(comm, given_sets) == given_sets
    keeper = SetKeeper(WORLD, lambda ranks, reason: None)
    keeper.start()
    keeper.stop(WAIT_S)
    assert keeper.made == frozenset()


def test_the_users_choice_is_kept(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    assert prepare_init(None, None) is None
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "0"
    assert "neither dynamic nor made at the start" in str(unavailable_reason())


def test_elastic_training_needs_the_patch_against_aborts(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert unavailable_reason() is None
    monkeypatch.setattr(patches, "horovod_patches", lambda: ALL - {patches.SURVIVE_DEATH})
    assert "lacks patch 0003" in str(unavailable_reason())
    told = Told()
    assert "lacks patch 0003" in str(told.add(0, 1))
    told.keeper.stop(WAIT_S)
    assert horovod.log == []


def test_several_hosts_need_the_patch_for_uneven_sets(horovod: Horovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sets.mpi_ops, "is_initialized", lambda: True)
    monkeypatch.setattr(process_sets.mpi_ops, "cross_size", lambda: 2)
    assert unavailable_reason() is None
    monkeypatch.setattr(patches, "horovod_patches", lambda: ALL - {patches.UNEVEN_HOSTS})
    assert "lacks patch 0006" in str(unavailable_reason())


@pytest.mark.parametrize("world_size", range(1, 12))
def test_the_catalogue_leaves_out_each_rank_once(world_size: int) -> None:
    catalogue = static_catalogue(world_size)
    left_out = [set(range(world_size)) - set(ranks) for ranks in catalogue]
    expected = [{rank} for rank in reversed(range(world_size))] if 2 <= world_size <= 8 else []
    assert left_out == expected
