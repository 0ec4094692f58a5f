"""A layer as it travels: all that training has made of it, as one block of bytes.

    weights, buffers (also those that no checkpoint keeps), gradients that wait for an update, train or eval mode, what
    is frozen; and per parameter its optimizer state, whatever its shape, and the settings of its group

The block is a message of ``transport.wire``: it describes itself, runs no code when read, and keeps strides, because
kernels add in another order where strides differ. What cannot travel (a hook is code of one process) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime.crossing import check_tensor, copied, flatten, unflatten
from vpipe.runtime.device import is_host
from vpipe.runtime.transport.wire import Envelope, pack, unpack, unpack_head

_BLOCK = Envelope(-2, 0, 0, 0, 0)
LayerState = dict[str, Any]


def state_of(module: nn.Module, optimizer: Optimizer | None) -> LayerState:
    """The state of a layer: nested dicts of its live tensors, of numbers and of words."""
    named = dict(module.named_parameters())
    groups = {} if optimizer is None else {id(p): group for group in optimizer.param_groups for p in group["params"]}
    states: Mapping[Any, Any] = getattr(optimizer, "state", {})
    return {
        "training": [part.training for part in module.modules()],
        "parameters": {name: p.detach() for name, p in named.items()},
        "frozen": [name for name, p in named.items() if not p.requires_grad],
        "gradients": {name: p.grad.detach() for name, p in named.items() if p.grad is not None},
        "buffers": {name: b.detach() for name, b in module.named_buffers()},
        "extra": {path: part.get_extra_state() for path, part in _with_extra(module)},
        "optimizer": {name: _detached(states[p]) for name, p in named.items() if p in states},
        "hosted": {name: _hosted(states[p]) for name, p in named.items() if p in states},
        "groups": {name: _settings(groups[id(p)]) for name, p in named.items() if id(p) in groups},
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _detached(value) for key, value in group.items() if key != "params"}


def _detached(value: Any) -> Any:
    tensors: list[Tensor] = []
    structure = flatten(dict(value) if isinstance(value, Mapping) else value, tensors)
    return unflatten(structure, iter([tensor.detach() for tensor in tensors]).__next__)


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield path, part


def refuse_hooks(layer: int, module: nn.Module) -> None:
    """A layer that leaves its process cannot take hooks along."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [type(part).__name__ for part in module.modules() if any(getattr(part, name) for name in hooks)]
    found += [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if found:
        raise UserError(
            f"layer {layer} has a hook ({found[0]}), which is code of this process and cannot move to another; "
            "remove it before the move and register it where the layer is then"
        )


def packed(state: LayerState) -> Tensor:
    """A block of bytes of the host with copies of all tensors."""
    tensors: list[Tensor] = []
    structure = flatten(state, tensors)
    for tensor in tensors:
        check_tensor(tensor)
    message = pack(_BLOCK, unflatten(structure, iter([tensor.cpu() for tensor in tensors]).__next__))
    block = torch.empty(message.layout.num_bytes, dtype=torch.uint8)
    message.write(block, capacity=message.layout.num_bytes)
    return block


def unpacked(block: Tensor) -> LayerState:
    """The state in a block, each tensor in memory of its own."""
    tensors: list[Tensor] = []
    structure = flatten(unpack(block, unpack_head(block, _BLOCK)), tensors)
    state: LayerState = unflatten(structure, iter([copied(tensor).detach() for tensor in tensors]).__next__)
    return state


def put(state: LayerState, module: nn.Module, device: torch.device) -> None:
    """Give a module the state's tensors."""
    for part, training in zip(module.modules(), state["training"], strict=True):
        part.training = training
    frozen = set(state["frozen"])
    for name, parameter in module.named_parameters():
        parameter.data = state["parameters"][name].to(device)
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(device)
        parameter.requires_grad_(name not in frozen)
    for path, buffer in state["buffers"].items():
        owner, _, slot = path.rpartition(".")
        module.get_submodule(owner)._buffers[slot] = buffer.to(device)
    for path, extra in state["extra"].items():
        module.get_submodule(path).set_extra_state(extra)


def empty(module: nn.Module, optimizer: Optimizer | None) -> None:
    """Free the memory of a layer that has left, as long as its block can fill it again."""
    with torch.no_grad():
        for parameter in module.parameters():
            if optimizer is not None:
                optimizer.state.pop(parameter, None)
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        for part in module.modules():
            for slot, buffer in part._buffers.items():
                part._buffers[slot] = None if buffer is None else buffer.new_empty(0)


def put_states(states: Mapping[int, LayerState], modules: Mapping[int, nn.Module], optimizer: Optimizer) -> None:
    """What an optimizer keeps of each parameter."""
    for layer, state in states.items():
        for name, parameter in modules[layer].named_parameters():
            if name in state["optimizer"]:
                found, hosted = state["optimizer"][name], state["hosted"][name]
                optimizer.state[parameter] = _beside(found, hosted, parameter)


def put_optimizer(states: Mapping[int, LayerState], modules: Mapping[int, nn.Module], optimizer: Optimizer) -> None:
    """Give a fresh optimizer the states of its layers: what belongs to each parameter, the settings of its group, and
    only the parameters that the layers' optimizers had."""
    put_states(states, modules, optimizer)
    wanted: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}
    for layer, state in states.items():
        for name, parameter in modules[layer].named_parameters():
            if name in state["groups"]:
                wanted[id(parameter)] = (parameter, state["groups"][name])
    own = {id(p) for module in modules.values() for p in module.parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted or id(parameter) not in own:
                _join(groups, group, parameter, wanted.pop(id(parameter), (parameter, {}))[1])
    first = optimizer.param_groups[0]
    for parameter, settings in wanted.values():
        _join(groups, first, parameter, settings)
    optimizer.param_groups[:] = groups or [{**first, "params": []}]


def _join(groups: list[dict[str, Any]], like: Mapping[str, Any], parameter: Tensor, settings: dict[str, Any]) -> None:
    """Put a parameter into the group that has its settings."""
    wanted = {**like, **settings}
    for group in groups:
        if group.keys() == wanted.keys() and all(_same(group[k], wanted[k]) for k in wanted if k != "params"):
            group["params"].append(parameter)
            return
    groups.append({**wanted, "params": [parameter]})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _hosted(value: Any) -> list[bool]:
    """Which tensors of an optimizer state are on the host; a step counter may be, beside weights that are not."""
    tensors: list[Tensor] = []
    flatten(dict(value), tensors)
    return [is_host(tensor.device) for tensor in tensors]


def _beside(value: Any, hosted: Sequence[bool], parameter: Tensor) -> Any:
    """An optimizer state where its parameter is now."""
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    moved = [t if stays else t.to(parameter.device) for t, stays in zip(tensors, hosted, strict=True)]
    return unflatten(structure, iter(moved).__next__)
