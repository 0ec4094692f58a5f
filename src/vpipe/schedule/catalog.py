"""The schedules by name, and the choice of one (``ScheduleSpec``).

    build("1f1b", 4, 8)                      4 ranks, 8 microbatches
    build("interleaved", 4, 8, 2)            2 stages per rank
    build("pipedream", 4, 32, update_interval=2)
    build("my.csv", 4, 8)                    a program of the user's own

The table itself is ``catalog_entries.py``. Options of a schedule are the keyword-only parameters of its function, so
that an unread option cannot exist. A schedule of another package is entered in
``vpipe.registry.SCHEDULE_REGISTRY`` (or offered by an entry point of the group ``vpipe.schedules``), as an ``Entry`` or
as a plain function ``(num_ranks, num_microbatches, …) -> Program``, and is then built by the same call.

A program of the user's own, a ``Program`` or a CSV file with one, is an entry too: what asks a schedule for its
traits, or builds it, asks an ``Entry``. It has its numbers of ranks and of microbatches in itself, so its entry builds
for these and refuses others in words. One that says nothing of updates (torch's dumps do not) updates every stage once
at its end.

A schedule is chosen in several places (a config, ``Pipeline``, a test before any rank starts); what its program, its
placement and its traits are, all of them ask the choice.

Words: docs/glossary.md.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import BATCHES, REPLICAS, Chain, Entry
from vpipe.schedule.catalog_entries import CATALOG
from vpipe.schedule.lower import is_lowered, reduce
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, read_csv
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import WEIGHT_GRADIENT, updates_once

__all__ = ["Entry", "ScheduleSpec", "build", "entries", "find", "get"]

_taken = SCHEDULE_REGISTRY.list_registered()  # once: to look for entry points is to look at every package
for _each in CATALOG:
    if _each.name not in _taken:
        SCHEDULE_REGISTRY.register(_each.name)(_each)

SCHEDULE_REGISTRY.aliases |= {alias: each.name for each in CATALOG for alias in each.aliases}
_NAMES = {name.lower(): each.name for each in CATALOG for name in (each.name, *each.aliases)}
"""Name or alias in lower case → name."""


def build(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, **options: Any
) -> Program:
    """The program of the schedule ``name`` (or an alias of it)."""
    return get(name).build(num_ranks, num_microbatches, stages_per_rank, **options)


def get(name: str) -> Entry:
    """The entry of that name or alias, whatever its case, or of a CSV file; an unknown name is answered with the
    nearest."""
    if names_file(str(name)):
        return from_file(str(name))
    found = _NAMES.get(str(name).lower(), name)
    if found in SCHEDULE_REGISTRY:
        entry = _entry(found)
        return replace(entry, runs_threads=True) if str(name).lower() in entry.threaded_names else entry
    known = SCHEDULE_REGISTRY.list_registered()
    hint = nearest(str(name).lower(), [*_NAMES, *known]) or ";"
    if "." in str(name):
        hint = "; a file with one ends in .csv;"
    raise UserError(f"there is no schedule {name!r}{hint} known: {', '.join(known)}")


def find(schedule: str | Program) -> Entry:
    """The entry of whatever a user may give as a schedule."""
    return entry_of(schedule) if isinstance(schedule, Program) else get(schedule)


def entries() -> list[Entry]:
    """The catalogue in its own order, then the schedules of other packages, by name."""
    own = [each.name for each in CATALOG]
    others = [name for name in SCHEDULE_REGISTRY.list_registered() if name not in own]
    return [_entry(name) for name in own] + [_or_broken(name) for name in others]


def _entry(name: str) -> Entry:
    """What the registry has, made an entry: a plain function is described by the first line of its docstring."""
    found = SCHEDULE_REGISTRY.get(name)
    if isinstance(found, Entry):
        return found
    if not callable(found):
        raise UserError(
            f"the schedule {name!r} must be a function (num_ranks, num_microbatches) -> Program, not {found!r}"
        )
    summary = (inspect.getdoc(found) or "a schedule of another package").splitlines()[0]
    free = inspect.signature(found).parameters.get("stages_per_rank")
    default = free.default if free is not None and isinstance(free.default, int) else 1
    return Entry(name, found, summary, stages_per_rank=default, any_stages_per_rank=free is not None)


def _or_broken(name: str) -> Entry:
    """A plug-in that does not load is listed with the reason, and raises it only when it is built."""
    try:
        return _entry(name)
    except UserError as error:
        reason = error

        def author(num_ranks: int, num_microbatches: int) -> Program:
            raise reason

        return Entry(name, author, f"cannot be used: {reason}")


def names_file(name: str) -> bool:
    """Whether what a user calls a schedule is the path of a file."""
    return name.lower().endswith(".csv") or "/" in name


def from_file(path: str) -> Entry:
    """The entry of a CSV file."""
    try:
        seen = os.stat(path)
    except OSError as error:
        raise UserError(f"the schedule {path} cannot be read: {error.strerror}; is the path right?") from None
    return _read(path, seen.st_mtime_ns, seen.st_size)


@lru_cache(maxsize=16)
def _read(path: str, changed: int, size: int) -> Entry:
    """Read a file once for each content: traits are asked for by its name."""
    del changed, size
    return entry_of(read_csv(path), path)


def entry_of(program: Program, name: str = "the program") -> Entry:
    """An entry that builds this program and no other."""
    whole = with_updates(program, name)

    def author(num_ranks: int, num_microbatches: int) -> Program:
        for noun, has, wanted in (
            ("ranks", whole.num_ranks, num_ranks),
            ("microbatches", whole.num_microbatches, num_microbatches),
        ):
            if has != wanted:
                raise UserError(f"{name} is for {has} {noun}, but there are {wanted}; give it {has} {noun}")
        return whole

    return Entry(
        name,
        author,
        "a program of the user's own",
        mode="bsp" if updates_once(whole) else "asp",
        needs=f"p = {whole.num_ranks}, m = {whole.num_microbatches}",
        stages_per_rank=max(map(len, whole.placement.stages_of)),
        num_microbatches=whole.num_microbatches,
    )


def with_updates(program: Program, name: str = "the program") -> Program:
    """A training program without STEP, with one of every stage at the end of its row."""
    kinds = {action.kind for _, action in program.actions()}
    if Kind.STEP in kinds:
        return program
    if kinds.isdisjoint({*WEIGHT_GRADIENT, Kind.I}):
        raise UserError(f"{name} has forwards and no backward, so it trains nothing; add B, or I and W, for every F")
    closed = program.with_rows(
        (*row, *(Action(stage, Kind.STEP) for stage in stages))
        for row, stages in zip(program.rows, program.placement.stages_of, strict=True)
    )
    return reduce(closed) if is_lowered(program) else closed


def short_name(name: str) -> str:
    """A word for files and headings: of a path, the file's own name without its ending."""
    return "".join(sign if sign.isalnum() or sign in "_.+-" else "_" for sign in Path(name).stem or "program")


@dataclass(frozen=True)
class ScheduleSpec:
    """What the user chose."""

    schedule: str | Program
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int | None = None
    replicas: int | Sequence[int] = 1
    options: Mapping[str, Any] | None = None
    entry: Entry = field(init=False, compare=False, repr=False)
    """The catalogue's entry, or that of the user's own program: it has the traits."""
    synchronous: bool = field(init=False, compare=False, repr=False)
    """Whether every unit of a step reads the same weights and each stage updates once at the end."""
    chains: Chain = field(init=False, compare=False, repr=False)
    """How several batches run without a drain between them."""

    def __post_init__(self) -> None:
        entry = find(self.schedule)
        traits = {
            "entry": entry,
            "synchronous": not entry.asynchronous,
            "chains": entry.chains,
        }
        for name, value in traits.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_run(
        cls,
        name: str,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int | None,
        replicas: int | Sequence[int],
        options: Mapping[str, Any],
        num_readers: int,
    ) -> ScheduleSpec:
        """The choice of a run whose ``num_readers`` replicas read ``num_microbatches`` units each: where units of
        several updates are in flight together those of all are counted, and a chain of batches begins as one."""
        entry = get(name)
        entry.check_options(options)
        units = num_microbatches * (num_readers if entry.chains is Chain.UNITS else 1)
        if entry.chains is Chain.BATCHES:
            options = {**options, BATCHES: 1}
        return cls(name, num_ranks, units, stages_per_rank, replicas, options)

    @cached_property
    def program(self) -> Program:
        """The author's program: only F, B, I, W and STEP (or whatever a program of the user's own says)."""
        options = dict(self.options or {})
        replicas = self._replicas()
        ranks, copies = self.num_ranks, 1
        if replicas is not None and self.entry.takes_replicas:
            options[REPLICAS] = replicas
        elif replicas is not None:
            if len(set(replicas)) > 1:
                raise UserError(
                    f"{self.entry.name} has the same number of replicas on every stage, not {list(replicas)}; "
                    f"give one number, or use pipedream"
                )
            ranks, copies = len(replicas), replicas[0]
        program = self.entry.build(ranks, self.num_microbatches, self.stages_per_rank, **options)
        return replicate(program, copies) if copies > 1 else program

    def _replicas(self) -> tuple[int, ...] | None:
        """Replicas per rank of one pipeline; ``None`` where nothing is replicated."""
        if self.replicas == 1:
            return None
        if not isinstance(self.replicas, int):
            replicas = tuple(self.replicas)
            if sum(replicas) != self.num_ranks:
                raise UserError(
                    f"replicas {list(replicas)} need {sum(replicas)} ranks, but there are {self.num_ranks}; "
                    "make the sum equal"
                )
            return None if set(replicas) == {1} else replicas
        if self.replicas < 1 or self.num_ranks % self.replicas:
            raise UserError(
                f"{self.num_ranks} ranks cannot hold {self.replicas} replicas of every stage; the number must divide"
            )
        return (self.replicas,) * (self.num_ranks // self.replicas)

    @property
    def placement(self) -> Placement:
        return self.program.placement

    def describe(self) -> str:
        return f"{self.entry.name} on {self.num_ranks} ranks"
