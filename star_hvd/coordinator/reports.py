"""The ranks' last step reports, kept as arrays: what a window is made of, without a walk over every report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.records import RankTable, StepReport

__all__ = ["History"]

_Floats = npt.NDArray[np.float64]

_COMPUTE, _INPUT, _RUNQUEUE, _WAIT, _CPU, _LATE = range(6)

_USUAL = 16
"""Reports that make a rank's usual time where it has to be up to date."""


class History:
    """The last reports of every rank, newest last.

    Args:
        world_size: Number of ranks.
        depth: Reports that are kept of each.
    """

    def __init__(self, world_size: int, depth: int) -> None:
        self._values = np.zeros((world_size, 6, depth))
        self._steps = np.zeros((world_size, depth), dtype=np.int64)
        self._counts = np.zeros(world_size, dtype=np.int64)
        self._depth = depth

    def append(self, report: StepReport) -> None:
        """Take in a report; the oldest of its rank is dropped once there are `depth`."""
        rank = report.rank
        values, steps = self._values[rank], self._steps[rank]
        values[:, :-1] = values[:, 1:]
        values[:, -1] = (
            report.compute_s, report.input_s, report.runqueue_s, report.wait_s, report.cpu_s, float(report.late)
        )
        steps[:-1] = steps[1:]
        steps[-1] = report.step
        if self._counts[rank] < self._depth:
            self._counts[rank] += 1

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, rank: int) -> list[StepReport]:
        """A rank's reports, oldest first. What is not kept of a report has its default."""
        count = int(self._counts[rank])
        values = self._values[rank, :, self._depth - count :].T.tolist()
        steps = self._steps[rank, self._depth - count :].tolist()
        return [
            StepReport(
                rank=rank,
                step=step,
                compute_s=row[_COMPUTE],
                wait_s=row[_WAIT],
                input_s=row[_INPUT],
                cpu_s=row[_CPU],
                runqueue_s=row[_RUNQUEUE],
                late=row[_LATE] > 0.0,
            )
            for step, row in zip(steps, values, strict=True)
        ]

    def usual_s(self) -> list[float]:
        """Median of every rank's latest compute times, seconds; NaN for a rank without reports."""
        recent = self._values[:, _COMPUTE, -_USUAL:]
        counts = np.minimum(self._counts, recent.shape[1])
        if int(counts.min(initial=_USUAL)) == _USUAL:
            middle = (_USUAL - 1) // 2
            two = np.partition(recent, (middle, middle + 1), axis=1)[:, middle : middle + 2]
            return list((0.5 * (two[:, 0] + two[:, 1])).tolist())
        known = np.arange(recent.shape[1]) >= recent.shape[1] - counts[:, None]
        ordered = np.sort(np.where(known, recent, math.inf), axis=1)
        ranks = np.arange(len(counts))
        two_of_each = ordered[ranks, np.maximum(counts - 1, 0) // 2], ordered[ranks, counts // 2 * (counts > 0)]
        return list(np.where(counts > 0, 0.5 * (two_of_each[0] + two_of_each[1]), math.nan).tolist())

    def table(
        self,
        *,
        oversubscribed_share: float,
        starved_share: Sequence[float],
        link_bytes_per_s: Sequence[float],
        silent_s: Sequence[float],
        comm_s: tuple[float, ...],
    ) -> RankTable:
        """The reports as a window's ranks; later reports do not change it.

        Where most ranks wait for a processor there are fewer cores than ranks, or others use them: whoever gets none
        for a moment is not slow, and no mode would help. Those waits are taken out then. Where one rank alone waits,
        it is starved, and they stay in.

        Args:
            oversubscribed_share: Usual share of waits for a processor above which that is so.
            starved_share: What else is known to keep each rank off its processor, 0 to 1.
            link_bytes_per_s: Of every rank, NaN where unknown.
            silent_s: Time since each rank was heard.
            comm_s: Recent times of the job's communication, without waiting for others.
        """
        sums = self._values[:, : _RUNQUEUE + 1].sum(axis=2)
        total_s = sums[:, _COMPUTE]
        waiting, queueing = (_share(sums[:, index], total_s) for index in (_INPUT, _RUNQUEUE))
        compute_s = self._values[:, _COMPUTE].copy()
        if np.sort(queueing)[(len(queueing) - 1) // 2] > oversubscribed_share:
            compute_s -= self._values[:, _RUNQUEUE]
        return RankTable(
            compute_s=compute_s,
            steps=self._steps.copy(),
            counts=self._counts.copy(),
            input_share=waiting,
            starved_share=np.maximum(queueing, starved_share),
            late_share=self._values[:, _LATE].sum(axis=1) / np.maximum(self._counts, 1),
            link_bytes_per_s=np.array(link_bytes_per_s, dtype=np.float64),
            silent_s=np.array(silent_s, dtype=np.float64),
            comm_s=[comm_s] * len(self),
        )


def _share(part_s: _Floats, total_s: _Floats) -> _Floats:
    """Part of the compute time that another of the reports' times makes up, 0 to 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total_s > 0.0, np.minimum(1.0, part_s / total_s), 0.0)
