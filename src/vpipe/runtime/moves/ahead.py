"""What nothing writes is sent before a move, beside training.

    prepare_move  ─▶ thread: frozen weights, layer by layer ─▶ files here and there      training goes on
    move          ─▶ who has what, and is it still the same? ─▶ the rest of those layers, everything of the others

Frozen weights are most of a model that is fine-tuned, and no update writes them. They travel by connections of their
own, so that they stand in no activation's way, and wait in files as all that moves does. Whether they are still what
was sent is asked when the layers move: what is not, or has not come, is sent then. So this can fail as it likes; the
move is the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.runtime.engine import Engine
from vpipe.runtime.memory.sums import word_sum
from vpipe.runtime.memory.swap_store import FileStore
from vpipe.runtime.moves import layer_state
from vpipe.runtime.moves.layer_state import LayerState
from vpipe.schedule.placement import Difference, LayerTransfer, Layout, difference

Notice = Callable[[str], None]
"""Called with every step of the protocol; tests break them, one after the other."""
_TAG = 7


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

    def forget(self, layer: int) -> None:
        self._places.pop(layer, None)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._places.values())

    def __contains__(self, layer: object) -> bool:
        return layer in self._places


def pairs(layout: Layout, transfer: LayerTransfer) -> list[tuple[int, int]]:
    """(target, source) of a transfer: replica by replica, since each may have gradients of its own units."""
    after, sources = layout.ranks_of(transfer.layer), transfer.sources
    return [(target, sources[after.index(target) % len(sources)]) for target in transfer.targets]


class Ahead:
    """One process's part of what is sent ahead of a move to ``layout``."""

    def __init__(self, engine: Engine, layout: Layout, group: Any, patience: timedelta, notice: Notice) -> None:
        self.layout = layout
        self.difference: Difference = difference(engine.flow.layout, layout)
        self.coming, self.going = Shelf(), Shelf()
        self.problem = ""
        self._engine, self._patience, self._notice = engine, patience, notice
        self._gloo = group._get_backend(torch.device("cpu"))
        self._sums: dict[int, list[Any]] = {}
        """Layer → what told that its frozen weights were these, when they were sent or came."""
        self._frozen = {
            transfer.layer: found
            for transfer in self.difference.transfers
            if engine.rank in transfer.sources and (found := _frozen(self._module(transfer.layer)))
        }
        self._thread = threading.Thread(target=self._run, name="vpipe-ahead", daemon=True)

    @property
    def has_any(self) -> bool:
        """Whether this rank has anything to send."""
        return bool(self._frozen)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def _module(self, layer: int) -> nn.Module:
        return self._engine.stages[self._engine.flow.layout.stages[layer]].modules[layer]

    def _run(self) -> None:
        """All pairs in one order on every rank, so that nobody waits for one who waits for him."""
        rank = self._engine.rank
        try:
            for transfer in self.difference.transfers:
                for target, source in pairs(self.layout, transfer):
                    if rank == source:
                        self._send(transfer.layer, target)
                    elif rank == target:
                        self._receive(transfer.layer, source)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _send(self, layer: int, target: int) -> None:
        block = torch.empty(0, dtype=torch.uint8)
        try:
            if layer in self._frozen:
                self._notice(f"pack ahead layer {layer} on rank {self._engine.rank}")
                block = layer_state.packed({"parameters": self._frozen[layer]})
                if layer not in self.going:
                    self.going.lay(layer, block)
                self._sums[layer] = _sums(self._frozen[layer])
        except Exception as error:
            self.problem, block = f"{type(error).__name__}: {error}", block[:0]
        self._wait(self._gloo.send([torch.tensor([block.numel()])], target, _TAG))
        if block.numel():
            self._wait(self._gloo.send([block], target, _TAG))

    def _receive(self, layer: int, source: int) -> None:
        size = torch.empty(1, dtype=torch.int64)
        self._wait(self._gloo.recv([size], source, _TAG))
        if not int(size):
            return
        block = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self._gloo.recv([block], source, _TAG))
        try:
            self._notice(f"receive ahead layer {layer} on rank {self._engine.rank}")
            self._sums[layer] = _sums(layer_state.unpacked(block)["parameters"])
            self.coming.lay(layer, block)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _wait(self, work: Any) -> None:
        work.wait(self._patience)

    def settle(self, gather: Callable[[str], list[str]]) -> None:
        """When the layers move: keep what is whole at its target and still the same at its source, forget the rest.
        Every rank calls this at the same place."""
        self._thread.join()
        still = {layer: sums for layer, sums in self._sums.items() if layer in self.coming or self._is_still(layer)}
        told = [{int(layer): sums for layer, sums in json.loads(text).items()} for text in gather(json.dumps(still))]
        for transfer in self.difference.transfers:
            ranks = {rank for pair in pairs(self.layout, transfer) for rank in pair}
            found = [told[rank].get(transfer.layer) for rank in sorted(ranks)]
            if None in found or any(each != found[0] for each in found):
                self.coming.forget(transfer.layer)
                self.going.forget(transfer.layer)

    def _is_still(self, layer: int) -> bool:
        """Whether the layer has the same frozen weights as when they were sent."""
        now = _frozen(self._module(layer))
        return now.keys() == self._frozen[layer].keys() and _sums(now) == self._sums[layer]

    def names(self, layer: int) -> set[str]:
        """The weights of a layer on this rank that its new holder has already."""
        return set(self._frozen[layer]) if layer in self.going else set()

    def close(self) -> None:
        """Forget all of it, when it has come: the connections are needed again."""
        self._thread.join()
        for shelf in (self.coming, self.going):
            shelf.store.close()


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def _sums(parameters: dict[str, Tensor]) -> list[Any]:
    """What tells these weights from others."""
    return [[name, word_sum(tensor)] for name, tensor in sorted(parameters.items())]
