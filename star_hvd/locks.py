"""Locks with a fixed order of acquisition, which debug runs assert (`STAR_CHECK_LOCKS=1`; the tests set it).

Two threads that take the same two locks in opposite orders can deadlock, though rarely. `ORDER` names every lock,
outermost first, and a checked lock compares every acquisition with the locks its thread holds, contended or not: a
single thread reveals the fault. Waiting for a condition while another lock is held is a fault too. Without the
variable these are plain `threading` locks, at no cost.
"""

from __future__ import annotations

import threading
from typing import Any, cast

from star_hvd import env

__all__ = ["ORDER", "LockOrderError", "ordered_condition", "ordered_lock", "ordered_rlock"]

ORDER = (
    "GroupSteps._one_at_a_time",
    "Coordinator._lock",
    "Replica.apply_lock",
    "Inactivity._lock",
    "ModeSwitcher._presence",
    "StepEngine.lock",
    "OrderedCollective._changed",
    "HierarchicalCollective._changed",
    "ModeSwitcher._lock",
    "ModeServices._changed",
    "SetKeeper._turn",
    "ServerSessions._changed",
    "ServerProcess._changed",
    "Line.changed",
    "LateSender._changed",
    "LossyWire._lock",
    "LeaseStock._changed",
    "MicrobatchStock._changed",
    "BatchSizes._changed",
    "Joined._lock",
    "ForkerProcess._lock",
    "Pipe._lock",
    "Dispatch._changed",
    "Fences._lock",
)
"""Outermost first: a lock may be taken only while all locks held come before it in this list."""

_HELD_ACROSS_WAITS = frozenset(("GroupSteps._one_at_a_time",))
"""Held for a whole step of a group; see "Departures" in docs/concurrency.md."""

_here = threading.local()


class LockOrderError(RuntimeError):
    """A thread takes locks in an order that can deadlock, or waits for a condition while it holds another lock."""


class _Checked:
    """A lock of `threading`, reentrant or not, usable in a `threading.Condition`; its holder must release it."""

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
    """Return the checked locks that the calling thread holds, in order of acquisition."""
    held: list[_Checked] | None = getattr(_here, "held", None)
    if held is None:
        held = _here.held = []
    return held


def _named(name: str, lock: Any) -> Any:
    if name not in ORDER:
        raise ValueError(f"{name!r} is not in star_hvd.locks.ORDER; give every lock its place there")
    return _Checked(name, lock) if env.check_locks() else lock


def ordered_lock(name: str) -> threading.Lock:
    """Return a lock; `name` must be in `ORDER`."""
    return cast(threading.Lock, _named(name, threading.Lock()))


def ordered_rlock(name: str) -> threading.RLock:
    """Return a reentrant lock; `name` must be in `ORDER`."""
    return cast("threading.RLock", _named(name, threading.RLock()))


def ordered_condition(name: str) -> threading.Condition:
    """Return a condition of a reentrant lock; `name` must be in `ORDER`."""
    return threading.Condition(ordered_rlock(name))
