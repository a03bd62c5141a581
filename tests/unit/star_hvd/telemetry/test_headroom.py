"""Idle processors from small recorded files: of the usable ones, within a quota, less what pressure takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from star_hvd.telemetry.headroom import CpuHeadroom, idle_seconds, quota_cores
from star_hvd.telemetry.resources import ResourceSampler

GOLDEN = Path(__file__).parents[3] / "golden" / "headroom"
BEFORE, AFTER = ((GOLDEN / name).read_text(encoding="ascii") for name in ("stat-before", "stat-after"))


def test_idle_time_of_the_usable_processors() -> None:
    # 2 s lie between the files: cpu0 was idle for 1.8 s, cpu1 not at all, cpu2 ran niced work, cpu3 waited for a disk.
    cpus = {0: 1.8, 1: 0.0, 2: 0.0, 3: 1.9}
    for number, idle_s in cpus.items():
        assert idle_seconds(AFTER, {number}) - idle_seconds(BEFORE, {number}) == pytest.approx(idle_s)
    assert idle_seconds(AFTER, cpus) - idle_seconds(BEFORE, cpus) == pytest.approx(3.7)
    assert idle_seconds(AFTER, {2}, yielding=True) - idle_seconds(BEFORE, {2}, yielding=True) == pytest.approx(2.0)


@given(text=st.text(max_size=200))
def test_what_is_no_stat_file_raises_one_kind_of_error(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        idle_seconds(text.replace("cpu0", ""), {0})


def _group(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text, encoding="ascii")
    return folder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu_max": "150000 100000\n"}, 1.5),
        ({"cpu_max": "max 100000\n"}, math.inf),
        ({"cpu_cfs_quota_us": "50000\n", "cpu_cfs_period_us": "100000\n"}, 0.5),
        ({"cpu_cfs_quota_us": "-1\n", "cpu_cfs_period_us": "100000\n"}, math.inf),
    ],
)
def test_a_quota_of_either_version(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    assert quota_cores(_group(tmp_path, **files)) == cores


def _free(tmp_path: Path, cpus: frozenset[int], group: Path | None, used_s: float = 0.0, **rates: float) -> float:
    stat = tmp_path / "stat"
    stat.write_text(BEFORE, encoding="ascii")
    headroom = CpuHeadroom(group, stat, lambda: cpus)
    first = headroom.counters()
    stat.write_text(AFTER, encoding="ascii")
    if group is not None:
        _group(group, cpu_stat=f"usage_usec {1e6 + 1e6 * used_s:.0f}\n")
    last = headroom.counters()
    found = {name: (value - first[name]) / 2.0 for name, value in last.items()}
    return headroom.free_cores(found | rates)


def test_the_least_of_idle_processors_and_quota(tmp_path: Path) -> None:
    cpus = frozenset((0, 1))
    assert _free(tmp_path, cpus, None) == pytest.approx(0.9)
    group = _group(tmp_path, cpu_max="100000 100000\n", cpu_stat="usage_usec 1000000\n")
    assert _free(tmp_path, cpus, group, used_s=1.6) == pytest.approx(0.2)  # 0.8 of 1 processor used
    (tmp_path / "cpu.stat").write_text("usage_usec 1000000\n", encoding="ascii")
    assert _free(tmp_path, cpus, group, used_s=9.0) == 0.0
    _group(tmp_path, cpu_max="max 100000\n", cpu_stat="usage_usec 1000000\n")
    assert _free(tmp_path, cpus, group, used_s=1.6) == pytest.approx(0.9)


def test_pressure_of_the_own_group_takes_from_what_is_idle(tmp_path: Path) -> None:
    cpus = frozenset((0, 1))
    assert _free(tmp_path, cpus, None, psi_host_share=0.5) == pytest.approx(0.9)
    assert _free(tmp_path, cpus, None, psi_cgroup_share=0.5) == pytest.approx(0.45)
    group = _group(tmp_path, cpu_max="40000 100000\n", cpu_stat="usage_usec 1000000\n")
    assert _free(tmp_path, cpus, group, psi_cgroup_share=0.5) == pytest.approx(0.4), "the quota's rest stays"


def test_version_1_counts_use_in_another_hierarchy(tmp_path: Path) -> None:
    for kind in ("cpu", "cpuacct"):
        (tmp_path / kind / "job").mkdir(parents=True)
    group = _group(tmp_path / "cpu" / "job", cpu_cfs_quota_us="100000\n", cpu_cfs_period_us="100000\n")
    stat, use = tmp_path / "stat", tmp_path / "cpuacct" / "job" / "cpuacct.usage"
    headroom = CpuHeadroom(group, stat, lambda: frozenset((0, 3)))
    stat.write_text(BEFORE, encoding="ascii")
    use.write_text("1000000000\n", encoding="ascii")
    first = headroom.counters()
    stat.write_text(AFTER, encoding="ascii")
    use.write_text("2400000000\n", encoding="ascii")
    rates = {name: (value - first[name]) / 2.0 for name, value in headroom.counters().items()}
    assert headroom.free_cores(rates) == pytest.approx(0.3)


def test_the_quota_of_a_group_above_limits_too(tmp_path: Path) -> None:
    """A unit inside a slice, or a container inside a pod: others in that group use a part of its quota."""
    slice_ = _group(tmp_path, cpu_max="100000 100000\n", cpu_stat="usage_usec 1000000\n")
    unit = tmp_path / "unit"
    unit.mkdir()
    _group(unit, cpu_max="max 100000\n", cpu_stat="usage_usec 0\n")
    stat = tmp_path / "stat"
    stat.write_text(BEFORE, encoding="ascii")
    headroom = CpuHeadroom(unit, stat, lambda: frozenset((0, 3)))
    first = headroom.counters()
    stat.write_text(AFTER, encoding="ascii")
    _group(slice_, cpu_stat="usage_usec 2400000\n")
    rates = {name: (value - first[name]) / 2.0 for name, value in headroom.counters().items()}
    assert headroom.free_cores(rates) == pytest.approx(0.3)


def test_other_usable_processors_than_at_the_last_sample_are_no_idle_time(tmp_path: Path) -> None:
    headroom = CpuHeadroom(None, tmp_path / "stat", lambda: frozenset((0, 1)))
    assert headroom.free_cores({"idle_cores": 50_000.0}) == 2.0
    assert headroom.free_cores({"idle_cores": -50_000.0}) == 0.0


def test_unknown_where_nothing_can_be_read(tmp_path: Path) -> None:
    headroom = CpuHeadroom(None, tmp_path / "missing")
    assert headroom.counters() == {} and math.isnan(headroom.free_cores({}))


def test_this_machine_has_a_reading() -> None:
    """Linux's counters of idle time may go back a little: such a sample has none."""
    sampler = ResourceSampler()
    found = (sampler.sample().free_cpu_cores for _ in range(200))
    assert any(cores >= 0.0 for cores in found) or not Path("/proc/stat").exists()
