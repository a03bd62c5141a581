"""Many scenarios in one job, each as if it had a job of its own: what ends the job costs no other scenario.

Starting a job takes longer than most scenarios, so those that leave nothing behind run one after another. The program
reports `{"facts": {scenario: ...}, "running": scenario}` (see `launch.write_result`) and takes the names of the
scenarios as its arguments. A job that ends early is followed by one with the scenarios behind that at which it ended.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.support.launch import DeadlineMissed, JobResult, run_job

__all__ = ["facts_of"]


def facts_of(module: str, names: tuple[str, ...], name: str, *, ranks: int, noted: str = "") -> list[dict[str, Any]]:
    """What the ranks found out in a scenario, of the job that runs `names`.

    Args:
        module: The program.
        names: Scenarios that share a job.
        name: The one that is asked for.
        ranks: Number of ranks.
        noted: Lines with this in them are part of the error, beside those of the library.

    Raises:
        AssertionError: The job ended in it.
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
    """Where the ranks were when the job ended; the last scenario too where it ended behind it."""
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
        ended = [name for name in _running(jobs[-1]) if name]
        if not ended:
            break
        left = left[max(left.index(name) for name in ended) + 1 :]
    return jobs
