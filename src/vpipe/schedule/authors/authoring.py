"""What every author of a schedule needs: four letters, one check, one way to close a batch, one line of the catalogue.

An author writes, for each rank, the order of ``F B I W``; ``batch`` adds the update of every stage the rank holds and
makes the program. ``one_forward_one_backward`` is the order that half of the catalogue is a variation of. An ``Entry``
says of an author what its schedule is, what it needs and what it costs; the table is ``catalog_entries``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program

F, B, I, W, STEP = Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP


def batch(placement: Placement, num_microbatches: int, rows: Iterable[Iterable[Action]]) -> Program:
    """The program of one batch: each rank's actions, then one update of every stage it holds."""
    closed = (
        (*row, *(Action(stage, STEP) for stage in stages))
        for row, stages in zip(rows, placement.stages_of, strict=True)
    )
    return Program(tuple(closed), placement, num_microbatches)


def each(stage: int, kind: Kind, num_microbatches: int) -> list[Action]:
    """One action for every microbatch in order. (``Action(…)`` is a Python function: large programs have millions.)"""
    return list(map(tuple.__new__, repeat(Action), zip(repeat(stage), repeat(kind), range(num_microbatches))))


def one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    """``num_ahead`` forwards, then a forward and a backward in turn, then the backwards that are left.

    num_ahead = 2, four forwards:   F F F B F B B B
    """
    num_pairs = max(0, len(forwards) - num_ahead)
    pairs = zip(forwards[num_ahead:], backwards, strict=False)
    return [*forwards[:num_ahead], *chain.from_iterable(pairs), *backwards[num_pairs:]]


def unroll(down: int, up: int, num_microbatches: int, phases: Iterable[tuple[int, str]]) -> list[Action]:
    """A rank's row on a V, from phases such as ``(3, "f I W")``: three times these letters.

    Upper case is the stage on the way down the ranks, lower case the one on the way up. F takes the stage's next
    microbatch, B and I its next backward, W the oldest weight gradient that the stage owes, x the oldest that either
    owes. Microbatches from ``num_microbatches`` on are left out: phases of a full pipe also serve a shorter batch.
    """
    count: Counter[tuple[int, bool]] = Counter()
    owed: list[Action] = []
    actions = []
    for times, letters in phases:
        for letter in letters.split() * times:
            stage = down if letter.isupper() else up
            if letter in "xWw":
                action = next(each for each in owed if letter == "x" or each.stage == stage)
                owed.remove(action)
            else:
                kind = Kind(letter.upper())
                action = Action(stage, kind, count[stage, kind is F])
                count[stage, kind is F] += 1
                if kind is I:
                    owed.append(Action(stage, W, action.microbatch))
            if action.microbatch < num_microbatches:
                actions.append(action)
    return actions


def check_flags(**flags: object) -> None:
    """Refuse anything but True and False, by name."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{name} must be true or false, not {flag!r}")


def check_counts(**counts: object) -> None:
    """Refuse anything but whole numbers of at least 1, by name."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {count!r}")


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
COSTS, MEMORY_LIMIT = "costs", "memory_limit"
"""Options of a schedule that is made for given costs: one (F, I, W) per stage; microbatches that a rank may hold."""
REPLICAS = "replicas"
"""The option of a schedule that may have other numbers of replicas on every stage."""


@dataclass(frozen=True)
class Entry:
    """One schedule.

    Formulas use p ranks, m microbatches, v stages per rank, and F, I, W, T = F+I+W of one rank's whole share.

    Words: docs/glossary.md.
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
    per_stage: tuple[str, ...] = ()
    """Options that say something about each stage: they hold for one number of stages."""
    num_microbatches: int | None = None
    """The only m that it builds for: a program of the user's own has its number in itself."""
    for_auto: bool = True
    """Whether a search over the catalogue tries it: not what is for debugging, or plans on its own and is slow."""
    runs_threads: bool = False
    """Whether the name by which the user asked for it is one of ``threaded_names``."""

    @property
    def asynchronous(self) -> bool:
        """Whether units of several updates are in flight together."""
        return self.mode == "asp"

    @property
    def takes_replicas(self) -> bool:
        """Whether it places replicas itself, on every stage its own number; others run several times side by side."""
        return REPLICAS in self.options

    def options_for(self, num_ranks: int, times: Mapping[str, Any], memory: float | None = None) -> dict[str, Any]:
        """What a schedule that is made for given costs is told of them: one (F, I, W) per stage, the latency, and how
        many microbatches a rank may hold."""
        known, found = self.options, dict[str, Any]()
        if COSTS in known:
            share = (times.get("forward", 1.0), times.get("input_grad", 1.0), times.get("weight_grad", 1.0))
            scale = times.get("scale") or [1.0] * num_ranks
            found[COSTS] = [tuple(part * factor for part in share) for factor in scale]
            found["latency"] = times.get("latency", 0.0)
        if memory is not None and MEMORY_LIMIT in known:
            found[MEMORY_LIMIT] = memory
        return found

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

    def batches(
        self, num_ranks: int, num_microbatches: int, count: int, stages_per_rank: int | None = None, **options: Any
    ) -> Program:
        """The program of ``count`` batches without a drain between them; of one where it drains after each."""
        if self.chains is Chain.BATCHES:
            options[BATCHES] = count
        elif self.asynchronous:
            num_microbatches *= count
        return self.build(num_ranks, num_microbatches, stages_per_rank, **options)
