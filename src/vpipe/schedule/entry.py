"""One line of the catalogue: what a schedule is, what it needs, what it costs, and the function that writes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.schedule.authors.authoring import check_counts
from vpipe.schedule.program import Program

Author = Callable[..., object]
"""(num_ranks, num_microbatches[, stages_per_rank], *, options) -> Program; what another package returns is checked."""


class Chain(StrEnum):
    """How an entry writes several batches that follow each other without a drain."""

    NOT = "not"
    """It does not: it drains after each batch, or its program is what it is."""
    UNITS = "units"
    """As so many more microbatches."""
    BATCHES = "batches"
    """By its option ``num_batches``."""


BATCHES = "num_batches"
POST_VALIDATION = "post_validation"
"""The option of a synchronous schedule whose ranks may agree on updates afterwards (``post_validation``)."""


@dataclass(frozen=True)
class Entry:
    """One schedule.

    Formulas use p ranks, m microbatches, v stages per rank, and F, I, W, T = F+I+W of one rank's whole share.
    """

    name: str
    author: Author
    summary: str
    mode: str = "bsp"
    """``bsp``: one update per batch, after a flush. ``asp``: units of several updates are in flight together."""
    needs: str = "any p and m"
    bubble: str = "not stated"
    """Makespan beyond the ideal m·T."""
    memory: str = "not stated"
    """Peak activations; the unit is one microbatch on one rank's share."""
    weight_copies: str = "1"
    aliases: tuple[str, ...] = ()
    stages_per_rank: int = 1
    """The default v."""
    any_stages_per_rank: bool = False
    """Whether v is free. Where it is not, only the default is accepted."""
    blocking: bool = False
    """Whether the runtime is to end every transfer before it goes on (``naive``)."""
    threaded_names: tuple[str, ...] = ()
    """Names under which a rank runs a worker thread per microbatch (OurGPipe's ``async_threaded`` is gpipe so run)."""
    two_ways: bool = False
    """Whether units go in both directions: a rank then holds stages of both ends, each on two ranks."""
    chains: Chain = Chain.NOT
    """How several batches run without a drain between them."""
    num_microbatches: int | None = None
    """The only m that it builds for: a program of the user's own has its number in itself."""
    runs_threads: bool = False
    """Whether the name by which the user asked for it is one of ``threaded_names``."""

    @property
    def asynchronous(self) -> bool:
        """Whether units of several updates are in flight together."""
        return self.mode == "asp"

    def chains_with(self, options: Mapping[str, Any]) -> Chain:
        """The same with these options: batches that are agreed on afterwards follow each other."""
        return Chain.BATCHES if options.get(POST_VALIDATION) is True else self.chains

    @property
    def options(self) -> dict[str, Any]:
        """Option → default."""
        parameters = inspect.signature(self.author).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    def check_options(self, names: Iterable[str]) -> None:
        """Refuse options that the schedule does not have. What their values may be, its author says."""
        known = self.options
        for option in names:
            if option not in known:
                has = f"its options are {', '.join(known)}" if known else "it has none"
                raise UserError(f"{self.name} has no option {option!r}{nearest(option, known)}; {has}")

    def build(
        self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, **options: Any
    ) -> Program:
        """The program, or a ``UserError`` that says in one sentence what the schedule needs."""
        check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
        self.check_options(options)
        counts = [num_ranks, num_microbatches]
        if stages_per_rank is not None:
            check_counts(stages_per_rank=stages_per_rank)
            if self.any_stages_per_rank:
                counts.append(stages_per_rank)
            elif stages_per_rank != self.stages_per_rank:
                noun = "stage" if self.stages_per_rank == 1 else "stages"
                raise UserError(f"{self.name} has {self.stages_per_rank} {noun} per rank, not {stages_per_rank}")
        program = self.author(*counts, **options)
        if not isinstance(program, Program):
            raise UserError(f"the schedule {self.name!r} must return a Program, not {type(program).__name__}")
        return program
