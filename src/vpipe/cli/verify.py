"""``vpipe verify``: all violations of a program, with the grid around the first."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from vpipe.cli.choice import ProgramSource, program_options
from vpipe.schedule.program import Program


@click.command("verify")
@program_options
@click.option("--max-activations", type=click.FloatRange(min=0), help="Bound on a rank's activations, in microbatches.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(program: Program, source: ProgramSource, max_activations: float | None, as_json: bool) -> int:
    """Check a program: what is missing, double, misplaced, unmatched, or deadlocked. Exit 0 valid, 1 invalid.

    \b
      vpipe verify 1f1b -p 4 -m 8
      vpipe verify schedule.csv
      vpipe verify zb-h2 -p 4 -m 8 --max-activations 4
    """
    from vpipe.schedule.grid import around
    from vpipe.schedule.verify import verify
    from vpipe.schedule.violation import folded

    found = verify(program, max_activations=max_activations)
    if as_json:
        click.echo(json.dumps({"valid": not found, "violations": [asdict(each) for each in found]}))
        return int(bool(found))
    shape = f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    if not found:
        click.echo(f"{source.name}: valid ({shape}, {len(program)} actions)")
        return 0
    noun = "violation" if len(found) == 1 else "violations"
    click.echo(f"{source.name}: {len(found)} {noun} ({shape})\n")
    first = next((each for each in found if each.index >= 0), found[0])
    click.echo(around(program, first, found) + "\n")
    for fold in folded(found):
        click.echo(f"  {source.describe(fold.first)}{fold.more}")
    return 1
