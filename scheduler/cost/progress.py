"""Progress of an update: noise, staleness and learning rate in one formula.

On a quadratic, a step of size eta along an estimate g of the gradient G changes the loss by
-eta g.G + eta^2 H |g|^2 / 2. Written for an update sum_i f_i P_i of pushed sums P_i of w_i gradients each:

    L      = sum f_i w_i                    its length, 1 for a synchronous step
    m      = L^2 / sum f_i^2 w_i            effective number of gradients averaged (Kish)
    signal = sum f_i w_i kappa(d_i)         its component along the gradient, kappa(d) = 1 / (1 + c d)
    K(m)   = 1 + phi / m                    updates to equal progress (McCandlish et al. 2018; STAR section 4.2)

    progress = (2 signal - rho L^2 K(m) / K(n)) / (2 - rho)         in synchronous steps

phi is the noise scale in gradients of one rank, n the ranks, rho the learning rate relative to the best one for n.
A synchronous step has progress 1. With the `noise` learning-rate rule and rho = 1 it is K(n) / K(x), STAR's rule; with
a small learning rate (rho -> 0) only L counts, so a smaller batch gains nothing by itself.

d_i, the drift, is how far the parameters moved since gradient i was computed, in synchronous steps: the sum of the
lengths of the updates in between. ASGD with n workers and L = 1 / n has a drift of (n - 1) / n, not of n - 1.
The price c is at least rho: delayed gradient descent on a quadratic gains nothing from more, staler steps.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["alignment", "iterations", "local_drift", "update_progress"]

_LOCAL_DRIFT = 0.3
"""Drift per local step of the other ranks: `local(8)` of 4 ranks needed 1.4 to 1.6 times the steps of a synchronous run
(107 kB, Fashion-MNIST, 7 runs)."""

Number: TypeAlias = "float | npt.NDArray[np.float64]"


def iterations(noise: Number, gradients: Number) -> Number:
    """K(m) = 1 + phi / m: updates of m gradients to equal progress, at the best learning rate.

    Args:
        noise: phi in gradients of one rank, 0 or more.
        gradients: m, above 0.
    """
    return 1.0 + noise / gradients


def alignment(drift: Number, price: Number) -> Number:
    """kappa(d) = 1 / (1 + c d): the share of a stale gradient's length that still makes progress."""
    return 1.0 / (1.0 + price * drift)


def local_drift(count: Number, world: Number) -> Number:
    """Mean drift of the steps between two averagings, in synchronous steps.

    Much less than a stale gradient's: each rank's steps make progress, and only their difference is lost.

    Args:
        count: Steps of a rank between two averagings.
        world: Ranks.
    """
    return _LOCAL_DRIFT * 0.5 * (count - 1.0) * (1.0 - 1.0 / world)


def update_progress(
    length: Number, signal: Number, gradients: Number, noise: Number, world: Number, lr_ratio: Number
) -> Number:
    """Progress of one update in synchronous steps; may be negative.

    Args:
        length: L, the update's length in units of a synchronous step's.
        signal: L times the mean alignment of its gradients.
        gradients: m, the effective number of gradients in it.
        noise: phi in gradients of one rank.
        world: Ranks, the gradients of a synchronous step.
        lr_ratio: rho, the job's learning rate relative to the best one, above 0 and below 2.
    """
    penalty = lr_ratio * length * length * iterations(noise, gradients) / iterations(noise, world)
    return (2.0 * signal - penalty) / (2.0 - lr_ratio)
