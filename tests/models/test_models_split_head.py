"""A head in shards against the same model with its head whole: loss, every gradient, refusals, and the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import assert_close, loss_and_gradients
from torch import Tensor
from torch.nn import functional as F

from vpipe.errors import UserError
from vpipe.layer import TiedWeight
from vpipe.models import split_head as split
from vpipe.models.gpt import gpt
from vpipe.models.llama import llama
from vpipe.models.losses import TokenLoss
from vpipe.models.model import Model, build
from vpipe.models.split_head import HeadShard, JoinedLoss, split_head, whole_head

SIZES = {"vocab_size": 53, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8, "seed": 5}
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: gpt(**SIZES),
    "gpt tied": lambda: gpt(**SIZES, tied=True),
    "llama": lambda: llama(**SIZES, num_kv_heads=1, intermediate_size=32),
}


def compared(whole: Model, num_shards: int, masked: float = 0.3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what the shards give, what torch's cross entropy over the whole head gives): the loss, and every gradient under
    the names of the model whose head is whole."""
    shards = split_head(whole, num_shards)
    generator = torch.Generator().manual_seed(num_shards)
    tokens, labels = torch.randint(0, SIZES["vocab_size"], (2, 3, 8), generator=generator).unbind()
    labels = labels.where(torch.rand(labels.shape, generator=generator) >= masked, -100)
    results = []
    for model, inputs in ((shards, shards.given(tokens, labels)), (whole, tokens)):
        modules = [module.double() for module in model.build()]
        loss, gradients = loss_and_gradients(model, modules, inputs, labels)
        named = {f"{layer}.{name}": gradient for (layer, name), gradient in gradients.items()}
        if model is shards:
            named = whole_head(named, len(model.layers), num_shards)
        results.append({"loss": loss.double(), **named})
    return results[0], results[1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_shards_equal_a_whole_head(name: str, num_shards: int, smoothing: float) -> None:
    """A vocabulary that no count divides, labels that do not count, a head that is the embedding."""
    whole = replace(MODELS[name](), loss=TokenLoss(smoothing=smoothing))
    assert_close(*compared(whole, num_shards), tolerance=1e-6)  # fp32 logits, as in the loss of a whole head


def test_no_label_counts() -> None:
    shards, whole = compared(MODELS["gpt tied"](), 3, masked=1.0)
    assert shards["loss"] == whole["loss"] == 0
    assert all(not gradient.any() for gradient in shards.values())


def test_large_logits_do_not_overflow() -> None:
    """Each shard takes out its own maximum."""
    hidden, labels = torch.randn(2, 4, 8) * 40, torch.randint(0, 30, (2, 4))
    weight = torch.randn(30, 8) * 10
    said = [
        HeadShard(rows, begin, 0.0)(hidden, labels) for rows, begin in zip(weight.split(10), (0, 10, 20), strict=True)
    ]
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(JoinedLoss(30, -100, 0.0)(labels, *said), expected)


def _one_dx(shard: HeadShard, hidden: Tensor, labels: Tensor) -> Tensor:
    return FORWARD(shard, hidden.detach() if shard.begin else hidden, labels)


def _target_of_all(shard: HeadShard, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, shard.weight).float()
    place = (labels - shard.begin).clamp(0, len(shard.weight) - 1)
    return torch.stack((logits.logsumexp(-1), logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)), -1)


def _padded(shard: HeadShard, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = F.pad(F.linear(hidden, shard.weight).float(), (0, 1))
    return torch.stack((logits.logsumexp(-1), FORWARD(shard, hidden, labels)[..., 1]), -1)


def _maximum_by_itself(shard: HeadShard, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, shard.weight).float()
    sums = (logits - logits.amax(-1, keepdim=True).detach()).exp().sum(-1).log()
    return torch.stack((sums, FORWARD(shard, hidden, labels)[..., 1]), -1)


FORWARD = HeadShard.forward


@pytest.mark.parametrize("mutant", [_one_dx, _target_of_all, _padded, _maximum_by_itself])
def test_mutants_of_a_shard_are_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadShard, "forward", mutant)
    with pytest.raises(AssertionError):
        assert_close(*compared(MODELS["gpt"](), 3), tolerance=1e-6)


def test_a_tie_of_slices_has_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose embedding is not tied to the shards is another one."""
    monkeypatch.setattr(split, "TiedWeight", lambda owners: TiedWeight(owners[:1]))
    with pytest.raises(AssertionError):
        assert_close(*compared(MODELS["gpt tied"](), 2), tolerance=1e-6)


def test_shards_begin_as_the_head() -> None:
    """Weights do not depend on how many shards there are."""
    whole, shards = MODELS["gpt"](), split_head(MODELS["gpt"](), 4)
    named = {f"{i}.{n}": p.detach() for i, m in enumerate(shards.build()) for n, p in m.named_parameters()}
    expected = {f"{i}.{n}": p.detach() for i, m in enumerate(whole.build()) for n, p in m.named_parameters()}
    assert_close(whole_head(named, len(shards.layers), 4), expected, tolerance=0.0)
    assert shards.num_parameters == whole.num_parameters
    assert shards.flops_per_token == whole.flops_per_token
    tied = MODELS["gpt tied"]()
    assert split_head(tied, 4).num_parameters == tied.num_parameters
    assert split_head(tied, 4).flops_per_token == tied.flops_per_token


@pytest.mark.parametrize(
    ("model", "num_shards", "words"),
    [
        (lambda: build("bert", {**SIZES, "num_layers": 2}), 2, "no projection onto a vocabulary"),
        (lambda: replace(gpt(**SIZES), loss=print), 2, "no projection onto a vocabulary"),
        (lambda: gpt(**{**SIZES, "vocab_size": 3}), 4, "its vocabulary has 3"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model: Callable[[], Model], num_shards: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        split_head(model(), num_shards)
