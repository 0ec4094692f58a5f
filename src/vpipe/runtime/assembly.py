"""Putting a pipeline together: who joins, who builds which layer, which weights start equal.

Everything here runs once, before the first step.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight
from vpipe.runtime.device import HOST, chosen, is_host, place
from vpipe.runtime.engine import Engine
from vpipe.runtime.flow import Flow
from vpipe.runtime.memory.heap import keep_freed_memory, return_freed_memory
from vpipe.runtime.priorities.order import Policy
from vpipe.runtime.programs import Programs
from vpipe.runtime.randomness import use_generator_of
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.meeting import Place
from vpipe.runtime.stage import Loss, Stage, StageOptions
from vpipe.runtime.threaded import ThreadedEngine
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.device import DeviceTransport
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.wire import flatten, unflatten
from vpipe.runtime.updates.replicas import share_states
from vpipe.runtime.updates.ties import check_owners, refuse_sharing, share_tied
from vpipe.runtime.updates.update import LossScale, UpdateOptions, Updater
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program

SETUP_STEP = -1
BuildModule = Callable[[int, Layer, int], nn.Module]
"""(layer index, layer, replica) → module."""


def under_launcher() -> bool:
    """Whether this process is one of several: a process group exists, or a launcher has described one."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout: float, wanted: int | None = None) -> int:
    """Join the others; how many there are, which must be ``wanted``."""
    world = membership.join(Place.read(os.environ) if "WORLD_SIZE" in os.environ else None, timeout)
    if wanted is not None and wanted != world:
        raise UserError(
            f"the pipeline wants {wanted} ranks, but the launcher started {world}; start {wanted} processes"
        )
    return world


def devices_here(wanted: str, world: int, in_process: bool, threads: bool) -> list[torch.device]:
    """The devices of this process's ranks; a launcher tells a rank of several which one of its machine it is."""
    if in_process:
        found = chosen(wanted, world)
    else:
        found = chosen(wanted, world, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    if threads and not all(map(is_host, found)):
        raise UserError(
            f"worker threads run on the CPU, but the device is {found[0]}; give executor='plain', or device='cpu'"
        )
    for device in found:
        use_generator_of(device)
    return found


def agree(programs: Programs, flow: Flow, seed: int) -> None:
    """Before anything is built: every rank must be about to run the same program."""
    member = membership.current()
    if member is None:
        return
    spec = programs.spec
    text = repr((spec.program.rows, flow.bounds, flow.skips(), programs.synchronous))
    member.agree(
        {
            "schedule": spec.schedule if isinstance(spec.schedule, str) else "of its own",
            "num_microbatches": str(spec.num_microbatches),
            "partition": str([end - begin for begin, end in flow.bounds]),
            "replicas": str(spec.replicas),
            "seed": str(seed),
            "program": hashlib.sha256(text.encode()).hexdigest()[:12],
        }
    )


def own_module(index: int, layer: Layer, replica: int) -> nn.Module:
    """In a process of its own, a rank uses the module it was given."""
    return layer.build()


class CopiesForReplicas:
    """In one process, every replica of a stage but the first needs modules of its own."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __call__(self, index: int, layer: Layer, replica: int) -> nn.Module:
        module = layer.build()
        return copy.deepcopy(module) if replica and module is layer.module else module


@dataclass(frozen=True)
class Pieces:
    """Everything that engines are made of."""

    layers: Sequence[Layer]
    loss: Loss
    flow: Flow
    programs: Programs
    recompute: Collection[int]
    swap: Collection[int]
    tied: Sequence[TiedWeight]
    optimizer: Callable[[Any], Any] | None
    update: UpdateOptions
    loss_scale: LossScale
    seed: int
    fused: bool
    autocast: Callable[[], AbstractContextManager[Any]]
    policy: Policy | None = None
    """Who goes first among the worker threads of a rank; ``None`` without worker threads."""
    devices: Sequence[torch.device] = ()
    """Of every rank of this process; the host where none are given."""

    def engines_in_threads(self, transports: Sequence[Transport]) -> list[Engine]:
        """All ranks in this process. One computes at a time, unless their layers say that several may."""
        alone = len(transports) == 1 or thread_safe(self.layers)
        lock = None if alone else threading.Lock()
        copies = CopiesForReplicas(self.programs.spec.placement)
        devices = self.devices or [HOST] * len(transports)
        engines = [
            self.engine(transport, copies, lock, device) for transport, device in zip(transports, devices, strict=True)
        ]
        stages = {index: stage for engine in reversed(engines) for index, stage in engine.stages.items()}
        refuse_sharing({layer: module for index in sorted(stages) for layer, module in stages[index].owned.items()})
        return engines

    def engine_between(self, host: DistributedTransport, direct: bool = True) -> Engine:
        """The rank that this process is; ``direct``: messages between devices go by the devices' own backend."""
        transport: DistributedTransport | DeviceTransport = host
        if self.devices and not is_host(self.devices[0]):
            transport = DeviceTransport(host, self.devices[0], neighbours(self.programs.spec.program), direct)
        transport.prepare_groups(groups(self.programs.spec.placement, self.tied, self.flow))
        return self.engine(transport, own_module, None, self.devices[0] if self.devices else HOST)

    def engine(
        self, transport: Transport, build: BuildModule, lock: threading.Lock | None, device: torch.device = HOST
    ) -> Engine:
        """The engine of one rank, with the layers of its stages and nobody else's."""
        placement = self.programs.spec.placement
        (return_freed_memory if self.swap else keep_freed_memory)()
        stages = {}
        for index in placement.stages_of[transport.rank]:
            replica = placement.ranks_of[index].index(transport.rank)
            modules = {
                layer: place(build(layer, self.layers[layer], replica), device)
                for layer in range(*self.flow.bounds[index])
            }
            options = StageOptions(
                versioned=not self.programs.synchronous,
                splits=index in self.programs.splits,
                stashes=index in self.programs.stashes,
                fused=self.fused,
                recompute=self.recompute,
                swap=self.swap,
                autocast=self.autocast,
            )
            own = replica and isinstance(self.loss, nn.Module) and build is not own_module
            loss = copy.deepcopy(self.loss) if own else self.loss
            if isinstance(loss, nn.Module) and index == self.flow.num_stages - 1:
                place(loss, device)
            stages[index] = Stage(index, self.flow, modules, loss, options)
        built = {layer: module for stage in stages.values() for layer, module in stage.owned.items()}
        check_owners(built, self.tied)
        refuse_sharing(built)
        optimizers = {index: self._optimizer(stage) for index, stage in stages.items()} if self.optimizer else {}
        scale = self.loss_scale if lock is None and transport.num_ranks == 1 else copy.copy(self.loss_scale)
        updater = Updater(transport, placement, stages, optimizers, self.tied, self.update, scale)
        make = partial(ThreadedEngine, policy=self.policy) if self.policy is not None else Engine
        engine = make(stages, self.flow, transport, updater, self.seed, self.autocast, lock, device)
        if member := membership.current():
            member.watch(engine)
        return engine

    def _optimizer(self, stage: Stage) -> Optimizer:
        """The user's optimizer over all parameters, frozen ones too: what is unfrozen later is trained from then on."""
        assert self.optimizer is not None
        parameters = list({id(p): p for p in stage.weights.parameters.values()}.values())
        try:
            made: Optimizer = self.optimizer(parameters or [_nothing()])
        except ValueError:
            if any(p.requires_grad for p in parameters):
                raise
            made = self.optimizer([_nothing()])  # the user's own function leaves frozen parameters out
        return made


def _nothing() -> nn.Parameter:
    """What the optimizer of a stage without parameters holds: a learning-rate schedule needs one like the others."""
    return nn.Parameter(torch.zeros(1, 1), requires_grad=False)


def thread_safe(layers: Sequence[Layer]) -> bool:
    """Whether the layers say that ranks of one process may run them at the same time (they draw no random numbers)."""
    return all(getattr(layer.module, "vpipe_thread_safe", False) for layer in layers)


def neighbours(program: Program) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) of ranks that exchange messages, in the same order on every rank."""
    found: dict[tuple[int, int], None] = {}
    for stage, readers in enumerate(program.readers):
        for reader in readers:
            for unit in range(program.num_microbatches):
                here, there = program.placement.rank(stage, unit), program.placement.rank(reader, unit)
                if here != there:
                    found |= {(here, there): None, (there, here): None}
    return list(found)


def groups(placement: Placement, tied: Sequence[TiedWeight], flow: Flow) -> list[list[int]]:
    """The sets of ranks that exchange something among themselves."""
    found = [list(ranks) for ranks in placement.ranks_of if len(ranks) > 1]
    for tie in tied:
        stages = {flow.stage_of(("", layer)) for layer, _ in tie.owners}
        found.append(sorted({rank for stage in stages for rank in placement.ranks_of[stage]}))
    return [ranks for ranks in found if len(ranks) > 1]


def share_initial_weights(engine: Engine, placement: Placement, tied: Sequence[TiedWeight]) -> None:
    """Replica 0 of a stage, and the first owner of a tied weight, give what they have to the others."""
    engine.transport.begin_step(SETUP_STEP)
    share_states(engine.stages, placement, engine.transport, SETUP_STEP)
    for number, tie in enumerate(tied):
        share_tied(engine, placement, tie, number, SETUP_STEP)
    engine.transport.end_step()


def joined(outputs: Sequence[Any]) -> Any:
    """Units' outputs as one batch."""
    lists: list[list[Tensor]] = []
    structure = None
    for output in outputs:
        tensors: list[Tensor] = []
        structure = flatten(output, tensors)
        lists.append(tensors)
    columns = iter(
        [torch.cat(column) if column[0].dim() else torch.stack(column) for column in zip(*lists, strict=True)]
    )
    assert structure is not None
    return unflatten(structure, lambda: next(columns))
