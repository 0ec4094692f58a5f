"""Which program a pipeline runs: from a schedule's name to a lowered, verified program.

A training step, the accumulation of gradients without an update, and an evaluation are three programs over one
placement. Each is made once, verified with the model's own skip connections, and kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

from vpipe.errors import UserError
from vpipe.runtime.flow import Flow
from vpipe.schedule.action import OF_A_STAGE, Action, Kind
from vpipe.schedule.authors.authoring import BATCHES
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import INPUT_GRADIENT, WEIGHT_GRADIENT, update_groups
from vpipe.schedule.verify import executable


class Programs:
    """The executable programs of a pipeline."""

    def __init__(
        self,
        spec: ScheduleSpec,
        flow: Flow,
        recompute_stages: Collection[int] = (),
        swap_stages: Collection[int] = (),
        receives_block: bool = False,
    ) -> None:
        self.spec = spec
        self.synchronous = spec.synchronous
        self.flow = flow
        self._recompute = frozenset(recompute_stages)
        self._swap = frozenset(swap_stages)
        self._receives_block = receives_block
        self._made: dict[tuple[str, int], Program] = {}
        self._chained: dict[int, Programs] = {}
        """By the number of batches; all of them have this one."""

    @cached_property
    def author(self) -> Program:
        """The author's program, its rows on the ranks of the layout."""
        return self._placed(self.spec.program)

    def _placed(self, program: Program) -> Program:
        return relabelled(program, self.flow.layout.placement)

    @property
    def num_units(self) -> int:
        return self.author.num_microbatches

    @property
    def splits(self) -> frozenset[int]:
        """Stages where I and W are apart."""
        return frozenset(action.stage for _, action in self.author.actions() if action.kind is Kind.I)

    @property
    def stashes(self) -> frozenset[int]:
        """Stages whose I run in another order than their W, or between whose I and W an update may come."""
        found: set[int] = set()
        for row in self.author.rows:
            begun: dict[int, list[int]] = defaultdict(list)
            ended: dict[int, list[int]] = defaultdict(list)
            for stage, kind, microbatch in row:
                if kind in INPUT_GRADIENT:
                    begun[stage].append(microbatch)
                if kind in WEIGHT_GRADIENT:
                    ended[stage].append(microbatch)
            found |= {stage for stage in begun if not self.synchronous or begun[stage] != ended[stage]}
        return self.splits & found

    def training(self, update: bool = True, num_microbatches: int | None = None) -> Program:
        """One step; without ``update`` the same without REDUCE, AGREE and STEP."""
        key = ("update" if update else "accumulate", num_microbatches or self.spec.num_microbatches)
        if key not in self._made:
            own = key[1] == self.spec.num_microbatches
            program = self.author if own else self._placed(replace(self.spec, num_microbatches=key[1]).program)
            if not update:
                if not self.synchronous:
                    raise UserError(
                        f"{self.spec.describe()} updates after every unit; gradients cannot be accumulated over steps"
                    )
                program = program.with_rows(
                    [action for action in row if action.kind not in OF_A_STAGE] for row in program.rows
                )
            self._made[key] = self._finish(program, self._recompute, self._swap)
        return self._made[key]

    def forward(self, num_units: int) -> Program:
        """Forwards alone: stage by stage on every rank, each taking its units in order."""
        key = ("forward", num_units)
        if key not in self._made:
            placement = self.flow.layout.placement
            rows = tuple(
                tuple(
                    Action(stage, Kind.F, microbatch)
                    for stage in placement.stages_of[rank]
                    for microbatch in placement.units(stage, rank, num_units)
                )
                for rank in range(placement.num_ranks)
            )
            self._made[key] = self._finish(Program(rows, placement, num_units))
        return self._made[key]

    def chained(self, num_batches: int) -> Programs:
        """The same programs, of so many batches of a schedule that does not drain between them."""
        if num_batches not in self._chained:
            spec = replace(self.spec, options={**(self.spec.options or {}), BATCHES: num_batches})
            found = Programs(spec, self.flow, self._recompute, self._swap, self._receives_block)
            found._chained = self._chained
            self._chained[num_batches] = found
        return self._chained[num_batches]

    def _finish(self, program: Program, recompute: Collection[int] = (), swap: Collection[int] = ()) -> Program:
        program = replace(program, skips=self.flow.skips())
        return executable(
            program,
            self.spec.describe(),
            recompute_stages=recompute,
            swap_stages=swap,
            agrees=self.synchronous,
            receives_block=self._receives_block,
        )

    def gradient_weights(self, program: Program) -> list[float] | None:
        """What units' gradients are multiplied by where that is not their share of the batch: an asynchronous update is
        the mean over its own units."""
        if self.synchronous:
            return None
        last = program.num_stages - 1
        replicas = program.placement.num_replicas(last)
        weights = [1.0] * program.num_microbatches
        for units in update_groups(program)[last]:
            for microbatch in units:
                weights[microbatch] = replicas / len(units)
        return weights


def relabelled(program: Program, placement: Placement) -> Program:
    """The program with every rank's row on the rank that holds its stages in ``placement``."""
    if program.placement == placement:
        return program
    before, after = program.placement.homes, placement.homes
    new = {old: rank for (_, old), (_, rank) in zip(before, after, strict=False)}
    if tuple((stage, new.get(rank)) for stage, rank in before) != after:
        has, wanted = ([list(ranks) for ranks in each.ranks_of] for each in (program.placement, placement))
        raise UserError(
            f"the layout has stages on ranks {wanted}, but the schedule has {has}; "
            "a layout may give a rank's whole share to another rank, and other numbers of layers to stages, no more"
        )
    rows = [program.rows[old] for old in sorted(new, key=lambda old: new[old])]
    return replace(program, rows=tuple(rows), placement=placement)
