"""Measures what each layer costs, through the runtime's own stages: what is timed is what the engine will execute.

Every layer is made a stage of its own. The stage runs a real microbatch forward and backward as a whole (``F``, ``B``),
and once more with the weight gradient apart (``I``, ``W``); the optimizer updates it. The whole backward is divided as
``I`` and ``W`` are, so that forward and backward add up to what an undivided schedule takes. A stage that does nothing
is timed too and taken off: what the runtime costs is counted per action, not per layer (``plan.transfer``).

Layers that are alike are measured once: same ``cost_key``, or else same class and settings; same shapes of parameters
and of what they read.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from vpipe.layer import Layer
from vpipe.plan.costs import LayerCost
from vpipe.plan.transfer import Nothing, ProgressTeller, now
from vpipe.runtime.buffers import ChangingBuffers
from vpipe.runtime.crossing import detached, flatten
from vpipe.runtime.device import HOST, is_host, place
from vpipe.runtime.flow import Flow, Pending, Value, resolve
from vpipe.runtime.memory.live import LiveBytes
from vpipe.runtime.region import Run
from vpipe.runtime.stage import Loss, Stage, StageOptions, Unit
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.weights import count_bytes
from vpipe.schedule.placement import Layout

WARM_UP = 5
"""Rounds that are not counted: first touches of memory, and what libraries set up."""

Values = Mapping[Value, Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Measuring:
    """How to measure."""

    loss: Loss
    optimizer: OptimizerFactory
    repeat: int = 10
    seed: int = 0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device = HOST

    def now(self) -> float:
        """The time when everything that was asked for is done; a device has only been told."""
        return now(self.device)

    def there(self, value: Any) -> Any:
        """A value where layers are measured."""
        if is_host(self.device):
            return value
        return tree_map(lambda leaf: _moved(leaf, self.device) if isinstance(leaf, Tensor) else leaf, value)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Timings:
    """Seconds of one round."""

    forward: float
    backward: float
    weight: float = 0.0


@dataclass(frozen=True)
class Rounds:
    """What the rounds of one stage took."""

    all: Sequence[Timings]

    def median(self, part: str) -> float:
        return float(median(getattr(each, part) for each in self.all))

    @property
    def spread(self) -> float:
        """Between the quartiles, as a share of the median."""
        totals = [each.forward + each.backward + each.weight for each in self.all]
        if len(totals) < 2 or not median(totals):
            return 0.0
        low, _, high = quantiles(totals, n=4)
        return (high - low) / median(totals)


def measure_layers(
    layers: Sequence[Layer], inputs: Any, targets: Any, measuring: Measuring, tell: ProgressTeller | None = None
) -> tuple[list[LayerCost], int]:
    """The cost of every layer for one microbatch, and the bytes of the microbatch itself."""
    flow = resolve(layers, Layout.chain([1] * len(layers)))
    inputs, targets = measuring.there(inputs), measuring.there(targets)
    read = {value for reads in flow.reads for value in reads}
    values = {value: given for value, given in flow.bound(inputs).items() if value in read}
    input_bytes = sum(num_bytes(given) for given in values.values())
    nothing = _time_of_nothing(measuring)
    known: dict[object, tuple[LayerCost, dict[str, Any]]] = {}
    costs: list[LayerCost] = []
    for index, layer in enumerate(layers):
        name = layer.name or "layer"
        if tell is not None:
            tell(index, len(layers), name)
        key = _signature(flow, index, values)
        if key not in known:
            known[key] = _measure(flow, index, values, targets, measuring, nothing)
        cost, given = known[key]
        values |= {(name, index): value for name, value in given.items()}
        crossed, returned = crossing(flow, index, values)
        costs.append(replace(cost, name=layer.name or cost.name, boundary_bytes=crossed, gradient_bytes=returned))
    if tell is not None:
        tell(len(layers), len(layers), "")
    return costs, input_bytes


def _module(layer: Layer) -> nn.Module:
    """A module of our own: what the user has given stays as it is."""
    return copy.deepcopy(layer.module) if isinstance(layer.module, nn.Module) else layer.build()


def _signature(flow: Flow, index: int, values: Values) -> object:
    """Layers with equal signatures cost the same. The last one has the loss, so it is like no other."""
    layer = flow.layers[index]
    with torch.device("meta"):
        module = layer.build()
    settings = layer.cost_key or tuple(
        (type(part).__qualname__, tuple(sorted((k, repr(v)) for k, v in vars(part).items() if _is_plain(v))))
        for part in module.modules()
    )
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    read = tuple(
        (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
        for value in flow.reads[index]
        for tensor in _tensors(values[value])
    )
    return settings, shapes, read, layer.writes, index == len(flow.layers) - 1


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple)


def _measure(
    flow: Flow, index: int, values: Values, targets: Any, measuring: Measuring, nothing: Timings
) -> tuple[LayerCost, dict[str, Any]]:
    """One layer's cost (what crosses the cut behind it is not known here), and what it writes."""
    module = place(_module(flow.layers[index]), measuring.device)
    stage = _stage(flow, index, module, measuring, splits=False)
    saved, watched = SavedBytes(module), _stage(flow, index, module, measuring, splits=False)
    watched.changing = ChangingBuffers({})  # no backward follows for which a buffer would have to be kept
    with saved.watching():
        given = _forward(watched, values, targets, measuring)
    watched.abandon()
    whole = _rounds(stage, values, targets, measuring)
    divided = _stage(flow, index, module, measuring, splits=True)
    split = _rounds(divided, values, targets, measuring)
    workspace, _ = _momentary(stage, values, targets, measuring)
    apart_workspace, deferred = _momentary(divided, values, targets, measuring)
    optimizer_bytes, update = _update(stage, measuring)
    forward = max(0.0, whole.median("forward") - nothing.forward)
    apart = [max(0.0, split.median(part) - getattr(nothing, part)) for part in ("backward", "weight")]
    # The halves take a little longer than the whole, and a plan does not yet know which of them will run.
    backward = max(0.0, whole.median("backward") - nothing.backward, sum(apart))
    weight_grad = backward * apart[1] / sum(apart) if sum(apart) else 0.0
    cost = LayerCost(
        name=type(module).__name__,
        forward=forward,
        input_grad=backward - weight_grad,
        weight_grad=weight_grad,
        saved_bytes=saved.total,
        boundary_bytes=0,
        parameter_bytes=count_bytes(list(module.parameters())),
        optimizer_bytes=optimizer_bytes,
        update=update,
        deferred_bytes=deferred,
        workspace_bytes=max(workspace, apart_workspace - deferred),
        spread=whole.spread,
    )
    written = {value[0]: detached(found) for value, found in given.items()}
    del stage, given
    gc.collect()
    return cost, written


def _stage(flow: Flow, index: int, module: nn.Module, measuring: Measuring, splits: bool) -> Stage:
    options = StageOptions(splits=splits, autocast=measuring.autocast)
    if isinstance(measuring.loss, nn.Module):
        place(measuring.loss, measuring.device)
    stage = Stage(index, flow, {index: module}, measuring.loss, options)
    for module in stage.owned.values():
        module.train()
    return stage


def _forward(stage: Stage, values: Values, targets: Any, measuring: Measuring) -> dict[Value, Any]:
    unit = Unit(0, Run(measuring.seed, 0, True, measuring.autocast), targets)
    return stage.forward(0, unit, dict(values))


def _rounds(stage: Stage, values: Values, targets: Any, measuring: Measuring) -> Rounds:
    """Time forward and backward; gradients add up from round to round, as they do over the units of a batch."""
    splits = stage.options.splits
    found = []
    for number in range(WARM_UP + measuring.repeat):
        begin = measuring.now()
        given = _forward(stage, values, targets, measuring)
        middle = measuring.now()
        pending = _gradients(given)
        del given
        back = measuring.now()
        stage.backward(0, pending, splits)
        end = measuring.now()
        if splits:
            stage.weight_gradient(0)
        if number >= WARM_UP:
            found.append(Timings(middle - begin, end - back, measuring.now() - end if splits else 0.0))
    return Rounds(found)


def _momentary(stage: Stage, values: Values, targets: Any, measuring: Measuring) -> tuple[int, int]:
    """Bytes that a forward or backward needs beyond what stays, and bytes that a unit holds more than it saved between
    its two gradients. Weights have gathered gradients before, so those of this round are for a moment."""
    live = LiveBytes()
    with live:
        given = _forward(stage, values, targets, measuring)
        workspace = live.peak - live.now
        pending = _gradients(given)
        del given
        before = live.peak = live.now
        received = count_bytes([each for gradients in pending.values() for each in gradients if each is not None])
        stage.backward(0, pending, stage.options.splits)
        workspace = max(workspace, live.peak - before)
        del pending
        deferred = live.now - (before - received)
        if stage.options.splits:
            stage.weight_gradient(0)
    return workspace, max(0, deferred)


def _gradients(given: Values) -> Pending:
    """What later stages would send back: a gradient for everything that needs one."""
    return {
        value: [torch.randn_like(each) for each in _tensors(found) if each.requires_grad]
        for value, found in given.items()
    }


def _update(stage: Stage, measuring: Measuring) -> tuple[int, float]:
    """Bytes that the optimizer keeps for the stage's weights, and the seconds of one update."""
    parameters = [p for p in stage.weights.parameters.values() if p.requires_grad and p.grad is not None]
    if not parameters:
        return 0, 0.0
    optimizer = measuring.optimizer(parameters)
    optimizing.step(optimizer)
    times = []
    for _ in range(max(3, measuring.repeat // 2)):
        begin = measuring.now()
        optimizing.step(optimizer)
        times.append(measuring.now() - begin)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return count_bytes(tensors), median(times)


def _time_of_nothing(measuring: Measuring) -> Timings:
    """What a stage takes whose layer does nothing: the runtime's share in every measurement."""
    flow = resolve([Layer(Nothing()), Layer(Nothing())], Layout.chain([1, 1]))
    values = {("x", -1): measuring.there(torch.ones(1).requires_grad_())}
    quick = replace(measuring, repeat=50, loss=lambda output, target: output.sum())
    whole, split = (
        _rounds(_stage(flow, 0, place(Nothing(), quick.device), quick, splits=splits), values, None, quick)
        for splits in (False, True)
    )
    return Timings(whole.median("forward"), whole.median("backward"), split.median("weight"))


class SavedBytes:
    """What autograd keeps of a forward: whole storages, each once, without the layer's own weights and buffers."""

    def __init__(self, module: nn.Module) -> None:
        owned = [*module.parameters(), *module.buffers()]
        self._owned = {tensor.untyped_storage()._cdata for tensor in owned}
        self._kept: dict[int, Tensor] = {}

    def watching(self) -> saved_tensors_hooks:
        """While this is open."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        """The tensor itself: the stage looks at what was saved of its buffers."""
        saved, identity = tensor.detach(), tensor.untyped_storage()._cdata
        if identity not in self._owned:
            self._kept[identity] = saved  # while it lives, no other storage gets its identity
        return saved

    @property
    def total(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def crossing(flow: Flow, index: int, values: Values) -> tuple[int, int]:
    """Bytes of everything that a layer behind this one still reads, and of the gradients that come back for it."""
    later = {value for reads in flow.reads[index + 1 :] for value in reads if value[1] <= index}
    tensors = [tensor for value in later for tensor in _tensors(values[value])]
    return count_bytes(tensors), count_bytes([tensor for tensor in tensors if tensor.requires_grad])


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    flatten(value, found)
    return found


def num_bytes(value: Any) -> int:
    """Bytes of all tensors of a value."""
    return count_bytes(_tensors(value))
