"""Every rank of jobs with micro-batches: `python -m tests.multiproc.steal_job SCENARIO`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import star_hvd as hvd
from tests.multiproc.shares_job import (
    CLIP,
    adamw,
    explained,
    make_dataset,
    make_net,
    reference_run,
    run_facts,
    vector_of,
)
from tests.support.launch import write_result

BATCH, PARTS, RANKS = 20, 4, 4  # 12 steps of 80 samples and one of 35.
SLOW = 4.0
LESS = 0.8  # Of the user's batch: what a slow rank has where micro-batches are taken over.
SLOW_EPOCHS = {2: slice(-6, -4), 0: slice(-2, None)}  # Of eight: a rank has been slow for two epochs before them.


def _train(
    mode: str, epochs: int, *, slow: bool = False, parts: int = PARTS, batch: int = BATCH, inside: bool = False,
    patient: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """The micro-batches that this rank had in each step, by epoch; and the parameters behind each step.

    A slow rank, rank 2, takes so many times as long; at half of the epochs it is another one. `inside`: evaluate in
    micro-batches too, see `_evaluate`. `patient`: all epochs are made again until a slow rank has had less,
    a few times: after a thousand steps rounding errors are no longer small.
    """
    net, options = make_net(), {name: value for name, value in given.items() if name == "accuracy"}
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode=mode, max_grad_norm=CLIP, **options)
    loading = {name: value for name, value in given.items() if name != "accuracy"}
    loader = hvd.shard(make_dataset(), batch_size=batch, seed=11, microbatches=parts, **loading)
    evaluation = hvd.shard(make_dataset(), **({"batch_size": 31, "microbatches": 2} if inside else {"batch_size": 200}))
    behind: list[torch.Tensor] = []
    taken: list[list[list[list[int]]]] = []
    if inside:
        _evaluate(evaluation, grad=False, leave=False)
    for epoch in range((4 if patient else 1) * epochs):
        if epoch and epoch % epochs == 0 and _slow_had_less(taken):
            break
        taken.append([[]])
        for inputs, wanted, numbers in loader:
            first = not taken[-1][-1]
            if first and len(taken[-1]) in ((3, 7) if inside else (3,)):  # Validations behind steps, and inside them.
                _evaluate(evaluation, grad=epoch > 0, leave=len(taken[-1]) == 7)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), wanted).backward()
            if first and len(taken[-1]) in ((5, 9) if inside else (5,)):
                _evaluate(evaluation, grad=epoch > 0, leave=len(taken[-1]) == 9)
            # By hand and of a part: without effect.
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-9)
            taken[-1][-1].append(numbers.tolist())
            late = slow and hvd.rank() == (2 if 2 * (epoch % epochs) < epochs else 0)
            time.sleep((SLOW if late else 1.0) * 0.001 * len(numbers))
            optimizer.step()
            if optimizer.stepped:
                behind.append(vector_of(net))
                taken[-1].append([])
        assert not taken[-1].pop()
    return optimizer, behind, taken


def _slow_had_less(taken: list[list[list[list[int]]]]) -> bool:
    """Whether a rank had less in the end of the half of the latest epochs in which it was slow. Collective."""
    part, rank = float("inf"), int(hvd.rank())
    if rank in (0, 2):
        counts = [sum(map(len, step)) for epoch in taken[SLOW_EPOCHS[rank]] for step in epoch[:-1]]
        part = sum(counts) / len(counts) / BATCH
    return min(hvd.allgather_object(part, name="parts")) < LESS


def _evaluate(loader: Any, *, grad: bool, leave: bool) -> None:
    """Go through a loader without training, or leave it behind its first batch."""
    with torch.set_grad_enabled(grad):
        for _ in loader:
            if leave:
                break


def _compared(mode: str, epochs: int, **options: Any) -> dict[str, Any]:
    optimizer, behind, own = _train(mode, epochs, **options)
    taken = hvd.allgather_object(own, name="taken")
    whole = [[[[i for part in step for i in part] for step in epoch] for epoch in rank] for rank in taken]
    expected = reference_run(whole)
    return run_facts(optimizer, behind, expected, whole) | {
        "parts": [[[len(step) for step in epoch] for epoch in rank] for rank in taken],
        "own": [[[sum(map(len, step)) for step in epoch] for epoch in rank] for rank in taken],
        "most": max(len(part) for rank in taken for epoch in rank for step in epoch for part in step),
        "samples": [
            [
                sum(len(rank[epoch][step]) for rank in whole if step < len(rank[epoch]))
                for step in range(max(len(rank[epoch]) for rank in whole))
            ]
            for epoch in range(len(whole[0]))
        ],
    }


def plain() -> dict[str, Any]:
    """`sync`: every rank has its own micro-batches, whatever it takes for them."""
    return _compared("sync", 2, slow=True)


def loaded_ahead() -> dict[str, Any]:
    """The same, with micro-batches that worker processes load ahead."""
    return _compared("sync(steal)", 4, slow=True, num_workers=2)


def uneven() -> dict[str, Any]:
    """Micro-batches of different sizes: 3 of 20 samples, weighed by what they have."""
    return _compared("sync(steal)", 2, slow=True, parts=3)


def short() -> dict[str, Any]:
    """A last step of 3 samples in one micro-batch: three ranks have no part in it, and the parameters all the same."""
    optimizer, behind, own = _train("sync(steal)", 3, batch=31)
    taken = hvd.allgather_object(own, name="taken")
    whole = [[[[i for part in step for i in part] for step in epoch] for epoch in rank] for rank in taken]
    last, expected = optimizer.param_groups[0]["params"], reference_run(whole)[-1]
    vector = torch.nn.utils.parameters_to_vector(last).detach()
    return {
        "error": float((vector - expected).abs().max() / expected.abs().max()),
        "steps": optimizer.stats()["steps"],
        "own": len(behind),
    }


def inside() -> dict[str, Any]:
    """Evaluations in micro-batches before the training and inside of its steps, before and behind backward passes."""
    return _compared("sync(steal)", 2, inside=True)


def auto() -> dict[str, Any]:
    """The coordinator decides, among `sync` and `sync(steal)`."""
    return _compared("auto", 8, slow=True, patient=True)


def weighed() -> dict[str, Any]:
    """A loss that is a mean over tokens, of which samples have different numbers."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync(steal)", max_grad_norm=CLIP)
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    taken: list[list[int]] = [[]]
    for inputs, wanted, numbers in loader:
        optimizer.zero_grad()
        tokens = numbers % 5 + 1
        losses = (net(inputs) - wanted).square().squeeze(1)
        hvd.weigh(int(tokens.sum()))
        ((losses * tokens).sum() / tokens.sum()).backward()
        time.sleep(0.001 * len(numbers) * (3.0 if hvd.rank() == 1 else 1.0))
        optimizer.step()
        taken[-1] += numbers.tolist()
        if optimizer.stepped:
            taken.append([])
    everything, other = hvd.allgather_object(taken, name="taken"), make_net()
    reference = adamw(other)
    for step in range(max(map(len, everything))):
        numbers = [i for rank in everything if step < len(rank) for i in rank[step]]
        if not numbers:
            continue
        inputs, wanted, _ = make_dataset()[numbers]
        tokens = torch.tensor(numbers) % 5 + 1
        reference.zero_grad()
        (((other(inputs) - wanted).square().squeeze(1) * tokens).sum() / tokens.sum()).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), CLIP)
        reference.step()
    a, b = vector_of(net), vector_of(other)
    return {"error": float((a - b).abs().max() / b.abs().max()), "steps": optimizer.stats()["steps"]}


def by_hand() -> dict[str, Any]:
    """The gradient clipped by hand behind `synchronize`, the norm of each step's mean seen, in two orders of calls."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync(steal)")
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    taken: list[list[int]] = [[]]
    norms = []
    for inputs, wanted, numbers in loader:
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.synchronize()
        norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        taken[-1] += numbers.tolist()
        norms.append((optimizer.stepped, norm > 0.0))
        if optimizer.stepped:
            taken.append([])
    everything = hvd.allgather_object([taken[:-1]], name="taken")
    wanted_vector = reference_run([[[list(step) for step in epoch] for epoch in rank] for rank in everything])[-1]
    error = float((vector_of(net) - wanted_vector).abs().max() / wanted_vector.abs().max())
    return {"error": error, "norms": norms}


def unfed() -> dict[str, Any]:
    """Without `microbatches`."""
    return explained("sync(steal)", "microbatches")


def _fetched_ahead() -> str:
    """Train with a wrapper that fetches each micro-batch while its predecessor is worked on; return the error."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync(steal)")
    batches = iter(hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS))
    present = next(batches)
    for coming in batches:
        try:
            torch.nn.functional.mse_loss(net(present[0]), present[1]).backward()
        except hvd.StarError as error:
            batches.close()
            return str(error)
        optimizer.step()
        present = coming
    return ""


def wrong() -> dict[str, Any]:
    """What is refused, on all ranks alike."""
    found = [_fetched_ahead()]
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("sync(steal)", {"parts": 21}), ("partial(3)", {}), ("sync(24,12,16,28)", {}),
        ("sync(steal)", {"parts": 2, "batches": 3}),
    ]  # fmt: skip
    for mode, options in attempts:
        try:
            _train(mode, 1, **options)
        except ValueError as error:
            found.append(str(error))
        hvd.barrier()
        from star_hvd.runtime import runtime

        runtime.shutdown()
    return {"errors": found}


def left() -> dict[str, Any]:
    """Rank 1 leaves its loop in the first step of every epoch; the others compute what it has not begun."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync(steal)")
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    taken: list[int] = []
    for inputs, wanted, numbers in loader:
        taken += numbers.tolist()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.step()
        if hvd.rank() == 1 and optimizer.stepped:
            break
    return {"taken": taken, "error": 0.0}


def left_inside() -> dict[str, Any]:
    """Rank 1 leaves its loop behind the first of its four micro-batches of a step; it has reserved the second then."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync")
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    taken: list[int] = []
    for inputs, wanted, numbers in loader:
        taken += numbers.tolist()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.step()
        if hvd.rank() == 1:
            break
    return {"taken": taken}


def train_part(net: torch.nn.Module, optimizer: Any, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
    """Train on a micro-batch."""
    torch.nn.functional.mse_loss(net(inputs), wanted).backward()
    optimizer.step()
    optimizer.zero_grad()


def kept() -> dict[str, Any]:
    """A state is loaded, and its epoch made, while the iterator of another epoch is held in the middle of it."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync")
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    state, held = loader.state_dict(), iter(loader)
    taken: list[int] = []
    for _ in range(2 * PARTS):
        inputs, wanted, _ = next(held)
        train_part(net, optimizer, inputs, wanted)
    loader.load_state_dict(state)
    for inputs, wanted, numbers in loader:
        taken += numbers.tolist()
        train_part(net, optimizer, inputs, wanted)
    del held
    return {"taken": taken}


def resumed() -> dict[str, Any]:
    """An epoch goes on behind a checkpoint in its middle, with another loader."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode="sync(steal)")
    loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    taken: list[int] = []
    state: Any = None
    step: list[int] = []
    for inputs, wanted, numbers in loader:
        step += numbers.tolist()
        train_part(net, optimizer, inputs, wanted)
        if optimizer.stepped:
            taken, step = taken + step, []
            if optimizer.stats()["steps"] == 5:
                state = loader.state_dict()
                break
    hvd.barrier()
    again = hvd.shard(make_dataset(), batch_size=BATCH, seed=11, microbatches=PARTS)
    again.load_state_dict(state)
    for inputs, wanted, numbers in again:
        taken += numbers.tolist()
        train_part(net, optimizer, inputs, wanted)
    return {"taken": taken}


def _left_inside_a_step(ranks: tuple[int, ...]) -> dict[str, Any]:
    """Some ranks leave the first epoch behind two micro-batches of its second step; every mean is to be of its epoch.

    All gradients are 1,000 in the first epoch, and 1 in the others.
    """
    net = torch.nn.Linear(4, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), mode="sync")
    loader = hvd.shard(torch.utils.data.TensorDataset(torch.ones(4 * 8 * RANKS, 4)), 8, microbatches=PARTS, seed=3)
    means: list[list[float]] = []
    for epoch in range(3):
        means.append([])
        for number, (inputs,) in enumerate(loader, 1):
            optimizer.zero_grad()
            net((1.0 if epoch else 1000.0) * inputs).mean().backward()
            optimizer.step()
            if optimizer.stepped and net.weight.grad is not None:
                means[-1].append(float(net.weight.grad.mean()))
            if not epoch and hvd.rank() in ranks and number == PARTS + 2:
                break
    return {"means": means, "steps": optimizer.stats()["steps"]}


def all_leave_inside() -> dict[str, Any]:
    """Every rank leaves: what was accumulated belongs to no later step."""
    return _left_inside_a_step(tuple(range(RANKS)))


def one_leaves_inside() -> dict[str, Any]:
    """One rank leaves; the others make the epoch's steps without it, and it the next epoch's with them."""
    return _left_inside_a_step((1,))


def steal() -> dict[str, Any]:
    """Rank 2 is slow in the first half of the epochs, rank 0 in the second."""
    return _compared("sync(steal)", 8, slow=True)


if __name__ == "__main__":
    hvd.init()
    write_result({"rank": hvd.rank(), **globals()[sys.argv[1]]()})
    hvd.shutdown()
