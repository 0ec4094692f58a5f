"""``vpipe draw``: the picture of a schedule."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import click

from vpipe.cli.choice import Source, program_options
from vpipe.cli.timing import cost_options
from vpipe.schedule.program import Program


@click.command("draw")
@program_options
@cost_options
@click.option("--format", "form", type=click.Choice(["text", "svg", "csv"]), default="text", show_default=True)
@click.option("--lowered", is_flag=True, help="CSV: with communication, as ranks execute it.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), help="File to write; else the terminal."
)
def command(program: Program, source: Source, form: str, lowered: bool, output: str | None, **times: Any) -> None:
    """Draw a schedule: time from left to right, one line per rank.

    \b
      vpipe draw 1f1b -p 4 -m 8
      vpipe draw zb-v -p 4 -m 8 --format svg -o zb-v.svg
      vpipe draw interleaved -p 4 -m 8 -v 2 --format csv --lowered > schedule.csv
    """
    from vpipe.errors import UserError

    if lowered and form != "csv":
        raise UserError(f"--lowered is for --format csv; {form} draws the time that communication takes by itself")
    if lowered:
        source.check(program)
    picture = _csv(program, lowered) if form == "csv" else _picture(program, source, form, output, times)
    if output is None:
        click.echo(picture, nl=False, color=True)  # _picture decides whether there is colour
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(picture)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None


def _csv(program: Program, lowered: bool) -> str:
    from vpipe.schedule.lower import is_lowered, lower
    from vpipe.schedule.text import to_csv

    return to_csv(lower(program) if lowered and not is_lowered(program) else program)


def _picture(program: Program, source: Source, form: str, output: str | None, times: dict[str, Any]) -> str:
    from vpipe.schedule.costs import uniform
    from vpipe.schedule.draw import text
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.svg import svg

    source.check(program)
    simulation = simulate(program, uniform(program.placement, **times))
    if form == "svg":
        return svg(simulation, f"{source.name}, {program.num_ranks} ranks, {program.num_microbatches} microbatches")
    terminal = output is None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    return text(simulation, width=width, colour=terminal and not os.environ.get("NO_COLOR"))
