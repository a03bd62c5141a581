"""One elastic training in which the process of the last rank is killed; runs under elastic horovodrun.

The static launcher ends every rank as soon as one dies, so each training is a job of its own. State is committed every
`COMMIT_STEPS` steps. The rank that is rank 0 at the end writes the record and its snapshots.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lab.networks import layer_costs, make_network
from benchmarks.lab.scenarios import baseline
from benchmarks.lab.spec import FREE_VARIANTS, PLAIN_VARIANTS, RunRecord, RunSpec
from benchmarks.lab.tasks import FINAL_LEARNING_RATE_FRACTION, load_task
from benchmarks.lab.training import Snapshots
from benchmarks.lab.worker import progress, register, write_record
from benchmarks.machine.device import LayerClock, make_device
from benchmarks.machine.killed import Watch
from scheduler.records import Plan, parse_mode

__all__ = ["main"]

COMMIT_STEPS = 40


class Training:
    """One rank's part of the training, across worlds.

    Args:
        spec: The run's specification.
        variant: One of `ALL_VARIANTS`, or a fixed mode.
        seed: Seed of initialization and sample order.
        hvd: `star_hvd` or `horovod.torch`.

    Attributes:
        record: What is known of the training.
        snapshots: Its parameters over time.
        watch: Times this rank's steps from the death on.
    """

    def __init__(self, spec: RunSpec, variant: str, seed: int, hvd: Any) -> None:
        self._spec, self._hvd, self._variant, self._seed = spec, hvd, variant, seed
        self._plain, self._fixed = variant in PLAIN_VARIANTS, variant in spec.modes
        torch.manual_seed(seed)
        self._train = load_task(spec.dataset, spec.train_samples).train
        self.model = make_network(spec.dataset, spec.hidden_units, spec.network)
        costs = layer_costs(self.model, self._train[0][0].unsqueeze(0))
        LayerClock(self.model, make_device("cpu"), spec.device_time, costs)
        self.record = RunRecord(variant=variant, seed=seed)
        if not self._plain:  # Counters start again in a new world, and those of the killed rank are gone with it.
            self.record.folds = self.record.drops = self.record.max_staleness = None
        self.snapshots = Snapshots(self.model, spec.eval_every_steps, int(hvd.rank()) == 0)
        self.watch = Watch()
        # Whether the mode comes into force only after some steps, and whether the death has waited for it.
        self._starts_late, self._waited = self._fixed and self._plan().mode != "sync", False
        self._rebuilding = False
        self._start_s = self._last_s = time.perf_counter()

    def _plan(self) -> Plan:
        name = baseline(self._variant, self._spec.ranks - self._spec.quorum)
        return parse_mode(name, self._spec.ranks) or Plan.sync(self._spec.ranks)

    def run(self) -> None:
        """Train to the end, recovering from the death of a rank."""
        spec, hvd = self._spec, self._hvd
        inner = torch.optim.SGD(self.model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
        options: dict[str, Any] = {}
        if not self._plain:
            options["mode"] = baseline(self._variant, spec.ranks - spec.quorum) if self._fixed else spec.mode
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=self.model.named_parameters(), **options)
        elastic = importlib.import_module(f"{hvd.__name__}.elastic")
        state = elastic.TorchState(self.model, optimizer, step=0)
        hvd.barrier()
        self._start_s = self._last_s = time.perf_counter()
        elastic.run(self._steps)(state)
        self.record.train_s = time.perf_counter() - self._start_s
        self.finish(optimizer, state.step)

    def _steps(self, state: Any) -> None:
        spec, hvd = self._spec, self._hvd
        per_epoch = spec.train_samples // (spec.batch_samples * spec.ranks)
        self._rebuilding = int(hvd.size()) < spec.ranks
        if self._rebuilding:
            self.watch.end()
        self.watch.step(state.step)  # The count goes back: steps since the last commit are repeated.
        while state.step < spec.epochs * per_epoch:
            self.maybe_die(state, per_epoch)
            epoch, index = divmod(state.step, per_epoch)
            progressed = epoch / max(1, spec.epochs - 1)
            for group in state.optimizer.param_groups:
                group["lr"] = spec.learning_rate * (1.0 - progressed * (1.0 - FINAL_LEARNING_RATE_FRACTION))
            self._one(state.optimizer, epoch, index)
            state.step += 1
            self._note(state.step)
            if state.step % per_epoch == 0 and int(hvd.rank()) == 0:
                progress(text=f"seed {self._seed} {self._variant}: epoch {epoch + 1} of {spec.epochs}", done=1)
            if state.step % COMMIT_STEPS == 0:
                state.commit()

    def _one(self, optimizer: Any, epoch: int, index: int) -> None:
        spec, hvd = self._spec, self._hvd
        generator = torch.Generator().manual_seed(1000 * self._seed + epoch)
        order = torch.randperm(spec.train_samples, generator=generator)
        begin = (index * int(hvd.size()) + int(hvd.rank())) * spec.batch_samples
        x, y = self._train[order[begin : begin + spec.batch_samples]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        optimizer.step()

    def maybe_die(self, state: Any, per_epoch: int) -> None:
        """Kill the last rank of the first world: halfway between two commits, after half the run, in the fixed mode."""
        spec, hvd = self._spec, self._hvd
        if self._variant in FREE_VARIANTS or int(hvd.size()) < spec.ranks:
            return
        if state.step < spec.epochs * per_epoch // 2 or state.step % COMMIT_STEPS != COMMIT_STEPS // 2:
            return
        if self._starts_late and state.optimizer.mode == "sync":  # The servers are still starting.
            self._waited = True
            return
        self.watch.begin()
        if int(hvd.rank()) == spec.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, step: int) -> None:
        now_s = time.perf_counter()
        if self._rebuilding:  # The first step of a new world.
            self.record.rebuild_s = max(self.record.rebuild_s, now_s - self._last_s)
            self._rebuilding = False
        self._last_s = now_s
        self.watch.step(step)
        self.snapshots.maybe_take(step, now_s - self._start_s)

    def finish(self, optimizer: Any, step: int) -> None:
        """Complete the record.

        Raises:
            RuntimeError: The fixed mode did not come into force, so nobody died.
        """
        record, hvd = self.record, self._hvd
        record.killed = int(self._variant not in FREE_VARIANTS and int(hvd.size()) < self._spec.ranks)
        if self._waited and not record.killed:
            raise RuntimeError(f"{self._variant} was not in force when a rank was to die; raise --epochs")
        record.global_steps, record.rank_batches = step, [step]
        if not self._plain:
            record.stats = [dict(optimizer.stats())]
            record.timeline = list(optimizer.timeline())
            report = hvd.report()
            record.report = report.to_dict() if report is not None else {}
            optimizer.close()
        record.recovery_s = max(self.watch.recovery_s, record.rebuild_s)  # The watch ends with the old world.
        record.lost_steps = self.watch.lost_steps
        self.snapshots.take(step, record.train_s)


def main(argv: list[str]) -> int:
    """Train `spec.json` in the folder `argv[0]` with variant `argv[1]` and seed `argv[2]`."""
    run_dir, variant, seed = Path(argv[0]), argv[1], int(argv[2])
    register(run_dir)
    spec = RunSpec.read(run_dir / "spec.json")
    torch.set_num_threads(1)
    hvd: Any = importlib.import_module("horovod.torch" if variant in PLAIN_VARIANTS else "star_hvd")
    hvd.init()
    training = Training(spec, variant, seed, hvd)
    training.run()
    if int(hvd.rank()) == 0:
        write_record(run_dir, training.record, training.snapshots)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
