"""What the doctor says of Horovod's patches, and its command."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scheduler.plan.plan import MODES
from star_hvd import cli, doctor, patches

ALL = frozenset(f"{number:04}" for number in range(1, 14))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    patches.horovod_patches.cache_clear()
    yield
    patches.horovod_patches.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, numbers: frozenset[str] | None) -> None:
    """Install a Horovod with these patches in `folder`; None for one without a list."""
    if numbers is not None:
        entries = [{"number": number, "name": f"patch-{number}", "sha256": number * 16} for number in sorted(numbers)]
        (folder / "star_patches.json").write_text(json.dumps({"horovod": "0.28.1", "patches": entries}))
    real, spec = importlib.util.find_spec, SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "horovod" else real(name))


def test_patches_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, ALL)
    assert patches.horovod_patches() == ALL
    (tmp_path / "star_patches.json").unlink()
    assert patches.horovod_patches() == ALL


def test_a_horovod_of_another_make_has_no_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, None)
    assert patches.horovod_patches() == frozenset()


def test_without_horovod_there_are_no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert patches.horovod_patches() == frozenset()


def test_with_all_patches_every_mode_is_free() -> None:
    assert patches.mode_limits(ALL) == {mode: {} for mode in MODES}


@pytest.mark.parametrize(
    ("missing", "where"),
    [
        (patches.SURVIVE_DEATH, {"elastic"}),
        (patches.CHEAP_DYNAMIC, {"always", "elastic"}),
        (patches.UNEVEN_HOSTS, {"hosts"}),
        (patches.NO_GIL, set()),
    ],
)
def test_a_missing_patch_limits_the_modes_with_process_sets_alone(missing: str, where: set[str]) -> None:
    limits = patches.mode_limits(ALL - {missing})
    for mode in MODES:
        expected = where if mode in ("subgroup", "grouped") else set()
        assert set(limits[mode]) == expected, mode
        assert all(missing in reason for reason in limits[mode].values())


@pytest.mark.parametrize(
    "missing", [None, patches.SURVIVE_DEATH, patches.CHEAP_DYNAMIC, patches.NO_GIL, patches.SHARED_SETS]
)
def test_the_exit_status_says_whether_anything_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str | None
) -> None:
    pretend(monkeypatch, tmp_path, ALL - {missing or ""})
    assert cli.main(["doctor", "--json"]) == (1 if missing else 0)
    told = json.loads(capsys.readouterr().out)
    assert {entry["number"] for entry in told["horovod"]["patches"]} == ALL - {missing or ""}
    assert told["horovod"]["gloo"] is True and told["versions"]["torch"]
    assert set(told["machine"]) >= {"cgroup", "network_namespaces", "gpus", "channel", "shm_free_bytes"}
    if missing:
        assert missing in told["problems"][0] and "scripts/build_horovod.py" in told["problems"][0]


def test_the_table_names_patches_modes_and_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pretend(monkeypatch, tmp_path, ALL - {patches.SURVIVE_DEATH})
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "patch 0004" in shown and "patch-0004 (000400040004)" in shown
    assert "needs patch 0003" in shown and "problem: Horovod lacks the patches 0003" in shown


def test_a_broken_horovod_is_a_problem_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"patches": [], "build": {}, "gloo": False, "nccl": False, "mpi": False}
    facts |= {"error": "ImportError: undefined symbol"}
    (problem,) = doctor.problems(facts, patches.mode_limits(frozenset()))
    assert "undefined symbol" in problem and "build_horovod.py" in problem


# ---- what Horovod was built for, and what torch has ------------------------------------------------------------------

BUILD = {"key": "abc", "torch": "2.13.0+cu130", "cuda": "13.0", "toolkit": "13.0.88", "nccl": "2.28.9"}
NOW = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
GPU = {"cuda": True, "nccl": True}


def test_a_horovod_for_this_torch_has_no_problem() -> None:
    assert doctor.build_problems({"build": BUILD, **GPU}, NOW) == []
    cpu = {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}
    assert doctor.build_problems({"build": {**BUILD, **cpu}, "cuda": False, "nccl": False}, cpu) == []


def test_a_horovod_that_does_not_say_what_it_was_built_for_is_believed() -> None:
    assert doctor.build_problems({"build": {}, **GPU}, NOW) == []


@pytest.mark.parametrize(
    ("library", "now", "said"),
    [
        (GPU, {"torch": "2.14.1+cu130"}, "was built for torch 2.13.0+cu130, but torch 2.14.1+cu130 is here; build it"),
        (GPU, {"cuda": "12.6"}, "was built for CUDA 13.0, but torch for CUDA 12.6; install that toolkit and set"),
        (GPU, {"nccl": "2.32.3"}, "was built with NCCL 2.28.9, but torch loads NCCL 2.32.3; unset HOROVOD_NCCL_HOME"),
        (GPU, {"cuda": None, "nccl": None}, "was built for CUDA, but torch 2.13.0+cu130 without it; build it"),
        ({"cuda": False, "nccl": False}, {}, "torch is built for CUDA 13.0, but Horovod without CUDA"),
    ],
)
def test_each_mismatch_says_what_to_do(library: dict[str, bool], now: dict[str, str | None], said: str) -> None:
    (problem,) = doctor.build_problems({"build": BUILD, **library}, {**NOW, **now})
    assert said in problem and "scripts/build_horovod.py" in problem


def test_a_torch_for_cuda_is_no_problem_on_a_laptop_whose_horovod_is_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyPI's default torch, for which `make setup` builds this Horovod on purpose."""
    monkeypatch.setenv("COLUMNS", "300")
    pretend(monkeypatch, tmp_path, ALL)
    monkeypatch.setattr(doctor, "torch_facts", lambda: NOW)
    monkeypatch.setattr(doctor, "sees_gpu", lambda: False)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "note: torch is built for CUDA 13.0, but Horovod without CUDA, which is enough, as no GPU is here" in shown
    assert "problem: " not in shown
    monkeypatch.setattr(doctor, "sees_gpu", lambda: True)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "problem: torch is built for CUDA 13.0" in shown and "note: " not in shown


def test_a_gpu_is_seen_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not doctor.sees_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert doctor.sees_gpu(tmp_path)


def test_a_minor_version_of_cuda_may_differ() -> None:
    assert doctor.build_problems({"build": BUILD, **GPU}, {**NOW, "cuda": "13.2"}) == []


def test_forks_are_a_problem_only_with_old_pythons_and_without_the_patch() -> None:
    assert patches.forks_can_hang(ALL - {patches.LASTING_THREAD_STATES}, (3, 11))
    assert not patches.forks_can_hang(ALL - {patches.LASTING_THREAD_STATES}, (3, 12))
    assert not patches.forks_can_hang(ALL, (3, 11))


@pytest.mark.parametrize(("missing", "library"), [(patches.OWN_STREAM, "cuda"), (patches.NCCL_REMOVAL, "nccl")])
def test_patches_for_gpus_are_missed_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, missing: str, library: str
) -> None:
    monkeypatch.setattr(doctor, "torch_facts", lambda: NOW)
    entries = [{"number": number, "name": "", "sha256": ""} for number in sorted(ALL - {missing})]
    facts = {"patches": entries, "build": BUILD, "gloo": True, "mpi": False, "error": None, **GPU}
    (problem,) = doctor.problems(facts, patches.mode_limits(ALL - {missing}))
    assert f"lacks the patch {missing}" in problem
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"torch": "2.13.0+cu130", "cuda": None, "nccl": None})
    facts |= {"build": {}, "cuda": False, "nccl": False}
    assert doctor.problems(facts, patches.mode_limits(ALL - {missing})) == []


def test_the_table_says_what_horovod_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pretend(monkeypatch, tmp_path, ALL)
    listed = json.loads((tmp_path / "star_patches.json").read_text())
    (tmp_path / "star_patches.json").write_text(json.dumps({**listed, "build": BUILD}))
    cli.main(["doctor"])
    shown = capsys.readouterr().out
    assert "built for toolkit" in shown and "13.0.88" in shown and "torch has nccl" in shown


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["cure"])
    assert caught.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_every_subcommand_is_a_module_with_arguments_and_run() -> None:
    for name, module, text in cli.SUBCOMMANDS:
        assert name and text
        if importlib.util.find_spec(module) is not None:
            loaded = importlib.import_module(module)
            assert callable(loaded.add_arguments) and callable(loaded.run)
