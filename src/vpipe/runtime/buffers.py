"""What layers hold beside their weights, and a forward changes: buffers, and generators of their own.

Units of a pipeline overlap, so the backward or the recompute of a unit comes when later forwards have gone on from
there. ``ChangingBuffers`` keeps what autograd has saved of a buffer, ``FoundState`` what a recompute reads again.

Words: docs/glossary.md.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn, strided
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _NormBase

from vpipe.errors import UserError
from vpipe.runtime.crossing import copied
from vpipe.runtime.device import is_host
from vpipe.runtime.memory.saved_tensors import SavedTensor

Slot = tuple[nn.Module, str]
Keep = Callable[[], Any] | None


def named_generators(module: nn.Module) -> dict[str, Any]:
    """The generators that a layer's parts keep as attributes, by path: torch's, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    found = ((f"{path}.{at}", each) for path, part in module.named_modules() for at, each in vars(part).items())
    return {path: each for path, each in found if isinstance(each, kinds)}


def generators_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The generators of some layers, each once."""
    return list({id(value): value for module in modules for value in named_generators(module).values()}.values())


def state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def numbers_of(part: nn.Module) -> dict[str, Any]:
    """The numbers that a part has as attributes; a forward may count with them."""
    return {name: value for name, value in vars(part).items() if type(value) in (int, float)}


def objects_of(module: nn.Module) -> dict[str, Any]:
    """The Python objects that a layer's parts have as attributes and that a forward may change."""
    every = {name: each for part in module.modules() for name, each in vars(part).items() if name[0] != "_"}
    kinds = (nn.Module, Tensor, torch.Generator, random.Random, type)
    return {
        name: each
        for name, each in every.items()
        if isinstance(each, dict | list | set)
        or (hasattr(each, "__dict__") and not callable(each) and not isinstance(each, kinds))
    }


def _look(found: Any) -> dict[Any, Any]:
    """What an object holds, one level deep: numbers and words as they are, the rest by identity."""
    if isinstance(found, list | set):
        items = list(enumerate(found))
    else:
        items = list((found if isinstance(found, dict) else vars(found)).items())
    return {key: value if type(value) in (int, float, str, bool) else id(value) for key, value in items}


def _has_changed(found: Any, before: Mapping[Any, Any]) -> bool:
    """Whether an object holds something else than before. What is only added to a dict or an object and is no number
    may be a cache, which any stage may fill."""
    now = _look(found)
    if isinstance(found, list | set):
        return now != before
    values = found if isinstance(found, dict) else vars(found)
    counts = any(key not in before and type(values.get(key)) in (int, float) for key in now)
    return counts or any(now.get(key) != value for key, value in before.items())


@contextmanager
def refusing_shared_changes(where: str, shared: Mapping[str, Any]) -> Iterator[None]:
    """Refuse forwards that change a Python object which layers of several stages hold; ``shared`` says of which."""
    before = [_look(each) for each in shared.values()]
    yield
    for (name, each), known in zip(shared.items(), before, strict=True):
        if _has_changed(each, known):
            raise UserError(
                f"{where} changes {name}, a {type(each).__name__} that layers of another stage hold too, so that the "
                "result would depend on which of them runs first; give each layer its own, or put all on one stage"
            )


@contextmanager
def refusing_foreign_draws(where: str) -> Iterator[None]:
    """Refuse forwards that draw from Python's or numpy's global generator: ranks would draw in the order in which they
    happen to run, or each from its own, and a recompute would draw anew. Threads that read data may draw meanwhile."""
    before = _global_states()
    yield
    if _global_states() == before:
        return
    said = (
        f"{where} draws from Python's or numpy's global generator, which no schedule can replay; draw from "
        "torch's, which is seeded for every unit and layer"
    )
    if not any(thread.name.startswith("vpipe-data") for thread in threading.enumerate()):
        raise UserError(said)
    warnings.warn(f"perhaps {said} (or it was a thread that reads data)", stacklevel=2)


def _global_states() -> Any:
    numpy = sys.modules.get("numpy")
    kind, numbers, *others = numpy.random.get_state() if numpy else ("", b"")
    return random.getstate(), kind, bytes(numbers), others


class FoundState:
    """The buffers, generators and counting attributes of some modules as a forward finds them; copies only of what it
    changes."""

    def __init__(self, parts: Iterable[nn.Module], generators: Iterable[Any]) -> None:
        self._buffers = [(part, dict(part._buffers)) for part in parts]
        self._copies = [
            (part, slot, buffer, buffer._version, buffer.clone())
            for part, found in self._buffers
            for slot, buffer in found.items()
            if buffer is not None and buffer.layout is strided
        ]
        self._generators = [(generator, state_of(generator)) for generator in generators]
        self.numbers = [(part, numbers_of(part)) for part, _ in self._buffers]

    def settle(self, changing: Collection[Slot]) -> FoundState:
        """The forward is over: let go of the copies of what it has not changed. ``changing`` are buffers that forwards
        do change, as far as it is known."""
        found = dict(self._buffers)
        for part, slot, buffer, version, copy in self._copies:
            changed = _differs(buffer, copy, version) or (part, slot) in changing
            found[part][slot] = copy if changed else buffer
        self._copies.clear()
        self.numbers = [(part, found) for part, found in self.numbers if numbers_of(part) != found]
        return self

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recompute. The slots get what the forward has found: copying into the buffers would tell autograd
        that they have changed."""
        now = FoundState((), (generator for generator, _ in self._generators))
        now._buffers = [(part, dict(part._buffers)) for part, _ in self._buffers]
        now.numbers = [(part, numbers_of(part)) for part, _ in self.numbers]
        self._put()
        try:
            yield
        finally:
            now._put()

    def restore(self) -> None:
        """Put back what was found, with the values that it had."""
        self._put()
        with torch.no_grad():
            for _, _, buffer, _, copy in self._copies:
                buffer.copy_(copy)

    def _put(self) -> None:
        for part, found in self._buffers:
            part._buffers.clear()
            part._buffers.update(found)
        for part, numbers in self.numbers:
            vars(part).update(numbers)
        for generator, state in self._generators:
            set_state(generator, state)


class ChangingBuffers:
    """The buffers of a stage that a forward changes and reads: a running mean of the user's own, a codebook, a counter,
    statistics of a normalisation that a later operation uses.

    One process runs a unit's backward before the next unit's forward. A pipeline does not, so the backward would find
    the buffer as a later unit has left it. Where a stage's forward changes a buffer, what autograd has saved of it
    therefore becomes a copy at the forward's end:

        unit 0   buffer += 1; y = x * buffer      has saved the buffer; then a copy of it
        unit 1   buffer += 1; y = x * buffer      changes the buffer, not the copy

    The first forward finds out, by value, because ``.data`` and the kernels of normalisations change behind the version
    counter; so does the first after parts go from train to eval mode or back. A stage whose buffers stay constant pays
    nothing later. One that begins to change them afterwards is refused by autograd once, in words, if units were under
    way, and runs from the next step on.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = modules
        self.elsewhere: frozenset[int] = frozenset()
        """Storages that layers of other stages hold too."""
        self.shared: Mapping[str, Any] = {}
        """Python objects that layers of several stages hold, by what a user calls them."""
        self._modes: list[bool] | None = None
        """The modes of the parts that hold these buffers, when they were looked at."""
        self._slots: list[Slot] = []
        """Those that are watched."""
        self.changing: set[Slot] = set()
        self._kept: set[Slot] = set()
        """Of the buffers that change, those of which a backward reads something."""
        self._noting: frozenset[int] = frozenset()
        self._held: list[tuple[int, Keep]] = []
        """(storage, how to keep what is saved of it, if a backward reads it)."""

    @property
    def have_shown(self) -> bool:
        """Whether a forward has been seen."""
        return self._modes is not None

    @property
    def are_none(self) -> bool:
        """Whether nothing needs to be kept or watched: the layers are known to have no buffers but statistics of
        normalisations that only these read."""
        return self._modes == []

    def note(self, tensor: Tensor, saved: SavedTensor) -> None:
        """A swapped region has saved a tensor; perhaps a part of a buffer."""
        if self._noting and tensor.layout is strided and storage_of(tensor) in self._noting:
            self._held.append((storage_of(tensor), saved.keep))

    @contextmanager
    def kept(self, graphs: Callable[[], Iterable[GradientEdge]]) -> Iterator[None]:
        """Around a forward: what its graphs have saved of a changing buffer stays as it is at the end."""
        looks = self._modes is None or self._modes != [part.training for part, _ in self._slots]
        found = _buffers_of(self._found_slots() if looks else self._slots)
        before = {slot: buffer.clone() for slot, buffer in found.items()} if looks else {}
        versions = {slot: buffer._version for slot, buffer in found.items()}
        self._noting = frozenset(storage_of(buffer) for slot, buffer in found.items() if looks or slot in self._kept)
        try:
            yield
            if self._noting:
                self._held.extend(_saved_by(graphs(), self._noting))
            if looks:
                self._learn(found, before, versions)
            elif any(b._version != versions[slot] and slot not in self.changing for slot, b in found.items()):
                self._modes = None
            kept = {storage_of(buffer) for slot, buffer in found.items() if slot in self._kept}
            for storage, keep in self._held:
                if keep is not None and storage in kept:
                    keep()
        finally:
            self._held.clear()
            self._noting = frozenset()

    def _found_slots(self) -> list[Slot]:
        parts = dict.fromkeys(part for module in self._modules.values() for part in module.modules())
        return [(part, slot) for part in parts for slot in part._buffers]

    def _learn(self, found: Mapping[Slot, Tensor], before: Mapping[Slot, Tensor], versions: Mapping[Slot, int]) -> None:
        """What the forward has shown; it may also have registered its first buffers."""
        slots = self._found_slots()
        after = _buffers_of(slots)
        changed = {s for s, b in after.items() if s not in before or _differs(b, before[s], versions[s])}
        self.changing |= changed | {slot for slot in slots if isinstance(slot[0], _NormBase)}
        normalised = {storage for storage, keep in self._held if keep is None}
        self.changing |= {slot for slot, buffer in found.items() if storage_of(buffer) in normalised}
        held = {storage for storage, keep in self._held if keep is not None}
        self._kept |= {slot for slot, buffer in found.items() if slot in self.changing and storage_of(buffer) in held}
        self._slots = [slot for slot in slots if slot in self._kept or not isinstance(slot[0], _NormBase)]
        self._modes = [part.training for part, _ in self._slots] if after.keys() == before.keys() else None
        for part, slot in changed:
            if storage_of(after[part, slot]) in self.elsewhere:
                layers = [layer for layer, module in self._modules.items() if part in list(module.modules())]
                raise UserError(
                    f"layer {layers[0]} ({type(part).__name__}) changes its buffer {slot!r}, which a layer of another "
                    "stage holds too, so that the result would depend on which of them runs first; give each layer its "
                    "own, or put both on one stage"
                )


def _differs(buffer: Tensor, before: Tensor, version: int) -> bool:
    """Whether a buffer was written: by version (autograd minds a write of the same value, too), and on the host by
    value, because ``.data`` is not counted."""
    return buffer._version != version or (is_host(buffer.device) and not torch.equal(buffer, before))


def _buffers_of(slots: Iterable[Slot]) -> dict[Slot, Tensor]:
    found = {(part, slot): part._buffers.get(slot) for part, slot in slots}
    return {slot: buffer for slot, buffer in found.items() if buffer is not None and buffer.layout is strided}


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _saved_by(edges: Iterable[GradientEdge], storages: Collection[int]) -> Iterator[tuple[int, Keep]]:
    """What graphs have saved of some storages, and how to replace it by a copy. The backward of a normalisation does
    not read the statistics that its forward has changed. (Hooks on all that is saved would forbid ``torch.func``.)"""
    waiting: list[Any] = [edge.node for edge in edges]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        changes = "BatchNorm" in node.name() or "InstanceNorm" in node.name()
        for tensor, raw in _saved_tensors(node):
            if storage_of(tensor) in storages:
                yield storage_of(tensor), None if changes else partial(raw.register_hooks, copied, lambda copy: copy)
        more = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= more
        waiting.extend(more)


def _saved_tensors(node: Any) -> Iterator[tuple[Tensor, Any]]:
    """(tensor, its handle) of all that a node has saved and that has not changed since, as far as versions tell."""
    for name in _handles(node.__class__):
        try:
            raw = getattr(node, name)
            found = node.saved_tensors if name == "_raw_saved_tensors" else getattr(node, name.removeprefix("_raw"))
        except (RuntimeError, AttributeError):
            continue  # autograd will refuse the backward
        several = isinstance(raw, tuple)
        for tensor, handle in zip(found, raw, strict=True) if several else [(found, raw)]:
            if isinstance(tensor, Tensor) and tensor.layout is strided:
                yield tensor, handle


@cache
def _handles(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
