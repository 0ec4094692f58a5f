"""Where the modules of a piece come from when no model is in memory: from a config, or from a checkpoint directory.

The whole model exists once without storage (torch's meta device), which costs neither memory nor random numbers. A
rank that owns a layer copies that layer's skeleton, gives it storage, lets the library initialise it, and reads its
tensors if there is a checkpoint."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vpipe.errors import UserError
from vpipe.models.huggingface.anatomy import Anatomy
from vpipe.models.huggingface.cut import owned_paths
from vpipe.models.huggingface.initial import RealLiterals, buffers_filled, give_storage, initialise
from vpipe.models.huggingface.part import Frame, Part, hub_names
from vpipe.models.huggingface.pieces import CallPlan, Piece
from vpipe.models.huggingface.standins import StandIns
from vpipe.models.huggingface.tasks import ModelTask
from vpipe.models.huggingface.tensors import Tensors
from vpipe.models.model import building_on_meta


class PieceBuilder:
    """Builds pieces of the model that ``config`` describes, with the weights of ``directory`` if there is one."""

    body: Anatomy
    plan: CallPlan
    task: ModelTask
    solid: bool

    def __init__(self, architecture: type[nn.Module], config: Any, directory: str | None, dtype: torch.dtype) -> None:
        self.architecture, self.config, self.directory, self.dtype = architecture, config, directory, dtype

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: not the skeleton, nor where tensors were found."""
        names = ("architecture", "config", "directory", "dtype", "body", "plan", "task", "solid")
        return {name: self.__dict__[name] for name in names}

    @cached_property
    def skeleton(self) -> nn.Module:
        with torch.device("meta"), RealLiterals():
            made = self.architecture(copy.deepcopy(self.config))
        buffers_filled(made)
        return made.train()

    @cached_property
    def frame(self) -> Frame:
        stand_ins = StandIns(self.skeleton)
        stand_ins.solid = self.solid
        return Frame(self.skeleton, self.body, self.plan, self.task, stand_ins)

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(Path(self.directory or ""), self.skeleton)

    def build(self, piece: Piece) -> Part:
        units = {path: copy.deepcopy(self.skeleton.get_submodule(path)) for path in owned_paths(self.plan, piece)}
        raw = {
            path: nn.Parameter(torch.empty_like(self.skeleton.get_parameter(path)))
            for path in piece.raw
            if not any(path.startswith(f"{unit}.") for unit in units)
        }
        if building_on_meta():
            return Part(self.frame, piece, units, raw)
        for unit in units.values():
            give_storage(unit)
        raw = {path: nn.Parameter(torch.full(value.shape, torch.nan)) for path, value in raw.items()}
        initialise(units, raw, self.skeleton)
        part = Part(self.frame, piece, units, raw)
        if self.directory is not None:
            self.read(part)
        for parameter in part.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return part

    def read(self, part: Part) -> None:
        """Overwrites the part's parameters, and the buffers that a checkpoint keeps, with the directory's."""
        trained = {name for name, value in part.named_parameters(remove_duplicate=False) if value.requires_grad}
        values = part.state_dict(keep_vars=True)
        for name, original in hub_names(part).items():
            tensor = self.tensors.get(original)
            if tensor is None:
                if name in trained:  # fixed tables, such as sinusoids, are not kept in checkpoints
                    raise UserError(
                        f"{self.directory} has no tensor {original!r}, which a {self.architecture.__name__} needs; "
                        "give the directory of a checkpoint of this architecture, or start from its config"
                    )
                continue
            if tensor.shape != values[name].shape:
                raise UserError(
                    f"{self.directory} has {original!r} of shape {tuple(tensor.shape)} "
                    f"but config.json asks for {tuple(values[name].shape)}"
                )
            with torch.no_grad():
                values[name].copy_(tensor)
