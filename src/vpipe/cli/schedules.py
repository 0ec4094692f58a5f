"""``vpipe schedules``: the catalogue, or its ranking under given costs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from vpipe.cli.bar import bar
from vpipe.cli.choice import COUNT
from vpipe.cli.table import paragraph, table
from vpipe.cli.timing import TIMES, cost_options
from vpipe.errors import UserError
from vpipe.process import columns

if TYPE_CHECKING:
    from vpipe.schedule.choose import RankedSchedule

MAX_RANKED = 400_000
"""Forwards and backwards of the largest schedule: about a minute for all."""


@click.command("schedules")
@click.option(
    "--rank", "ranked", is_flag=True, help="Simulate all under the costs below and rank them; needs -p and -m."
)
@click.option("-p", "--ranks", type=COUNT, help="Number of ranks.")
@click.option("-m", "--microbatches", type=COUNT, help="Number of microbatches.")
@click.option("-v", "--stages-per-rank", type=COUNT, help="Where a schedule lets you choose. [2 and 4]")
@click.option("--memory", type=click.FloatRange(min=0), help="Activations that a rank can hold, in microbatches.")
@cost_options
@click.option("--json", "as_json", is_flag=True, help="JSON and nothing else.")
@click.pass_context
def command(ctx: click.Context, /, ranked: bool, as_json: bool, **given: Any) -> None:
    """The catalogue: what each schedule needs, its bubble and its memory. With --rank: which one suits your machine.

    \b
      vpipe schedules
      vpipe schedules --rank -p 4 -m 16
      vpipe schedules --rank -p 4 -m 16 --latency 1 --memory 4     a slow network turns the ranking over
    """
    if ranked:
        _rank(as_json, **given)
        return
    for option in given:
        if ctx.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
            raise UserError(f"--{option.replace('_', '-')} is for the ranking: add --rank")
    _list(as_json)


def _list(as_json: bool) -> None:
    from vpipe.schedule.catalog import entries

    fields = ("name", "aliases", "summary", "mode", "needs", "bubble", "memory", "weight_copies", "stages_per_rank")
    rows = [{field: getattr(entry, field) for field in fields} | {"options": entry.options} for entry in entries()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    heads = ("name", "idle time", "peak activations", "weight copies", "needs")
    keys = ("name", "bubble", "memory", "weight_copies", "needs")
    width = columns(sys.stdout)
    click.echo(table([heads, *([str(row[key]) for key in keys] for row in rows)], width))
    legend = (
        "\np ranks, m microbatches, v stages per rank; F, I, W: forward, input and weight gradient; T = F+I+W.\n"
        "idle time: of a rank, beyond its work m·T, where stages are equal; the bubble is its share of the makespan.\n"
        "'vpipe draw NAME -p 4 -m 8' draws one, 'vpipe schedules --rank' compares all."
    )
    click.echo(paragraph(legend, width))


def _facts(ranked: RankedSchedule) -> dict[str, Any]:
    """For machines: of what is refused, why, and no time."""
    facts = asdict(ranked)
    figures = {"makespan": round(facts.pop("time"), 9), "bubble": round(facts.pop("bubble"), 9)}
    return facts if ranked.refused else facts | figures


def _rank(
    as_json: bool,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    memory: float | None,
    **times: Any,
) -> None:
    from vpipe.schedule.choose import FREE_STAGES_PER_RANK, rank

    if ranks is None or microbatches is None:
        raise UserError("a ranking needs the number of ranks and microbatches: add -p N -m N")
    size = 2 * ranks * microbatches * (stages_per_rank or max(FREE_STAGES_PER_RANK))
    if size > MAX_RANKED:
        raise UserError(
            f"-p {ranks} -m {microbatches} makes schedules of {size} actions; at most {MAX_RANKED} are ranked: give a "
            "smaller -m, which changes bubbles but seldom their order, or simulate one schedule by name"
        )
    with bar("simulating") as progress:
        found = rank(ranks, microbatches, times, stages_per_rank=stages_per_rank, memory=memory, progress=progress)
    if as_json:
        click.echo(json.dumps([_facts(each) for each in found]))
        return
    lines = [("", "schedule", "time", "bubble", "peak activations", "weight versions", "staleness", "")]
    for place, each in enumerate((each for each in found if not each.refused), 1):
        notes = ["steady state, no flush"] * each.asynchronous + [f"over the memory of {memory or 0:g}"] * (
            not each.fits
        )
        figures = (f"{each.time:g}", f"{each.bubble:.1%}", f"{each.peak_activations:g}")
        stale = (str(each.weight_versions), str(each.staleness))
        lines.append((f"{place}" if each.fits else "-", each.name, *figures, *stale, "; ".join(notes)))
    width = columns(sys.stdout)
    click.echo(table(lines, width))
    for each in found:
        if each.refused:
            click.echo(paragraph(f"left out: {each.name}: {each.refused}", width))
    costs = ", ".join(f"{name.replace('_', ' ')} {times[name]:g}" for name in TIMES)
    click.echo(paragraph(f"\ntime of {microbatches} microbatches on {ranks} ranks; {costs}", width))
