"""Every rank of jobs whose batches have shares: `python -m tests.multiproc.shares_job SCENARIO`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import star_hvd as hvd
from tests.support.launch import write_result

SAMPLES, BATCH, SEED = 995, 19, 11  # 13 steps of 76 samples and one of 7.
CLIP, DECAY, RATE = 0.05, 0.1, 0.01
LESS = 0.75 * BATCH  # A slow rank gets fewer in a step; how much fewer depends on how busy the machine made the others.

Sizes = list[list[int]]  # Of the batches that each rank had in an epoch.


def make_dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def make_net(*, batch_norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(7)
    layers: list[torch.nn.Module] = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    if batch_norm:
        layers.insert(1, torch.nn.BatchNorm1d(16))
    return torch.nn.Sequential(*layers).double()


def adamw(net: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)


def vector_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def unequal(sizes: Sizes) -> bool:
    """Whether ordered shares were in force at the beginning of an epoch."""
    return len({rank[0] for rank in sizes}) > 1


def slow_has_less(sizes: Sizes) -> bool:
    """Whether rank 2 had fewer samples in a step that is not the last one."""
    return min(sizes[2][:-1]) < LESS


def _train(
    mode: str,
    epochs: int,
    *,
    slow: float = 1.0,
    net: torch.nn.Module | None = None,
    workers: int = 0,
    drop_last: bool = False,
    samples: int = SAMPLES,
    scaler: torch.amp.GradScaler | None = None,
    several: bool = False,
    until: Callable[[Sizes], bool] = unequal,
    most: int = 30,
    **options: Any,
) -> Any:
    """What every rank had in each step, by epoch; and the parameters behind each step.

    `several`: with a new loader for every epoch, beside others that no gradient follows. `until`: there are more than
    `epochs`, at `most` so many, where a busy machine makes late what is waited for; two, in which nobody is slow, come
    behind it. (Not without end: rounding errors grow, and after a thousand steps they are no longer small.)
    """
    net = make_net() if net is None else net
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode=mode, max_grad_norm=CLIP, **options)
    evaluation = hvd.shard(make_dataset(), batch_size=64)
    data = torch.utils.data.Subset(make_dataset(), range(samples))
    loader = hvd.shard(data, batch_size=BATCH, seed=SEED, num_workers=workers, drop_last=drop_last)
    behind: list[torch.Tensor] = []
    taken: list[list[list[int]]] = []
    left, came = 2, False
    for epoch in range(most):
        taken.append([])
        if several:
            with torch.set_grad_enabled(epoch % 2 == 0):
                list(evaluation)
            loader = hvd.shard(make_dataset(), batch_size=BATCH, seed=SEED)
            loader.set_epoch(epoch)
        for inputs, wanted, numbers in loader:
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.mse_loss(net(inputs), wanted)).backward()
            factor = slow if hvd.rank() == 2 and left == 2 else 1.0
            time.sleep(factor * (0.002 + 0.001 * len(numbers)))
            scaler.step(optimizer)
            scaler.update()
            behind.append(vector_of(net))
            taken[-1].append(numbers.tolist())
        came |= until(hvd.allgather_object([len(batch) for batch in taken[-1]], name="sizes"))
        left -= came and epoch + 3 >= epochs
        if left < 0:
            break
    return optimizer, behind, taken


def reference_run(taken: list[list[list[list[int]]]]) -> list[torch.Tensor]:
    """One process with the batch that the ranks had together in every step."""
    net, data = make_net(), make_dataset()
    optimizer, behind = adamw(net), []
    for epoch in range(len(taken[0])):
        for step in range(max(len(rank[epoch]) for rank in taken)):
            numbers = [i for rank in taken for i in (rank[epoch][step] if step < len(rank[epoch]) else [])]
            inputs, wanted, _ = data[numbers]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), wanted).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            behind.append(vector_of(net))
    return behind


def _in_rows(taken: list[list[list[list[int]]]]) -> list[bool]:
    """Whether the whole steps of each epoch have the samples that plain Horovod's usual sampler gives them."""
    found = []
    for epoch in range(len(taken[0])):
        generator = torch.Generator().manual_seed(SEED + epoch)  # As in torch's `DistributedSampler`.
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        whole = len(taken) * BATCH
        rows = [sorted(order[begin : begin + whole]) for begin in range(0, SAMPLES - whole + 1, whole)]
        steps = [sorted(i for batch in step for i in batch) for step in zip(*(r[epoch] for r in taken), strict=False)]
        found.append(steps[: len(rows)] == rows)
    return found


def run_facts(
    optimizer: Any, behind: list[torch.Tensor], expected: list[torch.Tensor], taken: list[list[list[list[int]]]]
) -> dict[str, Any]:
    """How ranks trained, beside one process.

    Args:
        optimizer: Of this rank.
        behind: Parameters behind every step here.
        expected: Those of the one process.
        taken: By rank, epoch and step the samples.
    """
    epochs = range(len(taken[0]))
    return {
        "sizes": [
            [[len(batch) for batch in step] for step in zip(*(rank[epoch] for rank in taken), strict=False)]
            for epoch in epochs
        ],
        "steps": [len(expected), len(behind)],
        "error": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(behind, expected, strict=False)),
        "once": [
            sorted(i for rank in taken for batch in rank[epoch] for i in batch) == list(range(SAMPLES))
            for epoch in epochs
        ],
        "rows": _in_rows(taken),
        "mode": optimizer.mode,
        "stats": optimizer.stats(),
        "explain": hvd.explain() if hvd.rank() == 0 else "",
        "report": [plan["mode"] for plan in hvd.report().to_dict()["plans"]] if hvd.rank() == 0 else [],
    }


def check(results: list[dict[str, Any]]) -> None:
    """Every step but the last one of an epoch has plain Horovod's global batch, every sample is taken once, none late.

    Args:
        results: Facts of all ranks.
    """
    whole = len(results) * BATCH
    for result in results:
        assert all(result["once"])
        assert all(result["rows"]), result["rows"]
        assert result["error"] < 1e-6
        assert result["stats"]["max_staleness"] == result["stats"]["folds"] == result["stats"]["drops"] == 0
        for epoch in result["sizes"]:
            assert [sum(sizes) for sizes in epoch[: SAMPLES // whole]] == [whole] * (SAMPLES // whole)


def _compared(mode: str, epochs: int, slow: float, **options: Any) -> dict[str, Any]:
    optimizer, behind, own = _train(mode, epochs, slow=slow, **options)
    taken = hvd.allgather_object(own, name="taken")
    expected = reference_run(taken)
    return run_facts(optimizer, behind, expected, taken)


def exact() -> dict[str, Any]:
    """Shares of the user's, against one process."""
    return _compared("sync(24,12,16,24)", 3, 1.0, until=unequal)


def balanced() -> dict[str, Any]:
    """Rank 2 is slow until two epochs before the end."""
    return _compared("sync(balanced)", 8, 4.0, until=slow_has_less)


def loaded_ahead() -> dict[str, Any]:
    """The same, with batches that worker processes load ahead."""
    return _compared("sync(balanced)", 8, 4.0, workers=2, until=slow_has_less)


def several() -> dict[str, Any]:
    """The same, with a new loader for every epoch, beside others that no gradient follows."""
    return _compared("sync(balanced)", 8, 4.0, several=True, until=slow_has_less)


def auto() -> dict[str, Any]:
    """As `balanced`, and the coordinator decides, among the exact modes."""
    return _compared("auto", 8, 4.0, accuracy="exact", until=slow_has_less)


def scaled() -> dict[str, Any]:
    """`auto` with a GradScaler, which refuses relaxed modes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return _compared("auto", 8, 4.0, scaler=scaler, until=slow_has_less)


def explained(mode: str, word: str) -> dict[str, Any]:
    """Train in a mode, without `shard`, until the explanation has `word`."""
    net = make_net()
    optimizer = hvd.DistributedOptimizer(adamw(net), net.named_parameters(), mode=mode)
    text = ""
    for _ in range(2000):
        optimizer.zero_grad()
        net(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        time.sleep(0.002)
        # Rank 0 knows why, and all ranks have to stop at the same step.
        text = hvd.broadcast_object(hvd.explain() if hvd.rank() == 0 else "", 0, name="text")
        if word in text:
            break
    return {"explain": text, "mode": optimizer.mode}


def unfed() -> dict[str, Any]:
    """Batch shares without `shard`."""
    return explained("sync(balanced)", "hvd.shard")


def wrong() -> dict[str, Any]:
    """What is refused at once, on all ranks alike."""
    found = []
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("sync(24,12,16)", {}), ("sync(24,0,16,36)", {}), ("partial(3)", {"accuracy": "exact"}),
        ("auto", {"accuracy": "nearly"}), ("sync(1,2,3,4)", {}),
    ]  # fmt: skip
    for mode, options in attempts:
        try:
            _train(mode, 1, **options)
        except ValueError as error:
            found.append(str(error))
    return {"errors": found}


def normalized() -> dict[str, Any]:
    """A network with batch normalization under unequal shares."""
    warnings: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("star_hvd").addHandler(Listener())
    # In each epoch one batch of the usual size is left over, of which the last rank would get one sample by its share.
    samples = 4 * 4 * BATCH + BATCH
    net = make_net(batch_norm=True)
    _, _, taken = _train("sync(30,26,18,2)", 3, net=net, drop_last=True, samples=samples, most=200)
    numbers = hvd.allgather_object(taken, name="taken")
    epochs = range(len(taken))
    return {
        "warnings": [text for text in warnings if "batch normalization" in text],
        "sizes": [[[len(batch) for batch in rank[epoch]] for rank in numbers] for epoch in epochs],
        "once": all(
            len({i for rank in numbers for batch in rank[epoch] for i in batch}) == samples - BATCH for epoch in epochs
        ),
    }


if __name__ == "__main__":
    hvd.init()
    write_result({"rank": hvd.rank(), **globals()[sys.argv[1]]()})
    hvd.shutdown()
