"""Environment variables of the package."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from star_hvd import env
from star_hvd.run_log import layout

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (" , ", None),
        ("cluster=east", {"cluster": "east"}),
        (" cluster = east , data=v3=b,quiet", {"cluster": "east", "data": "v3=b", "quiet": "yes"}),
    ],
)
def test_tags(monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, str] | None) -> None:
    monkeypatch.setenv("STAR_RUN_TAGS", text)
    assert env.tags() == expected


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("MODE", env.mode), ("OVERLAP", env.overlap), ("HOST", env.host), ("POLICY", env.policy),
        ("ENCRYPTION", env.encryption), ("LEAST_QUORUM", env.least_quorum), ("TARGET", env.target),
        ("ACCURACY", env.accuracy), ("INTERFACE", env.interface), ("RUN_TAGS", env.tags),
        ("NEIGHBOURS_DIR", env.neighbours_folder),
    ],
)  # fmt: skip
def test_blanks_do_not_count(name: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.setenv(f"STAR_{name}", "  ")
    assert read() is None
    monkeypatch.setenv(f"STAR_{name}", " 0.5 ")
    assert read() in ("0.5", 0.5, {"0.5": "yes"})


def test_a_log_folder_of_blanks_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_LOG_DIR", " ")
    assert layout.default_root().name == "training_logs"


def test_all_variables_are_known() -> None:
    folders = ("star_hvd", "scheduler", "benchmarks", "scripts", "docker", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    texts = [path.read_text("utf-8") for path in [*paths, ROOT / "Makefile", ROOT / "Dockerfile"]]
    named = {name for text in texts for name in re.findall(r"\bSTAR_([A-Z][A-Z_]*[A-Z])\b", text)}
    assert set(env.KNOWN) == named


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, "srun started 8 processes (SLURM_STEP_NUM_TASKS)"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun started 4 processes"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "`horovodrun -np 2 --gloo python ...`"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, None),  # Process 0 has said it.
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),  # A command of a batch script runs once.
        ({"SLURM_STEP_NUM_TASKS": "8", "HOROVOD_SIZE": "1"}, None),
        ({"PMI_SIZE": "many"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_processes_that_are_jobs_of_their_own_are_told_once(
    variables: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "HOROVOD"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env.warn_alone.cache_clear()
    with caplog.at_level(logging.WARNING, "star_hvd"):
        env.warn_alone()
        env.warn_alone()
    env.warn_alone.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (said is not None) and all(said in text for text in told if said)


def test_misspelled_variables_are_told_once_and_those_of_others_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MOED", "RUNLOG", "policy", "MODE", "TARGET", "LEVEL", "HOME", "VERSION", "HOST_SYS", "X", ""):
        monkeypatch.setenv(f"STAR_{name}", "sync")
    monkeypatch.setenv("OTHER_MOED", "sync")
    env.warn_misspelled.cache_clear()
    with caplog.at_level(logging.WARNING, "star_hvd"):
        env.warn_misspelled()
        env.warn_misspelled()
    assert [record.getMessage() for record in caplog.records] == [
        "STAR_MOED has no effect; is STAR_MODE meant?",
        "STAR_RUNLOG has no effect; is STAR_RUN_LOG meant?",
        "STAR_policy has no effect; is STAR_POLICY meant?",
    ]
