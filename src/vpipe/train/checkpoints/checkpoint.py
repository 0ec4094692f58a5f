"""Reading checkpoints: files are keyed by layer, not by rank, so a checkpoint of four stages is read by one, two or
three, by another schedule, by other replicas. Nothing is ever unpickled. ``writer`` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vpipe.rundir.manifest import MANIFEST, CheckpointManifest, DamagedCheckpoint
from vpipe.train.checkpoints import layer_file


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, its manifest read and checked."""

    path: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        return cls(path, CheckpointManifest.read(path))

    def read(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer; ``DamagedCheckpoint`` where its file is not what the manifest says."""
        name = layer_file.name_of(layer)
        if name not in self.manifest.files:
            raise DamagedCheckpoint(f"{self.path / MANIFEST} does not list {name}")
        return layer_file.read(self.path / name, self.manifest.files[name])
