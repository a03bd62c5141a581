"""Send and receive a step: submit buckets and header to the plan's collective, and read means and header back.

Which thread may submit what, and when, is decided by the claim rule in `step_engine.py`. The last bucket, if it has
room, carries the header behind its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, Wire, set_weight
from star_hvd.engine.collective import Collective
from star_hvd.engine.exchange.agreement import Agreement
from star_hvd.engine.exchange.header_timing import HeaderTiming
from star_hvd.engine.exchange.late_gradients import LateGradients
from star_hvd.engine.exchange.means import divide, norm
from star_hvd.engine.header import Contribution, Header
from star_hvd.engine.records import Averaging, OpenStep

__all__ = ["StepExchange"]


class StepExchange:
    """The engine calls this under its lock, except `read` and `mean`, which a step's owner calls without the lock.

    Args:
        applier: Holds the buckets.
        agreement: The plan in force and the header's layout.
        late: Late gradients, folded into what is submitted.
        timing: When the header is sent, and whether alone.
        wire: How gradients travel.
        collective: Reduces tensors over all ranks.
        collective_of: Returns the collective of a subgroup's members; the process set must exist.
        prefix: Prefix of the collectives' names.
        mean_factor: Results are the mean times this.

    Attributes:
        collective: The collective of the plan in force.
        timing: As given.
    """

    def __init__(
        self,
        applier: Applier,
        agreement: Agreement,
        late: LateGradients,
        timing: HeaderTiming,
        wire: Wire,
        collective: Collective,
        collective_of: Callable[[tuple[int, ...]], Collective] | None,
        *,
        prefix: str,
        mean_factor: int,
    ) -> None:
        self.collective = collective
        self._everybody = collective
        self._collective_of = collective_of
        self._applier = applier
        self._agreement = agreement
        self._late = late
        self.timing = timing
        self._wire = wire
        self._prefix = prefix
        self._mean_factor = mean_factor
        self._carrier: Bucket | None = None
        self.choose_carrier()
        wire.leader = agreement.members[0]
        wire.begin(applier.streams, agreement.rank, agreement.plan.world_size)

    def choose_carrier(self) -> None:
        """Reserve room for the header behind the last bucket; the contents of that buffer are lost."""
        for bucket in self._applier.buckets:
            if bucket.tail:
                bucket.carry(0)
        last = self._applier.buckets[-1] if self._applier.buckets else None
        self._carrier = last if last is not None and last.can_carry else None
        if self._carrier is not None:
            self._carrier.carry(self._agreement.codec.size)

    def plan_taken(self) -> None:
        """Switch to the collective of the new plan."""
        self.timing.restart()
        self._wire.leader = self._agreement.members[0]
        self._wire.restart()
        plan = self._agreement.plan
        if plan.mode != "subgroup":
            self.collective = self._everybody
        elif self._agreement.rank in plan.members:
            assert self._collective_of is not None, "this engine cannot run a subgroup"
            self.collective = self._collective_of(plan.members)

    # ---- out ------------------------------------------------------------------------------------------------

    def submit_fresh(self, step: OpenStep, bucket: Bucket, weight: float) -> None:
        """Submit this rank's own gradient of a bucket, which is complete in the bucket's `flat`."""
        flat = bucket.flat
        if weight != 1.0:
            flat[:-1].mul_(weight)
        set_weight(flat, weight)
        if bucket is self._carrier:
            self.timing.carrier_complete()
        self._submit(step, bucket, flat, weight)

    def submit_proxy(self, step: OpenStep, bucket: Bucket) -> None:
        """Submit zeros for a bucket, plus any late gradient kept for it."""
        self._submit(step, bucket, bucket.new_flat(), 0.0)

    def _submit(self, step: OpenStep, bucket: Bucket, flat: torch.Tensor, weight: float) -> None:
        """Submit `flat`, which holds gradients of weight `weight`, with the kept late gradient folded in."""
        folded = self._late.fold(bucket, flat, step.number, self._agreement.plan)
        step.folded += folded != 0.0
        reduced_buffer = self._wire.encode(bucket, flat, weight=weight + folded)
        step.buffers[bucket.index], step.reduced_buffers[bucket.index] = flat, reduced_buffer
        if bucket is self._carrier and self.timing.alone and self._wire.has_tail:
            reduced_buffer[-bucket.tail :].zero_()  # Clear an earlier header.
        if bucket is not self._carrier or self._header_alone:
            step.handles[bucket.index] = self._start(self._wire.name(bucket), reduced_buffer)

    def submit_average(self, step: OpenStep, bucket: Bucket, average: torch.Tensor) -> None:
        """`local`: submit this rank's part of an average, laid out as by `Bucket.new_average`."""
        step.buffers[bucket.index] = step.reduced_buffers[bucket.index] = average
        step.handles[bucket.index] = self._start(f"a{bucket.index}", average)

    def submit_header(self, step: OpenStep, item: Contribution, averaging: Averaging | None) -> None:
        """Submit the header, behind the carrier if there is one, and the extra tensors that `averaging` averages."""
        if self._agreement.rank == self._wire.leader:
            item.wire = self._wire.wanted
        if item.fresh:
            item.waited = self.timing.waits()
        codec, name = self._agreement.codec, "h"
        if self._carrier is None or self._header_alone or self._agreement.plan.mode == "local":
            whole = step.header = torch.zeros(codec.size, dtype=torch.float32, device="cpu")
        else:
            carrier = step.reduced_buffers[self._carrier.index]
            assert carrier is not None
            whole, step.header, name = carrier, carrier[-codec.size :], self._wire.name(self._carrier)
        codec.write(self._agreement.rank, item, step.header.numpy())
        if averaging is not None:
            step.averaging = averaging
            for extra, tensor in averaging.extras():
                step.extras.append(tensor)
                step.handles.append(self._start(extra, tensor))
        step.header_handle = self._start(name, whole)
        self.collective.hurry()  # The header is a step's last tensor.

    def _start(self, name: str, tensor: torch.Tensor) -> int:
        return self.collective.submit(f"{self._prefix}.{name}", tensor)

    @property
    def _header_alone(self) -> bool:
        """Whether the next step's header travels as a separate tensor although there may be a carrier."""
        return self.timing.alone or not self._wire.has_tail

    # ---- back -----------------------------------------------------------------------------------------------

    def all_ended(self, step: OpenStep) -> bool:
        """Whether all operations of a step have ended; collects nothing."""
        return all(self.collective.poll(handle) for handle in step.all_handles())

    def collect(self, step: OpenStep) -> bool:
        """Collect the operations that have ended, for the helper. Return whether all have."""
        if not step.waiting:
            step.waiting.extend(step.all_handles())
        while step.waiting and self.collective.poll(step.waiting[0]):
            self.collective.finish(step.waiting.popleft())
        return not step.waiting

    def ended(self, step: OpenStep, header: Header, *, complete: bool) -> None:
        """Note the reduced header of a step, on which depends how the next ones are sent."""
        self.timing.read(header, complete=complete)
        if step.averaging is None:
            self._wire.ended(header.wire, header.weight / max(1, sum(header.fresh)))

    def header(self, step: OpenStep) -> Header:
        """Decode the reduced header, which must have been collected."""
        assert step.header is not None
        return self._agreement.codec.read(step.header.numpy())

    def mean(self, step: OpenStep, bucket: Bucket) -> torch.Tensor:
        """Compute the mean of a collected bucket, in place."""
        if (made := step.means.get(bucket.index)) is not None:
            return made
        flat, reduced_buffer = step.buffers[bucket.index], step.reduced_buffers[bucket.index]
        assert flat is not None and reduced_buffer is not None
        self._applier.streams.use(reduced_buffer, flat)  # Another thread may have submitted them.
        total = self._wire.decode(bucket, reduced_buffer, flat) if step.averaging is None else flat
        mean = step.means[bucket.index] = divide(total, flat, self._applier.streams, self._mean_factor)
        return mean

    def read(self, step: OpenStep) -> tuple[Header, list[torch.Tensor], float]:
        """Return header, means and their squared norm (NaN if not sampled). The host may wait for the device here."""
        header = self.header(step)
        means = [self.mean(step, bucket) for bucket in self._applier.buckets]
        self._wire.decoded()
        # The noise scale needs lossless gradients, and a norm from every member.
        if self._wire.lossy or header.local_count != len(self._agreement.members):
            return header, means, math.nan
        norms = [norm(mean) for mean in means]
        self._applier.streams.await_host()
        return header, means, sum(float(each) ** 2 for each in norms)
