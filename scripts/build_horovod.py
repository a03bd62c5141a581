#!/usr/bin/env python3
"""Build the patched Horovod for the torch of this interpreter, and install it.

Horovod's last release does not compile against torch >= 2.1, so pip alone cannot
install it. This script fetches the source distribution through pip, checks its
SHA-256, applies ``patches/*.patch``, builds a wheel and installs it into the
environment of the interpreter that runs it. The wheel is cached under a key
computed from everything it depends on; the installed version contains the key
(``0.28.1+star.<key>``), so a second call sees immediately that nothing is to be
done. Only the standard library is used.

A torch with CUDA needs a CUDA toolkit of its version; without one this is an
error, since Horovod's build would silently omit GPU support (STAR_CPU_ONLY=1 asks
for that). HOROVOD_GPU_OPERATIONS=NCCL links the NCCL that torch itself loads;
without it GPU tensors are reduced on the host.

STAR_BUILD_JOBS is the number of files compiled at a time (default: one per core; fewer
where memory is short). STAR_CACHE_DIR is the folder of wheels and logs, as --cache-dir
(default: ~/.cache/star-hvd).

Exit codes: 0 installed; 1 a step failed; 2 something must be installed first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import gpu_build
from unified_diff import PatchError, apply_patches

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH_DIR = Path(__file__).resolve().parent.parent / "patches"
PATCH_LIST = "star_patches.json"  # Inside the package horovod.

# Needed to build (setuptools 81 and later lack what Horovod's setup.py imports) or by
# Horovod at run time: its wheel is installed with --no-deps, because resolving its
# dependencies again could replace torch.
PREREQUISITES = ("setuptools<81", "wheel", "numpy", "cloudpickle", "cffi", "psutil", "pyyaml", "packaging")

DEFAULT_ENV = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# The other HOROVOD_* variables are read at run time and must not cause a rebuild.
BUILD_ENV = re.compile(
    r"HOROVOD_(WITH_|WITHOUT_|GPU|NCCL_(HOME|INCLUDE|LIB|LINK)|CUDA_HOME|ROCM_HOME|NVTX_INCLUDE"
    r"|BUILD_|CPU_OPERATIONS|ALLOW_MIXED_GPU_IMPL|MPICXX_SHOW|DEBUG)"
)
PROGRESS_EVERY_S = 10.0  # Users take a longer silence for a hang.


class BuildError(Exception):
    """A step failed; the message says what was found, what was expected and what to do."""

    exit_code = 1


class MissingToolError(BuildError):
    """Something must be installed before the build; the message is one line."""

    exit_code = 2


def say(message: str) -> None:
    """Print one progress line and flush it, also into a pipe."""
    print(f"[horovod] {message}", flush=True)


# ---------------------------------------------------------------- what to build


def build_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the HOROVOD_* variables that decide what is built, with our defaults.

    An opposite setting overrides a default: HOROVOD_WITH_MPI=1 drops WITHOUT_MPI.
    """
    wanted = {name: value for name, value in environ.items() if BUILD_ENV.match(name)}
    for name, value in DEFAULT_ENV.items():
        if "_WITHOUT_" in name:
            opposite = name.replace("_WITHOUT_", "_WITH_")
        else:
            opposite = name.replace("_WITH_", "_WITHOUT_")
        if opposite not in wanted:
            wanted.setdefault(name, value)
    return wanted


def torch_version() -> tuple[str, str | None]:
    """Return torch's version with its local tag, for example 2.13.0+cpu, and its CUDA version or None.

    Read from the file, because importing torch takes seconds and the metadata of
    the CUDA wheels on package indexes lack the tag.

    Raises:
        MissingToolError: torch is not installed.
    """
    try:
        version_file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        text = version_file.read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        raise MissingToolError(
            f"torch is not installed in {sys.prefix}: install it before Horovod, for example with "
            f"{sys.executable} -m pip install torch==2.13.0"
        ) from None
    found = re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return (found.group(1) if found else metadata.version("torch")), gpu_build.torch_cuda(text)


def platform_name() -> str:
    """Return machine, system and C library: a wheel built here works where they are equal."""
    return f"{sysconfig.get_platform()}-{'-'.join(platform.libc_ver())}"


def patches_digest(patches: Sequence[Path]) -> str:
    """Return the SHA-256 over the names and contents of the patches, in order."""
    digest = hashlib.sha256()
    for patch in patches:
        content = patch.read_bytes()
        digest.update(f"{patch.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def cache_key(
    torch: str, python: str, system: str, patches: str, env: Mapping[str, str], gpu: Mapping[str, str] | None = None
) -> str:
    """Return twelve hexadecimal digits that change with each input of the build.

    Args:
        torch: Version of torch.
        python: ABI of this Python.
        system: See `platform_name`.
        patches: See `patches_digest`.
        env: See `build_env`.
        gpu: Versions of torch's CUDA, the toolkit and NCCL; None for a build without GPUs.
    """
    lines = [f"sdist={SDIST_SHA256}", f"torch={torch}", f"python={python}", f"system={system}"]
    lines += [f"patches={patches}", *(f"{name}={env[name]}" for name in sorted(env))]
    lines += [f"gpu.{name}={version}" for name, version in sorted((gpu or {}).items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def installed_version() -> str | None:
    """Return the version of Horovod in this environment, None without one."""
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------ tools


def check_tools(which: Callable[[str], str | None], python_header: Path, environ: Mapping[str, str]) -> None:
    """Raise MissingToolError, one line, if a compiler, make or Python.h is missing."""
    compilers = [shlex.split(environ["CXX"])[0]] if environ.get("CXX") else ["g++", "c++", "clang++"]
    missing, packages = [], []
    if not any(which(compiler) for compiler in compilers):
        missing.append(f"a C++ compiler (looked for {', '.join(compilers)})")
        packages.append("g++")
    if not which("make"):
        missing.append("make")
        packages.append("make")
    if not python_header.is_file():
        missing.append(f"the Python headers ({python_header})")
        packages.append("python3-dev")
    if missing:
        raise MissingToolError(
            f"building Horovod needs {' and '.join(missing)}: install with "
            f"apt-get install {' '.join(packages)} (or your system's equivalent), then run this again"
        )


def cmake_version(cmake: str) -> tuple[int, int] | None:
    """Return (major, minor) of a CMake program, None if it does not run."""
    try:
        text = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def find_cmake(environ: Mapping[str, str]) -> str:
    """Return a CMake from 3.13 to 3.x: the configured one, one found on this machine, or pip's.

    CMake 4 rejects the old policies that Horovod's Eigen and Gloo require.
    """
    in_venv = str(Path(sysconfig.get_path("scripts")) / "cmake")
    for cmake in (environ.get("HOROVOD_CMAKE"), in_venv, shutil.which("cmake")):
        if cmake and (3, 13) <= (cmake_version(cmake) or (0, 0)) < (4, 0):
            return cmake
    say("no CMake from 3.13 to 3.x at hand: installing one with pip")
    pip("install", "--quiet", "--force-reinstall", "--no-deps", "cmake>=3.18,<4")
    return in_venv


def pip(*arguments: str) -> None:
    """Run pip for this interpreter; its output is shown only if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise BuildError(f"pip failed with status {done.returncode}: {shlex.join(command)}\n{tail}")


def missing_prerequisites(version_of: Callable[[str], str] = metadata.version) -> list[str]:
    """Return the prerequisites that are absent from this environment or too new."""
    missing = []
    for requirement in PREREQUISITES:
        name, _, below = requirement.partition("<")
        try:
            major = int(version_of(name).split(".")[0])
        except metadata.PackageNotFoundError:
            missing.append(requirement)
            continue
        if below and major >= int(below):
            missing.append(requirement)
    return missing


def install_prerequisites() -> None:
    """Install what Horovod needs to build and run, unless it is already installed."""
    missing = missing_prerequisites()
    if missing:
        say(f"installing {' '.join(missing)}")
        pip("install", "--quiet", *missing)


# ------------------------------------------------------------------------ build


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build to finish ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_digest(path: Path, expected: str) -> None:
    """Raise BuildError unless the file has the expected SHA-256."""
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != expected:
        raise BuildError(
            f"{path}: got SHA-256 {got}, expected {expected}. Delete the file and run this again; if it "
            f"stays different, the package index serves another file than the released one: do not build it"
        )


def fetch_sdist(cache: Path, work: Path, given: Path | None) -> Path:
    """Return the verified source distribution: the given file, the cached one, or pip's download.

    pip runs the `setup.py` of a download to get its metadata. With the hash in the requirement, it rejects any file
    other than the released one before that.
    """
    sdist = given or cache / "sdist" / SDIST
    if given is None and not sdist.is_file():
        say(f"fetching {SDIST}")
        wanted = work / "sdist.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
        pip("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
            "--dest", str(work), "--requirement", str(wanted))  # fmt: skip
        check_digest(work / SDIST, SDIST_SHA256)
        sdist.parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / SDIST, sdist)
    check_digest(sdist, SDIST_SHA256)
    return sdist


def last_step(log: Path) -> str:
    """Return the last build step in the log (make's `[ 42%] ...` line), or its last line."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 65536))
        lines = handle.read().decode("utf-8", "replace").splitlines()
    steps = [line.strip() for line in lines if re.match(r"\s*\[ *\d+%\]", line)]
    return (steps or [line.strip() for line in lines if line.strip()] or ["starting"])[-1][:90]


def run_logged(command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str]) -> None:
    """Run a long command with its output in a log file, and print a progress line every few seconds.

    Raises BuildError with the last 30 lines and the path of the log if it fails.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=dict(env))
        try:
            while True:
                try:
                    status = process.wait(timeout=PROGRESS_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{time.monotonic() - started:4.0f} s  {last_step(log)}")
        finally:
            process.kill()
    if status != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        raise BuildError(f"{tail}\nthe build failed with status {status}; the whole log: {log}")


def build_facts(key: str, torch: str, gpu: gpu_build.GpuBuild | None) -> dict[str, str | None]:
    """Return what the wheel is built for: torch, its CUDA, the toolkit, NCCL; None for those not used."""
    versions = gpu.key() if gpu else {}
    nccl = gpu.nccl if gpu else None
    return {"key": key, "torch": torch, "cuda": versions.get("cuda"), "toolkit": versions.get("toolkit"), "nccl": nccl}


def write_patch_list(source: Path, patches: Sequence[Path], facts: Mapping[str, str | None]) -> None:
    """Record in the wheel which patches it was built with, and for what: horovod/star_patches.json.

    ``{"horovod": "0.28.1", "build": {"key", "torch", ...}, "patches": [{"number", "name", "sha256"}, ...]}``; read by
    `star-hvd doctor`, the choice of modes and the comparison of all ranks at the start of a job.
    """
    entries = [
        {"number": patch.name[:4], "name": patch.stem[5:], "sha256": hashlib.sha256(patch.read_bytes()).hexdigest()}
        for patch in patches
    ]
    text = json.dumps({"horovod": VERSION, "build": dict(facts), "patches": entries}, indent=1) + "\n"
    (source / "horovod" / PATCH_LIST).write_text(text, encoding="utf-8")
    with (source / "setup.cfg").open("a", encoding="utf-8") as config:  # Horovod's setup.py names no data files.
        config.write(f"\n[options.package_data]\nhorovod = {PATCH_LIST}\n")


@dataclasses.dataclass(frozen=True)
class Job:
    """A wheel to be built: its build environment, and what it is built for."""

    key: str
    torch: str
    env: Mapping[str, str]
    gpu: gpu_build.GpuBuild | None = None


def build_wheel(cache: Path, job: Job, given: Path | None) -> Path:
    """Build a wheel into the cache unless it is already there; return its path."""
    key, home = job.key, cache / "wheels" / job.key
    for wheel in home.glob("horovod-*.whl"):
        say(f"using the cached wheel {wheel}")
        return wheel
    check_tools(shutil.which, Path(sysconfig.get_path("include")) / "Python.h", os.environ)
    gpu_build.check_gcc(gpu_build.gcc_version(os.environ.get("CXX") or "g++"), job.gpu)
    install_prerequisites()
    cmake = find_cmake(os.environ)
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    for killed in (cache / "tmp").glob(f"{key}-*"):  # We hold the lock, so nobody else builds there.
        shutil.rmtree(killed, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{key}-", dir=cache / "tmp") as folder:
        work = Path(folder)
        with tarfile.open(fetch_sdist(cache, work, given)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(work / "src")
        source = work / "src" / f"horovod-{VERSION}"
        patches = sorted(PATCH_DIR.glob("*.patch"))
        changed = apply_patches(source, patches)
        write_patch_list(source, patches, build_facts(key, job.torch, job.gpu))
        jobs = os.environ.get("STAR_BUILD_JOBS") or str(len(os.sched_getaffinity(0)))
        say(f"applied {len(patches)} patches to {len(changed)} files; compiling, {jobs} at a time (minutes)")
        # Horovod's setup.py runs make -j8 unless MAKEFLAGS is set.
        build = {**os.environ, **job.env, "MAKEFLAGS": f"-j{jobs}", "HOROVOD_CMAKE": cmake}
        build |= gpu_build.build_variables(job.gpu, work) if job.gpu else {}
        build["HOROVOD_LOCAL_VERSION"] = f"star.{key}"
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
        log = cache / "logs" / f"{key}.log"
        run_logged([*command, "--wheel-dir", str(work / "out"), str(source)], log, work, build)
        wheel = next((work / "out").glob("horovod-*.whl"))
        home.mkdir(parents=True, exist_ok=True)
        os.replace(wheel, home / wheel.name)
        return home / wheel.name


def describe(torch: str, cuda: str | None, gpu: gpu_build.GpuBuild | None) -> str:
    """Return a one-line description of the build."""
    if gpu is None:
        return f"for torch {torch}, without GPUs" + (
            f": no GPU here, or {gpu_build.CPU_ONLY} is set" if cuda else ""
        )
    if gpu.nccl is None:
        staged = "GPU tensors are reduced on the host (HOROVOD_GPU_OPERATIONS=NCCL is faster)"
        return f"for torch {torch}, CUDA toolkit {gpu.toolkit}; {staged}"
    source = "torch's own" if gpu.nccl_folder else "the system's"
    return f"for torch {torch}, CUDA toolkit {gpu.toolkit}, NCCL {gpu.nccl} ({source})"


def ensure_horovod(cache: Path, force: bool = False, given: Path | None = None) -> None:
    """Build the patched Horovod for this torch if needed, and install it."""
    env = build_env(os.environ)
    digest = patches_digest(sorted(PATCH_DIR.glob("*.patch")))
    python = str(sysconfig.get_config_var("SOABI") or sys.version)
    torch, cuda = torch_version()
    gpu = gpu_build.plan(torch, cuda, os.environ, gpu_here=gpu_build.sees_gpu())
    key = cache_key(torch, python, platform_name(), digest, env, gpu.key() if gpu else None)
    wanted = f"{VERSION}+star.{key}"
    if installed_version() == wanted and not force:
        say(f"{wanted} is installed: nothing to do")
        return
    started = time.monotonic()
    with locked(cache / "locks" / f"{key}.lock"):
        if force:
            shutil.rmtree(cache / "wheels" / key, ignore_errors=True)
        say(describe(torch, cuda, gpu))
        wheel = build_wheel(cache, Job(key, torch, env, gpu), given)
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    with locked(cache / "locks" / f"environment-{environment}.lock"):
        install_prerequisites()
        pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    say(f"{wanted} installed in {sys.prefix} after {time.monotonic() - started:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module's docstring for the exit codes."""
    default = os.environ.get("STAR_CACHE_DIR") or str(Path.home() / ".cache" / "star-hvd")
    parser = argparse.ArgumentParser(description="Build and install the patched Horovod.")
    parser.add_argument("--cache-dir", type=Path, default=Path(default), help="wheels and logs (%(default)s)")
    parser.add_argument("--sdist", type=Path, help=f"a local {SDIST}, for machines without a package index")
    parser.add_argument("--force", action="store_true", help="build again even if cached or installed")
    options = parser.parse_args(arguments)
    try:
        sdist = options.sdist.resolve() if options.sdist else None
        ensure_horovod(options.cache_dir.expanduser().resolve(), options.force, sdist)
    except (BuildError, PatchError, gpu_build.UnfitError) as error:
        print(f"[horovod] error: {error}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
