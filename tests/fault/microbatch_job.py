"""Training in micro-batches with a rank killed, or a checkpoint: `python -m tests.fault.microbatch_job WHAT DIR`.

WHAT is `killed` or `killed_after_commit_inside` (elastic, four ranks), `save` or `resume` (static jobs, any number).
Every rank writes down which samples it had for which step, so that those of the rank that dies are known as well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.errors import RankLostError
from tests.multiproc.shares_job import CLIP, SAMPLES, make_dataset, make_net, vector_of
from tests.support.launch import write_result

__all__ = ["COMMITS_AT", "SAMPLES", "sgd"]

BATCH, PARTS, EPOCHS = 20, 4, 2
COMMITS_AT, STRIKES_AT, VICTIM = 4, 6, 3  # Steps of the first epoch, of 12 and a short one on four ranks.


def sgd(net: torch.nn.Module) -> torch.optim.SGD:
    """Not AdamW: `broadcast_optimizer_state` of Horovod makes a step of its own of it, with weight decay."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Training:
    """One rank's training loop, with notes of what it does.

    Args:
        folder: Where the notes of all ranks go.
    """

    def __init__(self, folder: Path) -> None:
        self.net = make_net()
        # So few samples in a pass that every rank needs several for its share of a step.
        config = hvd.Config(max_batch=BATCH // PARTS)
        self.optimizer = hvd.DistributedOptimizer(
            sgd(self.net), self.net.named_parameters(), mode="sync(steal)", max_grad_norm=CLIP, config=config
        )
        self.loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS, num_workers=1)
        self.world = "first" if int(hvd.size()) == 4 else "second"
        self.notes = (folder / f"{self.world}-{os.getpid()}.txt").open("w", buffering=1)
        self.sums = (folder / f"{self.world}-{os.getpid()}.sums").open("w", buffering=1)

    def part(self, batch: Any, epoch: int, step: int) -> None:
        """Forward and backward of a micro-batch; rank 1 takes longer, so that others take over from it."""
        inputs, wanted, numbers = batch
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.net(inputs), wanted).backward()
        self.notes.write(f"{self.world} {epoch} {step} {' '.join(map(str, numbers.tolist()))}\n")
        time.sleep(0.02 if hvd.rank() == 1 else 0.005)

    def stepped(self, epoch: int, step: int) -> None:
        """Note what the parameters are behind a step, for whoever looks for a step that went wrong."""
        self.sums.write(f"{self.world} {epoch} {step} {float(vector_of(self.net).double().sum())!r}\n")

    def report(self, **facts: Any) -> None:
        write_result({"size": int(hvd.size()), "params": vector_of(self.net).tolist(), **facts})


def killed(folder: Path, *, inside: bool) -> None:
    """A rank is killed inside a step; the commit before it is behind a step, or inside one."""
    made = Training(folder)
    state = hvd.elastic.TorchState(made.net, made.optimizer, loader=made.loader, epoch=0, step=0)

    lost: list[str] = []
    resumed: list[int] = []

    def train(state: Any) -> None:
        made.world = "first" if int(hvd.size()) == 4 else "second"
        if made.world == "second":
            resumed.append(state.step)
        while state.epoch < EPOCHS:
            parts = 0
            for batch in made.loader:
                made.part(batch, state.epoch, state.step)
                parts += 1
                first = made.world == "first"
                # Inside a step: behind its second pass, or, of a rank that others take over from, its only one.
                inside_step = parts == 2 if state.step == STRIKES_AT else state.step > STRIKES_AT
                if first and hvd.rank() == VICTIM and inside_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                made.optimizer.step()
                commits = inside and parts == 1 and state.step == COMMITS_AT
                if made.optimizer.stepped:
                    made.stepped(state.epoch, state.step)
                    state.step, parts = state.step + 1, 0
                    commits = commits or (not inside and state.step == COMMITS_AT)
                if first and commits:
                    state.commit()
            state.epoch += 1

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def noting(state: Any) -> None:
        try:
            train(state)
        except RankLostError as error:
            lost.append(str(error))
            print(time.time(), repr(error), flush=True)
            raise

    noting(state)
    made.report(epoch=made.loader.epoch, lost=lost, resumed=resumed)
    made.optimizer.close()


def save(folder: Path) -> None:
    """A checkpoint in the middle of the first epoch, behind which the ranks stop."""
    made, step = Training(folder), 0
    for batch in made.loader:
        made.part(batch, 0, step)
        made.optimizer.step()
        step += made.optimizer.stepped
        if step == COMMITS_AT:
            break
    loader, optimizer = made.loader.state_dict(), made.optimizer.state_dict()
    if hvd.rank() == 0:
        torch.save({"net": made.net.state_dict(), "optimizer": optimizer, "loader": loader}, folder / "checkpoint")
    made.report()


def resume(folder: Path) -> None:
    """The rest of the first epoch, and the next one."""
    made, step = Training(folder), COMMITS_AT
    saved = torch.load(folder / "checkpoint", weights_only=False)
    made.net.load_state_dict(saved["net"])
    made.optimizer.load_state_dict(saved["optimizer"])
    made.loader.load_state_dict(saved["loader"])
    for epoch in range(EPOCHS):
        for batch in made.loader:
            made.part(batch, epoch, step)
            made.optimizer.step()
            step += made.optimizer.stepped
    made.report()


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    what, where = sys.argv[1], Path(sys.argv[2])
    if what in ("save", "resume"):
        (save if what == "save" else resume)(where)
    else:
        killed(where, inside=what == "killed_after_commit_inside")
