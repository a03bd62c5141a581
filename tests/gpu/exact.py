"""What every rank of a GPU test runs in `sync` and its kinds, on a device: `job.py` has the other modes.

horovodrun -np 4 python -m tests.gpu.exact steal out_of_memory 'lossy:low rank' ...
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import star_hvd as hvd
from scheduler.transmission.wire import FORMS
from star_hvd.compression.lossy_wire import LossyWire
from tests.gpu.job import (
    FAST_MS,
    LR,
    NUMEL,
    SLOW_MS,
    Facts,
    SlowBackward,
    Spin,
    device,
    digest,
    made_batches,
    main,
    make_net,
)
from tests.multiproc.compression_job import lossy_optimizer
from tests.support.inside import inside
from tests.support.plain import horovod

BATCH, PARTS, STEPS = 16, 4, 24
SAMPLE_BYTES = 16 << 20  # Of the activations of a sample, where memory is to run out.


class Ones:
    """Parameters whose gradients are exactly 1, of every sample, in buckets that hold NaN before each step."""

    def __init__(self, mode: str, count: int = 2) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(NUMEL, device=device())) for _ in range(count)]
        named = [(f"p{i}", p) for i, p in enumerate(self.params)]
        config = hvd.Config(bucket_bytes=2 * 4 * NUMEL)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.params, lr=LR), named_parameters=named, mode=mode, config=config
        )
        self.poison()

    def poison(self) -> None:
        """A step begins."""
        for bucket in inside(self.optimizer).core.buckets:
            bucket.flat.fill_(math.nan)

    def stepped(self) -> None:
        """`step()` was called."""
        if self.optimizer.stepped:
            self.poison()

    def facts(self) -> Facts:
        """Close, and what the parameters are."""
        self.optimizer.close()
        torch.cuda.synchronize()
        steps = self.optimizer.stats()["steps"]  # Not this rank's own alone: the epoch may have an uneven end.
        return {"value": float(self.params[0].detach()[0]), "steps": steps} | _of(self.params)


def _of(params: list[torch.Tensor] | list[torch.nn.Parameter]) -> Facts:
    return {"digest": digest(params), "nan": any(bool(torch.isnan(p).any()) for p in params)}


def _samples() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.ones(BATCH * int(hvd.size()) * STEPS, 1))


def steal() -> Facts:
    """Rank 0 needs ten times as long for a sample, on its device alone."""
    training, spin, samples = Ones("sync(steal)"), Spin(), 0
    loader = hvd.shard(_samples(), batch_size=BATCH, seed=3, microbatches=PARTS)
    each_ms = (SLOW_MS if hvd.rank() == 0 else FAST_MS) / BATCH
    for (ones,) in loader:
        training.optimizer.zero_grad()
        scale, ms = ones.to(device()).mean(), each_ms * len(ones) / 2.0
        sum(SlowBackward.apply(p, spin, ms).sum() * scale for p in training.params).backward()
        training.optimizer.step()
        training.stepped()
        samples += len(ones)
    return {"samples": samples, "of_all": len(_samples())} | training.facts()


class Activations(torch.autograd.Function):
    """The identity; needs memory for each sample, twice as much in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.samples = samples
        ctx.save_for_backward(value.new_ones(samples, SAMPLE_BYTES // value.element_size()))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        kept * 2.0
        return gradients[0], None


def out_of_memory() -> Facts:
    """Rank 1 may have memory for 11 samples of the 16; the last parameter's gradient is given by then."""
    training, failed, largest = Ones("sync"), 0, 0
    loader = hvd.shard(_samples(), batch_size=BATCH, seed=3)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device()).total_memory
    spare = 64 << 20  # Gradients and what they are added up in, blocks that are not filled.
    if hvd.rank() == 1:
        limit = torch.cuda.memory_reserved() + spare + 2 * 11 * SAMPLE_BYTES
        torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        for (ones,) in loader:
            with hvd.catch_out_of_memory(loader):
                training.optimizer.zero_grad()
                first, last = training.params
                failed += 1
                # A view, and a tuple: what the loop still holds when the parts are computed.
                found = (Activations.apply(first, len(ones)).view(-1, 2), last)
                (found[0].sum() + found[1].sum()).backward()
                failed, largest = failed - 1, max(largest, len(ones))
                training.optimizer.step()
                training.stepped()
        return {"failed": failed, "largest_part": largest} | training.facts()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def lossy(form: str) -> Facts:
    """`Compression.auto` with one form, backward and step within autocast."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64)).to(device())
    optimizer, wire = lossy_optimizer(net, FORMS.index(form), lr=0.2)
    assert isinstance(wire, LossyWire)
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(5))
    wanted, losses, used = (inputs @ torch.eye(64).roll(1, 0)).to(device()), [], False
    inputs = inputs.to(device())
    rows = slice(int(hvd.rank()), None, int(hvd.size()))
    for _ in range(120):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs[rows]), wanted[rows])
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
        used = used or wire.lossy
    optimizer.close()
    return {"first": float(losses[0]), "last": float(losses[-1]), "used": used} | _of(list(net.parameters()))


def _trained(side: str, name: str, make: Callable[..., torch.optim.Optimizer], **how: Any) -> list[torch.Tensor]:
    """A network after 40 steps; `how`: memory format, and type of autocast with a GradScaler for float16."""
    layout, dtype = how.get("layout", torch.contiguous_format), how.get("dtype")
    net = make_net().to(memory_format=layout)
    named = [(f"{name}.{side}.{key}", param) for key, param in net.named_parameters()]
    by_hand = layout != torch.contiguous_format and side != "star"  # Horovod reduces contiguous tensors alone.
    optimizer: Any = make(net.parameters())
    if side == "star":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, mode="sync")
    elif not by_hand:
        optimizer = horovod.DistributedOptimizer(optimizer, named_parameters=named)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for inputs, labels in made_batches(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(net(inputs.to(memory_format=layout)), labels)
        scaler.scale(loss).backward()
        if by_hand:
            for key, param in named:
                param.grad.copy_(horovod.allreduce(param.grad.contiguous(), name=key))  # type: ignore[union-attr]
        else:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with contextlib.nullcontext() if by_hand else optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    if side == "star":
        optimizer.close()
    return [param.detach().clone() for param in net.parameters()]


def _compared(name: str, make: Callable[..., torch.optim.Optimizer], **how: Any) -> Facts:
    torch.backends.cudnn.deterministic = True
    nets = {side: _trained(side, name, make, **how) for side in ("plain", "again", "star")}

    def distance(one: str, other: str) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(nets[one], nets[other], strict=True))

    return {"star": distance("plain", "star"), "again": distance("plain", "again")} | _of(nets["star"])


def amp(dtype: str) -> Facts:
    """Autocast, with a GradScaler where the type needs one, against plain Horovod."""
    return _compared(f"amp.{dtype}", lambda params: torch.optim.SGD(params, lr=0.05), dtype=getattr(torch, dtype))


def channels_last(kind: str) -> Facts:
    """Gradients in the parameters' memory format; a fused optimizer pairs elements by their place."""
    return _compared(
        f"channels_last.{kind}",
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=kind == "fused"),
        layout=torch.channels_last,
    )


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """A part of a forward pass on a stream of its own, and behind it the present one again."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def two_streams() -> Facts:
    """Two parameters in each bucket but the first; the gradient of one, now that which comes first, is written late."""
    training, spin, streams = Ones("sync", count=8), Spin(), [torch.cuda.Stream() for _ in range(2)]
    assert max(len(bucket.params) for bucket in inside(training.optimizer).core.buckets) == 2
    for step in range(STEPS):
        training.optimizer.zero_grad()
        parts = []
        for i, param in enumerate(training.params):
            with _on(streams[i % 2]):
                parts.append(SlowBackward.apply(param, spin, SLOW_MS / 4.0 if (i + step) % 2 else 0.0).sum())
        torch.stack(parts).sum().backward()
        training.optimizer.step()
        training.stepped()
    return training.facts()


SCENARIOS: dict[str, Callable[..., Facts]] = {
    "steal": steal,
    "out_of_memory": out_of_memory,
    "lossy": lossy,
    "amp": amp,
    "channels_last": channels_last,
    "two_streams": two_streams,
}


if __name__ == "__main__":
    main(sys.argv[1:], SCENARIOS)
