"""Runs under horovodrun: `python -m benchmarks.workers.strangers RUN_DIR MODE WORK` trains until `stop` is in RUN_DIR.

Rank 0 records when its steps ended. The last rank opens one of the job's own connections to rank 0 twice a second and
records how long it took to be accepted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import zmq

import star_hvd as hvd
from benchmarks.lab.spec import write_json
from benchmarks.lab.worker import register
from star_hvd.channel.connection_filter import route
from star_hvd.channel.handshake_limiter import DATA_BYTES, set_limits
from star_hvd.runtime import runtime

_WIDTH, _SIZE = 512, 256
_KNOCK_S = 0.5  # Between two connections of the job's own.
_LIMIT_S = 60.0  # A slower connection counts as this.


class _Knocker:
    """Connects to the tensor server of rank 0 repeatedly, with a key of the job."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float]] = []  # Start and duration, in seconds.
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        run = runtime.current()
        assert run is not None
        while not self._stop.wait(_KNOCK_S):
            began_s = time.monotonic()
            peer = run.keyring.peers[0]
            dealer = run.keyring.context.socket(zmq.DEALER)
            set_limits(dealer, DATA_BYTES)
            run.keyring.pair.join(dealer, peer.public_key)
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(route(run.keyring.public_key, peer.host, peer.tensor_port))
            limit_s = began_s + _LIMIT_S
            while not self._stop.is_set() and time.monotonic() < limit_s and not monitor.poll(100):
                pass
            took_s = time.monotonic() - began_s
            dealer.disable_monitor()
            dealer.close(linger=0)
            self.entries.append((began_s, took_s))

    def end(self) -> list[tuple[float, float]]:
        self._stop.set()
        self._thread.join()
        return self.entries


def main(run_dir: Path, mode: str, work: int) -> None:
    """Train; write the ports of this rank, its steps and its connection times to `run_dir`."""
    register(run_dir)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, _WIDTH), torch.nn.Linear(_WIDTH, 64))
    inner = torch.optim.SGD(net.parameters(), lr=1e-4)
    config = hvd.Config(encryption="all")  # Strangers need TCP ports to connect to.
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=config)
    samples, x = torch.randn(8, 64), torch.randn(_SIZE, _SIZE)
    ends_s: list[float] = []
    knocker: _Knocker | None = None
    while True:
        optimizer.zero_grad()
        net(samples).square().mean().backward()
        for _ in range(work):
            x = torch.tanh(x @ x)
        optimizer.step()
        ends_s.append(time.monotonic())
        if len(ends_s) == 1:
            _leave_ports(run_dir)
            knocker = _Knocker() if hvd.rank() == hvd.size() - 1 else None
        if len(ends_s) % 8 == 0 and hvd.broadcast_object((run_dir / "stop").exists(), root_rank=0):
            break
    found: dict[str, Any] = {"ends_s": ends_s, "entries_s": knocker.end() if knocker is not None else []}
    write_json(run_dir / f"rank{hvd.rank()}.json", found)
    hvd.shutdown()


def _leave_ports(run_dir: Path) -> None:
    run = runtime.current()
    assert run is not None
    own = run.keyring.peers[run.rank]
    ports = sorted({own.control_port, own.tensor_port} - {0})
    write_json(run_dir / f"ports{run.rank}.json", {"host": own.host, "ports": ports, "pid": os.getpid()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
