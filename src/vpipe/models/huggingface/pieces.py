"""How a Hugging Face model is described as layers: pieces, each naming the modules it takes and what it does with them.

A piece refers to modules by their path in the original model. The same description therefore serves a model in
memory, a model that exists only as a config, and a checkpoint, whose tensors carry these paths as names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vpipe.layer import Layer, TiedWeight


class Part(nn.Module):
    """A layer made of modules of the original model, which are attached under the names that its piece gives them."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        self.config, self.options = config, options
        self.paths: dict[str, str] = {}
        """Own attribute → path in the original model."""


@dataclass(frozen=True)
class Piece:
    """One layer of the cut."""

    part: type[Part]
    modules: dict[str, str]
    """Attribute of the part → path in the original model."""
    name: str
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)
    cost_key: str = ""
    owner: str = ""
    """Path of the sub-model whose config and initialisation rule these modules."""
    buffers: dict[str, str] = field(default_factory=dict)
    """As ``modules``, for buffers that hang on the original model itself."""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, root: nn.Module) -> Part:
        """The part, with the very modules of ``root``."""
        part = self.part(root.get_submodule(self.owner).config, **self.options)
        for attribute, path in self.modules.items():
            part.add_module(attribute, root.get_submodule(path))
        for attribute, path in self.buffers.items():
            part.register_buffer(attribute, root.get_buffer(path))
        part.paths = {**self.modules, **self.buffers}
        return part

    def layer(self, module: Any) -> Layer:
        return Layer(module, self.reads, self.writes, name=self.name, cost_key=self.cost_key)


def hub_name(paths: dict[str, str], name: str) -> str:
    """The name in the original model of a part's parameter or buffer ``name``."""
    attribute, _, rest = name.partition(".")
    return f"{paths[attribute]}.{rest}" if rest else paths[attribute]


def hub_names(part: nn.Module) -> dict[str, str]:
    """Own name → original name, of everything that a checkpoint of this layer holds: for export to Hugging Face."""
    assert isinstance(part, Part)
    return {name: hub_name(part.paths, name) for name in part.state_dict()}


def tied_weights(pieces: Sequence[Piece], root: nn.Module) -> tuple[TiedWeight, ...]:
    """The parameters of ``root`` that appear in several pieces."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for index, piece in enumerate(pieces):
        for name, parameter in piece.make(root).named_parameters():
            owners.setdefault(id(parameter), []).append((index, name))
    return tuple(TiedWeight(tuple(places)) for places in owners.values() if len(places) > 1)


def unshared(part: Part, names: Sequence[str]) -> Part:
    """The part with copies of the parameters ``names``, the others being the same objects as before.

    Stages own their parameters: a tied weight is one parameter per owner, kept equal by summing gradients. In one
    process the original's shared parameter would be summed by autograd and again by the pipeline."""
    copied = {id(part.get_parameter(name)) for name in names}
    kept: dict[int, Any] = {id(value): value for value in part.buffers()}
    kept.update({id(value): value for value in part.parameters() if id(value) not in copied})
    kept.update({id(module.config): module.config for module in part.modules() if hasattr(module, "config")})
    return copy.deepcopy(part, kept)


def aliases(root: nn.Module, name: str) -> list[str]:
    """All names in ``root`` of the parameter or buffer called ``name``, this one first."""
    named: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    if name not in named:
        return [name]
    return [name, *(other for other, value in named.items() if value is named[name] and other != name)]
