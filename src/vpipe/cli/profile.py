"""``vpipe profile``: what each layer of a model costs on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vpipe.cli import loading
from vpipe.cli.options import plugin_option, set_option
from vpipe.cli.profiling import ROUNDS


@click.command("profile")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the profile as JSON.")
@click.option("--repeat", type=click.IntRange(1, 1000), default=ROUNDS, show_default=True, help="Rounds of each layer.")
@click.option(
    "--graph-text", type=click.Path(path_type=Path, dir_okay=False), help="Write PipeDream's graph text as well."
)
@plugin_option
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    config: Path,
    output: Path | None,
    repeat: int,
    graph_text: Path | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
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
    from vpipe.cli.profiling import measure, refuse_lost
    from vpipe.plan.costs import write_text
    from vpipe.plan.graph_text import export_graph

    refuse_lost(output, graph_text, read=(config,))
    overrides = loading.with_plugins(overrides, plugins)
    found = measure(loading.load(config, overrides).config, repeat, config, overrides, quiet=as_json)
    if isinstance(found, int):
        return found
    if output is not None:
        found.save(output)
    if graph_text is not None:
        write_text(graph_text, str(export_graph(found)))
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return 0
    click.echo(found.table())
    for path in (output, graph_text):
        if path is not None:
            click.echo(f"written to {path}")
    return 0
