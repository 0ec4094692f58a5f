"""What the programs of the pair table ask of a pipeline beside training: its program's orders, what it keeps, its end."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from parts import differs
from plain import Plain
from safetensors.torch import load_file
from torch import Tensor

from vpipe import Pipeline
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.rundir.manifest import Standing
from vpipe.runtime.moves import layer_state
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program
from vpipe.train.checkpoints import layer_file
from vpipe.train.copies import CopyShelf, Part, newest

State = dict[int, dict[str, Tensor]]


def own_schedule(num_ranks: int, num_microbatches: int) -> Program:
    """A schedule of the user's own: the gradients of the inputs in another order than those of the weights."""
    units = range(num_microbatches)
    order = [*((Kind.F, k) for k in units), *((Kind.I, k) for k in reversed(units)), *((Kind.W, k) for k in units)]
    rows = [[*(Action(rank, kind, k) for kind, k in order), Action(rank, Kind.STEP)] for rank in range(num_ranks)]
    return Program(tuple(map(tuple, rows)), loop(num_ranks), num_microbatches)


def register_own() -> None:
    """Let programs name the schedule above; ``cases.run`` forgets it again, since other tests look at the whole catalogue."""
    if "own" not in SCHEDULE_REGISTRY:
        SCHEDULE_REGISTRY.register("own")(own_schedule)


def orders(pipe: Pipeline) -> list[list[tuple[int, ...]]]:
    """Per layer, the units that each holder adds up: read off the rows of the program."""
    rows = [[re.fullmatch(r"(\d+)(B|W)(\d+)", str(a)) for a in row] for row in pipe.program().rows]
    found: list[list[tuple[int, ...]]] = []
    for stage, count in enumerate(pipe.partition):
        holders = [tuple(int(m[3]) for m in row if m and int(m[1]) == stage) for row in rows]
        found += [sorted((units for units in holders if units), key=min)] * count
    return found


def step_asynchronously(plain: Plain, pipe: Pipeline, units: Sequence[Any], each: int) -> float:
    """The versions that ``pipedream`` reads, updating every ``each`` units, or 2BW, whose batches have ``each``."""
    sizes = pipe.partition
    bounds = [(sum(sizes[:s]), sum(sizes[: s + 1])) for s in range(len(sizes))]
    last, count = len(sizes) - 1, len(units)
    if each == 1:
        return plain.step_asynchronously(
            units, bounds, lambda s, k: max(0, k - (last - s)), [True] * count, [1.0] * count
        )
    ends = [k % each == each - 1 for k in range(count)]
    return plain.step_asynchronously(units, bounds, lambda s, k: max(0, k // each - 1), ends, [1 / each] * count)


def kept(pipe: Pipeline) -> State:
    """What a checkpoint has of the layers: written to files, and read."""
    found: State = {}
    with tempfile.TemporaryDirectory(prefix="vpipe-pairs-") as folder:
        for held in pipe.held_layers():
            if held.is_first:
                path = Path(folder) / layer_file.name_of(held.layer)
                layer_file.write(path, layer_state.tensors_of(held.module, held.optimizer))
                found[held.layer] = load_file(path)
    return found


class Copies:
    """The two pieces of memory in which an elastic rank keeps copies of its layers, after each update one."""

    def __init__(self) -> None:
        self._pieces = [os.memfd_create("pairs") for _ in range(2)]
        self._shelf = CopyShelf(self._pieces)
        self._number = 0

    def write(self, pipe: Pipeline) -> None:
        self._number += 1
        number = self._number
        standing = Standing(number, 0, number, ((0, number),), number, number, number, 1.0, 0, 0, "adam", "model")
        held = [each for each in pipe.held_layers() if each.is_first]
        frozen = {
            (each.layer, f"param/{name}")
            for each in held
            for name, parameter in each.module.named_parameters()
            if not parameter.requires_grad
        }
        layers = {each.layer: layer_state.tensors_of(each.module, each.optimizer) for each in held}
        self._shelf.write(standing, Part(1, 0, 1, tuple(pipe.partition)), layers, frozen)

    def read(self) -> State:
        """As the next rank of the slot finds it."""
        (found,) = newest([CopyShelf(self._pieces)])
        if found.iteration != self._number:
            differs(f"the newest copy is of update {found.iteration}, and {self._number} were made")
        return {layer: {name: tensor.clone() for name, tensor in found.read(layer).items()} for layer in found.table}

    def close(self) -> None:
        for piece in self._pieces:
            os.close(piece)


def go_on(new: Pipeline, old: Pipeline, state: State) -> Pipeline:
    """A fresh pipeline where the other one stood; what no checkpoint keeps (modes, frozen or not, rates) is given over."""
    for held in new.held_layers():
        layer_state.load_into(held.module, held.optimizer, state[held.layer])
    before, rates = old.modules(), [group["lr"] for made in old.optimizers.values() for group in made.param_groups]
    for layer, module in new.modules().items():
        for part, other in zip(module.modules(), before[layer].modules(), strict=True):
            part.training = other.training
        for parameter, other in zip(module.parameters(), before[layer].parameters(), strict=True):
            parameter.requires_grad_(other.requires_grad)
    for made in new.optimizers.values():
        for group in made.param_groups:
            group["lr"] = rates[0]
    new.resume(old.num_units, old.num_updates)
    old.close()
    return new


def same_state(pipe: Pipeline, plain: Plain) -> None:
    """All weights and buffers that this process holds."""
    found, expected = pipe.state_dict(), plain.state_dict()
    names = expected if pipe.in_process else {name for name in expected if int(name.split(".")[0]) in pipe.modules()}
    if found.keys() != set(names):
        return differs(f"names: {sorted(found.keys() ^ set(names))}")
    for name in names:
        here = found[name].cpu()
        if not torch.equal(here, expected[name]):
            return differs(f"{name} differs by {float((here - expected[name]).abs().max()):.3g}")
    for held in pipe.held_layers():
        for name, parameter in held.module.named_parameters():
            told = held.optimizer.state.get(parameter, {}).get("vpipe_average") if held.optimizer else None
            average = plain.averages.get(f"{held.layer}.{name}")
            if (told is None) != (average is None) or (average is not None and not torch.equal(told.cpu(), average)):
                return differs(f"the average of {held.layer}.{name}")
