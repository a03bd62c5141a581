"""Meetings: points after a user's collective at which all replicas are equal, at the newest step.

In a relaxed mode ranks reach the user's collective at different steps, and steps continue while the first of them wait.
Once the last rank has arrived no new step starts, so the newest step is fixed; but a rank may still have it on a
shadow, in a queue, at servers, or in transit. So ranks gather their positions, catch up, and gather again until all are
at one step. In the usual case, when all are there already, that is one small all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from star_hvd.engine.collective import HorovodCollective
from star_hvd.errors import DeadlineError, StarError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Position", "gather_positions", "leaving_servers", "settled", "unsettled_text"]

_CHECK_S = 0.02


_KINDS = (int, int, int, int, bool, bool, bool, int, bool, int, bool)  # Of the fields of a position.


@dataclass(frozen=True, slots=True)
class Position:
    """Where one optimizer is on one rank.

    Attributes:
        rank: The rank.
        optimizer: Number of the optimizer.
        step: Steps applied to the live parameters.
        next_step: The first step this rank has not wholly submitted.
        whole: Whether parameters and optimizer state are those of `step`, with nothing waiting to be applied.
        out_of_common_steps: Whether this rank's steps are made at servers, at a parent, or locally: only there is the
            newest step known.
        mid_step: Whether the rank is between backward and the end of `step()`, step hooks included, or evaluates other
            parameters in the place of its own, or, in a collective of the program's, is between forward and backward:
            nothing may be changed there now.
        manual_step: A step whose mean the program changed, which the other ranks may not know yet; -1 if none.
        at_servers: Whether servers hold the parameters, and this rank's are a copy.
        values: Checksum of the parameters if the program has written to them since they came from there, else -1.
        leaves: Whether the rank loads a state, or broadcasts one it has loaded, which the servers lack.
    """

    rank: int
    optimizer: int
    step: int
    next_step: int
    whole: bool
    out_of_common_steps: bool
    mid_step: bool
    manual_step: int = -1
    at_servers: bool = False
    values: int = -1
    leaves: bool = False


def settled(positions: Sequence[Position], *, asked: bool) -> bool:
    """Whether all replicas are equal, at the newest step.

    Args:
        positions: Positions of all optimizers on all ranks. An optimizer in the middle of a step is left out: its rank
            takes part in the meeting and changes nothing.
        asked: Whether all ranks have caught up since they met; outside the common steps a rank cannot tell before that.
    """
    free = [position for position in positions if not position.mid_step]
    if any(not position.whole or position.step != position.next_step for position in free):
        return False
    if not asked and any(position.out_of_common_steps or position.manual_step >= 0 for position in positions):
        return False
    furthest: dict[int, int] = {}
    for position in free:
        furthest[position.optimizer] = max(position.step, furthest.get(position.optimizer, position.step))
    return all(position.step == furthest[position.optimizer] for position in free)


def leaving_servers(positions: Sequence[Position]) -> list[int]:
    """Return the optimizers, by number, whose ranks all leave their servers now, which start again with a loaded state.

    They do if some rank loads or broadcasts a state, or if the program has written the same values everywhere, as by
    loading a model. Where only some ranks have others, or each its own, the program may put the former ones back.

    Raises:
        StarError: A rank of such an optimizer is in the middle of a step.
    """
    found: dict[int, list[Position]] = {}
    for position in positions:
        found.setdefault(position.optimizer, []).append(position)
    leaving = []
    for number, each in found.items():
        same = each[0].values >= 0 and all(position.values == each[0].values for position in each)
        # Rank 0 asks for it; it may have dropped the optimizer.
        able = any(position.at_servers for position in each) and any(position.rank == 0 for position in each)
        if able and (same or any(position.leaves for position in each)):
            leaving.append(number)
            within = [position.rank for position in each if position.mid_step and position.values < 0]
            if within:
                raise StarError(
                    f"a state is loaded while ranks {within} are between backward() and step(); load and broadcast it "
                    "where all ranks are between two steps, after hvd.barrier() for example"
                )
    return leaving


def unsettled_text(positions: Sequence[Position]) -> str:
    """Describe for an error which ranks are where."""
    return "; ".join(
        f"rank {p.rank}: step {p.step} of {p.next_step}{'' if p.whole else ', incomplete'}"
        f"{', in the middle of a step' if p.mid_step else ''}"
        for p in sorted(positions, key=lambda p: (p.optimizer, p.rank))
    )


def gather_positions(
    own: Sequence[Position], check: Callable[[], None], deadline_s: float, what: str
) -> list[Position]:
    """Gather the positions of all ranks. Collective; waits for all of them.

    Args:
        own: This rank's positions, one per optimizer.
        check: Called while waiting; counts a wait that is logged, and raises an error that makes it pointless.
        deadline_s: Longest wait.
        what: What is waited for, for the error.

    Raises:
        DeadlineError: Not all ranks came.
    """
    from horovod.torch import mpi_ops

    rows = torch.tensor([astuple(position) for position in own], dtype=torch.int64, device="cpu")
    rows = rows.reshape(-1, len(_KINDS))  # None if there is no optimizer left.
    collective, wait = HorovodCollective(), WaitTime(what="")  # The wait that `check` counts is logged.
    handle = mpi_ops.allgather_async(rows, name="star.meeting")
    collective.hurry()
    while not collective.wait(handle, _CHECK_S):  # Horovod's own wait has no deadline.
        check()
        if wait.count() > deadline_s:
            raise DeadlineError(
                f"not all ranks came to {what} within {deadline_s:g} s; Horovod's stall warnings and the log of rank 0 "
                "name those that are missing"
            )
    found = mpi_ops.synchronize(handle).tolist()
    return [Position(*(kind(value) for kind, value in zip(_KINDS, row, strict=True))) for row in found]
