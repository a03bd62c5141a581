"""What every rank runs to train while its connections are reset again and again, all of which go through proxies."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import zmq

import star_hvd as hvd
from tests.multiproc.modes import CONFIG, deadline, finish, within
from tests.multiproc.scenarios import Facts, batch, compute, model
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning
from tests.support.proxy import Proxy

SAMPLES, EPOCHS, BATCH = 240, 3, 4
SLOW_S, FAST_S = 0.05, 0.015


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


class Net:
    """Every connection that this process makes leads through a proxy, and all of them break at random moments."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._proxies: dict[int, Proxy] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def cuts(self) -> int:
        with self._lock:
            return sum(proxy.cuts for proxy in self._proxies.values())

    def route(self, address: str) -> str:
        """The address of the proxy that leads there."""
        port = int(address.rpartition(":")[2])
        with self._lock:
            if port not in self._proxies:
                self._proxies[port] = Proxy(port)
            return f"tcp://127.0.0.1:{self._proxies[port].port}"

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        connect = zmq.Socket.connect

        def through(mine: Any, address: str) -> Any:
            # A rank may name the address that it comes from: tcp://FROM:0;TO:PORT.
            near = re.match(r"tcp://([\d.]+:0;)?127\.0\.0\.1:", address)
            return connect(mine, self.route(address) if near else address)

        zmq.Socket.connect = through  # type: ignore[assignment,method-assign]
        self._thread.start()
        try:
            yield
        finally:
            self.calm()

    def calm(self) -> None:
        """No more resets from now on."""
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(self._random.uniform(0.05, 0.4)):
            with self._lock:
                proxies = list(self._proxies.values())
            for proxy in proxies:
                if self._random.random() < 0.7:
                    proxy.cut()
                else:
                    proxy.arm(self._random.randrange(2), self._random.randrange(4), inside=True)


def train(mode: str, net_of_cuts: Net) -> Facts:
    """Epochs over a data set that ranks share, one of them slow."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    began_s, number, modes = time.monotonic(), 0, set()
    pause_s = SLOW_S if int(hvd.rank()) == int(hvd.size()) - 1 else FAST_S
    while optimizer.mode == "sync" and mode != "sync" and within(began_s):  # Servers take seconds to start.
        optimizer.zero_grad()
        compute(net, batch(number), FAST_S)
        optimizer.step()
        number += 1
    loader = hvd.shard(Numbered(), batch_size=BATCH, seed=3)
    taken: list[list[int]] = []
    longest_s = 0.0
    before = net_of_cuts.cuts
    for _ in range(EPOCHS):
        taken.append([])
        step_s = time.monotonic()
        for indices, rows in loader:
            taken[-1] += indices.tolist()
            optimizer.zero_grad()
            compute(net, rows, pause_s)
            optimizer.step()
            modes.add(optimizer.mode)
            longest_s = max(longest_s, time.monotonic() - step_s)
            step_s = time.monotonic()
    cuts = net_of_cuts.cuts - before
    return finish(net, optimizer) | {"taken": taken, "modes": sorted(modes), "longest_s": longest_s, "cuts": cuts}


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    wait_without_spinning()
    hvd.init()
    facts: dict[str, Facts] = {}
    net = Net(int(hvd.rank()))
    with net.breaking():
        for name in wanted:
            write_result({"facts": facts, "running": name})
            with deadline():
                facts[name] = train(name, net)
                hvd.barrier()
        write_result({"facts": facts, "running": ""})
        hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
