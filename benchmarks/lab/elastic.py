"""Runs the trainings of scenario `killed-worker`: one elastic job per variant and seed."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.spec import RunRecord, RunSpec

__all__ = ["run_elastic_jobs"]

# Two names of one machine: the launcher blacklists a host on which a rank died, and the other one survives.
HOSTS = ("localhost", "127.0.0.1")
# Seconds until a collective with a dead rank fails, and until the ranks of a new world must have connected.
ENVIRONMENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "12"}
ATTEMPTS = 3


def run_elastic_jobs(
    spec: RunSpec,
    run_dir: Path,
    *,
    deadline_s: float,
    stall_s: float,
    on_progress: Callable[[dict[str, Any]], None],
) -> dict[str, int]:
    """Run all jobs, one after another.

    Horovod's own recovery does not always succeed, so a training whose job fails is retried up to two times.

    Args:
        spec: What to train.
        run_dir: Folder of the run, with the spec in it.
        deadline_s: Limit for all jobs together.
        stall_s: Longest time without a line of output.
        on_progress: Called with the fields of every progress line.

    Returns:
        By `RunRecord.stem` of a training that was retried, how many of its attempts failed.

    Raises:
        JobFailed: A training failed every time.
    """
    script = run_dir / "hosts.sh"
    first = spec.ranks // 2
    script.write_text(f"#!/bin/sh\necho {HOSTS[0]}:{first}\necho {HOSTS[1]}:{spec.ranks - first}\n", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    options = ["--min-np", str(first), "--max-np", str(spec.ranks), "--host-discovery-script", str(script)]
    limit_s = time.monotonic() + deadline_s
    failed: dict[str, int] = {}
    for seed in spec.seeds:
        for variant in spec.trained:
            arguments = (str(run_dir), variant, str(seed))
            command = horovodrun_command(spec.ranks, "benchmarks.lab.elastic_worker", *arguments, options=options)
            for attempt in range(ATTEMPTS):
                try:
                    run_job(
                        command,
                        run_dir,
                        deadline_s=max(1.0, limit_s - time.monotonic()),
                        stall_s=stall_s,
                        on_progress=on_progress,
                        added_environment=ENVIRONMENT,
                    )
                    break
                except JobFailed:
                    if attempt + 1 == ATTEMPTS:
                        raise
                    failed[RunRecord(variant=variant, seed=seed).stem] = attempt + 1
    return failed
