"""Networks and programs drawn at random: layers shared, frozen, used twice, not used or only in some steps; reads and
writes of parameters and state anywhere between steps. Equal on all ranks for the same seed."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ACTIONS", "DrawnNet", "drawn_optimizer"]

Digest = Callable[[Any], str]

_USES = ((), (0,), (0,), (0,), (0, 0), (1,), (2,))
"""How a layer is used: not at all, in each step once or twice, in the even or in the odd ones."""


class DrawnNet(torch.nn.Module):
    """A chain of two to seven layers, at least the last of them trained and used in every step.

    Args:
        rng: Source of the choices.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice((4, 8, 16))
        self.layers = torch.nn.ModuleList(_layer(rng, width) for _ in range(rng.randint(1, 6)))
        self.uses = [rng.choice(_USES) for _ in self.layers]
        self.through_weight = [rng.random() < 0.2 for _ in self.layers]
        linear = [layer for layer in self.layers if isinstance(layer, torch.nn.Linear)]
        for one, other in itertools.pairwise(linear):
            if rng.random() < 0.4:
                other.weight = one.weight
        for layer in self.layers:
            if rng.random() < 0.25:
                layer.requires_grad_(False)
        self.out = torch.nn.Linear(width, width)
        self.width = width

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer, uses, through in zip(self.layers, self.uses, self.through_weight, strict=True):
            for use in uses:
                if use and number % 2 != use - 1:
                    continue
                if through and isinstance(layer, torch.nn.Linear):  # No module is called that has the parameter.
                    x = torch.tanh(torch.nn.functional.linear(x, layer.weight))
                else:
                    x = torch.tanh(layer(x))
        return self.out(x)


def _layer(rng: random.Random, width: int) -> torch.nn.Module:
    kind = rng.randrange(5)
    if kind == 0:
        return torch.nn.LayerNorm(width)
    if kind == 1:
        return torch.nn.PReLU(width)
    return torch.nn.Linear(width, width, bias=kind == 2)


def drawn_optimizer(rng: random.Random, net: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all parameters, in one group or two."""
    params = list(net.parameters())
    cut = rng.randrange(1, len(params)) if rng.random() < 0.4 else 0
    groups = [{"params": part} for part in (params[:cut], params[cut:]) if part]
    kind = rng.randrange(4)
    if kind == 0:
        return torch.optim.AdamW(groups, lr=1e-2, foreach=rng.choice((None, False)))
    if kind == 1:
        return torch.optim.NAdam(groups, lr=1e-2)
    return torch.optim.SGD(groups, lr=0.05, momentum=rng.choice((0.0, 0.9)), weight_decay=rng.choice((0.0, 1e-3)))


def _reads_parameters(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    return digest(net.parameters())


def _reads_state(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    state = optimizer.state_dict()["state"]
    return digest(v for key in sorted(state) for v in state[key].values() if isinstance(v, torch.Tensor))


def _evaluates(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    net.eval()
    with torch.no_grad():
        found = digest([net(torch.ones(2, net.width), 0)])
    net.train()
    return found


def _copies(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    return digest(copy.deepcopy(net).state_dict().values())


def _writes(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    with torch.no_grad():
        net.out.weight.mul_(0.9)
    return ""


def _writes_data(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    net.out.bias.data.clamp_(-0.5, 0.5)
    return ""


def _loads(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})
    return ""


def _changes_rate(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    for group in optimizer.param_groups:
        group["lr"] *= 0.8
    return ""


def _reads_gradients(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    return digest(param.grad for param in net.parameters() if param.grad is not None)


def _nothing(net: DrawnNet, optimizer: Any, digest: Digest) -> str:
    return ""


ACTIONS: tuple[Callable[[DrawnNet, Any, Digest], str], ...] = (
    _nothing, _nothing, _nothing, _reads_parameters, _reads_state, _evaluates, _copies, _writes, _writes_data, _loads,
    _changes_rate, _reads_gradients,
)  # fmt: skip
"""What the program does between two steps; returns what it read."""
