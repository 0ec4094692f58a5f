"""Where a model can be cut, read from the model itself.

A model holds its blocks in ``ModuleList``s, others in dicts and chains too. The modules above such a list (the *spine*)
only arrange calls; every piece of the cut runs their Python code. What hangs on the spine is called from there: a
*block* of a list, another *unit* with parameters (embedding, norm, head), or a *free* module without any (dropout,
rotary angles), which every piece has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from vpipe.errors import UserError

CHAIN_SHARE = 0.12
"""Of a module that is none of the library's: a list, dict or chain is gone into where it holds this part of the
parameters."""
SMALLEST_SHARE = 0.05
"""A list of modules is cut where it holds at least this part of what the largest list holds: a list of two small norms
is not worth a boundary."""


@dataclass(frozen=True)
class Anatomy:
    """The paths of a model's modules by their role; the root's path is the empty string."""

    spine: tuple[str, ...]
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    """With parameters and no block."""
    free: tuple[str, ...]

    @property
    def called(self) -> frozenset[str]:
        """The modules whose calls are followed."""
        return frozenset((*self.blocks, *self.units))


def anatomy(root: nn.Module) -> Anatomy:
    """The roles of the modules of ``root``; a model of the library without a list of blocks is refused."""
    library = library_models(root)
    if library:
        sizes = dict(_containers(root, ""))
        containers = [path for path, size in sizes.items() if size >= SMALLEST_SHARE * max(sizes.values())]
        if not containers:
            raise UserError(
                f"a {type(root).__name__} has no list of blocks (a ModuleList with parameters), so there is nowhere to "
                "cut it; a model of one block runs without a pipeline"
            )
    else:
        containers = list(_worth_a_cut(root, "", CHAIN_SHARE * _size(root))) or [""]
    spine: dict[str, None] = {"": None}
    for path in filter(None, containers):
        steps = path.split(".")
        spine.update(dict.fromkeys(".".join(steps[: end + 1]) for end in range(len(steps))))
    blocks: list[str] = []
    units: list[str] = []
    free: list[str] = []
    for path in spine:
        module = root.get_submodule(path)
        for name, child in module._modules.items():  # also a module that stands there twice
            full = f"{path}.{name}" if path else name
            if full in spine or child is None:
                continue
            role = blocks if path in containers else units
            kept = child.state_dict() if not library else dict(child.named_parameters())
            (role if kept else free).append(full)
    return Anatomy(tuple(spine), tuple(blocks), tuple(units), tuple(free))


def _worth_a_cut(module: nn.Module, path: str, least: float) -> Iterator[str]:
    """Lists, dicts and chains of modules that hold at least so many parameters, also inside each other and inside other
    modules."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if _size(child) < least:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or (type(child) is nn.Sequential and len(child) > 1):
            yield full
        yield from _worth_a_cut(child, full, least)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _containers(module: nn.Module, path: str) -> Iterator[tuple[str, int]]:
    """The outermost lists of modules with parameters, and how many they hold."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        size = _size(child)
        if isinstance(child, nn.ModuleList) and _called_one_by_one(child) and size:
            yield full, size
        else:
            yield from _containers(child, full)


def _called_one_by_one(blocks: nn.ModuleList) -> bool:
    """Whether the elements are modules with a forward of their own, not lists again."""
    return all(not isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks)


def library_models(root: nn.Module) -> list[tuple[str, Any]]:
    """The outermost models of the library in ``root``: itself, or what an adapter wraps."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for path, module in root.named_modules():
        inside = any(path == outer or path.startswith(f"{outer}.") or not outer for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((path, module))
    return found


def ruling_model(root: nn.Module, path: str) -> Any:
    """The innermost model of the library that ``path`` is in: its rule initialises the module."""
    from transformers import PreTrainedModel

    ruling: Any = None
    module, steps = root, [step for step in path.split(".") if step]
    for step in ("", *steps):
        module = module.get_submodule(step) if step else module
        if isinstance(module, PreTrainedModel):
            ruling = module
    return ruling
