"""`hvd.report()`: who is slow, since when and why, what the job does about it, and what that costs."""

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
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.coordinator.job_state import JobState
from star_hvd.coordinator.optimizer_state import OptimizerState
from star_hvd.runtime import runtime

__all__ = ["RankLine", "Report", "explain", "record_loss", "record_metric", "report"]


_OUTCOMES_SHOWN = 4  # In the table; a program gets all.


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank in a report; times are medians over its recent reports, NaN where unknown.

    Attributes:
        rank: The rank.
        compute_s: Own work per gradient, before the collective.
        wait_s: Time inside the collective; the slowest rank has the least.
        offset_s: Arrival behind the first rank of the same step.
        input_share: Part of `compute_s` spent waiting for data.
        starved_share: Part of `compute_s` spent runnable without a processor.
        late_share: Part of the gradients that missed their step.
        slowdown: Compute time over the reference, for a slow rank; 1 for the others.
        cause: Of a slow rank, else empty.
        next_s: Forecast of `compute_s` of the next step.
        next_low_s: Its 10 % quantile.
        next_high_s: Its 90 % quantile.
        slow_next: Probability that it is 1.2 times the usual rank's or more.
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
    """What the coordinator knows about one optimizer; `str()` gives a table.

    `outcomes` are `scheduler.policy.switch_outcome.SwitchOutcome`s as mappings, with their sentence: what was predicted
    of each switch and what was measured after it. `dropped_messages` made no sense or were for ranks that had left;
    `repeated_messages` travelled again because a connection broke.
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
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from rich import box  # 50 ms, which most jobs never need.
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
        said = [f"step {one['step']}: {one['sentence']}" for one in self.outcomes[-_OUTCOMES_SHOWN:]]
        return "\n".join([out.getvalue().rstrip(), *(self.stragglers or ("no rank is slow",)), *said])


def _ms(value_s: float) -> str:
    return "?" if math.isnan(value_s) else f"{1e3 * value_s:.1f}"


def record_loss(loss: float | torch.Tensor) -> None:
    """Tell the loss of this rank's current batch; its mean over the ranks travels with the next step."""
    run = runtime.current()
    if run is not None:
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        if math.isnan(value):
            value = math.inf  # On the wire NaN stands for a rank that told none; the guard of accuracy has to hear it.
        for driver in run.drivers.values():
            driver.engine.loss = value


def record_metric(
    name: str, value: float | torch.Tensor, step: int | None = None, *, monotonic_s: float | None = None
) -> None:
    """Put a point of a curve, the accuracy for example, into the run log; without effect on ranks other than 0.

    With `STAR_TARGET="accuracy>=0.95"` the first `accuracy` that is high enough gives the run's time to accuracy.

    Args:
        name: Of the curve.
        value: Its value.
        step: Global step it belongs to; the present one where left out.
        monotonic_s: When, by `time.monotonic()`, the parameters were what the value is of, where it took until now to
            work it out.
    """
    run = runtime.current()
    if run is None or run.rank != 0:
        return
    number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    for driver in run.drivers.values():
        if driver.reporter.log is not None:
            driver.reporter.log.metric(name, number, driver.engine.step if step is None else step, monotonic_s)


def explain(optimizer: int | None = None) -> str:
    """One sentence: which mode is in force and why, against which alternatives.

    It begins with the step it is of: that of the decision, as in the log, or the present one where nothing was decided.
    Ranks other than 0 do not know; their sentence says so, and so does one before the first optimizer or after
    `shutdown()`.

    Args:
        optimizer: Its number in the order in which they were made; the latest one where left out.

    Raises:
        ValueError: There is no such optimizer.
    """
    run = runtime.current()
    if run is None:
        return "nothing is known: no optimizer was made yet, or shutdown() has ended the job"
    if run.coordinator is None:
        return f"only rank 0 knows; this is rank {run.rank}"
    with run.coordinator.board() as board:
        engine = _engine(board, optimizer)
        return _of_step(engine) if engine is not None else "nothing is known: no optimizer was made yet"


def _of_step(engine: OptimizerState) -> str:
    """An optimizer's sentence with the step it is of: one on a plan in force may be hundreds of steps old."""
    said, (step, plan) = engine.explain(), engine.plans[-1]
    if plan.reason and said.startswith(plan.reason):
        return f"step {step}: {plan.label}: {said}"
    if plan.reason and said == f"{plan.label}: {plan.reason}":  # As the rule tells it.
        return f"step {step}: {said}"
    return f"step {engine.steps}: {said}"


def _engine(board: JobState, optimizer: int | None) -> OptimizerState | None:
    if optimizer is None and not board.engines:
        return None
    engine = board.engines.get(max(board.engines) if optimizer is None else optimizer)
    if engine is None:
        raise ValueError(f"there is no optimizer {optimizer}; there are {sorted(board.engines)}")
    return engine


def report(optimizer: int | None = None) -> Report | None:
    """What rank 0 knows about an optimizer; None on other ranks, and where nothing is known yet.

    Args:
        optimizer: Its number in the order in which they were made; the latest one where left out.

    Raises:
        ValueError: There is no such optimizer.
    """
    run = runtime.current()
    if run is None or run.coordinator is None:
        return None
    with run.coordinator.board() as board:
        engine = _engine(board, optimizer)
        if engine is None:
            return None
        window, told = engine.window(), _build(engine, run.coordinator, run.keyring.denied)
    # The job's coordinator is not kept waiting for it.
    return replace(told, ranks=_with_forecast(told.ranks, window))


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


def _build(engine: OptimizerState, coordinator: Coordinator, denied: int) -> Report:
    offsets_s, waits_s = engine.arrivals.offsets_s(), engine.arrivals.waits_s()
    slow = {item.rank: item for item in engine.stragglers}
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
        for stats in engine.window().ranks
    )
    return Report(
        mode=engine.active.label,
        reason=engine.active.reason,
        step=engine.steps,
        closed_early=engine.closed,
        noise_scale=engine.noise.value,
        loss=engine.losses.usual,
        ranks=lines,
        stragglers=tuple(item.sentence for item in engine.stragglers),
        outcomes=tuple(one.as_record() for one in engine.outcomes),
        plans=tuple({"step": step, "mode": plan.label, "reason": plan.reason} for step, plan in engine.plans),
        dropped_messages=coordinator.malformed + coordinator.lost,
        denied_connections=denied,
        repeated_messages=coordinator.repeated,
    )
