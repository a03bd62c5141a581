"""The parts of scripts/build_horovod.py that need neither network nor compiler."""

from __future__ import annotations

import configparser
import difflib
import hashlib
import json
import os
import stat
import sys
import tarfile
import threading
from pathlib import Path

import build_horovod as build
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unified_diff import PatchError, apply_patches

KEY = {"torch": "2.13.0+cpu", "python": "cpython-311", "system": "linux-x86_64-glibc-2.36", "patches": "ab"}
ENV = {"HOROVOD_WITH_GLOO": "1"}


# -------------------------------------------------------------------------- key


@pytest.mark.parametrize("ingredient", sorted(KEY))
def test_key_changes_with_each_ingredient(ingredient: str) -> None:
    changed = {**KEY, ingredient: KEY[ingredient] + "x"}
    assert build.cache_key(**changed, env=ENV) != build.cache_key(**KEY, env=ENV)


def test_key_changes_with_the_torch_build_alone() -> None:
    cuda = {**KEY, "torch": "2.13.0+cu130"}
    assert build.cache_key(**cuda, env=ENV) != build.cache_key(**KEY, env=ENV)


def test_key_changes_with_build_variables_but_not_with_their_order() -> None:
    nccl = {**ENV, "HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert build.cache_key(**KEY, env=nccl) != build.cache_key(**KEY, env=ENV)
    backwards = dict(reversed(nccl.items()))
    assert build.cache_key(**KEY, env=backwards) == build.cache_key(**KEY, env=nccl)


@pytest.mark.parametrize("part", ["cuda", "toolkit", "nccl"])
def test_key_changes_with_each_version_of_a_gpu_build(part: str) -> None:
    gpu = {"cuda": "13.0", "toolkit": "13.0.88", "nccl": "2.28.9"}
    keys = {build.cache_key(**KEY, env=ENV, gpu=each) for each in (None, gpu, {**gpu, part: gpu[part] + "1"})}
    assert len(keys) == 3


def test_key_can_be_a_local_version() -> None:
    assert build.cache_key(**KEY, env=ENV).isalnum()


def test_run_time_variables_do_not_cause_a_rebuild() -> None:
    run_time = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_RANK": "3", "HOROVOD_GLOO_IFACE": "e0", "HOME": "/"}
    assert build.build_env(run_time) == build.build_env({}) == build.DEFAULT_ENV


def test_a_wish_of_the_user_replaces_the_opposite_default() -> None:
    env = build.build_env({"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert env["HOROVOD_WITH_MPI"] == "1"
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_WITHOUT_MPI" not in env
    assert "HOROVOD_WITH_GLOO" not in build.build_env({"HOROVOD_WITHOUT_GLOO": "1"})


def test_patches_digest_sees_content_name_and_number(tmp_path: Path) -> None:
    first, second = tmp_path / "0001.patch", tmp_path / "0002.patch"
    first.write_text("a")
    second.write_text("b")
    digests = {build.patches_digest([first, second]), build.patches_digest([first])}
    digests.add(build.patches_digest([]))
    first.write_text("c")
    digests.add(build.patches_digest([first, second]))
    digests.add(build.patches_digest([first.rename(tmp_path / "0000.patch"), second]))
    assert len(digests) == 5


# ------------------------------------------------------------------- source file


def test_another_source_is_refused_with_got_expected_and_what_to_do(tmp_path: Path) -> None:
    cached = tmp_path / "sdist" / build.SDIST
    cached.parent.mkdir()
    cached.write_bytes(b"not horovod")
    with pytest.raises(build.BuildError) as caught:
        build.fetch_sdist(tmp_path, tmp_path, None)
    message = str(caught.value)
    assert "got SHA-256 497e34dce7f0" in message
    assert f"expected {build.SDIST_SHA256}" in message
    assert "Delete the file and run this again" in message


def test_a_downloaded_file_is_cached_only_if_it_is_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*arguments: str) -> None:
        (Path(arguments[arguments.index("--dest") + 1]) / build.SDIST).write_bytes(b"tampered")

    monkeypatch.setattr(build, "pip", download)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(build.BuildError, match="got SHA-256"):
        build.fetch_sdist(tmp_path / "cache", work, None)
    assert not (tmp_path / "cache" / "sdist").exists()


# ----------------------------------------------------------------------- patches


def diff(name: str, old: str, new: str, source: str | None = None) -> str:
    """A unified diff as git writes it, with a leading text and a signature."""
    before = source or f"a/{name}"
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, f"b/{name}")
    return "Why it is needed.\n\n" + "".join(lines) + "-- \n2.39.5\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


OLD = "".join(f"line {number}\n" for number in range(40))
NEW = OLD.replace("line 3\n", "line 3\nadded\nadded\n").replace("line 30\n", "changed\n")


def test_patches_apply_in_order_and_new_files_are_made(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    changed = write(tree / "src" / "x.cc", OLD)
    again = NEW.replace("added\n", "twice\n", 1)
    patches = [
        write(tmp_path / "1.patch", diff("src/x.cc", OLD, NEW)),
        write(tmp_path / "2.patch", diff("src/x.cc", NEW, again)),
        write(tmp_path / "3.patch", diff("new/y.h", "", "text\n", source="/dev/null")),
    ]
    assert apply_patches(tree, patches) == ["new/y.h", "src/x.cc"]
    assert changed.read_text() == again
    assert (tree / "new" / "y.h").read_text() == "text\n"


def test_a_displaced_hunk_finds_its_place(tmp_path: Path) -> None:
    moved = write(tmp_path / "tree" / "x", "in front\n" * 7 + OLD)
    apply_patches(tmp_path / "tree", [write(tmp_path / "1.patch", diff("x", OLD, NEW))])
    assert moved.read_text() == "in front\n" * 7 + NEW


def test_if_one_patch_does_not_apply_nothing_is_changed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    good, other = write(tree / "good", OLD), write(tree / "other", "x\nsomething else\n")
    patches = [
        write(tmp_path / "1.patch", diff("good", OLD, NEW)),
        write(tmp_path / "2.patch", diff("other", OLD, NEW)),
    ]
    with pytest.raises(PatchError) as caught:
        apply_patches(tree, patches)
    message = str(caught.value)
    assert "2.patch does not apply to other" in message
    assert "got 'something else' as line 2, expected 'line 1'" in message
    assert "nothing was changed" in message
    assert good.read_text() == OLD
    assert other.read_text() == "x\nsomething else\n"


def test_a_patch_of_a_missing_file_does_not_apply(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="got 'no such line' as line 2, expected 'line 1'"):
        apply_patches(tmp_path, [write(tmp_path / "1.patch", diff("absent", OLD, NEW))])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no diff at all\n", "got no hunk"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n line 0\n", "ends early"),
        (diff("../outside", "", "text\n", source="/dev/null"), "inside the source tree"),
        (diff("x", "line 0\n", "").replace("+++ b/x", "+++ /dev/null"), "inside the source tree"),
    ],
)
def test_a_damaged_patch_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    tree = tmp_path / "tree"
    kept = write(tree / "x", OLD)
    with pytest.raises(PatchError, match=reason):
        apply_patches(tree, [write(tmp_path / "1.patch", text)])
    assert kept.read_text() == OLD
    assert not (tmp_path / "outside").exists()


LINES = st.lists(st.sampled_from(["a", "b", "", "{", "}", "-x", "+y", " z"]), max_size=30)


@given(old=LINES, new=LINES)
def test_any_diff_of_difflib_applies(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]
) -> None:
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    if before == after:
        return
    tree = tmp_path_factory.mktemp("tree")
    target = write(tree / "x", before)
    apply_patches(tree, [write(tree / "1.patch", diff("x", before, after))])
    assert target.read_text() == after


def test_every_patch_of_the_project_says_why_and_is_described() -> None:
    patches = sorted(build.PATCH_DIR.glob("*.patch"))
    readme = (build.PATCH_DIR / "README.md").read_text()
    assert patches
    for patch in patches:
        header = patch.read_text().split("\n--- a/")[0]
        assert len(header) > 100, patch.name
        assert patch.name in readme


# ------------------------------------------------------------------------- tools


def test_a_missing_compiler_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    header = write(tmp_path / "Python.h", "")
    with pytest.raises(build.MissingToolError) as caught:
        build.check_tools(lambda name: "/usr/bin/make" if name == "make" else None, header, {})
    message = str(caught.value)
    assert "\n" not in message
    assert "a C++ compiler (looked for g++, c++, clang++)" in message
    assert "apt-get install g++ (or" in message
    assert caught.value.exit_code == 2


def test_everything_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(build.MissingToolError, match=r"apt-get install g\+\+ make python3-dev"):
        build.check_tools(lambda name: None, tmp_path / "Python.h", {})


def test_the_compiler_in_CXX_counts(tmp_path: Path) -> None:
    header = write(tmp_path / "Python.h", "")
    build.check_tools(lambda name: name if name in {"icpx", "make"} else None, header, {"CXX": "icpx -O1"})
    with pytest.raises(build.MissingToolError, match="looked for icpx"):
        build.check_tools(lambda name: name if name != "icpx" else None, header, {"CXX": "icpx"})


def test_the_command_exits_2_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise build.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.metadata, "distribution", absent)
    assert build.main(["--cache-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "torch is not installed" in error
    assert "pip install torch==" in error


def fake_cmake(path: Path, version: str) -> str:
    write(path, f"#!/bin/sh\necho cmake version {version}\n").chmod(stat.S_IRWXU)
    return str(path)


@pytest.mark.parametrize(("version", "usable"), [("3.25.1", True), ("4.0.3", False), ("3.10.2", False)])
def test_only_cmake_from_3_13_to_3_x_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, usable: bool
) -> None:
    installed: list[str] = []
    monkeypatch.setattr(build, "pip", lambda *arguments: installed.extend(arguments))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    monkeypatch.setattr(build.shutil, "which", lambda name: fake_cmake(tmp_path / "cmake", version))
    found = build.find_cmake({})
    assert (found == str(tmp_path / "cmake")) is usable
    assert any("<4" in argument for argument in installed) is not usable


def test_prerequisites_that_are_absent_or_too_new_are_installed() -> None:
    def version_of(name: str) -> str:
        if name in {"pyyaml", "cffi"}:
            raise build.metadata.PackageNotFoundError(name)
        return "84.2.1" if name == "setuptools" else "1.2"

    assert build.missing_prerequisites(version_of) == ["setuptools<81", "cffi", "pyyaml"]
    assert build.missing_prerequisites(lambda name: "80.9") == []


# ------------------------------------------------------------------------- build


def test_a_failing_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    code = "for i in range(100): print('row', i)\nraise SystemExit(3)"
    with pytest.raises(build.BuildError) as caught:
        build.run_logged([sys.executable, "-c", code], log, tmp_path, {})
    message = str(caught.value)
    assert "row 69\n" not in message
    assert message.startswith("row 70\n")
    assert "status 3" in message
    assert str(log) in message


def test_a_long_command_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends once its progress is shown, however long whoever shows it was held up."""
    shown, log, told = tmp_path / "shown", tmp_path / "x.log", list[str]()

    def say(text: str) -> None:
        told.append(text)
        if "[ 42%]" in text:
            shown.touch()

    monkeypatch.setattr(build, "PROGRESS_EVERY_S", 0.1)
    monkeypatch.setattr(build, "say", say)
    code = (
        "import pathlib, sys, time; print('[ 42%] Building x.o', flush=True); print('more', flush=True)\n"
        "limit_s = time.monotonic() + 60.0\n"
        "while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < limit_s: time.sleep(0.05)"
    )
    build.run_logged([sys.executable, "-c", code, str(shown)], log, tmp_path, {})
    assert told and told[-1].endswith("s  [ 42%] Building x.o")


def test_the_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    inside = threading.Event()
    entered: list[str] = []

    def second() -> None:
        inside.wait(120)
        with build.locked(tmp_path / "locks" / "k.lock"):
            entered.append("second")

    thread = threading.Thread(target=second)
    with build.locked(tmp_path / "locks" / "k.lock"):
        thread.start()
        inside.set()
        thread.join(0.3)
        entered.append("first")
    thread.join(120)
    assert entered == ["first", "second"]


def test_nothing_is_done_if_the_right_build_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "torch_version", lambda: ("2.13.0+cpu", None))
    monkeypatch.setattr(build, "cache_key", lambda *_: "abc")
    monkeypatch.setattr(build, "installed_version", lambda: f"{build.VERSION}+star.abc")
    monkeypatch.setattr(build, "pip", lambda *_: pytest.fail("pip was called"))
    assert build.main(["--cache-dir", str(tmp_path / "cache")]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_a_cached_wheel_is_installed_without_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write(tmp_path / "wheels" / "abc" / "horovod-0.28.1+star.abc-cp311-cp311-linux_x86_64.whl", "")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(build, "torch_version", lambda: ("2.13.0+cpu", None))
    monkeypatch.setattr(build, "cache_key", lambda *_: "abc")
    monkeypatch.setattr(build, "installed_version", lambda: build.VERSION)  # the unpatched release
    monkeypatch.setattr(build, "install_prerequisites", lambda: None)
    monkeypatch.setattr(build, "pip", lambda *arguments: calls.append(arguments))
    assert build.main(["--cache-dir", str(tmp_path)]) == 0
    assert [call[-1] for call in calls] == [str(wheel)]
    assert "--no-deps" in calls[0]


def test_the_wheel_carries_a_list_of_its_patches(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source / "setup.cfg", "[egg_info]\ntag_build = \n")
    (source / "horovod").mkdir()
    patch = write(tmp_path / "0007-some-reason.patch", "text\n")
    facts = build.build_facts("abc", "2.13.0+cpu", None)
    build.write_patch_list(source, [patch], facts)
    found = json.loads((source / "horovod" / build.PATCH_LIST).read_text())
    digest = hashlib.sha256(b"text\n").hexdigest()
    assert found == {
        "horovod": build.VERSION,
        "build": {"key": "abc", "torch": "2.13.0+cpu", "cuda": None, "toolkit": None, "nccl": None},
        "patches": [{"number": "0007", "name": "some-reason", "sha256": digest}],
    }
    config = configparser.ConfigParser()
    config.read(source / "setup.cfg")
    assert config["options.package_data"]["horovod"] == build.PATCH_LIST
    assert config["egg_info"]["tag_build"] == ""


def test_every_patch_has_a_number_of_its_own() -> None:
    names = [patch.name for patch in sorted(build.PATCH_DIR.glob("*.patch"))]
    assert [name[:5] for name in names] == [f"{number:04}-" for number in range(1, len(names) + 1)]


def test_none_of_a_foreign_sdist_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that serves another file under the same name: pip would run its setup.py to read its metadata."""
    ran, source = tmp_path / "ran", tmp_path / f"horovod-{build.VERSION}"
    source.mkdir()
    (source / "setup.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        f"from setuptools import setup\nsetup(name='horovod', version={build.VERSION!r})\n"
    )
    (source / "PKG-INFO").write_text(f"Metadata-Version: 1.0\nName: horovod\nVersion: {build.VERSION}\n")
    index = tmp_path / "index"
    index.mkdir()
    with tarfile.open(index / build.SDIST, "w:gz") as archive:
        archive.add(source, source.name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(build.BuildError, match=r"(?i)hash"):
        build.fetch_sdist(tmp_path / "cache", work, None)
    assert not ran.exists(), "code of a file with another hash has run"
    assert not (tmp_path / "cache" / "sdist" / build.SDIST).exists()
