"""What `import star_hvd as hvd` offers, without starting a job."""

from __future__ import annotations

import inspect
import types

import horovod.torch
import horovod.torch.elastic
import pytest
import torch

import star_hvd
import star_hvd.elastic

# Of Horovod's own making, not for users.
INTERNAL = {"check_extension"}
# Functions that take anything say nothing about what they take.
HANDED_ON = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _public(module: types.ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in INTERNAL
    )


@pytest.mark.parametrize("name", _public(horovod.torch))
def test_every_name_of_horovod_is_here(name: str) -> None:
    assert hasattr(star_hvd, name), f"star_hvd lacks {name}"
    assert name in star_hvd.__all__, f"{name} is not in star_hvd.__all__"


def test_all_names_exist_and_are_unique() -> None:
    assert len(star_hvd.__all__) == len(set(star_hvd.__all__))
    assert not [name for name in star_hvd.__all__ if not hasattr(star_hvd, name)]


@pytest.mark.parametrize("name", ["run", "TorchState", "ElasticSampler"])
def test_elastic(name: str) -> None:
    assert hasattr(horovod.torch.elastic, name)
    assert hasattr(star_hvd.elastic, name)
    assert name in star_hvd.elastic.__all__


def test_constants_are_horovods() -> None:
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product", "global_process_set"):
        assert getattr(star_hvd, name) is getattr(horovod.torch, name), name
    theirs = {name: value for name, value in vars(horovod.torch.Compression).items() if not name.startswith("_")}
    assert theirs and all(getattr(star_hvd.Compression, name) is value for name, value in theirs.items())
    assert issubclass(star_hvd.elastic.TorchState, horovod.torch.elastic.TorchState)  # It tells its runtime of commits.
    assert issubclass(star_hvd.SyncBatchNorm, horovod.torch.SyncBatchNorm)


def test_signature_starts_with_horovods() -> None:
    theirs = list(inspect.signature(horovod.torch.DistributedOptimizer).parameters.values())
    ours = list(inspect.signature(star_hvd.DistributedOptimizer).parameters.values())
    for mine, other in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind) == (other.name, other.kind)
        assert mine.default is other.default or mine.default == other.default, mine.name
    extra = ours[len(theirs) :]
    assert {item.name for item in extra} == {"mode", "config", "max_grad_norm", "accuracy", "overlap"}
    assert all(item.kind is inspect.Parameter.KEYWORD_ONLY for item in extra)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in _public(horovod.torch)
        if inspect.isfunction(getattr(horovod.torch, name)) and name != "DistributedOptimizer"
    ],
)
def test_functions_take_what_horovods_take(name: str) -> None:
    theirs = inspect.signature(getattr(horovod.torch, name))
    ours = inspect.signature(getattr(star_hvd, name))
    if any({item.kind for item in each.parameters.values()} == HANDED_ON for each in (theirs, ours)):
        return
    assert list(ours.parameters) == list(theirs.parameters)


def test_a_job_is_needed() -> None:
    """Before `init()` there is no world to wrap an optimizer for."""
    assert not star_hvd.is_initialized()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        star_hvd.DistributedOptimizer(optimizer)
    assert star_hvd.report() is None
