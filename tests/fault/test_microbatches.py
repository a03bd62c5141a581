"""Micro-batches over the loss of a rank and over a checkpoint: every sample once, gradients those of their samples."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fault.microbatch_job import COMMITS_AT, EPOCHS, SAMPLES, sgd
from tests.multiproc.shares_job import CLIP, make_dataset, make_net, vector_of
from tests.support.elastic import ELASTIC_LIMIT_S, run_elastic, two_survive
from tests.support.launch import run_job

pytestmark = [pytest.mark.fault, pytest.mark.timeout(ELASTIC_LIMIT_S)]


def _reference(taken: list[list[list[int]]]) -> tuple[torch.Tensor, list[float]]:
    """One process with the batch that the ranks had together in every step; also the sum of its parameters behind each.
    """
    sums = []
    net, data = make_net(), make_dataset()
    optimizer = sgd(net)
    for numbers in (numbers for epoch in taken for numbers in epoch):
        inputs, wanted, _ = data[numbers]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        sums.append(float(vector_of(net).double().sum()))
    return vector_of(net), sums


def _first_wrong(folder: Path, sums: dict[tuple[int, int], float], at: int) -> list[str]:
    """The earliest notes of parameters that are not the reference's; `sums` by epoch and step."""
    found = []
    for file in sorted(folder.glob("*.sums")):
        for line in file.read_text().splitlines():
            world, epoch, step, value = line.split()
            where = int(epoch), int(step)
            if (world == "first") == (where[1] < at) and abs(float(value) - sums[where]) > 1e-6:
                found.append((where, f"{file.stem}: epoch {epoch}, step {step}"))
    return [text for _, text in sorted(found)[:4]]


def _check(folder: Path, results: list[dict[str, Any]], at: int = COMMITS_AT) -> None:
    """What the notes say against one process that makes the steps that count, with their samples.

    Args:
        folder: Where the notes are.
        results: The ranks' results.
        at: The first step of the second world.
    """
    steps: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*.txt"):
        for line in file.read_text().splitlines():
            world, epoch, step, *numbers = line.split()
            if (world == "first") == (int(step) < at):
                steps[int(epoch)][int(step)] += map(int, numbers)
    assert sorted(steps) == list(range(EPOCHS))
    for epoch in steps.values():
        assert sorted(i for numbers in epoch.values() for i in numbers) == list(range(SAMPLES)), "every sample once"
    taken = [[sorted(epoch[step]) for step in sorted(epoch)] for _, epoch in sorted(steps.items())]
    expected, values = _reference(taken)
    sums = dict(zip(((epoch, step) for epoch in sorted(steps) for step in sorted(steps[epoch])), values, strict=True))
    for result in results:
        found = torch.tensor(result["params"], dtype=expected.dtype)
        wrong = float((found - expected).abs().max() / expected.abs().max())
        assert wrong < 1e-6, _first_wrong(folder, sums, at)


@pytest.mark.parametrize("what", ["killed", "killed_after_commit_inside"])
def test_the_epoch_goes_on_behind_the_last_commit_after_a_kill_inside_a_step(what: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    job = run_elastic("tests.fault.microbatch_job", what, str(notes), folder=tmp_path, recovered=two_survive(notes))
    survivors = [result for result in job.results if result]
    assert len(survivors) == 2 and {result["size"] for result in survivors} == {2}, job.tail
    # A commit inside a step is made behind it.
    (at,) = {result["resumed"][0] for result in survivors}
    assert at == COMMITS_AT + (what == "killed_after_commit_inside")
    _check(notes, survivors, at)


def test_an_epoch_goes_on_behind_a_checkpoint_with_fewer_ranks(tmp_path: Path) -> None:
    run_job("tests.fault.microbatch_job", "save", str(tmp_path), ranks=4).check()
    _check(tmp_path, run_job("tests.fault.microbatch_job", "resume", str(tmp_path), ranks=3).check().results)
