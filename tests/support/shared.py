"""Many scenarios in one job, each isolated as if it had its own job: one that ends the job costs no other scenario.

Starting a job takes longer than most scenarios, so scenarios without side effects run one after another. The program
reports `{"facts": {scenario: ...}, "running": scenario}` (see `launch.write_result`) and takes the names of the
scenarios as its arguments. If a job ends early, another one runs the scenarios after the one at which it ended; not if
it had to be ended because it hung.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.support.launch import DeadlineMissed, JobResult, run_job

__all__ = ["facts_of"]


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
            raise AssertionError(f"the job ended during {_running(job)}:\n{where}\n{job.tail}")
    raise AssertionError(f"no job came to {name}:\n{job.tail}")


def _running(job: JobResult) -> list[str]:
    """Return the scenarios in which ranks were when the job ended; the last one also if the job ended after it."""
    return [result.get("running", "") for result in job.results]


@functools.cache
def _jobs(module: str, names: tuple[str, ...], ranks: int) -> list[JobResult]:
    jobs: list[JobResult] = []
    left = names
    while left:
        try:
            jobs.append(run_job(module, *left, ranks=ranks))
        except DeadlineMissed as missed:
            jobs.append(missed.result)
            break  # Each further job that hangs would take as long.
        ended = [name for name in _running(jobs[-1]) if name]
        if not ended:
            break
        left = left[max(left.index(name) for name in ended) + 1 :]
    return jobs
