"""Parameter groups by names: what an optimizer does otherwise with some of a model's parameters.

    parameter_groups:
      - {match: vectors, weight_decay: 0}                     biases and norms: BERT's and GPT-2's recipe
      - {match: "0.*|*.wte.weight", learning_rate: 0.1}       a tenth of the rate
      - {match: "1.*|2.*", frozen: true}                      or a number: until that many iterations are done
      - {match: "*", layer_decay: 0.9}                        each layer has 0.9 of the rate of the next one
      - {match: "3.*", gradient_clipping: 1.0}                by the norm of these gradients alone

A parameter has what every group says that matches it, the later one where two say the same. A layer is marked when it
is built, on whichever rank that is, so moves, resumes and other cuts of the model have the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn

from vpipe.config.sections import TrainingConfig
from vpipe.errors import UserError
from vpipe.layer import changed
from vpipe.models.model import Model, Skeleton
from vpipe.runtime.updates.optimizing import CLIP, OPTIONS

GROUPS = "vpipe_groups"
"""The attribute of a parameter that says which groups match it."""
FROZEN = "vpipe_frozen"
"""That which says until how many iterations are done it is frozen."""
VECTORS = "vectors"
"""Matches parameters of fewer than two dimensions."""


def grouped(model: Model, training: TrainingConfig) -> Model:
    """The model, its layers marked as they are built."""
    if not training.parameter_groups:
        return model
    first = {owner: tied.owners[0] for tied in model.tied for owner in tied.owners}
    count, groups = len(model.layers), training.parameter_groups
    marks = [partial(_mark, number, count, first, groups) for number in range(count)]
    return replace(model, layers=list(map(changed, model.layers, marks)))


def _mark(
    number: int,
    num_layers: int,
    first: Mapping[tuple[int, str], tuple[int, str]],
    groups: Sequence[Mapping[str, Any]],
    made: nn.Module,
) -> None:
    """A layer that is built. A tied weight is called by its first owner's name everywhere."""
    for name, parameter in made.named_parameters():
        layer, own = first.get((number, name), (number, name))
        names = _names(made if layer == number else None, layer, own)
        mine = [place for place, group in enumerate(groups) if _matches(group["match"], names, parameter)]
        options: dict[str, Any] = {}
        for place in mine:
            options |= {key: value for key, value in groups[place].items() if key != "match"}
        if frozen := options.pop("frozen", False):
            setattr(parameter, FROZEN, inf if frozen is True else frozen)
            parameter.requires_grad_(False)
        if most := options.pop("gradient_clipping", 0):
            place = max(place for place in mine if "gradient_clipping" in groups[place])
            setattr(parameter, CLIP, (place + 1, float(most)))
        if decay := options.pop("layer_decay", None):
            options["learning_rate"] = options.get("learning_rate", 1.0) * decay ** (num_layers - 1 - layer)
        setattr(parameter, OPTIONS, options)
        setattr(parameter, GROUPS, mine)


def thaws(training: TrainingConfig) -> set[int]:
    """After how many iterations something is no longer frozen."""
    return {group["frozen"] for group in training.parameter_groups if type(group.get("frozen")) is int}


def thaw(modules: Iterable[nn.Module], iteration: int) -> None:
    """Let parameters be frozen, or not, as they are once so many iterations are done."""
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if hasattr(parameter, FROZEN):
            parameter.requires_grad_(iteration >= getattr(parameter, FROZEN))


def _names(module: nn.Module | None, layer: int, name: str) -> list[str]:
    """A parameter's names: ``<layer>.<name>``, and that of the Hugging Face model which it is a part of."""
    from vpipe.models.huggingface.part import Part, hub_names  # most runs have no groups

    names = [f"{layer}.{name}"]
    if isinstance(module, Part):
        names.append(hub_names(module).get(name, names[0]))
    return names


def _matches(patterns: str, names: Sequence[str], parameter: Tensor) -> bool:
    return any(
        parameter.dim() < 2 if pattern == VECTORS else any(fnmatchcase(name, pattern) for name in names)
        for pattern in patterns.split("|")
    )


def _named(skeleton: Skeleton) -> dict[str, nn.Parameter]:
    modules = enumerate(skeleton.modules)
    return {f"{layer}.{name}": p for layer, module in modules for name, p in module.named_parameters()}


def check_groups(skeleton: Skeleton, training: TrainingConfig) -> None:
    """Raise where a group matches nothing."""
    named = _named(skeleton)
    found = {place for parameter in named.values() for place in getattr(parameter, GROUPS, ())}
    for number, group in enumerate(training.parameter_groups):
        if number not in found:
            raise UserError(
                f"training.parameter_groups[{number}] matches no parameter with {group['match']!r}; they are called "
                f"{', '.join(named)[:300]}"
            )


def described(skeleton: Skeleton) -> list[str]:
    """A line for each group as the parameters fall: its options, and what is in it."""
    found: dict[str, list[str]] = {}
    for name, parameter in _named(skeleton).items():
        until = getattr(parameter, FROZEN, 0 if parameter.requires_grad else inf)
        options = getattr(parameter, OPTIONS, {}) | ({"frozen": True if until == inf else until} if until else {})
        options |= {"gradient_clipping": getattr(parameter, CLIP)[1]} if hasattr(parameter, CLIP) else {}
        told = ", ".join(f"{key}: {value}" for key, value in sorted(options.items())) or "as the keys above say"
        found.setdefault(told, []).append(name)
    return [f"{told}: {' '.join(names)}" for told, names in found.items()]
