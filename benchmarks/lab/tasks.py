"""The training tasks: two real data sets with a fixed split, and the settings that fit each network."""

from __future__ import annotations

import gzip
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

__all__ = [
    "DATASETS",
    "FINAL_LEARNING_RATE_FRACTION",
    "SlowSamples",
    "Task",
    "TaskDefaults",
    "TaskError",
    "defaults_for",
    "load_task",
]

FASHION_DIR = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TRAIN_SAMPLES = 1280
SPLIT_SEED = 20230601  # Arbitrary, but fixed.
FINAL_LEARNING_RATE_FRACTION = 0.1  # Without decay, the final accuracy varies by a point between seeds.
IDX_DATA_TYPE_UINT8 = 8


class TaskError(RuntimeError):
    """A data set is not available; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Settings of a data set, the same for every variant.

    Attributes:
        batch_samples: Samples a rank takes per step.
        learning_rate: Of the first epoch; falls linearly, per epoch, to `FINAL_LEARNING_RATE_FRACTION` of it.
        momentum: Momentum of SGD.
        epochs: Passes over the training samples.
        target_accuracy: Reached after about 60 % of a run without stragglers (measured, 4 ranks, 5 seeds).
        eval_every_steps: Global steps between two snapshots of the parameters.
        train_samples: Number of training samples.
    """

    batch_samples: int
    learning_rate: float
    momentum: float
    epochs: int
    target_accuracy: float
    eval_every_steps: int
    train_samples: int


DATASETS: dict[str, TaskDefaults] = {
    "digits": TaskDefaults(
        batch_samples=16,
        learning_rate=0.05,
        momentum=0.9,
        epochs=8,
        target_accuracy=0.93,
        eval_every_steps=2,
        train_samples=DIGITS_TRAIN_SAMPLES,
    ),
    "fashion": TaskDefaults(
        batch_samples=32,
        learning_rate=0.05,
        momentum=0.9,
        epochs=4,
        target_accuracy=0.82,
        eval_every_steps=4,
        train_samples=12800,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Tensors of one data set.

    Attributes:
        train: Training samples, as a map-style data set of (input, label).
        test_x: Held-out inputs, shape (n_test, ...).
        test_y: Held-out labels, shape (n_test,).
    """

    train: TensorDataset
    test_x: torch.Tensor
    test_y: torch.Tensor


# Settings that differ for a network other than the data set's default one.
OF_NETWORKS: dict[tuple[str, str], dict[str, Any]] = {
    ("digits", "conv"): dict(target_accuracy=0.96),
    ("digits", "transformer"): dict(learning_rate=0.02, target_accuracy=0.90, eval_every_steps=8),
    ("fashion", "mlp"): dict(target_accuracy=0.82),
    ("fashion", "conv"): dict(target_accuracy=0.83),
    ("fashion", "transformer"): dict(target_accuracy=0.79, eval_every_steps=20),
}


class SlowSamples(Dataset[Any]):
    """A data set whose samples take time to load, as with reading and decoding; the loading thread sleeps meanwhile.

    Args:
        samples: The data set.
        sample_s: Seconds per sample.
    """

    def __init__(self, samples: Dataset[Any], sample_s: float) -> None:
        self._samples, self._sample_s = samples, sample_s

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return self._samples[index]


def defaults_for(dataset: str, network: str = "usual") -> TaskDefaults:
    """Return the settings of `dataset` for a network.

    Raises:
        TaskError: Unknown data set.
    """
    if dataset not in DATASETS:
        raise TaskError(f"data set is {dataset!r}; expected one of {', '.join(DATASETS)}")
    return replace(DATASETS[dataset], **OF_NETWORKS.get((dataset, network), {}))


def load_task(dataset: str, train_samples: int) -> Task:
    """Read a data set and split it deterministically.

    Args:
        dataset: One of `DATASETS`.
        train_samples: How many of the training samples to use.

    Raises:
        TaskError: The data set is unknown, not installed, or has fewer samples than asked for.
    """
    defaults_for(dataset)
    train_x, train_y, test_x, test_y = _digits() if dataset == "digits" else _fashion()
    if not 1 <= train_samples <= len(train_x):
        raise TaskError(f"train samples is {train_samples}; {dataset} has 1 to {len(train_x)}")
    train = TensorDataset(train_x[:train_samples], train_y[:train_samples])
    return Task(train=train, test_x=test_x, test_y=test_y)


def _digits() -> tuple[torch.Tensor, ...]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError("the digits data set needs scikit-learn; install it: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    x = torch.from_numpy((images[order] / 16.0).astype(np.float32))
    y = torch.from_numpy(labels[order].astype(np.int64))
    cut = DIGITS_TRAIN_SAMPLES
    return x[:cut], y[:cut], x[cut:], y[cut:]


def _fashion(folder: Path = FASHION_DIR) -> tuple[torch.Tensor, ...]:
    tensors = []
    for part in ("train", "t10k"):
        images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        tensors.append(torch.from_numpy(images.astype(np.float32) / 255.0).unsqueeze(1))
        tensors.append(torch.from_numpy(labels.astype(np.int64)))
    return tuple(tensors)


def _read_idx(path: Path) -> np.ndarray:
    if not path.is_file():
        raise TaskError(
            f"Fashion-MNIST is not installed: {path} is missing. On Debian or Ubuntu: "
            "apt-get install dataset-fashion-mnist. Or use --dataset digits."
        )
    data = gzip.decompress(path.read_bytes())
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != IDX_DATA_TYPE_UINT8:
        raise TaskError(f"{path} is not an IDX file of bytes: starts with {data[:4]!r}; reinstall the package")
    n_dims = data[3]
    shape = tuple(int(size) for size in np.frombuffer(data, dtype=">u4", count=n_dims, offset=4))
    body = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * n_dims)
    if body.size != int(np.prod(shape)):
        raise TaskError(f"{path} holds {body.size} values; its header says {shape}; reinstall the package")
    return body.reshape(shape)
