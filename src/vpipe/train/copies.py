"""Copies of a run's state in memory that outlives the ranks.

Every slot of an elastic run has two pieces of memory without a name (memfd). The launcher makes them, the zygote and
all ranks inherit them: the memory stays while one of these processes lives. After each update a rank writes
what a checkpoint would have of its layers into the older of its two pieces:

    ┌ head ───────────────────────────────────────────────┬ table ┬ tensors, aligned to 64 ─────
    │ magic, iteration, epoch, sizes, sum of all the rest │ JSON  │ raw bytes
    └─────────────────────────────────────────────────────┴───────┴────────────────────────────

The magic is erased first and written last, and the sum of all words must be right: a copy whose writer died on the way
is none. Weights and optimizer state are copied by a thread beside the next forwards (``Copier``): nothing writes them
until the next update. What a forward may change is copied at once: buffers, frozen weights (one may be an average of
others, or have been trained until now; it is copied where it has changed), and weights that a forward has been seen to
change, whose copy of that moment is none.

**Why two are enough**: a rank begins copy t+2 over copy t only after a step in which all ranks took part, and none of
them takes part in an update before its copy t+1 is whole. So there is always a *generation* that all ranks have whole,
at most one update old.

    main thread   … update t │ forwards and backwards of step t+1 ……… │ agree on update t+1 …
    copier                   └─ copy weights, optimizer state, sum ─┘ ▲ waits here, if it must

Ranks wait for neighbours in every step, and the copy fits into that time. The thread asks for the interpreter a few
times a copy and not for every tensor.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vpipe.records import parsed
from vpipe.rundir.manifest import Standing
from vpipe.runtime.memory.sums import word_sum as _sum

if TYPE_CHECKING:
    from vpipe.runtime.engine import Engine

SHELVES = "VPIPE_SHELVES"
"""The variable in which a launcher tells its ranks the descriptors: a JSON list of pairs, one a slot."""
_HEAD = struct.Struct("<8sqqqqq")
_MAGIC = b"vpcopy\x00\x01"
_ALIGN = 64
BUFFER = "buffer/"
"""How the names of those tensors begin that a forward may change."""
PIECE = ".copy"
"""How the names of those end that are on the disk."""
_ROOM = 4096
"""Bytes of the table beyond its entries."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

Layers = Mapping[int, Mapping[str, Tensor]]
"""Layer → what is kept of it."""
TensorKey = tuple[int, str]
StoredTensor = tuple[str, list[int], int]
"""(dtype, shape, where it begins)."""


@dataclass(frozen=True)
class Part:
    """Which of the copies of one generation this is: every writer's together make it whole."""

    epoch: int
    number: int
    num_parts: int
    partition: tuple[int, ...] = ()
    """Layers per stage when it was written: layers may have moved since the run began."""


@dataclass(frozen=True)
class Copy:
    """A whole copy, found and checked."""

    iteration: int
    part: Part
    standing: Standing
    table: Mapping[int, Mapping[str, StoredTensor]]
    memory: Tensor

    def read(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer, as they lie in the copy."""
        return {name: _view(self.memory, entry) for name, entry in self.table[layer].items()}


class CopyShelf:
    """The two pieces of memory of one slot."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._pieces = [_Piece(descriptor) for descriptor in descriptors]
        self._last: _Piece | None = None
        """The one that became whole last."""
        self._restless: set[TensorKey] = set()
        """Weights that a forward has changed while they were copied."""

    def keep(self, iteration: int, epoch: int) -> None:
        """The run goes on from this generation: the copy that is here is overwritten last. What is newer here was
        written by a rank that had come further than others, and is worth nothing now."""
        self._last = next((piece for piece in self._pieces if piece.order() == (iteration, epoch)), None)

    def last(self) -> tuple[int, int] | None:
        """Which of the pieces became whole last, and its descriptor."""
        return (self._pieces.index(self._last), self._last.descriptor) if self._last is not None else None

    def write(self, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey] = ()) -> int:
        """Keep the state after an update, beside the one before; bytes that were copied. What is ``frozen`` is copied
        where it has changed."""
        return self.begin(standing, part, layers, frozen)()

    def begin(
        self, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey] = ()
    ) -> Callable[[], int]:
        """The same in two parts: what forwards may change is copied now, the rest by the call that is returned, which
        another thread may make as long as nothing writes weights and optimizer state."""
        piece = next(piece for piece in self._pieces if piece is not self._last)
        copy_rest = piece.begin(standing, part, layers, frozen, self._restless)

        def finish() -> int:
            size, changed = copy_rest()
            self._restless |= changed
            self._last = self._last if changed else piece
            return size

        return finish

    def leave(self, folder: Path) -> None:
        """Write the whole ones to the disk, unless they are there already: each is again a piece, of a shelf of one."""
        for copy in self.copies():
            path = folder / f"{copy.iteration}-{copy.part.epoch}-{copy.part.number}{PIECE}"
            if not path.exists():
                fresh = path.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(copy.memory.numpy().data)
                fresh.rename(path)

    def copies(self) -> list[Copy]:
        """The whole ones."""
        return [copy for piece in self._pieces if (copy := piece.read()) is not None]


class Fingerprints:
    """What frozen tensors were when they were copied last. torch's count of changes alone would miss ``.data``."""

    def __init__(self) -> None:
        self._seen: dict[TensorKey, tuple[int, int, int]] = {}

    def unchanged(self, layers: Layers, frozen: Collection[TensorKey]) -> set[TensorKey]:
        """Those of the frozen tensors that are what they were; asked when all others are copied."""
        before, self._seen = self._seen, {}
        for layer, tensors in layers.items():
            for name in [name for name in tensors if (layer, name) in frozen]:
                tensor = tensors[name]
                self._seen[layer, name] = (tensor._version, tensor.data_ptr(), _sum(tensor))
        return {key for key, seen in self._seen.items() if before.get(key) == seen}


class _Piece:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._form: list[Any] = []
        self.table: dict[int, dict[str, StoredTensor]] = {}
        self.views: dict[TensorKey, Tensor] = {}
        """Where each tensor goes: a fifth of the time of a copy was spent on finding it again."""
        self._text = b""
        self._begin = self._end = 0
        self._seen = Fingerprints()

    def order(self) -> tuple[int, int]:
        """(iteration, epoch); nothing, or a torn copy, is older than any."""
        head = self._head()
        return head[1:3] if head is not None else (-1, -1)

    def _head(self) -> tuple[bytes, int, int, int, int, int] | None:
        data = os.pread(self.descriptor, _HEAD.size, 0)
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            return None
        return _HEAD.unpack(data)

    def begin(
        self,
        standing: Standing,
        part: Part,
        layers: Layers,
        frozen: Collection[TensorKey],
        restless: Collection[TensorKey],
    ) -> Callable[[], tuple[int, set[TensorKey]]]:
        """Copy what forwards may change; the call that copies the rest, and tells how many bytes there were, and which
        tensors a forward has changed meanwhile: then the copy is none."""
        os.pwrite(self.descriptor, bytes(len(_MAGIC)), 0)
        form = [(layer, name, t.dtype, t.shape) for layer, tensors in layers.items() for name, t in tensors.items()]
        if form != self._form:
            self._lay_out(layers)
            self._form = form
        told = json.dumps([asdict(standing), part.number, part.num_parts, part.partition]).encode() + b"\n"
        if len(told) + len(self._text) > self._begin - _HEAD.size:
            raise AssertionError("the table of a copy has outgrown its room")
        os.pwrite(self.descriptor, (told + self._text).ljust(self._begin - _HEAD.size), _HEAD.size)
        now: list[tuple[Tensor, Tensor]] = []
        later: dict[TensorKey, tuple[Tensor, Tensor]] = {}
        unchanged = self._seen.unchanged(layers, frozen)
        for layer, tensors in layers.items():
            for name, tensor in tensors.items():
                key = (layer, name)
                if name.startswith(BUFFER) or key in restless or (key in frozen and key not in unchanged):
                    now.append((self.views[key], tensor))
                elif key not in unchanged:
                    later[key] = (self.views[key], tensor)
        _copy(now)
        versions = {key: tensor._version for key, (_, tensor) in later.items()}
        head = (standing.iteration, part.epoch, self._begin, self._end)
        memory = self._memory
        size = sum(place.nbytes for place, _ in (*now, *later.values()))

        def copy_rest() -> tuple[int, set[TensorKey]]:
            _copy(list(later.values()))
            changed = {key for key, (_, tensor) in later.items() if tensor._version != versions[key]}
            if not changed:
                facts = _HEAD.pack(b"", *head, _sum(memory[_HEAD.size : head[-1]]))
                os.pwrite(self.descriptor, facts[len(_MAGIC) :], len(_MAGIC))
                os.pwrite(self.descriptor, _MAGIC, 0)
            return size, changed

        return copy_rest

    def _lay_out(self, layers: Layers) -> None:
        """Where every tensor goes, in memory that is large enough."""
        offset, places = 0, {}
        for layer, tensors in layers.items():
            for name, tensor in tensors.items():
                places[layer, name] = offset
                offset = _aligned(offset + tensor.nbytes)
        self._begin = _aligned(_HEAD.size + _ROOM + sum(len(name) + 160 for _, name in places))
        self._end = self._begin + offset
        self.table = {
            layer: {
                name: (str(t.dtype).removeprefix("torch."), list(t.shape), self._begin + places[layer, name])
                for name, t in tensors.items()
            }
            for layer, tensors in layers.items()
        }
        self._text = json.dumps(self.table, separators=(",", ":")).encode()
        self._seen = Fingerprints()
        if os.fstat(self.descriptor).st_size < self._end:
            os.ftruncate(self.descriptor, self._end)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)
        self.views = {
            (layer, name): _view(self._memory, entry)
            for layer, entries in self.table.items()
            for name, entry in entries.items()
        }

    def read(self) -> Copy | None:
        head = self._head()
        size = os.fstat(self.descriptor).st_size
        if head is None or not _HEAD.size <= head[3] <= head[4] <= size:
            return None
        _, iteration, epoch, begin, end, told = head
        memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        if _sum(memory[_HEAD.size : end]) != told:
            return None
        first, second = bytes(memory[_HEAD.size : begin].tolist()).split(b"\n", 1)
        standing, number, num_parts, partition = json.loads(first)
        table = {int(layer): entries for layer, entries in json.loads(second).items()}
        part = Part(epoch, number, num_parts, tuple(partition))
        return Copy(iteration, part, parsed(Standing, standing), table, memory)


def newest(shelves: Sequence[CopyShelf]) -> list[Copy]:
    """The newest generation of which all parts are whole; empty where there is none."""
    found: dict[tuple[int, int], dict[int, Copy]] = {}
    for shelf in shelves:
        for copy in shelf.copies():
            found.setdefault((copy.iteration, copy.part.epoch), {})[copy.part.number] = copy
    for _, parts in sorted(found.items(), reverse=True):
        if len(parts) == next(iter(parts.values())).part.num_parts:
            return [parts[number] for number in sorted(parts)]
    return []


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """All of them by one call, which lets other threads run meanwhile: one that asks for the interpreter after every
    tensor makes training wait as often."""
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _view(memory: Tensor, entry: StoredTensor) -> Tensor:
    dtype, shape, offset = _DTYPES[entry[0]], entry[1], entry[2]
    count = dtype.itemsize
    for size in shape:
        count *= size
    return memory[offset : offset + count].view(dtype).view(shape)


class Copier:
    """Does one job at a time in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name="vpipe-copier", daemon=True).start()

    def begin(self, job: Callable[[], object]) -> None:
        """Start a job; the one before is done, or is awaited."""
        self.settle()
        self._idle.clear()
        self._jobs.put(job)

    def settle(self) -> None:
        """Until the job is done: before anything writes what it reads. Its failure is raised here."""
        if not self._idle.is_set():
            self._idle.wait()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def watch(self, engine: Engine) -> None:
        """Let an engine wait for the job before its updates."""
        engine.updater.before_update = self.settle

    def _run(self) -> None:
        while True:
            try:
                self._jobs.get()()
            except BaseException as error:
                self._problem = error
            self._idle.set()
