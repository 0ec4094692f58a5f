"""Train or eval mode, frozen or not: the user's to choose, part by part, as in plain torch.

A training step runs every part in the mode in which the user has left it, so a ``bn.eval()`` stays. An evaluation runs
all of them in eval mode and then gives each its own back. Replicas of one process are copies that the user does not
see: they follow the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All in eval mode; afterwards as the user had left them."""
    tops = list(modules)
    parts = {part: part.training for module in tops for part in module.modules()}
    before = [(module, module.training) for module in tops]
    for module in tops:
        module.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.train(training)  # some modules do more than set the flag
        for part, training in parts.items():
            part.training = training


def follow(first: nn.Module, copies: Sequence[nn.Module]) -> None:
    """Let copies of a module train as the first does."""
    for copied in copies:
        for leader, part in zip(first.modules(), copied.modules(), strict=True):
            part.training = leader.training
        for weight, parameter in zip(first.parameters(), copied.parameters(), strict=True):
            parameter.requires_grad_(weight.requires_grad)
