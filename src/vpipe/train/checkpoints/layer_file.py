"""One layer of a checkpoint: a safetensors file, written in one pass with its checksum.

safetensors' own writer copies all tensors into one piece of memory and holds the interpreter meanwhile. Beside training
that costs steps, so the format (a length, a JSON header, the bytes) is written here, tensor by tensor; hashing and
writing let other threads run. It is read by safetensors itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vpipe.rundir.manifest import DamagedCheckpoint, FileFacts
from vpipe.train.checkpoints import optimizer_state

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def name_of(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def tensors_of(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What is kept of a layer: the live tensors themselves."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    kept = module.state_dict() if buffers else {}  # buffers that can be computed again are not kept
    tensors = {f"param/{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"buffer/{name}": b.detach() for name, b in buffers.items() if name in kept}
    states = getattr(optimizer, "state", {})
    for name, parameter in parameters.items():
        flat = optimizer_state.flatten(states.get(parameter, {}), type(optimizer).__name__)
        tensors |= {f"optimizer/{name}/{path}": tensor for path, tensor in flat.items()}
    return tensors


def load_into(module: nn.Module, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Weights and buffers of a layer, and its optimizer state unless there is no optimizer to take it."""
    places: dict[str, Tensor] = {f"param/{name}": p for name, p in module.named_parameters()}
    places |= {f"buffer/{name}": b for name, b in module.named_buffers()}
    parameters = dict(module.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            if kind == "optimizer":
                name, path = name.split("/", 1)
                states.setdefault(name, {})[path] = tensor
            else:
                places[key].copy_(tensor)
    for name, state in states.items() if hasattr(optimizer, "state") else ():
        parameter = parameters[name]
        placed = {path: _placed(path, value, parameter, optimizer) for path, value in state.items()}
        optimizer.state[parameter] = optimizer_state.unflatten(placed)


def _placed(path: str, value: Tensor, parameter: Tensor, optimizer: Any) -> Tensor:
    """A part of an optimizer's state where the optimizer wants it: with the weights, but a count on the host, unless
    the optimizer counts on the device (torch's own rule in ``load_state_dict``)."""
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    counts = path == "step" and not (group.get("fused") or group.get("capturable"))
    return value if counts or ":" in path else value.to(parameter.device)


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write a file that is on the disk when this returns."""
    flat = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    header, end = {}, 0
    for name, tensor in flat.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little") + head, *map(_bytes, flat.values())]
        for part in parts:
            digest.update(part)
            size += _write(handle, part, path)
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileFacts(size, digest.hexdigest())


def _write(handle: int, data: bytes | memoryview, path: Path) -> int:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except OSError as error:
        error.filename = str(path)
        raise
    return len(data)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read(path: Path, facts: FileFacts) -> dict[str, Tensor]:
    """The tensors of a file; ``DamagedCheckpoint`` where it is not what the manifest says."""
    try:
        size = path.stat().st_size
        if size != facts.bytes:
            raise DamagedCheckpoint(f"{path} is {size} bytes, not {facts.bytes}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
                raise DamagedCheckpoint(f"{path} does not match its checksum")
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error})") from None
    return found
