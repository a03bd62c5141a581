"""Elastic jobs on one machine in which ranks are killed, join or leave."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.launch import DeadlineMissed, JobResult, run_job

__all__ = ["ELASTIC_LIMIT_S", "TWO_HOSTS", "run_elastic", "two_survive"]

TRIES = 10
JOB_S, ALL_S = 400.0, 1200.0
LEAST_S = 120.0  # For another job; most of those in which Horovod does not recover end within half a minute.
ELASTIC_LIMIT_S = ALL_S + 60.0
TWO_HOSTS = "localhost:2\n127.0.0.1:2\n"
"""Two names of this machine, each for two ranks."""


def run_elastic(
    module: str,
    *args: str,
    folder: Path,
    recovered: Callable[[JobResult], bool],
    env: Mapping[str, str] | None = None,
    hosts: str = TWO_HOSTS,
) -> JobResult:
    """Run a program on "hosts" that are names of this machine; it may write others to the file `hosts` in `folder`.

    Horovod blacklists the whole host of a rank that dies, so two ranks survive. Its own recovery is unreliable: without
    this library it succeeded in two of three jobs. So jobs are repeated until one has recovered, up to a limit of their
    number and of their time.

    Args:
        module: The program.
        args: Its arguments.
        folder: For the script that names the hosts, and the file it reads.
        recovered: Whether the survivors of a job continued together.
        env: Added to the environment.
        hosts: The hosts at the start, with the ranks of each.

    Returns: the last job.
    """
    script, names = folder / "hosts.sh", folder / "hosts"
    script.write_text(f"#!/bin/sh\ncat '{names}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    options = ("--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script))
    # How long Horovod waits for a rank that does not answer, and for ranks that do not come back.
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "HOROVOD_ELASTIC_TIMEOUT": "120"}
    ranks = sum(int(host.rpartition(":")[2]) for host in hosts.split())
    end_s, left_s = time.monotonic() + ALL_S, ALL_S
    for _ in range(TRIES):
        names.write_text(hosts)
        try:
            job = run_job(
                module,
                *args,
                ranks=ranks,
                env=limits | dict(env or {}),
                timeout_s=min(JOB_S, left_s),
                horovodrun_args=options,
            )
        except DeadlineMissed as missed:
            job = missed.result
        left_s = end_s - time.monotonic()
        if recovered(job) or left_s < LEAST_S:
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
