"""Ranks of which one stands in its data set for a while, in the middle of its training loop."""

from __future__ import annotations

import logging
import time

import torch

import star_hvd as hvd
from tests.support.launch import write_result
from tests.support.signals import mark, marked

SLOW, NAP_AT_MOST_S = 1, 100.0
STANDS, AWAITED = "has been waiting for this rank", f"has been waiting for ranks [{SLOW}]"


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve samples, one of which takes long on one rank."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 and hvd.rank() == SLOW:
            nap()
        return torch.ones(2)


def note(record: logging.LogRecord) -> bool:
    """Mark the two warnings of the wait: that of the coordinator, and that of the slow rank while it naps."""
    text = record.getMessage()
    if AWAITED in text:
        mark("awaited")
    if STANDS in text and text.endswith(" in nap"):
        mark("stands")
    return True


def nap() -> None:
    """Stand still until both warnings are logged, however late a busy machine makes them."""
    limit_s = time.monotonic() + NAP_AT_MOST_S
    while time.monotonic() < limit_s and not (marked("awaited") and marked("stands")):
        time.sleep(0.5)


def main() -> None:
    logging.getLogger("star_hvd").addFilter(note)
    hvd.init()
    net = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01),
        net.named_parameters(),
        mode="sync",  # On a busy machine `auto` may be in a mode by then in which nobody waits.
        config=hvd.Config(stall_warning_s=1.0),
    )
    for inputs in torch.utils.data.DataLoader(Samples()):
        optimizer.zero_grad()
        net(inputs).sum().backward()
        optimizer.step()
    write_result({"rank": hvd.rank()})
    hvd.shutdown()


if __name__ == "__main__":
    main()
