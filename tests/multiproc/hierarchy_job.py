"""Training with sums that go through the hosts, and the same with Horovod's own optimizer."""

from __future__ import annotations

import sys
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime.host_sets import host_sets
from star_hvd.wrapper.hierarchical_collective import HandOut
from tests.multiproc.modes import CONFIG, go_into
from tests.multiproc.overlap_job import digest
from tests.support.launch import write_result
from tests.support.plain import horovod

STEPS = 6
TOUR = ("partial(3)", "sync", "subgroup(0,1,2)", "sync", "local(2)", "sync")

_handed_out: list[str] = []


class CountedHandOut(HandOut):
    def submit(self, name: str, tensor: torch.Tensor) -> int:
        _handed_out.append(name)
        return super().submit(name, tensor)


def _net() -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(20, 4))


def _step(net: torch.nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + int(hvd.rank()))
    x = torch.randn(8, 12, generator=generator)
    optimizer.zero_grad()
    (net(x) - x[:, :4]).square().mean().backward()
    optimizer.step()


def _trained(library: Any, **options: Any) -> list[torch.Tensor]:
    net = _net()
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = library.DistributedOptimizer(own, net.named_parameters(), **options)
    for number in range(STEPS):
        _step(net, optimizer, number)
    if library is hvd:
        optimizer.close()
    return [param.detach().clone() for param in net.parameters()]


def equal() -> dict[str, Any]:
    """Largest difference from Horovod's, with and without overlap."""
    plain = _trained(horovod)
    facts: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {"sync": {}, "overlap": {"overlap": True}}
    variants["fp16"] = {"compression": hvd.Compression.fp16}
    for name, options in variants.items():
        _handed_out.clear()
        ours = _trained(hvd, mode="sync", **options)
        difference = max(float((a - b).abs().max()) for a, b in zip(plain, ours, strict=True))
        facts[name] = {"difference": difference, "digest": digest(ours), "handed_out": len(_handed_out)}
    return facts


def tour() -> dict[str, Any]:
    """Through relaxed modes and back."""
    net = _net()
    own = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(own, net.named_parameters(), mode="sync", config=CONFIG)
    number, used = 0, {}
    for place, mode in enumerate(TOUR):
        number = go_into(optimizer, mode, lambda number: _step(net, optimizer, number), number)
        hvd.barrier()
        _handed_out.clear()
        for _ in range(STEPS):
            _step(net, optimizer, number)
            number += 1
        used[f"{place} {mode}"] = bool(_handed_out)
        hvd.barrier()  # A child is at its own step: only then the next mode.
    optimizer.close()
    stats = optimizer.stats()
    found_again = sum(stats[f"{name}_weight"] for name in ("applied", "damped", "dropped", "pending"))
    return {
        "used": used,
        "digest": digest(net.parameters()),
        "lost": abs(stats["produced_weight"] - found_again) > 1e-6,
        "mismatches": stats["mismatches"],
    }


def main(what: str) -> None:
    import star_hvd.wrapper.hierarchical_collective as module

    module.HandOut = CountedHandOut  # type: ignore[misc]
    torch.set_num_threads(1)
    hvd.init()
    sets = host_sets()
    facts = {"sets": sets is not None, "leads": sets is not None and sets.leaders is not None}
    write_result(facts | {"equal": equal, "tour": tour}[what]())
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
