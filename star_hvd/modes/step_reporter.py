"""Report one optimizer's steps on this rank to the coordinator and the run log, and count them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from scheduler.diagnosis.window_stats import slow_limit_s
from scheduler.records import Plan, StepReport, StepTimes
from scheduler.transmission.decision import Decision
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages.base import Send
from star_hvd.channel.messages.switch import StepNote, Switched
from star_hvd.engine.header import Header
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.ps_worker import StepInfo
from star_hvd.telemetry.resources import Resources
from star_hvd.telemetry.step_timeline import StepSample

__all__ = ["StepLog", "StepReporter", "sizes_of"]

logger = logging.getLogger("star_hvd")

_NO_TIMES = StepTimes(0.0)
_FIRST_ARRIVALS = 8  # All of these are reported at once.
_LATEST = 8  # Number of updates in a mean for the log.
_MOST_STEPS = 100_000  # Entries of the timeline.
_MOST_MEMBERS = 25_000_000  # Ranks named in a timeline whose entries all differ: 200 MB.
_SMOOTHING = 0.2  # Weight of the newest step in this rank's usual compute time.


def sizes_of(engine: StepEngine) -> tuple[int, float, float]:
    """Return the sizes of the gradients for the coordinator: `gradient_bytes`, `edge_part` and `pushed_part`."""
    applier = engine.applier
    sizes = [bucket.flat.numel() * bucket.flat.element_size() for bucket in applier.buckets]
    # Gradients that are clipped, or on a device, are pushed as a whole.
    whole = applier.max_grad_norm is not None or bool(engine.streams.devices) or not sum(sizes)
    return sum(sizes), 1.0 if whole else sizes[-1] / sum(sizes), engine.wire.pushed_part


class StepLog(Protocol):
    """Takes entries for the run log; never blocks."""

    def step(self, report: StepReport) -> None: ...

    def metric(self, name: str, value: float, step: int, monotonic_s: float | None = None) -> None: ...

    def note_loss(self) -> None: ...

    def state_loaded(self) -> None: ...

    def resources(self, readings: Resources) -> None: ...

    def timeline(self, record: Mapping[str, Any]) -> None: ...

    def transmission(self, step: int, decision: Decision) -> None: ...

    def close(self, status: str = "FINISHED") -> None: ...


class StepReporter:
    """Sends one optimizer's messages about its own steps; it is the engine's listener, called under the engine's lock.

    Args:
        number: Number of the optimizer, equal on all ranks.
        send: Sends a control message to the coordinator.
        switched: Called with a plan that came into force, under the engine's lock.

    Attributes:
        log: The optimizer's run log, None before there is one.
        timeline: The latest steps on the rank that leads them: step, time_s, members, mode, folds, weight. At most
            100,000, fewer with more than 250 ranks. Equal members in succession are one list.
        mismatches: Steps after which the ranks' parameters differed.
        steps_logged: This rank's own steps that went into the run log, or would have if there were one.
        immediately: Whether some rank waits for steps to end, so that messages are not held back.
        batch_from: Samples per batch of the loader that feeds the training, 0 before its first batch, and the first
            step with them. One attribute, as the log's thread reads both.
        reference_samples: Samples that count as weight 1, likewise 0 before.
        times: This rank's own work in its latest step.
        own_part: Fraction of a usual batch that this rank has computed for its step; reported times are scaled to a
            whole one.
        wait_s: How long it then waited for the others.
        on_header: Called with every header of a reduced step, under the engine's lock.
        decisions: This rank's latest decisions on how something is sent, under the plan in force, by what they are
            about.
        timing: Whether the work of the arriving step is still being timed; its message waits for that.
    """

    engine: StepEngine

    def __init__(self, number: int, send: Send, switched: Callable[[Plan], None]) -> None:
        self.number = number
        self.log: StepLog | None = None
        self.timeline: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)
        self._ranks: list[int] = []  # Named in the timeline; of Python's integers only those up to 256 are shared.
        self.mismatches = 0
        self.steps_logged = 0
        self.decisions: dict[str, Decision] = {}
        self.immediately = False
        self.batch_from = (0, 0)
        self.reference_samples = 0.0
        self._loader, self._logged_step = -1, -1
        self._loaders: dict[int, tuple[int, float]] = {}  # Batch and reference samples of each.
        self._samples: dict[int, int] = {}  # Since this rank's last own step, by loader.
        self.times = _NO_TIMES
        self.wait_s = 0.0
        self.own_part = 1.0
        self.timing = False
        self.on_header: Callable[[Header], None] | None = None
        self._unsent: Callable[[], None] | None = None  # A message that waits for the compute time.
        self._send = send
        self._switched = switched
        self._previous = Plan.sync(1)
        self._usual_s, self._arrivals = 0.0, 0
        self._began_s = time.monotonic()

    def start(self, engine: StepEngine) -> None:
        """Report the steps of `engine`."""
        self.engine, self._previous = engine, engine.plan
        world_size = engine.plan.world_size
        self.timeline = deque(self.timeline, maxlen=min(_MOST_STEPS, max(_LATEST, _MOST_MEMBERS // world_size)))

    def layout_changed(self) -> None:
        """Tell the coordinator the sizes of gradients from the next step on: parameters were added, on all ranks."""
        self._send(messages.GradientSizes(self.number, self.engine.step, *sizes_of(self.engine)))

    def begin_timing(self) -> None:
        """Note that the compute time of this rank's step is not known yet."""
        self.timing, self._unsent = True, None

    def end_timing(self, times: StepTimes) -> None:
        """Record the compute time, and send the message that waited for it."""
        if self.own_part != 1.0:
            times = StepTimes(**{name: value / self.own_part for name, value in dataclasses.asdict(times).items()})
        self.times, self.timing = times, False
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            unsent()

    @property
    def batch(self) -> int:
        """Samples per batch of the loader that feeds the training, 0 before its first batch."""
        return self.batch_from[0]

    def note_samples(self, loader: int, samples: int, batch: int, reference_samples: float) -> None:
        """Count a loader's batch; the first loader to give one feeds the training until `feeds` names another."""
        self._loaders[loader] = (batch, reference_samples)
        if self._loader < 0:
            self.feeds(loader, self._logged_step + 1)
        self._samples[loader] = self._samples.get(loader, 0) + samples

    def feeds(self, loader: int, step: int) -> None:
        """Count the samples of this loader from here on; `step` is the first with a gradient of its batches."""
        if loader not in self._loaders:
            return
        self._loader, (batch, self.reference_samples) = loader, self._loaders[loader]
        if batch != self.batch:
            self.batch_from = (batch, step)

    def note_step(self, info: StepInfo) -> None:
        """Report a step of the active mode, which has ended."""
        loss, self.engine.own.loss = self.engine.own.loss, math.nan
        self.wait_s = info.comm_s
        self.log_step(info.version, loss, info.comm_s, late=info.staleness > 0)
        self._send(
            StepNote(self.number, info.version, info.plan_id, self.times, info.comm_s, loss, info.staleness),
            urgent=False,
        )

    def note_updates(self, notes: Sequence[Any]) -> None:
        """Record the servers' notes on their updates in the timeline."""
        if self.engine.rank != 0:
            return
        for note in notes:
            self.timeline.append(
                {
                    "step": note["version"],
                    "time_s": time.monotonic() - self._began_s,
                    "members": self._shared(list(note["ranks"])),
                    "mode": self.engine.plan.label,
                    "folds": 0.0,
                    "weight": float(note["gradients"]),
                }
            )

    def _shared(self, members: list[int]) -> list[int]:
        """Return the latest entry's list if it is equal: lists of all ranks for every step would take gigabytes."""
        latest = self.timeline[-1].get("members") if self.timeline else None
        return latest if latest == members else members

    def update_samples(self, mode: str) -> float:
        """Return the mean samples behind the latest updates, NaN if this rank led none in `mode` yet."""
        weights = []
        with contextlib.suppress(IndexError):  # The deque may grow meanwhile, which permits indexing but no iteration.
            for back in range(1, _LATEST + 1):
                entry = self.timeline[-back]
                if entry["mode"] != mode:
                    break
                weights.append(float(entry["weight"]))
        known = weights and self.reference_samples
        return self.reference_samples * sum(weights) / len(weights) if known else math.nan

    def log_step(self, step: int, loss: float, wait_s: float, *, late: bool) -> None:
        """Write one of this rank's own steps to the run log."""
        counted, self._samples = self._samples, {}
        samples = counted.get(self._loader, 0)
        self.steps_logged, self._logged_step = self.steps_logged + 1, step
        if self.log is None:
            return
        self.log.step(
            StepReport(
                rank=self.engine.rank,
                step=step,
                times=self.times,
                wait_s=wait_s,
                late=late,
                samples=float(samples),
                loss=loss,
            )
        )

    def log_sample(self, sample: StepSample) -> None:
        """Write the timeline of one step to the run log."""
        if self.log is not None:
            self.log.timeline(sample.as_record())

    def note_transmission(self, decision: Decision) -> None:
        """Write a decision of this rank on how something is sent to the run log, and tell rank 0, which explains it.

        May be called in any thread.
        """
        step = self.engine.step
        self.decisions[decision.what] = decision
        if self.log is not None:
            self.log.transmission(step, decision)
        if self.engine.rank != 0:
            gain, text = decision.gain, decision.text[: messages.MOST_TEXT]
            note = messages.TransmissionNote(self.number, step, decision.what, decision.chosen, gain, text)
            self._send(note, urgent=False)

    def on_arrive(self, step: int, plan_id: int) -> None:
        self._send_timed(lambda: self._send_arrive(step, plan_id))

    def on_late(self, version: int, plan_id: int) -> None:
        self._send_timed(lambda: self._send_late(version, plan_id))

    def _send_timed(self, send: Callable[[], None]) -> None:
        if self.timing:
            self._unsent = send
        else:
            send()

    def _send_arrive(self, step: int, plan_id: int) -> None:
        urgent = self._is_urgent(self.times.compute_s)
        arrive = messages.Arrive(self.number, step, plan_id, self.times, self.wait_s)
        self._send(arrive, urgent=urgent or self._urgent())

    def _urgent(self) -> bool:
        return self.engine.plan.may_close or self.immediately

    def _is_urgent(self, compute_s: float) -> bool:
        """Whether to report an arrival in `sync` at once: this rank is suddenly slow, or it is one of the first."""
        usual_s, self._arrivals = self._usual_s, self._arrivals + 1
        self._usual_s = compute_s if self._arrivals == 1 else usual_s + _SMOOTHING * (compute_s - usual_s)
        return self._arrivals <= _FIRST_ARRIVALS or compute_s > slow_limit_s(usual_s)

    def _send_late(self, version: int, plan_id: int) -> None:
        self._send(messages.Late(self.number, version, plan_id, self.times))

    def on_join(self, version: int) -> None:
        self._send(messages.Join(self.number, version))

    def on_step_end(self, step: int, header: Header, plan: Plan, mean_sqr: float, sent_bytes: int) -> None:
        if self.on_header is not None:
            self.on_header(header)
        if self.engine.rank != plan.members_or_all[0]:
            return
        if len(self._ranks) != len(header.fresh):
            self._ranks = list(range(len(header.fresh)))
        fresh = self._shared(list(itertools.compress(self._ranks, header.fresh)))
        self.timeline.append(
            {
                "step": step,
                "time_s": time.monotonic() - self._began_s,
                "members": fresh,
                "mode": plan.label,
                "folds": header.folds,
                "weight": header.weight,
            }
        )
        self._send(
            messages.HeaderNote(
                self.number,
                step,
                plan.plan_id,
                fresh,
                header.loss,
                header.weight,
                header.weight_sqr,
                header.local_sqr,
                header.local_count,
                mean_sqr,
                header.folds,
                sent_bytes,
            ),
            urgent=False,  # No step closes on it, so it goes with the next arrival.
        )

    def on_switch(self, step: int, plan: Plan) -> None:
        logger.info("rank %d: step %d: switch to %s", self.engine.rank, step, plan.label)
        previous, self._previous = self._previous, plan
        self.decisions.clear()
        self._switched(plan)
        if previous.mode == "subgroup" and self.engine.rank == previous.members[0]:
            self._send(Switched(self.number, plan.plan_id, step))  # The children were not asked.

    def on_mismatch(self, step: int) -> None:
        self.mismatches += 1
        if self.mismatches == 1:
            logger.error(
                "parameters differ between ranks at step %d; call hvd.broadcast_parameters before training and change "
                "parameters on all ranks alike",
                step,
            )

    def stats(self) -> dict[str, float]:
        """Return this rank's counters and the number of steps that have ended here."""
        with self.engine.lock:
            values: dict[str, float] = dataclasses.asdict(self.engine.counters)
            values["steps"] = self.engine.step
            values["pending_weight"] = self.engine.pending_weight
            values["mismatches"] = self.mismatches
        return values
