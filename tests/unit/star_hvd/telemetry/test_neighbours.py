"""Jobs of one user on one host: what they write, who is believed, and what is removed."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from star_hvd.telemetry.neighbours import Entry, Registry, ranks_near, registry_folder

ENTRY = Entry(job="b", rank=0, pid=1, started_s=0.0, space=0, cpus=(0, 1), written_s=0.0)


def entry(**changes: object) -> Entry:
    return Entry(**{**asdict(ENTRY), **changes})  # type: ignore[arg-type]


def running(**changes: object) -> dict[str, object]:
    """The file of a rank of another job that runs: this process, under another name."""
    space = os.stat("/proc/self/ns/pid").st_ino
    own = {"pid": os.getpid(), "started_s": psutil.Process().create_time(), "space": space}
    return {**asdict(ENTRY), **own, "written_s": time.time(), **changes}


def put(folder: Path, name: str, values: object) -> Path:
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


def test_two_jobs_see_each_other_and_not_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    one, two = Registry("a", 0, folder), Registry("b", 3, folder)
    two.file_name = "other.json"
    one.write(cpus={0, 1})
    two.write(cpus={1})
    (seen,), (other,) = one.others(), two.others()
    assert (seen.job, seen.rank, seen.cpus) == ("b", 3, (1,))
    assert (other.job, other.rank, other.cpus) == ("a", 0, (0, 1))
    two.close()
    assert one.others() == [] and sorted(path.name for path in folder.iterdir()) == [one.file_name]


def test_only_the_user_can_read_and_write(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    registry = Registry("a", 0, folder)
    registry.write(cpus={0})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("kind", ["open to others", "a file", "a link"])
def test_a_directory_that_is_not_the_users_own_is_not_used(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    if kind == "a file":
        folder.touch()
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    registry = Registry("a", 0, folder)
    registry.write(cpus={0})
    assert registry.others() == [] and (kind == "a file" or not list(folder.iterdir()))


def test_entries_of_ended_processes_are_removed(tmp_path: Path) -> None:
    registry = Registry("a", 0, tmp_path / "jobs")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(60.0)
    ended = put(tmp_path / "jobs", "1.json", running(pid=done.pid))
    reused = put(tmp_path / "jobs", "2.json", running(started_s=psutil.Process().create_time() - 3600.0))
    alive = put(tmp_path / "jobs", "3.json", running())
    assert [one.pid for one in registry.others()] == [os.getpid()]
    assert not ended.exists() and not reused.exists() and alive.exists() and registry.dropped == 0


def write_entry(registry: Registry) -> None:
    registry.write(cpus={0})


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """The system's clock is set: times since the epoch move, also those of a process's start."""
    present_s, start_s = time.time, psutil.Process.create_time
    monkeypatch.setattr(time, "time", lambda: present_s() + ahead_s)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: start_s(process) + ahead_s)


@pytest.mark.parametrize("ahead_s", [-3600.0, 60.0])
def test_a_clock_that_is_set_ends_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead_s: float) -> None:
    before, later = Registry("a", 0, tmp_path / "jobs"), Registry("b", 0, tmp_path / "jobs")
    write_entry(before)
    set_clock(monkeypatch, ahead_s)
    assert later.others() == [] and (tmp_path / "jobs" / before.file_name).exists(), "old, but not that of a dead one"
    write_entry(before)
    assert [one.job for one in later.others()] == ["a"]


def test_a_process_number_used_again_is_told_by_ticks_whatever_the_clock_says(tmp_path: Path) -> None:
    registry = Registry("a", 0, tmp_path / "jobs")
    write_entry(registry)
    ticks = json.loads((tmp_path / "jobs" / registry.file_name).read_text())["started_ticks"]
    since_boot_s = psutil.Process().create_time() - psutil.boot_time()
    assert ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(since_boot_s, abs=2.0)
    reused = put(tmp_path / "jobs", "1.json", running(started_ticks=ticks + 500))
    alive = put(tmp_path / "jobs", "2.json", running(started_ticks=ticks))
    assert len(registry.others()) == 1 and not reused.exists() and alive.exists()


def test_an_entry_of_a_version_without_ticks_is_judged_by_its_start_since_the_epoch(tmp_path: Path) -> None:
    registry = Registry("a", 0, tmp_path / "jobs")
    earlier = {name: value for name, value in running().items() if name != "started_ticks"}
    alive = put(tmp_path / "jobs", "1.json", earlier)
    reused = put(tmp_path / "jobs", "2.json", {**earlier, "started_s": psutil.Process().create_time() - 3600.0})
    assert len(registry.others()) == 1 and alive.exists() and not reused.exists() and registry.dropped == 0


def test_entries_of_another_container_are_believed_while_they_are_fresh(tmp_path: Path) -> None:
    registry = Registry("a", 0, tmp_path / "jobs")
    fresh = put(tmp_path / "jobs", "1.json", running(pid=2**22 - 1, space=7))
    old = put(tmp_path / "jobs", "2.json", running(pid=2**22 - 1, space=7, written_s=time.time() - 60.0))
    assert len(registry.others()) == 1
    assert fresh.exists() and old.exists(), "whether their processes run cannot be seen from here"


DAMAGED = ["", "{", "[]", "null", '{"job": "b"}', '{"job": "b", "cpus": 3}', "\x00" * 9000, "1" * 9000]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_files_are_counted_once_and_left_alone(text: str, tmp_path: Path) -> None:
    registry = Registry("a", 0, tmp_path / "jobs")
    path = put(tmp_path / "jobs", "1.json", text)
    put(tmp_path / "jobs", "2.json", running())
    assert len(registry.others()) == len(registry.others()) == 1
    assert registry.dropped == 1 and path.exists()


VALUES = st.none() | st.floats() | st.text(max_size=3) | st.lists(st.integers(-9, 9))


@given(values=st.dictionaries(st.sampled_from([*asdict(ENTRY)]), VALUES))
def test_any_change_of_a_file_gives_an_entry_or_a_counted_drop(values: dict[str, object]) -> None:
    with TemporaryDirectory() as folder:
        registry = Registry("a", 0, Path(folder) / "jobs")
        put(Path(folder) / "jobs", "1.json", {**running(), **values})
        found = registry.others()
    for one in found:
        assert math.isfinite(one.started_s) and math.isfinite(one.written_s)
    of_another_process = values.keys() & {"job", "pid", "started_s", "started_ticks", "space", "written_s"}
    assert len(found) + registry.dropped == 1 or of_another_process


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    writers = [Registry(f"job{number}", number, tmp_path / "jobs") for number in range(4)]
    for number, writer in enumerate(writers):
        writer.file_name = f"{number}.json"
    stop, reader = threading.Event(), Registry("reader", 0, tmp_path / "jobs")

    def write(writer: Registry) -> None:
        size = 1
        while not stop.is_set():
            size = size % 200 + 1  # Files of changing length show a tear.
            writer.write(cpus=range(size))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        limit_s = time.monotonic() + 60.0
        while len(reader.others()) < len(writers):
            assert time.monotonic() < limit_s
        for _ in range(200):
            assert len(reader.others()) == len(writers)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60.0)
    assert reader.dropped == 0


def test_they_meet_in_one_place_whatever_their_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STAR_NEIGHBOURS_DIR", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    everywhere = Path(f"/tmp/star-hvd-{os.getuid()}")
    assert registry_folder() == everywhere
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert registry_folder() == everywhere
    monkeypatch.setenv("STAR_NEIGHBOURS_DIR", str(tmp_path / "jobs"))
    assert registry_folder() == tmp_path / "jobs"


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    registry, other = Registry("a", 0, folder), Registry("b", 0, folder)
    other.file_name = "other.json"
    registry.write(cpus={0})
    shutil.rmtree(folder)
    assert other.others() == []
    for _ in range(2):
        registry.write(cpus={0})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [one.job for one in other.others()] == ["a"]


def test_ranks_on_the_same_processors_are_near() -> None:
    assert ranks_near([], {0}) == 0 == ranks_near([entry(cpus=(2, 3))], {0, 1})
    assert ranks_near([entry(), entry(rank=1), entry(cpus=(0, 2))], {1}) == 2
