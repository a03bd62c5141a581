"""Whether servers harm others: they avoid a host that something else uses, and leave another job's step time alone.

One machine is divided into two hosts, each with an address of its own.

`busy`: each host is a control group with a CPU quota, like a container. In each trial, processes that compute without
end run on one host, chosen at random; a job of four ranks switches to servers, which must be on the other host.

`neighbour`: each host is half of the processors, which ranks are bound to. A job of two ranks computes on the first
host. Another job, with one rank there and three on the second host, alternates between `sync`, `ps(3)` with
automatically placed servers, and `ps(3)` with its server forced onto the first host. The first job's step times are
compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.lab.command import out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.spec import write_json
from benchmarks.machine.quota import QuotaError, find_cpu_group

__all__ = ["Phase", "busy_load", "checked_ratios", "containers", "halves", "main", "median_in", "ratios"]

_LIMIT = 1.05
_HOSTS = ("127.0.0.1", "127.0.0.2")
_SETTLE_S = 6.0  # Until the load shows in the readings, which are taken once per second.
_QUOTA_CORES, _BURNERS, _PERIOD_S = 1.0, 2, 0.1  # A host's quota, its load processes, the quota's period.
_PHASES = ("sync", "placed", "forced")
_DEVICE_S = 0.02  # Emulated device time of a step of the job with servers.
_WARM_STEPS = 8  # Of the job beside the servers, before these start.
_WAIT_S = 90.0  # For servers to come into force on a heavily loaded machine.
_EXIT_FAILED, _EXIT_INVALID, _EXIT_SKIPPED = 1, 2, 77
_LEAST = (("total", 1), ("jobs", 1), ("turns", 1), ("phase_s", 0.1), ("width", 1), ("work", 0), ("deadline_s", 1))

Phase = tuple[str, float, float]  # Name, begin and end; seconds of the machine's clock.


def halves(cpus: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the processors of the two hosts.

    Raises:
        QuotaError: There is only one.
    """
    if len(cpus) < 2:
        raise QuotaError(f"two hosts need two processors; this process may use {len(cpus)}")
    ordered = tuple(sorted(cpus))
    middle = len(ordered) // 2
    return ordered[:middle], ordered[middle:]


def median_in(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the median step time inside an interval, from the end times of steps; NaN for fewer than two."""
    inside = [at for at in ends_s if begin_s <= at <= end_s]
    times = [after - before for before, after in itertools.pairwise(inside)]
    return statistics.median(times) if times else float("nan")


def ratios(ends_s: Sequence[float], phases: Sequence[Phase]) -> dict[str, list[float]]:
    """Return the step time in every phase except `sync`, over that in the preceding `sync` phase."""
    found: dict[str, list[float]] = {}
    before = float("nan")
    for name, begin_s, end_s in phases:
        middle_s = median_in(ends_s, begin_s, end_s)
        if name == "sync":
            before = middle_s
        else:
            found.setdefault(name, []).append(middle_s / before)
    return found


@contextmanager
def containers() -> Iterator[tuple[Path, ...]]:
    """Make control groups with a quota for each host; yield their folders, host by host, one per controller.

    Raises:
        QuotaError: They cannot be made here.
    """
    group, made = find_cpu_group(), []
    kinds = [group.path] if group.version == 2 else [group.path, Path(str(group.path).replace("/cpu", "/cpuacct", 1))]
    quota, period = round(1e6 * _QUOTA_CORES * _PERIOD_S), round(1e6 * _PERIOD_S)
    try:
        for host in range(len(_HOSTS)):
            for kind in kinds:
                made.append(kind / f"neighbours-{os.getpid()}-{host}")
                made[-1].mkdir()
            own = made[-len(kinds)]
            if group.version == 2:
                (own / "cpu.max").write_text(f"{quota} {period}")
            else:
                (own / "cpu.cfs_period_us").write_text(str(period))
                (own / "cpu.cfs_quota_us").write_text(str(quota))
        yield tuple(made)
    except OSError as error:
        raise QuotaError(f"cannot make a control group with a quota: {error}") from None
    finally:
        for path in made:
            with suppress(OSError):  # One of its processes is still ending.
                path.rmdir()


def _join(groups: Sequence[Path], host: int) -> None:
    """Move this process into the control group of a host."""
    count = len(groups) // len(_HOSTS)
    for path in groups[host * count : (host + 1) * count]:
        (path / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def busy_load(begin: Callable[[], None], count: int) -> Iterator[None]:
    """Run processes that call `begin` and compute without end; they end when their input closes, so with this one."""
    code = (
        "import os, sys, threading\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
        "while True: pass\n"
    )
    command = [sys.executable, "-c", code]
    made = [subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=begin) for _ in range(count)]
    try:
        yield
    finally:
        for process in made:
            assert process.stdin is not None
            process.stdin.close()
        for process in made:
            process.wait(20.0)


def _bind(host: int) -> None:
    """Bind this process to the processors of a host; call before any thread starts."""
    os.environ["STAR_HOST"] = _HOSTS[host]
    os.sched_setaffinity(0, halves(sorted(os.sched_getaffinity(0)))[host])


def _network(width: int) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 64))


class _Job:
    """One optimizer and its steps; rank 0 decides how many all ranks make."""

    def __init__(self, mode: Any, width: int) -> None:
        import torch

        import star_hvd as hvd

        self._torch, self.hvd = torch, hvd
        self.net = _network(width)
        inner = torch.optim.SGD(self.net.parameters(), lr=1e-4, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(inner, self.net.named_parameters(), mode=mode)
        self._x = torch.randn(8, 64)

    def step(self, device_s: float) -> None:
        self.optimizer.zero_grad()
        self.net(self._x).square().mean().backward()
        time.sleep(device_s)
        self.optimizer.step()

    def run_until(self, done: Any, device_s: float) -> None:
        """Train until `done()` holds on rank 0; all ranks make the same number of steps."""
        number = 0
        while True:
            self.step(device_s)
            number += 1
            if number % 8 == 0 and self.hvd.broadcast_object(bool(done()), root_rank=0):
                return

    @property
    def servers(self) -> list[int]:
        """Return the ranks that run servers now."""
        return list(self.optimizer._star.core.driver.engine.plan.servers)


def _served_by(args: argparse.Namespace) -> None:
    """Run a rank of `busy`: one optimizer with servers after the other; rank 0 moves the load."""
    rank = int(os.environ["HOROVOD_RANK"])
    os.environ["STAR_HOST"] = _HOSTS[rank // 2]
    import star_hvd as hvd

    groups = [Path(text) for text in args.groups.split(",")]
    _join(groups, rank // 2)
    dice, found = random.Random(args.seed), []
    for trial in range(args.trials):
        burnt = dice.randrange(2)
        with busy_load(lambda burnt=burnt: _join(groups, burnt), _BURNERS if rank == 0 else 0):
            if trial:
                time.sleep(_SETTLE_S)
            else:
                hvd.init()
            job = _Job("ps(3)", args.width)
            limit_s = time.monotonic() + _WAIT_S
            job.run_until(lambda job=job, at=limit_s: job.servers or time.monotonic() > at, 0.005)
            servers, enough = job.servers, time.monotonic() + 0.5
            job.run_until(lambda at=enough: time.monotonic() > at, 0.005)
            found.append({"burnt": burnt, "servers": servers, "explain": hvd.explain() if rank == 0 else ""})
            job.optimizer.close()
    if rank == 0:
        write_json(args.worker, {"trials": found})
    hvd.shutdown()


def _alternating(args: argparse.Namespace) -> None:
    """Run a rank of the job that switches to servers: rank 0 on the first host, the others on the second."""
    rank = int(os.environ["HOROVOD_RANK"])
    _bind(0 if rank == 0 else 1)
    import star_hvd as hvd
    from scheduler.plan.plan import Plan

    hvd.init()
    phases, servers = [], {}
    for _ in range(args.turns):
        for name in _PHASES[: 2 if args.placed_only else 3]:
            mode: Any = {"sync": "sync", "placed": "ps(3)", "forced": Plan.ps(4, 3, servers=(0,))}[name]
            job = _Job(mode, args.width)
            limit_s = time.monotonic() + _WAIT_S
            job.run_until(lambda job=job, at=limit_s, name=name: name == "sync" or job.servers
                          or time.monotonic() > at, _DEVICE_S)
            begin_s = time.monotonic() + 1.0
            job.run_until(lambda at=begin_s: time.monotonic() > at + args.phase_s, _DEVICE_S)
            phases.append((name, begin_s, time.monotonic()))
            servers.setdefault(name, []).append({"ranks": job.servers, "explain": hvd.explain() if rank == 0 else ""})
            job.optimizer.close()
    if rank == 0:
        write_json(args.worker, {"phases": phases, "servers": servers})
    hvd.shutdown()


def _steady(args: argparse.Namespace) -> None:
    """Run a rank of the job that must not get slower: train on the first host until the file `stop` exists."""
    _bind(0)
    import torch

    import star_hvd as hvd

    hvd.init()
    job, ends_s = _Job("sync", 512), []
    x = torch.randn(512, 512)
    while True:
        for _ in range(args.work):
            x = torch.tanh(x @ x)
        job.step(0.0)
        ends_s.append(time.monotonic())
        if len(ends_s) == _WARM_STEPS and hvd.rank() == 0:
            args.worker.with_suffix(".begun").touch()
        if len(ends_s) % 8 == 0 and hvd.broadcast_object(args.worker.with_suffix(".stop").exists(), root_rank=0):
            break
    if hvd.rank() == 0:
        write_json(args.worker, {"ends_s": ends_s})
    hvd.shutdown()


_ROLES = {"busy": _served_by, "guest": _alternating, "steady": _steady}


def _run(role: str, ranks: int, out: Path, args: argparse.Namespace, **more: object) -> dict[str, Any]:
    given = ["--worker", str(out), "--role", role, "--width", str(args.width), "--phase-s", str(args.phase_s)]
    given += ["--turns", str(args.turns), "--work", str(args.work), *(["--placed-only"] if args.placed_only else [])]
    for name, value in more.items():
        given += [f"--{name}", str(value)]
    folder = out.parent / role
    folder.mkdir(exist_ok=True)
    limits = {"deadline_s": args.deadline_s, "stall_s": args.deadline_s}
    run_job(horovodrun_command(ranks, "benchmarks.neighbours", *given), folder, on_progress=lambda _: None, **limits)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _measure_busy(args: argparse.Namespace) -> dict[str, Any]:
    """Run trials of several jobs; in the first trial of each, the load starts before the job."""
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="neighbours-") as folder, containers() as groups:
        for seed in range(args.jobs):
            most = -(-args.total // args.jobs)
            out, places = Path(folder) / f"busy{seed}.json", ",".join(map(str, groups))
            trials += _run("busy", 4, out, args, trials=most, seed=seed, groups=places)["trials"]
    right = sum(bool(one["servers"]) and all(rank // 2 != one["burnt"] for rank in one["servers"]) for one in trials)
    return {"trials": trials, "avoided": right, "of": len(trials)}


def checked_ratios(ends_s: Sequence[float], guest: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return `ratios`, if all of them are of servers beside a job that makes steps.

    Args:
        ends_s: When the other job's steps ended.
        guest: What the job with servers wrote: `phases`, and `servers` of each by its name.

    Raises:
        JobFailed: Servers were not in force in a phase, or the other job made too few steps in one.
    """
    for name, found in guest["servers"].items():
        if name != "sync" and (missing := sum(not one["ranks"] for one in found)):
            raise JobFailed(f"no servers came into force in {missing} of {len(found)} phases '{name}'")
    values = ratios(ends_s, guest["phases"])
    for name, found in values.items():
        if not all(map(math.isfinite, found)):
            raise JobFailed(f"the other job made too few steps to compare phases '{name}': {found}; raise --phase-s")
    return values


def _await_steps(steady: Path, thread: threading.Thread, deadline_s: float) -> None:
    """Wait until the steady job makes steps, or has failed."""
    limit_s = time.monotonic() + deadline_s
    while thread.is_alive() and not steady.with_suffix(".begun").exists():
        if time.monotonic() > limit_s:
            raise JobFailed(f"the job beside the servers made no step in {deadline_s:g} s")
        time.sleep(0.1)


def _measure_neighbour(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="neighbours-") as folder:
        steady, failed = Path(folder) / "steady.json", []
        longer = argparse.Namespace(**{**vars(args), "deadline_s": 2.0 * args.deadline_s})  # It starts first.

        def run() -> None:
            try:
                _run("steady", 2, steady, longer)
            except JobFailed as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            _await_steps(steady, thread, args.deadline_s)
            if failed:
                raise failed[0]
            guest = _run("guest", 4, Path(folder) / "guest.json", args)
        finally:
            steady.with_suffix(".stop").touch()
            thread.join(args.deadline_s)
        if failed:
            raise failed[0]
        ends_s = json.loads(steady.read_text(encoding="utf-8"))["ends_s"]
    found = checked_ratios(ends_s, guest)
    steps = {name: median_in(ends_s, begin, end) for name, begin, end in guest["phases"]}
    return {"ratios": found, "ratio": {name: statistics.median(values) for name, values in found.items()},
            "step_s": steps, "servers": guest["servers"]}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if servers harmed others or a job failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("busy", "neighbour"), help="one of the two measurements")
    parser.add_argument("--total", type=int, default=20, help="trials of `busy`")
    parser.add_argument("--jobs", type=int, default=4, help="jobs of `busy`, which share the trials")
    parser.add_argument("--turns", type=int, default=3, help="of `neighbour`: times each phase is measured")
    parser.add_argument("--phase-s", type=float, default=6.0, help="length of a phase")
    parser.add_argument("--width", type=int, default=4096, help="of the network with servers, 516 bytes each")
    parser.add_argument("--work", type=int, default=4, help="products of 512 x 512 matrices in a neighbour's step")
    parser.add_argument("--placed-only", action="store_true", help="leave out the phase with a forced server")
    parser.add_argument("--deadline-s", type=float, default=400.0, help="of a job")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    for name in ("--worker", "--role", "--groups", "--trials", "--seed"):
        kind: Any = {"--worker": Path, "--role": str, "--groups": str}.get(name, int)
        parser.add_argument(name, type=kind, default={"--trials": 5, "--seed": 0}.get(name), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        _ROLES[args.role](args)
        return 0
    if (problem := out_of_range(args, _LEAST)) is not None:
        say_error(problem)
        return _EXIT_INVALID
    found: dict[str, Any] = {"schema": 1, "cores": len(os.sched_getaffinity(0)), "limit": _LIMIT}
    try:
        if args.only != "neighbour":
            found["busy"] = busy = _measure_busy(args)
            print(f"a busy host: servers avoided it {busy['avoided']} of {busy['of']} times")
        if args.only != "busy":
            found["neighbour"] = near = _measure_neighbour(args)
            for name, value in near["ratio"].items():
                print(f"another job's step time, servers {name}: {value:.3f} x that before ({near['ratios'][name]})")
    except QuotaError as error:
        print(f"skipped: {error}")
        return _EXIT_SKIPPED
    except JobFailed as error:
        print(f"error: {error}")
        return _EXIT_FAILED
    if args.json is not None:
        write_json(args.json, found)
    wrong = "busy" in found and found["busy"]["avoided"] < found["busy"]["of"]
    return _EXIT_FAILED if wrong or found.get("neighbour", {}).get("ratio", {}).get("placed", 1.0) > _LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
