"""Weights that are one although several layers hold them: declared, checked, and started equal.

Each layer keeps a parameter of its own, because its stage may live on another rank; ``update`` sums their gradients, so
they stay equal. A model whose layers hold the very same parameter may say so with ``TiedWeight``; without that, stages
would drift apart in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, nearest
from vpipe.layer import Layer, TiedWeight
from vpipe.runtime.engine import Engine
from vpipe.runtime.programs import ScheduleSpec
from vpipe.runtime.weights import check_sharing
from vpipe.runtime.wire import Envelope
from vpipe.schedule.placement import Placement


def check_tied(tied: Sequence[TiedWeight], layers: Sequence[Layer], spec: ScheduleSpec) -> None:
    """Everything that can be known before a layer is built."""
    for tie in tied:
        for layer, name in tie.owners:
            if not 0 <= layer < len(layers):
                raise UserError(
                    f"the tied weight {name!r} is said to be in layer {layer}, but layers are 0..{len(layers) - 1}"
                )
    if tied and not spec.synchronous:
        raise UserError(
            f"tied weights need a synchronous schedule: {spec.describe()} updates stages at different times; "
            f"use 1f1b, or untie them"
        )
    built = {index: layer.module for index, layer in enumerate(layers) if isinstance(layer.module, nn.Module)}
    check_owners(built, tied)
    _separate(built, tied)
    refuse_sharing(built)


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


def refuse_sharing(modules: Mapping[int, nn.Module]) -> None:
    """Layers that hold one parameter without having said so."""
    for first, second in check_sharing(modules):
        raise UserError(
            f"layers share one parameter ({first} and {second}); declare "
            f"tied=[TiedWeight((({_owner(first)}), ({_owner(second)})))], "
            "so that their gradients are summed across stages"
        )


def _owner(name: str) -> str:
    layer, parameter = name.split(".", 1)
    return f'{layer}, "{parameter}"'


def _dotted(owner: tuple[int, str]) -> str:
    return f"{owner[0]}.{owner[1]}"


def _form(parameter: Tensor) -> str:
    return f"{tuple(parameter.shape)} of {str(parameter.dtype).removeprefix('torch.')}"


def share_tied(engine: Engine, placement: Placement, tie: TiedWeight, number: int, step: int) -> None:
    """The first owner of a tied weight gives it to the others."""
    homes = defaultdict(list)
    for layer, name in tie.owners:
        for rank in placement.ranks_of[engine.flow.stage_of(("", layer))]:
            homes[rank].append(f"{layer}.{name}")
    first = placement.ranks_of[engine.flow.stage_of(("", tie.owners[0][0]))][0]
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
