"""Settings for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.effort import cases
from tests.support.slots import job_slot

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("star", max_examples=cases(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("star")

# Tests share the cores: threads of several processes that wait for each other actively take them from one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every lock of the package is compared with the order of `star_hvd.locks`, here and in the jobs that tests start.
os.environ.setdefault("STAR_CHECK_LOCKS", "1")

gc.disable()  # Until everything is imported.

TESTS = Path(__file__).parent
# Files whose jobs take longest come first, and many short files last: then all workers end together.
FIRST = (
    "contract/test_contract.py",
    "multiproc/test_modes.py",
    "multiproc/test_modes_background.py",
    "fault/test_freezes.py",
    "multiproc/test_scenarios.py",
    "multiproc/test_compression.py",
    "fault",
    "multiproc",
    "contract",
    "fuzz",
    "tools",
)
# Files in one process that wait for minutes. They begin the files that run beside those with jobs.
WAITING = ("unit/star_hvd/ps/test_cut_servers.py", "unit/star_hvd/channel/test_handshake_limiter.py")
JOBS = ("contract", "fault", "gpu", "multiproc", "tools/test_lab_job.py", "tools/test_tsan.py")
IDLE_JOBS = ("fault/test_freezes.py",)  # Their ranks wait for one that is stopped: two others may run beside.
_file: list[Path] = []  # That of the test before.
_config: list[pytest.Config] = []  # Where results are printed: not in a worker.
LAST_SHARE = 0.3  # Of the files without jobs, as many come at the end.


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Remember where results are printed, and keep the time limits of tests that have failed.

    Both plugins cancel their limits as a test fails, for a debugger; its fixtures then had none to end in.
    """
    _config[:] = [] if hasattr(config, "workerinput") else [config]
    for name in () if config.getoption("usepdb") else ("timeout", "faulthandler"):
        plugin = config.pluginmanager.get_plugin(name)
        for caller in config.pluginmanager.get_hookcallers(plugin) or ():
            if caller.name == "pytest_exception_interact":
                caller._remove_plugin(plugin)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a run that is ended from outside never comes to its summary."""
    if report.failed and _config:
        why = next((line for line in report.longreprtext.splitlines() if line.startswith("E  ")), "")
        _config[0].get_terminal_writer().line(f"\nFAILED {report.nodeid} {why[1:].strip()}", red=True)


def _within(item: pytest.Item, names: tuple[str, ...]) -> int:
    """Return the first of `names`, files or folders, that an item is in; their number if it is in none."""
    path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return next((i for i, name in enumerate(names) if path == name or path.startswith(f"{name}/")), len(names))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Alternate files with jobs, sorted by `FIRST`, and files without. (`make test` has xdist keep the order.)"""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ordered = sorted(files.values(), key=lambda file: (_within(file[0], WAITING), _within(file[0], FIRST)))
    with_jobs = [file for file in ordered if _within(file[0], JOBS) < len(JOBS)]
    others = [file for file in ordered if _within(file[0], JOBS) == len(JOBS)]
    early = len(others) * (1.0 - LAST_SHARE)
    sequence: list[list[pytest.Item]] = []
    for first in range(0, len(with_jobs), 2):
        pair = with_jobs[first : first + 2]
        share = [round(early * number / len(with_jobs)) for number in (first, first + len(pair))]
        sequence += [*pair, *others[share[0] : share[1]]]
    sequence += others[round(early) if with_jobs else 0 :]
    items[:] = [item for each in sequence for item in each]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # Outside of the test's time limit.
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Have only as many jobs at once as there are cores."""
    busy = _within(item, JOBS) < len(JOBS) and _within(item, IDLE_JOBS) == len(IDLE_JOBS)
    with job_slot() if busy else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give collections of garbage a fresh start in every file; within the time limit, since finalizers may wait."""
    if _file != [item.path]:
        _file[:] = [item.path]
        _freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again, now that everything is imported."""
    gc.enable()


def _freeze() -> None:
    """Let collections of garbage skip what there is: they took a seventh of the unit tests' time.

    A file that calls `gc.collect()` a hundred times took four minutes behind others that had imported MLflow and left
    millions of objects.
    """
    gc.collect()
    gc.freeze()
