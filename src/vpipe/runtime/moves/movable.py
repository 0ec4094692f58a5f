"""The side of a pipeline that lets other ranks hold its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vpipe.runtime.builder import Builder
from vpipe.runtime.engine import Engine
from vpipe.runtime.holdings import Holdings
from vpipe.runtime.job import Compiled
from vpipe.runtime.moves import moving
from vpipe.runtime.moves.ahead import Ahead, Notice
from vpipe.runtime.moves.held import HeldTensors
from vpipe.runtime.moves.moving import Moved
from vpipe.runtime.options import Memory
from vpipe.runtime.programs import Programs
from vpipe.schedule.placement import Layout


class Movable(Holdings, ABC):
    """Moves layers between two steps; what nothing writes goes ahead, beside training."""

    builder: Builder
    programs: Programs
    _compiled: dict[tuple[int, int], Compiled]
    _ahead: Ahead | None
    held: HeldTensors | None
    """Copies that all ranks can read, on every rank or on none: what is in them is not sent when layers move."""

    def prepare_move(self, layout: Layout, *, notice: Notice = lambda step: None) -> bool:
        """Send ahead, beside training, what a move to ``layout`` needs and nothing writes: frozen weights. Whether
        there are any; ``move`` to the same layout takes what has come. Between two steps, on every rank."""
        self._forget_ahead()
        host = self.builder.wires.host
        if self.held is not None or host is None or layout.num_ranks != self.programs.flow.layout.num_ranks:
            return False
        ahead = Ahead(self.engines[0], layout, self.builder.apart(), host.patience, notice)
        if any(self.gather("some" if ahead.has_any else "")):
            self._ahead = ahead
            ahead.start()
        return self._ahead is not None

    def is_prepared(self) -> bool:
        """Whether all that was to be sent ahead has been, on every rank. All ranks ask at the same place."""
        return not any(self.gather("" if self._ahead is None or self._ahead.is_done else "not yet"))

    def move(self, layout: Layout, memory: Memory | None = None, *, notice: Notice = lambda step: None) -> Moved:
        """Let other ranks hold the layers, from now on as ``layout`` says; training goes on as if nothing had happened.
        ``memory`` says what is recomputed and swapped there, where that changes too.

        Between two steps, on every rank: an asynchronous schedule has drained then. Where it cannot be done, the old
        layout stays, on all ranks, and a ``UserError`` says why. ``notice`` is told every step of the protocol.
        """
        self._require_whole()
        ahead = self._ahead if self._ahead is not None and self._ahead.layout == layout else None
        layout = moving.admitted(self.engines, layout)
        try:
            with self.builder.with_memory(memory):
                programs = self.builder.programs(layout, self.programs.spec)
                programs.training()
                engines, moved = moving.move(
                    self.builder,
                    self.engines,
                    programs,
                    self.gather,
                    lambda do: self._on_all(do),
                    notice,
                    ahead,
                    self.held,
                )
        finally:
            self._forget_ahead()
        self._hold(programs, engines)
        self._compiled.clear()
        return moved

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    @abstractmethod
    def _hold(self, programs: Programs, engines: list[Engine]) -> None: ...

    @abstractmethod
    def gather(self, text: str) -> list[str]: ...

    @abstractmethod
    def _on_all(self, call: Callable[[Engine], Any]) -> list[Any]: ...

    @abstractmethod
    def _require_whole(self) -> None: ...
