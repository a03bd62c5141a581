"""The error-feedback residual of a bucket on a rank, as stored in a checkpoint."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

from star_hvd.compression.lossy_wire import LossyWire
from star_hvd.engine.buckets import Bucket

__all__ = ["left_of"]


def left_of(wire: LossyWire, bucket: Bucket) -> torch.Tensor:
    """Return one element per element of the bucket, in float64; zeros where there is no residual."""
    places: defaultdict[torch.nn.Parameter, int] = defaultdict(itertools.count().__next__)
    state = wire.state(places)
    left = {} if state is None else state["residuals"]
    parts = [left.get(places[param], torch.zeros(param.shape)).double().reshape(-1) for param in bucket.params]
    return torch.cat(parts)
