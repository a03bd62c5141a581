"""Runs under horovodrun: trains every variant with every seed, one after another, in the same processes.

Rank 0 writes one record and its snapshots per training into the run's folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from benchmarks.lab.scenarios import Scenario
from benchmarks.lab.spec import PLAIN_VARIANTS, RunRecord, RunSpec, write_json
from benchmarks.lab.tasks import load_task
from benchmarks.lab.training import Setting, Snapshots, train
from benchmarks.machine.accelerator import place_of

__all__ = ["PROGRESS_MARK", "main", "progress", "register", "write_record"]

PROGRESS_MARK = "@progress "
WARM_UP_STEPS = 3
WARM_UP_DEVICE_S = 0.001


def progress(**fields: Any) -> None:
    """Report progress to the driver in one line on standard output."""
    sys.stdout.write(f"{PROGRESS_MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()


def register(run_dir: Path) -> None:
    """Write this process's id for the driver, which ends remaining processes if the run fails."""
    (run_dir / f"{os.getpid()}.pid").touch()


def run_all(setting: Setting, run_dir: Path) -> None:
    """Train everything, alternating the order of the variants, so that a drift of the machine affects all of them."""
    spec = setting.spec
    for variant in spec.variants:  # Fixed modes are brought into force before every training.
        _warm_up(setting, variant)
    for turn, seed in enumerate(spec.seeds):
        for variant in spec.trained if turn % 2 == 0 else tuple(reversed(spec.trained)):
            record, snapshots = train(setting, variant, seed)
            if setting.rank == 0:
                write_record(run_dir, record, snapshots)


def _warm_up(setting: Setting, variant: str) -> None:
    """Train a few untimed steps, so that the first seed does not pay for one-time costs."""
    spec = setting.spec
    samples = min(spec.train_samples, WARM_UP_STEPS * spec.batch_samples * spec.ranks)
    short = dataclasses.replace(
        setting,
        spec=dataclasses.replace(
            spec, epochs=1, passes=1, device_s=min(spec.device_s, WARM_UP_DEVICE_S), device_fixed_s=0.0
        ),
        train=Subset(setting.train, range(samples)),
        slow=setting.slow.without_stragglers(),
        on_epoch=lambda *_: None,
    )
    train(short, variant, seed=0)
    if setting.rank == 0:
        progress(text=f"warmed up {variant}", done=0)


def write_record(run_dir: Path, record: RunRecord, snapshots: Snapshots) -> None:
    """Write a training's record and snapshots for the driver."""
    record.times_s, record.steps = snapshots.times_s, snapshots.steps
    np.savez(run_dir / f"{record.stem}.npz", vectors=np.stack(snapshots.vectors))
    write_json(run_dir / f"{record.stem}.json", record.to_dict())


def main(argv: list[str]) -> int:
    """Train the specification `spec.json` in the folder `argv[0]`."""
    run_dir = Path(argv[0])
    register(run_dir)
    spec = RunSpec.read(run_dir / "spec.json")
    torch.set_num_threads(1)
    plain_only = set(spec.trained) <= set(PLAIN_VARIANTS)
    hvd: Any = importlib.import_module("horovod.torch" if plain_only else "star_hvd")
    hvd.init()
    setting = Setting(
        spec=spec,
        train=ConcatDataset([load_task(spec.dataset, spec.train_samples).train] * spec.passes),
        hvd=hvd,
        rank=hvd.rank(),
        slow=Scenario(name=spec.scenario, rows=spec.rows),
        burns=spec.quota_cores > 0.0,
        run_dir=run_dir,
        place=place_of(spec.device, hvd.local_rank()),
        on_epoch=lambda variant, seed, epoch, loss: progress(
            text=f"seed {seed} {variant}: epoch {epoch} of {spec.epochs}, loss {loss:.3f}", done=1
        ),
    )
    run_all(setting, run_dir)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
