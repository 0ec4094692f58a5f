"""``vpipe profile``: what each layer of a model costs on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vpipe.cli import loading
from vpipe.cli.options import config_options
from vpipe.cli.profiling import ROUNDS, measure, refuse_lost
from vpipe.plan.costs import write_text
from vpipe.registry import FORM_REGISTRY


@click.command("profile")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the profile as JSON, or, where the name ends with .txt, PipeDream's graph text; may be repeated.",
)
@click.option("--repeat", type=click.IntRange(1, 1000), default=ROUNDS, show_default=True, help="Rounds of each layer.")
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    config: Path,
    outputs: tuple[Path, ...],
    repeat: int,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Measure the layers of a model, the links between ranks, the swap lane and the runtime itself.

    The model, the data, the size of a microbatch, the optimizer and the number format are the config's. Layers that are
    alike are measured once. Where a launcher starts the ranks, or launch.machines names hosts, every link between two
    ranks is measured.

    \b
    Examples:
      vpipe profile configs/default.yaml -o profile.json
      vpipe plan profile.json -p 4 -m 8 --memory 512MiB
      torchrun --nnodes 2 --nproc_per_node 2 … -m vpipe profile configs/gpt_small.yaml -o profile.json
    """
    refuse_lost(*outputs, read=(config,))
    found = measure(loading.load(config, overrides).config, repeat, config, overrides, quiet=as_json)
    if isinstance(found, int):
        return found
    for path in outputs:
        if path.suffix == ".txt":
            write_text(path, str(FORM_REGISTRY.create("graph text", found)))
        else:
            found.save(path)
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return 0
    click.echo(found.table())
    for path in outputs:
        click.echo(f"written to {path}")
    return 0
