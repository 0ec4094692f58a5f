"""The plan: which layers where, what to recompute, what to swap, under which schedule, and how good that provably is.

    plan(profile, 4, memory="4GiB", num_microbatches=8)                      the best partition for 1f1b
    plan(profile, 4, memory="4GiB", num_microbatches=8, schedule="auto")     and the best schedule
    plan(profile, 8, num_microbatches=16, schedule="auto", replicas="auto")  and the best stages × replicas of 8 ranks

One number is minimised, bounded and printed: the simulated step of the lowered program (``predict``). Candidates come
from ``starts``, the search over cuts and choices from ``search``, the bound from ``floor``. Schedules, shapes, numbers
of microbatches and orders of ranks are tried one after the other and compared by the time of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Literal

from vpipe.errors import UserError
from vpipe.plan.advice import Misfit, explain_limit
from vpipe.plan.answer import Plan
from vpipe.plan.costs import Profile
from vpipe.plan.judge import Judge
from vpipe.plan.limits import Limits
from vpipe.plan.links import Links
from vpipe.plan.machine import Machine, links_between
from vpipe.plan.memory import Options
from vpipe.plan.orders import orders
from vpipe.plan.packing import Packer
from vpipe.plan.pipe import Pipe
from vpipe.plan.predict import predict
from vpipe.plan.search import Search
from vpipe.plan.shapes import Shape, shapes
from vpipe.plan.starts import starts
from vpipe.plan.units import parse_bytes
from vpipe.schedule.catalog import entries, get

__all__ = ["Plan", "plan"]

MemoryBounds = str | float | Sequence[str | float] | None
ReplicaCounts = int | Sequence[int] | Literal["auto"]


def plan(
    profile: Profile,
    num_ranks: int,
    *,
    num_microbatches: int | Iterable[int],
    memory: MemoryBounds = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    speed: float | Sequence[float] = 1.0,
    recompute: bool = True,
    swap: bool = True,
    batch_rows: int | None = None,
    modes: Sequence[str] = ("bsp",),
    replicas: ReplicaCounts = 1,
    links: Links | None = None,
    free_order: bool = False,
    effort: float = 1.0,
    time_limit: float | None = None,
    tell: Callable[[int, int, str], None] = lambda done, total, words: None,
) -> Plan:
    """The best plan for ``num_ranks`` ranks.

    ``memory`` is a cap for every rank or one for each. ``schedule="auto"`` tries the catalogue (of the given
    ``modes``). Several ``num_microbatches`` are compared by time per row; with ``batch_rows`` they are ways to cut the
    same batch, and each microbatch has ``batch_rows / m`` rows. What fits nowhere is a ``UserError`` that says what is
    missing.

    ``replicas`` pipelines of ``num_ranks`` ranks run side by side, each with its own microbatches; a list gives those
    of every stage (PipeDream's), which share the microbatches. With ``"auto"`` the ``num_ranks`` ranks are divided into
    stages and replicas, and ``num_microbatches`` are those of all replicas together. With ``free_order`` the ranks,
    where they differ, may be numbered anew. ``links`` between the ranks are by default those of the profile.
    """
    counts = [num_microbatches] if isinstance(num_microbatches, int) else list(num_microbatches)
    copies = _copies(num_ranks, replicas)
    if not 0 < effort <= 1e6 or not (time_limit is None or time_limit > 0):
        raise UserError(f"an effort and a time limit are more than zero, not {effort} and {time_limit}")
    if num_ranks < 1 or not counts or min(counts) < 1 or min(copies, default=1) < 1:
        raise UserError(
            f"a plan needs at least one rank and one microbatch, not {num_ranks} and {counts}, and one replica"
        )
    if num_ranks > profile.num_layers and replicas != "auto":
        raise UserError(
            f"{schedule} on {num_ranks} ranks has {num_ranks} stages, but the model has only {profile.num_layers} "
            "layers; use fewer ranks"
        )
    total = sum(copies) or num_ranks
    machine = Machine.of(total, _caps(memory), speed, links_between(total, profile, links))
    options = Options(recompute, swap and profile.swap_bandwidth is not None)
    limits = Limits(effort, inf if time_limit is None else monotonic() + time_limit)
    divided = None if replicas == "auto" else copies
    wanted = _Wanted(schedule, stages_per_rank, tuple(modes), num_ranks, divided, batch_rows)
    outcome = _Outcome()
    cases = list(wanted.cases(profile, machine, counts))
    for number, case in enumerate(cases):
        tell(number, len(cases), str(case if isinstance(case, UserError) else case[1]))
        if outcome.plans and limits.over:
            break
        outcome.add(case, machine, options, limits, free_order=free_order)
    return outcome.best()


_Case = tuple[Profile, Pipe]
"""A profile under a schedule with its numbers."""


@dataclass(frozen=True)
class _Wanted:
    """What was asked for, and all cases that it leaves open."""

    schedule: str
    stages_per_rank: int | None
    modes: tuple[str, ...]
    num_ranks: int
    replicas: tuple[int, ...] | None
    """``None``: all ways to divide the ranks."""
    batch_rows: int | None

    def cases(self, profile: Profile, machine: Machine, counts: Sequence[int]) -> Iterator[_Case | UserError]:
        for count in counts:
            for name in self._names():
                shaped = list(self._shapes(profile, machine, name, count))
                if not shaped:
                    yield UserError(
                        f"{name} cannot divide {self.num_ranks} ranks into stages and replicas: there are "
                        f"{profile.num_layers} layers for the stages, and all replicas of a stage take equal parts of "
                        f"{count} microbatches; use another number of ranks or of microbatches"
                    )
                for shape in shaped:
                    try:
                        yield self._case(profile, name, shape)
                    except UserError as error:
                        yield error

    def _case(self, profile: Profile, name: str, shape: Shape) -> _Case:
        if self.batch_rows is not None:
            parts = shape.num_microbatches * (shape.pipelines if self.replicas is None else 1)
            profile = profile.scaled(_rows(self.batch_rows, parts))
        v = self.stages_per_rank if self.schedule != "auto" else None
        return profile, Pipe.of(name, shape.num_ranks, shape.num_microbatches, v, shape.replicas)

    def _shapes(self, profile: Profile, machine: Machine, name: str, count: int) -> Iterator[Shape]:
        if self.replicas is None:
            yield from shapes(profile, machine, get(name), count)
        else:
            yield Shape(self.num_ranks, count, self.replicas)

    def _names(self) -> list[str]:
        if self.schedule != "auto":
            return [self.schedule]
        planned = (entry for entry in entries() if entry.for_auto and not entry.two_ways)
        return [entry.name for entry in planned if entry.mode in self.modes]


class _Outcome:
    """The plans of all cases, and why others have none."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.misfits: list[Misfit] = []
        self.refusals: list[UserError] = []

    def add(
        self, case: _Case | UserError, machine: Machine, options: Options, limits: Limits, *, free_order: bool
    ) -> None:
        if isinstance(case, UserError):
            self.refusals.append(case)
            return

        def planned(order: Sequence[int], effort: float) -> Plan:
            within = replace(limits, effort=limits.effort * effort)
            answer = _plan(*case, machine.in_order(order), options, within)
            return replace(answer, order=tuple(order) if list(order) != sorted(order) else ())

        try:
            self.plans.append(
                orders(machine, planned, limits) if free_order else planned(range(machine.num_ranks), 1.0)
            )
        except Misfit as misfit:
            self.misfits.append(misfit)
        except UserError as error:
            self.refusals.append(error)

    def best(self) -> Plan:
        """The plan with the least time for a row, and how the others rank behind it."""
        if not self.plans and self.misfits:
            raise min(self.misfits, key=lambda misfit: misfit.missing).explained()
        if not self.plans:
            raise self.refusals[0]
        self.plans.sort(key=lambda each: float(f"{each.step_time / each.rows:.9g}"))  # equal ones as in the catalogue
        counts = len({each.num_microbatches for each in self.plans}) > 1
        shapes = len({(each.num_ranks, each.replicas) for each in self.plans}) > 1
        ranking = tuple((_name(each, counts, shapes), each.step_time) for each in self.plans)
        return replace(self.plans[0], ranking=ranking if len(self.plans) > 1 else ())


def _name(plan: Plan, counts: bool, shapes: bool) -> str:
    """A plan in a ranking: its schedule, and those of its numbers that others have not."""
    copies = plan.replicas[:1] if len(set(plan.replicas)) == 1 else plan.replicas
    shape = f" p={plan.num_ranks}{'x' * bool(copies)}{','.join(map(str, copies))}" if shapes else ""
    count = f" m={plan.num_microbatches}" if counts else ""
    return f"{plan.schedule}{shape}{count}{' (asynchronous)' if plan.asynchronous else ''}"


def _plan(profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> Plan:
    if pipe.num_stages > profile.num_layers:
        raise UserError(
            f"{pipe.entry.name} on {pipe.num_ranks} ranks has {pipe.num_stages} stages, but the model has only "
            f"{profile.num_layers} layers; use fewer ranks"
        )
    judge = Judge(profile, pipe, machine)
    packer = Packer(judge, options)
    search = Search(judge, packer, limits)
    found = search.run(starts(judge, packer, options, limits))
    if found is None:
        raise Misfit(profile, pipe, machine, options, limits)
    prediction = predict(profile, found.layout, pipe, machine)
    return Plan(
        layout=found.layout,
        schedule=pipe.entry.name,
        num_ranks=pipe.num_ranks,
        stages_per_rank=pipe.stages_per_rank,
        num_microbatches=pipe.num_microbatches,
        microbatch_rows=profile.microbatch_rows,
        memory=machine.memory,
        prediction=prediction,
        lower_bound=prediction.step_time if found.proven else min(search.floor.bound, prediction.step_time),
        limit=explain_limit(profile, found.layout, prediction, pipe, machine),
        replicas=pipe.replicas,
        asynchronous=pipe.asynchronous,
    )


def _caps(memory: MemoryBounds) -> float | Sequence[float] | None:
    if memory is None or isinstance(memory, str | int | float):
        return None if memory is None else float(parse_bytes(memory))
    return [float(parse_bytes(each)) for each in memory]


def _copies(num_ranks: int, replicas: ReplicaCounts) -> tuple[int, ...]:
    """Replicas of every stage; empty where there is one of each, or where they are free."""
    if replicas == "auto" or replicas == 1:
        return ()
    if isinstance(replicas, int):
        return (replicas,) * num_ranks
    if len(replicas) != num_ranks:
        raise UserError(f"replicas are given for {len(replicas)} stages, but there are {num_ranks} ranks of stages")
    return () if set(replicas) == {1} else tuple(int(each) for each in replicas)


def _rows(batch_rows: int, num_microbatches: int) -> int:
    if batch_rows % num_microbatches:
        raise UserError(f"a batch of {batch_rows} rows cannot be cut into {num_microbatches} equal microbatches")
    return batch_rows // num_microbatches
