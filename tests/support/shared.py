"""Many scenarios in one job, each isolated as if it had its own job: one that ends the job costs no other scenario.

Starting a job takes longer than most scenarios, so scenarios without side effects run one after another. The program
reports `{"facts": {scenario: ...}, "running": scenario}` (see `launch.write_result`) and takes the names of the
scenarios as its arguments. If a job ends early, another one runs the scenarios after the one at which it ended; not if
it had to be ended because it hung. How long a job may take goes by the number of its scenarios.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from tests.support.launch import JOB_LIMIT_S, DeadlineMissed, JobResult, run_job

__all__ = ["SHARED_LIMIT_S", "facts_of"]

SCENARIO_S, MOST_S = 60.0, 1200.0  # For each scenario of a job, on the busiest machine; for all of a job.
ALL_S = 1400.0  # For the jobs of one group of scenarios, of which the first test waits for all.
SHARED_LIMIT_S = ALL_S + 60.0
"""The time limit of such a test; below the `faulthandler_timeout` of pyproject.toml."""


def facts_of(module: str, names: tuple[str, ...], name: str, *, ranks: int, noted: str = "") -> list[dict[str, Any]]:
    """Return each rank's facts about a scenario, from the job that runs `names`.

    Args:
        module: The program.
        names: Scenarios that share a job.
        name: The requested scenario.
        ranks: Number of ranks.
        noted: Output lines that contain this are part of the error, beside the library's.

    Raises:
        AssertionError: The job ended in this scenario.
    """
    for job in _jobs(module, names, ranks):
        facts = [result.get("facts", {}).get(name) for result in job.results]
        if all(facts):
            return facts  # type: ignore[return-value]
        if name in _running(job):
            lines = [line for line in job.output.splitlines() if "/star_hvd/" in line or (noted and noted in line)]
            where = "\n".join(lines)[-12000:]
            raise AssertionError(f"the job ended during {_running(job)}: {job.stuck}\n{where}\n{job.tail}")
    raise AssertionError(f"no job came to {name}:\n{job.tail}")


def _running(job: JobResult) -> list[str]:
    """Return the scenarios in which ranks were when the job ended; the last one also if the job ended after it."""
    return [result.get("running", "") for result in job.results]


def _limit_s(scenarios: int, end_s: float) -> float:
    """Return how long a job with so many scenarios may take, where all of its group end by `end_s`."""
    return min(max(JOB_LIMIT_S, SCENARIO_S * scenarios), MOST_S, max(1.0, end_s - time.monotonic()))


@functools.cache
def _jobs(module: str, names: tuple[str, ...], ranks: int) -> list[JobResult]:
    jobs: list[JobResult] = []
    left, end_s = names, time.monotonic() + ALL_S
    while left:
        try:
            jobs.append(run_job(module, *left, ranks=ranks, timeout_s=_limit_s(len(left), end_s)))
        except DeadlineMissed as missed:
            jobs.append(missed.result)
            break  # Each further job that hangs would take as long.
        ended = [name for name in _running(jobs[-1]) if name]
        if not ended:
            break
        left = left[max(left.index(name) for name in ended) + 1 :]
    return jobs
