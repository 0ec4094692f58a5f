"""What is noted of a step: digests of what each layer takes and gives, unit by unit, and of gradients.

A unit is known by the random seed with which each of its layers begins.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vpipe.runtime.surroundings import key
from vpipe.schedule.program import Program

if TYPE_CHECKING:
    from vpipe.runtime.pipeline import Pipeline

Digest = tuple[str, float]
"""Of bits, and the norm, for people."""
Undo = Callable[[], None]


class Fact(NamedTuple):
    """One thing that both sides know."""

    kind: str
    layer: int
    name: str
    """Of a parameter or buffer, or the number of a unit."""

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """What comes first where several differ: forwards from the first layer on, gradients from the last."""
        kinds = ("takes", "gives", "again", "loss", "gradient", "buffer", "weight")
        number = max(0, kinds.index(self.kind) - 2)
        return number, -self.layer if self.kind == "gradient" else self.layer, self.kind != "takes", self.name.zfill(9)


Notes = dict[Fact, Digest]


def digest(value: Any) -> Digest:
    """Of all tensors of a value; zeros of both signs are equal."""
    bits, square = hashlib.blake2b(digest_size=8), 0.0
    with torch.no_grad():
        for tensor in (each.detach().cpu() for each in tree_leaves(value) if isinstance(each, Tensor)):
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            dense = dense + 0 if dense.is_floating_point() or dense.is_complex() else dense
            bits.update(f"{dense.dtype} {tuple(dense.shape)}".encode())
            bits.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            square += float(dense.to(torch.complex128).abs().square().sum())
    return bits.hexdigest(), square**0.5


def watch_gradients(made: Optimizer, names: Mapping[int, str], note: Callable[[str, Tensor], None]) -> Undo:
    """Note every gradient that the optimizer is given; of several updates in a step, the last. What ends it."""
    if not hasattr(made, "register_step_pre_hook"):
        return lambda: None

    def before(chosen: Optimizer, args: Any, kwargs: Any) -> None:
        for group in chosen.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in names:
                    note(names[id(parameter)], parameter.grad.detach().clone())

    return made.register_step_pre_hook(before).remove


class StepNotes(ExitStack):
    """Notes what layers take and give in one step, and the gradients that optimizers get."""

    def __init__(self, pipeline: Pipeline, program: Program) -> None:
        super().__init__()
        self.notes: Notes = {}
        self._here = threading.local()
        self._places = {
            key(pipeline.seed, pipeline.num_units + microbatch, layer): (layer, microbatch)
            for microbatch in range(program.num_microbatches)
            for layer in range(pipeline.layout.num_layers)
        }
        """What the random numbers of a layer begin with → which layer and unit that is."""
        self._names: dict[int, str] = {}
        """Of the parameters of the layers that are watched."""

    def layer(self, number: int, module: nn.Module) -> None:
        def before(called: nn.Module, values: Any) -> None:
            layer, microbatch = self._places.get(torch.initial_seed(), (-1, -1))
            self._here.unit = str(microbatch) if layer == number else None
            if self._here.unit is not None:
                self.note("takes", number, self._here.unit, values)

        def after(called: nn.Module, values: Any, result: Any) -> None:
            if self._here.unit is not None:
                self.note("gives", number, self._here.unit, result)

        self._names |= {id(parameter): f"{number}.{name}" for name, parameter in module.named_parameters()}
        self.callback(module.register_forward_pre_hook(before).remove)
        self.callback(module.register_forward_hook(after).remove)

    def optimizer(self, made: Optimizer) -> None:
        def note(name: str, gradient: Tensor) -> None:
            layer, _, rest = name.partition(".")
            self.note("gradient", int(layer), rest, gradient)

        self.callback(watch_gradients(made, self._names, note))

    def note(self, kind: str, layer: int, name: str, value: Any) -> None:
        fact = Fact(kind, layer, name)
        if kind == "gives" and fact in self.notes:
            fact = Fact("again", layer, name)
        if kind != "takes" or fact not in self.notes:
            self.notes[fact] = digest(value)
