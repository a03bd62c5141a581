"""Throughput of parameter servers: pushed and pulled bytes per worker, against plain TCP sockets with the same bytes.

Both sides alternate in the same processes with the same pattern: every worker sends all chunks and receives all chunks
back; a chunk is returned once every worker's has arrived. The sockets only copy; the servers also sum, step the
optimizer and update their mirror.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import measured, out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.report import progress_view
from benchmarks.tta import versions
from scheduler.plan.plan import Plan
from star_hvd.channel.keys import PrivateFolder
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Snapshot
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.owner.server_process import ServerProcess
from star_hvd.ps.worker.client import Client

__all__ = ["main", "measure", "summarize"]

DEADLINE_S = 120.0
BUCKET_BYTES = 25 * 1024 * 1024
HOST = "127.0.0.1"


def make_model(mbytes: float, chunk_kib: int, servers: int) -> tuple[list[Any], torch.optim.Optimizer, Layout]:
    """Make buckets, optimizer and layout of a model of that size, the same in every process."""
    torch.manual_seed(0)
    rows = max(1, round(mbytes * 1e6 / 4 / 1024 / 20))
    params = [torch.nn.Parameter(torch.randn(rows, 1024)) for _ in range(20)]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    buckets = pack(params, BUCKET_BYTES)
    layout = Layout.build(buckets, optimizer.param_groups, torch.optim.SGD, servers, chunk_kib * 1024)
    return buckets, optimizer, layout


# ---- plain sockets ------------------------------------------------------------------------------------------


def _listen() -> socket.socket:
    listener = socket.create_server((HOST, 0))
    return listener


def copy_server(listener: socket.socket, workers: int, sizes: Sequence[int]) -> None:
    """Run a copy server: receive every chunk from every worker, then send as many bytes back to each."""
    ends = [listener.accept()[0] for _ in range(workers)]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffers = [bytearray(max(sizes)) for _ in ends]
    try:
        while True:
            for size in sizes:
                for end, buffer in zip(ends, buffers, strict=True):
                    _fill(end, memoryview(buffer)[:size])
                for end in ends:
                    end.sendall(memoryview(buffers[0])[:size])
    except (ConnectionError, EOFError):
        return


def _fill(end: socket.socket, view: memoryview) -> None:
    while view:
        got = end.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


def copy_once(end: socket.socket, sent: Sequence[memoryview], taken: Sequence[memoryview]) -> None:
    """Send and receive a model's bytes at the same time."""

    def send() -> None:
        for view in sent:
            end.sendall(view)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for view in taken:
        _fill(end, view)
    sender.join(DEADLINE_S)


# ---- a worker -----------------------------------------------------------------------------------------------


def worker(rank: int, pipe: Any) -> None:
    """Run a worker process: send its public key, then run blocks of exchanges as requested and report their seconds."""
    torch.set_num_threads(1)
    key = JobKey.new()
    pipe.send(key.own.public)
    settings = pipe.recv()
    buckets, optimizer, layout = make_model(settings["mbytes"], settings["chunk_kib"], len(settings["endpoints"]))
    endpoints = [Endpoint.from_list(each) for each in settings["endpoints"]]
    client = Client(rank, 0, 0, endpoints, layout, key)
    client.start()
    ends = [socket.create_connection((HOST, port)) for port in settings["ports"]]
    end = ends[0]
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    flats = [torch.full((bucket.numel + 1,), 1e-3) for bucket in buckets]
    sent = [memoryview(bytearray(layout.nbytes(chunk))) for chunk in layout.chunks]
    taken = [memoryview(bytearray(layout.nbytes(chunk))) for chunk in layout.chunks]
    row = HyperRow(optimizer.param_groups).read(optimizer.param_groups)
    step = version = 0
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        kind, count = order
        times_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            if kind == "tcp":
                copy_once(end, sent, taken)
            else:
                client.push(
                    step=step, version=version, flats=flats, weight=1.0, own_steps=step, row=row, keep=True
                )
                version = client.wait(DEADLINE_S).version
                step += 1
            times_s.append(time.perf_counter() - began_s)
        pipe.send(times_s)
    client.close()


# ---- the run ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers_running(args: argparse.Namespace, key: JobKey) -> Iterator[tuple[list[ServerProcess], Layout]]:
    """Start seeded servers."""
    buckets, optimizer, layout = make_model(args.mbytes, args.chunk_kib, args.servers)
    folder = PrivateFolder() if args.no_encryption else None
    host = HOST if folder is None else str(folder.path)
    started = [ServerProcess(i, key, host, mirror=not args.no_mirror) for i in range(args.servers)]
    try:
        endpoints = [server.start(DEADLINE_S) for server in started]
        spec = OptimizerSpec.of(torch.optim.SGD, optimizer.param_groups, HyperRow(optimizer.param_groups))
        ordered = [param.detach() for bucket in buckets for param in bucket.params]
        plan = Plan.ps(args.workers, args.workers)
        for index, server in enumerate(started):
            server.open(0, 0, index, endpoints, layout, plan, spec, 0)
            server.seed(0, 0, Snapshot(0, ordered, [{} for _ in ordered]))
        yield started, layout
    finally:
        for server in started:
            server.stop()
        if folder is not None:
            folder.close()


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Alternate both sides and compute the figures."""
    context = multiprocessing.get_context("spawn")
    listener = _listen()
    processes: list[Any] = []
    pipes = []
    try:
        for rank in range(args.workers):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=worker, args=(rank, theirs), daemon=True))
            processes[-1].start()
            pipes.append(mine)
        key = JobKey.new(_answer(pipe) for pipe in pipes)
        with servers_running(args, key) as (started, layout):
            sizes = [layout.nbytes(chunk) for chunk in layout.chunks]
            settings = {
                "mbytes": args.mbytes,
                "chunk_kib": args.chunk_kib,
                "endpoints": [server.endpoint.to_list() for server in started if server.endpoint is not None],
                "ports": [listener.getsockname()[1]],
            }
            copier = context.Process(target=copy_server, args=(listener, args.workers, sizes), daemon=True)
            processes.append(copier)
            copier.start()
            for pipe in pipes:
                pipe.send(settings)
            for pipe in pipes:
                _answer(pipe)
            assert copier.pid is not None
            cpu = {"tcp": [copier.pid], "ps": [server.pid for server in started if server.pid is not None]}
            blocks_s, cpu_s = _turns(args, pipes, cpu, console)
            for pipe in pipes:
                pipe.send(None)
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.terminate()
        listener.close()
    summary = summarize(blocks_s, sum(sizes))
    summary |= {f"{kind}_server_cpu_s": used / args.blocks / args.exchanges for kind, used in cpu_s.items()}
    names = ("workers", "servers", "mbytes", "chunk_kib", "no_encryption", "no_mirror")
    return {**{name: getattr(args, name) for name in names}, **summary, "versions": versions()}


def _turns(
    args: argparse.Namespace, pipes: Sequence[Any], pids: dict[str, list[int]], console: Console
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Return the seconds per exchange of every block, and the servers' total CPU seconds per side."""
    blocks_s: dict[str, list[list[float]]] = {"tcp": [], "ps": []}
    cpu_s = {"tcp": 0.0, "ps": 0.0}
    with progress_view(console, 2 * args.blocks) as view:
        for kind in ("tcp", "ps"):
            _block(pipes, kind, 3)  # The first exchanges grow buffers and create the optimizer's state.
        for number in range(args.blocks):
            for kind in ("tcp", "ps") if number % 2 == 0 else ("ps", "tcp"):
                before_s = _cpu_s(pids[kind])
                blocks_s[kind].append(_block(pipes, kind, args.exchanges))
                cpu_s[kind] += _cpu_s(pids[kind]) - before_s
                view.update({"done": 1, "text": f"block {number + 1}, {kind}"})
    return blocks_s, cpu_s


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _block(pipes: Sequence[Any], kind: str, count: int) -> list[float]:
    for pipe in pipes:
        pipe.send((kind, count))
    return [t for pipe in pipes for t in _answer(pipe)]


def _answer(pipe: Any) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise RuntimeError(f"a worker of the benchmark did not answer within {DEADLINE_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a worker of the benchmark has ended; see its message above") from None


def summarize(blocks_s: dict[str, list[list[float]]], model_bytes: int) -> dict[str, Any]:
    """Return throughputs and their ratio.

    Args:
        blocks_s: Seconds per exchange of every block, all workers together, for `tcp` and `ps`.
        model_bytes: Bytes a worker sends in an exchange; it receives as many.
    """
    medians = {kind: statistics.median(t for block in blocks for t in block) for kind, blocks in blocks_s.items()}
    pairs = [
        statistics.median(tcp) / statistics.median(ps)
        for tcp, ps in zip(blocks_s["tcp"], blocks_s["ps"], strict=True)
    ]
    return {
        "model_bytes": model_bytes,
        "tcp_exchange_s": medians["tcp"],
        "ps_exchange_s": medians["ps"],
        "tcp_bytes_per_s": 2 * model_bytes / medians["tcp"],
        "ps_bytes_per_s": 2 * model_bytes / medians["ps"],
        "ratio": medians["tcp"] / medians["ps"],
        "block_ratios": pairs,
        "blocks_s": blocks_s,
    }


def _table(summary: dict[str, Any]) -> Table:
    title = f"{summary['workers']} workers, {summary['servers']} servers, {summary['model_bytes'] / 1e6:.0f} MB"
    result = Table(title=title, title_justify="left")
    for name in ("", "exchange", "per worker, both ways", "CPU of servers"):
        result.add_column(name, justify="right", no_wrap=True)
    for kind, name in (("tcp", "TCP sockets, copy only"), ("ps", "parameter servers")):
        result.add_row(
            name,
            f"{1e3 * summary[f'{kind}_exchange_s']:.0f} ms",
            f"{summary[f'{kind}_bytes_per_s'] / 1e6:.0f} MB/s",
            f"{1e3 * summary[f'{kind}_server_cpu_s']:.0f} ms",
        )
    low, high = min(summary["block_ratios"]), max(summary["block_ratios"])
    result.add_row("ratio", f"{summary['ratio']:.2f}", f"blocks {low:.2f} - {high:.2f}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the throughput."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ps", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mbytes", type=float, default=40.0, help="size of the model in MB")
    parser.add_argument("--chunk-kib", type=int, default=1024, help="size of a chunk")
    parser.add_argument("--blocks", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--exchanges", type=int, default=5, help="exchanges per block")
    parser.add_argument(
        "--no-encryption", action="store_true", help="Unix sockets, as with STAR_ENCRYPTION=network on one host"
    )
    parser.add_argument("--no-mirror", action="store_true", help="servers keep nothing for after a death")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    console = Console()
    least = ((name, 1) for name in ("workers", "servers", "mbytes", "chunk_kib", "blocks", "exchanges"))
    if (problem := out_of_range(args, least)) is not None:
        say_error(problem)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    summary = measured(measure, args, console, RuntimeError, OSError)
    if summary is None:
        return 1
    console.print(_table(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
