"""The program's loops: what in them bars relaxed modes, or does not do what the user expects."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping

from star_hvd.modes.driver import StepDriver
from star_hvd.runtime import program_end

__all__ = ["ProgramLoops"]

logger = logging.getLogger("star_hvd")

_LOOPING = 2  # Steps behind which a collective belongs to a loop's iterations, not to setting something up.
_EVALUATING = 3  # The same for a loop without steps: collectives from which on they belong to its iterations.
_OFTEN, _OFTEN_STEPS = 4, 20
"""Most steps from one collective to the next, and steps in a row in which it was so, from which on the iterations of a
loop without `shard` have them that often: programs that log more often in the beginning do so for 10 steps. Measured, 3
ranks, one of them 5 times slower, always the same or each in turn: with a collective behind every third step relaxed
modes took 1.09 and 1.08 times as long as plain Horovod, behind every tenth 1.05 and 0.94 times."""
_IDLE_STEPS = 64  # Steps of other optimizers without one of the first, after which that counts as idle.


@dataclasses.dataclass(eq=False, slots=True)
class _Loop:
    """An open iteration over a `shard` loader.

    Attributes:
        began: `Runtime.steps_ended` as it began.
        parts: Whether it is over micro-batches.
        trains: Whether its batches give gradients.
        collectives: The program's collectives within it, if nothing is trained.
    """

    began: int
    parts: bool
    trains: bool
    collectives: int = 0


class ProgramLoops:
    """The open loops of one rank's program.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        drivers: Drivers of all optimizers, by number; filled by others.
        steps_ended: Returns `Runtime.steps_ended`.
        in_training_thread: Returns whether the calling thread is the one that trains.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        drivers: Mapping[int, StepDriver],
        steps_ended: Callable[[], int],
        in_training_thread: Callable[[], bool],
    ) -> None:
        self._rank, self._world_size, self._drivers = rank, world_size, drivers
        self._steps_ended, self._in_training_thread = steps_ended, in_training_thread
        self._open: list[_Loop] = []  # The innermost last.
        self._noted_at = self._often = 0  # Steps at the last collective outside these; such steps as `_OFTEN_STEPS`.
        self._steps_beside_first = 0  # Steps of other optimizers since the last one of the first.
        self._warned_of_idle = self._warned_of_evaluation = False

    @contextlib.contextmanager
    def inside(self, *, parts: bool, trains: bool) -> Iterator[None]:
        """Make the block a loop over a `shard` loader, see `note_collective`.

        Args:
            parts: Whether it is over micro-batches.
            trains: Whether its batches give gradients.
        """
        opened = _Loop(self._steps_ended(), parts, trains)
        if trains:
            self._often = 0  # The next collective may be behind this loop.
        if trains:
            program_end.note_step()  # An error in its first iteration ends the training, too.
        self._open.append(opened)
        try:
            yield
        finally:
            self._open.remove(opened)

    def note_step(self, number: int, first: int) -> None:
        """Warn, once, if the optimizer whose steps count the batches of `shard` makes none while another one does.

        Args:
            number: Number of the optimizer that makes a step.
            first: Number of the one whose steps count the batches.
        """
        if first == number or not self._open:
            self._steps_beside_first = 0
            return
        self._steps_beside_first += 1
        if self._steps_beside_first < _IDLE_STEPS or self._warned_of_idle or self._rank != 0:
            return
        self._warned_of_idle = True
        logger.warning(
            "batches are counted by the steps of optimizer %d, which made none while others made %d: until it makes "
            "one, loader.state_dict() in the middle of an epoch is wrong and batch shares do not change. If it is no "
            "longer used, call its close() on all ranks",
            first,
            _IDLE_STEPS,
        )

    def note_collective(self, name: str, *, of_all: bool = True) -> None:
        """Keep `auto` in exact modes if the program calls a collective within its loop over a `shard` loader.

        In relaxed modes ranks take batches as they need them, so one would wait for the others in a collective of an
        iteration that these do not have. One that belongs to the first step of a loop may set something up. Where
        nothing is trained there is no step to tell by, and numbers of batches that are equal by luck work: that is
        warned of.

        In other loops ranks have the batches that the program gives them. There relaxed modes let ranks get apart until
        the next collective, so one in every iteration or every few, like the average of each batch's loss, leaves only
        their cost.

        Args:
            name: The collective.
            of_all: Whether it is one of all ranks, not of a process set of the program's.
        """
        if not self._in_training_thread():
            return
        opened = list(self._open)
        if not opened:
            if of_all:
                self._note_in_plain_loop(name)
        elif not opened[-1].trains:
            self._note_in_evaluation(opened[-1], name)
        loops = [loop.parts for loop in opened if loop.trains and self._steps_ended() - loop.began >= _LOOPING]
        if not loops:
            return
        reason = (
            f"the program calls hvd.{name} within its loop over an hvd.shard loader, so all ranks need equally many "
            "iterations; call it behind the loop to have relaxed modes"
        )
        self._keep_exact(reason, equal_batches=any(loops))  # Micro-batches that others take over are iterations, too.

    def _keep_exact(self, reason: str, *, equal_batches: bool = False) -> None:
        for driver in list(self._drivers.values()):
            if driver.auto:
                driver.pin(reason, equal_batches=equal_batches)

    def _note_in_plain_loop(self, name: str) -> None:
        """Keep `auto` in exact modes if a loop without `shard` has a collective every few steps."""
        steps = self._steps_ended()
        made, self._noted_at = steps - self._noted_at, steps
        if made == 0:  # Another one of the same iteration, or one of an evaluation.
            return
        self._often = self._often + made if made <= _OFTEN else 0
        if self._often >= _OFTEN_STEPS:
            self._keep_exact(
                f"the program calls hvd.{name} at least every {_OFTEN} steps, so no rank gets ahead of the others; "
                "call it every 100 steps, or behind the loop, to have relaxed modes"
            )

    def _note_in_evaluation(self, loop: _Loop, name: str) -> None:
        """Warn, once, of collectives in the iterations of a loop in which nothing is trained."""
        loop.collectives += 1
        if loop.collectives < _EVALUATING or self._warned_of_evaluation or self._world_size == 1:
            return
        if any(driver.equal_batches for driver in list(self._drivers.values())):
            return  # Such loops have equally many batches, too.
        self._warned_of_evaluation = True
        logger.warning(
            "hvd.%s is called within a loop over an hvd.shard loader in which nothing is trained: ranks have different "
            "numbers of batches there, and the job ends with an error once one waits for the others in vain; add up on "
            "each rank and call it behind the loop",
            name,
        )
