"""Checkpoints: one safetensors file a layer, a manifest with checksums, written in two phases.

    iteration-000150/
      manifest.json            what the run was at, its config, and size and sha256 of every file
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.pipeline import Pipeline
from vpipe.train.gathering import first_text, gather_text

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Standing:
    """Where a run stands: all it takes to go on as if nothing had happened."""

    iteration: int
    epoch: int
    consumed: int
    """What is used up of the epoch, over all replicas: examples, or batches where they go by tokens."""
    num_units: int
    num_updates: int
    loss_scale: float
    good_steps: int
    seed: int
    optimizer: str
    model: str
    """A fingerprint: a checkpoint of another model is refused."""


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are not what its manifest says."""


def save(directory: Path, pipeline: Pipeline, standing: Standing, config: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint; every rank calls this. ``OSError`` where any rank could not write: the old ones are
    untouched."""
    final = directory / f"iteration-{standing.iteration:06d}"
    temporary = directory / f".{final.name}.partial"
    leader = pipeline.engines[0].rank == 0
    problem = first_text(pipeline, _attempt(lambda: _fresh(temporary)) if leader else "")
    files: dict[str, dict[str, Any]] = {}
    if not problem:
        problem = _attempt(lambda: files.update(_write_layers(temporary, pipeline)))
    reports = [json.loads(text) for text in gather_text(pipeline, json.dumps({"problem": problem, "files": files}))]
    problem = next((report["problem"] for report in reports if report["problem"]), "")
    if leader and not problem:
        merged = {name: facts for report in reports for name, facts in sorted(report["files"].items())}
        manifest = {"format": FORMAT, "position": asdict(standing), "files": merged, "config": config}
        problem = _attempt(lambda: _commit(temporary, final, manifest))
    problem = first_text(pipeline, problem)
    if leader:
        shutil.rmtree(temporary, ignore_errors=True)
    if problem:
        raise OSError(problem)
    if leader:
        _prune(directory, keep)
    return final


def _attempt(action: Callable[[], object]) -> str:
    """What went wrong, in words; empty where nothing did. Disks fail as OSError, and inside safetensors as its own."""
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
    except SafetensorError as error:
        return str(error)
    return ""


def _fresh(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _write_layers(directory: Path, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """The layers of which this process holds the first replica."""
    written = {}
    for engine in pipeline.engines:
        for index, stage in engine.stages.items():
            if pipeline.placement.ranks_of[index][0] != engine.rank:
                continue
            for layer, module in stage.modules.items():
                file = directory / layer_file(layer)
                save_file(_tensors(module, engine.updater.optimizers.get(index)), file)
                _sync(file)
                written[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    return written


def layer_file(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def _tensors(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    kept = module.state_dict()  # buffers that can be computed again are not kept
    tensors = {f"param/{name}": p.detach() for name, p in module.named_parameters()}
    tensors |= {f"buffer/{name}": b for name, b in module.named_buffers() if name in kept}
    states = getattr(optimizer, "state", {})
    for name, parameter in module.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return {key: tensor.contiguous().clone() for key, tensor in tensors.items()}


def _commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    path = temporary / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _sync(path)
    if final.exists():  # the same iteration once more, after a resume
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, its manifest read."""

    path: Path
    standing: Standing
    files: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            return cls(path, Standing(**manifest["position"]), dict(manifest["files"]), dict(manifest["config"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(
                f"{path / MANIFEST} cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
            ) from None

    def read(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer; ``DamagedCheckpoint`` where its file is not what the manifest says."""
        name = layer_file(layer)
        file = self.path / name
        if name not in self.files:
            raise DamagedCheckpoint(f"{self.path / MANIFEST} does not list {name}")
        try:
            if file.stat().st_size != self.files[name]["bytes"]:
                raise DamagedCheckpoint(f"{file} is {file.stat().st_size} bytes, not {self.files[name]['bytes']}")
            if _sha256(file) != self.files[name]["sha256"]:
                raise DamagedCheckpoint(f"{file} does not match its checksum")
            found: dict[str, Tensor] = load_file(file)
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{file} cannot be read ({error})") from None
        return found
