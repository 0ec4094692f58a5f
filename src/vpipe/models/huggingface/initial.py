"""New weights for some modules of a model that exists only without storage, by the library's own rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vpipe.errors import UserError
from vpipe.models.huggingface.anatomy import ruling_model

_UNTOUCHED = -(2**31)
"""Stands in whole-number buffers until they are initialised."""


class _OnlyReal(TorchFunctionMode):
    """Leaves tensors without storage as they are: other pieces' parameters, which a rule of the library may name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = getattr(func, "__name__", "").endswith("_") and not getattr(func, "__name__", "").endswith("__")
        if changes and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class RealLiterals(TorchFunctionMode):
    """Lets a model that is made without storage keep the numbers that its code writes down, such as a temperature."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            kwargs = {**(kwargs or {}), "device": "cpu"}
        return func(*args, **(kwargs or {}))


def give_storage(unit: nn.Module) -> None:
    """Moves a module from meta to the CPU, filled with values that show if they are never written; shared parameters
    stay shared."""
    first: dict[int, str] = {}
    same = [
        (name, first.setdefault(id(parameter), name))
        for name, parameter in unit.named_parameters(remove_duplicate=False)
    ]
    unit.to_empty(device="cpu")
    for name, original in same:
        if name != original:
            owner, _, attribute = name.rpartition(".")
            setattr(unit.get_submodule(owner), attribute, unit.get_parameter(original))
    with torch.no_grad():
        for value in (*unit.parameters(), *unit.buffers()):
            value.fill_(torch.nan if value.is_floating_point() else True if value.dtype == torch.bool else _UNTOUCHED)


def initialise(units: Mapping[str, nn.Module], raw: Mapping[str, nn.Parameter], skeleton: nn.Module) -> None:
    """New weights: torch's own first, then the library's for this architecture, modules before what holds them."""
    with torch.no_grad(), _OnlyReal():
        for path, unit in units.items():
            for module in unit.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
            _by_rule(unit, ruling_model(skeleton, path))
        for path in _holders(skeleton, (*units, *raw)):
            _rule_for_holder(skeleton, path, units, raw)
    for path, value in _values(units, raw):
        written = dict(skeleton.named_parameters(remove_duplicate=False)).get(path)
        if written is not None and not written.is_meta and value.isnan().all():
            with torch.no_grad():
                value.copy_(written)
        untouched = value.isnan() if value.is_floating_point() else value == _UNTOUCHED
        if untouched.any() and value.dtype != torch.bool:
            raise UserError(
                f"{type(skeleton).__name__} has no rule for the first value of {path}; start from a checkpoint "
                "directory, or give a model that is already in memory to vpipe.models.huggingface.layers"
            )


def _by_rule(module: nn.Module, ruling: Any) -> None:
    """The library's initialisation, each sub-model by its own rule."""
    from transformers import PreTrainedModel

    inner: Any = module if isinstance(module, PreTrainedModel) else ruling
    for child in module.children():
        _by_rule(child, inner)
    inner._init_weights(module)


def _holders(skeleton: nn.Module, paths: tuple[str, ...]) -> list[str]:
    """The modules above ``paths``, the deepest first."""
    found = {""}
    for path in paths:
        steps = path.split(".")
        found.update(".".join(steps[:end]) for end in range(1, len(steps)))
    return sorted(found, key=lambda path: -path.count(".") - bool(path))


def _rule_for_holder(
    skeleton: nn.Module, path: str, units: Mapping[str, nn.Module], raw: Mapping[str, nn.Parameter]
) -> None:
    """The rule of a module whose parameters, or whose children's, it names itself."""
    holder = copy.copy(skeleton.get_submodule(path))
    start = f"{path}." if path else ""
    holder.__dict__["_parameters"] = {
        name: raw.get(start + name, parameter) for name, parameter in holder._parameters.items()
    }
    holder.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in holder._buffers.items()}
    holder.__dict__["_modules"] = {name: units.get(start + name, child) for name, child in holder._modules.items()}
    ruling = ruling_model(skeleton, path)
    if ruling is not None:
        ruling._init_weights(holder)


def _values(units: Mapping[str, nn.Module], raw: Mapping[str, nn.Parameter]) -> list[tuple[str, Tensor]]:
    inside = [
        (f"{path}.{name}", value)
        for path, unit in units.items()
        for name, value in (*unit.named_parameters(), *unit.named_buffers())
    ]
    return [*inside, *raw.items()]


def buffers_filled(skeleton: nn.Module) -> None:
    """Gives every buffer of a model without storage its value: masks and angles are made from them."""
    with torch.no_grad(), _OnlyReal():
        for path, module in list(skeleton.named_modules()):
            own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
            if not own:
                continue
            for name, buffer in own.items():
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
            ruling = ruling_model(skeleton, path)
            if ruling is not None:
                ruling._init_weights(module)
