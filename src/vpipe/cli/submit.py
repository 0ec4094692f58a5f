"""``vpipe submit``: a job for SLURM, Ray or Kubernetes from a config, checked before it waits in a queue."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe.cli import completion
from vpipe.cli.loading import load_for_elsewhere, with_plugins
from vpipe.cli.options import plugin_option, set_option
from vpipe.errors import UserError


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
    "--ntasks-per-node", type=click.IntRange(1), help="Ranks per node; all ranks, spread evenly, if not given."
)
@click.option(
    "--elastic", metavar="MIN:MAX", help="Ranks, and nodes, may be lost, taken and given back: docs/elastic.md."
)
@click.option("--partition", "-p", help="Partition (queue).")
@click.option("--account", "-A", help="Account that pays.")
@click.option("--qos", help="Quality of service.")
@click.option("--gres", help="Generic resources per node, such as gpu:4.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Processor cores per rank.")
@click.option("--mem", "memory", help="Memory per node, such as 64G.")
@click.option("--time", "-t", help="Longest duration, such as 01:30:00.")
@click.option("--name", "-J", help="Name of the job; the config's name if not given.")
@click.option("--requeue/--no-requeue", default=None, help="Queue again after a preemption and go on.")
@click.option(
    "--sweep", multiple=True, metavar="KEY=A,B", help="One run per value, as a job array; again for more keys."
)
@click.option("--array", help="Which runs of the sweep, such as 0-7%2; without a sweep: seeds.")
@plugin_option
@set_option
@click.option("--scheduler", shell_complete=completion.schedules, help="Override parallel.scheduler.")
@click.option("--python", default=None, help="Python program of the ranks; this one if not given.")
@click.option("--address", help="Ray: the cluster's address; by default the one this machine belongs to.")
@click.option("--gpus-per-task", type=click.IntRange(0), help="Ray, Kubernetes: GPUs of each rank.")
@click.option("--spread", is_flag=True, default=None, help="Ray: as many machines as there are, instead of as few.")
@click.option("--image", help="Kubernetes: the image of the pods; launch.container.image if not given.")
@click.option("--volume", help="Kubernetes: a PersistentVolumeClaim with data and runs.")
@click.option("--follow", is_flag=True, help="Show state and output until the job ends; exit with its code.")
@click.option("--cancel-on-interrupt", is_flag=True, help="With --follow: Ctrl-C cancels the job.")
@click.option("--dry-run", is_flag=True, help="Print the job script and do nothing.")
def command(
    config: Path,
    to: str,
    elastic: str | None,
    sweep: tuple[str, ...],
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    scheduler: str | None,
    follow: bool,
    cancel_on_interrupt: bool,
    dry_run: bool,
    **options: object,
) -> int:
    """Write a job that trains CONFIG, and submit it: to SLURM, or with --to to Ray or Kubernetes.

    Options override the config's launch.slurm. Everything is checked first: a mistake costs a second here and an hour
    in the queue. A preempted job saves a checkpoint, is queued again and goes on from it.

    \b
      vpipe submit configs/gpt_small.yaml --nodes 2 --ntasks-per-node 2 --gres gpu:2 --dry-run
      vpipe submit configs/gpt_small.yaml --nodes 2 --time 02:00:00 --follow
      vpipe submit configs/gpt_1f1b_cpu.yaml --nodes 2-4 --elastic 2:4
      vpipe submit configs/gpt_small.yaml --sweep training.learning_rate=1e-3,1e-4 --sweep parallel.scheduler=1f1b,zb-h1
      vpipe submit configs/gpt_small.yaml --to ray --gpus-per-task 1
      vpipe submit configs/gpt_small.yaml --to kubernetes --image registry/vpipe:1 --dry-run
    """
    if elastic is not None:
        overrides = (*overrides, f'launch.elastic="{elastic}"')
    overrides = with_plugins(overrides, plugins)
    if to != "slurm":
        from vpipe.launch import engines

        asked = {"sweep": sweep or None, "follow": follow or None, "cancel_on_interrupt": cancel_on_interrupt or None}
        return engines.submit(
            to, str(config), overrides, scheduler, dry_run, options | asked, click.echo, load_for_elsewhere
        )
    for name in ("address", "gpus_per_task", "spread", "image", "volume"):
        if options.pop(name, None) is not None:
            raise UserError(f"--{name.replace('_', '-')} says nothing to SLURM; give --to ray or --to kubernetes")
    from vpipe.launch.job import plan_job
    from vpipe.launch.slurm import script

    job, warnings = plan_job(str(config), sweep, overrides, scheduler, options, load_for_elsewhere)
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
    return watch(number, cancel_on_interrupt) if follow else 0


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
