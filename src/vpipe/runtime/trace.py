"""What a step did: the executed actions with their times.

A trace is a program that happened. ``program()`` writes it down again from the record, so the same verifier that passed
the plan can pass what was executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vpipe.runtime.job import Record
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import VersionTable, version_table


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
