"""`join`: a rank without data waits for the others, and adds zeros to the reductions of their programs.

Horovod's own `join` adds zeros to whatever the others reduce, but a joined rank's helper still submits parts of steps.
So a rank first waits here, until the coordinator reports that all have called `join`. Meanwhile the others describe
each collective of the program to it, and it submits zeros under the same name. A collective may have begun before a
rank hears that another has joined; so those in progress are described again whenever that changes.
"""

from __future__ import annotations

import collections
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.joins import JoinCalled, JoinedRanks, ProgramCollective
from star_hvd.engine.collective import HorovodCollective, wait_all
from star_hvd.errors import DeadlineError, StarError
from star_hvd.locks import ordered_lock
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Joined", "described"]

_LOOK_S = 0.5
_ONLY = "as under Horovod, only allreduce is possible until all ranks have called join: call it after that"
_REDUCTIONS = frozenset(
    f"{group}allreduce{kind}{place}" for group in ("", "grouped_") for kind in ("", "_async") for place in ("", "_")
)


class Joined:
    """The ranks in `join`, and this rank's collectives in progress.

    Args:
        send: Sends a message to the coordinator.
        check: Called during waits; raises what makes waiting pointless.
        meet: Takes part in a meeting of all ranks, given its name.
        calls: Counts this rank's operations, by `ProgramCollective.counter`.
        steps: The steps that have ended on this rank so far, of all optimizers; another number shows that others train.
        look_s: Time between two checks in a wait.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        check: Callable[[], None],
        meet: Callable[[str], None],
        calls: collections.Counter[str],
        steps: Callable[[], int] = lambda: 0,
        look_s: float = _LOOK_S,
    ) -> None:
        self._send, self._check, self._meet = send, check, meet
        self._calls, self._steps = calls, steps
        self._lock = ordered_lock("Joined._lock")
        self._ranks: list[int] = []  # The last to join last.
        self._begun: dict[tuple[str, int], ProgramCollective] = {}
        self._of_handle: dict[int, tuple[str, int]] = {}
        self._look_s = look_s
        self._heard: queue.SimpleQueue[JoinedRanks | ProgramCollective] = queue.SimpleQueue()

    def on_message(self, message: JoinedRanks | ProgramCollective) -> None:
        """Handle a message of the coordinator, in the agent's thread."""
        if isinstance(message, JoinedRanks):
            with self._lock:
                self._ranks = message.ranks
                begun = list(self._begun.values())
            for each in begun:
                self._send(each)
        self._heard.put(message)

    # ---- a rank with data -------------------------------------------------------------------------------------

    @contextmanager
    def during(self, collective: ProgramCollective) -> Iterator[None]:
        """The block is a collective of the program; see `begin`."""
        self.begin(collective)
        try:
            yield
        finally:
            self._end((collective.counter, collective.number))

    def begin(self, collective: ProgramCollective) -> None:
        """Describe a collective that is about to be submitted to ranks in `join`.

        Raises:
            StarError: They cannot take part in it; nothing is submitted.
        """
        with self._lock:
            joined = sorted(self._ranks)
            if not joined or collective.dtypes:
                self._begun[collective.counter, collective.number] = collective
        if joined and not collective.dtypes:
            raise StarError(
                f"hvd.{collective.operation} was called while ranks {joined} are in hvd.join(), which have no more "
                f"data; {_ONLY}"
            )
        if joined:
            self._send(collective)

    def submitted(self, handle: Any, collective: ProgramCollective) -> None:
        """Note the handle of an operation that `ended` will end."""
        with self._lock:
            self._of_handle[handle] = collective.counter, collective.number

    def ended(self, handle: Any) -> None:
        """Note that the program has collected an operation."""
        with self._lock:
            key = self._of_handle.pop(handle, None)
        if key is not None:
            self._end(key)

    def _end(self, key: tuple[str, int]) -> None:
        with self._lock:
            self._begun.pop(key, None)

    # ---- a rank without data ----------------------------------------------------------------------------------

    def wait(self, world_size: int, deadline_s: float) -> int:
        """Wait, inactive, until all ranks have called `join`, adding zeros to the others' reductions.

        Args:
            world_size: Number of ranks.
            deadline_s: Longest wait since the last sign of the others: a step, a collective, or another call of `join`.

        Returns:
            The last rank to join.

        Raises:
            DeadlineError: Not all have in time.
            StarError: Another rank is in a collective that needs this rank's data.
        """
        self._send(JoinCalled())

        def missing() -> list[int]:
            return sorted(set(range(world_size)).difference(self._ranks))

        whole = WaitTime(self._look_s, lambda: f"ranks {missing()} to call hvd.join()", lasts=True)
        wait, steps = WaitTime(self._look_s, what=""), self._steps()  # Since the last sign of the others.
        collective, handles = HorovodCollective(), collections.deque[Any]()
        while True:
            whole.count()
            try:
                message = self._heard.get(timeout=self._look_s)
            except queue.Empty:
                self._check()
                if (ended := self._steps()) != steps:
                    wait, steps = WaitTime(self._look_s, what=""), ended
                if wait.count() < deadline_s:
                    continue
                raise DeadlineError(
                    f"ranks {missing()} did not call hvd.join() within {deadline_s:g} s of the last step "
                    "that ended here; all ranks have to, or raise Config.step_deadline_s"
                ) from None
            wait = WaitTime(self._look_s, what="")
            if isinstance(message, ProgramCollective):
                handles += self._add_zeros(message)
                while handles and collective.poll(handles[0]):  # Until then Horovod keeps their zeros in memory.
                    collective.finish(handles.popleft())
            elif len(message.ranks) == world_size:  # Behind all that they began before.
                break
        wait_all(collective, handles, deadline_s, "the reductions of ranks that joined later")
        with self._lock:
            ranks, self._ranks = self._ranks, []
        return ranks[-1]

    def _add_zeros(self, collective: ProgramCollective) -> list[Any]:
        if not collective.dtypes:
            raise StarError(
                f"another rank called hvd.{collective.operation} while this rank is in hvd.join() and has no more "
                f"data; {_ONLY}"
            )
        if collective.number <= self._calls[collective.counter]:
            return []  # Described by several ranks.
        self._calls[collective.counter] = collective.number
        if collective.meets:
            self._meet(collective.operation)
        zeros = _zeros(collective)
        options = {
            "name": collective.name,
            "op": collective.op,
            "prescale_factor": collective.prescale,
            "postscale_factor": collective.postscale,
        }
        if collective.operation.startswith("grouped_"):
            return [mpi_ops.grouped_allreduce_async_(zeros, **options)]
        return [mpi_ops.allreduce_async_(zeros[0], **options)]


def described(
    operation: str, given: dict[str, Any], counter: str, number: int, *, meets: bool = False
) -> ProgramCollective:
    """Return the description of a collective of the program.

    Args:
        operation: Name of Horovod's function.
        given: Its arguments by name.
        counter: See `ProgramCollective`.
        number: See there.
        meets: See there.
    """
    tensors: Sequence[torch.Tensor] = given.get("tensors") or [given.get("tensor")]
    can = operation in _REDUCTIONS and all(isinstance(each, torch.Tensor) and not each.is_sparse for each in tensors)
    compression = given.get("compression", Compression.none)
    if can and compression is not Compression.none:  # Horovod's own change the type alone, which an empty tensor shows.
        whole = compression is not Compression.fp16
        small = [each.detach() if whole else each.detach().new_empty([1] * each.dim()) for each in tensors]
        sent = [compression.compress(each)[0] for each in small]
        tensors = sent if whole else [like.expand(each.shape) for like, each in zip(sent, tensors, strict=True)]
    average = given.get("average")
    default = mpi_ops.Average if average is None or average else mpi_ops.Sum
    return ProgramCollective(
        operation=operation,
        name=str(given.get("name")),
        counter=counter,
        number=number,
        meets=meets,
        shapes=[size for each in tensors for size in (each.dim(), *each.shape)] if can else [],
        dtypes=[str(each.dtype).removeprefix("torch.") for each in tensors] if can else [],
        device=tensors[0].device.type if can else "",
        op=int(default if given.get("op") is None else given["op"]),
        prescale=float(given.get("prescale_factor", 1.0)),
        postscale=float(given.get("postscale_factor", 1.0)),
    )


def _zeros(collective: ProgramCollective) -> list[torch.Tensor]:
    left, found = list(collective.shapes), []
    for dtype in collective.dtypes:
        dims, left = left[0], left[1:]
        shape, left = left[:dims], left[dims:]
        found.append(torch.zeros(shape, dtype=getattr(torch, dtype), device=collective.device))
    return found
