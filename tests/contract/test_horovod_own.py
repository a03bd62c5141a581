"""The optimizer tests of Horovod 0.28.1 itself, with star_hvd in place of `horovod.torch`.

They are Horovod's file `test/parallel/test_torch.py`, which is no part of this project: the test takes it from
`STAR_HOROVOD_TESTS` or from the cached source distribution.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tests.contract.horovod_own_job import FAILING, PASSING
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

VARIABLE = "STAR_HOROVOD_TESTS"
NAME = "test/parallel/test_torch.py"
CACHED = Path.home() / ".cache" / "star-hvd" / "sdist" / "horovod-0.28.1.tar.gz"


@pytest.fixture(scope="session")
def own_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod's file, or the test is skipped."""
    given = os.environ.get(VARIABLE)
    if given:
        path = Path(given)
        assert path.is_file(), f"{VARIABLE} is {given!r}, which is no file; give the path of Horovod's {NAME}"
        return path
    if CACHED.is_file():
        with tarfile.open(CACHED) as archive:
            found = [member for member in archive.getmembers() if member.name.endswith(f"/{NAME}")]
            content = archive.extractfile(found[0]) if found else None
            if content is not None:
                path = tmp_path_factory.mktemp("horovod") / "test_torch.py"
                path.write_bytes(content.read())
                return path
    pytest.skip(f"Horovod's source distribution has no {NAME}; set {VARIABLE} to that file of a checkout of v0.28.1")


@pytest.mark.parametrize("ending", ["shutdown-after-each", "one-world"])
def test_those_that_pass_on_horovod_pass_here(own_tests: Path, ending: str) -> None:
    """Ten of ten in one process, after two that fail in the middle of a series of optimizers, as they do there."""
    args = (str(own_tests), "star_hvd", ending)
    env = {"STAR_MODE": "sync"}  # On a busy machine `auto` may find a rank slow, and then a step is another one.
    job = run_job("tests.contract.horovod_own_job", *args, ranks=2, env=env).check()
    for rank, result in enumerate(job.results):
        wrong = {name: result["outcomes"].get(name, "never ran") for name in PASSING}
        assert not any(wrong.values()), f"rank {rank}: {[(n, text) for n, text in wrong.items() if text]}"
        for name in FAILING:
            assert "Muon only supports 2D parameters" in result["outcomes"][name]
