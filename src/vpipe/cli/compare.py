"""``vpipe compare``: a fair sweep over schedules and microbatches."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe import config as configs
from vpipe.cli import completion
from vpipe.cli.choice import COUNT
from vpipe.cli.loading import KNOWN
from vpipe.cli.options import config_options
from vpipe.cli.timing import Numbers


@click.command("compare")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--schedulers",
    shell_complete=completion.several_schedules,
    required=True,
    help="Names with commas between: gpipe,1f1b,zb-h1.",
)
@click.option("--microbatches", type=Numbers(int), help="Numbers with commas between: 4,8. [the config's]")
@click.option("--models", default="", help="Names of models, instead of the config's one.")
@click.option("--repeats", type=COUNT, default=1, show_default=True, help="Runs of each; they are interleaved.")
@config_options
@click.option("--timeout", type=click.FloatRange(min=1), default=3600.0, show_default=True, help="Seconds of one run.")
@click.option("--retry", is_flag=True, help="Run again what failed before.")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory.")
def command(
    config: Path,
    schedulers: str,
    microbatches: list[int] | None,
    models: str,
    repeats: int,
    overrides: tuple[str, ...],
    timeout: float,
    retry: bool,
    output: Path,
) -> int:
    """Train the same model under several schedules and compare: one JSON a run, one CSV, one page.

    Seed, initial weights, data, precision and partition are the same for all runs. A comparison that was interrupted
    goes on where it stopped. Exit code 1: a run failed, or synchronous schedules gave different losses.

    \b
      vpipe compare configs/default.yaml --schedulers 1f1b,zb-v,pipedream -o sweep
      vpipe compare configs/default.yaml --schedulers gpipe,1f1b,zb-h1 --microbatches 4,8 --repeats 3 -o sweep
    """
    from vpipe.observe import comparison, sweep

    if microbatches is None:
        microbatches = [configs.load(config, overrides, names=KNOWN).config.training.num_microbatches]
    wanted = sweep.Sweep(config, _names(schedulers), tuple(microbatches), _names(models), repeats, overrides, timeout)
    results = sweep.run(wanted, output, click.echo, retry=retry)
    shape = f"{config}, {len(wanted.schedules)} schedules, {repeats} runs each"
    about = {"title": output.resolve().name, "subtitle": shape, "footer": "one run in full: vpipe report DIR/runs/NAME"}
    table, page = comparison.write(output, results, about)
    differ = [verdict for verdict in comparison.equality(results).values() if verdict not in ("equal", "reference")]
    failed = sum(result.get("status") != "done" for result in results)
    click.echo(f"{table}\n{page}")
    for verdict in differ:
        click.echo(f"synchronous losses differ: {verdict}", err=True)
    if failed:
        click.echo(f"{failed} of {len(results)} runs failed; the table says why", err=True)
    return 1 if failed or differ else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
