"""The optimizers of a config: torch's, LAMB and LARS for large batches, and those that users register; and the
number formats that it trains in: what autocast computes in, how losses are scaled so that fp16 gradients do not vanish;
and layers that are compiled.

@OPTIMIZER_REGISTRY.register("mine")
class Mine(torch.optim.Optimizer): ...          training: {optimizer: mine, optimizer_options: {rank: 4}}

``model.compile: true``: each layer is compiled by ``torch.compile``, on the rank that owns it. A layer and not a stage,
so that the same kernels run wherever the layer is. What is compiled computes all its gradients in one piece, so
schedules that take the weights' gradients later cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.config.sections import TrainingConfig
from vpipe.errors import UserError
from vpipe.layer import Layer, changed
from vpipe.registry import OPTIMIZER_REGISTRY
from vpipe.runtime.device import device_type
from vpipe.runtime.updates.averages import averaging
from vpipe.runtime.updates.optimizing import LearningRate, OptimizerMaker
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import ScheduleSpec


def optimizer(training: TrainingConfig) -> Callable[[Any], Optimizer]:
    """What makes a stage's optimizer, and keeps averages of its weights where they are asked for."""
    made = OPTIMIZER_REGISTRY.get(training.optimizer)
    own = OPTIMIZER_REGISTRY.is_own(training.optimizer)
    options = {"lr": training.learning_rate} | training.optimizer_options
    if training.weight_decay or not own:
        options.setdefault("weight_decay", training.weight_decay)
    maker = OptimizerMaker(training.optimizer, made, options)
    return averaging(maker, training.ema) if training.ema else maker


class Layerwise(Optimizer):
    """Scales the step of each tensor by what its weights and their step weigh. ``defaults`` are options and values."""

    defaults_of: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, **options: Any) -> None:
        if unknown := options.keys() - self.defaults_of.keys():
            raise TypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(self.defaults_of)}")
        super().__init__(params, {"lr": lr, **self.defaults_of, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Layerwise):
    """Layer-wise adaptive moments as in the paper (You et al., 2020): Adam's step, scaled by ‖weights‖ / ‖step‖; with
    ``as_apex`` only where there is weight decay, as apex' FusedLAMB does (which also clips to a global norm of 1:
    training.gradient_clipping)."""

    defaults_of: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "as_apex": False,
    }

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        (beta1, beta2), count = group["betas"], float(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1**count)
        spread = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        step = mean / spread + group["weight_decay"] * parameter
        trusts = bool(group["weight_decay"]) or not group["as_apex"]
        parameter.sub_(step * (group["lr"] * _ratio(parameter.norm(), step.norm()) if trusts else group["lr"]))


class Lars(Layerwise):
    """Layer-wise adaptive rates (You et al., 2017): momentum of gradients that are scaled by trust · ‖weights‖ /
    (‖gradient‖ + weight_decay · ‖weights‖); a group with ``trust: 0`` has plain momentum."""

    defaults_of: ClassVar[Mapping[str, Any]] = {"momentum": 0.9, "weight_decay": 0.0, "trust": 0.001}

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        decay, trust = group["weight_decay"], group["trust"]
        weight_norm, gradient_norm = parameter.norm(), gradient.norm()
        ratio = _ratio(trust * weight_norm, gradient_norm + decay * weight_norm) if trust else 1.0
        step = (gradient + decay * parameter) * (group["lr"] * ratio)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(step))


def _ratio(weights: Tensor, step: Tensor) -> Tensor:
    """1 where one of them is nothing."""
    return torch.where((weights > 0) & (step > 0), weights / step, torch.ones_like(weights))


START_SCALE = 2.0**16


def autocast(training: TrainingConfig, device: str = "cpu") -> Callable[[], AbstractContextManager[Any]]:
    """The context in which layers run on ``device``, as a config names it."""
    if training.precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float16
    return partial(torch.autocast, device_type(device), dtype=dtype)


def loss_scale(training: TrainingConfig) -> LossScale:
    """For fp16 a factor on the loss, fixed or found; otherwise none."""
    if training.precision != "fp16":
        return LossScale()
    if training.loss_scale == "dynamic":
        return LossScale(START_SCALE, dynamic=True)
    return LossScale(float(training.loss_scale))


def learning_rate(training: TrainingConfig, num_updates: float) -> LearningRate:
    """The rate of every update of a run that makes ``num_updates``."""
    total = max(1.0, num_updates)
    return LearningRate(
        training.learning_rate,
        training.learning_rate_policy,
        total,
        _updates(training.warmup, total),
        training.minimum_learning_rate,
        training.learning_rate_degree,
        tuple(_updates(place, total) for place in training.learning_rate_steps),
        training.learning_rate_factor,
    )


def _updates(amount: float, total: float) -> int:
    """Below 1 a share of all updates, else a number of updates; whole ones."""
    return ceil(round(amount * total if amount < 1 else amount, 6))


def compiled(layers: Sequence[Layer], spec: ScheduleSpec) -> list[Layer]:
    """The layers, compiled when they are built; the compiler itself runs in their first forward and backward."""
    if any(action.kind is Kind.I for _, action in spec.program.actions()):
        raise UserError(
            f"model.compile makes one piece of a layer's backward, but {spec.entry.name} takes the weights' gradients "
            "apart (I, then W); set model.compile: false, or parallel.scheduler to one without W, such as 1f1b"
        )
    return [changed(layer, nn.Module.compile) for layer in layers]
