"""Elastic jobs on one machine in which ranks are killed."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.launch import DeadlineMissed, JobResult, run_job

__all__ = ["ELASTIC_LIMIT_S", "run_elastic", "two_survive"]

TRIES = 3
JOB_S = 400.0
ELASTIC_LIMIT_S = TRIES * JOB_S + 60.0
RANKS = 4


def run_elastic(
    module: str, *args: str, folder: Path, recovered: Callable[[JobResult], bool], env: Mapping[str, str] | None = None
) -> JobResult:
    """Run a program on two "hosts" of two ranks each, which are two names of this machine.

    Horovod blacklists the whole host of a rank that dies, so two ranks survive. Its own recovery is unreliable: without
    this library it succeeded in two of three jobs. So jobs are repeated until one has recovered, up to a limit.

    Args:
        module: The program.
        args: Its arguments.
        folder: For the script that names the hosts.
        recovered: Whether the survivors of a job continued together.
        env: Added to the environment.

    Returns: the last job.
    """
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    options = ("--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script))
    # How long Horovod waits for a rank that does not answer, and for ranks that do not come back.
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20", "HOROVOD_ELASTIC_TIMEOUT": "120"}
    for _ in range(TRIES):
        try:
            job = run_job(
                module, *args, ranks=RANKS, env=limits | dict(env or {}), timeout_s=JOB_S, horovodrun_args=options
            )
        except DeadlineMissed as missed:
            job = missed.result
        if recovered(job):
            break
    return job


def two_survive(notes: Path) -> Callable[[JobResult], bool]:
    """Return a predicate for `run_elastic`: whether two ranks have results; files of a failed job are removed.

    Args:
        notes: Folder that the ranks write to; created here.
    """
    notes.mkdir()

    def recovered(job: JobResult) -> bool:
        done = sum(map(bool, job.results)) == 2
        if not done:
            shutil.rmtree(notes)
            notes.mkdir()
        return done

    return recovered
