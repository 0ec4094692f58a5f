"""The form that GPT and LLaMA share: an embedding, blocks of attention and feed-forward, and a head.

Each block is one layer, or two with ``split``, so that a partition can cut between attention and feed-forward. The
final norm and the head are the last layer: logits are the largest tensor of a language model and never leave the last
stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from vpipe.layer import Layer, TiedWeight
from vpipe.models.losses import TokenCount, TokenLoss
from vpipe.models.model import Model, seed_layers, tie

Make = Callable[[], nn.Module]


class Block(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.feed_forward(self.attention(x))
        return y


def _block(attention: Make, feed_forward: Make) -> Block:
    return Block(attention(), feed_forward())


def causal(
    embedding: Make,
    attention: Make,
    feed_forward: Make,
    head: Make,
    *,
    num_layers: int,
    split: bool,
    tied: bool,
    seed: int,
    **facts: Any,
) -> Model:
    """The model of these parts; ``facts`` are its sizes. ``tied``: the head is the token embedding."""
    layers = [Layer(embedding, reads=("tokens",), name="embedding")]
    for block in range(num_layers):
        if split:
            layers.append(Layer(attention, name=f"attention {block}", cost_key="attention"))
            layers.append(Layer(feed_forward, name=f"feed-forward {block}", cost_key="feed-forward"))
        else:
            layers.append(Layer(partial(_block, attention, feed_forward), name=f"block {block}", cost_key="block"))
    layers.append(Layer(head, name="head"))
    weights = (TiedWeight(((0, "tokens.weight"), (len(layers) - 1, "projection.weight"))),) if tied else ()
    return Model(
        layers=tie(seed_layers(layers, seed), weights), loss=TokenLoss(), count=TokenCount(), tied=weights, **facts
    )


def sized(base: Callable[..., Model], summary: str, **defaults: Any) -> Callable[..., Model]:
    """``base`` with other defaults, which its signature tells: a size of a model is not another model."""
    signature = inspect.signature(base)
    parameters = [each.replace(default=defaults.get(name, each.default)) for name, each in signature.parameters.items()]

    def build(**options: Any) -> Model:
        return base(**defaults | options)

    build.__doc__ = summary
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return build
