"""`star-hvd report`: a name that is no run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from star_hvd.run_log import report_page


def report(*words: str) -> int:
    parser = argparse.ArgumentParser()
    report_page.add_arguments(parser)
    return report_page.run(parser.parse_args(words))


@pytest.mark.parametrize("by_option", [False, True])
def test_a_wrong_name_makes_no_database(
    by_option: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("STAR_LOG_DIR", str(tmp_path / "elsewhere" if by_option else tmp_path))
    assert report("typo", *(["--logs", str(tmp_path)] if by_option else [])) == 2
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert "typo is no run folder" in said and f"no MLflow in {tmp_path}" in said
    assert "--logs or STAR_LOG_DIR" in said
