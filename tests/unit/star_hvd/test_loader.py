"""`shard` and `work` over ranks in one process: the user's loader, orders, streams, states."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from star_hvd.loader import shard
from tests.support.loaders import Numbers, World


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> World:
    """A job of one rank."""
    return World(1, monkeypatch)


def numbers(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_all_of_a_loader_s_options_are_kept_and_every_sample_is_there_once(
    alone: World, workers: int, in_order: bool
) -> None:
    found: list[int] = []
    options: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    own = DataLoader(
        Numbers(50), batch_size=4, shuffle=True, num_workers=workers, in_order=in_order, collate_fn=tuple, **options
    )
    loader = shard(own)
    inner = loader._feeder._loader  # type: ignore[union-attr]
    assert inner is not None and inner.num_workers == workers and inner.persistent_workers == bool(workers)
    assert inner.prefetch_factor == (3 if workers else None)
    for _ in range(3):
        batches = list(loader)
        assert {type(batch) for batch in batches} == {tuple} and sorted(numbers(batches)) == list(range(50))
        found += numbers(batches)
        assert loader._feeder._loader is inner  # type: ignore[union-attr]
    assert found[:50] != found[50:100]
    assert list(loader.lease_waits) == [0, 0, 0]
