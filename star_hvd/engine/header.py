"""The small vector reduced with every step: agreement, hyperparameters and statistics, in band.

Every rank adds its own numbers and all ranks read the same sums in the same step, so decisions based on them are the
same everywhere without another message. Layout, float32: `_FIXED` common slots, the last of which are a checksum and a
plan id in pieces; then four slots per hyperparameter (the 64 bits of a float64 in four exact 16-bit pieces, filled only
by the leader); then one slot per rank: its number of own steps plus one, positive if its gradient is fresh, negative if
its helper contributed for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Contribution", "Header", "HeaderCodec"]

_FIELDS = (
    "fresh",
    "flag_count",
    "manual",
    "loss_sum",
    "loss_count",
    "weight",
    "weight_sqr",
    "local_sqr",
    "local_count",
    "folds",
    "leader",
    "sum_count",
    "waited",
    "manual_before",
    "wire",
    "interval_sum",
    "interval_count",
    "no_overlap",
)
# Of a number on whose value ranks agree: sums of the pieces and their squares are exact in float32 to 4227 ranks.
_PIECES, _PIECE_BITS = 4, 6
_CHECKSUM = len(_FIELDS)
_PLAN_ID = _CHECKSUM + 2 * _PIECES
_FIXED = _PLAN_ID + 2 * _PIECES
_SLOT = {name: i for i, name in enumerate(_FIELDS)}


@dataclass(slots=True)
class Contribution:
    """What one rank adds to the header of one step.

    Attributes:
        fresh: Whether the rank's own gradient is in this step.
        own_steps: Gradients the rank has computed so far.
        flag_plan_id_delta: Id of the prepared plan minus that of the active one, 24 bits; None when no plan is
            prepared.
        manual: Whether helpers cannot replay this step (the user changes gradients between `synchronize` and `step`).
        loss: Loss of the batch; NaN if none was recorded, infinite if it was not a number.
        weight: Weight of the fresh gradient.
        local_sqr: Weight times squared norm of the local gradient, None when not sampled.
        folds: Fraction of the buckets into which a late gradient was folded.
        hyper: The leader's hyperparameters, None for the other ranks.
        checksum: 24 bits over the parameters, None when not due.
        waited: Whether gradients waited for this header, as the user's program works between `backward` and `step`.
        manual_before: `manual` of the previous step, if that became known only after its header was sent.
        wire: Encoding that the members' leader requests for the next step (`Wire.wanted`), 0 on the other ranks.
        interval_s: Time between this rank's two latest arrivals, NaN if not wanted.
        no_overlap: Whether this rank's previous step did not overlap with the program although that is wanted.
    """

    fresh: bool
    own_steps: int
    flag_plan_id_delta: int | None = None
    manual: bool = False
    loss: float = math.nan
    weight: float = 0.0
    local_sqr: float | None = None
    folds: float = 0.0
    hyper: Sequence[float] | None = None
    checksum: int | None = None
    waited: bool = False
    manual_before: bool = False
    wire: int = 0
    interval_s: float = math.nan
    no_overlap: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """The decoded sums of one step, the same on every rank."""

    fresh: tuple[bool, ...]
    own_steps: tuple[int, ...]
    flag_count: int
    flag_plan_id_delta: int | None
    manual: bool
    loss: float
    weight: float
    weight_sqr: float
    local_sqr: float
    local_count: int
    folds: float
    hyper: tuple[float, ...] | None
    checksum_ok: bool | None
    waited: bool = False
    manual_before: bool = False
    wire: int = 0
    interval_s: float = math.nan
    no_overlap: bool = False

    def complete(self, members: Sequence[int]) -> bool:
        """Whether every member's fresh gradient is in the step."""
        return all(self.fresh[rank] for rank in members)

    def leader_of(self, members: Sequence[int]) -> int:
        """Return the next step's leader: the fresh member with the most own steps, on ties the lowest rank.

        A rank that was slow for a while has made fewer steps, so its learning-rate schedule is behind; it must not
        lead.
        """
        return max(members, key=lambda rank: self.own_steps[rank] if self.fresh[rank] else -2 - self.own_steps[rank])

    def agreed_plan_id_delta(self, world_size: int) -> int | None:
        """Return the id delta of the plan for which all members raised the flag, None without such a plan."""
        return self.flag_plan_id_delta if self.flag_count == world_size else None


class HeaderCodec:
    """Writes contributions and reads sums for a fixed number of ranks and hyperparameters."""

    def __init__(self, world_size: int, n_hyper: int) -> None:
        self.world_size = world_size
        self._ranks_at = _FIXED + 4 * n_hyper
        self.size = self._ranks_at + world_size

    def write(self, rank: int, item: Contribution, out: npt.NDArray[np.float32]) -> None:
        """Write one rank's contribution into `out`, shape (size,)."""
        out[:] = 0.0
        out[_SLOT["fresh"]] = item.fresh
        if item.flag_plan_id_delta is not None:
            out[_SLOT["flag_count"]] = 1.0
            _write_number(item.flag_plan_id_delta, out[_PLAN_ID:_FIXED])
        out[_SLOT["manual"]] = item.manual
        if not math.isnan(item.loss):
            out[_SLOT["loss_sum"]], out[_SLOT["loss_count"]] = item.loss, 1.0
        out[_SLOT["weight"]], out[_SLOT["weight_sqr"]] = item.weight, item.weight**2
        if item.local_sqr is not None and math.isfinite(item.local_sqr):
            out[_SLOT["local_sqr"]], out[_SLOT["local_count"]] = item.local_sqr, 1.0
        out[_SLOT["folds"]] = item.folds
        out[_SLOT["waited"]] = item.waited
        out[_SLOT["manual_before"]] = item.manual_before
        out[_SLOT["wire"]] = item.wire
        if not math.isnan(item.interval_s):
            out[_SLOT["interval_sum"]], out[_SLOT["interval_count"]] = item.interval_s, 1.0
        out[_SLOT["no_overlap"]] = item.no_overlap
        if item.checksum is not None:
            out[_SLOT["sum_count"]] = 1.0
            _write_number(item.checksum, out[_CHECKSUM:_PLAN_ID])
        if item.hyper is not None:
            out[_SLOT["leader"]] = 1.0
            out[_FIXED : self._ranks_at] = _to_pieces(item.hyper)
        out[self._ranks_at + rank] = (item.own_steps + 1) * (1 if item.fresh else -1)

    def read(self, sums: npt.NDArray[np.float32]) -> Header:
        """Decode the reduced header, shape (size,)."""
        slots = sums[self._ranks_at :].tolist()
        get = dict(zip(_FIELDS, sums[: len(_FIELDS)].tolist(), strict=True))
        count, flags, checksums = get["loss_count"], round(get["flag_count"]), round(get["sum_count"])
        return Header(
            fresh=tuple(v > 0 for v in slots),
            own_steps=tuple(int(abs(v)) - 1 for v in slots),
            flag_count=flags,
            flag_plan_id_delta=_common_number(sums[_PLAN_ID:_FIXED], flags),
            manual=get["manual"] > 0,
            loss=get["loss_sum"] / count if count else math.nan,
            weight=get["weight"],
            weight_sqr=get["weight_sqr"],
            local_sqr=get["local_sqr"],
            local_count=round(get["local_count"]),
            folds=get["folds"],
            hyper=_from_pieces(sums[_FIXED : self._ranks_at]) if round(get["leader"]) == 1 else None,
            checksum_ok=_common_number(sums[_CHECKSUM:_PLAN_ID], checksums) is not None if checksums >= 1 else None,
            waited=get["waited"] > 0,
            manual_before=get["manual_before"] > 0,
            wire=round(get["wire"]) if math.isfinite(get["wire"]) else 0,
            interval_s=get["interval_sum"] / get["interval_count"] if get["interval_count"] else math.nan,
            no_overlap=get["no_overlap"] > 0,
        )


def _write_number(number: int, out: npt.NDArray[np.float32]) -> None:
    """Write the pieces of a number, then their squares. Larger numbers in one slot would have inexact sums."""
    for i in range(_PIECES):
        piece = float((number >> (_PIECE_BITS * i)) & ((1 << _PIECE_BITS) - 1))
        out[i], out[_PIECES + i] = piece, piece * piece


def _common_number(sums: npt.NDArray[np.float32], count: int) -> int | None:
    """Return the number that all `count` ranks contributed; None if they differ, or there are none.

    Equal sums could hide different numbers; zero variance in every piece cannot.
    """
    if count < 1:
        return None
    pieces, squares = sums[:_PIECES].astype(np.float64), sums[_PIECES:].astype(np.float64)
    if not np.all(squares * count == pieces * pieces):
        return None
    return sum(int(piece) // count << (_PIECE_BITS * i) for i, piece in enumerate(pieces.tolist()))


def _to_pieces(values: Sequence[float]) -> npt.NDArray[np.float32]:
    bits = np.asarray(values, dtype="<f8").view("<u2")
    return bits.astype(np.float32)


def _from_pieces(pieces: npt.NDArray[np.float32]) -> tuple[float, ...]:
    bits = pieces.astype("<u2")
    return tuple(float(v) for v in bits.view("<f8"))
