"""The run log in a training process: a queue, and a thread that writes it to files; `dispatch` has them sent.

It must not slow training down. A call appends to a bounded queue and returns; the thread writes twice per second;
MLflow, whose import alone holds the interpreter lock for 1.6 s, runs in a separate process of the lowest priority. Any
failure, such as a full disk or a hanging server, loses only log entries, which are counted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.plan.plan import Plan
from scheduler.records import StepReport
from scheduler.transmission.decision import Decision
from star_hvd.run_log import dispatch, layout
from star_hvd.run_log.spool import SpoolWriter, line_of
from star_hvd.run_log.windows import PerRankReadings
from star_hvd.threads import supervised

if TYPE_CHECKING:
    from scheduler.policy.switch_outcome import SwitchOutcome

__all__ = ["RunLog"]

logger = logging.getLogger("star_hvd")

_QUEUE = 4096  # Events kept while writing fails: several minutes of steps.
_MOST_HELD_BYTES = 16 << 20  # Likewise, per file; a window of hundreds of ranks has 50 kB.
_PIECE_BYTES = 1 << 20  # Written at a time: joining and encoding hold the interpreter lock for about a millisecond.
_WRITE_INTERVAL_S = 0.5
_LONGEST_RETRY_S = 30.0  # Between two attempts to write while the disk is full.
_WINDOW_INTERVAL_S = 1.0
_YIELD_AFTER = 16  # Events (10 to 20 us each) after which the thread releases the interpreter lock.
_MAX_BYTES = 256 << 20  # Limit of one file; its entries are thinned out after 0.4 million steps.
_END_BYTES = 1 << 20  # Reserved for the end event of a full file.

_Event = Callable[[], dict[str, Any]]


class RunLog:
    """One rank's part of a job's log. All methods but `close` return within microseconds and never raise.

    They may be called from any thread. If a rank is late, frozen or dead, only its own entries are missing.

    As a file fills up, fewer and fewer steps and windows are kept, so that plans, curves and the end of a long job fit.

    Args:
        directory: The run's folder (`layout.run_directory`), with the same name on all ranks.
        rank: This rank. Every rank writes its own file; rank 0 also writes the job's file and has the run sent.
        world_size: Number of ranks.
        job: Parameters and environment of the job, nested mappings of plain values; rank 0's are used. See
            `facts.environment`.
        enabled: False makes every method do nothing.
        ship: Whether rank 0 has the run sent to MLflow (`dispatch`), rather than `star-hvd sync-logs` later.
        background: Whether a thread writes; otherwise only `flush` and `close` do.
        clock: Returns seconds; used to date events, to limit windows to one per second and to wait after a failure.
        most_queued: Events kept while they are not written; of each file at most 16 MiB.
        max_bytes: Size of a file at which no more events find room.
        end_bytes: Additional room for the end event of a full file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        job: Mapping[str, Any] | None = None,
        enabled: bool = True,
        ship: bool = True,
        background: bool = True,
        clock: Callable[[], float] = time.monotonic,
        most_queued: int = _QUEUE,
        max_bytes: int = _MAX_BYTES,
        end_bytes: int = _END_BYTES,
    ) -> None:
        self.directory = directory
        self.dropped = 0
        self.thinned = 0
        self.enabled = enabled
        self._rank = rank
        self._clock = clock
        self._began_s = clock()
        self._began_unix_s = time.time()
        self._queue: deque[tuple[int, bool, str, _Event]] = deque(maxlen=most_queued)
        self._most_queued, self._max_bytes, self._end_bytes = most_queued, max_bytes, end_bytes
        self._numbers = itertools.count()
        self._expected = 0
        self._held: dict[bool, deque[str]] = {False: deque(), True: deque()}
        self._held_bytes = {False: 0, True: 0}
        self._pause_s = {False: 0.0, True: 0.0}  # After a failure, until the next attempt to write the file.
        self._retry_s = {False: 0.0, True: 0.0}
        self._files: dict[bool, SpoolWriter] = {}
        self._window_due_s = 0.0
        self._per_rank = PerRankReadings(world_size, max_bytes)
        self._ship = ship and rank == 0
        self._lock = layout.RunLock(directory)
        self._failing = False
        self._stop = threading.Event()
        self._thread = supervised(self._run, "star-run-log", critical=False) if background else None
        if enabled:
            self._begin(world_size, dict(job or {}))

    # ---- events -----------------------------------------------------------------------------------------------

    def step(self, report: StepReport) -> None:
        """Log this rank's report of one of its gradients, to the rank's file."""
        now_s = self._now_s()
        self._put(False, "step", lambda: {"kind": "step", "time_s": round(now_s, 6), **_finite(report.as_record())})

    def resources(self, readings: Any) -> None:
        """Log this rank's sample of `telemetry.resources`, to the rank's file."""
        now_s = self._now_s()
        self._put(False, "resources", lambda: {"kind": "resources", "time_s": round(now_s, 6), **_fields(readings)})

    def timeline(self, record: Mapping[str, Any]) -> None:
        """Log when the buckets of one of this rank's steps were transferred, to the rank's file."""
        now_s = self._now_s()
        self._put(False, "timeline", lambda: {"kind": "timeline", "time_s": round(now_s, 6), **record})

    def transmission(self, step: int, decision: Decision) -> None:
        """Log a decision of this rank on how something is sent: on rank 0 to the job's file, else to the rank's.

        Args:
            step: The step that ended before it.
            decision: The decision.
        """
        now_s = self._now_s()
        self._put(
            self._rank == 0,
            "transmission",
            lambda: {"kind": "transmission", "time_s": round(now_s, 6), "step": step, **decision.as_record()},
        )

    def facts(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log parameters that have become known, an optimizer's for example. Ignored on ranks other than 0.

        Args:
            values: The parameters.
            step: Their first step, if they may have had other values before.
        """
        self._job_event("facts", {"values": dict(values)} if step is None else {"step": step, "values": dict(values)})

    def window(self, values: Mapping[str, Any]) -> None:
        """Log telemetry of all ranks (`window_values`), at most once per second. Ignored on ranks other than 0.

        Of a job with many ranks most windows are logged without the readings per rank (`PerRankReadings`).
        """
        now_s = self._now_s()
        if self._rank == 0 and now_s >= self._window_due_s:
            self._window_due_s = now_s + _WINDOW_INTERVAL_S
            self._job_event("window", dict(values))

    def plan(
        self, step: int, plan: Plan, prediction: Mapping[str, Any] | None = None, time_s: float | None = None
    ) -> None:
        """Log that a plan is active from `step` on. Ignored on ranks other than 0.

        Args:
            step: Its first step.
            plan: The plan, with its reason.
            prediction: Predictions behind the decision, by candidate.
            time_s: When it became active, seconds since this log was created; by default now. Earlier times become 0.
        """
        at_s = self._now_s() if time_s is None else max(0.0, time_s)

        def event() -> dict[str, Any]:
            values: dict[str, Any] = {"step": step, "label": plan.label, "mode": plan.mode, "reason": plan.reason}
            values |= {"plan": plan.to_dict(), "prediction": dict(prediction or {})}
            return {"kind": "plan", "time_s": round(at_s, 6), **values}

        if self._rank == 0:
            self._put(True, "plan", event)

    def shares(self, step: int, plan: Plan) -> None:
        """Log other batch shares of the active plan than it was logged with. Ignored on ranks other than 0.

        Args:
            step: Their first step.
            plan: The plan, with these shares and a reason that names them.
        """
        values = {"step": step, "epoch": plan.plan_id, "batch_shares": list(plan.batch_shares)}
        self._job_event("shares", {**values, "reason": plan.reason})

    def outcome(self, outcome: SwitchOutcome) -> None:
        """Log the predicted and the measured speed of a switch. Ignored on ranks other than 0."""
        self._job_event("outcome", _finite(outcome.as_record()))

    def metric(self, name: str, value: float, step: int, time_s: float | None = None) -> None:
        """Log a point of a curve: loss, accuracy. Ignored on ranks other than 0.

        Args:
            name: Name of the curve; characters that MLflow does not accept become `_`.
            value: Its value.
            step: Global step it belongs to; negative ones become 0.
            time_s: Seconds since this log was created; by default now. Earlier times become 0.
        """
        # Readers skip events with negative numbers.
        values = {"name": str(name), "value": float(value), "step": max(0, int(step))}
        self._job_event("metric", values, None if time_s is None else max(0.0, time_s))

    def since_s(self, monotonic_s: float) -> float:
        """Convert a time of `time.monotonic()` to seconds since this log was created."""
        return monotonic_s - self._began_s

    def close(self, status: str = "FINISHED", deadline_s: float = 2.0) -> None:
        """End the log and write what is queued.

        The shipper continues independently; what it cannot send stays on disk for `star-hvd sync-logs`.

        Args:
            status: `FINISHED`, `FAILED` or `KILLED`, as in MLflow.
            deadline_s: Longest wait for the disk.
        """
        if not self._files or self._stop.is_set():
            return
        dropped = self.dropped + sum(file.dropped for file in self._files.values())
        lost = {"dropped": dropped, "thinned": self.thinned}
        self._put(False, "end", lambda: {"kind": "end", "time_s": round(self._now_s(), 6), **lost})
        self._job_event("end", {"status": status, **lost})
        self._stop.set()
        if self._thread is None:
            self._run()
        else:
            self._thread.join(max(0.05, deadline_s))
        self._lock.free()

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _job_event(self, kind: str, values: dict[str, Any], time_s: float | None = None) -> None:
        if self._rank == 0:
            at_s = round(self._now_s() if time_s is None else time_s, 6)
            self._put(True, kind, lambda: {"kind": kind, "time_s": at_s, **values})

    def _put(self, of_job: bool, kind: str, event: _Event) -> None:
        if self.enabled:  # A full queue drops its oldest entry; gaps in the numbers are counted.
            self._queue.append((next(self._numbers), of_job, kind, event))

    def _begin(self, world_size: int, job: dict[str, Any]) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            about = {
                "schema": layout.SCHEMA,
                "name": self.directory.name,
                "world_size": world_size,
                "began_unix_s": self._began_unix_s,
                "home": self._rank == 0,
                "experiment": layout.experiment_name(),  # Another shell may send the run.
            }
            layout.write_json(self.directory / layout.RUN, about, replace=self._rank == 0)
            with contextlib.suppress(OSError):  # Another user's rank on this host may have made the lock's file.
                self._lock.take()
        except OSError as error:
            logger.warning("no run log: %s cannot be written (%s); training goes on without", self.directory, error)
            self.enabled = False
            return
        self._files[False] = SpoolWriter(self.directory / f"rank{self._rank}.jsonl", self._max_bytes)
        if self._rank == 0:
            self._files[True] = SpoolWriter(self.directory / layout.EVENTS, self._max_bytes)
        self._job_event("facts", {"values": {"world_size": world_size, **job}})
        if self._thread is not None:
            self._thread.start()
        if self._ship:
            dispatch.send(self.directory)

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_INTERVAL_S):
            self.flush()
        for of_job, file in self._files.items():
            file.max_bytes += self._end_bytes
            self._pause_s[of_job] = 0.0  # There is no later attempt.
        self.flush()
        for file in self._files.values():
            file.close()

    def flush(self) -> None:
        """Write what is queued; lines that cannot be written are kept for a later time, at most `most_queued` of them.

        Called by the log's own thread or, without one, by the caller's; never by two threads at once.
        """
        taken: list[tuple[int, bool, str, _Event]] = []
        with contextlib.suppress(IndexError):
            while len(taken) < self._most_queued:
                taken.append(self._queue.popleft())
        for position, (number, of_job, kind, event) in enumerate(taken):
            self.dropped += number - self._expected if number >= self._expected else -1  # Numbers may be out of order.
            self._expected = max(self._expected, number + 1)
            self._hold(of_job, kind, event)
            if position % _YIELD_AFTER == _YIELD_AFTER - 1:
                time.sleep(0.0005)  # The training thread may be waiting for the interpreter lock.
        for of_job, held in self._held.items():
            if not held or (self._pause_s[of_job] and self._clock() < self._retry_s[of_job]):
                continue
            try:
                self._write(of_job)
            except OSError as error:
                self._note_failure(error)
                self._pause_s[of_job] = min(_LONGEST_RETRY_S, max(_WRITE_INTERVAL_S, 2.0 * self._pause_s[of_job]))
                self._retry_s[of_job] = self._clock() + self._pause_s[of_job]
                continue
            self._failing = False
            self._pause_s[of_job] = 0.0

    def _write(self, of_job: bool) -> None:
        """Write the lines held for a file in pieces; what was written is held no longer, also if the rest fails."""
        held, file = self._held[of_job], self._files[of_job]
        while held:
            piece, piece_bytes = [], 0
            for line in held:
                piece.append(line)
                piece_bytes += len(line)
                if piece_bytes >= _PIECE_BYTES:
                    break
            file.append_lines(piece)
            for _ in piece:
                self._release(of_job)

    def _release(self, of_job: bool) -> None:
        self._held_bytes[of_job] -= len(self._held[of_job].popleft())

    def _hold(self, of_job: bool, kind: str, event: _Event) -> None:
        """Keep an event's line for the next write, unless its file is too full for events of its kind.

        The oldest lines are dropped if the disk has not taken them for long.
        """
        if self._files[of_job].keeps(kind, self._held_bytes[of_job]):
            line = self._per_rank.line(event, _line) if kind == "window" else _line(event)
            held = self._held[of_job]
            held.append(line)
            self._held_bytes[of_job] += len(line)
            while len(held) > self._most_queued or (self._held_bytes[of_job] > _MOST_HELD_BYTES and len(held) > 1):
                self._release(of_job)
                self.dropped += 1
            return
        self.thinned += 1
        if self.thinned == 1:
            # The files of all ranks fill up at about the same time; one warning is enough.
            level = logging.WARNING if self._rank == 0 else logging.INFO
            text = "a file of the run log in %s gets full (limit %d MiB); from now on fewer %s entries are kept"
            logger.log(level, text, self.directory, self._max_bytes >> 20, kind)

    def _note_failure(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("the run log cannot be written for now (%s); training goes on", error)


def _line(event: _Event) -> str:
    try:
        return line_of(event())
    except Exception:
        logger.exception("an entry of the run log could not be made and is left out")
        return ""


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass, with or without slots; NaN becomes None."""
    return _finite({name: getattr(record, name) for name in record.__dataclass_fields__})


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value == value else None for name, value in values.items()}
