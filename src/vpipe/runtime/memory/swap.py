"""The swap lane of a rank: a thread that carries saved tensors out of memory and back, while the rank computes.

    compute   F0  F1   F2   F3  …   B0   B1        OUT hands a unit's bytes over and goes on
    swap        OUT0 OUT1 OUT2 … IN0 IN1           IN asks for them early; the backward waits until they are there

The lane takes its moves in the order of the program. An OUT waits until the OUT before it has left, so that one unit is
in use and one on its way, however slow the disk is: memory that is promised to be free must be. The thread lives from
the first move of a step to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter_ns
from typing import Any, ClassVar, Protocol

import torch
from torch import UntypedStorage

from vpipe.errors import UserError
from vpipe.runtime.memory.swap_store import FileStore

MIN_BYTES = 16 * 1024
"""Storages below this stay in memory."""


def worth_moving(storage: UntypedStorage) -> bool:
    return storage.nbytes() >= MIN_BYTES


class Watch(Protocol):
    """Sees what leaves memory and comes back: a profiler sees the frees of its own thread alone."""

    def leaving(self, storage: UntypedStorage) -> None:
        """The lane is about to let go of this."""

    def room(self, num_bytes: int) -> UntypedStorage:
        """Memory for what comes back."""

    def resized(self, num_bytes: int) -> None:
        """A storage that stays has taken so many bytes, or freed them."""


class Swappable:
    """A storage that may leave memory, or the room for it.

    ``same_object``: others hold views of the storage (an old weight version), so it stays and only its memory goes.
    """

    watch: ClassVar[Watch | None] = None
    """What counts the bytes of this process, if anything does."""

    def __init__(self, storage: UntypedStorage, *, same_object: bool = False) -> None:
        self._storage: UntypedStorage | None = storage
        self._bytes, self._device, self._same = storage.nbytes(), storage.device, same_object
        self.place: Any = None
        """Where the bytes wait while they are out, as the lane that carries them says."""

    def full(self) -> UntypedStorage:
        """The storage, with its bytes."""
        assert self._storage is not None, "the bytes are out: IN must come first"
        return self._storage

    def empty(self) -> None:
        """The bytes are elsewhere: let go of the memory."""
        if self._same:
            self.full().resize_(0)
            if Swappable.watch is not None:
                Swappable.watch.resized(-self._bytes)
            return
        if Swappable.watch is not None:
            Swappable.watch.leaving(self.full())
        self._storage = None

    def refill(self) -> UntypedStorage:
        """Memory for the bytes to come back to; torch's own, so that it is aligned as that of the forward was."""
        watch = Swappable.watch if self._device.type == "cpu" else None
        if self._same:
            self.full().resize_(self._bytes)
            if watch is not None:
                watch.resized(self._bytes)
        elif watch is not None:
            self._storage = watch.room(self._bytes)
        else:
            self._storage = torch.empty(self._bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        return self.full()


@dataclass
class Passage:
    """One passage of the lane, and what it came to."""

    what: str
    done: Future[None] = field(default_factory=Future)
    begin: int = 0
    end: int = 0
    bytes: int = 0
    events: tuple[torch.Event, torch.Event] | None = None
    """On a device, where the passage begins and ends."""

    def wait(self) -> None:
        """What follows may use what was moved."""
        self.done.result()


class Swapper:
    """The swap lane of one rank."""

    def __init__(self) -> None:
        self._lane: ThreadPoolExecutor | None = None
        self._last_out: Passage | None = None
        self._failure: BaseException | None = None

    @cached_property
    def _store(self) -> FileStore:
        """Where the bytes of main memory wait."""
        return FileStore()

    def out(self, swappables: Sequence[Swappable], what: str) -> Passage:
        """Carry the swappables' bytes out; ``what`` names them in errors."""
        if self._last_out is not None:
            self._last_out.done.result()
        self._last_out = self._start(self._carry_out, swappables, what)
        return self._last_out

    def fetch(self, swappables: Sequence[Swappable], what: str) -> Passage:
        """Bring the bytes back."""
        return self._start(self._carry_in, swappables, what)

    def _start(self, carry: Callable[..., None], swappables: Sequence[Swappable], what: str) -> Passage:
        if self._lane is None:
            self._lane = ThreadPoolExecutor(1, "vpipe-swap")
        move = Passage(what)
        move.done = self._lane.submit(self._carry, carry, swappables, move)
        return move

    def _carry(self, carry: Callable[..., None], swappables: Sequence[Swappable], move: Passage) -> None:
        if self._failure is not None:
            raise self._failure
        move.begin = perf_counter_ns()
        try:
            for swappable in swappables:
                carry(swappable, move)
        except UserError as error:
            self._failure = UserError(f"{move.what}: {error}")
            raise self._failure from None
        except BaseException as error:
            error.add_note(f"vpipe: this happened while swapping {move.what}")
            self._failure = error
            raise
        move.end = perf_counter_ns()

    def _carry_out(self, swappable: Swappable, move: Passage) -> None:
        storage = swappable.full()
        swappable.place = self._store.put(storage)
        move.bytes += storage.nbytes()
        del storage
        swappable.empty()

    def _carry_in(self, swappable: Swappable, move: Passage) -> None:
        storage = swappable.refill()
        self._store.get(swappable.place, storage)
        swappable.place = None
        move.bytes += storage.nbytes()

    def settle(self) -> None:
        """The step is over: nothing is out, and the thread ends."""
        if self._lane is not None:
            self._lane.shutdown()
            self._lane = None
        last, self._last_out = self._last_out, None
        if last is not None:
            last.done.result()
        self._store.clear()

    def abandon(self) -> None:
        """The step has failed: forget what is out."""
        if self._lane is not None:
            self._lane.shutdown(cancel_futures=True)
            self._lane = None
        self._last_out = self._failure = None
        self._store.clear()

    def close(self) -> None:
        self.abandon()
        self._store.close()
