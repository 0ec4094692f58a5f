"""Where the modules of a piece come from when no model is in memory: from a config, or from a checkpoint directory.

The whole model exists once without storage (torch's meta device), which costs neither memory nor random numbers. A
rank that owns a layer copies that layer's skeleton, gives it storage, lets the library initialise it, and reads its
tensors if there is a checkpoint."""

from __future__ import annotations

import copy
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.huggingface.pieces import Part, Piece, aliases, hub_names
from vpipe.models.model import building_on_meta


class Source:
    """Builds pieces of the model that ``config`` describes, with the weights of ``directory`` if there is one."""

    def __init__(self, architecture: type[nn.Module], config: Any, directory: str | None, dtype: torch.dtype) -> None:
        self.architecture, self.config, self.directory, self.dtype = architecture, config, directory, dtype

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: not the skeleton, nor where tensors were found."""
        return {name: self.__dict__[name] for name in ("architecture", "config", "directory", "dtype")}

    @cached_property
    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return self.architecture(copy.deepcopy(self.config))

    @cached_property
    def files(self) -> dict[str, Path]:
        """Tensor name → the file that holds it."""
        return tensor_files(Path(self.directory or ""))

    def build(self, piece: Piece) -> Part:
        part = copy.deepcopy(piece.make(self.skeleton))
        if not building_on_meta():
            give_storage(part)
            initialise(part, self.skeleton.get_submodule(piece.owner))
            if self.directory is not None:
                self.read(part)
            for parameter in part.parameters():
                parameter.data = parameter.data.to(self.dtype)
        return part

    def read(self, part: Part) -> None:
        """Overwrites the part's parameters, and the buffers that a checkpoint keeps, with the directory's."""
        from safetensors import safe_open

        trained = {name for name, value in part.named_parameters(remove_duplicate=False) if value.requires_grad}
        values = part.state_dict(keep_vars=True)
        for name, original in hub_names(part).items():
            found = self.find(original)
            if found is None:
                if name in trained:  # fixed tables, such as sinusoids, are not kept in checkpoints
                    raise UserError(
                        f"{self.directory} has no tensor {original!r}, which a {self.architecture.__name__} needs; "
                        "give the directory of a checkpoint of this architecture, or start from its config"
                    )
                continue
            with safe_open(str(self.files[found]), framework="pt") as file, torch.no_grad():
                tensor: Tensor = file.get_tensor(found)
                if tensor.shape != values[name].shape:
                    raise UserError(
                        f"{self.files[found]} has {found!r} of shape {tuple(tensor.shape)} "
                        f"but config.json asks for {tuple(values[name].shape)}"
                    )
                values[name].copy_(tensor)

    def find(self, original: str) -> str | None:
        """The name in the files of a tensor: its own, a tied one's, without the base model's prefix, or of BERT's
        first age."""
        prefix = getattr(self.architecture, "base_model_prefix", "") + "."
        for name in aliases(self.skeleton, original):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            for candidate in (name, name.removeprefix(prefix), prefix + name, old):
                if candidate in self.files:
                    return candidate
        return None


def tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint in safetensors, of one file or of shards with an index."""
    from safetensors import safe_open

    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            names = {name: directory / Path(file).name for name, file in weight_map.items()}
            missing = sorted({str(path) for path in names.values() if not path.is_file()})
            if missing:
                raise UserError(f"{index} names {missing[0]}, which does not exist; copy the whole checkpoint")
            return names
        if single.is_file():
            with safe_open(str(single), framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the weights in {directory} cannot be read: {error}") from error
    raise UserError(
        f"{directory} has no model.safetensors; weights are read as safetensors only, so save them with "
        "save_pretrained, or leave the directory out to start from new weights"
    )


_UNTOUCHED = -(2**31)
"""Stands in whole-number buffers until they are initialised."""


def give_storage(part: nn.Module) -> None:
    """Moves a module from meta to the CPU, filled with values that show if they are never written; shared parameters
    stay shared."""
    first: dict[int, str] = {}
    same = [
        (name, first.setdefault(id(parameter), name))
        for name, parameter in part.named_parameters(remove_duplicate=False)
    ]
    part.to_empty(device="cpu")
    for name, original in same:
        if name != original:
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, part.get_parameter(original))
    with torch.no_grad():
        for value in (*part.parameters(), *part.buffers()):
            value.fill_(torch.nan if value.is_floating_point() else _UNTOUCHED)


def initialise(part: Part, owner: nn.Module) -> None:
    """New weights: torch's own first, then the library's for this architecture."""
    with torch.no_grad():
        for module in part.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        part.apply(owner._init_weights)  # type: ignore[arg-type]
        for name, value in part.named_buffers(recurse=False):
            if value.isnan().any():
                part.get_buffer(name).zero_()
    for name, value in (*part.named_parameters(), *part.named_buffers()):
        untouched = value.isnan() if value.is_floating_point() else value == _UNTOUCHED
        assert not untouched.any(), f"{type(owner).__name__} leaves {name} without a value"
