"""A trial of a model from elsewhere in a child process before a training job loads it.

LightGBM's C++ code can crash its process. So a child of the lowest priority checks the text, loads every head and
predicts with it; only a model that passes is loaded. `python -m scheduler.learning.trial` is that child: it reads the
heads from its standard input, as a JSON mapping of names to texts. For internal use.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from scheduler.learning.booster_text import check_text
from scheduler.learning.boosters import Array, BoosterError, LightGBMMissing, load_booster
from scheduler.learning.features import FEATURES

__all__ = ["TRIAL_S", "try_heads"]

TRIAL_S = 60.0
"""Longest time of a trial; on an idle core the package's model takes half a second."""

_MEMORY_BYTES = 4 << 30  # Address space: threads and libraries reserve more than they use.
_CPU_S = 60
_ROWS, _SEED = 256, 5
_REJECTED, _MISSING = 3, 4  # Exit codes.


def try_heads(texts: Mapping[str, str], *, deadline_s: float | None = None) -> None:
    """Check, load and run the heads of a model in a child process.

    Args:
        texts: Texts of the heads, by name.
        deadline_s: Seconds after which the child is killed; `TRIAL_S` by default.

    Raises:
        LightGBMMissing: It is not installed or cannot be loaded.
        BoosterError: A head is invalid, the child crashed, or it did not end in time.
    """
    deadline_s = TRIAL_S if deadline_s is None else deadline_s
    package = str(Path(__file__).resolve().parents[2])
    parts = (package, os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scheduler.learning.trial"],
            input=json.dumps(dict(texts)).encode(),
            env=environ,
            cwd=package,  # `-m` searches the current folder first, which may contain a user's `scheduler`.
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BoosterError(f"a trial of it did not end within {deadline_s:g} s; expected predictions") from None
    except OSError as error:
        raise BoosterError(f"cannot start a process for its trial: {error}") from None
    if done.returncode == 0:
        return
    said = (done.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["no message"])[-1][:300]
    if done.returncode == _MISSING:
        raise LightGBMMissing(said)
    if done.returncode == _REJECTED:
        raise BoosterError(said)
    raise BoosterError(f"the process of its trial {_ending(done.returncode)} ({said}); expected predictions")


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


# ---- the child ------------------------------------------------------------------------------------------------------


def _rows() -> Array:
    """Rows that take many paths through a tree: usual, extreme, and missing values."""
    rng = np.random.default_rng(_SEED)
    found = rng.normal(scale=3.0, size=(_ROWS, len(FEATURES)))
    found[::7] *= 1e6
    found[rng.random(found.shape) < 0.05] = np.nan
    found[:3] = [[-1e300], [1e300], [0.0]]
    return np.asarray(found)


def _try(texts: Mapping[str, str]) -> None:
    rows = _rows()
    for name, text in texts.items():
        try:
            check_text(text, FEATURES)
            booster = load_booster(text)
            count = booster.num_feature()
            if count != len(FEATURES):
                raise BoosterError(f"it takes {count} features; expected {len(FEATURES)}")
            if not np.isfinite(np.asarray(booster.predict(rows, num_threads=1))).all():
                raise BoosterError("it predicts values that are not finite; expected finite ones")
        except LightGBMMissing:
            raise
        except BoosterError as error:
            raise BoosterError(f"head {name} is unusable: {error}") from None


def _main() -> int:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    try:
        _try(json.loads(sys.stdin.buffer.read()))
    except LightGBMMissing as error:
        sys.stderr.write(f"{error}\n")
        return _MISSING
    except BoosterError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return _REJECTED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
