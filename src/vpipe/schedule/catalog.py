"""The schedules by name: what each is, what it needs, what it costs, and how to build it.

    build("1f1b", 4, 8)                      4 ranks, 8 microbatches
    build("interleaved", 4, 8, 2)            2 stages per rank
    build("pipedream", 4, 32, update_interval=2)

The table itself is ``catalog_entries.py``. Options of a schedule are the keyword-only parameters of its function, so
that an option which nobody reads cannot exist. A schedule of another package is entered in
``vpipe.registry.SCHEDULE_REGISTRY`` (or offered by an entry point of the group ``vpipe.schedules``), as an ``Entry`` or
as a plain function, and is then built by the same call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.authoring import check_counts
from vpipe.schedule.program import Program

Author = Callable[..., Program]


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

    @property
    def options(self) -> dict[str, Any]:
        """Option → default."""
        parameters = inspect.signature(self.author).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    def build(
        self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, **options: Any
    ) -> Program:
        """The program, or a ``UserError`` that says in one sentence what the schedule needs."""
        check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
        known = self.options
        for option in options:
            if option not in known:
                has = f"its options are {', '.join(known)}" if known else "it has none"
                raise UserError(f"{self.name} has no option {option!r}{nearest(option, known)}; {has}")
        if stages_per_rank is None:
            return self.author(num_ranks, num_microbatches, **options)
        check_counts(stages_per_rank=stages_per_rank)
        if self.any_stages_per_rank:
            return self.author(num_ranks, num_microbatches, stages_per_rank, **options)
        if stages_per_rank != self.stages_per_rank:
            noun = "stage" if self.stages_per_rank == 1 else "stages"
            raise UserError(f"{self.name} has {self.stages_per_rank} {noun} per rank, not {stages_per_rank}")
        return self.author(num_ranks, num_microbatches, **options)


def build(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, **options: Any
) -> Program:
    """The program of the schedule ``name`` (or an alias of it)."""
    return get(name).build(num_ranks, num_microbatches, stages_per_rank, **options)


def get(name: str) -> Entry:
    """The entry of that name or alias, whatever its case; an unknown name is answered with the nearest."""
    aliases = {alias.lower(): each.name for each in entries() for alias in (each.name, *each.aliases)}
    found = aliases.get(name.lower(), name)
    if found not in SCHEDULE_REGISTRY:
        names = [each.name for each in entries()]
        raise UserError(
            f"there is no schedule {name!r}{nearest(name.lower(), [*aliases, *SCHEDULE_REGISTRY]) or ';'} "
            f"known: {', '.join(names)}"
        )
    return _entry(found)


def entries() -> list[Entry]:
    """The catalogue in its own order, then the schedules of other packages, by name."""
    from vpipe.schedule.catalog_entries import CATALOG

    for each in CATALOG:
        if each.name not in SCHEDULE_REGISTRY:
            SCHEDULE_REGISTRY.register(each.name)(each)
    own = {each.name for each in CATALOG}
    others = [name for name in SCHEDULE_REGISTRY.list_registered() if name not in own]
    return [_entry(each.name) for each in CATALOG] + [_entry(name) for name in others]


def _entry(name: str) -> Entry:
    """What the registry has, made an entry: a plain function is described by the first line of its docstring."""
    found = SCHEDULE_REGISTRY.get(name)
    if isinstance(found, Entry):
        return found
    if not callable(found):
        raise UserError(
            f"the schedule {name!r} must be a function (num_ranks, num_microbatches) -> Program, not {found!r}"
        )
    free = "stages_per_rank" in inspect.signature(found).parameters
    summary = (inspect.getdoc(found) or "a schedule of another package").splitlines()[0]
    return Entry(name, found, summary, any_stages_per_rank=free)
