"""Moving layers between ranks while training stands still: from one layout to another, or not at all.

    every rank    transfers, layer by layer ─▶ waiting in a file ─┐ all prepared?
                                                                 ├─▶ drop, load, rebuild the engines ─┐ all switched?
                  one says no: the files are forgotten ◀─────────┘                                    ├─▶ new layout
                  one says no: what was dropped is loaded again ◀─────────────────────────────────────┘

What comes waits where swapped tensors wait, so a rank never has more than one layer in memory beyond what it holds
before or after. What goes waits there too, until all have switched. An exception on any rank at any moment leaves the
old layout on all of them; a rank that is lost ends the run as always.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.builder import Builder
from vpipe.runtime.engine import Engine
from vpipe.runtime.memory.swap_store import FileStore
from vpipe.runtime.moves import layer_state
from vpipe.runtime.moves.layer_state import LayerState
from vpipe.runtime.programs import Programs
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.surroundings import follow
from vpipe.runtime.transport.inprocess import PeerFailed
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.placement import Difference, LayerTransfer, Layout, difference

Notice = Callable[[str], None]
"""Called with every step of the protocol; tests break them, one after the other."""
MOVE_STEP = -2
_CHANNEL = 1023
"""Of no stage: what moves is not taken for an activation."""


@dataclass(frozen=True)
class Moved:
    """What a move did."""

    difference: Difference
    num_bytes: int
    """That this process has received."""
    seconds: float


@dataclass
class Shelf:
    """Blocks of layers of one rank that wait in a file."""

    store: FileStore = field(default_factory=FileStore)
    _places: dict[int, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def lay(self, layer: int, block: Tensor) -> None:
        if block.untyped_storage().nbytes() != block.numel():
            block = block.clone()  # a message may be a part of a larger piece of memory
        self._places[layer] = (self.store.put(block.untyped_storage()), block.numel())

    def fetch(self, layer: int) -> LayerState:
        """The state of a layer; its block stays where it is."""
        place, size = self._places[layer]
        block = torch.empty(size, dtype=torch.uint8)
        self.store.look(place, block.untyped_storage())
        return layer_state.unpacked(block)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._places.values())

    def __contains__(self, layer: object) -> bool:
        return layer in self._places


def pairs(layout: Layout, transfer: LayerTransfer) -> list[tuple[int, int]]:
    """(target, source) of a transfer: replica by replica, since each may have gradients of its own units."""
    after, sources = layout.ranks_of(transfer.layer), transfer.sources
    return [(target, sources[after.index(target) % len(sources)]) for target in transfer.targets]


class Move:
    """One move of the ranks of this process."""

    def __init__(self, builder: Builder, engines: list[Engine], new: Layout, notice: Notice) -> None:
        self._builder, self._old, self._notice = builder, engines, notice
        self.layout = new
        self.before = engines[0].flow.layout
        self.difference = difference(self.before, new)
        self._coming = {engine.rank: Shelf() for engine in engines}
        self._going = {engine.rank: Shelf() for engine in engines}
        self._dropped: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        """What this process has received."""
        return sum(shelf.num_bytes for shelf in self._coming.values())

    # --- prepared -----------------------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> str:
        """One rank's part of all transfers; what went wrong, or nothing. A rank that fails goes on with empty hands, so
        that no other rank waits for it."""
        problems: list[str] = []
        mine = {drop.layer for drop in self.difference.drops if engine.rank in drop.ranks}
        for number, transfer in enumerate(self.difference.transfers):
            engine.transport.begin_step(MOVE_STEP)
            self._transfer(engine, number, transfer, transfer.layer in mine, problems)
            engine.transport.end_step()
        for layer in sorted(mine - {t.layer for t in self.difference.transfers}):
            self._attempt(problems, lambda layer=layer: self._lay_aside(engine, layer))  # type: ignore[misc]
        return problems[0] if problems else ""

    def _transfer(
        self, engine: Engine, number: int, transfer: LayerTransfer, leaves: bool, problems: list[str]
    ) -> None:
        rank = engine.rank
        block = None
        if rank in transfer.sources and (leaves or rank in dict(pairs(self.layout, transfer)).values()):
            block = self._attempt(problems, lambda: self._lay_aside(engine, transfer.layer, leaves))
        for target, source in pairs(self.layout, transfer):
            envelope = Envelope(MOVE_STEP, _CHANNEL, _CHANNEL, number, 0)
            if rank == source:
                engine.transport.send(envelope, target, torch.empty(0, dtype=torch.uint8) if block is None else block)
            elif rank == target:
                engine.transport.post(envelope, source)
                found = engine.transport.take(envelope).cpu()
                self._attempt(problems, lambda found=found: self._receive(rank, transfer.layer, found))  # type: ignore[misc]

    def _lay_aside(self, engine: Engine, layer: int, leaves: bool = True) -> Tensor:
        """The block of a layer that this rank holds; kept, where the layer leaves."""
        self._notice(f"pack layer {layer} on rank {engine.rank}")
        stage = engine.stages[self.before.stages[layer]]
        optimizer = engine.updater.optimizers.get(stage.index)
        states = {str(layer): layer_state.state_of(stage.modules[layer], optimizer)}
        if layer == self.before.num_layers - 1 and isinstance(stage.loss, nn.Module):
            states[str(layer + 1)] = layer_state.state_of(stage.loss, optimizer)
        if not self._builder.wires.in_process:
            layer_state.refuse_hooks(layer, stage.modules[layer])
        block = layer_state.packed(states)
        if leaves:
            self._going[engine.rank].lay(layer, block)
        return block

    def _receive(self, rank: int, layer: int, block: Tensor) -> None:
        self._notice(f"receive layer {layer} on rank {rank}")
        if not block.numel():
            return  # its sender says why
        self._coming[rank].lay(layer, block)

    def _attempt(self, problems: list[str], do: Callable[[], Tensor | None]) -> Tensor | None:
        try:
            return do()
        except (PeerLost, PeerFailed):
            raise
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            return None

    # --- switched -----------------------------------------------------------------------------------------------------

    def switch(self, programs: Programs, num_updates: Mapping[int, int]) -> list[Engine]:
        """The engines of the new layout. The old ones can be restored as long as this object lives."""
        self._notice("switch")
        spare = self._drop()
        modules = dict(self._modules(spare))
        self._notice("build")
        engines = self._builder.engines(programs, modules)
        old = {engine.rank: engine for engine in self._old}
        for engine in engines:
            self._notice(f"load optimizers of rank {engine.rank}")
            self._load_optimizers(engine, old[engine.rank])
            engine.updater.go_on_from(old[engine.rank].updater, num_updates)
        self._notice("switched")
        return engines

    def _drop(self) -> dict[tuple[int, int], nn.Module]:
        """Free what leaves; in one process, those modules are handed over instead: (rank, layer) → module."""
        spare = {}
        for engine in self._old:
            for layer, module in self._parts(engine):
                if engine.rank in self.layout.ranks_of(layer):
                    continue
                self._notice(f"drop layer {layer} on rank {engine.rank}")
                self._dropped.append((engine.rank, layer))
                if self._builder.wires.in_process:
                    spare[engine.rank, layer] = module
                else:
                    layer_state.empty(module, _optimizer(engine, layer))
        return spare

    def _modules(self, spare: dict[tuple[int, int], nn.Module]) -> Iterator[tuple[tuple[int, int], nn.Module]]:
        """The modules of the new layout that exist: those that stay, and those that have come, with their state."""
        kept = {(engine.rank, layer): module for engine in self._old for layer, module in self._parts(engine)}
        devices = {engine.rank: engine.device for engine in self._old}
        for place, module in kept.items():
            if place[0] in self.layout.ranks_of(place[1]):
                yield place, module
        for transfer in self.difference.transfers:
            for target, source in pairs(self.layout, transfer):
                if target not in devices:
                    continue
                for layer, state in self._states(target, transfer.layer):
                    self._notice(f"load layer {layer} on rank {target}")
                    place = (source, layer)
                    module = spare.pop(place) if place in spare else self._built(layer, kept.get(place))
                    layer_state.put(state, module, devices[target])
                    yield (target, layer), module

    def _built(self, layer: int, like: nn.Module | None) -> nn.Module:
        if like is not None:
            made = copy.deepcopy(like)  # another rank of this process keeps its own
            follow(like, made)
            return made
        parts = self._builder.parts
        if layer < len(parts.layers):
            return parts.layers[layer].build()
        assert isinstance(parts.loss, nn.Module)
        return parts.loss

    def _states(self, rank: int, layer: int, *, gone: bool = False) -> list[tuple[int, LayerState]]:
        """What has come to a rank for a layer, or has gone."""
        states = (self._going if gone else self._coming)[rank].fetch(layer)
        return [(int(number), state) for number, state in states.items()]

    def _parts(self, engine: Engine) -> Iterator[tuple[int, nn.Module]]:
        """The layers of a rank, and the loss as the one after the last."""
        return chain.from_iterable(stage.called.items() for stage in engine.stages.values())

    def _load_optimizers(self, engine: Engine, old: Engine) -> None:
        """What stays and what has come, stage by stage; a stage that has not changed keeps its optimizer."""
        for index, optimizer in list(engine.updater.optimizers.items()):
            before = old.stages.get(index)
            stage = engine.stages[index]
            if before is not None and before.owned == stage.owned:
                engine.updater.optimizers[index] = old.updater.optimizers[index]
                continue
            states: dict[int, LayerState] = {}
            for layer, module in stage.owned.items():
                source = min(layer, self.before.num_layers - 1)
                if source in self._coming[engine.rank]:
                    states[layer] = dict(self._states(engine.rank, source))[layer]
                else:
                    states[layer] = layer_state.state_of(module, _optimizer(old, layer))
            layer_state.put_optimizer(states, stage.owned, optimizer)

    def hand_over_optimizers(self, engines: list[Engine]) -> None:
        """Let the optimizer objects of a stage that stays in this process go on with what has come, because others hold
        them: a learning-rate scheduler, the user."""
        for index in range(self.layout.num_stages):
            now = _holders(engines, index)
            made = [(each.updater.optimizers[index].state, each.updater.optimizers[index].param_groups) for each in now]
            before = [each.updater.optimizers[index] for each in _holders(self._old, index)]
            for engine, known, (state, groups) in zip(now, before, made, strict=False):
                known.state, known.param_groups = state, groups
                engine.updater.optimizers[index] = known
            if any(hasattr(left.step, "_wrapped_by_lr_sched") for left in before[len(now) :]):
                warnings.warn(
                    f"stage {index} has left this process, where its optimizer's learning-rate scheduler turns nothing "
                    "now; make one of pipe.optimizers where it is, or use Pipeline.set_learning_rate",
                    stacklevel=2,
                )

    # --- or not -------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the old engines back what they have dropped."""
        by_rank = {engine.rank: engine for engine in self._old}
        for rank, layer in self._dropped:
            engine = by_rank[rank]
            source = min(layer, self.before.num_layers - 1)
            state = dict(self._states(rank, source, gone=True))[layer]
            module = dict(self._parts(engine))[layer]
            layer_state.put(state, module, engine.device)
            optimizer = _optimizer(engine, layer)
            if optimizer is not None:
                layer_state.load_states(module, optimizer, state["tensors"])
        self._dropped.clear()

    def close(self) -> None:
        for shelf in (*self._coming.values(), *self._going.values()):
            shelf.store.close()


def _optimizer(engine: Engine, layer: int) -> torch.optim.Optimizer | None:
    return engine.updater.optimizers.get(engine.flow.layout.stage_of(layer))


def _holders(engines: list[Engine], stage: int) -> list[Engine]:
    """Those that have an optimizer of a stage, replica 0 first."""
    found = [engine for engine in engines if stage in engine.updater.optimizers]
    return sorted(found, key=lambda engine: engine.flow.layout.placement.ranks_of[stage].index(engine.rank))


def admitted(engines: list[Engine], new: Layout) -> Layout:
    """The layout to move to: ranks of which it does not say where they sit stay there. What would not be exact is
    refused."""
    layout = engines[0].flow.layout
    if new.num_ranks != layout.num_ranks:
        raise UserError(
            f"the pipeline has {layout.num_ranks} ranks, but the new layout {new.num_ranks}; ranks come and go by "
            "'vpipe train --elastic'"
        )
    new = replace(
        new, seats=tuple(now if not then.host else then for now, then in zip(layout.seats, new.seats, strict=True))
    )
    for first in difference(layout, new).reseated[:1]:
        raise UserError(
            f"rank {first.rank} is on {first.before}, but the new layout has it on {first.after}; a process stays "
            "where it is: let another rank take its layers (layout.with_ranks), or start the run anew there"
        )
    pending = any(p.grad is not None for e in engines for s in e.stages.values() for p in s.weights.parameters.values())
    if pending and layout.placement.has_replicas:
        raise UserError(
            "gradients wait for their update on the replicas of a stage, each those of its own units; "
            "move layers after the update"
        )
    return new


def verdict(texts: list[str]) -> tuple[str, dict[int, int]]:
    """Of what all processes have said: the first problem, and how many updates each stage has made."""
    told = [json.loads(text) for text in texts]
    problem = next((f"rank {rank}: {each['problem']}" for rank, each in enumerate(told) if each["problem"]), "")
    return problem, {int(stage): number for each in told for stage, number in each["updates"].items()}


def report(problem: str, engines: list[Engine]) -> str:
    """What a process says to the others."""
    updates = {stage: number for engine in engines for stage, number in engine.updater.num_updates.items()}
    return json.dumps({"problem": problem, "updates": updates})


def move(
    builder: Builder,
    engines: list[Engine],
    programs: Programs,
    gather: Callable[[str], list[str]],
    on_all: Callable[[Callable[[Engine], str]], list[str]],
    notice: Notice,
) -> tuple[list[Engine], Moved]:
    """From the layout of ``engines`` to that of ``programs``; a ``UserError`` where it stays the old one."""
    begin = perf_counter()
    moving = Move(builder, engines, programs.flow.layout, notice)
    try:
        problem, updates = verdict(gather(report(next(filter(None, on_all(moving.prepare)), ""), engines)))
        if problem:
            raise UserError(f"the layers stay where they are, because they cannot be moved: {problem}")
        builder.prepare(programs)
        made: list[Engine] = []
        try:
            made = moving.switch(programs, updates)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem, _ = verdict(gather(report(problem, engines)))
        if problem:
            moving.restore()
            raise UserError(f"the layers stay where they are, because not all ranks could take theirs: {problem}")
        moving.hand_over_optimizers(made)
        for engine in engines:
            engine.retire()
        return made, Moved(moving.difference, moving.num_bytes, perf_counter() - begin)
    finally:
        moving.close()
