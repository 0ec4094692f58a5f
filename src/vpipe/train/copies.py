"""Copies of a run's state in memory that outlives the ranks.

Every slot of an elastic run has two pieces of memory without a name (memfd). The launcher makes them, the zygote and
all ranks inherit them: whoever is killed, the memory stays while one of them lives. After each update a rank writes
what a checkpoint would have of its layers into the older of its two pieces:

    ┌ head ───────────────────────────────────────────────┬ table ┬ tensors, aligned to 64 ─────
    │ magic, iteration, epoch, sizes, sum of all the rest │ JSON  │ raw bytes
    └─────────────────────────────────────────────────────┴───────┴────────────────────────────

The magic is erased first and written last, and the sum of all words must be right: a copy whose writer died on the way
is none. Weights and optimizer state are copied by a thread beside the next forwards (``Copier``): nothing writes them
until the next update. Buffers are copied at once, since a forward may change them.

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

    def keep(self, iteration: int, epoch: int) -> None:
        """The run goes on from this generation: the copy that is here is overwritten last. What is newer here was
        written by a rank that had come further than others, and is worth nothing now."""
        self._last = next((piece for piece in self._pieces if piece.order() == (iteration, epoch)), None)

    def last(self) -> tuple[int, int]:
        """Which of the pieces was written last, and its descriptor."""
        assert self._last is not None
        return self._pieces.index(self._last), self._last.descriptor

    def write(self, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey] = ()) -> int:
        """Keep the state after an update, beside the one before; bytes that were copied. What is ``frozen`` is copied
        once."""
        return self.begin(standing, part, layers, frozen)()

    def begin(
        self, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey] = ()
    ) -> Callable[[], int]:
        """The same in two parts: what forwards may change is copied now, the rest by the call that is returned, which
        another thread may make as long as nothing writes weights and optimizer state."""
        piece = next(piece for piece in self._pieces if piece is not self._last)
        finish = piece.begin(standing, part, layers, frozen)
        self._last = piece
        return finish

    def find(self, tensor: Tensor) -> tuple[int, StoredTensor] | None:
        """Where the newest copy has a tensor that it was made of, if they are still the same: its piece and entry."""
        piece = self._last
        key = piece.origins.get(tensor.data_ptr()) if piece is not None else None
        if piece is None or key is None:
            return None
        copied = piece.views[key]
        same = copied.dtype == tensor.dtype and copied.shape == tensor.shape and _is_equal(copied, tensor)
        return (self._pieces.index(piece), piece.table[key[0]][key[1]]) if same else None

    def at(self, piece: int, entry: StoredTensor) -> Tensor:
        """What a piece has at a place."""
        descriptor = self._pieces[piece].descriptor
        memory = torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
        return _view(memory, entry).clone()

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
        self._frozen: set[TensorKey] = set()
        self.origins: dict[int, TensorKey] = {}
        """Address of a tensor → which of the copied it is."""

    def order(self) -> tuple[int, int]:
        """(iteration, epoch); nothing, or a torn copy, is older than any."""
        head = self._head()
        return head[1:3] if head is not None else (-1, -1)

    def _head(self) -> tuple[bytes, int, int, int, int, int] | None:
        data = os.pread(self.descriptor, _HEAD.size, 0)
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            return None
        return _HEAD.unpack(data)

    def begin(self, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey]) -> Callable[[], int]:
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
        later: list[tuple[Tensor, Tensor]] = []
        for layer, tensors in layers.items():
            for name, tensor in tensors.items():
                if (layer, name) not in self._frozen or (layer, name) not in frozen:
                    (now if name.startswith(BUFFER) else later).append((self.views[layer, name], tensor))
        _copy(now)
        self._frozen = set(frozen)
        self.origins = {t.data_ptr(): (layer, name) for layer, tensors in layers.items() for name, t in tensors.items()}
        head = (standing.iteration, part.epoch, self._begin, self._end)
        memory = self._memory
        size = sum(place.nbytes for place, _ in (*now, *later))

        def finish() -> int:
            _copy(later)
            facts = _HEAD.pack(b"", *head, _sum(memory[_HEAD.size : head[-1]]))
            os.pwrite(self.descriptor, facts[len(_MAGIC) :], len(_MAGIC))
            os.pwrite(self.descriptor, _MAGIC, 0)
            return size

        return finish

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
        self._frozen = set()
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
        return Copy(iteration, part, Standing.parse(standing), table, memory)


class HeldCopies:
    """The copies of a machine's ranks, for layers that move between them (``runtime.moves.held``)."""

    def __init__(self, shelves: Sequence[CopyShelf], slot: int) -> None:
        self._shelves, self._slot = shelves, slot

    def find(self, tensor: Tensor) -> list[Any] | None:
        found = self._shelves[self._slot].find(tensor)
        return None if found is None else [self._slot, found[0], *found[1]]

    def read(self, place: Sequence[Any]) -> Tensor:
        slot, piece, dtype, shape, offset = place
        shelf: CopyShelf = self._shelves[slot]
        return shelf.at(piece, (dtype, shape, offset))


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


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """By their bytes: a NaN is what it is."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


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
