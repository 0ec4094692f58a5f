"""Which program a command is about: a schedule by name with its numbers, or a CSV file.

``draw``, ``simulate`` and ``verify`` take the same argument and the same options; they are stated here once. What a
schedule does not take is refused in words by the catalogue, so no option is silently ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from vpipe.errors import UserError
from vpipe.schedule.catalog import get
from vpipe.schedule.program import Program, Versions

Function = TypeVar("Function", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)


class WholeNumbers(click.ParamType[list[int]]):
    """``2,1,1``."""

    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 2,1,1", param, ctx)


_OPTIONS = {
    "waves": click.option("--waves", type=COUNT, help="hanayo: down and up the ranks this often."),
    "update_interval": click.option("--update-interval", type=COUNT, help="pipedream: units per update."),
    "vertical_sync": click.option(
        "--vertical-sync",
        is_flag=True,
        default=None,
        help="pipedream: every stage reads the version that stage 0 read.",
    ),
    "replicas": click.option("--replicas", type=WholeNumbers(), help="pipedream: ranks of each stage."),
    "depths": click.option("--depths", type=WholeNumbers(), help="pipedream: units that each stage runs ahead."),
    "num_batches": click.option("--num-batches", type=COUNT, help="pipedream-2bw: batches between two drains."),
}
"""Option of a schedule → how the command line spells it."""


def program_options(command: Function) -> Function:
    """Give ``command`` the argument and the options of a program; it is called with ``program`` and ``name``."""

    @wraps(command)
    def with_program(**given: Any) -> Any:
        target = given.pop("target")
        counts = {key: given.pop(key) for key in ("ranks", "microbatches", "stages_per_rank")}
        versions = given.pop("versions")
        options = {key: value for key in _OPTIONS if (value := given.pop(key)) is not None}
        if _is_file(target):
            program = _read(target, counts, versions, options)
            name = "stdin" if target == "-" else Path(target).name
        else:
            if versions is not None:
                raise UserError(f"--versions is for CSV files; {target!r} is a schedule and knows its own")
            program, name = _build(target, counts, options), target
        return command(program=program, name=name, **given)

    decorated: Any = with_program
    decorators = [
        click.argument("target", metavar="SCHEDULE|FILE.csv"),
        click.option("-p", "--ranks", type=COUNT, help="Number of ranks."),
        click.option(
            "-m", "--microbatches", type=COUNT, help="Number of microbatches (units, for asynchronous schedules)."
        ),
        click.option(
            "-v", "--stages-per-rank", type=COUNT, help="Stages per rank, where the schedule lets you choose."
        ),
        *_OPTIONS.values(),
        click.option(
            "--versions",
            type=click.Choice([each.value for each in Versions]),
            help="CSV: which weights a unit reads. [newest]",
        ),
    ]
    for decorator in reversed(decorators):
        decorated = decorator(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators return what they got


def _is_file(target: str) -> bool:
    return target == "-" or target.lower().endswith(".csv") or "/" in target or Path(target).is_file()


def _build(name: str, counts: dict[str, int | None], options: dict[str, Any]) -> Program:
    entry = get(name)
    for flag, key in (("-p", "ranks"), ("-m", "microbatches")):
        if counts[key] is None:
            raise UserError(f"{name} needs the number of {key}: add {flag} N")
    ranks, microbatches = counts["ranks"], counts["microbatches"]
    assert ranks is not None
    assert microbatches is not None
    return entry.build(ranks, microbatches, counts["stages_per_rank"], **options)


def _read(target: str, counts: dict[str, int | None], versions: str | None, options: dict[str, Any]) -> Program:
    from vpipe.schedule.text import from_csv, read_csv

    rule = Versions(versions or Versions.NEWEST)
    for option in options:
        raise UserError(
            f"--{option.replace('_', '-')} is an option of a schedule; {target} is a file, which says all itself"
        )
    program = from_csv(sys.stdin.read(), "stdin", rule) if target == "-" else read_csv(target, rule)
    stages_per_rank = max(map(len, program.placement.stages_of))
    has = {"ranks": program.num_ranks, "microbatches": program.num_microbatches, "stages_per_rank": stages_per_rank}
    for flag, (key, count) in zip(("-p", "-m", "-v"), counts.items(), strict=True):
        if count is not None and count != has[key]:
            raise UserError(
                f"{target} has {has[key]} {key.replace('_', ' ')}, but {flag} says {count}; leave {flag} out"
            )
    return program
