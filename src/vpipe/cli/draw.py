"""``vpipe draw``: the picture of a schedule."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vpipe.cli.choice import ProgramSource, program_options
from vpipe.cli.timing import cost_options, scale_option
from vpipe.errors import UserError, nearest
from vpipe.plan.costs import write_text
from vpipe.process import columns, obeys
from vpipe.schedule.program import Program

if TYPE_CHECKING:
    from vpipe.schedule.simulate import Simulation

FORMS = ("text", "svg", "pdf", "png", "csv")
WIDTH = 16.0
"""Centimetres of a figure: the text of an A4 page."""


@dataclass(frozen=True)
class Figure:
    """What a figure wants."""

    title: str | None
    width: float | None
    font: str | None


@click.command("draw")
@program_options
@cost_options
@scale_option
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMS),
    help="By default what the ending of --output says, else text. pdf and png need matplotlib.",
)
@click.option("--width", type=click.FloatRange(min=2, max=200), help="Figures: width in centimetres. [16]")
@click.option("--no-title", is_flag=True, help="Figures: without a title; the caption says it.")
@click.option("--font", help="Figures: the font family.")
@click.option("--lowered", is_flag=True, help="CSV: with communication and agreement, as ranks execute it.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), help="File to write; else the terminal."
)
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
      vpipe draw zb-v -p 4 -m 8 -o zb-v.pdf --width 8.5 --no-title        (svg, pdf, png, csv, txt by the ending)
      vpipe draw interleaved -p 4 -m 8 -v 2 --format csv --lowered > schedule.csv
    """
    form = _form(form, output)
    if form in ("text", "csv") and (width is not None or no_title or font is not None):
        raise UserError(f"--width, --no-title and --font are for figures (svg, pdf, png), not for {form}")
    if lowered and form != "csv":
        raise UserError(f"--lowered is for --format csv; {form} draws the time that communication takes by itself")
    if lowered:
        source.check(program)
    figure = Figure(None if no_title else source.title(program), width, font)
    if form in ("pdf", "png"):
        if output is None:
            raise UserError(f"--format {form} needs a file: add -o figure.{form}")
        _save(_simulated(program, source, times), Path(output), figure)
        return
    if form == "csv":
        picture = _csv(program, source, lowered)
    else:
        picture = _picture(_simulated(program, source, times), form, output, figure)
    if output is None:
        click.echo(picture, nl=False, color=True)  # _picture decides whether there is colour
        return
    write_text(output, picture)


def _csv(program: Program, source: ProgramSource, lowered: bool) -> str:
    from vpipe.schedule.program import to_csv
    from vpipe.schedule.verify import executable

    return to_csv(executable(program, source.name, agrees=source.synchronous(program)) if lowered else program)


def _form(form: str | None, output: str | None) -> str:
    """What is asked for, or what the file's ending says; the two must agree."""
    ending = Path(output).suffix[1:].lower() if output else ""
    told = {"txt": "text", "": form or "text"}.get(ending, ending)
    if told not in FORMS:
        raise UserError(
            f"{output}: there is no form .{ending}{nearest(ending, FORMS)}; it is one of {', '.join(FORMS)}"
        )
    if form is not None and form != told:
        raise UserError(f"{output} ends with .{ending}, but --format is {form}; leave one of them away")
    return told


def _save(simulation: Simulation, path: Path, figure: Figure) -> None:
    from vpipe.observe.figure import save

    try:
        save(simulation, path, figure.title, figure.width or WIDTH, figure.font)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _simulated(program: Program, source: ProgramSource, times: dict[str, Any]) -> Simulation:
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.timeline import uniform

    source.check(program)
    return simulate(program, uniform(program.placement, **times))


def _picture(simulation: Simulation, form: str, output: str | None, figure: Figure) -> str:
    from vpipe.schedule.draw import text
    from vpipe.schedule.svg import Paper, svg

    if form == "svg":
        for_paper = output is not None or figure.width is not None or figure.font is not None
        return svg(simulation, figure.title, Paper(figure.width, figure.font) if for_paper else None)
    width = columns(sys.stdout) if output is None else None
    colour = output is None and obeys(sys.stdout) and not os.environ.get("NO_COLOR")
    return text(simulation, width=width, colour=colour)
