"""One layer of a checkpoint: a safetensors file, written in one pass with its checksum.

safetensors' own writer copies all tensors into one piece of memory and holds the interpreter meanwhile. Beside training
that costs steps, so the format (a length, a JSON header, the bytes) is written here, tensor by tensor; hashing and
writing let other threads run. It is read by safetensors itself.

What an optimizer remembers of a parameter stands beside it, of any shape. torch's own optimizers keep tensors by name,
and so they stand in the file: ``exp_avg``. One of another package may keep numbers, words, lists and dicts of them; the
path says what was where, and the end what was no tensor:

    {"exp_avg": tensor, "seen": 3, "past": [tensor, {"rank": "high"}]}
        ↔ exp_avg   seen:int   past/[0]   past/[1]/rank:str
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.rundir.manifest import DamagedCheckpoint, FileFacts

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
        flat = flatten(states.get(parameter, {}), type(optimizer).__name__)
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
        optimizer.state[parameter] = unflatten(placed)


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


_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_EMPTY: dict[str, Callable[[], Any]] = {"none": lambda: None, "dict": dict, "list": list, "tuple": tuple}


@lru_cache(maxsize=4096)
def _quoted(key: str) -> str:
    """A few names, asked for with every parameter while a step waits."""
    return quote(key, safe="")


def flatten(state: Mapping[Any, Any], who: str) -> dict[str, Tensor]:
    """The state as tensors; ``who`` names the optimizer where it holds what no file can."""
    return dict(leaf for key, value in state.items() for leaf in _leaves(_part(key, who), value, who))


def _part(key: object, who: str) -> str:
    if isinstance(key, str):
        return _quoted(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return f"<{key}>"
    raise UserError(
        f"{who} keeps its state under {key!r}, a {type(key).__name__}; a checkpoint holds names and whole numbers: "
        "use one of them as the key, or train without checkpoints (checkpoint.interval: -1)"
    )


def _leaves(path: str, value: Any, who: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif value is None or (isinstance(value, dict | list | tuple) and not value):
        yield f"{path}:{'none' if value is None else type(value).__name__}", torch.empty(0, dtype=torch.uint8)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}/{_part(key, who)}", each, who)
    elif type(value) in (list, tuple):
        mark = "[{}]" if isinstance(value, list) else "({})"
        for index, each in enumerate(value):
            yield from _leaves(f"{path}/{mark.format(index)}", each, who)
    elif isinstance(value, str):
        yield f"{path}:str", torch.frombuffer(bytearray(value.encode() + b"\0"), dtype=torch.uint8)
    elif type(value).__name__ in _NUMBERS:
        yield f"{path}:{type(value).__name__}", torch.tensor(value, dtype=_NUMBERS[type(value).__name__])
    else:
        raise UserError(
            f"{who} keeps a {type(value).__name__} in its state ({unquote(path)}), which a checkpoint cannot hold; "
            "keep tensors, numbers, words, lists and dicts, or train without checkpoints (checkpoint.interval: -1)"
        )


def unflatten(found: Mapping[str, Tensor]) -> dict[Any, Any]:
    """The state that ``flatten`` has flattened; a tensor is a copy."""
    tree: dict[str, Any] = {}
    for path, tensor in found.items():
        *outer, last = path.split("/")
        name, colon, kind = last.partition(":")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[name] = _Leaf(kind if colon else "", tensor)
    return {_key(part): _value(inner) for part, inner in tree.items()}


class _Leaf:
    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.kind, self.tensor = kind, tensor

    def value(self) -> Any:
        if self.kind in _EMPTY:
            return _EMPTY[self.kind]()
        if self.kind == "str":
            return bytes(self.tensor.tolist())[:-1].decode()
        return self.tensor.item() if self.kind else self.tensor.clone()


def _key(part: str) -> str | int:
    return int(part[1:-1]) if part.startswith("<") else unquote(part)


def _value(inner: Any) -> Any:
    if isinstance(inner, _Leaf):
        return inner.value()
    first = next(iter(inner))
    if first[0] in "[(":
        ordered = [_value(inner[part]) for part in sorted(inner, key=lambda part: int(part[1:-1]))]
        return ordered if first[0] == "[" else tuple(ordered)
    return {_key(part): _value(each) for part, each in inner.items()}
