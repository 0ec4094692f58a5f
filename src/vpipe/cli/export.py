"""``vpipe export``: the weights of a run, for other programs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The directory to make.")
@click.option("--trained", is_flag=True, help="The weights as they were trained, not their average (training.ema).")
def command(run: Path, out: Path, trained: bool) -> None:
    """Write the weights of RUN (a run directory or a checkpoint) as safetensors.

    A Hugging Face model gets its own names and config.json: the library reads the directory, and so does
    model.directory of a config. Other models keep the names <layer>.<name>.

    \b
      vpipe export runs/2026-11-16T10-00-00 --out weights
    """
    from vpipe.train.checkpoints.export import WEIGHTS, export

    done = export(run, out, trained=trained)
    for note in done.notes:
        click.echo(f"vpipe: warning: {note}", err=True)
    click.echo(f"{out / WEIGHTS}: {done.num_tensors} tensors with {done.names} names, from {done.source}")
