"""A model from elsewhere, checked and tried in a process of its own before a training job loads it.

LightGBM's C++ can end the process that it runs in. So a child of the lowest priority looks at the text, loads every
head and predicts with it; only what came through that is loaded. `python -m scheduler.learning.trial` is that child: it
reads the heads from its standard input, as a JSON mapping of names to texts, and is of no use by itself.
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
"""What a trial may take; on an idle core it is half a second for the model of the package."""

_MEMORY_BYTES = 4 << 30  # Address space: threads and libraries reserve more than they use.
_CPU_S = 60
_ROWS, _SEED = 256, 5
_REFUSED, _MISSING = 3, 4  # Exit codes.


def try_heads(texts: Mapping[str, str], *, deadline_s: float | None = None) -> None:
    """Check, load and ask the heads of a model in a process that may end by it.

    Args:
        texts: Of every head, by name.
        deadline_s: Seconds until the trial is given up, `TRIAL_S` by default; the child is killed then.

    Raises:
        LightGBMMissing: It is not installed or cannot be loaded.
        BoosterError: A head is no model, the child ended by it, or it did not end in time.
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
            cwd=package,  # `-m` looks in the present folder first, which may hold a `scheduler` of the user's.
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BoosterError(f"a trial of it did not end within {deadline_s:g} s; expected predictions") from None
    except OSError as error:
        raise BoosterError(f"no process to try it in can be started: {error}") from None
    if done.returncode == 0:
        return
    said = (done.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1][:300]
    if done.returncode == _MISSING:
        raise LightGBMMissing(said)
    if done.returncode == _REFUSED:
        raise BoosterError(said)
    raise BoosterError(f"a process that tried it {_ending(done.returncode)} ({said}); expected predictions")


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


# ---- the child ------------------------------------------------------------------------------------------------------


def _rows() -> Array:
    """Rows that take many ways through a tree: usual ones, far ones, and missing values."""
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
                raise BoosterError("it predicts what is no number; expected finite predictions")
        except LightGBMMissing:
            raise
        except BoosterError as error:
            raise BoosterError(f"head {name} is no model that can be used: {error}") from None


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
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
