"""How well policies choose: regret against the best fixed mode in hindsight, on unseen simulated networks.

    python -m benchmarks.policy --json FILE [--scenarios 60] [--policy module:factory]

Every scenario is a random draw of network, cluster and contention. All fixed modes are simulated to the target, then
every policy (`scheduler.learning.evaluate`). The figure is expected time to the target over the best fixed mode's,
minus 1. `learned` is the model that `STAR_MODEL` names or the packaged one, unless --policy gives another factory
`(world_size, hosts) -> policy` with the method `decide(window, active)`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.lab.json_option import json_file
from scheduler.cli.evaluate import table
from scheduler.learning.evaluate import BASELINES, HELD_OUT_SEED, Factory, regrets, summary
from scheduler.simulator.scenario import draw_scenario

__all__ = ["main"]

_LEARNED = "scheduler.learning.model_choice:learned_policy"


def _factory(name: str) -> Factory:
    """Import the factory `module:attribute`."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--policy is {name!r}: {error}; expected module:factory") from None
    made: Factory = factory
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--scenarios", type=int, default=60, help="scenarios to simulate (default 60)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="first seed")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of every job; drawn if not given")
    parser.add_argument("--steps", type=float, default=400.0, help="synchronous steps to the target (default 400)")
    parser.add_argument("--pattern", default="", help="one pattern of contention only")
    parser.add_argument("--policy", default=_LEARNED, help=f"module:factory of the policy `learned` ({_LEARNED})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write JSON."""
    args = _parser().parse_args(argv)
    console = Console()
    try:
        if args.scenarios < 1:
            raise ValueError(f"--scenarios is {args.scenarios}; expected at least 1")
        policies = {**BASELINES, "learned": _factory(args.policy)}
        rows, begin_s = [], time.monotonic()
        for index in range(args.scenarios):
            scenario = draw_scenario(
                args.seed + index, world_size=args.ranks, pattern=args.pattern, steps=args.steps
            )
            rows.append(regrets(scenario, policies))
            if not console.is_terminal and (index + 1) % 10 == 0:
                console.print(f"[{index + 1}/{args.scenarios}] {time.monotonic() - begin_s:.0f} s", markup=False)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console.print(table(rows))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary(rows, "learned"), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
