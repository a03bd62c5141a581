"""What is trained: two real data sets with a fixed split, each with a small network and its settings."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

__all__ = [
    "DATASETS",
    "FINAL_LEARNING_RATE_FRACTION",
    "Task",
    "TaskDefaults",
    "TaskError",
    "USUAL_HIDDEN_UNITS",
    "defaults_for",
    "load_task",
    "make_network",
]

FASHION_DIR = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TRAIN_SAMPLES = 1280
SPLIT_SEED = 20230601  # only has to be fixed
FINAL_LEARNING_RATE_FRACTION = 0.1  # without decay the final accuracy of one seed scatters by a point
IDX_DATA_TYPE_UINT8 = 8
USUAL_HIDDEN_UNITS = 32


class TaskError(RuntimeError):
    """A data set that cannot be had; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Settings of a data set, the same for every variant.

    Attributes:
        batch_samples: Samples a rank takes per step.
        learning_rate: Of the first epoch; falls linearly, per epoch, to `FINAL_LEARNING_RATE_FRACTION` of it.
        momentum: Of SGD.
        epochs: Passes over the training samples.
        target_accuracy: Reached after about 60 % of a run without stragglers (measured, 4 ranks, 5 seeds).
        eval_every_steps: Global steps between two snapshots of the parameters.
        train_samples: Training samples used.
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
        test_x: Inputs held out, shape (n_test, ...).
        test_y: Labels held out, shape (n_test,).
    """

    train: TensorDataset
    test_x: torch.Tensor
    test_y: torch.Tensor


def defaults_for(dataset: str) -> TaskDefaults:
    """Settings of `dataset`.

    Raises:
        TaskError: Unknown data set.
    """
    if dataset not in DATASETS:
        raise TaskError(f"data set is {dataset!r}; expected one of {', '.join(DATASETS)}")
    return DATASETS[dataset]


def load_task(dataset: str, train_samples: int) -> Task:
    """Read a data set and split it, always the same way.

    Args:
        dataset: One of `DATASETS`.
        train_samples: How many of the training samples to use.

    Raises:
        TaskError: Unknown or not installed, or it has fewer samples than asked for.
    """
    defaults_for(dataset)
    train_x, train_y, test_x, test_y = _digits() if dataset == "digits" else _fashion()
    if not 1 <= train_samples <= len(train_x):
        raise TaskError(f"train samples is {train_samples}; {dataset} has 1 to {len(train_x)}")
    train = TensorDataset(train_x[:train_samples], train_y[:train_samples])
    return Task(train=train, test_x=test_x, test_y=test_y)


def make_network(dataset: str, hidden_units: int = 32) -> nn.Module:
    """A fresh network for `dataset`, initialized from torch's current random state.

    Args:
        dataset: One of `DATASETS`.
        hidden_units: Width of the hidden layer; on digits, where it is more than usual, of two hidden layers, so that
            the gradient is large: 4 * `hidden_units` ** 2 bytes and some.
    """
    if dataset == "digits" and hidden_units > USUAL_HIDDEN_UNITS:
        wide = nn.Linear(hidden_units, hidden_units)
        return nn.Sequential(
            nn.Linear(64, hidden_units), nn.ReLU(), wide, nn.ReLU(), nn.Linear(hidden_units, 10)
        )
    if dataset == "digits":
        return nn.Sequential(nn.Linear(64, hidden_units), nn.ReLU(), nn.Linear(hidden_units, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, hidden_units),
        nn.ReLU(),
        nn.Linear(hidden_units, 10),
    )


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
