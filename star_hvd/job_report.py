"""`hvd.report()` and `hvd.explain()`: stragglers and their causes, the active mode and its reason; and user metrics."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from scheduler.diagnosis.expected_times import outlook
from scheduler.records import Window
from scheduler.transmission.decision import LATE, PACE_DOWN, PACE_UP
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.coordinator.job_state import JobState
from star_hvd.coordinator.optimizer_state import OptimizerState
from star_hvd.runtime import runtime
from star_hvd.runtime.job_log import unlogged, warn_unlogged
from star_hvd.telemetry.step_timeline import exposure

__all__ = ["RankLine", "Report", "explain", "record_loss", "record_metric", "report"]


_OUTCOMES_SHOWN = 4  # In the printed table; `Report.outcomes` has all.


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank in a report; times are medians over its recent reports, NaN where unknown.

    Attributes:
        rank: The rank.
        compute_s: Local work per gradient, before the collective.
        wait_s: Time inside the collective; the slowest rank has the least.
        offset_s: Arrival after the first rank of the same step.
        input_share: Part of `compute_s` spent waiting for data.
        starved_share: Part of `compute_s` spent runnable without a core.
        late_share: Part of the gradients that missed their step.
        slowdown: Compute time over the reference, for a slow rank; 1 for the others.
        cause: Cause of a slow rank's slowness; empty for the others.
        next_s: Forecast of `compute_s` for the next step.
        next_low_s: 10 % quantile of that forecast.
        next_high_s: 90 % quantile of that forecast.
        slow_next: Probability that the next `compute_s` is at least 1.2 times the typical rank's.
    """

    rank: int
    compute_s: float
    wait_s: float
    offset_s: float
    input_share: float
    starved_share: float
    late_share: float
    slowdown: float = 1.0
    cause: str = ""
    next_s: float = math.nan
    next_low_s: float = math.nan
    next_high_s: float = math.nan
    slow_next: float = math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """The coordinator's state of one optimizer; `str()` gives a table.

    `outcomes` are `scheduler.policy.switch_outcome.SwitchOutcome`s as mappings, with their sentence: predicted and
    measured speed of each switch. `dropped_messages` were invalid or for ranks that had exited; `repeated_messages`
    were sent again after a broken connection; `denied_connections` had no key of this job.
    """

    mode: str
    reason: str
    step: int
    closed_early: int
    noise_scale: float
    loss: float
    ranks: tuple[RankLine, ...]
    stragglers: tuple[str, ...]
    plans: tuple[dict[str, Any], ...]
    outcomes: tuple[dict[str, Any], ...]
    dropped_messages: int
    denied_connections: int
    repeated_messages: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from rich import box  # Importing it takes 50 ms, which most jobs do not need.
        from rich.console import Console
        from rich.table import Table

        began = f" since step {self.plans[-1]['step']}" if self.plans else ""
        why = f" ({self.reason})" if self.reason else ""
        table = Table(title=f"step {self.step}: {self.mode}{began}{why}", title_justify="left", box=box.SIMPLE)
        columns = ("rank", "compute ms", "next ms", "wait ms", "behind ms", "input", "starved", "late", "slow")
        for name in columns:
            table.add_column(name, justify="right")
        for line in self.ranks:
            table.add_row(
                str(line.rank),
                _ms(line.compute_s),
                f"{_ms(line.next_s)} ({_ms(line.next_low_s)}-{_ms(line.next_high_s)})",
                _ms(line.wait_s),
                _ms(line.offset_s),
                f"{line.input_share:.0%}",
                f"{line.starved_share:.0%}",
                f"{line.late_share:.0%}",
                f"{line.slowdown:.1f}x {line.cause}" if line.cause else "",
            )
        out = io.StringIO()
        Console(file=out, width=108, force_terminal=False).print(table)
        outcomes = [f"step {one['step']}: {one['sentence']}" for one in self.outcomes[-_OUTCOMES_SHOWN:]]
        return "\n".join([out.getvalue().rstrip(), *(self.stragglers or ("no rank is slow",)), *outcomes])


def _ms(value_s: float) -> str:
    return "?" if math.isnan(value_s) else f"{1e3 * value_s:.1f}"


def record_loss(loss: float | torch.Tensor) -> None:
    """Record the loss of this rank's current batch; its mean over the ranks is reduced with the next step.

    It gives no time to a target of `STAR_TARGET`, such as `loss<=0.9`; `record_metric("loss", value)` does.
    """
    run = runtime.current()
    if run is not None:
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        if math.isnan(value):
            value = math.inf  # NaN means "no loss" in the header, but the accuracy guard needs to see it.
        for driver in run.drivers.values():
            driver.engine.own.loss = value
            if driver.reporter.log is not None:
                driver.reporter.log.note_loss()


def record_metric(
    name: str, value: float | torch.Tensor, step: int | None = None, *, monotonic_s: float | None = None
) -> None:
    """Log a point of a curve, the accuracy for example, to the run log. Does nothing on ranks other than 0.

    In jobs without a run log, those on one rank for example, it warns once that it has no effect.
    With `STAR_TARGET="accuracy>=0.95"` the first `accuracy` that reaches 0.95 gives the run's time to accuracy.

    Args:
        name: Name of the curve.
        value: Its value.
        step: Global step it belongs to; by default the current one.
        monotonic_s: Time (`time.monotonic()`) at which the evaluated parameters were current; by default now.
    """
    run = runtime.current()
    if run is None or not run.drivers:
        warn_unlogged("hvd.record_metric")
    if run is None or run.rank != 0:
        return
    number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    for driver in run.drivers.values():
        if driver.reporter.log is not None:
            driver.reporter.log.metric(name, number, driver.engine.step if step is None else step, monotonic_s)


def explain(optimizer: int | None = None) -> str:
    """Explain the active mode in one sentence: its reason, the alternatives, the exposed communication of a step, and
    what was decided on how gradients travel, by other ranks too: overlap, the form with `Compression.auto`, the pace.

    It starts with the step of the decision, as in the log, or the current step if there was no decision. Only rank 0
    can explain; on other ranks, before the first optimizer and after `shutdown()`, the sentence says so. Other ranks
    add what they decided on how they send. If the only optimizers are ones that run as in Horovod, it says why they do.

    Args:
        optimizer: Its number in order of creation; by default the latest one.

    Raises:
        ValueError: There is no such optimizer.
    """
    run = runtime.current()
    if run is None:
        return unlogged() or "no mode is active: no optimizer was made yet, or shutdown() has ended the job"
    if run.coordinator is None:
        own = run.drivers.get(max(run.drivers, default=-1) if optimizer is None else optimizer)
        decisions = [] if own is None else list(own.reporter.decisions.values())
        return "; ".join([f"only rank 0 can explain; this is rank {run.rank}", *(one.text for one in decisions)])
    with run.coordinator.job_state() as job:
        state = _optimizer_state(job, optimizer)
        none = unlogged() or "no mode is active: no optimizer was made yet"
        text = _of_step(state) if state is not None else none
        lockstep = state is not None and state.active.lockstep
        comm_s = state.arrivals.usual_comm_s if state is not None and lockstep else math.nan
        others = state.transmissions.sentences(state.active.plan_id) if state is not None else []
    driver = run.drivers.get(max(run.drivers, default=-1) if optimizer is None else optimizer)
    if driver is None:
        return text
    overlapped = f"overlap is off: {driver.no_overlap}" if driver.asks_overlap and driver.no_overlap else ""
    if driver.overlapped is not None:
        overlapped = driver.overlapped.describe()
    advise = not (driver.asks_overlap or driver.no_overlap)
    exposed = exposure(list(driver.timeline.latest), driver.engine.plan.label, comm_s, advise_overlap=advise)
    sent = [one.text for one in list(driver.reporter.decisions.values()) if one.what in (LATE, PACE_UP, PACE_DOWN)]
    parts = (text, exposed, overlapped, driver.engine.wire.explain(), *sent, *others)
    return "; ".join(part for part in parts if part)


def _of_step(state: OptimizerState) -> str:
    """Return an optimizer's sentence with the step of the decision, which may be hundreds of steps ago."""
    text, (step, plan) = state.explain(), state.plans[-1]
    if plan.reason and text.startswith(plan.reason):
        return f"step {step}: {plan.label}: {text}"
    if plan.reason and text == f"{plan.label}: {plan.reason}":  # The rule-based policy's form.
        return f"step {step}: {text}"
    return f"step {state.steps}: {text}"


def _optimizer_state(job: JobState, optimizer: int | None) -> OptimizerState | None:
    if optimizer is None and not job.optimizers:
        return None
    state = job.optimizers.get(max(job.optimizers) if optimizer is None else optimizer)
    if state is None:
        raise ValueError(f"there is no optimizer {optimizer}; expected one of {sorted(job.optimizers)}")
    return state


def report(optimizer: int | None = None) -> Report | None:
    """Return a report on an optimizer; None on ranks other than 0, before the first one, and if all run as in Horovod.

    Args:
        optimizer: Its number in order of creation; by default the latest one.

    Raises:
        ValueError: There is no such optimizer.
    """
    run = runtime.current()
    if run is None or run.coordinator is None:
        return None
    with run.coordinator.job_state() as job:
        state = _optimizer_state(job, optimizer)
        if state is None:
            return None
        window, built = state.window(), _build(state, run.coordinator, run.keyring.denied)
    # Outside the coordinator's lock, because the forecast takes a while.
    return replace(built, ranks=_with_forecast(built.ranks, window))


def _with_forecast(lines: Sequence[RankLine], window: Window) -> tuple[RankLine, ...]:
    expected = outlook(window)
    if expected is None:
        return tuple(lines)
    low_s, _, high_s = expected.quantile_s
    return tuple(
        replace(
            line,
            next_s=float(expected.median_s[line.rank]),
            next_low_s=float(low_s[line.rank]),
            next_high_s=float(high_s[line.rank]),
            slow_next=float(expected.slow[line.rank]),
        )
        for line in lines
    )


def _build(state: OptimizerState, coordinator: Coordinator, denied: int) -> Report:
    offsets_s, waits_s = state.arrivals.offsets_s(), state.arrivals.waits_s()
    slow = {item.rank: item for item in state.stragglers}
    lines = tuple(
        RankLine(
            rank=stats.rank,
            compute_s=statistics.median(stats.compute_s) if stats.compute_s else math.nan,
            wait_s=waits_s[stats.rank],
            offset_s=offsets_s[stats.rank],
            input_share=stats.input_share,
            starved_share=stats.starved_share,
            late_share=stats.late_share,
            slowdown=slow[stats.rank].slowdown if stats.rank in slow else 1.0,
            cause=slow[stats.rank].cause if stats.rank in slow else "",
        )
        for stats in state.window().ranks
    )
    return Report(
        mode=state.active.label,
        reason=state.active.reason,
        step=state.steps,
        closed_early=state.closed,
        noise_scale=state.gradients.noise.value,
        loss=state.losses.usual,
        ranks=lines,
        stragglers=tuple(item.sentence for item in state.stragglers),
        outcomes=tuple(one.as_record() for one in state.outcomes),
        plans=tuple({"step": step, "mode": plan.label, "reason": plan.reason} for step, plan in state.plans),
        dropped_messages=coordinator.malformed + coordinator.lost,
        denied_connections=denied,
        repeated_messages=coordinator.repeated,
    )
