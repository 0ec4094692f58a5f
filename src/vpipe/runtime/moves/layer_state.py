"""The state of a layer: all that training has made of it, as tensors by path, for checkpoints, copies and moves.

    param/<name>   buffer/<name>   optimizer/<name of the parameter>/<path>   generator/<path>

A checkpoint and a copy in memory hold these tensors (``state_paths`` has what an optimizer keeps). A layer that moves
takes along what a resumed run makes anew, too: buffers that no checkpoint keeps, gradients that wait for an update,
train or eval mode, what is frozen, extra states, the settings of groups. It travels as one block of bytes, a message of
``transport.wire``: it describes itself, runs no code when read, and keeps strides, because kernels add in another order
where strides differ. What cannot travel (a hook is code of one process) is refused.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime import crossing
from vpipe.runtime.buffers import named_generators, set_state
from vpipe.runtime.buffers import state_of as generator_state
from vpipe.runtime.device import is_host
from vpipe.runtime.moves.state_paths import HOSTED, flatten, unflatten
from vpipe.runtime.transport.wire import Envelope, pack, unpack, unpack_head

_BLOCK = Envelope(-2, 0, 0, 0, 0)
LayerState = dict[str, Any]
GENERATOR = "generator/"
_PAGE = 4096
"""What a state of numbers is filled up to, so that its tensor has the same size after every update."""


def tensors_of(module: nn.Module, optimizer: Any, *, complete: bool = False) -> dict[str, Tensor]:
    """The live tensors of a layer by path; a ``complete`` list has buffers that can be computed again, too."""
    buffers = dict(module.named_buffers())
    kept = buffers if complete or not buffers else module.state_dict()
    tensors = {f"param/{name}": p.detach() for name, p in module.named_parameters()}
    tensors |= {f"buffer/{name}": b.detach() for name, b in buffers.items() if name in kept}
    states = getattr(optimizer, "state", {})
    for name, parameter in module.named_parameters():
        for path, tensor in flatten(states.get(parameter, {}), type(optimizer).__name__).items():
            stays = is_host(tensor.device) > is_host(parameter.device) and path != "step" and ":" not in path
            tensors[f"optimizer/{name}/{path}{HOSTED if stays else ''}"] = tensor.detach()
    for path, generator in named_generators(module).items():
        if not isinstance(generator, random.SystemRandom):  # it has no state
            tensors[GENERATOR + path] = _written(generator_state(generator))
    return tensors


def _written(state: Any) -> Tensor:
    if isinstance(state, Tensor):
        return state
    text = json.dumps(state, default=lambda array: array.tolist()).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _PAGE) * _PAGE)), dtype=torch.uint8)


def _set_generators(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a layer's own generators go on where they stood."""
    for path, generator in named_generators(module).items():
        told, where = tensors.get(GENERATOR + path), f"the generator {path.strip('.')!r} of {type(module).__name__}"
        try:
            if told is None and not isinstance(generator, random.SystemRandom):
                warnings.warn(f"no state of {where} was kept: it begins anew", stacklevel=2)
            elif told is not None:
                is_torch = isinstance(generator, torch.Generator)
                set_state(generator, told.cpu().clone() if is_torch else json.loads(bytes(told.tolist())))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise UserError(
                f"what was kept of {where} is not the state of a {type(generator).__name__} ({error}); give the layer "
                "the kind of generator that it had"
            ) from error


def load_into(module: nn.Module, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy into a layer its weights, buffers, and optimizer state unless there is no optimizer to take it."""
    places: dict[str, Tensor] = {f"param/{name}": p for name, p in module.named_parameters()}
    places |= {f"buffer/{name}": b for name, b in module.named_buffers()}
    kept = {key: tensor.clone() for key, tensor in tensors.items() if key.startswith("optimizer/")}
    with torch.no_grad():
        for key in tensors.keys() - kept.keys():
            if not key.startswith(GENERATOR):
                places[key].copy_(tensors[key])
    _set_generators(module, tensors)
    if hasattr(optimizer, "state"):
        for parameter in module.parameters():
            optimizer.state.pop(parameter, None)  # what was frozen then had none
        load_states(module, optimizer, kept)


def load_states(module: nn.Module, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer what it keeps of each parameter, where it wants it."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        if kind == "optimizer":
            name, path = name.split("/", 1)
            states.setdefault(name, {})[path] = tensor
    parameters = dict(module.named_parameters())
    for name, state in states.items():
        parameter = parameters[name]
        placed = {path: _placed(path, value, parameter, optimizer) for path, value in state.items()}
        optimizer.state[parameter] = unflatten(placed)


def _placed(path: str, value: Tensor, parameter: Tensor, optimizer: Any) -> Tensor:
    """A part of an optimizer's state where the optimizer wants it: with the weights, but a count on the host, unless
    the optimizer counts on the device (torch's own rule in ``load_state_dict``)."""
    groups = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    counts = path == "step" and not any(group.get("fused") or group.get("capturable") for group in groups)
    return value if counts or ":" in path else value.to(parameter.device)


def state_of(module: nn.Module, optimizer: Optimizer | None) -> LayerState:
    """All that moves with a layer: nested dicts of its live tensors, of numbers and of words."""
    named = dict(module.named_parameters())
    groups = {} if optimizer is None else {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        "tensors": tensors_of(module, optimizer, complete=True),
        "training": [part.training for part in module.modules()],
        "frozen": [name for name, p in named.items() if not p.requires_grad],
        "gradients": {name: p.grad.detach() for name, p in named.items() if p.grad is not None},
        "extra": {path: part.get_extra_state() for path, part in _with_extra(module)},
        "groups": {name: _settings(groups[id(p)]) for name, p in named.items() if id(p) in groups},
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: crossing.mapped(value, Tensor.detach) for key, value in group.items() if key != "params"}


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
    structure = crossing.flatten(state, tensors)
    for tensor in tensors:
        crossing.check_tensor(tensor)
    message = pack(_BLOCK, crossing.unflatten(structure, [tensor.cpu() for tensor in tensors]))
    block = torch.empty(message.layout.num_bytes, dtype=torch.uint8)
    message.write(block.data_ptr())
    return block


def unpacked(block: Tensor) -> LayerState:
    """The state in a block, each tensor in memory of its own."""
    state: LayerState = crossing.mapped(
        unpack(block, unpack_head(block, _BLOCK)), lambda tensor: crossing.copied(tensor).detach()
    )
    return state


def put(state: LayerState, module: nn.Module, device: torch.device) -> None:
    """Give a module the state's tensors."""
    for part, training in zip(module.modules(), state["training"], strict=True):
        part.training = training
    frozen = set(state["frozen"])
    for name, parameter in module.named_parameters():
        parameter.data = state["tensors"][f"param/{name}"].to(device)
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(device)
        parameter.requires_grad_(name not in frozen)
    for key, tensor in state["tensors"].items():
        kind, path = key.split("/", 1)
        if kind == "buffer":
            owner, _, slot = path.rpartition(".")
            module.get_submodule(owner)._buffers[slot] = tensor.to(device)
    _set_generators(module, state["tensors"])
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


def put_optimizer(states: Mapping[int, LayerState], modules: Mapping[int, nn.Module], optimizer: Optimizer) -> None:
    """Give a fresh optimizer the states of its layers: what belongs to each parameter, the settings of its group, and
    only the parameters that the layers' optimizers had."""
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
    for layer, state in states.items():
        load_states(modules[layer], optimizer, state["tensors"])


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
