"""Engines from (layout, programs, parts), as often as the layout changes.

A pipeline keeps its ``Builder``: what it was told once (layers, loss, ties, options) and the transports that join its
ranks. Everything that depends on who holds what is made here, from a layout, and can be made anew from another.

Words: docs/glossary.md.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight, as_layers, even_partition
from vpipe.runtime import assembly
from vpipe.runtime.assembly import Wires
from vpipe.runtime.buffers import generators_of, objects_of, storage_of
from vpipe.runtime.device import is_host, place
from vpipe.runtime.engine import Engine
from vpipe.runtime.flow import Flow, resolve
from vpipe.runtime.options import EngineMaker, Memory, PipelineOptions, recomputed_and_swapped, stages_with
from vpipe.runtime.programs import Programs
from vpipe.runtime.ranks import membership
from vpipe.runtime.stage import Loss, Stage, StageOptions
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.device import DeviceTransport
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.routes import routes
from vpipe.runtime.updates.optimizing import with_rate_parts
from vpipe.runtime.updates.ties import check_owners, tie_layers
from vpipe.runtime.updates.update import LossScale, Updater, checked_scale
from vpipe.runtime.updates.weights import refuse_sharing
from vpipe.schedule import catalog
from vpipe.schedule.catalog import Entry, ScheduleSpec
from vpipe.schedule.placement import Layout

DEFAULT_MICROBATCHES = 4
Modules = Mapping[tuple[int, int], nn.Module]
"""(rank, layer) → a module that exists already; the loss is under the number after the last layer."""


@dataclass(frozen=True)
class Parts:
    """What the user gave, whatever the layout."""

    layers: Sequence[Layer]
    loss: Loss
    tied: Sequence[TiedWeight]
    loss_scale: LossScale
    workers: EngineMaker | None
    """Makes engines with worker threads; ``None`` without."""


class Builder:
    """Makes programs and engines of this process's ranks for a layout."""

    def __init__(self, parts: Parts, options: PipelineOptions, spec: ScheduleSpec, wires: Wires) -> None:
        self.parts, self.options, self.spec, self.wires = parts, options, spec, wires
        alone = len(wires.devices) == 1 or assembly.thread_safe(parts.layers)
        self._lock = None if alone else threading.Lock()
        self._finishing: list[Callable[[Engine], None]] = []
        self._transport: DistributedTransport | DeviceTransport | None = None
        on_device = wires.host is not None and not is_host(wires.devices[0])
        self._direct = on_device and options.device_messages
        """Whether messages go from device to device between processes."""

    @property
    def takes_turns(self) -> bool:
        """Whether ranks of this process compute one at a time."""
        return self._lock is not None

    def finish(self, change: Callable[[Engine], None]) -> None:
        """Every engine that is made from now on goes through ``change`` at last."""
        self._finishing.append(change)

    @contextmanager
    def with_memory(self, memory: Memory | None) -> Iterator[None]:
        """Build with other choices of what is kept, and stay with them unless what is built fails."""
        before = self.options
        self.options = before if memory is None else replace(before, recompute=memory.recompute, swap=memory.swap)
        try:
            yield
        except BaseException:
            self.options = before
            raise

    def layout(self, partition: Sequence[int] | None) -> Layout:
        """The first one: stages where the schedule puts them, layers as wanted or even."""
        placement = self.spec.placement
        if partition is None:
            partition = even_partition(len(self.parts.layers), placement.num_stages)
        elif len(partition) != placement.num_stages:
            raise UserError(
                f"the partition {list(partition)} has {len(partition)} stages, but {self.spec.describe()} has "
                f"{placement.num_stages}"
            )
        return Layout.of(partition, placement, self.wires.seats)

    def programs(self, layout: Layout, spec: ScheduleSpec | None = None) -> Programs:
        """What the ranks of a layout run; ``spec`` is the schedule, where its options are others than at first."""
        recomputed, swapped = recomputed_and_swapped(self.options.recompute, self.options.swap, layout.bounds)
        flow = resolve(self.parts.layers, layout)
        if self._direct:
            assembly.check_launches(flow)
        return Programs(
            spec or self.spec,
            flow,
            stages_with(recomputed, layout.bounds),
            stages_with(swapped, layout.bounds),
            receives_block=self._direct,
        )

    def prepare(self, programs: Programs) -> None:
        """Make the groups of ranks that these programs need. Every rank calls this at the same place."""
        if self.wires.host is not None:
            self._between(self.wires.host, programs)

    def engines(self, programs: Programs, modules: Modules | None = None) -> list[Engine]:
        """The engines of this process's ranks. ``modules`` are used where they are given; others are built."""
        wires = self.wires
        if wires.host is not None:
            transports: Sequence[Transport] = [self._between(wires.host, programs)]
        else:
            transports = wires.transports
        given = [(i, e.module) for i, e in enumerate(self.parts.layers) if isinstance(e.module, nn.Module)]
        self._shared_buffers(programs.flow.layout, given)
        engines = [
            self._engine(programs, transport, device, modules or {})
            for transport, device in zip(transports, wires.devices, strict=True)
        ]
        every = [*given, *(each for e in engines for stage in e.stages.values() for each in stage.owned.items())]
        shared, objects = (
            self._shared_buffers(programs.flow.layout, every),
            _shared_objects(programs.flow.layout, every),
        )
        for engine in engines:
            for stage in engine.stages.values():
                stage.changing.elsewhere = shared
                stage.changing.shared = objects
        if wires.host is None:
            stages = {index: stage for engine in reversed(engines) for index, stage in engine.stages.items()}
            refuse_sharing({layer: module for index in sorted(stages) for layer, module in stages[index].owned.items()})
        return engines

    def _shared_buffers(self, layout: Layout, modules: Sequence[tuple[int, nn.Module]]) -> frozenset[int]:
        """The storages of buffers that several stages hold; ``modules`` are (layer, module). A generator for whose
        numbers there is no order is refused."""
        memory = self.options.memory
        recomputed, _ = recomputed_and_swapped(memory.recompute, memory.swap, layout.bounds)
        buffers: dict[int, set[int]] = {}
        generators: dict[int, set[tuple[int, bool]]] = {}
        for layer, module in modules:
            layer, stage = min(layer, layout.num_layers - 1), layout.stage_of(layer)
            for buffer in (each for each in module.buffers() if each.layout is torch.strided):
                buffers.setdefault(storage_of(buffer), set()).add(stage)
            for generator in generators_of([module]):
                holders = generators.setdefault(id(generator), set())
                holders.add((stage, layer in recomputed))
                if layout.placement.num_replicas(stage) > 1 or len(holders) > 1:
                    raise UserError(
                        f"layer {layer} ({type(module).__name__}) draws from a generator that replicas of its "
                        "stage, layers of other stages or layers that are not recomputed alike draw from as well, so "
                        "that the numbers would depend on which of them runs first; draw from torch's default "
                        "generator, which is seeded for every unit and layer"
                    )
        return frozenset(storage for storage, holders in buffers.items() if len(holders) > 1)

    def _between(self, host: DistributedTransport, programs: Programs) -> DistributedTransport | DeviceTransport:
        """The transport of the rank that this process is, ready for the groups and neighbours of these programs."""
        device = self.wires.devices[0]
        if self._transport is None:
            self._transport = host
            if not is_host(device):
                self._transport = DeviceTransport(host, device, self._direct)
        if isinstance(self._transport, DeviceTransport):
            self._transport.prepare_routes(routes(programs.training(), programs.flow.layout))
        self._transport.prepare_groups(assembly.groups(self.parts.tied, programs.flow.layout))
        return self._transport

    def _engine(self, programs: Programs, transport: Transport, device: torch.device, modules: Modules) -> Engine:
        """The engine of one rank, with the layers of its stages alone."""
        parts, told, flow = self.parts, self.options, programs.flow
        layout, rank = flow.layout, transport.rank
        recomputed, swapped = recomputed_and_swapped(told.recompute, told.swap, flow.bounds)
        (assembly.return_freed_memory if swapped else assembly.keep_freed_memory)()
        stages = {}
        for index in layout.stages_of(rank):
            stage_options = StageOptions(
                versioned=not programs.synchronous,
                splits=index in programs.splits,
                stashes=index in programs.stashes,
                recompute=recomputed,
                swap=swapped,
                autocast=told.autocast,
            )
            mine, loss = self._modules(flow, index, rank, device, modules)
            stages[index] = Stage(index, flow, mine, loss, stage_options)
        built = {layer: module for stage in stages.values() for layer, module in stage.owned.items()}
        if parts.tied:
            check_owners(built, parts.tied)
        refuse_sharing(built)
        optimizers = {i: self._optimizer(stage) for i, stage in stages.items()} if told.optimizer else {}
        alone = self._lock is None and transport.num_ranks == 1
        scale = parts.loss_scale if alone else copy.copy(parts.loss_scale)
        updater = Updater(transport, stages, optimizers, parts.tied, told, programs.synchronous, scale, device)
        make = parts.workers or Engine
        engine = make(stages, flow, transport, updater, told.seed, told.autocast, self._lock, device)
        for change in self._finishing:
            change(engine)
        if self.wires.host is not None and (member := membership.current()):
            member.watch(engine)
        return engine

    def _modules(
        self, flow: Flow, index: int, rank: int, device: torch.device, modules: Modules
    ) -> tuple[dict[int, nn.Module], Loss]:
        """The layers of a stage and its loss: those that are there, the user's own, or what a factory builds. In one
        process every member of a stage but the leader needs its own."""
        mine, shares = {}, self.wires.host is None and rank != flow.layout.leader(index)
        for layer in range(*flow.bounds[index]):
            found = modules.get((rank, layer))
            mine[layer] = place(self._build(self.parts.layers[layer], shares) if found is None else found, device)
        loss = self.parts.loss
        if isinstance(loss, nn.Module) and index == flow.num_stages - 1:
            known = modules.get((rank, len(flow.layers)))
            own = copy.deepcopy(loss) if shares else loss
            loss = place(own if known is None else known, device)
        return mine, loss

    def _build(self, layer: Layer, shares: bool) -> nn.Module:
        """The module of a layer; a copy of one that is given where another rank of this process has it."""
        module = layer.build()
        if not shares or module is not layer.module:
            return module
        try:
            return copy.deepcopy(module)
        except (RuntimeError, TypeError) as error:
            what = layer.name or type(module).__name__
            raise UserError(
                f"layer {self.parts.layers.index(layer)} ({what}) cannot be copied for the other replicas of its stage "
                f"({str(error).split('.', 1)[0]}); give a function that builds it instead of the module"
            ) from error

    def _optimizer(self, stage: Stage) -> Optimizer:
        """The user's optimizer over all parameters, frozen ones too: what is unfrozen later is trained from then on."""
        make = self.options.optimizer
        assert make is not None
        parameters = list({id(p): p for p in stage.weights.parameters.values()}.values())
        try:
            made = make(parameters or [_nothing()])
        except ValueError:
            if any(p.requires_grad for p in parameters):
                raise
            made = make([_nothing()])  # the user's own function leaves frozen parameters out
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UserError(
                f"{type(made).__name__} needs a closure that computes the loss again, which a pipeline does not within "
                "an update; use an optimizer whose step() needs none"
            )
        return with_rate_parts(made)


def _nothing() -> nn.Parameter:
    """What the optimizer of a stage without parameters holds: a learning-rate schedule needs one like the others."""
    return nn.Parameter(torch.zeros(1, 1), requires_grad=False)


def _spec(chosen: PipelineOptions, entry: Entry, num_ranks: int) -> ScheduleSpec:
    """The choice in numbers; where it is one already, nothing else may say them."""
    num_microbatches = chosen.num_microbatches
    if isinstance(chosen.schedule, ScheduleSpec):
        said = (num_microbatches, chosen.stages_per_rank, chosen.schedule_options) != (None, None, None)
        if said or chosen.replicas not in (1, chosen.schedule.replicas) or num_ranks != chosen.schedule.num_ranks:
            raise UserError(
                f"the schedule is chosen with all its numbers ({chosen.schedule.describe()}), but here are {num_ranks} "
                "ranks, or other numbers beside it; give the same ranks, and the rest only there"
            )
        return chosen.schedule
    if num_microbatches is None:
        num_microbatches = entry.num_microbatches or DEFAULT_MICROBATCHES
    options = chosen.schedule_options or {}
    return ScheduleSpec(chosen.schedule, num_ranks, num_microbatches, chosen.stages_per_rank, chosen.replicas, options)


def prepared(
    layers: Sequence[Layer | nn.Module | Callable[[], nn.Module]],
    loss: Callable[[Any, Any], Tensor],
    tied: Sequence[TiedWeight],
    options: PipelineOptions,
) -> Builder:
    """Join the other ranks, and gather what engines are made of."""
    chosen = options.schedule
    entry = chosen.entry if isinstance(chosen, ScheduleSpec) else catalog.find(chosen)
    workers = options.workers(entry.runs_threads)
    wires = assembly.connect(options, threads=workers is not None, blocking=options.blocking or entry.blocking)
    spec = _spec(options, entry, wires.num_ranks)
    if workers is not None and entry.two_ways and spec.replicas not in (None, 1):
        raise UserError(
            f"replicas of {entry.name} need executor='plain': worker threads add its gradients in any order"
        )
    scale = checked_scale(options.loss_scale, spec.synchronous)
    plain, ties = as_layers(layers), list(tied)
    if tied or any(isinstance(part, nn.Module) for part in (*(layer.module for layer in plain), loss)):
        plain, ties = tie_layers(tied, plain, loss, spec)
    return Builder(Parts(plain, loss, ties, scale, workers), options, spec, wires)


def _shared_objects(layout: Layout, modules: Sequence[tuple[int, nn.Module]]) -> dict[str, Any]:
    """The Python objects that layers of several stages hold, by the first holder's name for them."""
    holders: dict[int, tuple[str, Any, set[int]]] = {}
    for layer, module in modules:
        for name, found in objects_of(module).items():
            said = f"{name!r} of layer {layer} ({type(module).__name__})"
            holders.setdefault(id(found), (said, found, set()))[2].add(layout.stages[min(layer, layout.num_layers - 1)])
    return {said: found for said, found, stages in holders.values() if len(stages) > 1}
