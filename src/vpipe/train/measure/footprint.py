"""What layers hold of a unit, by shapes alone: for a planner that is asked while the run goes on.

A profile (``vpipe profile``) measures times and bytes before a run. A run that adapts itself has measured times; bytes
follow from shapes: every layer is run once on the meta device, where nothing is computed and nothing allocated. What a
kernel needs for a moment is not among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.errors import UserError
from vpipe.models.model import Model, Skeleton
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.profile import SavedBytes, crossing, num_bytes
from vpipe.plan.units import parse_bytes
from vpipe.runtime.crossing import detached, mapped
from vpipe.runtime.device import own_memory
from vpipe.runtime.flow import Value, resolve
from vpipe.schedule.placement import Layout
from vpipe.train.adapt import Cap
from vpipe.train.measure.profile import first_unit
from vpipe.train.session import Session


def footprint(model: Model, skeleton: Skeleton, inputs: Any) -> Profile | None:
    """The bytes of all layers for a unit of these inputs, without times; ``None`` where shapes do not tell."""
    flow = resolve(model.layers, Layout.chain([1] * len(model.layers)))
    values: dict[Value, Any] = flow.bound(tree_map(_on_meta, inputs))
    input_bytes = sum(map(num_bytes, values.values()))
    costs = []
    for index, (layer, module) in enumerate(zip(model.layers, skeleton.modules, strict=True)):
        saved = SavedBytes(module)
        # A copy, since a layer may change in place what it reads, which autograd forbids of a leaf.
        read = [mapped(detached(values[value]), torch.clone) for value in flow.reads[index]]
        try:
            with torch.device("meta"), torch.enable_grad(), saved.watching():
                output = module(*read)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None  # its code asks for numbers
        written = [output] if len(layer.writes) == 1 else output
        values |= {(name, index): each for name, each in zip(layer.writes, written, strict=True)}
        costs.append(
            LayerCost(
                skeleton.layer_names[index],
                *(0.0, 0.0, 0.0),
                saved_bytes=saved.total,
                boundary_bytes=crossing(flow, index, values),
                parameter_bytes=skeleton.weight_bytes[index],
            )
        )
    return Profile(tuple(costs), input_bytes=input_bytes)


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def memory_cap(session: Session) -> Cap | None:
    """What the ranks of a run that adapts itself may hold: as the config says, or what their devices have."""
    given = session.config.parallel.memory
    most = parse_bytes(given) if given is not None else own_memory(session.pipeline.devices[0])
    if most is None:
        return None
    sizes = footprint(session.model, session.skeleton, first_unit(session.config, session.data).batches[0].inputs)
    if sizes is None and given is not None:
        raise UserError(
            f"parallel.memory is {given}, but what the layers of {session.config.model.name} hold does not follow from "
            "shapes alone; remove parallel.memory, or plan with 'vpipe profile' and 'vpipe plan --memory'"
        )
    return None if sizes is None else Cap(most, sizes)
