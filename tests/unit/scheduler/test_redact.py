"""Credentials of MLflow show neither in the process list nor in what is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scheduler.learning import registry
from scheduler.learning.predictor import ModelError
from scheduler.redact import SECRETS, redacted
from star_hvd.run_log import RunLog, layout, sync_logs
from star_hvd.run_log.facts import environment
from star_hvd.run_log.sender import Sender

URI = "http://alice:hunter22@127.0.0.1:9/mlflow"
PRIVATE = ("alice", "hunter22", "t0p-s3cret")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "t0p-s3cret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)


def shows(text: str) -> list[str]:
    return [private for private in PRIVATE if private in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (URI, "http://***@127.0.0.1:9/mlflow"),
        ("postgresql+psycopg://u:p%40q@db/x and t0p-s3cret", "postgresql+psycopg://***@db/x and ***"),
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --hub_token=abc --max-tokens 512", "train.py --hub_token=*** --max-tokens 512"),
        ("http://h/x?token=abc&y=1", "http://h/x?token=***&y=1"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
        ("the token was refused", "the token was refused"),
    ],
)
def test_what_is_hidden(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_a_fetch_has_no_uri_on_its_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everybody on a machine can read the arguments of all processes, and only the user their environment."""
    child = tmp_path / "python"
    child.write_text(
        "#!/bin/sh\ntr '\\0' ' ' < /proc/$$/cmdline >&2\n"
        '[ "$MLFLOW_TRACKING_URI$MLFLOW_REGISTRY_URI" = "' + 2 * URI + '" ] || echo no uri in the environment >&2\n'
        "exit 1\n"
    )
    child.chmod(0o755)
    monkeypatch.setattr(registry.sys, "executable", str(child))
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///elsewhere")  # `star-scheduler` does not use it either.
    with pytest.raises(ModelError) as told:
        registry.fetch("models:/star-tta@champion", os.environ, deadline_s=60.0)
    assert "scheduler.learning.registry" in str(told.value) and "no uri" not in str(told.value)
    assert shows(str(told.value)) == []
    assert shows(" ".join(psutil.Process().cmdline())) == []


def test_the_facts_of_a_run_hide_what_the_command_line_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--to", URI, "--password", "t0p-s3cret", "--lr", "0.1"])
    facts = environment(["h"])
    assert facts["program"] == "train.py --to http://***@127.0.0.1:9/mlflow --password *** --lr 0.1"
    assert shows(json.dumps(facts)) == []


def test_nothing_that_is_written_of_a_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=1, job=environment(["h"]), ship=False)
    log.close("FINISHED", 60.0)
    directory = tmp_path / "runs" / "one"

    made: list[str] = []

    class Refuses:
        """A server that is gone after it has made the run."""

        def get_experiment_by_name(self, name: str) -> object:
            return SimpleNamespace(experiment_id="0", lifecycle_stage="active")

        def search_runs(self, *asked: object, **more: object) -> list[object]:
            return []

        def create_run(self, *given: object, run_name: str, **more: object) -> object:
            made.append(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"cannot reach {URI} as t0p-s3cret")

    monkeypatch.setattr("star_hvd.run_log.sender.connect", lambda uri: Refuses())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot reach"):
            Sender(directory, URI).send()
        assert layout.read_json(directory / "sent.json")["uri"] == redacted(URI)
    assert made == ["one"], "it is known again by what was written"
    assert sync_logs.send_run(directory, URI, again=False) == "failed"
    said = capsys.readouterr()
    written = "".join(path.read_text() for path in directory.iterdir() if path.is_file())
    assert "cannot reach" in said.err and shows(said.out + said.err + written) == []
