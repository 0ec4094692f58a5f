"""A plug-in for tests of elastic runs: a GPT with weights that no optimizer changes and that change all the same. Half of
its layers are frozen by turns, and each feed-forward has a frozen average that its own forward writes, and
generators of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vpipe.models import gpt
from vpipe.registry import MODEL_REGISTRY
from vpipe.runtime.pipeline import Pipeline


class Taught(gpt.FeedForward):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.teacher = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.numbers, self.dice = np.random.default_rng(3), random.Random(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.teacher += 0.001 * x.detach().mean() + 0.001
            return super().forward(x) * (0.9 + 0.1 * self.numbers.random() * self.dice.random()) + self.teacher.clone()
        return super().forward(x) + self.teacher.clone()


@MODEL_REGISTRY.register("taught")
def taught(*, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, sequence_length: int) -> Any:
    plain, gpt.FeedForward = gpt.FeedForward, Taught  # type: ignore[misc]
    try:
        return gpt.gpt(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            sequence_length=sequence_length,
        )
    finally:
        gpt.FeedForward = plain  # type: ignore[misc]


_step = Pipeline.train_step


def _by_halves(self: Pipeline, *given: Any, **more: Any) -> float:
    odd = self.stats.num_updates % 2
    for layer, module in self.modules().items():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(layer % 2 == odd and "teacher" not in name)
    return _step(self, *given, **more)


Pipeline.train_step = _by_halves  # type: ignore[method-assign]
