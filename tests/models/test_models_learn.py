"""Every kind of model reads what the data room makes for it, and learns a batch by heart."""

from __future__ import annotations

import pytest
import torch
from models_reference import loss_and_gradients

from vpipe.data.synthetic import load
from vpipe.models.model import build

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "sequence_length": 16}


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "translation", "cpm-medium", "cpm-large"])
def test_learns_a_batch_by_heart(name: str) -> None:
    kind = name if name in ("bert", "translation") else "gpt"
    data = load(None, 16, kind=kind, vocab_size=50, num_examples=8)
    batch = data.batch(range(4))
    model = build(name, SMALL, vocab_size=data.vocab_size, seed=1)
    modules = model.build()
    for module in modules:
        module.eval()  # without dropout the loss falls at every step
    parameters = {
        (index, key): value for index, module in enumerate(modules) for key, value in module.named_parameters()
    }
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss, gradients = loss_and_gradients(model, modules, batch.inputs, batch.targets)
        losses.append(loss.item())
        for owner, gradient in gradients.items():
            parameters[owner].grad = gradient.clone()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    for weight in model.tied:
        first, *others = [parameters[owner] for owner in weight.owners]
        assert all(torch.equal(first, other) for other in others), "tied weights stay equal"


@pytest.mark.parametrize("name", ["gpt2", "bert", "translation"])
def test_dropout_follows_the_random_state(name: str) -> None:
    kind = name if name != "gpt2" else "gpt"
    data = load(None, 16, kind=kind, vocab_size=50, num_examples=8)
    batch = data.batch(range(4))
    model = build(name, {**SMALL, "extra": {"dropout": 0.3}}, vocab_size=50)
    modules = model.build()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_and_gradients(model, modules, batch.inputs, batch.targets)[0].item())
    assert losses[0] == losses[1] != losses[2]
