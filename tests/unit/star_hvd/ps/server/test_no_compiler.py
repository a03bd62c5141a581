"""Servers start without torch's compiler, and nobody misses it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LEAVES_OUT = """
import sys, torch
from star_hvd.ps.server.no_compiler import leave_out
leave_out()
"""

_OPTIMIZERS = (
    _LEAVES_OUT
    + """
import inspect
for base in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = base([weight], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert (weight < 1.0).all(), base
inspect.getmodule(sys._getframe())  # Looks at every module.
assert not any(name.startswith("torch._dynamo.") for name in sys.modules)
"""
)

_ASKED_FOR = (
    _LEAVES_OUT
    + """
import torch._dynamo.config
assert "torch._dynamo.eval_frame" in sys.modules
assert sys.modules["torch._dynamo"] is torch._dynamo and hasattr(torch._dynamo, "optimize")
"""
)

_ATTRIBUTE = (
    _LEAVES_OUT
    + """
real = torch._dynamo.OptimizedModule
assert "torch._dynamo.eval_frame" in sys.modules and torch._dynamo.OptimizedModule is real
leave_out()
assert torch._dynamo.OptimizedModule is real
"""
)


pytestmark = pytest.mark.slow


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_optimizers_work_without_it() -> None:
    run(_OPTIMIZERS)


def test_it_comes_to_whoever_imports_a_part_of_it() -> None:
    run(_ASKED_FOR)


def test_it_comes_to_whoever_asks_for_more() -> None:
    run(_ATTRIBUTE)
