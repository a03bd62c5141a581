"""Starts a job with one or more ranks per network namespace, as `horovodrun --gloo` does on hosts.

`horovodrun` reaches other hosts by ssh; a namespace is entered by `ip netns exec`. Everything else is Horovod's own
launcher: rendezvous server, environment of the ranks, end of all ranks at the first error.

`python -m benchmarks.machine.netns_launch PLAN COMMAND...`, where PLAN is a file written by `write_plan`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.machine.netns import INTERFACE, Host, Network

__all__ = ["main", "netns_command", "write_plan"]

Outcome = tuple[int, float]


def write_plan(path: Path, network: Network, each: int = 1) -> None:
    """Write the launcher's plan: the namespaces, and the number of ranks in each."""
    plan = {"each": each, "gateway": network.gateway, "hosts": [dataclasses.asdict(host) for host in network.hosts]}
    path.write_text(json.dumps(plan), encoding="utf-8")


def netns_command(
    plan: Path, module: str, *arguments: str, start: Sequence[str] = (sys.executable, "-m")
) -> list[str]:
    """Return the command that runs `python -m module arguments` in the namespaces of the plan.

    Args:
        plan: The plan's file.
        module: The program of every rank.
        arguments: Its arguments.
        start: The words before the module.
    """
    return [sys.executable, "-m", "benchmarks.machine.netns_launch", str(plan), *start, module, *arguments]


def _executor(hosts: Sequence[Host]) -> Callable[[str, Any, list[threading.Event]], Outcome]:
    """Return the function that Horovod's launcher calls, on a thread per rank, to run a rank's command."""
    from horovod.runner.common.util import safe_shell_exec

    failed, named = threading.Event(), {host.name: host for host in hosts}

    def execute(command: str, slot: Any, events: list[threading.Event]) -> Outcome:
        host = named[slot.hostname]
        inside = f"ip netns exec {host.namespace} env STAR_HOST={host.address} {command}"
        code = int(safe_shell_exec.execute(inside, index=slot.rank, events=[*events, failed]))
        if code != 0:
            failed.set()
        return code, time.time()

    return execute


def main(argv: list[str]) -> int:
    """Run the command on all hosts of the plan; exit status 1 if a rank failed."""
    from horovod.runner.gloo_run import launch_gloo

    plan, command = json.loads(Path(argv[0]).read_text(encoding="utf-8")), argv[1:]
    hosts = [Host(**values) for values in plan["hosts"]]
    settings = SimpleNamespace(
        output_filename=None,
        verbose=0,
        num_proc=plan["each"] * len(hosts),
        hosts=",".join(f"{host.name}:{plan['each']}" for host in hosts),
    )
    try:
        launch_gloo(command, _executor(hosts), settings, [INTERFACE], dict(os.environ), plan["gateway"])
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
