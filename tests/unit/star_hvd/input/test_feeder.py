"""A Horovod with which forked workers can hang is warned of, where workers are forked."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from star_hvd.input import feeder


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    feeder.warn_of_forks.cache_clear()
    monkeypatch.setattr(feeder, "forks_can_hang", lambda patches: True)

    def make(**options: Any) -> int:
        with caplog.at_level(logging.WARNING, logger="star_hvd"):
            feeder.Feeder(TensorDataset(torch.arange(4)), options)
        return sum("patch 0013" in record.getMessage() for record in caplog.records)

    yield make
    feeder.warn_of_forks.cache_clear()


def test_forked_workers_are_warned_of_once(warned: Any) -> None:
    assert warned(num_workers=1) == 1
    assert warned(num_workers=2, multiprocessing_context="fork") == 1


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "multiprocessing_context": "spawn"}, {"multiprocessing_context": None}]
)
def test_other_workers_are_not(warned: Any, options: dict[str, Any]) -> None:
    assert warned(**options) == 0


def test_a_horovod_with_the_patch_needs_no_warning(warned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "forks_can_hang", lambda patches: False)
    assert warned(num_workers=1) == 0


def test_the_program_may_still_choose_how_processes_start() -> None:
    """Looking at the default must not settle it: `set_start_method` raises then."""
    program = (
        "import multiprocessing, torch\n"
        "from star_hvd.input.feeder import Feeder\n"
        "Feeder(torch.utils.data.TensorDataset(torch.arange(4)), {'num_workers': 1})\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
