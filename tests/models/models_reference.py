"""How the tests of models compare: a list of layers against an independent module, loss and every gradient.

The meaning of a model in one process: its layers in sequence, then the gradients of tied weights summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.models.model import Model, run

torch.set_num_threads(1)


def loss_and_gradients(
    model: Model, modules: list[nn.Module], inputs: Any, targets: Any
) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
    """The loss, and the gradient of every (layer, parameter), with the sum at every owner of a tied weight."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    loss = model.loss(run(model.layers, modules, inputs), targets)
    loss.backward()
    gradients = {
        (index, name): parameter.grad
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    for tied in model.tied:
        parts = [gradients[owner] for owner in tied.owners if owner in gradients]
        total = sum(parts[1:], start=parts[0])
        gradients.update(dict.fromkeys(tied.owners, total))
    return loss.detach(), gradients


def assert_close(ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor], tolerance: float = 1e-10) -> None:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for key, value in ours.items():
        torch.testing.assert_close(
            value, theirs[key], rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )


def assert_same_bits(ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor]) -> None:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    different = [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
    assert not different, different
