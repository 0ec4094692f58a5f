"""Small models of every kind that a pipeline must train, each with its data.

A model is a function ``(num_layers, dropout) -> Model``; the same seed gives the same weights in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.layer import Layer, TiedWeight, add_loss

WIDTH = 8
CLASSES = 5


@dataclass(frozen=True)
class Model:
    """Layers, what ties them, and a batch of ``rows`` rows for a step."""

    layers: list[Any]
    data: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    tied: tuple[TiedWeight, ...] = ()


class Block(nn.Module):
    """A residual block with a norm, two products and dropout; its input is used twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class NormBlock(nn.Module):
    """BatchNorm: buffers that advance with every forward."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.linear(x))))


class Join(nn.Module):
    """Adds up several values, each through a product of its own; every value is used twice."""

    def __init__(self, num_values: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_values))
        self.dropout = nn.Dropout(dropout)

    def forward(self, *values: Tensor) -> Tensor:
        return self.dropout(
            sum(value * 0.5 + torch.tanh(part(value)) for part, value in zip(self.parts, values, strict=True))
        )


class Carrier(nn.Module):
    """Passes on a dict, a tuple, ``None`` and numbers; a mask that needs no gradient; a view that is not contiguous."""

    def __init__(self, dropout: float = 0.0, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.last = last

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            given = {"x": given, "rest": (torch.ones_like(given), None, 0, 0.5)}
        x, (mask, nothing, count, factor) = given["x"], given["rest"]
        assert nothing is None
        assert type(count) is int
        assert type(factor) is float
        x = self.dropout(torch.tanh(self.linear(x))) * mask + factor * x
        if self.last:
            return x[:, :CLASSES]
        return {"x": x.t().contiguous().t(), "rest": (mask * 0.9, None, count + 1, factor)}


class Balancing(nn.Module):
    """Adds a loss of its own from the middle of the model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.block = Block(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        add_loss(0.01 * (y * y).mean())
        return y


class Head(nn.Module):
    """Logits from an embedding-shaped weight, so that it can be tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def _classes(rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def _tokens(rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, CLASSES, (rows,), generator=generator), torch.randint(
        0, CLASSES, (rows,), generator=generator
    )


def plain(num_layers: int, dropout: float) -> Model:
    return Model(
        [nn.Linear(WIDTH, WIDTH), *[Block(dropout) for _ in range(num_layers - 2)], nn.Linear(WIDTH, CLASSES)], _classes
    )


def batch_norm(num_layers: int, dropout: float) -> Model:
    return Model(
        [nn.Linear(WIDTH, WIDTH), *[NormBlock(dropout) for _ in range(num_layers - 2)], nn.Linear(WIDTH, CLASSES)],
        _classes,
    )


def skips(num_layers: int, dropout: float) -> Model:
    """``early`` has readers all along the model, and the input itself is read again at the end."""
    layers: list[Any] = [
        Layer(nn.Linear(WIDTH, WIDTH), reads=("image",), writes=("early",)),
        Layer(Block(dropout), reads=("early",)),
    ]
    while len(layers) < num_layers - 2:
        number = len(layers)
        layers.append(Layer(Join(2, dropout), reads=("x", "early")) if number % 3 == 0 else Layer(Block(dropout)))
    layers += [Layer(Join(3, dropout), reads=("x", "early", "image")), Layer(nn.Linear(WIDTH, CLASSES))]

    def data(rows: int, step: int) -> tuple[Any, Any]:
        x, y = _classes(rows, step)
        return {"image": x}, y

    return Model(layers, data)


def tied(num_layers: int, dropout: float) -> Model:
    layers = [nn.Embedding(CLASSES, WIDTH), *[Block(dropout) for _ in range(num_layers - 2)], Head()]
    layers[-1].weight.data.copy_(layers[0].weight)
    return Model(layers, _tokens, tied=(TiedWeight(((0, "weight"), (num_layers - 1, "weight"))),))


def structured(num_layers: int, dropout: float) -> Model:
    return Model([Carrier(dropout, last=number == num_layers - 1) for number in range(num_layers)], _classes)


def auxiliary(num_layers: int, dropout: float) -> Model:
    middle = [Balancing(dropout) if number % 2 else Block(dropout) for number in range(num_layers - 2)]
    return Model([nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, CLASSES)], _classes)


def frozen(num_layers: int, dropout: float) -> Model:
    """Whole layers without anything to train, at the beginning and in the middle, and single frozen parameters."""
    model = plain(num_layers, dropout)
    for number, layer in enumerate(model.layers[:-1]):
        if number < 2 or number % 4 == 0:
            layer.requires_grad_(False)
        elif number % 2:
            layer.up.weight.requires_grad_(False)
            layer.norm.bias.requires_grad_(False)
    return model


def convolution(num_layers: int, dropout: float) -> Model:
    class Shape(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.shape = shape

        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], *self.shape)

    middle = [
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(2, 2, 3, padding=1), nn.Dropout(dropout))
        for _ in range(num_layers - 2)
    ]
    first, last = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Shape(2, WIDTH // 2)),
        nn.Sequential(Shape(WIDTH), nn.Linear(WIDTH, CLASSES)),
    )
    return Model([first, *middle, last], _classes)


MODELS: dict[str, Callable[[int, float], Model]] = {
    each.__name__: each for each in (plain, batch_norm, skips, tied, structured, auxiliary, frozen, convolution)
}


def build(name: str, num_layers: int, dropout: float = 0.1) -> Model:
    torch.manual_seed(0)
    return MODELS[name](num_layers, dropout)
