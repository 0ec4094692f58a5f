"""Which program a command is about: a schedule by name with its numbers, or a CSV file.

``draw``, ``simulate`` and ``verify`` take the same argument and the same options; they are stated here once. What a
schedule does not take is refused in words by the catalogue, so no option is silently ignored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vpipe.cli import completion
from vpipe.cli.options import plugin_option
from vpipe.cli.timing import TIMES
from vpipe.errors import UserError
from vpipe.registry import load_plugins
from vpipe.schedule.catalog import get, names_file
from vpipe.schedule.program import Program, Versions

if TYPE_CHECKING:
    from vpipe.schedule.program import Cells
    from vpipe.schedule.violation import Violation

Function = TypeVar("Function", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)
MAX_ACTIONS = 4_000_000
"""Forwards and backwards: about 8 GB of memory."""


class InvalidProgram(UserError):
    """The file was read, but what it writes is no valid program: the answer is no."""

    exit_code = 1


@dataclass(frozen=True)
class ProgramSource:
    """Where a program comes from: its name, and the cells of its file."""

    name: str
    cells: Cells | None = None

    def describe(self, violation: Violation) -> str:
        """The violation, with row and column where there is a file."""
        if self.cells is None or violation.rank >= len(self.cells):
            return str(violation)
        row = self.cells[violation.rank]
        column = f", column {row[violation.index][0]}" if 0 <= violation.index < len(row) else ""
        named = f": {violation.action}" if violation.action else ""
        return f"row {violation.rank + 1}{column}{named}: {violation.reason}"

    def title(self, program: Program) -> str:
        """What a picture of it is headed with."""
        return f"{self.name}, {program.num_ranks} ranks, {program.num_microbatches} microbatches"

    def synchronous(self, program: Program) -> bool:
        """Whether ranks that run it update together; of a file its program says so, as where it is trained by."""
        from vpipe.schedule.semantics import updates_once

        return not get(self.name).asynchronous if self.cells is None else updates_once(program)

    def check(self, program: Program) -> None:
        """Refuse an invalid file; schedules of the catalogue are valid."""
        from vpipe.schedule.verify import verify

        if self.cells is not None and (found := verify(program)):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise InvalidProgram(
                f"{self.name}, {self.describe(found[0])}{more}; 'vpipe verify {self.name}' shows where"
            )


def program_options(command: Function) -> Function:
    """Give ``command`` the argument and the options of a program; it is called with ``program`` and ``source``."""

    @wraps(command)
    def with_program(**given: Any) -> Any:
        load_plugins(given.pop("plugins"))
        target = given.pop("target")
        counts = {key: given.pop(key) for key in ("ranks", "microbatches", "stages_per_rank")}
        options = _named_options(given.pop("named"))
        times = {key: given[key] for key in (*TIMES, "scale") if key in given}
        if _is_file(target):
            program, source = _read(target, counts, options)
        else:
            program, source = _build(target, counts, options, times), ProgramSource(target)
        return command(program=program, source=source, **given)

    decorated: Any = with_program
    decorators = [
        click.argument("target", metavar="SCHEDULE|FILE.csv", shell_complete=completion.schedules),
        click.option("-p", "--ranks", type=COUNT, help="Number of ranks."),
        click.option(
            "-m", "--microbatches", type=COUNT, help="Number of microbatches (units, for asynchronous schedules)."
        ),
        click.option(
            "-v", "--stages-per-rank", type=COUNT, help="Stages per rank, where the schedule lets you choose."
        ),
        plugin_option,
        click.option(
            "--option",
            "named",
            multiple=True,
            metavar="NAME=VALUE",
            help="An option of the schedule, such as num_waves=2 or replicas=2,1,1 ('vpipe schedules --json' has them "
            "all); of a CSV file versions, which weights a unit reads.",
        ),
    ]
    for decorator in reversed(decorators):
        decorated = decorator(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators return what they got


def _named_options(words: tuple[str, ...]) -> dict[str, Any]:
    """``--option name=value``: the value as JSON, as numbers with commas between, or else as a word."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"--option {word!r} is not NAME=VALUE, such as deepseek_drain=true")
        found[name] = value
        for text in (value, f"[{value}]" if "," in value else value):
            try:
                found[name] = json.loads(text)
                break
            except ValueError:
                continue
    return found


def _is_file(target: str) -> bool:
    return target == "-" or names_file(target) or Path(target).is_file()


def _build(name: str, counts: dict[str, int | None], options: dict[str, Any], times: dict[str, Any]) -> Program:
    entry = get(name)
    ranks, microbatches, stages_per_rank = counts.values()
    if ranks is None or microbatches is None:
        missing, flag = ("ranks", "-p") if ranks is None else ("microbatches", "-m")
        raise UserError(f"{name} needs the number of {missing}: add {flag} N")
    size = 2 * ranks * microbatches * (stages_per_rank or entry.stages_per_rank)
    if size > MAX_ACTIONS:
        raise UserError(
            f"{name} with -p {ranks} -m {microbatches} has {size} actions or more; at most {MAX_ACTIONS} are simulated"
        )
    options |= entry.options_for(ranks, times) if times else {}
    return entry.build(ranks, microbatches, stages_per_rank, **options)


def _read(target: str, counts: dict[str, int | None], options: dict[str, Any]) -> tuple[Program, ProgramSource]:
    from vpipe.schedule.program import cells, decode, from_cells, read_text

    rule = options.pop("versions", Versions.NEWEST.value)
    if rule not in list(Versions):
        raise UserError(f"--option versions is {rule!r}, but it is one of {', '.join(Versions)}")
    for option in options:
        raise UserError(f"--option {option} is of a schedule; {target} is a file, which says all itself")
    name = "stdin" if target == "-" else target
    found = cells(decode(sys.stdin.buffer.read(), name) if target == "-" else read_text(target), name)
    program = from_cells(found, name, Versions(rule))
    stages_per_rank = max(map(len, program.placement.stages_of))
    has = {"ranks": program.num_ranks, "microbatches": program.num_microbatches, "stages_per_rank": stages_per_rank}
    for flag, (key, count) in zip(("-p", "-m", "-v"), counts.items(), strict=True):
        if count is not None and count != has[key]:
            raise UserError(f"{name} has {has[key]} {key.replace('_', ' ')}, but {flag} says {count}; leave {flag} out")
    return program, ProgramSource(name, found)
