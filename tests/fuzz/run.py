"""Gives targets their inputs, keeps those that fail, and watches time and memory."""

from __future__ import annotations

import hashlib
import logging
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

__all__ = ["GOLDEN", "MAX_SECONDS", "Found", "Target", "fuzz", "kept", "one"]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fuzz"
"""Inputs that failed once: `TARGET-DIGEST`, each tried again in every run of the tests."""

MAX_SECONDS = 20.0
"""What one input may take, on a busy machine; usually it is far below a millisecond."""

_ROOM_BYTES = 1 << 30
"""Memory that inputs may take beside what the process has: who believes a size of 2^52 gets a `MemoryError`."""

_WARM = 0.2
"""Part of a target's inputs after which its memory is taken for the first time."""


@dataclass(frozen=True)
class Target:
    """Something that takes input from elsewhere.

    Attributes:
        name: Of the target.
        make: An input, valid or damaged: bytes.
        feed: Takes it in; how many inputs it was, if it was a sequence of several (None: one).
        declared: Exceptions that its documentation names.
        share: Part of all inputs, relative to the other targets'.
    """

    name: str
    make: Callable[[random.Random], bytes]
    feed: Callable[[bytes], int | None]
    declared: tuple[type[BaseException], ...] = ()
    share: float = 1.0


@dataclass
class Found:
    """What came of fuzzing one target.

    Attributes:
        inputs: Taken in.
        refused: Of these, scripts or inputs that ended with a declared exception.
        failures: Digest of the input to the end of the traceback, one for each place that failed.
        grown_bytes: Memory gained after the first inputs.
        seconds: It took.
    """

    inputs: int = 0
    refused: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    grown_bytes: int = 0
    seconds: float = 0.0


def fuzz(target: Target, inputs: int, seed: int, keep: Path | None = None) -> Found:
    """Give a target inputs until there were so many; the same ones for the same seed.

    Args:
        target: The target.
        inputs: How many.
        seed: Of all that is drawn.
        keep: Folder for inputs that fail, None for nowhere.
    """
    found, places = Found(), set[str]()
    process, warm_bytes = psutil.Process(), 0
    began_s, number = time.monotonic(), 0
    with _bounded():
        while found.inputs < inputs:
            data = target.make(random.Random(f"{target.name}:{seed}:{number}"))
            number += 1
            count, refused, failure = one(target, data)
            found.inputs += count
            found.refused += refused
            if failure is not None and failure[0] not in places:
                places.add(failure[0])
                name = f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
                found.failures[name] = f"seed {seed}, input {number - 1}: {failure[1]}"
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / name).write_bytes(data)
            if not warm_bytes and found.inputs >= _WARM * inputs:
                warm_bytes = process.memory_info().rss
    found.grown_bytes = max(0, process.memory_info().rss - warm_bytes)
    found.seconds = time.monotonic() - began_s
    return found


def one(target: Target, data: bytes) -> tuple[int, bool, tuple[str, str] | None]:
    """Inputs taken in, whether a declared exception came, and of any other one its place and text."""
    before = signal.signal(signal.SIGALRM, _too_long)
    left = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        return target.feed(data) or 1, False, None
    except target.declared:
        return 1, True, None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/star_hvd/" in f.filename or "/scheduler/" in f.filename] or list(frames)
        place = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
        return 1, False, (place, f"{place}: {str(error)[:200]}")
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)  # Of pytest-timeout, for example.


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"an input took longer than {MAX_SECONDS:g} s")


@contextmanager
def _bounded() -> Iterator[None]:
    """Without the log, where a million of refusals help nobody, and with a limit to memory."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))  # Else the machine would stand before the alarm rings.
    try:
        yield
    finally:
        logging.disable(before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def kept(target: Target) -> list[Path]:
    """The inputs of a target that failed once."""
    return sorted(path for path in GOLDEN.glob(f"{target.name}-*") if path.is_file())
