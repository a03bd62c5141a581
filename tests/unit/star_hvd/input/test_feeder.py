"""How fast the workers load, and the warning of a Horovod with which forked ones can hang."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from star_hvd.input import feeder
from star_hvd.input.lease_stock import Batch

SAMPLES = 4


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


class OpenedByWorkers(torch.utils.data.Dataset[int]):
    """As data sets in files that `worker_init_fn` opens."""

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is None:
            raise OSError("not open")
        return index


def test_what_is_loaded_in_the_training_thread_fails_with_what_to_do_if_only_workers_open_the_data() -> None:
    for init, notes in ((lambda number: None, [feeder.IN_THREAD_NOTE]), (None, [])):
        found = feeder.Feeder(OpenedByWorkers(), {"num_workers": 1, "worker_init_fn": init})
        with pytest.raises(OSError, match="not open") as caught:
            found.load([3])
        assert getattr(caught.value, "__notes__", []) == notes
    assert "worker_init_fn" in feeder.IN_THREAD_NOTE and "__getitem__" in feeder.IN_THREAD_NOTE


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


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample takes `load_s` to load."""

    def __init__(self, load_s: float) -> None:
        self.load_s = load_s

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.load_s)
        return torch.tensor(float(index))

    def __len__(self) -> int:
        return 4000


class _Stock:
    """A stock that never ends; a batch is its number's samples."""

    batch = in_stock = SAMPLES

    def __init__(self) -> None:
        self.formed = 0

    def form(self) -> Batch:
        self.formed += 1
        start = SAMPLES * (self.formed - 1)
        return Batch(self.formed - 1, ((start, start + SAMPLES),))


class _Dry(_Stock):
    """A stock with a few batches, and then with many."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 5

    @property
    def in_stock(self) -> int:  # type: ignore[override]
        return self.left * SAMPLES

    def form(self) -> Batch | None:  # type: ignore[override]
        self.left -= 1
        return super().form() if self.left >= 0 else None


@pytest.mark.parametrize("in_order", [True, False])
def test_all_workers_are_at_work_again_after_a_moment_without_stock(in_order: bool) -> None:
    """As torch requests one batch per batch it delivers, the others stay idle unless it is asked anew."""
    made = feeder.Feeder(_Slow(0.0), {"num_workers": 4, "in_order": in_order})
    stock: Any = _Dry()

    def take() -> tuple[Batch, Any] | None:
        return made.next(stock, lambda number: Batch(number, ()))

    made.begin(stock, lambda start, stop: list(range(start, stop)))
    made.start()
    assert stock.left < 0, "dry, as torch requests eight batches at once"
    for _ in range(4):
        assert take() is not None
    stock.left = 100
    assert take() is not None and take() is None and stock.left == 100, "none is formed before it is asked anew"
    made.start()
    assert stock.left == 92
    for _ in range(20):
        assert take() is not None
    assert stock.left == 72


def _batches(found: feeder.Feeder, count: int) -> list[Any]:
    stock: Any = _Stock()
    found.begin(stock, lambda start, stop: list(range(start, stop)))
    found.start()
    taken = [found.next(stock, lambda number: Batch(number, ())) for _ in range(count)]
    numbered = {batch.number: data for batch, data in taken}  # type: ignore[misc]
    assert len(numbered) == count and (list(numbered) == list(range(count)) or not found.in_order)
    return [numbered[number] for number in sorted(numbered)]


@pytest.mark.parametrize("options", [{}, {"pin_memory": False, "in_order": False}, {"collate_fn": torch.stack}])
def test_the_pace_of_the_workers_is_measured_in_them(options: dict[str, Any]) -> None:
    """Nobody waits for a batch here for long; what is measured is at least what the samples take, over two workers."""
    load_s, made = 2e-3, feeder.Feeder(_Slow(2e-3), {"num_workers": 2, **options})
    assert made.pace_s(SAMPLES) == 0.0
    batches = _batches(made, 24)
    assert batches[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    pace_s = made.pace_s(SAMPLES)
    assert pace_s >= SAMPLES * load_s / 2
    assert made.pace_s(2 * SAMPLES) == pytest.approx(2.0 * pace_s)


def test_the_pace_follows_a_change_within_a_few_batches() -> None:
    """It is not computed anew for each, which would take the training thread longer than the rest."""
    data = _Slow(2e-3)
    made = feeder.Feeder(data, {"num_workers": 2, "in_order": False})
    stock: Any = _Stock()
    made.begin(stock, lambda start, stop: list(range(start, stop)))
    made.start()
    paces_s = []
    for _ in range(24):
        made.next(stock, lambda number: Batch(number, ()))
        paces_s.append(made.pace_s(SAMPLES))
    known = paces_s[3:]
    assert paces_s[:3] == [0.0] * 3 and all(known) and len(set(known)) == len(known) // 4 + 1


class _Whole(torch.utils.data.Dataset[Any]):
    """Loads a batch at once, as one object without a length."""

    def __getitems__(self, indices: list[int]) -> Any:
        return iter(indices)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("torch asks for whole batches")

    def __len__(self) -> int:
        return 4000


def test_a_data_set_may_load_whole_batches_of_any_type() -> None:
    made = feeder.Feeder(_Whole(), {"num_workers": 1, "collate_fn": lambda batch: torch.tensor(list(batch))})
    assert [batch.tolist() for batch in _batches(made, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert made.pace_s(SAMPLES) > 0.0


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "multiprocessing_context": "spawn"}])
def test_without_forked_workers_the_pace_is_unknown(options: dict[str, Any]) -> None:
    """Without workers the training thread loads, which is timed there; spawned ones would have to import `star_hvd`."""
    made = feeder.Feeder(_Slow(0.0), options)
    if not options:
        _batches(made, 8)
    assert made.pace_s(SAMPLES) == 0.0
