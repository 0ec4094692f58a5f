"""The model without its weights: what planning, facts and checkpoints must know of layers that other ranks hold."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from vpipe.models.model import Model


@dataclass(frozen=True)
class Skeleton:
    """Names, shapes and sizes of all layers; nothing is allocated."""

    name: str
    modules: list[nn.Module]
    layer_names: list[str]

    @classmethod
    def of(cls, name: str, model: Model) -> Skeleton:
        with torch.device("meta"):
            modules = model.build()
        names = [layer.name or type(module).__name__ for layer, module in zip(model.layers, modules, strict=True)]
        return cls(name, modules, names)

    @cached_property
    def parameters(self) -> list[int]:
        """Per layer, its parameters."""
        return [sum(p.numel() for p in module.parameters()) for module in self.modules]

    @cached_property
    def weight_bytes(self) -> list[int]:
        return [sum(p.numel() * p.element_size() for p in module.parameters()) for module in self.modules]

    @cached_property
    def work(self) -> list[float]:
        """Per layer, about how much it computes: the weights of its matrix products; an embedding has none."""
        products = [
            sum(
                parameter.numel()
                for part in module.modules()
                if not isinstance(part, nn.Embedding)
                for parameter in part.parameters(recurse=False)
                if parameter.dim() > 1
            )
            for module in self.modules
        ]
        smallest = max(products) * 0.01 or 1.0
        return [amount + smallest for amount in products]

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint must share with the run that reads it: layers and shapes, not how they are spread."""
        shapes = [
            (layer, name, tuple(p.shape))
            for layer, module in enumerate(self.modules)
            for name, p in module.named_parameters()
        ]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        return f"{self.name} of {len(self.modules)} layers and {sum(self.parameters):,} weights, {digest}"
