"""Ranks of which one stands in its data set for some seconds, in the middle of its training loop."""

from __future__ import annotations

import time

import torch

import star_hvd as hvd
from tests.support.launch import write_result

SLOW, NAP_S = 1, 4.0


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve samples, one of which takes long on one rank."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 and hvd.rank() == SLOW:
            nap()
        return torch.ones(2)


def nap() -> None:
    time.sleep(NAP_S)


def main() -> None:
    hvd.init()
    net = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), config=hvd.Config(stall_warning_s=1.0)
    )
    for inputs in torch.utils.data.DataLoader(Samples()):
        optimizer.zero_grad()
        net(inputs).sum().backward()
        optimizer.step()
    write_result({"rank": hvd.rank()})
    hvd.shutdown()


if __name__ == "__main__":
    main()
