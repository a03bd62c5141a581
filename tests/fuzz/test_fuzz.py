"""A few thousand random and damaged inputs for every decoder and state machine; `make fuzz` gives a million."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.__main__ import MAX_GROWN_BYTES
from tests.fuzz.run import GOLDEN, Target, fuzz, kept, one
from tests.fuzz.targets import TARGETS
from tests.support.effort import cases

INPUTS = 5000  # Of all targets together.


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_bad_input_is_refused_or_taken(name: str) -> None:
    target = TARGETS[name]
    share = target.share / sum(one.share for one in TARGETS.values())
    found = fuzz(target, max(20, round(cases(INPUTS) * share)), seed=7)
    assert found.failures == {}, "kept with `make fuzz SEED=7`"
    assert found.grown_bytes < MAX_GROWN_BYTES


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_failed_once_fails_no_more(name: str) -> None:
    for path in kept(TARGETS[name]):
        failure = one(TARGETS[name], path.read_bytes())[2]
        assert failure is None, f"{path.name}: {failure}"


def test_kept_inputs_are_of_known_targets_and_small() -> None:
    for path in GOLDEN.glob("*-*"):
        assert path.name.rpartition("-")[0] in TARGETS and path.stat().st_size < 64 << 10


def test_the_same_seed_gives_the_same_inputs() -> None:
    for target in TARGETS.values():
        assert target.make(random.Random("a")) == target.make(random.Random("a"))


def test_an_undeclared_exception_and_an_endless_loop_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> None:
        raise {0: KeyError, 1: ValueError}[data[0] % 2]("x")

    found = fuzz(Target("broken", lambda draw: draw.randbytes(1), broken, (ValueError,)), 50, seed=1)
    assert len(found.failures) == 1 and "KeyError" in next(iter(found.failures.values()))
    assert 0 < found.refused < 50
    monkeypatch.setattr("tests.fuzz.run.MAX_SECONDS", 0.2)

    def endless(data: bytes) -> None:
        while True:
            pass

    _, _, failure = one(Target("endless", lambda draw: b"", endless), b"")
    assert failure is not None and "TimeoutError" in failure[0]
