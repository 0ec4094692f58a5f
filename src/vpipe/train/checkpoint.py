"""Checkpoints: one safetensors file a layer, a manifest with checksums, written in two phases.

    iteration-000150/
      manifest.json            what the run was at, and size and sha256 of every file
      layer-0000.safetensors   param/<name>, buffer/<name>, optimizer/<name>/<key>
      …

Files are keyed by layer, not by rank, so a checkpoint of four stages is read by one, two or three, by another schedule,
by other replicas. All ranks write into a temporary directory; when every file is on disk, rank 0 writes the manifest
and renames the directory. A crash at any moment leaves the previous checkpoint whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.pipeline import Pipeline

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Where a run stands: all it takes to go on as if nothing had happened."""

    iteration: int
    epoch: int
    batch: int
    num_units: int
    num_updates: int
    loss_scale: float
    good_steps: int
    seed: int
    model: str
    """A fingerprint: a checkpoint of another model is refused."""


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are not what its manifest says."""


def save(directory: Path, pipeline: Pipeline, position: Position, *, keep: int) -> Path | None:
    """Write a checkpoint; every rank calls this. ``None`` where a rank could not write: the old checkpoints are
    untouched."""
    final = directory / f"iteration-{position.iteration:06d}"
    temporary = directory / f".{final.name}.partial"
    leader = pipeline.engines[0].rank == 0
    problem = ""
    if leader:
        problem = _attempt(lambda: _fresh(temporary))
    problem = _first_problem(pipeline, problem)
    files: dict[str, dict[str, Any]] = {}
    if not problem:
        problem = _attempt(lambda: files.update(_write_layers(temporary, pipeline)))
    everyone = _gather_text(pipeline, json.dumps({"problem": problem, "files": files}))
    reports = [json.loads(text) for text in everyone]
    problem = next((report["problem"] for report in reports if report["problem"]), "")
    if leader and not problem:
        merged = {name: facts for report in reports for name, facts in report["files"].items()}
        problem = _attempt(lambda: _commit(temporary, final, position, merged))
    problem = _first_problem(pipeline, problem)
    if problem:
        if leader:
            shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(problem)
    if leader:
        _prune(directory, keep)
    return final


def _attempt(action: Any) -> str:
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
    except Exception as error:  # safetensors raises its own type for a full disk
        return f"{type(error).__name__}: {error}"
    return ""


def _fresh(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _first_problem(pipeline: Pipeline, problem: str) -> str:
    return next((text for text in _gather_text(pipeline, problem) if text), "")


def _gather_text(pipeline: Pipeline, text: str) -> list[str]:
    """Every process's text; the ranks of one process share one."""
    if len(pipeline.engines) > 1 or pipeline.placement.num_ranks == 1:
        return [text]
    transport = pipeline.engines[0].transport
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    blocks = transport.all_gather(mine, range(transport.num_ranks))
    return [bytes(block.tolist()).decode().strip() for block in blocks]


def _write_layers(directory: Path, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """The layers of which this process holds the first replica."""
    written = {}
    for engine in pipeline.engines:
        for index, stage in engine.stages.items():
            if pipeline.placement.ranks_of[index][0] != engine.rank:
                continue
            optimizer = engine.updater.optimizers[index]
            for layer, module in stage.modules.items():
                tensors = {f"param/{name}": p.detach() for name, p in module.named_parameters()}
                tensors |= {f"buffer/{name}": b for name, b in module.named_buffers()}
                for name, parameter in module.named_parameters():
                    state = optimizer.state.get(parameter, {}) if hasattr(optimizer, "state") else {}
                    for key, value in state.items():
                        tensors[f"optimizer/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
                file = directory / f"layer-{layer:04d}.safetensors"
                save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, file)
                _sync(file)
                written[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    return written


def _commit(temporary: Path, final: Path, position: Position, files: Mapping[str, Any]) -> None:
    manifest = {"format": FORMAT, "position": asdict(position), "files": dict(sorted(files.items()))}
    path = temporary / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prune(directory: Path, keep: int) -> None:
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(directory: Path) -> list[Path]:
    """The finished checkpoints of a directory, oldest first."""
    return sorted(path for path in directory.glob("iteration-*") if (path / MANIFEST).is_file())


def find(where: Path) -> list[Path]:
    """The checkpoints to try, newest first: of a checkpoint, a directory of them, or a run."""
    if (where / MANIFEST).is_file():
        rest = [path for path in checkpoints(where.parent) if path < where]
        return [where, *reversed(rest)]
    for directory in (where, where / "checkpoints"):
        if found := checkpoints(directory):
            return found[::-1]
    raise UserError(
        f"{where} holds no checkpoint; give a directory with {MANIFEST}, or a run directory with checkpoints/ in it"
    )


def read_position(path: Path, model: str) -> Position:
    """The manifest of a checkpoint, and whether it is of this model."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        position = Position(**manifest["position"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} cannot be read ({error})") from None
    if position.model != model:
        raise UserError(
            f"{path} is a checkpoint of another model ({position.model}), not of {model}; resume with its own config"
        )
    return position


def check_files(path: Path, names: Sequence[str] | None = None) -> None:
    """Whether files are what the manifest says; ``DamagedCheckpoint`` names the first that is not."""
    files = json.loads((path / MANIFEST).read_text())["files"]
    for name in names if names is not None else files:
        file = path / Path(name).name
        if name not in files:
            raise DamagedCheckpoint(f"{path / MANIFEST} does not list {name}")
        if not file.is_file() or file.stat().st_size != files[name]["bytes"]:
            raise DamagedCheckpoint(f"{file} is missing or has the wrong size")
        if _sha256(file) != files[name]["sha256"]:
            raise DamagedCheckpoint(f"{file} does not match its checksum")


def restore(path: Path, pipeline: Pipeline) -> None:
    """Load weights, buffers and optimizer state of the layers that this process holds."""
    for engine in pipeline.engines:
        for index, stage in engine.stages.items():
            optimizer = engine.updater.optimizers[index]
            for layer, module in stage.modules.items():
                _load_layer(load_file(path / f"layer-{layer:04d}.safetensors"), module, optimizer)


def _load_layer(tensors: Mapping[str, Tensor], module: Any, optimizer: Any) -> None:
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    states: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            if kind == "param":
                parameters[name].copy_(tensor)
            elif kind == "buffer":
                buffers[name].copy_(tensor)
            else:
                name, part = name.rsplit("/", 1)
                states.setdefault(name, {})[part] = tensor.clone()
    for name, state in states.items():
        optimizer.state[parameters[name]] = state
