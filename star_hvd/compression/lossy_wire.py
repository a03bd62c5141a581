"""`Compression.auto`: the form in which all ranks reduce a step's gradients, and each rank's residual.

The leading member measures steps and requests a form in the header of every step. All ranks read the same header in the
same step, so the next step has that form on all of them. When another plan begins, gradients are sent uncompressed
until that plan's leader has requested a form: ranks that join have not read the earlier headers.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scheduler.transmission.decision import Decision
from scheduler.transmission.wire import FORMS, HALF, LOW_RANK, NONE, WireChoice
from star_hvd.compression.bucket_codec import BucketCodec
from star_hvd.compression.pushes import PushCodec, small_size_bytes
from star_hvd.compression.server_pushes import ServerPushes
from star_hvd.engine.buckets import Bucket, Wire
from star_hvd.engine.device import Streams
from star_hvd.locks import ordered_lock

__all__ = ["STATE_KEY", "LossyWire"]

logger = logging.getLogger("star_hvd")

STATE_KEY = "star_compression"
_MOST_EXPONENT = 64  # Of a unit of weights; float32 has 127.


class LossyWire(Wire):
    """The forms and residuals of one optimizer, see the module docstring. The engine calls it under the engine's lock,
    `decode` as the owner of the step in flight.

    The residuals are also read and written by the training thread, for a checkpoint, and by the thread that sends late
    gradients; `_lock` is held during each use.

    Args:
        buckets: The optimizer's buckets, extended in place when parameters are added.
        choice: Chooses the form to request.
        clock: The time in seconds; only differences count.

    Attributes:
        form: The form of the present step.
        wanted: The form that this rank requests.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        choice: WireChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choice = choice or WireChoice()
        self._buckets = buckets
        self._clock = clock
        self._note: Callable[[Decision], None] = lambda decision: None
        self._lock = ordered_lock("LossyWire._lock")
        self._codecs: list[BucketCodec] = []
        self.forbidden = ""
        self._to_servers: ServerPushes | None = None  # For the last mode with servers.
        self._early: tuple[Mapping[str, Any], Mapping[torch.nn.Parameter, int]] | None = None
        self._owner = uuid.uuid4().hex
        self._rank = 0
        self._world_size = 1
        self._asked: int | None = None  # What the last header asked for; None before the plan's first.

    def report_to(self, note: Callable[[Decision], None]) -> None:
        self._note = note

    # ---- what the engine calls ------------------------------------------------------------------------------

    def begin(self, streams: Streams, rank: int, world_size: int) -> None:
        self._streams, self._rank, self._world_size = streams, rank, world_size
        with self._lock:
            for codec in self._codecs:
                codec.begin(streams, world_size)
        self.restart()
        if self._early is not None:
            self.load(*self._early)
            self._early = None

    def restart(self) -> None:
        self._use(NONE)
        self._asked = None
        self._unit = 1.0  # In float16, see `BucketCodec.encode`.
        self._arrived_s: float | None = None
        self._ended_s: float | None = None
        self.choice.restart()
        self._ask()
        with self._lock:
            for codec in self._codecs:
                codec.restart()
            for bucket in self._buckets[len(self._codecs) :]:
                self._codecs.append(BucketCodec(bucket, self._streams, self._world_size))

    def _use(self, form: int) -> None:
        self.form, self.lossy, self.has_tail = form, form != NONE, form != HALF

    def _ask(self) -> None:
        self.wanted = NONE if self.forbidden else self.choice.wanted

    def name(self, bucket: Bucket) -> str:
        return super().name(bucket) + self._codecs[bucket.index].suffix(self.form)

    def encode(self, bucket: Bucket, flat: torch.Tensor, *, weight: float) -> torch.Tensor:
        with self._lock:
            return self._codecs[bucket.index].encode(flat, self.form, weight=weight, unit=self._unit)

    def decode(self, bucket: Bucket, reduced: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        with self._lock:
            return self._codecs[bucket.index].decode(reduced, flat)

    def decoded(self) -> None:
        with self._lock:
            largest = [(codec, found) for codec in self._codecs if (found := codec.to_check()) is not None]
        if not largest:
            return
        self._streams.await_host()  # Once for all buckets, and without the lock.
        infinite = [codec for codec, found in largest if not math.isfinite(float(found))]
        with self._lock:
            for codec in infinite:
                codec.drop_infinite()

    def arrived(self) -> None:
        self._arrived_s = self._clock()

    def computed(self, ago_s: float) -> None:
        if self._arrived_s is not None:
            self._arrived_s = max(self._arrived_s, self._clock() - ago_s)

    def waited(self, wait_s: float) -> None:
        self.computed(wait_s)  # Counts alike: only the last `wait_s` are exposed.

    def ended(self, asked: int, mean_weight: float = 0.0) -> None:
        now_s = self._clock()
        if self._ended_s is not None and self._arrived_s is not None:
            decided = self.choice.observe(self.form, now_s - self._ended_s, now_s - self._arrived_s)
        else:
            decided = self.choice.miss()
        if decided and self._leads:
            logger.info("gradients travel as %s", self.choice.reason)
            self._note(self.choice.decision)
        self._ended_s, self._arrived_s = now_s, None
        self._ask()
        self._asked = asked if 0 <= asked < len(FORMS) else NONE
        self._use(self._asked)
        if 0.0 < mean_weight < math.inf:  # Else no rank gave a gradient, or a weight overflowed.
            exponent = math.frexp(mean_weight)[1] - 1
            self._unit = 2.0 ** max(-_MOST_EXPONENT, min(exponent, _MOST_EXPONENT))

    # ---- late gradients to another rank ---------------------------------------------------------------------

    def packer(self) -> PushCodec:
        return PushCodec(self, self._rank, note=self._note)

    def pack(self, flats: Sequence[torch.Tensor], *, small: bool) -> bytes | None:
        """Return the bytes to send to one rank for contributions to all buckets; keep the residuals for the next one.

        Args:
            flats: Gradients times weight, then the weight, per bucket.
            small: Whether as int8; if that is impossible for any bucket, or smaller for none, returns None and changes
                nothing.
        """
        if small and not self._small_bytes < self._whole_bytes:
            return None
        with self._lock:
            made = [codec.pack(flat, small=small) for codec, flat in zip(self._codecs, flats, strict=True)]
            whole = [each for each in made if each is not None]
            if len(whole) < len(made):
                return None
            for codec, (_, left) in zip(self._codecs, whole, strict=True):
                codec.keep(left)
        return b"".join(payload for payload, _ in whole)

    @property
    def pushed_part(self) -> float:
        return 1.0 if self.forbidden or not self._whole_bytes else self._small_bytes / self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    @property
    def _small_bytes(self) -> int:
        return sum(small_size_bytes(bucket.numel, bucket.flat.dtype) for bucket in self._buckets)

    # ---- pushes to servers ----------------------------------------------------------------------------------

    def server_pushes(self) -> ServerPushes:
        self._to_servers = ServerPushes(self, self._rank, note=self._note)
        return self._to_servers

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]], *, small: bool) -> list[bytes | None]:
        """Encode the bucket's own buffer, see `BucketCodec.shrink`."""
        with self._lock:
            return self._codecs[bucket.index].shrink(bucket.flat, ranges, small=small)

    # ---- what the wrapper calls -----------------------------------------------------------------------------

    def forbid(self, reason: str) -> None:
        """Request no lossy form from now on."""
        self.forbidden = reason
        self._ask()

    def compared(self, *, equal: bool) -> None:
        """Try low rank only if the ranks of this world compute equally.

        Each rank orthonormalizes the same sum itself. Where its columns are dependent, the basis is completed with
        rounding errors, which differ with the number of threads, so replicas would drift apart by whole components.
        """
        self.choice.lossiest = LOW_RANK if equal else HALF

    @property
    def decided(self) -> bool:
        """Whether the first trial has ended: of this rank's pushes in a mode with servers, else of the form that the
        leading rank asks for."""
        if self._to_servers is not None:
            return self._to_servers.switch.decided
        return not self._leads or bool(self.choice.reason)

    def explain(self) -> str:
        found = f"gradients travel as {self.forbidden or self._explain_form()}"
        if self.choice.lossiest < LOW_RANK and not self.forbidden:
            found += "; low rank is not tried, as ranks differ in processor, number of threads or torch"
        return found if self._to_servers is None else f"{found}; {self._to_servers.explain()}"

    @property
    def _leads(self) -> bool:
        return self.leader == self._rank

    def _explain_form(self) -> str:
        if self._leads:
            return self.choice.reason or "they are until their steps are timed"
        if self._asked is None:  # Always so on a rank outside the members, which reads no headers.
            return f"rank {self.leader} asks, which leads the ranks that reduce them: see its log"
        return f"{FORMS[self._asked]}, as rank {self.leader} asks"

    def state(self, indices: Mapping[torch.nn.Parameter, int]) -> dict[str, Any] | None:
        """Return this rank's residuals for a checkpoint, None if there are none.

        Args:
            indices: Positions of the parameters in the optimizer's groups.
        """
        found: dict[int, torch.Tensor] = {}
        with self._lock:
            left = [codec.residuals() for codec in self._codecs]
        for bucket, residuals in zip(self._buckets, left, strict=False):  # No codecs before the first world.
            if residuals is not None:
                found |= {indices[param]: value for param, value in zip(bucket.params, residuals, strict=True)}
        if not found:
            return None
        return {"owner": self._owner, "rank": self._rank, "world_size": self._world_size, "residuals": found}

    def load(self, state: Mapping[str, Any] | None, indices: Mapping[torch.nn.Parameter, int]) -> None:
        """Load what `state` returned on this rank; without it, or with another rank's, there is no residual."""
        state = state or {}
        if not self._codecs:  # An elastic job loads its saved state before its first world begins.
            self._early = state, indices
            return
        place = state.get("rank"), state.get("world_size")
        mine = state.get("owner") == self._owner or place == (self._rank, self._world_size)
        found: Mapping[int, torch.Tensor] = state.get("residuals", {}) if mine else {}
        with self._lock:
            for bucket, codec in zip(self._buckets, self._codecs, strict=True):
                places = [(found.get(indices[param]), param.shape) for param in bucket.params]
                whole = [value for value, shape in places if value is not None and value.shape == shape]
                codec.load(whole if len(whole) == len(places) else None)
