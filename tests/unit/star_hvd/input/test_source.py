"""The user's data set, loader and samplers, as `shard` gets them."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from star_hvd.input.feeder import Feeder
from star_hvd.input.source import source_of
from tests.support.loaders import Numbers


def test_a_loader_of_workers_can_be_given_none() -> None:
    """torch refuses what concerns workers where there are none."""
    own = DataLoader(
        Numbers(8), 2, num_workers=2, persistent_workers=True, prefetch_factor=3, timeout=9, pin_memory=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    kept = source_of(own, None, drop_last=False, options={}).options
    assert kept["prefetch_factor"] == 3 and kept["persistent_workers"] and kept["timeout"] == 9
    without = source_of(own, None, drop_last=False, options={"num_workers": 0}).options
    Feeder(own.dataset, dict(without))
    assert without["pin_memory"] and not {"timeout", "prefetch_factor"} & without.keys()
    with pytest.raises(ValueError, match="prefetch_factor"):
        asked = source_of(own, None, drop_last=False, options={"num_workers": 0, "prefetch_factor": 2}).options
        Feeder(own.dataset, dict(asked))
