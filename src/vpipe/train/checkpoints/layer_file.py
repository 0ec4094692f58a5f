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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vpipe.errors import UserError
from vpipe.rundir.manifest import DamagedCheckpoint, FileFacts

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
WIDE = "complex128"
"""safetensors has no such numbers: they are kept as pairs of F64, and the header's metadata lists their names."""


def name_of(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write a file that is on the disk when this returns."""
    flat = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    wide = [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]
    header: dict[str, Any] = {"__metadata__": {WIDE: json.dumps(wide)}} if wide else {}
    end = 0
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


def _storable(name: str, tensor: Tensor) -> Tensor:
    """On the host, one number behind the other, in a format that safetensors knows."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        kind = str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")
        raise UserError(
            f"{name} is {kind}, which a safetensors file cannot hold; keep it in another format, or train without "
            "checkpoints (checkpoint.interval: -1)"
        )
    return tensor.resolve_conj().resolve_neg().contiguous().cpu()


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
        with safe_open(path, "pt") as opened:
            wide = json.loads((opened.metadata() or {}).get(WIDE, "[]"))
        found |= {name: torch.view_as_complex(found[name]) for name in wide}
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error})") from None
    return found
