"""Horovod process sets, added and removed while training runs, by a thread other than the training thread.

All ranks, members or not, have to add and remove sets in the same order: a different order ends the job. So the
coordinator's messages determine the order, and each rank's keeper follows them first in, first out. Changes of the
user's program, in its training thread, come between the same two of these orders on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.torch import mpi_ops
from horovod.torch.functions import allgather_object

from star_hvd import env, patches
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_condition
from star_hvd.threads import supervised

__all__ = ["MAX_SETS", "SetKeeper", "prepare_init", "static_catalogue", "unavailable_reason"]

logger = logging.getLogger("star_hvd")

Ranks = tuple[int, ...]

# A member pays one blocking message to every other member per set and cycle, used or not.
MAX_SETS = 16
# With more ranks, the leave-one-out sets of a static catalogue (n sets of n - 1 ranks) cost more than they gain.
_CATALOGUE_RANKS = 8

_LOOK_S = 0.5  # Time between two checks in a wait.

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"

_static: dict[Ranks, ProcessSet] = {}


# ---- what is possible here ----------------------------------------------------------------------------------------


def _dynamic() -> bool:
    """Whether Horovod is set to allow dynamic sets: it reads the variable as an integer, yes if above 0."""
    with contextlib.suppress(ValueError):
        return int(os.environ.get(_DYNAMIC, "0")) > 0
    return False


def unavailable_reason() -> str | None:
    """Return why no process set can be used in this job, None if they can."""
    present = patches.horovod_patches()
    if env.elastic() and patches.SURVIVE_DEATH not in present:
        return (
            f"this Horovod lacks patch {patches.SURVIVE_DEATH}: under elastic training one dead rank would abort "
            "every survivor of a job with process sets; build it with scripts/build_horovod.py"
        )
    if patches.UNEVEN_HOSTS not in present and mpi_ops.is_initialized() and int(mpi_ops.cross_size()) > 1:
        return (
            f"this Horovod lacks patch {patches.UNEVEN_HOSTS}: a process set with different numbers of ranks on "
            "different hosts would end the job; build it with scripts/build_horovod.py"
        )
    if not _dynamic() and not _static:
        return (
            f"process sets are neither dynamic nor made at the start ({_DYNAMIC} is "
            f"{os.environ.get(_DYNAMIC, 'unset')}, Horovod's patches are {', '.join(sorted(present)) or 'none'}); call "
            f"star_hvd.init() instead of horovod.torch.init(), or set {_DYNAMIC}=1"
        )
    return None


def static_catalogue(world_size: int) -> list[Ranks]:
    """Return the sets made at the start if dynamic sets would cost too much: all ranks but one, for up to 8 ranks."""
    if not 2 <= world_size <= _CATALOGUE_RANKS:
        return []
    return list(itertools.combinations(range(world_size), world_size - 1))


def prepare_init(comm: Any, process_sets: Any) -> Any:
    """Make process sets possible in the Horovod that is about to be initialized.

    Switches dynamic sets on if they cost nothing while no set changes (patch 0004) and the user has not decided. With
    another Horovod a few sets are made at the start, except in elastic training, whose resets lose them.

    Args:
        comm: As given to `init`.
        process_sets: As given to `init`.

    Returns:
        The value for Horovod's argument `process_sets`.
    """
    if mpi_ops.is_initialized():
        return process_sets
    _static.clear()
    present = patches.horovod_patches()
    if _DYNAMIC not in os.environ and patches.CHEAP_DYNAMIC in present:
        os.environ[_DYNAMIC] = "1"
    if _dynamic() or env.elastic() or comm is not None or process_sets is not None:
        return process_sets
    if patches.UNEVEN_HOSTS not in present and os.environ.get("HOROVOD_CROSS_SIZE", "1") != "1":
        return process_sets
    world_size = int(os.environ.get("HOROVOD_SIZE", "1"))  # Set by the launcher; Horovod knows it only later.
    _static.update({ranks: ProcessSet(ranks) for ranks in static_catalogue(world_size)})
    return list(_static.values()) or None


# ---- the keeper ---------------------------------------------------------------------------------------------------


class SetKeeper:
    """Adds and removes process sets in a thread of its own, in the order of the requests.

    If a rank is late: an add or removal waits in this thread until every rank's keeper has reached it; the training
    thread of a slow rank is not needed. Horovod offers no way to cancel one; only Horovod's shutdown ends it.

    Args:
        world_size: Number of ranks.
        on_done: Called in the keeper's thread after each add, with the ranks in ascending order and None, or the reason
            why there is no such set.
        check: Called while a change of the user's waits; raises what makes waiting pointless.
        orders_deadline_s: Longest wait of such a change for orders that other ranks have begun.
    """

    def __init__(
        self,
        world_size: int,
        on_done: Callable[[Ranks, str | None], None],
        check: Callable[[], None] = lambda: None,
        orders_deadline_s: float = 300.0,
    ) -> None:
        self._world_size = world_size
        self._world = tuple(range(world_size))
        self._on_done = on_done
        self._check, self._orders_deadline_s = check, orders_deadline_s
        self._orders: queue.SimpleQueue[tuple[str, Ranks] | None] = queue.SimpleQueue()
        self._sets: dict[Ranks, ProcessSet] = {}
        self._foreign: set[Ranks] = set()
        self._keeps_all = bool(mpi_ops.nccl_built()) and patches.NCCL_REMOVAL not in patches.horovod_patches()
        self._turn = ordered_condition("SetKeeper._turn")
        self._begun = self._ended = 0  # Numbers of orders.
        self._limit = math.inf  # No order after this many is begun.
        self._thread = supervised(self._run, "star-sets")

    def start(self) -> None:
        """Start the thread."""
        self._sets.update({ranks: each for ranks, each in _static.items() if each.process_set_id is not None})
        self._foreign.update(self._sets)
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the thread behind the queued orders, which the other ranks carry out too; wait at most `deadline_s`.

        The sets stay: Horovod frees them when it shuts down.
        """
        self._orders.put(None)
        self._hold_back(math.inf)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                logger.warning("a process set is still being changed after %g s: not all ranks followed", deadline_s)

    def add(self, ranks: Iterable[int]) -> None:
        """Make a set unless it exists; return at once and report the result through `on_done`.

        Collective over all ranks of the job, not only the members, in the same order as other adds and removals.
        """
        self._orders.put(("add", tuple(ranks)))

    def remove(self, ranks: Iterable[int]) -> None:
        """Remove a set that is no longer used; return at once. Collective like `add`.

        Tensors still queued on it fail. Does nothing if the set is unknown, the whole world, or made at the start; nor
        under NCCL without the patch that removes communicators with their set: a later set with the same number would
        get the ranks of the earlier one. A set of the user's is only forgotten: the user may remove it any time later.
        """
        self._orders.put(("remove", tuple(ranks)))

    def get(self, ranks: Iterable[int]) -> ProcessSet | None:
        """Return the set with these ranks, None if there is none yet."""
        key = tuple(sorted(ranks))
        return global_process_set if key == self._world else self._sets.get(key)

    @property
    def made(self) -> frozenset[Ranks]:
        """The ranks of all existing sets except the whole world."""
        return frozenset(self._sets)

    # ---- changes of the user's --------------------------------------------------------------------------------

    def add_users(self, given: ProcessSet | Sequence[int]) -> ProcessSet:
        """Add a set for the user's program and return it; one that a plan uses is shared with the program.

        Collective over all ranks of the job, at the same place in their programs; blocks.

        Raises:
            ValueError: The program has already added it, or Horovod cannot.
            DeadlineError: A change for a plan that other ranks have begun did not come here.
        """
        made = given if isinstance(given, ProcessSet) else ProcessSet(given)
        ranks = tuple(made.ranks or ())
        with self._between_orders():
            if ranks not in self._sets or ranks in self._foreign:
                return add_process_set(made)
            made.process_set_id = self._sets[ranks].process_set_id
            self._foreign.add(ranks)
            return made

    def remove_users(self, gone: ProcessSet) -> bool:
        """Remove a set of the user's program; return whether it existed. Collective like `add_users`.

        One that a plan may use remains, without the program, until the coordinator orders its removal.
        """
        ranks = tuple(gone.ranks or ())
        with self._between_orders():
            if ranks not in self._sets or not _dynamic():
                return bool(remove_process_set(gone))
            self._foreign.discard(ranks)
            gone.process_set_id = None  # As Horovod does.
            return True

    @contextlib.contextmanager
    def _between_orders(self) -> Iterator[None]:
        """Run the block after the same order on all ranks. Collective.

        With orders held back everywhere, none after the last that any rank has begun can begin; once all ranks have
        carried out that one too, which each of them gets, they have the same orders behind and before them. Orders are
        held back only when all ranks are here: a plan that needs a set must not wait for a slow rank's program.
        """
        mpi_ops.barrier()
        begun = self._hold_back(0)
        try:
            last = max(allgather_object(begun, name="star.sets.begun"))
            self._hold_back(last)
            limit_s = time.monotonic() + self._orders_deadline_s
            while not self._has_ended(last):
                self._check()
                if time.monotonic() > limit_s:
                    raise DeadlineError(
                        f"{self._ended} of {last} changes of process sets for plans were made here within "
                        f"{self._orders_deadline_s:g} s, and the program's has to follow them; see the logs of rank 0 "
                        "and of the other ranks"
                    )
            yield
        finally:
            self._hold_back(math.inf)

    def _hold_back(self, limit: float) -> int:
        """Let no order after the first `limit` begin; return how many have begun."""
        with self._turn:
            self._limit = limit
            self._turn.notify_all()
            return self._begun

    def _has_ended(self, count: int) -> bool:
        """Wait for a moment until `count` orders have been carried out; return whether they have."""
        with self._turn:
            return self._turn.wait_for(lambda: self._ended >= count, _LOOK_S)

    # ---- the keeper's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            with self._turn:
                self._turn.wait_for(lambda: self._begun < self._limit)
                self._begun += 1
            what, ranks = order
            if what == "add":
                reason = self._add(ranks)
                self._tell(tuple(sorted(ranks)), reason)
            else:
                self._remove(tuple(sorted(ranks)))
            with self._turn:
                self._ended += 1
                self._turn.notify_all()

    def _tell(self, ranks: Ranks, reason: str | None) -> None:
        try:
            self._on_done(ranks, reason)
        except Exception:
            logger.exception("telling about process set %s failed", ranks)

    def _add(self, given: Ranks) -> str | None:
        """Make the set. All ranks must leave this function the same way, or Horovod would wait forever."""
        bad = [rank for rank in given if not 0 <= rank < self._world_size]
        if bad or not given or len(set(given)) != len(given):  # Horovod's library would end the process.
            return f"got the ranks {list(given)}; expected different ranks of 0..{self._world_size - 1}"
        ranks = tuple(sorted(given))
        if self.get(ranks) is not None:
            return None
        reason = unavailable_reason()
        if reason is not None:
            return reason
        if not _dynamic():
            known = "; ".join(",".join(map(str, each)) for each in _static)
            return f"sets cannot be added in this job and {list(ranks)} is not one of those made at the start: {known}"
        if len(self._sets) >= MAX_SETS:
            return f"{len(self._sets)} process sets exist, the most that are kept; remove one first"
        try:
            self._sets[ranks], own = _make(ranks)
        except Exception as error:
            return f"Horovod did not make the set {list(ranks)}: {error}"
        if not own:
            self._foreign.add(ranks)
        return None

    def _remove(self, ranks: Ranks) -> None:
        if self._keeps_all or ranks in _static or ranks not in self._sets:
            return
        gone = self._sets.pop(ranks)
        if ranks in self._foreign:
            self._foreign.remove(ranks)
            return
        try:
            if not remove_process_set(gone):
                logger.warning("Horovod knows no process set %s to remove", list(ranks))
        except Exception as error:  # Whatever it is, later orders must still be carried out.
            logger.warning("process set %s was not removed: %s", list(ranks), error)


def _make(ranks: Ranks) -> tuple[ProcessSet, bool]:
    """Add a set to Horovod, or find the one that the user added; return it and whether it is ours."""
    made = ProcessSet(ranks)
    try:
        return add_process_set(made), True
    except ValueError:
        known = {tuple(members): number for number, members in mpi_ops._basics._get_process_set_ids_and_ranks().items()}
        if ranks not in known:
            raise
        made.process_set_id = known[ranks]
        return made, False
