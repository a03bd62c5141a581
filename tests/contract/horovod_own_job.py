"""What every rank runs of Horovod's own optimizer tests: one after another in one process, with star_hvd in its place.

The file is Horovod's and not ours: it is read where it lies, and only the import of the library is replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.launch import JOB_LIMIT_S, write_result

__all__ = ["FAILING", "PASSING"]

# With torch 2.13 these pass on plain Horovod 0.28.1 and two ranks.
PASSING = (
    "test_broadcast_state_no_grad",
    "test_duplicate_names",
    "test_dynamic_requires_grad",
    "test_gradient_clipping",
    "test_missing_named_parameters",
    "test_no_named_parameters",
    "test_optimizer_no_named_parameters",
    "test_sparse_embeddings",
    "test_synchronize_step_warning",
    "test_compression_fp16",
)
# These try every optimizer class of torch's and fail at Muon, which refuses their model, in the middle of the series.
FAILING = ("test_broadcast_state_options", "test_force_allreduce")
LIMIT_S = JOB_LIMIT_S - 60.0
IMPORT = "import horovod.torch as hvd"


def load(path: Path, library: str) -> Any:
    """The test class, using `library`."""
    text = path.read_text(encoding="utf-8")
    assert IMPORT in text, f"{path} does not import Horovod as expected"
    sys.modules.setdefault("common", _common())
    module = types.ModuleType("horovod_own_tests")
    module.__file__ = str(path)
    exec(compile(text.replace(IMPORT, f"import {library} as hvd"), str(path), "exec"), module.__dict__)
    return module.TorchTests  # type: ignore[attr-defined]


def _common() -> types.ModuleType:
    """What the tests take from the folder beside theirs."""

    @contextlib.contextmanager
    def temppath() -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "file")

    module = types.ModuleType("common")
    module.temppath = temppath  # type: ignore[attr-defined]
    module.mpi_env_rank_and_size = lambda: (0, 1)  # type: ignore[attr-defined]
    module.skip_or_fail_gpu_test = lambda test, message: test.skipTest(message)  # type: ignore[attr-defined]
    return module


def run(tests: Any, name: str) -> str:
    """Empty, or what was wrong."""
    result = unittest.TestResult()
    tests(name).run(result)
    wrong = [text for _, text in (*result.errors, *result.failures)] + [why for _, why in result.skipped]
    return "\n".join(wrong)


def main(path: str, library: str, ending: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    tests = load(Path(path), library)
    if ending == "one-world":
        tests.tearDown = lambda self: None
    outcomes: dict[str, str] = {}
    for name in (*FAILING, *PASSING):
        write_result({"outcomes": outcomes, "running": name})
        outcomes[name] = run(tests, name)
    write_result({"outcomes": outcomes, "running": ""})


if __name__ == "__main__":
    main(*sys.argv[1:])
