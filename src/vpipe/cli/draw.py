"""``vpipe draw``: the picture of a schedule."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from vpipe.cli.choice import ProgramSource, program_options
from vpipe.cli.timing import cost_options, scale_option
from vpipe.errors import UserError, nearest
from vpipe.plan.costs import write_text
from vpipe.process import columns, obeys
from vpipe.schedule.program import Program

FORMS = ("text", "svg", "csv")


@click.command("draw")
@program_options
@cost_options
@scale_option
@click.option("--format", "form", type=click.Choice(FORMS), help="Else what the ending of --output says, else text.")
@click.option("--width", type=click.FloatRange(min=2, max=200), help="SVG: width in centimetres.")
@click.option("--no-title", is_flag=True, help="SVG: without a title; the caption says it.")
@click.option("--font", help="SVG: the font family.")
@click.option("--lowered", is_flag=True, help="CSV: with communication and agreement, as ranks execute it.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, writable=True), help="A file; else the terminal.")
def command(
    program: Program,
    source: ProgramSource,
    form: str | None,
    width: float | None,
    no_title: bool,
    font: str | None,
    lowered: bool,
    output: str | None,
    **times: Any,
) -> None:
    """Draw a schedule: time from left to right, one line per rank.

    \b
      vpipe draw 1f1b -p 4 -m 8
      vpipe draw zb-v -p 4 -m 8 -o zb-v.svg --width 8.5 --no-title        (svg, csv, txt by the ending)
      vpipe draw interleaved -p 4 -m 8 -v 2 --format csv --lowered > schedule.csv
    """
    form = _form(form, output)
    if form != "svg" and (width is not None or no_title or font is not None):
        raise UserError(f"--width, --no-title and --font are for figures (svg), not for {form}")
    if lowered and form != "csv":
        raise UserError(f"--lowered is for --format csv; {form} draws the time that communication takes by itself")
    if lowered or form != "csv":
        source.check(program)
    if form == "csv":
        from vpipe.schedule.program import to_csv
        from vpipe.schedule.verify import executable

        agrees = source.synchronous(program)
        picture = to_csv(executable(program, source.name, agrees=agrees) if lowered else program)
    else:
        from vpipe.schedule.draw import text
        from vpipe.schedule.simulate import simulate
        from vpipe.schedule.svg import Paper, svg
        from vpipe.schedule.timeline import uniform

        simulation = simulate(program, uniform(program.placement, **times))
        if form == "svg":
            paper = Paper(width, font) if output or width or font else None
            picture = svg(simulation, None if no_title else source.title(program), paper)
        else:
            shown = output is None
            colour = shown and obeys(sys.stdout) and not os.environ.get("NO_COLOR")
            picture = text(simulation, width=columns(sys.stdout) if shown else None, colour=colour)
    if output is None:
        click.echo(picture, nl=False, color=True)  # whether there is colour is decided above
        return
    write_text(output, picture)


def _form(form: str | None, output: str | None) -> str:
    """What is asked for, or what the file's ending says; the two must agree."""
    ending = Path(output).suffix[1:].lower() if output else ""
    told = {"txt": "text", "": form or "text"}.get(ending, ending)
    if told not in FORMS:
        raise UserError(
            f"{output}: no form .{ending}{nearest(ending, FORMS)}; give {', '.join(FORMS)} (rsvg-convert: a PDF)"
        )
    if form is not None and form != told:
        raise UserError(f"{output} ends with .{ending}, but --format is {form}; leave one of them away")
    return told
