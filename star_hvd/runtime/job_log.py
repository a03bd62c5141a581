"""Feeds the run log of one optimizer: own steps on every rank; windows, plans and facts of the job on rank 0.

There is one run per optimizer, so that time to accuracy counts from its first step, not from the start of a program
that trains several networks. On the training thread, a step's times are only put into a queue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.records import StepReport
from scheduler.target import Target
from scheduler.transmission.decision import Decision
from star_hvd import env
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.coordinator.optimizer_state import OptimizerState
from star_hvd.run_log import RunLog, enabled, run_directory, window_values
from star_hvd.run_log.facts import environment, has_trained_state, optimizer_facts
from star_hvd.telemetry.resources import Resources
from star_hvd.threads import supervised

if TYPE_CHECKING:
    from star_hvd.modes.step_reporter import StepReporter
    from star_hvd.runtime.model_loader import ModelLoader

__all__ = ["JobLog", "Pace", "check_curves", "forget_unlogged", "note_unlogged", "unlogged", "warn_unlogged"]

logger = logging.getLogger("star_hvd")

_LOOK_INTERVAL_S = 0.5  # Between two windows; the log keeps one per second.
_PACE_S = 5.0  # Period over which steps per second are counted.


class JobLog:
    """The log of one optimizer, as one rank sees it.

    Args:
        job: Name of the job, the same on all ranks.
        reporter: The optimizer's reporter; its engine has started.
        hosts: Address of every rank's host.
        coordinator: Source of windows and plans, on rank 0.
        facts: Parameters of the job that are already known.
        ranker: The predictor, if this optimizer runs in `auto` with the learned policy.
        curves: Receives the names of recorded curves, for `check_curves`; one set for all optimizers of a process.
    """

    def __init__(
        self,
        job: str,
        reporter: StepReporter,
        hosts: Sequence[str],
        coordinator: Coordinator | None,
        facts: Mapping[str, Any],
        ranker: ModelLoader | None = None,
        curves: set[str] | None = None,
    ) -> None:
        self._reporter = reporter
        self._applier = reporter.engine.applier
        self._hosts = hosts
        self._coordinator = coordinator
        self._ranker = ranker
        self._plans_logged = 0
        self._outcome_logged = (-1, -1)  # Plan and last step of the latest outcome.
        self._shares_logged: tuple[int, tuple[int, ...]] = (0, ())  # Plan and batch shares, the latest of both.
        self._pace = Pace()
        self._curves = set() if curves is None else curves
        # Read here, on the training thread, because schedules change hyperparameters with the first steps, and runs are
        # searched by the initial ones.
        self._optimizer = self._optimizer_facts() if coordinator is not None and enabled() else {}
        self._batch_logged = 0
        self._model_logged = self._stepped = False
        self._stop = threading.Event()
        name = job if reporter.number == 0 else f"{job}-{reporter.number}"
        self._target = env.target()
        target = Target.parse(self._target)
        warns = coordinator is not None and reporter.number == 0  # One log of the job.
        self._loss_is_target = warns and target is not None and target.name == "loss"
        given = {"target": self._target, "tags": env.tags()}
        known = {**facts, **{name: value for name, value in given.items() if value}}
        if "continues" not in known and self._optimizer and has_trained_state(self._applier.optimizer):
            known["continues"] = "optimizer state"
        self._log = RunLog(
            run_directory(name), rank=reporter.engine.rank, world_size=len(hosts), job=known, enabled=enabled()
        )
        self._thread = supervised(self._run, "star-job-log", critical=False)

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return self._log.directory

    @property
    def dropped(self) -> int:
        """Number of lost entries."""
        return self._log.dropped

    def start(self) -> None:
        """Start the thread; does nothing if the log is switched off or cannot be written."""
        if not self._log.enabled:
            return
        if self._coordinator is not None:
            self._check_target()
            self._thread.start()

    def step(self, report: StepReport) -> None:
        """Log one of this rank's gradients; called by the training thread."""
        self._stepped = True
        self._log.step(report)

    def metric(self, name: str, value: float, step: int, monotonic_s: float | None = None) -> None:
        """Log a point of a user's curve, at an earlier time of `time.monotonic()` or now."""
        self._curves.add(name)
        self._log.metric(name, value, step, None if monotonic_s is None else self._log.since_s(monotonic_s))

    def note_loss(self) -> None:
        """Note a call of `record_loss`: at the first one, warn if the target is the loss, which it does not record."""
        if self._loss_is_target and self._log.enabled and "loss" not in self._curves:
            logger.warning(
                "STAR_TARGET is %r, but hvd.record_loss gives no time to target; call hvd.record_metric('loss', value)",
                self._target,
            )
        self._loss_is_target = False

    def state_loaded(self) -> None:
        """Note that the program has loaded the optimizer's state: before the first step, a checkpoint to go on from."""
        if not self._stepped and self._optimizer and has_trained_state(self._applier.optimizer):
            self._log.facts({"continues": "optimizer state"})

    def resources(self, readings: Resources) -> None:
        """Log a reading of this rank's machine."""
        self._log.resources(readings)

    def timeline(self, record: Mapping[str, Any]) -> None:
        """Log when the buckets of one of this rank's steps were transferred."""
        self._log.timeline(record)

    def transmission(self, step: int, decision: Decision) -> None:
        """Log a decision of this rank on how something is sent."""
        self._log.transmission(step, decision)

    def close(self, status: str = "FINISHED") -> None:
        """Write what is left and end; the sender to MLflow continues on its own for a while.

        Args:
            status: `FINISHED`, `FAILED` or `KILLED`.
        """
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        self._log.close(status)

    # ---- rank 0, own thread -----------------------------------------------------------------------------------------

    def _check_target(self) -> None:
        """Warn of an invalid target at the start, not after a night of training."""
        if self._reporter.number == 0 and self._target and Target.parse(self._target) is None:
            logger.warning(
                "STAR_TARGET is %r; expected NAME>=NUMBER, accuracy>=0.9 for example; the run has no time to target",
                self._target,
            )

    def _optimizer_facts(self) -> dict[str, Any]:
        sizes = [bucket.flat.numel() * bucket.flat.element_size() for bucket in self._applier.buckets]
        return optimizer_facts(self._applier.optimizer, sizes)

    def _run(self) -> None:
        try:
            ended = self._stop.wait(_LOOK_INTERVAL_S)  # Reading the environment must not delay the first step.
            self._log.facts({**self._environment(), "optimizer": self._optimizer})
            while not ended:
                self._look()
                ended = self._stop.wait(_LOOK_INTERVAL_S)
            self._look()
        except Exception:
            logger.exception("the run log gets no more windows; training goes on")

    def _environment(self) -> dict[str, Any]:
        try:
            return environment(self._hosts)
        except Exception:
            logger.exception("the run log has no facts about this machine and program; training goes on")
            return {}

    def _tell_late_facts(self) -> None:
        """Log facts that are known only some time after the start: the loaders' batches, and the loaded model."""
        batch, step = self._reporter.batch_from
        if batch != self._batch_logged:
            self._batch_logged = batch
            self._log.facts({"batch": batch}, step)
        if not self._model_logged and self._ranker is not None and self._ranker.facts is not None:
            self._model_logged = True
            self._log.facts({"model": self._ranker.facts})

    def _look(self) -> None:
        assert self._coordinator is not None
        self._tell_late_facts()
        with self._coordinator.job_state() as job:
            engine = job.optimizers.get(self._reporter.number)
            if engine is None:
                return
            plans, values = engine.plans[self._plans_logged :], self._values(engine)
            begun_s = [job.clock_s(began_s) for began_s in engine.plans_began_s[self._plans_logged :]]
            predictions_by_plan = [engine.predictions_by_plan.pop(plan.plan_id, {}) for _, plan in plans]
            outcomes = [one for one in engine.outcomes if (one.plan_id, one.step) > self._outcome_logged]
            active, shares_step = engine.active, engine.shares_step
        for (step, plan), began_s, predictions in zip(plans, begun_s, predictions_by_plan, strict=True):
            # Not the time of this look, which is half a second later or more: seconds per step follow from it.
            self._log.plan(step, plan, predictions, self._log.since_s(began_s))
            self._plans_logged += 1
            self._shares_logged = (plan.plan_id, plan.batch_shares)
        if (active.plan_id, active.batch_shares) != self._shares_logged:
            self._log.shares(shares_step, active)
            self._shares_logged = (active.plan_id, active.batch_shares)
        for outcome in outcomes:
            self._log.outcome(outcome)
            self._outcome_logged = (outcome.plan_id, outcome.step)
        self._log.window(values)

    def _values(self, engine: OptimizerState) -> dict[str, Any]:
        window = engine.window()
        return window_values(
            window,
            mode=engine.active.label,
            stragglers=engine.stragglers,
            ranks={
                "wait_s": engine.arrivals.waits_s(),
                "offset_s": engine.arrivals.offsets_s(),
                "silent_s": [s.silent_s for s in window.ranks],
                "link_bytes_per_s": [s.link_bytes_per_s for s in window.ranks],
            },
            loss=engine.losses.usual,
            closed_early=engine.closed,
            comm_bytes=window.comm_bytes,
            comm_s=engine.arrivals.usual_comm_s,
            steps_per_s=self._pace.note(time.monotonic(), engine.steps),
            effective_batch=self._reporter.update_samples(engine.active.label),
            folds=engine.folds,
            rank0_drops=self._reporter.stats()["drops"],  # Those of other ranks are not known here.
        )


def check_curves(curves: Collection[str]) -> None:
    """Warn at the end of a job, on rank 0, if its target's curve was never recorded (misspelt, for example).

    Args:
        curves: Names of the recorded curves.
    """
    target = Target.parse(env.target())
    if enabled() and target is not None and target.name not in curves:
        logger.warning(
            "STAR_TARGET is %r, but %s was not recorded by hvd.record_metric (got: %s); the run has no time to target",
            env.target(),
            target.name,
            ", ".join(sorted(curves)) or "nothing",
        )


# ---- optimizers without a log ---------------------------------------------------------------------------------------


_unlogged: weakref.WeakKeyDictionary[object, tuple[int, str]] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


def note_unlogged(optimizer: object, why: str, rank: int) -> None:
    """Note, while it lives, an optimizer that runs as in Horovod, so that nothing is logged of its run.

    Args:
        optimizer: What lives as long as it.
        why: Why it runs so.
        rank: This rank.
    """
    _unlogged[optimizer] = (rank, f"{why}: runs as in Horovod, no run log")
    if env.target():
        warn_unlogged("STAR_TARGET")


def unlogged() -> str:
    """Return why the latest optimizer without a run log has none; empty if there is no such optimizer."""
    found = list(_unlogged.values())
    return found[-1][1] if found else ""


def warn_unlogged(what: str) -> None:
    """Warn, once per process and on rank 0, of what has no effect without a run log, if an optimizer has none."""
    found = list(_unlogged.values())
    if found and found[-1][0] == 0 and enabled() and what not in _warned:
        _warned.add(what)
        logger.warning("%s has no effect for an optimizer without a run log (%s)", what, found[-1][1])


def forget_unlogged() -> None:
    """Forget them at the end of the job."""
    _unlogged.clear()
    _warned.clear()


class Pace:
    """Steps per second over the last five seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, steps: int) -> float:
        """Take in the number of steps so far; return their rate, NaN at first."""
        while len(self._points) > 1 and self._points[0][0] < now_s - _PACE_S:
            self._points.popleft()
        self._points.append((now_s, steps))
        began_s, first = self._points[0]
        return (steps - first) / (now_s - began_s) if now_s > began_s else math.nan
