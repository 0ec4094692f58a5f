"""The tensors of a checkpoint directory under the names that the model has for them.

Files may carry other names than the model, older ones or without the base model's prefix, and hold in pieces what the
model has as one, such as experts. The library knows these changes; only what is asked for is read."""

from __future__ import annotations

import copy
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vpipe.errors import UserError


class Tensors:
    """Reads tensors of ``directory`` for the model ``skeleton``, which has no storage."""

    def __init__(self, directory: Path, skeleton: nn.Module) -> None:
        self.directory, self.skeleton = directory, skeleton
        self.files = tensor_files(directory)

    def get(self, name: str) -> Tensor | None:
        """The tensor that the model calls ``name``, or calls so too because it is tied; ``None`` if there is none."""
        for candidate in aliases(self.skeleton, name):
            if candidate in self._sources:
                return self._made(candidate)
        return None

    @cached_property
    def _sources(self) -> dict[str, tuple[Any, list[tuple[str, str]]]]:
        """The model's name → (how the library converts, [(name in the files, pattern that it matched)])."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        model: Any = self.skeleton
        changes: list[Any] = get_model_conversion_mapping(model)
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        renamings = [change for change in changes if not isinstance(change, WeightConverter)]
        patterns = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        wanted = self.skeleton.state_dict()
        prefix = getattr(self.skeleton, "base_model_prefix", "") or None
        found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for key in sorted(self.files, key=natural):
            name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = key, None
            converter = None if pattern is None else patterns[pattern]
            _, sources = found.setdefault(name, (converter, []))
            sources.append((key, pattern or key))
            if converter is not None:
                start, *others = converter.target_patterns
                found.update({name.replace(start, other): found[name] for other in others})
        return found

    def _made(self, name: str) -> Tensor:
        converter, sources = self._sources[name]
        if converter is None:
            return self._read(sources[0][0])
        working = copy.deepcopy(converter)
        for key, pattern in sources:
            working.add_tensor(name, key, pattern, self._read(key))
        made = working.convert(name, model=self.skeleton, config=getattr(self.skeleton, "config", None))
        value: Tensor | list[Tensor] = made[name]
        return value[0] if isinstance(value, list) else value

    def _read(self, key: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(str(self.files[key]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts ``experts.10`` after ``experts.9``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"[.]", name)]


def aliases(root: nn.Module, name: str) -> list[str]:
    """All names in ``root`` of the parameter or buffer called ``name``, this one first."""
    named: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    if name not in named:
        return [name]
    return [name, *(other for other, value in named.items() if value is named[name] and other != name)]


def tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint in safetensors, of one file or of shards with an index."""
    from safetensors import safe_open

    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            names = {name: directory / Path(file).name for name, file in weight_map.items()}
            missing = sorted({str(path) for path in names.values() if not path.is_file()})
            if missing:
                raise UserError(f"{index} names {missing[0]}, which does not exist; copy the whole checkpoint")
            return names
        if single.is_file():
            with safe_open(str(single), framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the weights in {directory} cannot be read: {error}") from error
    raise UserError(
        f"{directory} has no model.safetensors; weights are read as safetensors only, so save them with "
        "save_pretrained, or leave the directory out to start from new weights"
    )
