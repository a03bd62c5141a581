"""What a Horovod for CUDA is built with, against folders that look like toolkits and packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import build_horovod as build
import gpu_build
import pytest
from gpu_build import GpuBuild, UnfitError

TORCH = "2.13.0+cu130"
HEADER = "#define NCCL_MAJOR {}\n#define NCCL_MINOR {}\n#define NCCL_PATCH {}\n"


def nothing(program: str) -> str | None:
    return None


def toolkit(home: Path, version: str = "13.0.88", newest_gcc: int = 15) -> Path:
    """A folder with what is looked at in a CUDA toolkit."""
    for name in ("bin", "include/crt", "lib64"):
        (home / name).mkdir(parents=True)
    release = ".".join(version.split(".")[:2])
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n")
    nvcc.chmod(0o755)
    (home / "include" / "cuda_runtime.h").touch()
    (home / "include" / "crt" / "host_config.h").write_text(f"#if __GNUC__ > {newest_gcc}\n#error\n#endif\n")
    return home


def nccl(site: Path, version: tuple[int, int, int] = (2, 28, 9)) -> Path:
    """The NCCL package as pip installs it: no `libnccl.so`."""
    folder = site / "nvidia" / "nccl"
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "nccl.h").write_text(HEADER.format(*version))
    (folder / "lib" / "libnccl.so.2").write_bytes(b"library")
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are, and nothing of this machine's CUDA."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(gpu_build.sysconfig, "get_path", lambda name: str(folder))
    real = gpu_build.is_toolkit
    monkeypatch.setattr(gpu_build, "is_toolkit", lambda home: tmp_path in home.parents and real(home))
    return folder


def plan(environ: Mapping[str, str], cuda: str | None = "13.0", *, gpu_here: bool = True) -> GpuBuild | None:
    return gpu_build.plan(TORCH if cuda else "2.13.0+cpu", cuda, environ, nothing, gpu_here=gpu_here)


# ---- torch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.6'", "12.6"), ("cuda: Optional[str] = None", None)],
)
def test_the_cuda_version_is_read_from_torchs_file(line: str, cuda: str | None) -> None:
    text = f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n"
    assert gpu_build.torch_cuda(text) == cuda


def test_a_torch_without_cuda_needs_no_toolkit(site: Path) -> None:
    assert plan({}, cuda=None) is None


# ---- toolkit ------------------------------------------------------------------------------------------------------


def test_cuda_torch_without_a_toolkit_is_an_error_that_says_what_to_install(site: Path) -> None:
    with pytest.raises(UnfitError) as caught:
        plan({})
    message = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in message
    assert "torch 2.13.0+cu130 is built for CUDA 13.0: got no CUDA toolkit" in message
    assert "expected one of CUDA 13: apt-get install cuda-toolkit-13-0" in message
    assert "set HOROVOD_CUDA_HOME" in message and "STAR_CPU_ONLY=1" in message


def test_a_machine_without_gpu_and_toolkit_gets_a_horovod_without_gpus(site: Path) -> None:
    assert plan({}, gpu_here=False) is None
    for asking in ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, {"CUDA_HOME": "/nowhere"}):
        with pytest.raises(UnfitError, match="got no CUDA toolkit"):
            plan(asking, gpu_here=False)


def test_a_gpu_is_seen_by_its_driver(tmp_path: Path) -> None:
    assert not gpu_build.sees_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-caps").touch()
    assert not gpu_build.sees_gpu(tmp_path)
    (tmp_path / "dev/nvidia0").touch()
    assert gpu_build.sees_gpu(tmp_path)


def test_a_named_folder_that_is_no_toolkit_is_named_in_the_error(site: Path, tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=f"looked in CUDA_HOME={tmp_path}/none"):
        plan({"CUDA_HOME": f"{tmp_path}/none"})


def test_a_toolkit_of_another_cuda_is_refused(site: Path, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda", "12.6.77")
    with pytest.raises(UnfitError) as caught:
        plan({"CUDA_HOME": str(home)})
    assert f"got the CUDA toolkit 12.6.77 in {home}, expected CUDA 13" in str(caught.value)
    assert "set HOROVOD_CUDA_HOME" in str(caught.value)


def test_a_minor_version_may_differ(site: Path, tmp_path: Path) -> None:
    found = plan({"CUDA_HOME": str(toolkit(tmp_path / "cuda", "13.1.20"))})
    assert found == GpuBuild("13.0", "13.1.20", tmp_path / "cuda")
    assert found.key() == {"cuda": "13.0", "toolkit": "13.1.20", "nccl": "None"}


def test_the_named_toolkit_wins_over_the_one_on_the_path(site: Path, tmp_path: Path) -> None:
    named, other = toolkit(tmp_path / "named"), toolkit(tmp_path / "other")
    on_path = {"nvcc": str(other / "bin" / "nvcc")}.get
    assert gpu_build.find_toolkit({"HOROVOD_CUDA_HOME": str(named), "CUDA_HOME": str(other)}, on_path) == named
    assert gpu_build.find_toolkit({}, on_path) == other


def test_a_compiler_that_does_not_run_is_an_error(site: Path, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UnfitError, match="does not run"):
        plan({"CUDA_HOME": str(home)})


# ---- on purpose without ---------------------------------------------------------------------------------------------


def test_without_gpus_on_purpose(site: Path) -> None:
    assert plan({"STAR_CPU_ONLY": "1"}) is None
    with pytest.raises(UnfitError, match="got no CUDA toolkit"):
        plan({"STAR_CPU_ONLY": "0"})


def test_without_gpus_on_purpose_where_the_build_would_find_a_toolkit(site: Path, tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="got STAR_CPU_ONLY=1 and a CUDA toolkit in"):
        plan({"STAR_CPU_ONLY": "1", "CUDA_HOME": str(toolkit(tmp_path / "cuda"))})


def test_gpu_operations_contradict_a_build_without_gpus(site: Path) -> None:
    with pytest.raises(UnfitError, match="got HOROVOD_GPU_OPERATIONS=NCCL and STAR_CPU_ONLY=1"):
        plan({"STAR_CPU_ONLY": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"})
    with pytest.raises(UnfitError, match=r"got HOROVOD_GPU_ALLREDUCE=NCCL and torch 2.13.0\+cpu, which is without"):
        plan({"HOROVOD_GPU_ALLREDUCE": "NCCL"}, cuda=None)


# ---- NCCL -----------------------------------------------------------------------------------------------------------


def test_torchs_own_nccl_is_linked_under_a_name_a_linker_finds(site: Path, tmp_path: Path) -> None:
    package = nccl(site)
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda")), "HOROVOD_GPU_OPERATIONS": "NCCL"}
    found = plan(environ)
    assert found is not None and found.nccl == "2.28.9" and found.nccl_folder == package
    variables = gpu_build.build_variables(found, tmp_path / "work")
    home = Path(variables["HOROVOD_NCCL_HOME"])
    assert variables["HOROVOD_NCCL_LINK"] == "SHARED"
    assert variables["HOROVOD_CUDA_HOME"] == variables["CUDA_HOME"] == environ["CUDA_HOME"]
    assert (home / "lib" / "libnccl.so").read_bytes() == b"library"
    assert (home / "include" / "nccl.h").is_file()


def test_the_version_of_nccl_is_part_of_the_key(site: Path, tmp_path: Path) -> None:
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda")), "HOROVOD_GPU_OPERATIONS": "NCCL"}
    header = nccl(site) / "include" / "nccl.h"
    first = plan(environ)
    header.write_text(HEADER.format(2, 29, 0))
    second = plan(environ)
    assert first and second and first.key() != second.key()


def test_a_named_nccl_is_left_alone(site: Path, tmp_path: Path) -> None:
    nccl(site)
    given = tmp_path / "given"
    (given / "include").mkdir(parents=True)
    (given / "include" / "nccl.h").write_text(HEADER.format(2, 20, 1))
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda")), "HOROVOD_GPU_OPERATIONS": "NCCL"}
    found = plan({**environ, "HOROVOD_NCCL_HOME": str(given)})
    assert found is not None and found.nccl == "2.20.1" and found.nccl_folder is None
    assert "HOROVOD_NCCL_HOME" not in gpu_build.build_variables(found, tmp_path / "work")


def test_no_nccl_at_all_is_an_error_that_says_what_to_install(site: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda")), "HOROVOD_GPU_OPERATIONS": "NCCL"}
    with pytest.raises(UnfitError, match="pip install nvidia-nccl-cu13"):
        plan({**environ, "HOROVOD_NCCL_HOME": str(tmp_path / "given")})


def test_without_a_wish_for_nccl_tensors_are_staged(site: Path, tmp_path: Path) -> None:
    nccl(site)
    found = plan({"CUDA_HOME": str(toolkit(tmp_path / "cuda"))})
    assert found is not None and found.nccl is None
    assert "reduced on the host" in build.describe(TORCH, "13.0", found)


# ---- compiler -------------------------------------------------------------------------------------------------------


def test_a_compiler_too_old_for_torch_or_too_new_for_the_toolkit(site: Path, tmp_path: Path) -> None:
    gpu = GpuBuild("12.4", "12.4.131", toolkit(tmp_path / "cuda", "12.4.131", newest_gcc=13))
    gpu_build.check_gcc((13, 3, 0), gpu)
    gpu_build.check_gcc((14, 2, 0), None)
    gpu_build.check_gcc(None, gpu)
    with pytest.raises(UnfitError, match="got GCC 14.2.0, expected at most 13 for the CUDA toolkit 12.4.131"):
        gpu_build.check_gcc((14, 2, 0), gpu)
    with pytest.raises(UnfitError, match="got GCC 8.5.0, expected 9 or later"):
        gpu_build.check_gcc((8, 5, 0), None)


def test_the_version_of_a_compiler_is_asked_of_it(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    macros = "#define __GNUC__ 13\n#define __GNUC_MINOR__ 3\n#define __GNUC_PATCHLEVEL__ 0\n"
    compiler.write_text(f"#!/bin/sh\nprintf '{macros}'\n".replace("\n#", "\\n#").replace("0\n'", "0\\n'"))
    compiler.chmod(0o755)
    assert gpu_build.gcc_version(str(compiler)) == (13, 3, 0)
    compiler.write_text(compiler.read_text().replace("#define __GNUC__ 13", "#define __clang__ 1\\n#define __GNUC__ 4"))
    assert gpu_build.gcc_version(str(compiler)) is None
    assert gpu_build.gcc_version(str(tmp_path / "none")) is None


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_exits_2_for_a_gpu_torch_without_a_toolkit(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "torch_version", lambda: (TORCH, "13.0"))
    monkeypatch.setattr(build, "pip", lambda *_: pytest.fail("pip was called"))
    monkeypatch.setattr(gpu_build.shutil, "which", nothing)
    monkeypatch.setattr(gpu_build, "sees_gpu", lambda: True)
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "STAR_CPU_ONLY", "HOROVOD_GPU_OPERATIONS"):
        monkeypatch.delenv(name, raising=False)
    assert build.main(["--cache-dir", str(tmp_path / "cache")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cuda-toolkit-13-0" in error


def test_the_wheel_says_what_it_was_built_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "horovod").mkdir(parents=True)
    (source / "setup.cfg").touch()
    gpu = GpuBuild("13.0", "13.0.88", tmp_path, "2.28.9", tmp_path)
    build.write_patch_list(source, [], build.build_facts("abc", TORCH, gpu))
    found = json.loads((source / "horovod" / build.PATCH_LIST).read_text())["build"]
    assert found == {"key": "abc", "torch": TORCH, "cuda": "13.0", "toolkit": "13.0.88", "nccl": "2.28.9"}
