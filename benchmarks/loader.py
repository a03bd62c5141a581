"""Throughput of `hvd.shard` against the same DataLoader without it: samples that take 5 ms, and JPEG pictures.

    python -m benchmarks.loader --json FILE

One rank, four worker processes, alternating epochs of both sides. A side's figure is the median over its epochs,
without the first one, in which workers start. The training loop does nothing, so only the loader is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import star_hvd as hvd
from benchmarks.lab.json_option import json_file
from benchmarks.lab.spec import write_json
from benchmarks.tta import versions

__all__ = ["main", "measure"]

WORKERS = 4
BATCH_SAMPLES = 16
SAMPLE_S = 0.005
PICTURES = 64
PICTURE_PIXELS, NETWORK_PIXELS = 320, 224
QUALITY = 90


class Waiting(Dataset[torch.Tensor]):
    """Samples that take 5 ms without using the processor, as from a remote store."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((8,), float(index))


class Pictures(Dataset[torch.Tensor]):
    """JPEG files, decoded and scaled to a network's input.

    Args:
        folder: Where the files are made.
        samples: Length; files are reused cyclically.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self._samples = samples
        self._files = [folder / f"{number}.jpg" for number in range(PICTURES)]
        generator = np.random.default_rng(0)
        for file in self._files:
            coarse = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((PICTURE_PIXELS, PICTURE_PIXELS)).save(file, quality=QUALITY)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self._files[index % PICTURES]) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((NETWORK_PIXELS, NETWORK_PIXELS)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div_(255.0)


def _loader(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(data, batch_size=BATCH_SAMPLES, shuffle=True, num_workers=WORKERS, persistent_workers=True)


def _rate(loader: Iterable[torch.Tensor], samples: int) -> float:
    """Return the samples per second of an epoch.

    Raises:
        RuntimeError: Samples were missing.
    """
    began_s = time.perf_counter()
    seen = sum(len(batch) for batch in loader)
    took_s = time.perf_counter() - began_s
    if seen != samples:
        raise RuntimeError(f"an epoch had {seen} samples; expected {samples}")
    return samples / took_s


def measure(data: Dataset[torch.Tensor], samples: int, epochs: int) -> dict[str, Any]:
    """Alternate epochs of both sides; return rates, the ratio of their medians, and waits for leases."""
    plain, ours = _loader(data), hvd.shard(_loader(data))
    for loader in (plain, ours):
        _rate(loader, samples)
    rates: dict[str, list[float]] = {"plain": [], "star": []}
    for epoch in range(epochs):
        sides: list[tuple[str, Iterable[torch.Tensor]]] = [("plain", plain), ("star", ours)]
        for name, loader in sides if epoch % 2 else reversed(sides):
            rates[name].append(_rate(loader, samples))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    waits = list(ours.lease_waits)[1:]
    return {
        "ratio": medians["star"] / medians["plain"],
        "samples_per_s": medians,
        "rates": rates,
        "lease_waits": waits,
        "lease_waits_median": statistics.median(waits),
    }


def _print(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name}: DataLoader {found['samples_per_s']['plain']:.0f} samples/s, shard "
        f"{found['samples_per_s']['star']:.0f} samples/s, ratio {found['ratio']:.3f}, waits for a lease in the "
        f"median epoch {found['lease_waits_median']:g} {json.dumps(found['lease_waits'])}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both data sets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--epochs", type=int, default=7, help="timed epochs of each side")
    parser.add_argument("--samples", type=int, default=3200, help="samples of an epoch")
    args = parser.parse_args(argv)
    for name in ("epochs", "samples"):
        if not 1 <= getattr(args, name) <= 1_000_000:
            parser.error(f"--{name} is {getattr(args, name)}; expected at least 1")
    hvd.init()
    found = {}
    with tempfile.TemporaryDirectory(prefix="star-pictures-") as folder:
        for name, data in (("5ms", Waiting(args.samples)), ("jpeg", Pictures(Path(folder), args.samples))):
            found[name] = measure(data, args.samples, args.epochs)
            _print(name, found[name])
    hvd.shutdown()
    summary = {
        "ratio_5ms": found["5ms"]["ratio"],
        "ratio_jpeg": found["jpeg"]["ratio"],
        "cores": len(os.sched_getaffinity(0)),
        "workers": WORKERS,
        "batch_samples": BATCH_SAMPLES,
        "samples": args.samples,
        "figures": found,
        "versions": versions(),
    }
    if args.json is not None:
        write_json(args.json, summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
