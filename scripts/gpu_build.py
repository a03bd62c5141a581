"""The parts of a Horovod build for CUDA: torch's CUDA, a toolkit, a compiler, and torch's own NCCL.

Horovod's build uses whatever it finds. Without a toolkit it silently builds a Horovod that fails at the first GPU
tensor; without a hint it combines the headers of one NCCL with the library of another. So the parts are looked up here,
checked against each other, and passed explicitly. Only the standard library is used.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_ONLY = "STAR_CPU_ONLY"
_TOOLKIT_NAMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_GPU_OPERATIONS = "HOROVOD_GPU_"
_NCCL_GIVEN = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK")
# Required by torch's headers.
OLDEST_GCC = 9


class UnfitError(Exception):
    """The parts of a build do not match, or one is missing; the message is one line."""

    exit_code = 2


@dataclass(frozen=True)
class GpuBuild:
    """Versions that determine a GPU build.

    Attributes:
        cuda: CUDA version of torch, for example 13.0.
        toolkit: Version of the CUDA toolkit, for example 13.0.88.
        home: Folder of the toolkit.
        nccl: Version of NCCL; None if GPU tensors are reduced on the host.
        nccl_folder: torch's own NCCL (`include`, `lib`); None if the user named another, or the system's is used.
    """

    cuda: str
    toolkit: str
    home: Path
    nccl: str | None = None
    nccl_folder: Path | None = None

    def key(self) -> dict[str, str]:
        """Return the build's part of a wheel's key: versions, no paths."""
        return {name: str(value) for name, value in asdict(self).items() if name in ("cuda", "toolkit", "nccl")}


def torch_cuda(version_py: str) -> str | None:
    """Return the CUDA version in the text of torch/version.py; None for a torch without CUDA."""
    found = re.search(r"^cuda\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", version_py, re.MULTILINE)
    return found.group(1) if found else None


def wants(environ: Mapping[str, str], operations: str) -> bool:
    """Whether HOROVOD_GPU_OPERATIONS, HOROVOD_GPU_ALLREDUCE or a similar variable asks for `operations`."""
    return any(name.startswith(_GPU_OPERATIONS) and value == operations for name, value in environ.items())


def sees_gpu(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is loaded on this machine."""
    return (root / "proc/driver/nvidia/version").exists() or any(root.glob("dev/nvidia[0-9]*"))


def plan(
    torch: str,
    cuda: str | None,
    environ: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    *,
    gpu_here: bool,
) -> GpuBuild | None:
    """Return the parts of a GPU build; None for a Horovod without GPUs.

    Args:
        torch: Version of the installed torch.
        cuda: Its CUDA version, None without CUDA.
        environ: The user's environment.
        which: Finds a program on the PATH.
        gpu_here: Whether this machine has a GPU. If it has none, no GPU support is requested and there is no toolkit,
            PyPI's default torch, which is for CUDA, gets a Horovod without GPUs: `make demo` must work on a laptop.

    Raises:
        UnfitError: A part is missing or does not match the others.
    """
    asked = sorted(name for name in environ if name.startswith(_GPU_OPERATIONS) and environ[name] in ("NCCL", "MPI"))
    cpu_only = environ.get(CPU_ONLY, "0") not in ("", "0")
    if asked and (cuda is None or cpu_only):
        got = f"torch {torch}, which is without CUDA" if cuda is None else f"{CPU_ONLY}=1"
        raise UnfitError(
            f"got {asked[0]}={environ[asked[0]]} and {got}; expected a torch with CUDA and no {CPU_ONLY}: "
            f"install torch for CUDA, or unset {asked[0]}"
        )
    if cuda is None:
        return None
    home = find_toolkit(environ, which)
    if cpu_only:
        if home is not None:
            raise UnfitError(
                f"got {CPU_ONLY}=1 and a CUDA toolkit in {home}, which Horovod's build uses whenever torch is for "
                f"CUDA; expected none: unset {CPU_ONLY}, or hide the toolkit (CUDA_HOME, PATH, /usr/local/cuda)"
            )
        return None
    named = any(environ.get(name) for name in _TOOLKIT_NAMES)
    if home is None and not (asked or named or gpu_here):
        return None
    if home is None:
        raise UnfitError(_no_toolkit(torch, cuda, environ))
    toolkit = toolkit_version(home)
    if toolkit.split(".")[0] != cuda.split(".")[0]:
        raise UnfitError(
            f"got the CUDA toolkit {toolkit} in {home}, expected CUDA {cuda.split('.')[0]}, since torch {torch} is "
            f"built for CUDA {cuda}: install that toolkit and set HOROVOD_CUDA_HOME to its folder"
        )
    if not wants(environ, "NCCL"):
        return GpuBuild(cuda, toolkit, home)
    folder = None if any(environ.get(name) for name in _NCCL_GIVEN) else torch_nccl()
    header = folder / "include" / "nccl.h" if folder else _given_header(environ, home)
    if header is None:
        major = cuda.split(".")[0]
        raise UnfitError(
            f"got no nccl.h, expected the NCCL of torch (package nvidia-nccl-cu{major}) or the system's: "
            f"pip install nvidia-nccl-cu{major}, apt-get install libnccl-dev, or set HOROVOD_NCCL_HOME to its folder"
        )
    return GpuBuild(cuda, toolkit, home, nccl_version(header), folder)


def _no_toolkit(torch: str, cuda: str, environ: Mapping[str, str]) -> str:
    named = next((name for name in _TOOLKIT_NAMES if environ.get(name)), None)
    looked = f"{named}={environ[named]}" if named else "HOROVOD_CUDA_HOME, CUDA_HOME, the PATH and /usr/local/cuda"
    package = f"cuda-toolkit-{'-'.join(cuda.split('.')[:2])}"
    return (
        f"torch {torch} is built for CUDA {cuda}: got no CUDA toolkit (bin/nvcc and include/cuda_runtime.h; looked in "
        f"{looked}), expected one of CUDA {cuda.split('.')[0]}: apt-get install {package} from NVIDIA's repository (or "
        f"the image nvidia/cuda:{cuda}.0-devel-*) and set HOROVOD_CUDA_HOME to its folder; or install torch without "
        f"CUDA (make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu); or set {CPU_ONLY}=1 for a Horovod "
        f"that refuses GPU tensors"
    )


# ---- toolkit ------------------------------------------------------------------------------------------------------


def find_toolkit(environ: Mapping[str, str], which: Callable[[str], str | None]) -> Path | None:
    """Return the folder of a CUDA toolkit with a compiler and headers: the configured one, or one that was found."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            named = Path(environ[name])
            return named if is_toolkit(named) else None
    nvcc = which("nvcc")
    # A launcher elsewhere on the PATH may run the compiler in /usr/local/cuda.
    at_hand = [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next((home for home in (*at_hand, Path("/usr/local/cuda")) if is_toolkit(home)), None)


def is_toolkit(home: Path) -> bool:
    return (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file()


def toolkit_version(home: Path) -> str:
    """Return the version of a toolkit's compiler, for example 13.0.88.

    Raises:
        UnfitError: It does not run.
    """
    nvcc = home / "bin" / "nvcc"
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnfitError(f"{nvcc} does not run ({error}): install the CUDA toolkit again") from None
    found = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if not found:
        raise UnfitError(f"{nvcc} --version: got {done.stdout.strip()[-80:]!r}, expected 'release 13.0, V13.0.88'")
    return found.group(1)


# ---- compiler -----------------------------------------------------------------------------------------------------


def gcc_version(compiler: str) -> tuple[int, ...] | None:
    """Return the version of a GCC; None for another compiler, or one that does not run."""
    command = [*shlex.split(compiler), "-x", "c++", "-dM", "-E", "/dev/null"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    macros = dict(re.findall(r"^#define (\w+) (\S+)$", text, re.MULTILINE))
    if "__clang__" in macros or "__GNUC__" not in macros:
        return None
    return tuple(int(macros[name]) for name in ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__"))


def newest_gcc(home: Path) -> int | None:
    """Return the newest GCC major version that a toolkit's headers accept; None if they do not say."""
    config = home / "include" / "crt" / "host_config.h"
    if not config.is_file():
        return None
    found = re.search(r"__GNUC__ > (\d+)", config.read_text(encoding="utf-8", errors="replace"))
    return int(found.group(1)) if found else None


def check_gcc(version: tuple[int, ...] | None, gpu: GpuBuild | None) -> None:
    """Raise UnfitError if this GCC is too old for torch's headers, or too new for the toolkit."""
    if version is None:
        return
    shown = ".".join(map(str, version))
    if version[0] < OLDEST_GCC:
        raise UnfitError(
            f"got GCC {shown}, expected {OLDEST_GCC} or later for torch's headers: apt-get install g++-{OLDEST_GCC} "
            f"(or later) and set CXX to it"
        )
    newest = newest_gcc(gpu.home) if gpu else None
    if gpu and newest and version[0] > newest:
        raise UnfitError(
            f"got GCC {shown}, expected at most {newest} for the CUDA toolkit {gpu.toolkit}: apt-get install "
            f"g++-{newest} and set CC=gcc-{newest} CXX=g++-{newest}, or install a newer toolkit of CUDA {gpu.cuda}"
        )


# ---- NCCL ---------------------------------------------------------------------------------------------------------


def torch_nccl(site: Path | None = None) -> Path | None:
    """Return the folder of the NCCL package that torch loads (`include/nccl.h`, `lib/libnccl.so.2`), or None."""
    folder = (site or Path(sysconfig.get_path("purelib"))) / "nvidia" / "nccl"
    complete = (folder / "include" / "nccl.h").is_file() and (folder / "lib" / "libnccl.so.2").is_file()
    return folder if complete else None


def nccl_version(header: Path) -> str:
    """Return the version in NCCL's header, for example 2.28.9.

    Raises:
        UnfitError: The header has none.
    """
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = [re.search(rf"^#define NCCL_{name} (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise UnfitError(f"{header}: got no NCCL_MAJOR, NCCL_MINOR and NCCL_PATCH, expected NCCL's header: install it")
    return ".".join(part.group(1) for part in parts if part)


def _given_header(environ: Mapping[str, str], home: Path) -> Path | None:
    given = [environ["HOROVOD_NCCL_INCLUDE"]] if environ.get("HOROVOD_NCCL_INCLUDE") else []
    if environ.get("HOROVOD_NCCL_HOME"):
        given.append(f"{environ['HOROVOD_NCCL_HOME']}/include")
    folders = [Path(folder) for folder in given] or [home / "include", Path("/usr/include")]
    return next((folder / "nccl.h" for folder in folders if (folder / "nccl.h").is_file()), None)


def nccl_home(gpu: GpuBuild, work: Path) -> Path:
    """Make a folder that a linker can use: the package has no `libnccl.so`, only `libnccl.so.2`.

    The linked Horovod then needs `libnccl.so.2`, which torch has already loaded.
    """
    assert gpu.nccl_folder is not None
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(gpu.nccl_folder / "include", target_is_directory=True)
    (home / "lib" / "libnccl.so").symlink_to(gpu.nccl_folder / "lib" / "libnccl.so.2")
    return home


def build_variables(gpu: GpuBuild, work: Path) -> dict[str, str]:
    """Return the environment that makes Horovod's build use exactly these parts."""
    home = str(gpu.home)
    variables = {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home, "CUDAToolkit_ROOT": home}
    if gpu.nccl_folder is not None:
        variables |= {"HOROVOD_NCCL_HOME": str(nccl_home(gpu, work)), "HOROVOD_NCCL_LINK": "SHARED"}
    return variables
