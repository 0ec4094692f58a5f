"""The model contract: a model is a list of layers and a loss; and where the list is cut by default.

A pipeline cuts the list into stages, so it must know what flows between layers. A plain ``nn.Module`` takes what the
previous one returned, as in ``nn.Sequential``. A model with skip connections or masks names what each layer reads and
writes:

    layers = [
        Layer(Embedding(...), reads=("tokens",), writes=("x",)),
        Layer(Encoder(...), reads=("x", "mask"), writes=("x",)),
        Layer(Decoder(...), reads=("x", "mask", "memory"), writes=("x",)),
    ]

Names that are read before any layer writes them are the model's inputs. What the last layer writes is the model's
output. A layer may be given as a factory; then only the rank that owns it builds it.

    even_partition    all layers count alike, so a formula does        Pipeline(partition=None)
    balanced          their weights suggest how much they compute      partition: auto
    split_sizes       rows of a batch, the first microbatches taking one more where they do not divide

One rule for stages: the largest part is as small as it can be, and among such cuts the parts are as even as can be.
The planner (``plan``) simulates steps and does better; it needs a measurement, these do not. What
``ModelInterface.get_stage_partition`` says by default is another rule, OurGPipe's: no run takes it, only who calls it.

Words: docs/glossary.md.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from vpipe.errors import UserError

FLOW = "x"
"""The name of what a plain module reads and writes."""


@dataclass(frozen=True)
class Layer:
    """A module, or a factory of one, with the names of the values it reads and writes.

    ``module`` is called with the values of ``reads`` in order; it returns the value of ``writes``, or a tuple of them
    if there are several. A value is a tensor, or any tuple, list or dict of tensors, numbers, strings and ``None``.
    """

    module: nn.Module | Callable[[], nn.Module]
    reads: tuple[str, ...] = (FLOW,)
    writes: tuple[str, ...] = (FLOW,)
    name: str = ""
    """What errors and tables call the layer; the class name if empty."""
    cost_key: str = ""
    """Layers with the same non-empty key cost the same: a profile measures one of them."""

    def __post_init__(self) -> None:
        if len(set(self.writes)) < len(self.writes):
            raise UserError(
                f"a layer writes {', '.join(self.writes)}; give each value that it returns a name of its own"
            )

    def build(self) -> nn.Module:
        return self.module if isinstance(self.module, nn.Module) else self.module()


@dataclass(frozen=True)
class TiedWeight:
    """Parameters that are one: ``(layer index, parameter name)`` each. Their gradients are summed before the update,
    owner by owner: from two microbatches on in another order than those of one shared parameter."""

    owners: tuple[tuple[int, str], ...]


def changed(layer: Layer, change: Callable[[nn.Module], object]) -> Layer:
    """The layer, whose module is changed whenever it is built."""

    def build() -> nn.Module:
        made = copy.deepcopy(layer.module) if isinstance(layer.module, nn.Module) else layer.module()
        change(made)
        return made

    return replace(layer, module=build)


def as_layers(layers: Sequence[Layer | nn.Module | Callable[[], nn.Module]]) -> list[Layer]:
    """The list with every plain module or factory wrapped."""
    return [layer if isinstance(layer, Layer) else Layer(layer) for layer in layers]


def input_names(layers: Sequence[Layer]) -> tuple[str, ...]:
    """The values that the model takes from outside: read before any layer writes them."""
    written: set[str] = set()
    needed: dict[str, None] = {}
    for layer in layers:
        needed.update(dict.fromkeys(name for name in layer.reads if name not in written))
        written.update(layer.writes)
    return tuple(needed)


def bind_inputs(names: Sequence[str], inputs: object) -> dict[str, object]:
    """The inputs of a model that reads ``names``: a single one takes whatever was given, several come from a dict by
    name."""
    if not names or tuple(names) == (FLOW,):
        return {FLOW: inputs}
    if len(names) == 1 and not (isinstance(inputs, dict) and names[0] in inputs):
        return {names[0]: inputs}
    if not isinstance(inputs, dict):
        kind = type(inputs).__name__
        raise UserError(
            f"the model reads {', '.join(names)}; give its inputs as a dict of these names, not as a {kind}"
        )
    missing = [name for name in names if name not in inputs]
    if missing:
        raise UserError(f"the model reads {missing[0]!r}, but its inputs have only {', '.join(map(str, inputs))}")
    return {name: inputs[name] for name in names}


class _Collector(threading.local):
    """Where ``add_loss`` puts its scalars; every thread has its own, because ranks may be threads."""

    into: list[Tensor] | None = None


_collector = _Collector()


def add_loss(value: Tensor) -> None:
    """Called inside a layer's forward: adds a scalar to the unit's loss, from any stage (load balancing, regularisers).

    Outside a pipeline's training step it does nothing.
    """
    if _collector.into is not None:
        _collector.into.append(value)


def collect_into(into: list[Tensor] | None) -> list[Tensor] | None:
    """From now on the scalars that layers of this thread add go there; where they went before."""
    before, _collector.into = _collector.into, into
    return before


class collecting:
    """While it is open, the scalars that layers of this thread add go into this list."""

    __slots__ = ("_before", "_into")

    def __init__(self, into: list[Tensor]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._before = collect_into(self._into)

    def __exit__(self, *_: object) -> None:
        collect_into(self._before)


def describe(value: Any) -> str:
    """A short name of a value's kind for errors."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def even_partition(num_layers: int, num_stages: int) -> list[int]:
    """Equal counts, the surplus to the middle stages: the first and the last also carry the embedding and the loss."""
    if num_layers < num_stages:
        raise UserError(
            f"{num_layers} layers cannot fill {num_stages} stages; use at most {num_layers} stages or finer layers"
        )
    sizes = [num_layers // num_stages] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: abs(stage - (num_stages - 1) / 2))
    for stage in middle_first[: num_layers % num_stages]:
        sizes[stage] += 1
    return sizes


def balanced(work: Sequence[float], num_stages: int) -> list[int]:
    """Contiguous parts whose largest is as small as possible; among those, the most even."""
    even_partition(len(work), num_stages)  # says so where there are too few layers
    sums = [0.0, *accumulate(work)]

    @cache
    def best(first: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest part, sum of squares, sizes) of layers ``first..`` in ``stages`` parts."""
        if stages == 1:
            total = sums[-1] - sums[first]
            return total, total * total, (len(work) - first,)
        options = []
        for end in range(first + 1, len(work) - stages + 2):
            part = sums[end] - sums[first]
            largest, squares, sizes = best(end, stages - 1)
            options.append((max(part, largest), squares + part * part, (end - first, *sizes)))
        return min(options)

    return list(best(0, num_stages)[2])


def split_sizes(rows: int, num_units: int) -> list[int]:
    """How many rows each of ``num_units`` microbatches gets."""
    if rows < num_units:
        raise UserError(
            f"a batch of {rows} rows cannot be cut into {num_units} microbatches; "
            f"give at least {num_units} rows or fewer microbatches"
        )
    return [rows // num_units + (microbatch < rows % num_units) for microbatch in range(num_units)]
