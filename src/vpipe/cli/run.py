"""``vpipe run``: a script of the user's own on N local ranks."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc", "-n", type=click.IntRange(1, 1024), required=True, help="Number of ranks.")
@click.option(
    "--log-dir", type=click.Path(path_type=Path, file_okay=False), help="Also write rank0.log, rank1.log, … here."
)
@click.option(
    "--grace", type=click.FloatRange(0), default=10.0, show_default=True, help="Seconds to stop in after Ctrl-C."
)
@click.option("--quiet", is_flag=True, help="Show failures only.")
@click.option("--module", "-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: int, log_dir: Path | None, grace: float, quiet: bool, as_module: bool, script: str, args: tuple[str, ...]
) -> int:
    """Run SCRIPT with its ARGS on N local ranks, and end them all.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
    Ctrl-C stops the ranks in good order, Ctrl-C twice at once. The exit code is 0 if every rank ended well.

    \b
      vpipe run --nproc 4 examples/minimal.py
      vpipe run --nproc 2 --log-dir logs train.py --steps 100
    """
    from vpipe.launch import local

    target = ["-m", script, *args] if as_module else [script, *args]
    return local.run(target, nproc, log_dir=log_dir, quiet=quiet, grace=grace)
