"""The order of locks: what a debug run finds, and that it is the documents'."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from star_hvd.locks import ORDER, LockOrderError, ordered_condition, ordered_lock, ordered_rlock

REPOSITORY = Path(__file__).resolve().parents[3]
OUTER, INNER = "Replica.apply_lock", "StepEngine.lock"


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_CHECK_LOCKS", "1")


def test_the_order_of_the_module_is_allowed_and_the_other_one_found_by_one_thread_alone() -> None:
    outer, inner = ordered_rlock(OUTER), ordered_lock(INNER)
    with outer, inner:
        assert outer.acquire(), "a reentrant lock may be taken again"
        outer.release()
    with inner, pytest.raises(LockOrderError, match=r"takes Replica\.apply_lock while it holds StepEngine\.lock"):
        outer.acquire()
    with inner:
        assert outer.acquire(blocking=False), "what does not wait cannot stop two threads"
        outer.release()
    with outer, pytest.raises(LockOrderError):
        ordered_rlock(OUTER).acquire()  # Of another optimizer: which of the two comes first is not said.


def test_locks_that_were_released_are_not_held() -> None:
    outer, inner = ordered_lock(OUTER), ordered_lock(INNER)
    with pytest.raises(ZeroDivisionError), inner:
        raise ZeroDivisionError
    with outer, inner:
        pass


def _waits(condition: threading.Condition) -> bool:
    with condition:
        return condition.wait(0.01)


def _waits_reentered(condition: threading.Condition) -> bool:
    with condition, condition:
        return condition.wait(0.01)


@pytest.mark.parametrize("wait", [_waits, _waits_reentered])
def test_a_wait_under_another_lock_is_found(wait: Callable[[threading.Condition], bool]) -> None:
    condition = ordered_condition(INNER)
    assert not wait(condition)
    with ordered_lock(OUTER), pytest.raises(LockOrderError, match=r"waits .* while it holds Replica\.apply_lock"):
        wait(condition)
    assert not wait(condition)
    with ordered_lock("GroupSteps._one_at_a_time"):
        assert not wait(condition), "the one that is a group's step"


def test_a_waiting_thread_is_woken() -> None:
    condition, ready = ordered_condition(INNER), threading.Event()
    found: list[bool] = []

    def wait() -> None:
        with condition:
            ready.set()
            found.append(condition.wait(60.0))

    thread = threading.Thread(target=wait)
    thread.start()
    assert ready.wait(60.0)
    with condition:
        condition.notify_all()
    thread.join(60.0)
    assert found == [True]


def test_without_the_variable_they_are_plain_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_CHECK_LOCKS", "0")
    assert type(ordered_lock(INNER)) is type(threading.Lock()) and type(ordered_rlock(INNER)) is type(threading.RLock())


def test_every_lock_of_the_package_has_a_place_and_a_line_in_the_documents() -> None:
    with pytest.raises(ValueError, match="its place"):
        ordered_lock("Nobody._lock")
    text = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "star_hvd").rglob("*.py"))
    assert set(re.findall(r'ordered_\w+\("([\w.]+)"\)', text)) == set(ORDER)
    plain = re.findall(r"^.*= threading\.(?:Lock|RLock|Condition)\(\)", text, re.MULTILINE)
    assert plain == [], "give it a place in star_hvd.locks.ORDER"
    page = (REPOSITORY / "docs" / "concurrency.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:engine's lock: )?`([\w.]+)`", page, re.MULTILINE)
    assert [name for name in rows if name in ORDER] == list(ORDER), "the table has them in the same order"
