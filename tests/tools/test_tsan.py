"""Horovod's core, patched, under ThreadSanitizer: sets that come and go while threads use them.

The core is Horovod's own; what it talks to the other processes with is replaced by `tsan/fake_*.h`, since neither Gloo
nor torch is what is tested here, and both take minutes to compile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_horovod as build
import pytest
from unified_diff import apply_patches

FAKES = Path(__file__).parent / "tsan"
# What stands in for which of Horovod's files.
OVERLAY = {
    "fake_gloo.h": "gloo/gloo_context.h",
    "fake_gloo_controller.h": "gloo/gloo_controller.h",
    "fake_gloo_operations.h": "ops/gloo_operations.h",
    "fake_parameter_manager.h": "parameter_manager.h",
}
GLOO_HEADERS = ("allgather", "allreduce", "context", "math")
SOURCES = (
    "common", "controller", "fusion_buffer_manager", "group_table", "half", "logging", "message", "operations",
    "process_set", "response_cache", "stall_inspector", "tensor_queue", "timeline", "utils/env_parser",
    "ops/collective_operations", "ops/operation_manager",
)  # fmt: skip
TSAN_STATUS = 66
COMPILE_S, RUN_S = 300, 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def sdist() -> Path:
    """The source of Horovod that the build script has fetched."""
    cache = Path(os.environ.get("STAR_CACHE_DIR") or Path.home() / ".cache" / "star-hvd")
    path = cache / "sdist" / build.SDIST
    if not path.is_file():
        pytest.skip(f"no {path}: scripts/build_horovod.py fetches it")
    build.check_digest(path, build.SDIST_SHA256)
    return path


def compiler(folder: Path) -> str:
    """A compiler with which a program runs under ThreadSanitizer."""
    program = os.environ.get("CXX", "g++")
    if shutil.which(program) is None:
        pytest.skip(f"no C++ compiler ({program})")
    (folder / "try.cc").write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    command = [program, "-fsanitize=thread", "-pthread", "try.cc", "-o", "try"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if made.returncode != 0:
        pytest.skip(f"{program} has no ThreadSanitizer: {made.stderr.strip().splitlines()[-1:]}")
    ran = subprocess.run([str(folder / "try")], capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not run here: {(ran.stderr.strip() or str(ran.returncode))[:200]}")
    return program


def prepare(folder: Path) -> Path:
    """The patched core with our stand-ins in place. Returns its root."""
    with tarfile.open(sdist()) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        # The file of Gloo is not compiled; a patch is for it.
        others = r"third_party/(boost|flatbuffers)/|third_party/gloo/gloo/transport/tcp/pair\.cc"
        wanted = re.compile(rf"horovod-{build.VERSION}/(CMakeLists|horovod/|{others})")
        archive.extractall(folder, [each for each in archive.getmembers() if wanted.match(each.name)])
    root = folder / f"horovod-{build.VERSION}"
    # STAR_TSAN_PATCHES=0001,0002 tries the test itself: without 0010 it has to fail.
    chosen = os.environ.get("STAR_TSAN_PATCHES")
    patches = sorted(build.PATCH_DIR.glob("*.patch"))
    apply_patches(root, [patch for patch in patches if chosen is None or patch.name[:4] in chosen.split(",")])
    for fake, replaced in OVERLAY.items():
        shutil.copy(FAKES / fake, root / "horovod" / "common" / replaced)
    (folder / "gloo").mkdir()
    for name in GLOO_HEADERS:
        (folder / "gloo" / f"{name}.h").write_text(f'#include "{root}/horovod/common/gloo/gloo_context.h"\n')
    return root


def compile_core(root: Path, folder: Path, program: str) -> Path:
    """Compile and link the core and its test. Returns the program."""
    common = root / "horovod" / "common"
    boost = [f"-isystem{path}" for path in sorted((root / "third_party" / "boost").glob("*/include"))]
    flags = ["-std=c++17", "-O1", "-g1", "-w", "-DNDEBUG", "-DHAVE_GLOO=1", "-fsanitize=thread", "-pthread"]
    places = [f"-I{folder}", f"-I{common}", f"-isystem{root}/third_party/flatbuffers/include", *boost]
    files = {name: common / f"{name}.cc" for name in SOURCES} | {"core_test": FAKES / "core_test.cc"}

    def one(item: tuple[str, Path]) -> str:
        made = str(folder / f"{item[0].replace('/', '_')}.o")
        command = [program, *flags, *places, "-c", str(item[1]), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return made

    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        objects = list(pool.map(one, files.items()))
    result = folder / "core_test"
    link = [program, "-fsanitize=thread", "-pthread", *objects, "-o", str(result)]
    done = subprocess.run(link, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return result


def test_sets_that_come_and_go_while_threads_use_them(tmp_path: Path) -> None:
    program = compiler(tmp_path)
    tested = compile_core(prepare(tmp_path), tmp_path, program)
    environ = {**os.environ, "TSAN_OPTIONS": f"exitcode={TSAN_STATUS} halt_on_error=0 history_size=4"}
    done = subprocess.run(
        [str(tested), "3", "60"], capture_output=True, text=True, timeout=RUN_S, env=environ, check=False
    )
    races = re.findall(r"SUMMARY: (ThreadSanitizer: .*)", done.stderr)
    assert done.returncode == 0, f"status {done.returncode}, {sorted(set(races))}\n{done.stderr[:8000]}"
    assert not races
    assert "answered" in done.stdout
