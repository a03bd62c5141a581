"""The command `star-hvd` where something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from star_hvd import cli
from star_hvd.run_log import RunLog


def test_a_report_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, job={"batch": 32}, ship=False)
    log.close()
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["report", str(log.directory), "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("star-hvd report: error: ") and line.endswith("pip install 'star-hvd[train]'")
