"""Locks that have a place in one order, which debug runs assert (`STAR_CHECK_LOCKS=1`; the tests set it).

Two threads that take the same two locks in opposite orders stop for ever, one day, on one machine in a thousand.
`ORDER` names every lock, outermost first, and a checked lock compares every acquisition with what its thread holds,
also where no other thread wants the lock: one thread on its own shows the fault. A wait for a condition while
another lock is held is a fault too. Without the variable these are the locks of `threading`, at no cost.
"""

from __future__ import annotations

import threading
from typing import Any, cast

from star_hvd import env

__all__ = ["ORDER", "LockOrderError", "ordered_condition", "ordered_lock", "ordered_rlock"]

ORDER = (
    "Inactivity._lock",
    "GroupSteps._one_at_a_time",
    "Coordinator._lock",
    "ModeSwitcher._presence",
    "Replica.apply_lock",
    "StepEngine.lock",
    "OrderedCollective._changed",
    "HierarchicalCollective._changed",
    "ModeSwitcher._lock",
    "ModeServices._changed",
    "ServerSessions._changed",
    "ServerProcess._changed",
    "Line.changed",
    "LateSender._changed",
    "LossyWire._lock",
    "LeaseStock._changed",
    "MicrobatchStock._changed",
    "BatchSizes._lock",
    "Nursery._lock",
    "Pipe._lock",
    "Dispatch._changed",
    "Fences._lock",
)
"""Outermost first: a lock may be taken while those before it are held, and none behind it nor another of its name."""

_HELD_ACROSS_WAITS = frozenset(("GroupSteps._one_at_a_time",))
"""It is the step of a group; see "Departures" in docs/concurrency.md."""

_here = threading.local()


class LockOrderError(RuntimeError):
    """A thread takes locks in an order that can stop two threads for ever, or waits while it holds one."""


class _Checked:
    """A lock of `threading`, reentrant or not, that a `threading.Condition` can be made of; its thread releases it."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner
        self._place = ORDER.index(name)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = _held()
        if blocking and self not in held:
            for other in held:
                if other._place >= self._place:
                    raise LockOrderError(
                        f"{threading.current_thread().name} takes {self._name} while it holds {other._name}; the order "
                        "of star_hvd.locks is the other way round"
                    )
        taken = self._inner.acquire(blocking, timeout)
        if taken:
            held.append(self)
        return bool(taken)

    def release(self) -> None:
        self._inner.release()
        held = _held()
        del held[len(held) - 1 - held[::-1].index(self)]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # ---- what `threading.Condition` uses to wait -------------------------------------------------------------

    def _release_save(self) -> int:
        held = _held()
        others = {other._name for other in held if other is not self} - _HELD_ACROSS_WAITS
        if others:
            raise LockOrderError(
                f"{threading.current_thread().name} waits for a change under {self._name} while it holds "
                f"{', '.join(sorted(others))}"
            )
        count = held.count(self)
        for _ in range(count):
            self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        for _ in range(count):
            self.acquire()

    def _is_owned(self) -> bool:
        return self in _held()


def _held() -> list[_Checked]:
    """The checked locks of the calling thread, in the order in which it took them."""
    held: list[_Checked] | None = getattr(_here, "held", None)
    if held is None:
        held = _here.held = []
    return held


def _named(name: str, lock: Any) -> Any:
    if name not in ORDER:
        raise ValueError(f"{name!r} is not in star_hvd.locks.ORDER; give every lock its place there")
    return _Checked(name, lock) if env.check_locks() else lock


def ordered_lock(name: str) -> threading.Lock:
    """A lock; `name` is in `ORDER`."""
    return cast(threading.Lock, _named(name, threading.Lock()))


def ordered_rlock(name: str) -> threading.RLock:
    """A reentrant lock; `name` is in `ORDER`."""
    return cast("threading.RLock", _named(name, threading.RLock()))


def ordered_condition(name: str) -> threading.Condition:
    """A condition of a reentrant lock; `name` is in `ORDER`."""
    return threading.Condition(ordered_rlock(name))
