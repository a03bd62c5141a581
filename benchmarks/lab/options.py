"""The command line of `benchmarks.tta`, and the `RunSpec` built from it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import math
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.command import out_of_range
from benchmarks.lab.json_option import json_file
from benchmarks.lab.networks import NETWORKS, USUAL_HIDDEN_UNITS
from benchmarks.lab.scenarios import MEANS, SCENARIOS, Scenario, ScenarioError, baseline, default_modes, make_scenario
from benchmarks.lab.spec import ALL_VARIANTS, FEEDINGS, PLAIN_VARIANTS, RunSpec
from benchmarks.lab.tasks import DATASETS, defaults_for
from benchmarks.machine.accelerator import DEVICES, DeviceError, check_device
from benchmarks.machine.netns import check_tools
from benchmarks.machine.quota import LEAST_QUOTA_S, LONGEST_PERIOD_S, find_cpu_group
from benchmarks.traces import read_trace
from scheduler.plan.mode_names import parse_mode

__all__ = [
    "add_device_options",
    "build_spec",
    "check_mode",
    "device_times_ms",
    "make_parser",
    "star_hvd_takes",
    "target_for",
]

DEVICE_MS = 30.0
FIXED_PART = 0.2  # Of the device time, where only its total is given: kernels have a minimum duration.
ACCURACIES = ("bounded", "exact")
COMPRESSIONS = ("none", "fp16", "auto")
SHORT_VARIANTS = ("straggler_free", "plain", "star")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Special:
    """Settings in which a scenario differs from the others.

    Attributes:
        device_ms: Device time where it is burnt as CPU time: all ranks share the cores of one machine, so it has to be
            shorter to leave room for anything else.
        epochs: 0 for the data set's default.
        passes: Passes over the data in an epoch; more of them where otherwise the ranks would wait every second for
            one that ends its last batch late.
        hidden_units: Width of the network's hidden layers.
        link_bits_per_s: Rate of a normal host's link.
        target: Accuracy to reach on digits, 0 for the default.
        input_ms: Cost of a sample.
        workers: Processes per rank that load samples.
    """

    device_ms: float = DEVICE_MS
    epochs: int = 0
    passes: int = 1
    hidden_units: int = USUAL_HIDDEN_UNITS
    link_bits_per_s: float = 0.0
    target: float = 0.0
    input_ms: float = 0.0
    workers: int = 0


SPECIAL = {
    "quota": _Special(device_ms=10.0),
    # Two workers load a batch of 16 in 24 ms, within the device time; those of the slow rank take 96 ms.
    "slow-input": _Special(input_ms=3.0, workers=2),
    "starved": _Special(device_ms=10.0, epochs=2, passes=2),
    # 1 MB of gradients: 60 ms over normal links, as long as two device times; 600 ms over the slow one.
    "slow-link": _Special(hidden_units=480, link_bits_per_s=200e6, epochs=3, passes=2),
    # The default target is reached before the second freeze.
    "frozen": _Special(epochs=5, passes=4, target=0.95),
    "killed-server": _Special(),
    "killed-worker": _Special(epochs=12),  # Starting servers takes part of the run.
}

# Smallest values of the numbers on the command line.
LEAST = (
    ("seeds", 1), ("train_samples", 1), ("epochs", 1), ("passes", 1), ("input_ms_per_sample", 0), ("workers", 0),
    ("quota_period_ms", 1), ("hidden_units", 1), ("deadline_s", 1), ("stall_s", 1),
)  # fmt: skip

# Options that the elastic training of scenario killed-worker has no use for, with what it does anyway.
_NOT_IN_ELASTIC = {
    "passes": 1,
    "input_ms_per_sample": 0.0,
    "workers": 0,
    "feeding": "shard",
    "device": "cpu",
    "microbatches": 1,
    "accuracy": "bounded",
    "compression": "none",
    "background": False,
    "overlap": False,
    "log_runs": False,
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tta",
        description="Time to accuracy with stragglers: plain Horovod, backup workers and star_hvd in one horovodrun.",
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="one-slow")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=json_file, help="write all figures and curves to this file")
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits")
    parser.add_argument("--seeds", type=int, default=3, help="how many; every variant is trained once per seed")
    parser.add_argument("--epochs", type=int, help="default: as fits the data set and the scenario")
    parser.add_argument("--passes", type=int, help="passes over the data in an epoch")
    parser.add_argument("--target", type=float, help="accuracy to reach, 0 to 1; default: as fits the data set")
    parser.add_argument("--network", choices=NETWORKS, default="usual", help="conv: 1 MB of gradients; transformer: 10")
    add_device_options(parser)
    parser.add_argument("--input-ms-per-sample", type=float, help="what it takes to get a sample, in whoever loads it")
    parser.add_argument("--workers", type=int, help="loading processes of every rank; default: the training thread")
    parser.add_argument(
        "--feeding", choices=FEEDINGS, default="shard",
        help="what feeds star_hvd: hvd.shard, or the DistributedSampler that plain Horovod always has",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu",
        help="where the network computes; on cuda the time per step of --device-ms is spent by kernels",
    )
    parser.add_argument(
        "--microbatches", type=int,
        help="parts of a batch, of hvd.shard, for star and not for fixed modes; default: 4 with sync(steal), else 1",
    )  # fmt: skip
    parser.add_argument(
        "--accuracy", choices=ACCURACIES, default="bounded",
        help="exact: star_hvd chooses only among modes that are synchronous SGD",
    )
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="of star_hvd's gradients")
    parser.add_argument("--background", action="store_true", help="star_hvd sends behind compute: Config(background)")
    parser.add_argument("--overlap", action="store_true", help="star_hvd applies updates as gradients arrive")
    parser.add_argument("--train-samples", type=int, help="training samples used")
    parser.add_argument("--slowdown", type=float, help="factor instead of the scenario's own")
    parser.add_argument("--trace", type=Path, help="slowdowns for scenario trace, .csv or .json")
    parser.add_argument("--mode", default="auto", help="mode of the variant star: auto, sync, partial(m), ps(x), ...")
    parser.add_argument(
        "--modes",
        help="fixed modes beside it, separated by semicolons; also ASGD, SSP, DynSGD, Sync-opt; "
        "default: a few that fit the scenario, none where --variants is given",
    )
    parser.add_argument("--variants", help=f"comma-separated subset of {','.join(ALL_VARIANTS)}")
    parser.add_argument("--hidden-units", type=int, help="width of the network, for larger gradients")
    parser.add_argument("--link-mbit", type=float, help="scenario slow-link: rate of the usual links")
    parser.add_argument("--quota-period-ms", type=float, default=100.0, help="CPU quotas: accounting period")
    parser.add_argument("--deadline-s", type=float, help="end the job after this; default: from the sizes")
    parser.add_argument("--stall-s", type=float, default=180.0, help="end the job after this long without output")
    parser.add_argument(
        "--log-runs", action="store_true",
        help="leave a run log of every training of star_hvd, to retrain from by star-scheduler collect --runs",
    )
    parser.add_argument("--keep", action="store_true", help="keep the run's folder: log, records, snapshots")
    return parser


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how long a step takes at normal speed."""
    parser.add_argument(
        "--device-ms", type=float, help=f"device time of a usual step at normal speed; default: {DEVICE_MS:g}"
    )
    parser.add_argument(
        "--device-fixed-ms", type=float, help=f"part of it for any batch; default: {FIXED_PART:g} of --device-ms"
    )
    parser.add_argument("--device-per-sample-ms", type=float, help="part of it per sample, instead of --device-ms")


def device_times_ms(args: argparse.Namespace, batch_samples: int, usual_ms: float = DEVICE_MS) -> tuple[float, float]:
    """Return the device time of a full batch at normal speed and its fixed part, in ms.

    Raises:
        ValueError: Options contradict each other or are negative.
    """
    total, fixed, each = args.device_ms, args.device_fixed_ms, args.device_per_sample_ms
    for name, value in (("--device-ms", total), ("--device-fixed-ms", fixed), ("--device-per-sample-ms", each)):
        if value is not None and not 0.0 <= value < 1e6:
            raise ValueError(f"{name} is {value}; expected at least 0")
    if each is not None:
        if total is not None:
            raise ValueError("--device-ms and --device-per-sample-ms were both given; the one follows from the other")
        return (fixed or 0.0) + each * batch_samples, fixed or 0.0
    total = usual_ms if total is None else total
    fixed = FIXED_PART * total if fixed is None else fixed
    if fixed > total:
        raise ValueError(f"--device-fixed-ms is {fixed:g}, more than --device-ms of {total:g}")
    return total, fixed


def build_spec(args: argparse.Namespace) -> RunSpec:
    """Build the specification for the workers from the command line.

    Raises:
        ValueError: An option is invalid; the message names it.
        DeviceError, QuotaError, NetworkError: The device or the scenario is impossible on this machine.
    """
    defaults, special = defaults_for(args.dataset, args.network), SPECIAL.get(args.scenario, _Special())
    trace = read_trace(args.trace) if args.trace is not None else None
    if trace is not None and args.scenario != "trace":
        raise ScenarioError(f"--trace belongs to scenario trace; the scenario is {args.scenario}")
    _check_elastic(args)
    check_mode(args.mode, args.ranks, exact=args.accuracy == "exact")
    scenario = make_scenario(args.scenario, args.ranks, trace, args.slowdown)
    device_ms, fixed_ms = device_times_ms(args, defaults.batch_samples, special.device_ms)
    _check_numbers(args)
    input_ms = special.input_ms if args.input_ms_per_sample is None else args.input_ms_per_sample
    if scenario.means == "input" and not input_ms:
        raise ScenarioError("scenario slow-input needs samples that cost something: raise --input-ms-per-sample")
    _check_exact(args)
    variants = _variants(args)
    modes = _modes(args, scenario)
    if not {*variants, *modes} <= set(PLAIN_VARIANTS):
        _check_star_hvd(args)
    burns = scenario.means in ("quota", "starve")
    check_device(args.device)
    if burns and args.device != "cpu":
        raise DeviceError(f"scenario {args.scenario} limits the processor; it cannot slow --device {args.device}")
    quota_cores = _quota_cores(scenario) if burns else 0.0
    if burns:
        _check_quota(quota_cores, args.quota_period_ms / 1000.0)
        find_cpu_group()
    if scenario.means == "link":
        check_tools()
    return RunSpec(
        scenario=args.scenario,
        rows=scenario.rows,
        ranks=args.ranks,
        variants=variants,
        modes=modes,
        seeds=tuple(range(args.seeds)),
        dataset=args.dataset,
        train_samples=_given(args.train_samples, defaults.train_samples),
        epochs=_given(args.epochs, special.epochs or defaults.epochs),
        passes=_given(args.passes, special.passes),
        batch_samples=defaults.batch_samples,
        learning_rate=defaults.learning_rate,
        momentum=defaults.momentum,
        device_s=device_ms / 1000.0,
        device_fixed_s=fixed_ms / 1000.0,
        network=args.network,
        input_s_per_sample=input_ms / 1000.0,
        workers=special.workers if args.workers is None else args.workers,
        feeding=args.feeding,
        microbatches=args.microbatches,
        accuracy=args.accuracy,
        compression=args.compression,
        background=args.background,
        overlap=args.overlap,
        device=args.device,
        eval_every_steps=defaults.eval_every_steps,
        mode=args.mode,
        quorum=scenario.quorum(),
        quota_cores=quota_cores,
        quota_period_s=args.quota_period_ms / 1000.0,
        hidden_units=_given(args.hidden_units, special.hidden_units),
        link_bits_per_s=_link_bits_per_s(args, scenario, special),
    )


def target_for(args: argparse.Namespace) -> float:
    """Return the accuracy to reach.

    Raises:
        ValueError: It is not between 0 and 1.
    """
    usual = args.dataset == "digits" and args.network == "usual"
    special = SPECIAL.get(args.scenario, _Special()).target if usual else 0.0
    default = special or defaults_for(args.dataset, args.network).target_accuracy
    target = float(default if args.target is None else args.target)
    if not 0.0 < target < 1.0:
        raise ValueError(f"--target is {target}; expected an accuracy between 0 and 1, 0.9 for example")
    return target


def check_mode(mode: str, ranks: int, *, exact: bool = False) -> None:
    """Refuse a mode of the variant star that `DistributedOptimizer` would refuse once the job runs.

    Args:
        mode: `auto` or a fixed mode.
        ranks: Number of ranks of the job.
        exact: Whether the accuracy is `exact`.

    Raises:
        ValueError: The mode is unknown, impossible with so many ranks, or not exact and has to be.
    """
    plan = parse_mode(mode, ranks)
    if exact and plan is not None and plan.mode != "sync":
        raise ValueError(f"--mode is {mode}, which is not synchronous SGD; leave --accuracy exact out")


def _check_numbers(args: argparse.Namespace) -> None:
    if (problem := out_of_range(args, LEAST)) is not None:
        raise ValueError(problem)


def _check_star_hvd(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("star_hvd.optimizer") is None:
        raise ValueError("star_hvd cannot be imported; install it, or use --variants straggler_free,plain")
    if args.ranks < 2:  # A single rank runs in lockstep: it has no modes and counts no steps.
        raise ValueError(f"--ranks is {args.ranks}; expected at least 2, or --variants straggler_free,plain")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_elastic(args: argparse.Namespace) -> None:
    """Refuse what scenario killed-worker would not do; its trainings are made by `lab/elastic_worker.py`."""
    if args.scenario != "killed-worker":
        return
    given = [name for name, usual in _NOT_IN_ELASTIC.items() if getattr(args, name) not in (None, usual)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ScenarioError(
            f"scenario killed-worker trains in elastic jobs without {names}; leave that out, or use killed-server"
        )
    if args.variants is not None and "drop" in _variants(args):
        raise ScenarioError(
            "scenario killed-worker has no variant drop, which leaves out slow ranks, and none is slow; leave it out "
            "of --variants"
        )


def _check_exact(args: argparse.Namespace) -> None:
    """Set the default of `microbatches`; check that the installed star_hvd supports the micro-batches and accuracy."""
    if args.microbatches is None:
        args.microbatches = 4 if args.mode == "sync(steal)" else 1
    if args.microbatches < 1:
        raise ValueError(f"--microbatches is {args.microbatches}; expected at least 1")
    if args.microbatches > 1 and args.feeding != "shard":
        raise ValueError("--microbatches are cut by hvd.shard; leave --feeding out")
    if args.microbatches > 1 and not star_hvd_takes("shard", "microbatches"):
        raise ValueError("--microbatches: hvd.shard of this version has none")
    if args.accuracy != "bounded" and not star_hvd_takes("DistributedOptimizer", "accuracy"):
        raise ValueError("--accuracy: DistributedOptimizer of this version has no such argument")


def star_hvd_takes(function: str, argument: str) -> bool:
    """Return whether a function of the installed star_hvd has an argument of this name."""
    star_hvd = importlib.import_module("star_hvd")
    return argument in inspect.signature(getattr(star_hvd, function)).parameters


def _variants(args: argparse.Namespace) -> tuple[str, ...]:
    if args.variants is None:
        return ALL_VARIANTS if MEANS[args.scenario] in ("device", "quota", "input") else SHORT_VARIANTS
    variants = tuple(name.strip() for name in args.variants.split(","))
    unknown = sorted(set(variants) - set(ALL_VARIANTS))
    if unknown or len(set(variants)) != len(variants):
        raise ValueError(f"--variants is {args.variants!r}; expected some of {','.join(ALL_VARIANTS)}, each once")
    return variants


def _modes(args: argparse.Namespace, scenario: Scenario) -> tuple[str, ...]:
    if args.modes is None:
        return default_modes(scenario) if args.variants is None else ()
    modes = tuple(filter(None, (name.strip() for name in args.modes.split(";"))))
    for name in modes:
        if parse_mode(baseline(name, scenario.ranks - scenario.quorum()), scenario.ranks) is None:
            raise ValueError(f"--modes has {name!r}, which is no fixed mode; give it by --mode")
    if len(set(modes)) != len(modes):
        raise ValueError(f"--modes is {args.modes!r}; expected each mode once")
    return modes


def _link_bits_per_s(args: argparse.Namespace, scenario: Scenario, special: _Special) -> float:
    if scenario.means != "link":
        if args.link_mbit is not None:
            raise ScenarioError(f"--link-mbit belongs to scenario slow-link; the scenario is {args.scenario}")
        return 0.0
    if args.link_mbit is None:
        return special.link_bits_per_s
    if not 1.0 <= args.link_mbit <= 1e5:
        raise ValueError(f"--link-mbit is {args.link_mbit}; expected 1 to 100000")
    return 1e6 * float(args.link_mbit)


def _quota_cores(scenario: Scenario) -> float:
    """Return the share of a core that makes a rank `slowdown` times slower than its fair share of the machine."""
    fair = min(1.0, len(os.sched_getaffinity(0)) / scenario.ranks)
    return fair / scenario.slowdown(scenario.ranks - 1, 0)


def _check_quota(quota_cores: float, period_s: float) -> None:
    """Refuse a quota shorter than the kernel takes; a longer one would slow the rank less than stated."""
    if quota_cores * period_s < LEAST_QUOTA_S * (1.0 - 1e-9):
        least_ms = math.ceil(1000.0 * LEAST_QUOTA_S / quota_cores)
        advice = f"raise --quota-period-ms to at least {least_ms}"
        if least_ms > 1000.0 * LONGEST_PERIOD_S:
            advice = f"no period is long enough (at most {LONGEST_PERIOD_S:g} s): lower --slowdown or --ranks"
        raise ScenarioError(
            f"{quota_cores:.2g} of a core is {1e6 * quota_cores * period_s:.0f} us of a period of "
            f"{1000.0 * period_s:g} ms; a quota has at least {1e6 * LEAST_QUOTA_S:.0f} us: {advice}"
        )
