"""``vpipe profile``: what every measuring rank runs.

Several ranks measure the same layers at the same time, each on its own processor, as they will train: what they share,
memory above all, slows them down as it will then. Rank 0 writes the profile.

A run that adapts itself has measured times; what its layers hold follows from shapes (``footprint``): every layer is
run once on the meta device, where nothing is computed and nothing allocated. What a kernel needs for a moment is not
among it.
"""

from __future__ import annotations

import platform
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.models.model import Model, Skeleton
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.profile import Measuring, SavedBytes, crossing, measure_layers, num_bytes
from vpipe.plan.sharding import WrapperCosts, measure_wrappers
from vpipe.plan.transfer import (
    ProgressTeller,
    empty_pipeline,
    measure_link,
    measure_links,
    measure_overhead,
    measure_swap,
    slowest,
)
from vpipe.plan.units import parse_bytes
from vpipe.rundir import writing
from vpipe.runtime import assembly
from vpipe.runtime.crossing import detached, mapped
from vpipe.runtime.device import is_host, own_memory
from vpipe.runtime.flow import Value, resolve
from vpipe.schedule.placement import Layout
from vpipe.train.adapt import Cap
from vpipe.train.optimizers import autocast, optimizer
from vpipe.train.reporting.peaks import device_name
from vpipe.train.session import Session, feed_of, load_data, load_model

PROGRESS, RESULT = "progress.json", "profile.json"
"""What rank 0 writes into its directory."""


def profile(config: dict[str, Any], directory: str, repeat: int) -> int:
    """Measure as one of several ranks of this machine, which are alike."""
    where = Path(directory)

    def show(done: int, total: int, name: str) -> None:
        writing.replace(where / PROGRESS, {"done": done, "total": total, "name": name})

    found = measure(config, repeat, show)
    if found is not None:
        writing.replace(where / RESULT, found.to_json())
    return 0


def measure(config: dict[str, Any], repeat: int, show: ProgressTeller, every_link: bool = False) -> Profile | None:
    """The profile, on the rank that leads. ``every_link`` is for ranks that a launcher has put where they will train:
    what joins two of them need not be what joins two others."""
    checked = PipelineConfig.from_dict(config)
    if checked.launch.threads:
        torch.set_num_threads(checked.launch.threads)
    num_ranks = assembly.join(checked.parallel.timeout)
    data = load_data(checked)
    model = load_model(checked, data.vocab_size)
    with closing(feed_of(checked, data, model)) as feed:
        unit = feed.read([(0, 0)]).batches[0]
    transport = "auto" if checked.parallel.transport == "inprocess" else checked.parallel.transport
    wanted = checked.parallel.device
    pipeline = empty_pipeline(num_ranks, transport, checked.parallel.timeout, wanted)
    device = pipeline.devices[0]
    leads = pipeline.is_leader

    def tell(done: int, total: int, name: str) -> None:
        if leads:
            show(done, total, name)

    tell(0, len(model.layers), "messages and actions")
    links = measure_links(pipeline.transport, repeat, device, tell) if every_link else None
    link = slowest(links) if links else measure_link(pipeline.transport, repeat, device)
    overhead = measure_overhead(pipeline, repeat)
    swap = measure_swap(3, device)
    # On a device torch's own ways compute and send side by side, as they are predicted without a measurement.
    wrappers = measure_wrappers(link, repeat) if is_host(device) else WrapperCosts()
    training = checked.training
    measuring = Measuring(
        model.loss, optimizer(training), repeat, training.seed, autocast(training, device.type), device
    )
    layers, input_bytes = measure_layers(model.layers, unit.inputs, unit.targets, measuring, tell)
    found = Profile(
        layers=tuple(layers),
        input_bytes=input_bytes,
        microbatch_rows=unit.counts.num_samples,
        link_latency=link.latency,
        link_bandwidth=link.bandwidth,
        links=links,
        swap_bandwidth=swap,
        action_overhead=overhead,
        **asdict(wrappers),
        model=identity(checked, model),
        device=_device(num_ranks, pipeline.transport, device),
    )
    pipeline.close()
    return found if leads else None


def identity(config: PipelineConfig, model: Model) -> str:
    """What tells one model's profile from another's: its layers and shapes, the length of its sequences, its number
    format."""
    skeleton = Skeleton.of(config.model.name, model)
    return f"{skeleton.fingerprint}; sequences of {model.sequence_length}, {config.training.precision}"


def identity_of(config: PipelineConfig) -> str:
    """The same, from the config alone."""
    return identity(config, load_model(config, load_data(config).vocab_size))


def _device(num_ranks: int, transport: object, device: torch.device) -> dict[str, str | float]:
    memory = own_memory(device)
    own: dict[str, str | float] = {}
    if memory is not None:
        own = {"device": device_name(device), "memory_bytes": memory}
    return {
        **own,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "measuring_ranks": num_ranks,
        "transport": type(transport).__name__,
    }


def footprint(model: Model, skeleton: Skeleton, inputs: Any) -> Profile | None:
    """The bytes of all layers for a unit of these inputs, without times; ``None`` where shapes do not tell."""
    flow = resolve(model.layers, Layout.chain([1] * len(model.layers)))
    values: dict[Value, Any] = flow.bound(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs))
    input_bytes = sum(map(num_bytes, values.values()))
    costs = []
    for index, (layer, module) in enumerate(zip(model.layers, skeleton.modules, strict=True)):
        saved = SavedBytes(module)
        # A copy, since a layer may change in place what it reads, which autograd forbids of a leaf.
        read = [mapped(detached(values[value]), torch.clone) for value in flow.reads[index]]
        try:
            with torch.device("meta"), torch.enable_grad(), saved.watching():
                output = module(*read)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None  # its code asks for numbers
        written = [output] if len(layer.writes) == 1 else output
        values |= {(name, index): each for name, each in zip(layer.writes, written, strict=True)}
        costs.append(
            LayerCost(
                skeleton.layer_names[index],
                *(0.0, 0.0, 0.0),
                saved_bytes=saved.total,
                boundary_bytes=crossing(flow, index, values)[0],
                parameter_bytes=skeleton.weight_bytes[index],
            )
        )
    return Profile(tuple(costs), input_bytes=input_bytes)


def memory_cap(session: Session) -> Cap | None:
    """What the ranks of a run that adapts itself may hold: as the config says, or what their devices have."""
    given = session.config.parallel.memory
    most = parse_bytes(given) if given is not None else own_memory(session.pipeline.devices[0])
    if most is None:
        return None
    sizes = footprint(session.model, session.skeleton, session.feed.read([(0, 0)]).batches[0].inputs)
    if sizes is None and given is not None:
        raise UserError(
            f"parallel.memory is {given}, but what the layers of {session.config.model.name} hold does not follow from "
            "shapes alone; remove parallel.memory, or plan with 'vpipe profile' and 'vpipe plan --memory'"
        )
    return None if sizes is None else Cap(most, sizes)
