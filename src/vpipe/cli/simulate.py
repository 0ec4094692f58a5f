"""``vpipe simulate``: how long a program takes, where it idles, what it holds."""

from __future__ import annotations

import json
from typing import Any

import click

from vpipe.cli.choice import ProgramSource, program_options
from vpipe.cli.timing import TIMES, cost_options, scale_option
from vpipe.schedule.program import Program


@click.command("simulate")
@program_options
@cost_options
@scale_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(program: Program, source: ProgramSource, as_json: bool, **times: Any) -> None:
    """Time a schedule on the costs you give; times are of one rank's whole share of a microbatch.

    \b
      vpipe simulate 1f1b -p 4 -m 8
      vpipe simulate zb-h1 -p 4 -m 8 --forward 1 --input-grad 1.2 --weight-grad 0.8 --latency 0.1
      vpipe simulate interleaved -p 4 -m 8 -v 2 --json
    """
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.timeline import uniform

    source.check(program)
    found = simulate(program, uniform(program.placement, **times)).summary()
    if as_json:
        click.echo(json.dumps(found))
        return
    given = ", ".join(f"{key.replace('_', ' ')} {times[key]:g}" for key in TIMES)
    shape = f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    click.echo(f"{source.name}: {shape}; {given}\n")
    for key, value in found.items():
        shown = [f"{share:.0%}" for share in value] if isinstance(value, list) and key == "utilisation" else value
        text = " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
        click.echo(f"  {key.replace('_', ' '):<18}{text:<24}{_MEANING[key]}".rstrip())


_MEANING = {
    "makespan": "first start to last end, over all ranks",
    "maxspan": "the longest single rank's span",
    "ideal": "the busiest rank's work",
    "bubble": "the idle share over all ranks",
    "utilisation": "per rank, the share of the makespan that it works",
    "peak_activations": "per rank, in microbatches",
    "weight_versions": "per stage, held at once",
    "staleness": "per stage, in updates",
}
