"""``vpipe parity``: a few steps pipelined, the same steps in one process, every bit compared.

The pipelined side is the real thing, run by the config's own schedule on its own ranks. The other side is ``Plain``, a
loop that shares nothing with the engine; of an asynchronous schedule, whose units read old weights, ``Replay``. Loss,
gradients (as the optimizer gets them) and weights are compared after every step; the first tensor that differs is
named. Where ranks compute on devices, the other side does so too, on one: kernels round in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.runtime.device import place
from vpipe.runtime.proof.check import Recipe, one_process
from vpipe.runtime.proof.plain import PlainUnit
from vpipe.runtime.proof.watch import watch_gradients
from vpipe.schedule.authors.authoring import Chain
from vpipe.train.feed import Position
from vpipe.train.optimizers import autocast, learning_rate, optimizer
from vpipe.train.session import Session, open_session
from vpipe.train.units import Units

LOSS = "loss"


@dataclass(frozen=True)
class Comparison:
    """What was compared, and the first difference."""

    num_tensors: int
    difference: str | None
    largest: float

    @property
    def equal(self) -> bool:
        return self.difference is None


def pipelined(config: dict[str, Any], directory: str, steps: int) -> int:
    """What each rank runs: the steps, and what it held after each, written down."""
    session = open_session(PipelineConfig.from_dict(config))
    seen: dict[str, Tensor] = {}
    step = 0
    names = {id(parameter): name for name, parameter in session.pipeline.parameters().items()}
    for made in session.pipeline.optimizers.values():
        watch_gradients(made, names, lambda name, g: seen.__setitem__(f"{step}/grad/{name}", g))
    session.pipeline.set_learning_rate(_rate(session, steps))
    for step in range(steps):
        positions = _positions(session, step)
        units = session.read(positions)
        loss = session.train_step(units, num_microbatches=session.prepare(len(positions)))
        seen[f"{step}/{LOSS}"] = torch.tensor(loss, dtype=torch.float64)
        seen |= {
            f"{step}/weight/{name}": tensor.detach().clone() for name, tensor in session.pipeline.state_dict().items()
        }
    rank = session.pipeline.rank
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in seen.items()}, Path(directory) / f"rank{rank}.safetensors"
    )
    return 0


def _rate(session: Session, steps: int) -> Callable[[float], float]:
    return learning_rate(session.config.training, max(steps, 2) * 4)


def _positions(session: Session, step: int) -> list[Position]:
    """The batches of a step: one, or two of a schedule that does not drain between them."""
    chained = 2 if session.pipeline.spec.chains is Chain.BATCHES else 1
    return [divmod(step * chained + i, session.feed.num_batches) for i in range(chained)]


def choose_reference(wanted: str, session: Session) -> str:
    """``plain`` where the schedule has one version of the weights, else ``replay``."""
    synchronous = session.pipeline.synchronous
    if any("gradient_clipping" in group for group in session.config.training.parameter_groups):
        raise UserError(
            "training.parameter_groups clips a group by its own norm, which the references of vpipe parity do not; "
            "compare without gradient_clipping in the groups"
        )
    if wanted == "plain" and not synchronous:
        raise UserError(
            f"the plain reference has one version of the weights, but {session.config.parallel.scheduler} keeps "
            "several; use --reference replay"
        )
    return ("plain" if synchronous else "replay") if wanted == "auto" else wanted


def sequential(session: Session, steps: int, reference: str = "auto") -> dict[str, Tensor]:
    """The same steps in one process, by the chosen reference. ``session`` gives the program, the data and the model;
    its pipeline is not trained."""
    config, pipeline = session.config, session.pipeline
    chosen = choose_reference(reference, session)
    num_microbatches = session.prepare(1 if chosen == "plain" else len(_positions(session, 0)))
    program = pipeline.program(num_microbatches)
    device = pipeline.devices[0]
    modules = {layer: place(module, device) for layer, module in enumerate(session.model.build())}
    if isinstance(session.model.loss, nn.Module):
        place(session.model.loss, device)
    seen: dict[str, Tensor] = {}
    step = 0
    names = {id(p): f"{layer}.{name}" for layer, module in modules.items() for name, p in module.named_parameters()}
    make = optimizer(config.training)
    options: dict[str, Any] = {
        "seed": config.training.seed,
        "tied": session.model.tied,
        "clip_norm": config.training.gradient_clipping or None,
        "autocast": autocast(config.training, device.type),
    }

    def watched(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = make(parameters)
        watch_gradients(made, names, lambda name, gradient: seen.__setitem__(f"{step}/grad/{name}", gradient))
        return made

    plain = chosen == "plain"
    recipe = Recipe(pipeline, program, modules, session.model.loss, watched, _rate(session, steps), options)
    train, loop = one_process(recipe, plain)
    for step in range(steps):
        read, loss = session.read(_positions(session, step)), 0.0
        assert read is not None, "one process reads all"
        units = _there(read, device)
        for part in units.by_update() if plain else [units]:
            inputs = [batch.inputs for batch in part.batches]
            loss += train([*map(PlainUnit, inputs, part.weighed(), part.shares())], True)
        loss /= units.num_updates
        seen[f"{step}/{LOSS}"] = torch.tensor(loss, dtype=torch.float64)
        seen |= {f"{step}/weight/{name}": tensor.detach().clone() for name, tensor in loop.state_dict().items()}
    return {name: tensor.cpu() for name, tensor in seen.items()}


def _there(units: Units, device: torch.device) -> Units:
    """The units where the reference computes."""

    def moved(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    batches = [replace(batch, inputs=moved(batch.inputs), targets=moved(batch.targets)) for batch in units.batches]
    return replace(units, batches=batches)


def compare(directory: Path, expected: Mapping[str, Tensor]) -> Comparison:
    """Every tensor that the ranks wrote against the replay's, in the order of steps."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("rank*.safetensors")):
        found |= load_file(file)
    first, largest = None, 0.0
    for name in sorted(expected, key=lambda name: (int(name.split("/", 1)[0]), name)):
        if name not in found:
            first = first or f"{name} is missing from the pipelined run"
        elif not torch.equal(found[name], expected[name]):
            distance = float((found[name].double() - expected[name].double()).abs().max())
            largest = max(largest, distance)
            step, rest = name.split("/", 1)
            first = first or f"step {step}: {rest.replace('/', ' ')} differs by up to {distance:.3g}"
    return Comparison(len(expected), first, largest)
