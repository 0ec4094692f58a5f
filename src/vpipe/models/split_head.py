"""A vocabulary head that is cut by rows: the last layer becomes a norm, shards of the projection, and the loss.

The head of a language model is one layer as heavy as several blocks, so no cut of layers can balance it. Here each
shard is a layer of its own, which a rank holds beside its blocks:

    blocks ─ norm ─ hidden ─┬─ shard 0 ─┐
                            ├─ shard 1 ─┼─ loss          a shard reads hidden and labels; of each position it says
                            └─ shard 2 ─┘                the log of its sum of exponentials and the target's logit

A shard has some rows of the vocabulary, none of them padding, and begins with those rows of the head that a model that
is not split begins with. A head that is the token embedding stays tied: the embedding is cut into the same rows.
The loss is the cross entropy over the whole vocabulary up to the order of additions, and the same to the bit wherever
these layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight, split_sizes
from vpipe.models.gpt import Head
from vpipe.models.losses import OwnLoss, TokenLoss
from vpipe.models.model import LABELS, Factory, Model

HIDDEN = "hidden"


class HeadShard(nn.Module):
    """Some rows of the projection. Of each position it gives the log of the sum of the exponentials of its logits, the
    target's logit or 0 where another shard has it, and for label smoothing the sum of its logits."""

    def __init__(self, weight: Tensor, begin: int, smoothing: float) -> None:
        super().__init__()
        self.weight, self.begin, self.smoothing = nn.Parameter(weight), begin, smoothing

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight).float()
        place = labels.long() - self.begin
        last = self.weight.shape[0] - 1
        target = logits.gather(-1, place.clamp(0, last).unsqueeze(-1)).squeeze(-1)
        target = target.where((place >= 0) & (place <= last), 0.0)
        said = (logits.logsumexp(-1), target, *([logits.sum(-1)] if self.smoothing else []))
        return torch.stack(said, -1)


class JoinedLoss(nn.Module):
    """The mean cross entropy over the labels that count, from what the shards say; 0 where none counts."""

    def __init__(self, vocab_size: int, ignored: int, smoothing: float) -> None:
        super().__init__()
        self.vocab_size, self.ignored, self.smoothing = vocab_size, ignored, smoothing

    def forward(self, labels: Tensor, *shards: Tensor) -> Tensor:
        sums, targets, *totals = torch.stack(shards, -1).unbind(-2)
        log_sum = sums.logsumexp(-1)
        losses = log_sum - targets.sum(-1)
        if totals:
            even = log_sum - totals[0].sum(-1) / self.vocab_size
            losses = (1 - self.smoothing) * losses + self.smoothing * even
        counts = labels != self.ignored
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)


class EmbeddingRows(nn.Embedding):
    """An embedding whose table is several parameters, so that each can be tied to a shard of the head."""

    def __init__(self, table: Tensor, sizes: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = table.shape
        self.sizes = tuple(sizes)
        for index, rows in enumerate(torch.split(table, [*self.sizes])):
            self.register_parameter(f"rows{index}", nn.Parameter(rows.clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor | None = None
        for index, (end, size) in enumerate(zip(accumulate(self.sizes), self.sizes, strict=True)):
            place = tokens - (end - size)
            rows = F.embedding(place.clamp(0, size - 1), self.get_parameter(f"rows{index}"))
            inside = ((place >= 0) & (place < size)).unsqueeze(-1)
            embedded = rows.where(inside, 0.0 if embedded is None else embedded)
        assert embedded is not None
        return embedded


def _norm(head: Factory) -> nn.Module:
    """What the head does before its projection."""
    return head().get_submodule("norm")


def _shard(head: Factory, begin: int, size: int, smoothing: float) -> nn.Module:
    """The shard of some rows, of the head whole."""
    weight = head().get_parameter("projection.weight").detach()
    return HeadShard(weight[begin : begin + size].clone(), begin, smoothing)


def _in_rows(layer: Factory, embedding: str, sizes: Sequence[int]) -> nn.Module:
    """A layer whose table of embeddings is cut into rows."""
    module = layer()
    table = module.get_parameter(f"{embedding}.weight").detach()
    module.set_submodule(embedding, EmbeddingRows(table, sizes))
    return module


def why_not(model: Model, num_shards: int) -> str:
    """Why the head of a model cannot be cut into so many shards; empty where it can."""
    last = model.layers[-1]
    if not isinstance(model.loss, TokenLoss) or not isinstance(model.blank()[-1], Head) or len(last.reads) != 1:
        return "its last layer is no projection onto a vocabulary whose loss is cross entropy; gpt and llama have one"
    if model.vocab_size < num_shards:
        return f"{num_shards} shards need as many rows, but its vocabulary has {model.vocab_size}"
    others = [weight for weight in model.tied if weight not in _ties_of_head(model)]
    if any(owner[0] == len(model.layers) - 1 for weight in others for owner in weight.owners):
        return "its projection is tied to something that is no embedding"
    return ""


def split_head(model: Model, num_shards: int) -> Model:
    """The model with its head in shards; its loss is its output, and it reads the labels as an input."""
    if reason := why_not(model, num_shards):
        raise UserError(f"the head of this model cannot be split: {reason}; set model.split_head: false")
    assert isinstance(model.loss, TokenLoss)
    *body, head = model.layers
    sizes = tuple(split_sizes(model.vocab_size, num_shards))
    shards = [
        Layer(
            partial(_shard, head.build, end - size, size, model.loss.smoothing),
            reads=(HIDDEN, LABELS),
            writes=(f"shard {index}",),
            name=f"head {index}",
            cost_key=f"head of {size} rows",
        )
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
    ]
    joined = JoinedLoss(model.vocab_size, model.loss.ignored, model.loss.smoothing)
    loss = Layer(joined, reads=(LABELS, *(shard.writes[0] for shard in shards)), name="loss")
    ties = []
    for weight in _ties_of_head(model):
        (layer, name), _ = weight.owners
        table = name.removesuffix(".weight")
        body[layer] = replace(body[layer], module=partial(_in_rows, body[layer].build, table, sizes))
        first = len(body) + 1
        ties += [TiedWeight(((layer, f"{table}.rows{i}"), (first + i, "weight"))) for i in range(num_shards)]
    norm = Layer(partial(_norm, head.build), reads=head.reads, writes=(HIDDEN,), name="norm")
    kept = tuple(weight for weight in model.tied if weight not in _ties_of_head(model))
    layers = [*body, norm, *shards, loss]
    return replace(model, layers=layers, loss=OwnLoss(), counts=model.count, tied=(*kept, *ties), num_shards=num_shards)


def _ties_of_head(model: Model) -> list[TiedWeight]:
    """The ties between an embedding and the head's projection."""
    last = (len(model.layers) - 1, "projection.weight")
    ties = [weight for weight in model.tied if len(weight.owners) == 2 and weight.owners[1] == last]
    modules = model.blank() if ties else []
    return [
        weight
        for weight in ties
        if isinstance(
            modules[weight.owners[0][0]].get_submodule(weight.owners[0][1].removesuffix(".weight")), nn.Embedding
        )
    ]


def whole_head(tensors: dict[str, Any], num_layers: int, num_shards: int) -> dict[str, Any]:
    """Weights by ``<layer>.<name>`` of a model with a split head, as those of the same model with its head whole.
    ``num_layers`` are those of the split model."""
    head = num_layers - num_shards - 2
    named = {f"{head}.": f"{head}.norm."}
    whole: dict[str, Any] = {}
    rows: dict[str, list[tuple[int, Any]]] = {}
    for name, tensor in tensors.items():
        layer, _, own = name.partition(".")
        if int(layer) > head:
            rows.setdefault(f"{head}.projection.weight", []).append((int(layer), tensor))
        elif ".rows" in own:
            table, _, index = own.rpartition(".rows")
            rows.setdefault(f"{layer}.{table}.weight", []).append((int(index), tensor))
        else:
            whole[named[f"{layer}."] + own if int(layer) == head else name] = tensor
    for name, parts in rows.items():
        whole[name] = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])
    return whole
