"""`python -m tests.fuzz`: give every target random and damaged inputs, and print what came of it.

Ends with status 1 if an input had an exception that its target does not declare, or memory grew; such inputs are kept
in `tests/golden/fuzz`, and the tests try them from then on.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.run import GOLDEN, fuzz
from tests.fuzz.targets import TARGETS

MAX_GROWN_BYTES = 96 << 20
"""What the process may gain while one target is fed; caches and the allocator's arenas are some tens of MB."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (%(default)s)")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; more than once")
    parser.add_argument("--no-keep", action="store_true", help="keep no inputs that fail")
    options = parser.parse_args()
    chosen = [TARGETS[name] for name in options.target or TARGETS]
    total, inputs, failed, seconds = sum(target.share for target in chosen), 0, 0, 0.0
    print(f"seed {options.seed}, {options.inputs} inputs for {len(chosen)} targets", flush=True)
    for target in chosen:
        count = max(1, round(options.inputs * target.share / total))
        found = fuzz(target, count, options.seed, None if options.no_keep else GOLDEN)
        inputs, seconds = inputs + found.inputs, seconds + found.seconds
        grown = found.grown_bytes > MAX_GROWN_BYTES
        failed += len(found.failures) + grown
        print(
            f"{target.name:18} {found.inputs:8} inputs {found.refused:8} refused {found.seconds:7.1f} s "
            f"{found.grown_bytes / (1 << 20):6.1f} MB{' GROWN' if grown else ''} {len(found.failures)} failures",
            flush=True,
        )
        for name, text in found.failures.items():
            print(f"    {name}: {text}", flush=True)
    print(f"{inputs} inputs in {seconds:.0f} s, {failed} failures", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
