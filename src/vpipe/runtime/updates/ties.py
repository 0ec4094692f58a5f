"""Weights that are one although several layers hold them: declared or found, checked, and started equal.

Each layer keeps a parameter of its own, because its stage may live on another rank; ``update`` sums their gradients, so
they stay equal. Layers that hold the very same parameter, or that are one module at two places, are tied without a
word; only what factories build must be declared, because no rank sees all of it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, nearest
from vpipe.layer import Layer, TiedWeight
from vpipe.runtime.engine import Engine
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.catalog import ScheduleSpec

Owner = tuple[int, str]


def tie_layers(
    tied: Sequence[TiedWeight], layers: Sequence[Layer], loss: object, spec: ScheduleSpec
) -> tuple[list[Layer], list[TiedWeight]]:
    """The layers, each with parameters of its own, and all their ties; what can be known before a layer is built."""
    for tie in tied:
        for layer, name in tie.owners:
            if not 0 <= layer < len(layers):
                raise UserError(
                    f"the tied weight {name!r} is said to be in layer {layer}, but layers are 0..{len(layers) - 1}"
                )
    built = {index: layer.module for index, layer in enumerate(layers) if isinstance(layer.module, nn.Module)}
    if isinstance(loss, nn.Module):
        built[len(layers)] = loss
    check_owners(built, tied)
    ties = with_shared(built, tied)
    if ties and not spec.synchronous:
        (first, name), (second, other) = ties[0].owners[:2]
        raise UserError(
            f"tied weights need a synchronous schedule ({first}.{name} and {second}.{other} are one): "
            f"{spec.describe()} updates stages at different times; use 1f1b, or untie them"
        )
    own = own_modules(built)
    _separate(own, ties)
    found = [replace(layer, module=own[index]) if index in own else layer for index, layer in enumerate(layers)]
    return found, ties


def with_shared(modules: Mapping[int, nn.Module], tied: Sequence[TiedWeight]) -> list[TiedWeight]:
    """The declared ties, grown and joined by those of parameters that several layers hold."""
    groups: dict[int, list[Owner]] = defaultdict(list)
    for layer, module in modules.items():
        for name, parameter in module.named_parameters():
            groups[id(parameter)].append((layer, name))
    found = [list(tie.owners) for tie in tied]
    for owners in groups.values():
        if len(owners) < 2:
            continue
        mine = next((tie for tie in found if any(owner in tie for owner in owners)), None)
        if mine is None:
            found.append(owners)
        else:
            mine += [owner for owner in owners if owner not in mine]
    return [TiedWeight(tuple(owners)) for owners in found]


def own_modules(modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """The modules, none of whose parts with parameters is a part of another: the later gets a copy."""
    seen: dict[nn.Module, int] = {}
    found: dict[int, nn.Module] = {}
    for layer, module in modules.items():
        if module in seen and any(True for _ in module.parameters()):
            module = _copied(module, seen[module], layer)
        for path, part in list(module.named_modules()):
            if path and seen.get(part, layer) != layer and any(True for _ in part.parameters()):
                parent, _, slot = path.rpartition(".")
                setattr(module.get_submodule(parent), slot, _copied(part, seen[part], layer))
        seen.update({part: layer for part in module.modules() if part not in seen})
        found[layer] = module
    return found


def _copied(part: nn.Module, first: int, second: int) -> nn.Module:
    if names := [name for name, _ in part.named_buffers()]:
        raise UserError(
            f"layers {first} and {second} hold one module ({type(part).__name__}), whose buffer {names[0]!r} cannot be "
            "one on two stages; give each layer a module of its own and share the parameters (second.weight = "
            "first.weight)"
        )
    return copy.deepcopy(part)


def check_owners(modules: Mapping[int, nn.Module], tied: Sequence[TiedWeight]) -> None:
    """Owners that are built have the parameters, of one shape and dtype."""
    for tie in tied:
        found: dict[tuple[int, str], Tensor] = {}
        for layer, name in tie.owners:
            if layer not in modules:
                continue
            known = dict(modules[layer].named_parameters())
            if name not in known:
                kind = type(modules[layer]).__name__
                raise UserError(
                    f"layer {layer} ({kind}) has no parameter {name!r} to tie{nearest(name, known)}; "
                    f"it has {', '.join(known) or 'none'}"
                )
            found[layer, name] = known[name]
        (first, *others) = found.items() if found else [((0, ""), torch.empty(0))]
        for owner, parameter in others:
            if parameter.shape != first[1].shape or parameter.dtype != first[1].dtype:
                raise UserError(
                    f"tied weights need equal shapes: {_dotted(first[0])} is {_form(first[1])}, "
                    f"but {_dotted(owner)} is {_form(parameter)}; tie weights of one shape and dtype"
                )


def _separate(modules: Mapping[int, nn.Module], tied: Sequence[TiedWeight]) -> None:
    """Give every owner but the first a parameter of its own where they hold the same one."""
    for tie in tied:
        seen: set[int] = set()
        for layer, name in tie.owners:
            if layer in modules:
                parameter = modules[layer].get_parameter(name)
                if id(parameter) in seen:
                    path, _, slot = name.rpartition(".")
                    own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    setattr(modules[layer].get_submodule(path), slot, own)
                seen.add(id(parameter))


def _dotted(owner: tuple[int, str]) -> str:
    return f"{owner[0]}.{owner[1]}"


def _form(parameter: Tensor) -> str:
    return f"{tuple(parameter.shape)} of {str(parameter.dtype).removeprefix('torch.')}"


def share_tied(engine: Engine, tie: TiedWeight, number: int, step: int) -> None:
    """The first owner of a tied weight gives it to the others."""
    homes, layout = defaultdict(list), engine.flow.layout
    for layer, name in tie.owners:
        for rank in layout.ranks_of(layer):
            homes[rank].append(f"{layer}.{name}")
    first = layout.leader(layout.stage_of(tie.owners[0][0]))
    parameters: dict[str, Tensor] = {}
    for stage in engine.stages.values():
        parameters |= stage.weights.parameters
    if engine.rank == first:
        value = parameters[_dotted(tie.owners[0])].detach()
        for rank in homes:
            if rank != first:
                engine.transport.send(Envelope(step, 0, rank, number, 1), rank, value)
    elif engine.rank in homes:
        envelope = Envelope(step, 0, engine.rank, number, 1)
        engine.transport.post(envelope, first)
        value = engine.transport.take(envelope)
    if engine.rank in homes:
        with torch.no_grad():
            for name in homes[engine.rank]:
                if parameters[name].shape != value.shape:
                    raise UserError(
                        f"tied weights need equal shapes: {_dotted(tie.owners[0])} is {_form(value)}, "
                        f"but {name} is {_form(parameters[name])}; tie weights of one shape and dtype"
                    )
                parameters[name].copy_(value)
