"""Jobs in every family of modes whose connections are reset several times a second lose no sample and no gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cut_job import EPOCHS, SAMPLES
from tests.multiproc.test_modes import check
from tests.support.shared import SHARED_LIMIT_S, facts_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(SHARED_LIMIT_S)]

OF_FOUR = ("sync", "partial(3)", "subgroup(0,1,2)", "grouped(2)", "local(3)", "ps(4)", "ps(1)")
OF_TWO = ("ps(2)", "ps(1)")


def check_samples(facts: list[dict[str, Any]]) -> None:
    for epoch in range(EPOCHS):
        taken = sorted(index for rank in facts for index in rank["taken"][epoch])
        assert taken == list(range(SAMPLES)), f"epoch {epoch}: every sample exactly once"
    assert sum(rank["cuts"] for rank in facts) >= 2 * len(facts), "hardly a connection was reset"
    print([(rank["cuts"], round(rank["longest_s"], 2)) for rank in facts])


@pytest.mark.parametrize("mode", OF_FOUR)
def test_four_ranks_train_on(mode: str) -> None:
    facts = facts_of("tests.multiproc.cut_job", OF_FOUR, mode, ranks=4, noted="cut_job.py")
    check(facts)
    check_samples(facts)
    assert mode == "sync" or all(mode in rank["modes"] for rank in facts)


@pytest.mark.parametrize("mode", OF_TWO)
def test_two_ranks_train_on(mode: str) -> None:
    facts = facts_of("tests.multiproc.cut_job", OF_TWO, mode, ranks=2, noted="cut_job.py")
    check(facts)
    check_samples(facts)
