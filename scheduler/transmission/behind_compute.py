"""Exposed time of transfers that travel behind compute (`Plan.transmission`), to price such variants of a plan.

    averaging of `local`       behind the steps until the next averaging is due, which waits for the rest
    push to servers            behind backward, from the first complete bucket on; the last leaves when backward ends
    parameters of servers      behind forward, which waits for its first bucket
    late gradients of a child  behind its next ones, which are added up while a push is under way

A push and its reply do not overlap: the update between them needs the whole push. So a step at servers takes
max(backward, push) + max(forward, parameters), not the maximum of all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["EDGE", "WORTH", "averaging_left_s", "push_left_s", "reply_left_s", "steps_behind"]

WORTH = 0.97
"""Largest ratio of the predicted step behind compute to the step without at which `auto` considers the variant."""

FORWARD = 1.0 / 3.0
"""Fraction of a step's compute time in the forward pass: backward computes two products for each one of forward."""

EDGE = 0.25
"""Fraction of a push, or of its reply, that nothing hides, if unknown: one of a network's four or more buckets."""

_AVERAGING = 0.1
"""The same for an averaging: packing, and adding the difference, in the training thread."""

Array = npt.NDArray[np.float64]
Times = Array | float


def _left_s(transfer_s: Times, compute_s: Times, edge: float) -> Array:
    """Exposed time of a transfer beside compute that can hide all but the fraction `edge` of it."""
    return np.maximum(edge * np.asarray(transfer_s), np.asarray(transfer_s) - (1.0 - edge) * np.asarray(compute_s))


def push_left_s(way_s: Times, compute_s: Times, edge_part: float = EDGE) -> Array:
    """Exposed time of a push that takes `way_s`, in a step of `compute_s`; `edge_part` of it is in the last bucket."""
    return _left_s(way_s, (1.0 - FORWARD) * np.asarray(compute_s), edge_part)


def reply_left_s(way_s: Times, compute_s: Times, edge_part: float = EDGE) -> Array:
    """Exposed time of the parameters that come back, in the next step. Arguments as in `push_left_s`."""
    return _left_s(way_s, FORWARD * np.asarray(compute_s), edge_part)


def averaging_left_s(averaging_s: Times, walk_s: Times) -> Array:
    """Exposed time of an averaging.

    Args:
        averaging_s: Time of the averaging.
        walk_s: Compute time of the steps until the next averaging is due.
    """
    return _left_s(averaging_s, walk_s, _AVERAGING)


def steps_behind(averaging_s: Times, walk_s: Times, count: Times) -> Array:
    """Steps that a rank makes before it receives an averaging's mean: 0 to `count`.

    Args:
        averaging_s: Time of the averaging.
        walk_s: Compute time of the steps until the next averaging is due.
        count: Number of these steps.
    """
    return np.asarray(count) * np.minimum(1.0, np.asarray(averaging_s) / np.maximum(walk_s, 1e-12))
