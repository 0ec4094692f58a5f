"""Programs of the user's own, as entries of the catalogue: a ``Program``, or a CSV file with one.

    Pipeline(…, schedule="my.csv")      vpipe train job.yaml --scheduler my.csv      parallel.scheduler: my.csv

Whoever asks a schedule for its traits, or builds it, asks an ``Entry``. A program has its numbers of ranks and of
microbatches in itself, so its entry builds for these and refuses others in words. A training program that says nothing
of updates (torch's dumps do not) updates every stage once at its end.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.entry import Entry
from vpipe.schedule.lower import is_lowered, reduce
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import WEIGHT_GRADIENT, updates_once
from vpipe.schedule.text import read_csv


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
    """Once for each content: everybody who asks for a trait asks by the name."""
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
    if not _trains(kinds):
        raise UserError(f"{name} has forwards and no backward, so it trains nothing; add B, or I and W, for every F")
    closed = program.with_rows(
        (*row, *(Action(stage, Kind.STEP) for stage in stages))
        for row, stages in zip(program.rows, program.placement.stages_of, strict=True)
    )
    return reduce(closed) if is_lowered(program) else closed


def _trains(kinds: Collection[Kind]) -> bool:
    return any(kind in WEIGHT_GRADIENT or kind is Kind.I for kind in kinds)


def short_name(name: str) -> str:
    """A word for files and headings: of a path, the file's own name without its ending."""
    return "".join(sign if sign.isalnum() or sign in "_.+-" else "_" for sign in Path(name).stem or "program")
