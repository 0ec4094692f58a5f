"""``vpipe submit``: a job for SLURM, Ray or Kubernetes from a config, checked before it waits in a queue."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from vpipe.cli import completion
from vpipe.cli.loading import load_for_elsewhere
from vpipe.cli.options import config_options

REMEDY = {
    "slurm": "mend the path, or where only the nodes have it: vpipe submit … --dry-run | sbatch",
    "ray": "mend the path, which must be the same on all machines",
    "kubernetes": "",
}
"""What to do where files that a job reads are not here."""


@click.command("submit")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["slurm", "ray", "kubernetes"]),
    default="slurm",
    show_default=True,
    help="Who runs it. Ray: an actor per rank; Kubernetes: a JobSet, printed with --dry-run.",
)
@click.option("--nodes", metavar="N|MIN-MAX", help="Number of nodes; with launch.elastic a range: what SLURM can give.")
@click.option(
    "--with",
    "asked",
    multiple=True,
    metavar="NAME=VALUE",
    help="What the engine is asked for. SLURM: sbatch's options, such as partition, gres, time; ntasks_per_node; name; "
    "array (runs of the sweep, or seeds); python; cancel_on_interrupt (with --follow). Ray: address, gpus_per_task, "
    "cpus_per_task, spread, python. Kubernetes: image, volume, gpus_per_task, cpus_per_task, memory, name.",
)
@click.option(
    "--sweep", multiple=True, metavar="KEY=A,B", help="One run per value, as a job array; again for more keys."
)
@config_options
@click.option("--scheduler", shell_complete=completion.schedules, help="Override parallel.scheduler.")
@click.option("--follow", is_flag=True, help="Show state and output until the job ends; exit with its code.")
@click.option("--dry-run", is_flag=True, help="Print the job script and do nothing.")
def command(
    config: Path,
    to: str,
    asked: tuple[str, ...],
    sweep: tuple[str, ...],
    overrides: tuple[str, ...],
    scheduler: str | None,
    follow: bool,
    dry_run: bool,
    **options: object,
) -> int:
    """Write a job that trains CONFIG, and submit it: to SLURM, or with --to to Ray or Kubernetes.

    What is given here overrides the config. Everything is checked first: a mistake costs a second here and an hour
    in the queue. A preempted job saves a checkpoint, is queued again and goes on from it.

    \b
      vpipe submit configs/gpt_small.yaml --nodes 2 --with gres=gpu:2 --dry-run
      vpipe submit configs/gpt_small.yaml --nodes 2 --with time=02:00:00 --follow
      vpipe submit configs/gpt_1f1b_cpu.yaml --nodes 2-4 --set launch.elastic=2:4
      vpipe submit configs/gpt_small.yaml --sweep training.learning_rate=1e-3,1e-4 --sweep parallel.scheduler=1f1b,zb-h1
      vpipe submit configs/gpt_small.yaml --to ray --with gpus_per_task=1
      vpipe submit configs/gpt_small.yaml --to kubernetes --with image=registry/vpipe:1 --dry-run
    """
    from vpipe.launch import engines

    options |= engines.asked_for(to, asked)
    load = partial(load_for_elsewhere, remedy="" if dry_run else REMEDY[to])
    if to != "slurm":
        refused = {"sweep": sweep or None, "follow": follow or None}
        return engines.submit(to, str(config), overrides, scheduler, dry_run, options | refused, click.echo, load)
    cancels = bool(options.pop("cancel_on_interrupt", False))
    from vpipe.launch.job import plan_job
    from vpipe.launch.slurm import script

    job, warnings = plan_job(str(config), sweep, overrides, scheduler, options, load)
    for warning in warnings:
        click.echo(f"vpipe: {warning}", err=True)
    text = script(job)
    if dry_run:
        click.echo(text, nl=False)
        return 0
    from vpipe.launch import queue

    number = queue.submit(text)
    runs = f", {len(job.points)} runs" if job.points else ""
    ranks = f"up to {job.num_ranks}" if job.elastic else job.num_ranks
    click.echo(f"vpipe: job {number} ({ranks} ranks on {job.num_nodes} nodes{runs}) is in the queue")
    return watch(number, cancels) if follow else 0


def watch(number: int, cancel_on_interrupt: bool) -> int:
    """Show a job until it ends."""
    from vpipe.launch import queue

    follower = queue.Follower(number)
    try:
        for line in follower.lines():
            click.echo(line)
    except KeyboardInterrupt:
        if cancel_on_interrupt:
            queue.cancel(number)
            click.echo(f"vpipe: job {number} is cancelled", err=True)
        else:
            click.echo(f"vpipe: job {number} goes on; 'scancel {number}' ends it", err=True)
        raise
    return follower.exit_code
