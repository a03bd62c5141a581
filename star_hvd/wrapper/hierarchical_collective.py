"""Sum in stages: first inside each host, then among one rank of every host, then distribute inside each host.

A ring over n ranks sends 2 (n - 1) / n times the bytes over every host's network card, one over h hosts
2 (h - 1) / h times: for two hosts with two ranks each 1.0 instead of 1.5. The sums differ only in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from star_hvd import threads
from star_hvd.engine.collective import Collective, HorovodCollective, poll_for
from star_hvd.locks import ordered_condition
from star_hvd.runtime.host_sets import HostSets

__all__ = ["HandOut", "HierarchicalCollective", "stages_of"]

_POLL_S = 0.0005

Stages = Sequence[tuple[str, Collective]]
"""Each stage with the suffix of its tensors' names."""


class HandOut(HorovodCollective):
    """A broadcast instead of a sum: the leader's tensor for the ranks of its host.

    Args:
        process_set: The ranks of the host.
        leader: The host's leader.
    """

    def __init__(self, process_set: object, leader: int) -> None:
        super().__init__(process_set)
        self._leader = leader

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        from horovod.torch import mpi_ops

        return int(mpi_ops.broadcast_async_(tensor, self._leader, name=name, process_set=self._process_set))


def stages_of(sets: HostSets) -> Stages:
    """Return the stages that a tensor of this rank passes in order; leaders have one more than others."""
    stages: list[tuple[str, Collective]] = []
    if sets.inside is not None:
        stages.append(("in", HorovodCollective(sets.inside)))
    if sets.leaders is not None:
        stages.append(("among", HorovodCollective(sets.leaders)))
    if sets.inside is not None:
        stages.append(("out", HandOut(sets.inside, sets.leader)))
    return stages


@dataclass(slots=True)
class _Tensor:
    name: str
    tensor: torch.Tensor
    stage: int
    handle: int
    failure: Exception | None = None


class HierarchicalCollective:
    """A collective over all ranks, in stages or directly. For any thread.

    Args:
        flat: The collective over all ranks.
        stages: See `stages_of`.
        applies: Whether submissions go through the stages now; the same on all ranks throughout a step.
        thread_name: Name of the thread that submits tensors to their next stage while no other thread does.
    """

    def __init__(
        self, flat: Collective, stages: Stages, applies: Callable[[], bool], thread_name: str
    ) -> None:
        self._flat, self._stages, self._applies = flat, stages, applies
        self._changed = ordered_condition("HierarchicalCollective._changed")
        self._flat_handles: dict[int, int] = {}  # By ticket.
        self._staged: dict[int, _Tensor] = {}
        self._tickets = 0
        self._stopped = False
        threads.supervised(self._run, thread_name).start()

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        """See `Collective.submit`."""
        with self._changed:
            self._tickets += 1
            if not self._applies():
                self._flat_handles[self._tickets] = self._flat.submit(name, tensor)
                return self._tickets
            self._staged[self._tickets] = _Tensor(name, tensor, 0, self._enter(0, name, tensor))
            self._changed.notify_all()
            return self._tickets

    def hurry(self) -> None:
        """See `Collective.hurry`."""
        self._flat.hurry()

    def poll(self, ticket: int) -> bool:
        """See `Collective.poll`."""
        with self._changed:
            self._advance()
            staged = self._staged.get(ticket)
            if staged is not None:
                return self._ended(staged)
            handle = self._flat_handles.get(ticket)
            return handle is None or self._flat.poll(handle)

    def wait(self, ticket: int, longest_s: float) -> bool:
        """See `Collective.wait`."""
        with self._changed:
            handle = self._flat_handles.get(ticket)
        return poll_for(self, ticket, longest_s) if handle is None else self._flat.wait(handle, longest_s)

    def finish(self, ticket: int) -> None:
        """See `Collective.finish`; a repeated call does nothing."""
        with self._changed:
            staged, handle = self._staged.pop(ticket, None), self._flat_handles.pop(ticket, None)
            if handle is not None:
                self._flat.finish(handle)
            if staged is not None and staged.failure is not None:
                raise staged.failure

    def stop(self) -> None:
        """End the thread; no tensor enters a further stage."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _enter(self, stage: int, name: str, tensor: torch.Tensor) -> int:
        suffix, collective = self._stages[stage]
        return collective.submit(f"{name}.{suffix}", tensor)

    def _ended(self, staged: _Tensor) -> bool:
        return staged.stage == len(self._stages) or staged.failure is not None

    def _advance(self) -> None:
        """Submit tensors that have ended a stage to the next one."""
        for staged in self._staged.values():
            while not self._ended(staged) and self._stages[staged.stage][1].poll(staged.handle):
                try:
                    self._stages[staged.stage][1].finish(staged.handle)
                    staged.stage += 1
                    if staged.stage < len(self._stages):
                        staged.handle = self._enter(staged.stage, staged.name, staged.tensor)
                except Exception as error:  # Raised again in the thread that collects the tensor.
                    staged.failure = error

    def _under_way(self) -> bool:
        return any(not self._ended(staged) for staged in self._staged.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._under_way())
                if self._stopped:
                    return
                self._advance()
                self._changed.wait(_POLL_S)
