"""How many steps a rank makes between two averagings of `local`.

`local(H)`: H. `local(2.5s)`: as many as fit into the seconds, at least one. The next step is expected to take as long
as the last one, and `FITS` of it has to fit: the others wait at the averaging for the last rank, so one that stepped on
would hold them up. A step may end late by the rest, or chance would decide where a number of steps just fits.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from scheduler.plan.plan import Plan

__all__ = ["FITS", "another_step_fits", "mean_steps", "steps_between_averagings"]

_Floats = npt.NDArray[np.float64]

FITS = 0.75  # Part of a step that has to fit into the time of `local(2.5s)`.


@overload
def another_step_fits(spent_s: float, last_s: float, local_s: float) -> bool: ...
@overload
def another_step_fits(spent_s: _Floats, last_s: _Floats, local_s: _Floats) -> npt.NDArray[np.bool_]: ...
def another_step_fits(
    spent_s: float | _Floats, last_s: float | _Floats, local_s: float | _Floats
) -> bool | npt.NDArray[np.bool_]:
    """Whether a rank makes another step before it averages; a rank that has made none does in any case.

    Args:
        spent_s: Seconds since the last averaging.
        last_s: Seconds that the rank's last step took.
        local_s: Those of the plan.
    """
    return spent_s + FITS * last_s <= local_s


def steps_between_averagings(plan: Plan, step_s: _Floats) -> _Floats:
    """How many steps every rank makes between two averagings, shape (n_ranks,); 1 in other modes.

    Args:
        plan: The plan.
        step_s: Time of a step of every rank, same shape.
    """
    if plan.mode != "local":
        return np.ones_like(step_s)
    if plan.local_steps:
        return np.full_like(step_s, plan.local_steps)
    return np.maximum(1.0, np.floor(plan.local_s / step_s + (1.0 - FITS)))


def mean_steps(plan: Plan, step_s: _Floats, *, counts_local: bool = False) -> float:
    """Mean steps of a rank per step of a window (`scheduler.records.Window`); 1 in other modes than `local`.

    Args:
        plan: The plan.
        step_s: As above.
        counts_local: As in the window: its steps are those of the rank that makes the most, instead of averagings.
    """
    counts = steps_between_averagings(plan, step_s)
    return float(counts.mean() / (counts.max() if counts_local else 1.0))
