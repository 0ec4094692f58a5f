"""What an engine is given and what it gives back: a job, a program compiled for one rank, a result with its records.

The records of all ranks are a trace, a program that happened. ``Trace.program()`` writes it down again from the record,
so the same verifier that passed the plan can pass what was executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.profiler import record_function

from vpipe.errors import UserError
from vpipe.runtime.device import Number, number
from vpipe.runtime.flow import Tasks, Value
from vpipe.runtime.stage import Unit
from vpipe.schedule.action import Action
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import VersionTable, version_table

Call = tuple[Action, Callable[[], None]]
SHARED_CORES = 0.01
"""Share of a program's time from which waiting for a core is asked of every action of the next."""


def annotated(calls: Sequence[Call]) -> Iterator[Call]:
    """Calls that appear under their actions' names in a torch.profiler trace."""
    for action, call in calls:
        with record_function(str(action)):
            yield action, call


@dataclass(frozen=True)
class Job:
    """One execution of a program: its units, and where it stands in the training run."""

    step: int
    first_unit: int
    """How many units all steps before have run: what random numbers count from."""
    inputs: Callable[[int], dict[Value, Any]]
    targets: Callable[[int], Any]
    share: Callable[[int], float]
    """A unit's share of the batch. Stage 0 knows it; it travels with the unit."""
    gradient_weights: Sequence[float] | None = None
    """What the units' gradients are multiplied by, where that is not their share."""
    scale: float = 1.0
    training: bool = True
    wants_loss: bool = True
    first_update: int = 0
    """How many updates all steps before have made: what the learning rate counts from."""
    checksums: Sequence[int] | None = None
    """Of the units, as this process has read them."""
    counted: Sequence[float] | None = None
    """The units' shares by what the loss counts, where the last stage's process knows them and the first may not."""

    def check_share(self, microbatch: int, share: float) -> None:
        """Refuse a share of the first stage that the labels do not bear out."""
        if self.counted is not None and share != self.counted[microbatch]:
            raise UserError(
                f"the first stage gives microbatch {microbatch} a share of {share:g} by rows, but by its labels it is "
                f"{self.counted[microbatch]:g}; give train_step the targets on the first stage's process too"
            )


@dataclass(slots=True)
class Record:
    """When an action began, had what it needed, and ended, in nanoseconds of this rank's clock.

    A swap begins where the rank hands it over, is ready when the swap lane takes it up, and ends there. On a device the
    times are the device's, on the host's clock (``device_times``).
    """

    action: Action
    begin: int
    ready: int
    end: int
    late: int = 0
    """How much of the time before it was ready the thread waited for a processor, as far as that was asked."""
    stalled: int = 0
    """The same of the time from then to its end."""
    bytes: int = 0
    enqueued: int = 0
    """On a device, when the host had handed the action over; elsewhere 0."""


@dataclass
class Result:
    """What a rank knows after a job."""

    losses: dict[tuple[int, int], Number] = field(default_factory=dict)
    """(layer, microbatch) → what the layer adds to the unit's loss; after the last layer the loss itself, then the
    unit's share of the batch, and the unit's checksum as the first stage has read it and as the last has."""
    outputs: dict[int, Any] = field(default_factory=dict)
    calls: Sequence[Call] = ()
    times: Sequence[tuple[int, ...]] = ()
    """Of each call what its ``Record`` says first."""

    def note(self, unit: Unit, microbatch: int, share: float, end: int) -> None:
        """What a unit's forward at one stage says of its loss, layer by layer, so that the sum knows no stages."""
        for layer, value in unit.added:
            self.losses[layer, microbatch] = self.losses.get((layer, microbatch), 0.0) + number(value)
        if unit.loss is not None:
            self.losses[end, microbatch] = number(unit.loss)
            self.losses[end + 1, microbatch] = share

    def note_checksum(self, microbatch: int, checksums: Sequence[int], is_first: bool, is_last: bool, end: int) -> None:
        """What the first stage has read, or the last, or both."""
        for row, here in ((2, is_first), (3, is_last)):
            if here:
                self.losses[end + row, microbatch] = checksums[microbatch]

    @cached_property
    def records(self) -> list[Record]:
        """What happened when; built when it is asked for, as after few steps."""
        return recorded(self.calls, self.times)


def recorded(calls: Sequence[Call], times: Sequence[tuple[int, ...]]) -> list[Record]:
    """Make the records of what was called.

    The kernel counts a wait for a processor by a clock of its own; it is capped by the time that it is part of.
    """
    records = [Record(action, *each) for (action, _), each in zip(calls, times, strict=True)]
    for record in records:
        if record.late or record.stalled:
            record.late = min(record.late, record.ready - record.begin)
            record.stalled = min(record.stalled, record.end - record.ready)
    return records


@dataclass(frozen=True)
class Compiled:
    """A program, ready to run on one rank."""

    program: Program
    calls: list[Call]
    tasks: Tasks
    versions: VersionTable
    """Where stages keep several versions of their weights; empty where each has one."""
    uses: dict[int, list[int]]
    """Stage → how many of this rank's units read each version; as above."""
    updates: dict[int, list[float]]
    """Stage → the numbers of its updates, counted from 0 as the first stage makes them."""


@dataclass(frozen=True)
class Stats:
    """Where training stands; the same on every rank."""

    num_updates: int
    num_skipped: int
    """Updates left out because a gradient was not finite; of an asynchronous schedule those of all stages."""
    gradient_norm: float | None
    loss_scale: float
    good_steps: int


@dataclass(frozen=True)
class Trace:
    """Per rank of this process, its records in order."""

    planned: Program
    records: Mapping[int, list[Record]]

    def program(self) -> Program:
        """The executed program; ranks of other processes as planned."""
        rows = [
            tuple(record.action for record in self.records[rank]) if rank in self.records else row
            for rank, row in enumerate(self.planned.rows)
        ]
        return self.planned.with_rows(rows)

    def versions(self) -> VersionTable:
        """Which weights every unit read at every stage."""
        return version_table(self.program())
