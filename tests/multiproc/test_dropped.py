"""An optimizer that was dropped without `close`, or failed in the middle of a step, is no burden for the next one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

SHUTDOWN_S = 60.0  # A rank that is not needed any more ends within the interval of its messages; far below a deadline.


def _job(mode: str, scenario: str) -> list[dict[str, Any]]:
    results = run_job("tests.multiproc.dropped_job", mode, scenario, ranks=2).check().results
    for result in results:
        assert result["same"], "the optimizer after it does not come to plain Horovod's result"
        assert result["end_s"] < SHUTDOWN_S
    return results


@pytest.mark.parametrize("mode", ["sync", "partial(1)"])
def test_the_users_optimizer_raises_in_step(mode: str) -> None:
    for result in _job(mode, "step"):
        assert result["caught"] == 1 and result["gone"]
        if mode == "sync":
            assert result["steps"] == 4, "the step that raised has ended, as under Horovod"


@pytest.mark.parametrize("mode", ["sync", "partial(1)"])
def test_a_hook_raises_in_backward_on_all_ranks(mode: str) -> None:
    for result in _job(mode, "backward"):
        assert result["outcome"] == "caught" and result["gone"]
        assert result["handles"] == 0, "a reduction that was begun stays in Horovod's tables"


def test_a_hook_raises_on_one_rank_which_drops_the_optimizer() -> None:
    """The others' step ends without that rank, long before any deadline."""
    first, second = _job("sync", "one-backward")
    assert (first["outcome"], second["outcome"]) == ("stepped", "caught")
    assert first["gone"] and second["gone"]


def test_a_step_is_left_on_one_rank_which_keeps_the_optimizer() -> None:
    first, second = _job("sync", "kept")
    assert "did not end within 8 s" in first["error"] and first["waited_s"] >= 8.0
    assert second["error"] == "" and second["kept"] == "sync"


@pytest.mark.parametrize("mode", ["sync", "auto"])
def test_a_series_of_dropped_optimizers(mode: str) -> None:
    for rank, result in enumerate(_job(mode, "series")):
        facts = result["facts"]
        # Of an optimizer before the last one a rank may be about to hear that all have dropped it.
        for what, spare in (("threads", 6), ("drivers", 6), ("hooks", 0)):
            values = [each[what] for each in facts]
            assert max(values[5:]) <= min(values[:5]) + spare, f"rank {rank}: {what} {values}"
        assert result["gone"]


@pytest.mark.parametrize("mode", ["sync", "partial(1)", "ps(1)"])
def test_an_optimizer_that_is_wrapped_again_ends_though_a_scheduler_refers_to_it(mode: str) -> None:
    """Otherwise the batches of a loader would be counted by its steps, which are over. The next one has its state."""
    for result in _job(mode, "again"):
        assert result["equal"] == [True, True] and not result["outdated"]
        assert result["first_gone"] and result["gone"]
        assert result["lr"] == pytest.approx(0.001)
        if mode == "sync":
            assert result["made"] == [1, 2, 3, 4, 1, 2, 3, 4]
