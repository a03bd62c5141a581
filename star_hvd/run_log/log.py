"""What a training process writes: a queue, and a thread that empties it into files; `dispatch` has them sent.

Training must not notice. A call appends to a bounded queue and returns; the thread writes a few times per second;
MLflow, whose import alone holds the interpreter for 1.6 s, lives in a process of its own at the lowest priority.
Whatever breaks, a full disk or a server that hangs, costs log lines, which are counted, and nothing else.
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
from star_hvd.run_log import dispatch, layout
from star_hvd.run_log.spool import SpoolWriter, line_of
from star_hvd.threads import supervised

if TYPE_CHECKING:
    from scheduler.policy.switch_outcome import SwitchOutcome

__all__ = ["RunLog"]

logger = logging.getLogger("star_hvd")

_QUEUE = 4096  # Events kept while the disk refuses them: minutes of steps.
_WRITE_INTERVAL_S = 0.5
_WINDOW_INTERVAL_S = 1.0
_GIVE_WAY_AFTER = 16  # Events, of 10 to 20 us each.
_MAX_BYTES = 256 << 20  # Of one file: it thins out after 0.4 million steps.
_END_BYTES = 1 << 20  # Room for the end of a file that is full.

_Event = Callable[[], dict[str, Any]]


class RunLog:
    """The log of one job, as one rank sees it. All methods but `close` return within microseconds and never raise.

    They may be called from any thread. A rank that is late, frozen or dead costs only its own lines.

    A file that gets full has fewer and fewer steps and windows, so that a long job has its plans, curves and end there.

    Args:
        directory: The run's folder (`layout.run_directory`), of the same name on all ranks.
        rank: This rank. Every rank writes its own file; rank 0 also writes the job's and has the run sent.
        world_size: Number of ranks.
        job: Parameters and environment of the job, nested mappings of plain values; rank 0's counts. See
            `facts.environment`.
        enabled: False makes every method do nothing.
        ship: Whether rank 0 has the run sent to MLflow (`dispatch`); else `star-hvd sync-logs` does that later.
        background: Whether a thread writes; else only `flush` and `close` do.
        clock: Seconds, by which events are dated and windows thinned.
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
    ) -> None:
        self.directory = directory
        self.dropped = 0
        self.thinned = 0
        self.enabled = enabled
        self._rank = rank
        self._clock = clock
        self._began_s = clock()
        self._began_unix_s = time.time()
        self._queue: deque[tuple[int, bool, str, _Event]] = deque(maxlen=_QUEUE)
        self._numbers = itertools.count()
        self._expected = 0
        self._held: dict[bool, list[str]] = {False: [], True: []}
        self._held_bytes = {False: 0, True: 0}
        self._files: dict[bool, SpoolWriter] = {}
        self._window_due_s = 0.0
        self._ship = ship and rank == 0
        self._lock = layout.RunLock(directory)
        self._failing = False
        self._stop = threading.Event()
        self._thread = supervised(self._run, "star-run-log", critical=False) if background else None
        if enabled:
            self._begin(world_size, dict(job or {}))

    # ---- what happened ----------------------------------------------------------------------------------------

    def step(self, report: StepReport) -> None:
        """A rank's report of one gradient of its own; goes to the rank's file."""
        now_s = self._now_s()
        self._put(False, "step", lambda: {"kind": "step", "time_s": round(now_s, 6), **_finite(report.as_record())})

    def resources(self, readings: Any) -> None:
        """What `telemetry.resources` read on this rank; goes to the rank's file."""
        now_s = self._now_s()
        self._put(False, "resources", lambda: {"kind": "resources", "time_s": round(now_s, 6), **_fields(readings)})

    def facts(self, values: Mapping[str, Any]) -> None:
        """Parameters known only now, an optimizer's for example. Rank 0 only; ignored elsewhere."""
        self._job_event("facts", {"values": dict(values)})

    def window(self, values: Mapping[str, Any]) -> None:
        """Telemetry of all ranks (`windows.window_values`). At most one per second is kept. Rank 0 only."""
        now_s = self._now_s()
        if self._rank == 0 and now_s >= self._window_due_s:
            self._window_due_s = now_s + _WINDOW_INTERVAL_S
            self._job_event("window", dict(values))

    def plan(self, step: int, plan: Plan, prediction: Mapping[str, Any] | None = None) -> None:
        """A plan is in force from `step` on.

        Args:
            step: Its first step.
            plan: The plan, with its reason.
            prediction: What the decision rested on: the predicted seconds per step of candidates, for example.
        """
        now_s = self._now_s()

        def event() -> dict[str, Any]:
            values: dict[str, Any] = {"step": step, "label": plan.label, "mode": plan.mode, "reason": plan.reason}
            values |= {"plan": plan.to_dict(), "prediction": dict(prediction or {})}
            return {"kind": "plan", "time_s": round(now_s, 6), **values}

        if self._rank == 0:
            self._put(True, "plan", event)

    def outcome(self, outcome: SwitchOutcome) -> None:
        """What became of a switch, against what was predicted of it. Rank 0 only."""
        self._job_event("outcome", _finite(outcome.as_record()))

    def metric(self, name: str, value: float, step: int, time_s: float | None = None) -> None:
        """One point of a curve: loss, accuracy. Rank 0 only.

        Args:
            name: Of the curve; characters MLflow does not take become `_`.
            value: Its value.
            step: Global step it belongs to.
            time_s: Seconds since this log was made, where it was not just now.
        """
        values = {"name": str(name), "value": float(value), "step": int(step)}
        self._job_event("metric", values, time_s)

    def since_s(self, monotonic_s: float) -> float:
        """A time of `time.monotonic()` as seconds since this log was made."""
        return monotonic_s - self._began_s

    def close(self, status: str = "FINISHED", deadline_s: float = 2.0) -> None:
        """End the log: write what is queued.

        The sender goes on by itself; what it cannot send stays for `star-hvd sync-logs`.

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

    # ---- inside -----------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _job_event(self, kind: str, values: dict[str, Any], time_s: float | None = None) -> None:
        if self._rank == 0:
            at_s = round(self._now_s() if time_s is None else time_s, 6)
            self._put(True, kind, lambda: {"kind": kind, "time_s": at_s, **values})

    def _put(self, of_job: bool, kind: str, event: _Event) -> None:
        if self.enabled:  # A full queue loses its oldest entry; the numbers tell how many it lost.
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
            }
            layout.write_json(self.directory / layout.RUN, about, replace=self._rank == 0)
            self._lock.take()
        except OSError as error:
            logger.warning("no run log: %s cannot be written (%s); training goes on without", self.directory, error)
            self.enabled = False
            return
        self._files[False] = SpoolWriter(self.directory / f"rank{self._rank}.jsonl", _MAX_BYTES)
        if self._rank == 0:
            self._files[True] = SpoolWriter(self.directory / layout.EVENTS, _MAX_BYTES)
        self._job_event("facts", {"values": {"world_size": world_size, **job}})
        if self._thread is not None:
            self._thread.start()
        if self._ship:
            dispatch.send(self.directory)

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_INTERVAL_S):
            self.flush()
        for file in self._files.values():
            file.max_bytes += _END_BYTES
        self.flush()
        for file in self._files.values():
            file.close()

    def flush(self) -> None:
        """Write what is queued; what the disk refuses is held for the next time, as far as there is room.

        Called by the log's own thread, or where there is none by the caller's, one at a time.
        """
        taken: list[tuple[int, bool, str, _Event]] = []
        with contextlib.suppress(IndexError):
            while len(taken) < _QUEUE:
                taken.append(self._queue.popleft())
        for position, (number, of_job, kind, event) in enumerate(taken):
            self.dropped += number - self._expected if number >= self._expected else -1  # Threads may overtake.
            self._expected = max(self._expected, number + 1)
            self._hold(of_job, kind, event)
            if position % _GIVE_WAY_AFTER == _GIVE_WAY_AFTER - 1:
                time.sleep(0.0005)  # The training thread may be waiting for the interpreter.
        for of_job, held in self._held.items():
            if len(held) > _QUEUE:
                self.dropped += len(held) - _QUEUE
                del held[:-_QUEUE]
            try:
                if held:
                    self._files[of_job].append_lines(held)
            except OSError as error:
                self._note_failure(error)
                continue
            self._failing = self._failing and not held
            held.clear()
            self._held_bytes[of_job] = 0

    def _hold(self, of_job: bool, kind: str, event: _Event) -> None:
        """Make an event a line for the next write, unless its file is too full for one of its kind."""
        if self._files[of_job].keeps(kind, self._held_bytes[of_job]):
            line = _line(event)
            self._held[of_job].append(line)
            self._held_bytes[of_job] += len(line)
            return
        self.thinned += 1
        if self.thinned == 1:
            # Of a job's many ranks, whose files fill up at about the same time, one says it.
            level = logging.WARNING if self._rank == 0 else logging.INFO
            text = "a file of the run log in %s gets full (it takes %d MiB); from now on fewer %s entries are kept"
            logger.log(level, text, self.directory, _MAX_BYTES >> 20, kind)

    def _note_failure(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("the run log cannot be written for now (%s); training goes on", error)


def _line(event: _Event) -> str:
    try:
        return line_of(event())
    except Exception:
        logger.exception("an entry of the run log is left out")
        return ""


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a flat dataclass, those with slots too; null where a number is none."""
    return _finite({name: getattr(record, name) for name in record.__dataclass_fields__})


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value == value else None for name, value in values.items()}
