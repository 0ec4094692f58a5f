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
from time import perf_counter_ns
from typing import Any, Protocol

from torch import UntypedStorage

from vpipe.errors import UserError
from vpipe.runtime.memory.swap_store import FileStore

MIN_BYTES = 16 * 1024
"""Storages below this stay in memory."""


def worth_moving(storage: UntypedStorage) -> bool:
    return storage.nbytes() >= MIN_BYTES


class Cargo(Protocol):
    """One storage that may leave."""

    def full(self) -> UntypedStorage:
        """The storage, with its bytes."""

    def empty(self) -> None:
        """The bytes are elsewhere: let go of the memory."""

    def refill(self) -> UntypedStorage:
        """Memory for the bytes to come back to."""


@dataclass
class Parcel:
    """Storages that leave and come back together."""

    cargo: Sequence[Cargo]
    places: list[Any] = field(default_factory=list)
    """Where each storage waits, as the lane that carries it says."""


@dataclass
class Move:
    """One passage of the lane, and what it came to."""

    what: str
    done: Future[None] = field(default_factory=Future)
    begin: int = 0
    end: int = 0
    bytes: int = 0

    def wait(self) -> None:
        """What follows may use what was moved."""
        self.done.result()


class Swapper:
    """The swap lane of one rank."""

    def __init__(self) -> None:
        self._store = FileStore()
        self._lane: ThreadPoolExecutor | None = None
        self._last_out: Move | None = None
        self._failure: BaseException | None = None

    def out(self, parcels: Sequence[Parcel], what: str) -> Move:
        """Carry the parcels out; ``what`` names them in errors."""
        if self._last_out is not None:
            self._last_out.done.result()
        self._last_out = self._start(self._carry_out, parcels, what)
        return self._last_out

    def fetch(self, parcels: Sequence[Parcel], what: str) -> Move:
        """Bring the parcels back."""
        return self._start(self._carry_in, parcels, what)

    def _start(self, carry: Callable[..., None], parcels: Sequence[Parcel], what: str) -> Move:
        if self._lane is None:
            self._lane = ThreadPoolExecutor(1, "vpipe-swap")
        move = Move(what)
        move.done = self._lane.submit(self._carry, carry, parcels, move)
        return move

    def _carry(self, carry: Callable[..., None], parcels: Sequence[Parcel], move: Move) -> None:
        if self._failure is not None:
            raise self._failure
        move.begin = perf_counter_ns()
        try:
            for parcel in parcels:
                carry(parcel, move)
        except UserError as error:
            self._failure = UserError(f"{move.what}: {error}")
            raise self._failure from None
        except BaseException as error:
            error.add_note(f"vpipe: this happened while swapping {move.what}")
            self._failure = error
            raise
        move.end = perf_counter_ns()

    def _carry_out(self, parcel: Parcel, move: Move) -> None:
        for each in parcel.cargo:
            storage = each.full()
            parcel.places.append(self._store.put(storage))
            move.bytes += storage.nbytes()
            del storage
            each.empty()

    def _carry_in(self, parcel: Parcel, move: Move) -> None:
        for each, place in zip(parcel.cargo, parcel.places, strict=True):
            storage = each.refill()
            self._store.get(place, storage)
            move.bytes += storage.nbytes()
        parcel.places.clear()

    def settle(self) -> None:
        """The step is over: nothing is out, and the thread ends."""
        if self._lane is not None:
            self._lane.shutdown()
            self._lane = None
        last, self._last_out = self._last_out, None
        if last is not None:
            last.done.result()

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
