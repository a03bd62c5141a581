"""What is found in a network that limits how its batches may be divided."""

from __future__ import annotations

import pytest
import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm

from star_hvd.input.network import NORMALIZES, SPARSE, meets_in_pass, normalizations, warn_of_parts


def params_of(*layers: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(torch.nn.Sequential(*layers).parameters())


def test_layers_are_found_by_their_parameters() -> None:
    plain, normalized = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)], torch.nn.BatchNorm1d(3)
    embedding = torch.nn.EmbeddingBag(4, 3, sparse=True)
    synced = SyncBatchNorm(3)
    assert normalizations(params_of(*plain)) == 0 and not meets_in_pass(params_of(*plain, normalized))
    assert normalizations(params_of(*plain, normalized)) == 1
    assert meets_in_pass(params_of(embedding)) == SPARSE and meets_in_pass(params_of(synced)) == NORMALIZES
    assert not meets_in_pass(params_of(torch.nn.Embedding(4, 3)))


def test_micro_batches_of_a_network_with_batch_normalization_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_parts(params_of(torch.nn.Linear(3, 3)))
    assert not caplog.records
    layer = torch.nn.BatchNorm1d(3)
    warn_of_parts(params_of(layer))
    assert "1 layers of batch normalization" in caplog.text and "microbatches" in caplog.text
