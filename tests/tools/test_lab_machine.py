"""The straggler laboratory and its machine: networks, freezes, quotas, files, a driver whose job dies."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.lab.launch import REPOSITORY, JobFailed, run_job
from benchmarks.lab.measures import (
    summarize,
)
from benchmarks.lab.spec import RunSpec, write_json
from benchmarks.lab.training import Snapshots
from benchmarks.machine.freezer import Freezer
from benchmarks.machine.killed import Watch
from benchmarks.machine.link_rates import LinkRates, ask_for_rate
from benchmarks.machine.netns import Network, NetworkError, burst_bytes, hosts_text, stale_names
from benchmarks.machine.quota import CpuGroup, CpuQuota, QuotaError, find_cpu_group, own_group
from benchmarks.plot import member_strip, modes_phrase, plot
from tests.tools.lab_runs import some_records, spec_of


class TestNetwork:
    """What can be said of namespaces without making any."""

    def test_names_and_addresses_differ(self) -> None:
        network = Network(4, 1e8)
        for values in zip(*(dataclasses.astuple(host) for host in network.hosts), strict=True):
            assert len(set(values)) == 4
        assert all(len(name) <= 15 for host in network.hosts for name in (host.outer, network.bridge))

    def test_hosts_text(self) -> None:
        hosts = Network(2, 1e8).hosts
        lines = hosts_text(hosts[1], hosts).splitlines()
        assert lines[0] == "127.0.0.1 localhost"
        assert lines[1] == f"{hosts[1].address} {socket.gethostname()}"
        assert lines[2:] == [f"{host.address} {host.name}" for host in hosts]

    def test_stale_names_are_those_of_drivers_that_are_gone(self) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        ours, theirs = f"slab{os.getpid():x}-0", f"slab{gone.pid:x}-0"
        names = [ours, theirs, f"slab{gone.pid:x}", f"slab{gone.pid:x}v3", "slab", "eth0", "other1-0"]
        assert stale_names(names) == [theirs, f"slab{gone.pid:x}", f"slab{gone.pid:x}v3"]

    def test_burst_holds_a_large_packet_and_two_refills(self) -> None:
        assert burst_bytes(1e6) == 64 * 1024
        assert burst_bytes(1e9) == 1_000_000

    def test_a_rate_nobody_sets_ends_the_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.machine.link_rates.ASK_DEADLINE_S", 0.1)
        with pytest.raises(NetworkError, match="nobody rated a link"):
            ask_for_rate(tmp_path, 1e6)

    def test_wishes_for_a_rate_are_answered(self, tmp_path: Path) -> None:
        network = _Rates()
        with LinkRates(network, tmp_path):  # type: ignore[arg-type]
            ask_for_rate(tmp_path, 2e7)
            with pytest.raises(NetworkError, match="no such device"):
                ask_for_rate(tmp_path, 3e7)
        assert network.set_to == [(3, 2e7), (3, 3e7)]


class _Rates:
    """In place of a `Network`: notes what it is asked, refuses one rate."""

    hosts = (None,) * 4

    def __init__(self) -> None:
        self.set_to: list[tuple[int, float]] = []

    def set_rate(self, index: int, bits_per_s: float) -> None:
        self.set_to.append((index, bits_per_s))
        if bits_per_s == 3e7:
            raise NetworkError("no such device")


class TestFreezer:
    """Stops a process that counts, and lets it go on."""

    def test_a_process_is_stopped_and_continued(self) -> None:
        script = (
            "import time\nfrom benchmarks.machine.freezer import Freezer\nlongest = 0.0\n"
            "with Freezer(0.4, 0.6):\n"
            "    begin = last = time.monotonic()\n"
            "    while longest <= 0.3 and last - begin < 60.0:\n"
            "        time.sleep(0.01)\n        now = time.monotonic()\n"
            "        longest = max(longest, now - last)\n        last = now\n"
            "print(longest)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
        assert float(done.stdout) > 0.3

    def test_bad_times(self) -> None:
        with pytest.raises(ValueError, match="expected more than 0"):
            Freezer(2.0, 2.0)


class TestSnapshots:
    def taken(self, own: int, updates_per_batch: float, epochs: int = 2) -> Snapshots:
        """Epochs of 20 synchronous steps, in which this rank has `own` batches; the last one takes until 10 s later."""
        snapshots = Snapshots(torch.nn.Linear(1, 1), 2, active=True)
        for epoch in range(epochs):
            for batch in range(1, own + 1):
                number = epoch * own + batch
                snapshots.maybe_take(round(number * updates_per_batch), 10.0 * (epoch + batch / own), batch)
            snapshots.space_evenly(own, epoch_steps=20)
        return snapshots

    def test_a_synchronous_training_keeps_all(self) -> None:
        found = self.taken(20, 1.0)
        assert found.steps == list(range(2, 41, 2))
        assert found.times_s == pytest.approx([10.0 * step / 20 for step in found.steps])
        assert len(found.vectors) == len(found.steps)

    @pytest.mark.parametrize(("own", "updates_per_batch"), [(25, 3.2), (25, 1.0), (7, 11.4), (20, 4.0)])
    def test_other_modes_are_judged_no_oftener_per_sample(self, own: int, updates_per_batch: float) -> None:
        found = self.taken(own, updates_per_batch)
        assert len(found.times_s) == len(found.steps) == len(found.vectors) == min(20, 2 * own)
        places = [k for k in range(1, 21) if own >= 10]  # Of 20 in 20 s, each within half a batch of its own.
        assert all(abs(at - place) <= 11.0 / own for at, place in zip(found.times_s, places, strict=False))

    def test_the_end_of_the_run_is_taken_as_well(self) -> None:
        found = self.taken(25, 3.2)
        found.take(160, 20.5)
        assert found.times_s[-1] == 20.5 and len(found.times_s) == 21

    def test_an_epoch_without_own_batches_has_none(self) -> None:
        found = self.taken(25, 3.2, epochs=1)
        found.space_evenly(0, epoch_steps=20)
        assert len(found.times_s) == 10


class TestWatch:
    """What a death costs, from the steps a rank sees."""

    def test_gaps_count_from_the_death_to_the_rebuilding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 5.0, 6.0, 9.0, 20.0])
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        watch = Watch()
        watch.step(1)  # after 5 s, before the death
        watch.begin()
        watch.step(2)
        watch.step(3)
        watch.end()
        watch.step(1)  # two steps to make again
        assert (watch.recovery_s, watch.lost_steps) == (3.0, 2)


class TestPlot:
    """What the lower part of the plot is drawn from."""

    def test_strip_is_on_the_clock_of_the_curve(self) -> None:
        timeline = [
            {"step": 0, "time_s": 100.5, "members": [0, 1], "mode": "sync", "folds": 0.0},
            {"step": 1, "time_s": 101.0, "members": [0], "mode": "partial(1)", "folds": 0.0},
            {"step": 2, "time_s": 101.5, "members": [0], "mode": "partial(1)", "folds": 1.0},
        ]
        strip = member_strip({"timeline": timeline, "times_s": [1.0, 1.5], "steps": [2, 3]}, ranks=2)
        assert strip is not None
        assert strip.edges_s == pytest.approx([0.0, 0.5, 1.0, 1.5])
        assert strip.members == [[1, 1, 1], [1, 0, 0]]
        assert strip.fold_times_s == pytest.approx([1.5])
        assert strip.modes == ["sync", "partial(1)", "partial(1)"]

    def test_every_change_of_mode_is_named(self) -> None:
        modes = ["sync"] * 3 + ["partial(3)"] * 4 + ["ps(backup=1)"] * 2 + ["sync"]
        timeline = [
            {"step": step, "time_s": 1.0 + step, "members": [0], "mode": mode, "folds": 0.0}
            for step, mode in enumerate(modes)
        ]
        strip = member_strip({"timeline": timeline, "times_s": [2.0], "steps": [2]}, ranks=1)
        assert strip is not None
        assert [mode for _, _, mode in strip.changes] == ["partial(3)", "ps(backup=1)", "sync"]
        assert [(time_s, step) for time_s, step, _ in strip.changes] == [(strip.edges_s[k], k) for k in (3, 7, 9)]
        names = "partial(3) from step 3, ps(backup=1) from step 7, sync from step 9"
        assert modes_phrase(strip) == f"star_hvd: sync, {names}"

    def test_no_strip_without_a_timeline(self) -> None:
        assert member_strip(None, ranks=2) is None
        assert member_strip({"timeline": [], "times_s": [], "steps": []}, ranks=2) is None

    def test_image_is_written(self, tmp_path: Path) -> None:
        plot(summarize(spec_of(), 0.9, some_records()), tmp_path / "new" / "image.png")
        assert (tmp_path / "new" / "image.png").stat().st_size > 0


class TestFiles:
    def test_spec_survives_the_file(self, tmp_path: Path) -> None:
        write_json(tmp_path / "spec.json", dataclasses.asdict(spec_of()))
        assert RunSpec.read(tmp_path / "spec.json") == spec_of()

    def test_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "out" / "result.json"
        write_json(path, {"a": 1})
        circle: list[Any] = []
        circle.append(circle)
        with pytest.raises(ValueError, match="Circular"):
            write_json(path, circle)
        assert json.loads(path.read_text()) == {"a": 1}
        assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


class TestQuota:
    """Detection on made-up file systems."""

    def _proc(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "proc_cgroup"
        path.write_text(text)
        return path

    def test_own_group(self) -> None:
        text = "4:memory:/a\n3:cpu,cpuacct:/b\n0::/c\n"
        assert own_group(text, "cpu") == "/b"
        assert own_group(text, "") == "/c"
        assert own_group(text, "pids") is None

    @pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
    def test_version_1(self, tmp_path: Path, folder: str) -> None:
        own = tmp_path / "fs" / folder / "job"
        own.mkdir(parents=True)
        (own.parent / "cgroup.procs").touch()
        group = find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu,cpuacct:/job\n"))
        assert group == CpuGroup(version=1, path=own, home=own)

    def test_version_1_with_the_path_of_the_host(self, tmp_path: Path) -> None:
        mount = tmp_path / "fs" / "cpu"
        mount.mkdir(parents=True)
        (mount / "cgroup.procs").touch()
        group = find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu:/docker/0123\n"))
        assert group.path == mount

    def test_version_1_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "fs" / "cpu").mkdir(parents=True)
        (tmp_path / "fs" / "cpu" / "cgroup.procs").touch()
        with pytest.raises(QuotaError, match="run as root"):
            find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu:/\n"), writable=lambda _: False)

    def _version_2(self, tmp_path: Path, subtree_control: str) -> Path:
        root = tmp_path / "fs"
        (root / "slice" / "job").mkdir(parents=True)
        (root / "cgroup.controllers").write_text("cpu memory")
        for path in (root, root / "slice"):
            (path / "cgroup.subtree_control").write_text(subtree_control)
        return root

    def test_version_2(self, tmp_path: Path) -> None:
        root = self._version_2(tmp_path, "cpu memory\n")
        group = find_cpu_group(root, self._proc(tmp_path, "0::/slice/job\n"))
        assert group == CpuGroup(version=2, path=root / "slice", home=root / "slice" / "job")

    def test_version_2_without_the_cpu_controller(self, tmp_path: Path) -> None:
        root = self._version_2(tmp_path, "memory cpuset\n")
        with pytest.raises(QuotaError, match="cpu controller"):
            find_cpu_group(root, self._proc(tmp_path, "0::/slice/job\n"))

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(QuotaError, match="no control groups"):
            find_cpu_group(tmp_path, tmp_path / "absent")
        with pytest.raises(QuotaError, match="neither version 2"):
            find_cpu_group(tmp_path, self._proc(tmp_path, "1:memory:/\n"))

    def test_limit_that_cannot_be_written(self, tmp_path: Path) -> None:
        group = CpuGroup(version=2, path=tmp_path / "gone", home=tmp_path)
        with pytest.raises(QuotaError, match="cannot set a CPU quota"), CpuQuota(0.5, 0.1, group):
            pass

    def test_limit_on_a_made_up_group(self, tmp_path: Path) -> None:
        group = CpuGroup(version=2, path=tmp_path, home=tmp_path)
        for cores, period_s, written in ((0.25, 0.1, "25000 100000"), (0.05, 0.01, "500 10000")):
            with CpuQuota(cores, period_s, group):
                made = next(tmp_path.glob("straggler-*"))
                assert (made / "cpu.max").read_text() == written, "no more than was asked for"


def _job(tmp_path: Path, source: str, **options: Any) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    limits = {"deadline_s": 120.0, "stall_s": 100.0, **options}
    run_job([sys.executable, "-c", source], tmp_path, on_progress=seen.append, **limits)
    return seen


class TestDriver:
    def test_progress_lines_arrive_and_the_rest_is_logged(self, tmp_path: Path) -> None:
        seen = _job(tmp_path, "print('[0]<stdout>:@progress {\"done\": 1}'); print('hello')")
        assert seen == [{"done": 1}]
        assert "hello" in (tmp_path / "log.txt").read_text()

    def test_a_job_is_what_the_benchmark_asks_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAR_MODE", "sync")
        monkeypatch.setenv("STAR_MODEL", "cost_model")
        monkeypatch.setenv("STAR_RUN_LOG", "1")
        names = "{k: v for k, v in os.environ.items() if k.startswith('STAR_')}"
        source = f"import json, os; print('@progress', json.dumps({names}))"
        (seen,) = _job(tmp_path, source)
        assert not {"STAR_MODE", "STAR_MODEL"} & set(seen)
        assert seen["STAR_RUN_LOG"] == "0", "star_hvd alone would have its sender beside it"
        (asked,) = _job(tmp_path, source, added_environment={"STAR_RUN_LOG": "1"})
        assert asked["STAR_RUN_LOG"] == "1"

    def test_a_worker_that_dies_is_reported_with_its_last_lines(self, tmp_path: Path) -> None:
        source = "import sys; print('@progress {broken'); print('the reason'); sys.exit(3)"
        with pytest.raises(JobFailed, match=r"(?s)exit status 3.*log\.txt.*broken.*the reason"):
            _job(tmp_path, source)

    @pytest.mark.slow
    def test_a_job_that_hangs_is_ended_with_its_children(self, tmp_path: Path) -> None:
        started_s = time.monotonic()
        with pytest.raises(JobFailed, match="printed nothing for 10 s"):
            _job(tmp_path, _parent_of_a_detached_worker(tmp_path), stall_s=10.0)
        assert time.monotonic() - started_s < 300.0, "it was not ended: it slept to its end"
        (worker,) = tmp_path.glob("*.pid")
        assert not _runs(int(worker.stem))

    @pytest.mark.slow
    def test_a_job_that_never_ends_is_ended(self, tmp_path: Path) -> None:
        source = "import time\nwhile True: print('busy', flush=True); time.sleep(0.1)"
        with pytest.raises(JobFailed, match=r"(?s)did not end within 10 s.*busy"):
            _job(tmp_path, source, deadline_s=10.0)

    @pytest.mark.slow
    def test_a_driver_that_is_told_to_end_ends_its_job(self, tmp_path: Path) -> None:
        source = (
            "import sys; from pathlib import Path; from tests.tools import test_lab_machine as lab; "
            "folder = Path(sys.argv[1]); lab._job(folder, lab._parent_of_a_detached_worker(folder))"
        )
        driver = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], cwd=REPOSITORY)
        try:
            until_s = time.monotonic() + 300.0
            while not list(tmp_path.glob("*.pid")):
                assert driver.poll() is None and time.monotonic() < until_s
                time.sleep(0.05)
            driver.terminate()
            assert driver.wait(60.0) == 128 + signal.SIGTERM
        finally:
            driver.kill()
        (worker,) = tmp_path.glob("*.pid")
        assert not _runs(int(worker.stem))

    def test_a_process_id_used_again_is_left_alone(self, tmp_path: Path) -> None:
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        try:
            path = tmp_path / f"{stranger.pid}.pid"
            path.touch()
            os.utime(path, (1.0, 1.0))  # older than the process: left by one that had the id before
            _job(tmp_path, "print('done')")
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


def _runs(pid: int) -> bool:
    """Whether a process is there and not only waiting to be buried by its parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _parent_of_a_detached_worker(run_dir: Path) -> str:
    """A command whose worker leaves its session, ignores the polite signal, and hangs."""
    worker = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(run_dir)!r}, str(os.getpid()) + '.pid').touch(); time.sleep(600)"
    )
    return (
        "import pathlib, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        f"folder = pathlib.Path({str(run_dir)!r})\n"
        "while not list(folder.glob('*.pid')): print('starting', flush=True); time.sleep(0.1)\n"
        "time.sleep(600)"
    )
