"""From a checkpoint to plain weights: what Hugging Face's library and ``model.directory`` read."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.models.model import Skeleton
from vpipe.models.split_head import whole_head
from vpipe.rundir import manifest
from vpipe.rundir.layout import TOKENIZER
from vpipe.rundir.manifest import DamagedCheckpoint
from vpipe.runtime.updates.averages import AVERAGE
from vpipe.train.checkpoints.checkpoint import Checkpoint
from vpipe.train.session import load_model

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: Path
    num_tensors: int
    names: str
    """Whose names the tensors carry: Hugging Face's, or ``<layer>.<name>``."""
    notes: tuple[str, ...] = ()


def export(where: Path, out: Path, *, trained: bool = False) -> Exported:
    """The weights of the newest whole checkpoint of ``where``, as ``out/model.safetensors`` with a config beside it:
    their averages where it holds them, unless those that were ``trained`` are wanted."""
    if not where.exists():
        raise UserError(f"there is nothing at {where}; give a run directory or a checkpoint")
    notes = []
    for path in manifest.find(where):
        try:
            found = Checkpoint.open(path)
            tensors = _tensors(found, trained)
        except DamagedCheckpoint as error:
            notes.append(f"{error}; trying the checkpoint before it")
            continue
        return _write(found, tensors, out, tuple(notes))
    raise UserError(f"no checkpoint of {where} is whole; nothing was written")


def _tensors(found: Checkpoint, trained: bool) -> dict[str, Tensor]:
    """``<layer>.<name>`` → weight or buffer."""
    tensors = {}
    for layer in range(len(found.manifest.files.keys() - {TOKENIZER})):
        kept = found.read(layer)
        for key in (key for key in kept if not key.startswith(("optimizer/", "generator/"))):
            name = key.split("/", 1)[1]
            average = None if trained else kept.get(f"optimizer/{name}/{AVERAGE}")
            tensors[f"{layer}.{name}"] = kept[key] if average is None else average
    return tensors


def _write(found: Checkpoint, tensors: dict[str, Tensor], out: Path, notes: tuple[str, ...]) -> Exported:
    config = PipelineConfig.from_dict(dict(found.manifest.config))
    num_shards = load_model(config, config.model.vocab_size).num_shards
    if num_shards:
        tensors = whole_head(tensors, len(found.manifest.files.keys() - {TOKENIZER}), num_shards)
        config = config.model_copy(update={"model": config.model.model_copy(update={"split_head": False})})
    names = "<layer>.<name>"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if config.model.name == "huggingface":
            tensors, names = _with_hub_names(config, tensors), "Hugging Face's"
            (out / "config.json").write_text(json.dumps(_hub_config(config), indent=2) + "\n")
        else:
            config.to_yaml(out / "config.yaml")
        if TOKENIZER in found.manifest.files:
            shutil.copyfile(found.path / TOKENIZER, out / TOKENIZER)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / WEIGHTS, {"format": "pt"})
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another place with --out") from None
    return Exported(found.path, len(tensors), names, notes)


def _with_hub_names(config: PipelineConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tied weight appears once, under the name of its first owner, as the library writes it."""
    from vpipe.models.huggingface import hub_names

    model = load_model(config, None)
    later = {f"{layer}.{name}" for tied in model.tied for layer, name in tied.owners[1:]}
    names = {
        f"{layer}.{own}": original
        for layer, part in enumerate(Skeleton.of(config.model.name, model).modules)
        for own, original in hub_names(part).items()
    }
    return {names[name]: tensor for name, tensor in tensors.items() if name in names and name not in later}


def _hub_config(config: PipelineConfig) -> dict[str, Any]:
    from vpipe.models.huggingface.architectures import architecture
    from vpipe.models.huggingface.entry import config_of, library

    section = config.model
    given: Any = section.directory if section.config is None else section.config
    if isinstance(given, dict):
        given = {"vocab_size": section.vocab_size, **given}
    made = config_of(given)
    values: dict[str, Any] = made.to_dict()
    return values | {"architectures": [architecture(library(), made).__name__]}
