"""The trained networks: a small one for each data set, and others with gradients of realistic size.

`conv` has about 1 MB of gradients, `transformer` about 10 MB (float32). Both are cheap to compute for their size, so
that several ranks fit on a few cores: most of the transformer's parameters are in an embedding of pixel pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["NETWORKS", "USUAL_HIDDEN_UNITS", "RowTransformer", "first_tensor", "layer_costs", "make_network"]

USUAL_HIDDEN_UNITS = 32
NETWORKS = ("usual", "mlp", "conv", "transformer")
CLASSES = 10
GREY_LEVELS = 17  # The digits have 17; other images are quantized to as many.
TABLE_STD = 0.02
SIDES = {"digits": 8, "fashion": 28}  # Side of an image in pixels.


class RowTransformer(nn.Module):
    """A pre-norm transformer encoder whose sequence elements are the rows of an image.

    A row's vector is a projection of its pixels plus the sum of the embeddings of its pairs of neighbouring pixels,
    each indexed by the position of the pair and its grey levels.

    Args:
        side: Rows and columns of the image; a larger image is first averaged over squares.
        dimension: Dimension of a row's vector.
        layers: Encoder layers.
        heads: Attention heads of each.
        feedforward: Width of each layer's hidden part.
    """

    def __init__(self, side: int, *, dimension: int, layers: int, heads: int, feedforward: int) -> None:
        super().__init__()
        pairs = side * side // 2
        self._side = side
        self.table = nn.Embedding(pairs * GREY_LEVELS**2, dimension)
        nn.init.normal_(self.table.weight, std=TABLE_STD)
        self.register_buffer("first_index", torch.arange(pairs) * GREY_LEVELS**2, persistent=False)
        self.project = nn.Linear(side, dimension)
        self.position = nn.Parameter(torch.zeros(side, dimension))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    dimension, heads, feedforward, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(dimension)
        self.head = nn.Linear(dimension, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores of images with values from 0 to 1, shape (batch, 64) or (batch, 1, side, side)."""
        side = self._side
        if x.dim() == 4 and x.shape[-1] > side:
            x = nn.functional.adaptive_avg_pool2d(x, side)
        levels = (x.reshape(len(x), -1, 2) * (GREY_LEVELS - 1)).round().long()
        index = levels[..., 0] * GREY_LEVELS + levels[..., 1] + self.first_index
        pairs = self.table(index).view(len(x), side, side // 2, -1).sum(2)
        rows = self.project(x.reshape(len(x), side, side)) + self.position + pairs
        scores: torch.Tensor = self.head(self.norm(self.layers(rows)).mean(1))
        return scores


def make_network(dataset: str, hidden_units: int = USUAL_HIDDEN_UNITS, network: str = "usual") -> nn.Module:
    """Return a new network for `dataset`, initialized from torch's current random state.

    Args:
        dataset: `digits` or `fashion`.
        hidden_units: Width of the hidden layer of `usual` and `mlp`. On digits, a width above the default gives two
            hidden layers, so that the gradient is large: slightly more than 4 * `hidden_units` ** 2 bytes.
        network: One of `NETWORKS`; `usual` is a perceptron for the digits and two small convolutions for Fashion-MNIST.

    Raises:
        ValueError: Unknown network or data set.
    """
    if network not in NETWORKS or dataset not in SIDES:
        raise ValueError(f"network {network!r} for {dataset!r}; expected one of {NETWORKS}, for one of {list(SIDES)}")
    if network == "transformer" and dataset == "digits":
        return RowTransformer(8, dimension=224, layers=1, heads=4, feedforward=448)
    if network == "transformer":
        return RowTransformer(14, dimension=80, layers=2, heads=4, feedforward=160)
    if network == "conv":
        return _convolutions(dataset)
    if network == "usual" and dataset == "fashion":
        return _small_convolutions(hidden_units)
    pixels = SIDES[dataset] ** 2
    deep = dataset == "digits" and hidden_units > USUAL_HIDDEN_UNITS
    middle = [nn.Linear(hidden_units, hidden_units), nn.ReLU()] if deep else []
    flat = [nn.Flatten()] if dataset == "fashion" else []
    return nn.Sequential(
        *flat, nn.Linear(pixels, hidden_units), nn.ReLU(), *middle, nn.Linear(hidden_units, CLASSES)
    )


def _small_convolutions(hidden_units: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, hidden_units),
        nn.ReLU(),
        nn.Linear(hidden_units, CLASSES),
    )


def _convolutions(dataset: str) -> nn.Module:
    """Return four convolutions with most parameters in the layers of low resolution; no batch normalization."""
    first: list[nn.Module] = [nn.Conv2d(1, 32, 5, stride=4, padding=2)]
    if dataset == "digits":
        first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, stride=2, padding=1)]
    strides = (1, 2, 2) if dataset == "digits" else (2, 2, 2)
    widths = (32, 64, 128, 128)
    layers = [*first, nn.ReLU()]
    for inputs, outputs, stride in zip(widths, widths[1:], strides, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return network


def layer_costs(model: nn.Module, sample: torch.Tensor) -> dict[nn.Module, float]:
    """Return each parameterized layer's share of a forward pass, by its multiplications; the shares add up to 1.

    Args:
        model: Any module whose layers return tensors, or tuples that begin with one.
        sample: One batch of inputs.
    """
    counts: dict[nn.Module, float] = {}

    def count(layer: nn.Module, _: object, output: Any) -> None:
        counts[layer] = counts.get(layer, 0.0) + _products(layer, first_tensor(output))

    own = [layer for layer in model.modules() if _is_layer(layer)]
    hooks = [layer.register_forward_hook(count) for layer in own]
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    total = sum(counts.values())
    return {layer: value / total for layer, value in counts.items()}


def first_tensor(output: Any) -> torch.Tensor:
    """Return a layer's output, or the first element of an output tuple."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, torch.Tensor)
    return found


def _is_layer(module: nn.Module) -> bool:
    """Whether a module counts as one layer with parameters; attention does, as it bypasses its children's hooks."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    return not any(True for _ in module.children()) and any(True for _ in module.parameters())


def _products(layer: nn.Module, output: torch.Tensor) -> float:
    """Return the multiplications of a call: each weight once for every position of the output."""
    weights = [p for p in layer.parameters() if p.dim() > 1]
    if isinstance(layer, nn.Embedding) or not weights:
        return float(output.numel())
    channels = layer.embed_dim if isinstance(layer, nn.MultiheadAttention) else weights[0].shape[0]
    return output.numel() / channels * sum(p.numel() for p in weights)
