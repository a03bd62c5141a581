"""How many buckets an optimizer has."""


from __future__ import annotations

import weakref

import pytest
import torch

from star_hvd.config import Config
from star_hvd.wrapper.bucket_core import BucketCore


@pytest.mark.parametrize("background, buckets", [(False, 5), (True, 8)])
def test_what_is_pushed_in_the_background_is_in_more_buckets(background: bool, buckets: int) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))  # 256 KiB each.
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    core = BucketCore(
        own, torch.optim.SGD, wrapped=weakref.ref(own), passes=1, scale_by_ranks=False, fp16=False,
        sparse_as_dense=False, plan=None, run=None, config=Config(background=background),
        names={param: name for name, param in net.named_parameters()}, max_grad_norm=None,
    )  # fmt: skip
    assert len(core.buckets) == buckets
    core.remove_hooks()
