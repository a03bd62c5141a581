"""What lossy reductions do to the final accuracy: Horovod, Horovod with fp16, and each form of `Compression.auto`.

Every rank trains on its own part of the data in every step, with equal seeds for all variants; time does not matter.
`auto` would choose a form by the times of steps: here each form is forced, so that its accuracy is measured wherever
`auto` may use it. `difference` is the mean accuracy over the seeds minus that of plain Horovod, in points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.networks import NETWORKS, make_network
from benchmarks.lab.spec import write_json
from benchmarks.lab.tasks import FINAL_LEARNING_RATE_FRACTION, Task, defaults_for, load_task
from scheduler.transmission.wire import FORMS, WireChoice

__all__ = ["VARIANTS", "differences", "main", "worker"]

PLAIN, FP16 = "horovod", "horovod-fp16"
VARIANTS = (PLAIN, FP16, *FORMS)
_NETWORKS = "usual,conv"
_LIMIT = 0.3  # Points.
_HIDDEN = 32
_EXIT_FAILED, _EXIT_INVALID = 1, 2


class _Forced(WireChoice):
    """Asks for one form, whatever it costs."""

    def __init__(self, form: int) -> None:
        super().__init__(wanted=form)
        self._form = form

    def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
        """Decide nothing."""
        return False

    def restart(self) -> None:
        """Ask for the form again."""
        self.wanted = self._form


def _optimizer(net: torch.nn.Module, variant: str, rate: float, momentum: float) -> Any:
    """Return the wrapped optimizer of a variant."""
    import horovod.torch

    import star_hvd

    own = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    if variant in (PLAIN, FP16):
        compression = getattr(horovod.torch.Compression, "fp16" if variant == FP16 else "none")
        return horovod.torch.DistributedOptimizer(own, net.named_parameters(), compression=compression)
    wrapped = star_hvd.DistributedOptimizer(
        own, net.named_parameters(), mode="sync", compression=star_hvd.Compression.auto
    )
    core = wrapped._star.core
    with core.driver.engine.lock:
        core.wire.choice = _Forced(FORMS.index(variant))
        core.wire.restart()
    return wrapped


def _trained(task: Task, dataset: str, network: str, variant: str, seed: int, epochs: int) -> float:
    """Train one network; return the percentage of test samples that it classifies correctly."""
    import horovod.torch as hvd

    defaults = defaults_for(dataset, network)
    inputs, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in task.train.tensors)
    inputs, labels = inputs[: len(task.train) // hvd.size()], labels[: len(task.train) // hvd.size()]
    torch.manual_seed(seed)
    net = make_network(dataset, _HIDDEN, network)
    optimizer = _optimizer(net, variant, defaults.learning_rate, defaults.momentum)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        part = 1.0 - (1.0 - FINAL_LEARNING_RATE_FRACTION) * epoch / max(1, epochs - 1)
        optimizer.param_groups[0]["lr"] = defaults.learning_rate * part
        for rows in torch.randperm(len(inputs), generator=order).split(defaults.batch_samples):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    if variant in FORMS:
        used = FORMS[optimizer._star.core.wire.form]
        assert used == variant, f"gradients were reduced as {used}; expected {variant}"
        optimizer.close()
    with torch.no_grad():
        return 100.0 * float((net(task.test_x).argmax(1) == task.test_y).float().mean())


def worker(out: Path, args: argparse.Namespace) -> None:
    """Run one rank of the job that trains all variants of one network; rank 0 writes their accuracies."""
    import star_hvd as hvd

    hvd.init()
    torch.set_num_threads(1)
    task = load_task(args.dataset, args.train_samples)
    found = {
        variant: [
            _trained(task, args.dataset, args.trained, variant, seed, args.epochs) for seed in range(args.seeds)
        ]
        for variant in VARIANTS
    }
    if hvd.rank() == 0:
        write_json(out, found)
    hvd.shutdown()


def differences(accuracies: dict[str, list[float]]) -> dict[str, float]:
    """Return each variant's mean accuracy minus that of plain Horovod, in points."""
    plain = statistics.mean(accuracies[PLAIN])
    return {variant: statistics.mean(values) - plain for variant, values in accuracies.items()}


def _measure(network: str, args: argparse.Namespace) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="compression-") as folder:
        out = Path(folder) / "result.json"
        given = ["--worker", str(out), "--trained", network, "--dataset", args.dataset]
        given += ["--seeds", str(args.seeds), "--epochs", str(args.epochs), "--train-samples", str(args.train_samples)]
        command = horovodrun_command(args.ranks, "benchmarks.compression", *given)
        limits = {"deadline_s": args.deadline_s, "stall_s": args.deadline_s}
        run_job(command, Path(folder), on_progress=lambda _: None, **limits)
        found: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _table(found: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> Table:
    title = f"final accuracy on {args.dataset}, {args.ranks} ranks, mean of {args.seeds} seeds"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("network")
    for variant in VARIANTS:
        table.add_column(variant, justify="right")
    for network, accuracies in found.items():
        points = differences(accuracies)
        cells = [f"{statistics.mean(accuracies[v]):.2f} % ({points[v]:+.2f})" for v in VARIANTS]
        table.add_row(network, *cells)
    return table


def _problem(args: argparse.Namespace) -> str | None:
    """Return why no job can be measured with these options."""
    unknown = [each for each in args.networks.split(",") if each not in NETWORKS]
    if unknown:
        return f"--networks has {', '.join(map(repr, unknown))}; expected some of {', '.join(NETWORKS)}"
    least = (("ranks", 2), ("train_samples", args.ranks), ("seeds", 1), ("epochs", 1), ("deadline_s", 1))
    return out_of_range(args, least)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if a form loses more accuracy than it may, or a job failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=_NETWORKS, help=f"separated by commas, of {', '.join(NETWORKS)}")
    parser.add_argument("--dataset", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--train-samples", type=int, default=1280)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--deadline-s", type=float, default=900.0, help="of the job of a network")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--trained", default="usual", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        worker(args.worker, args)
        return 0
    if (problem := _problem(args)) is not None:
        say_error(problem)
        return _EXIT_INVALID
    console, found = Console(highlight=False), dict[str, dict[str, list[float]]]()
    for network in args.networks.split(","):
        try:
            found[network] = _measure(network, args)
        except JobFailed as error:
            console.print(f"error: {error}", markup=False)
            return _EXIT_FAILED
        console.print(f"{network}: {len(VARIANTS) * args.seeds} trainings done", markup=False)
    points = {network: differences(accuracies) for network, accuracies in found.items()}
    worst = min(value for each in points.values() for variant, value in each.items() if variant in FORMS)
    if args.json is not None:
        about = {"ranks": args.ranks, "dataset": args.dataset, "seeds": args.seeds, "limit": _LIMIT}
        write_json(
            args.json, {"schema": 1, **about, "accuracy": found, "difference": points, "worst_difference": worst}
        )
    console.print(_table(found, args))
    return 0 if worst >= -_LIMIT else _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
