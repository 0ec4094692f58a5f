"""``vpipe train``: from a config file to a trained model, on as many ranks as the config asks for.

Without a launcher it starts the ranks itself: on this machine, by ssh on those of ``launch.machines``, inside
``launch.container``. Under torchrun, srun or mpirun each process is one rank and runs the same command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vpipe import config as configs
from vpipe.cli import completion, loading
from vpipe.cli.options import config_options
from vpipe.errors import UserError, on_one_line
from vpipe.observe import dashboard
from vpipe.registry import FORM_REGISTRY
from vpipe.rundir import writing
from vpipe.rundir.claim import Claim, to_resume
from vpipe.rundir.journal import MISTAKE, Beat, Ending, EndingKind, conclude_from_outside
from vpipe.rundir.layout import LOGS, SUMMARY

if TYPE_CHECKING:
    from vpipe.launch.epochs import Elastic
    from vpipe.launch.stopping import Grace as LaunchGrace
    from vpipe.train.session import Materials


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--scheduler",
    shell_complete=completion.schedules,
    help="The schedule, instead of the config's (see 'vpipe schedules').",
)
@config_options
@click.option("--nproc", type=click.IntRange(1), help="Ranks of one pipeline: sets parallel.model_parallel_size.")
@click.option(
    "--elastic", metavar="MIN:MAX", help="Go on with MIN to MAX ranks when ranks are lost: sets launch.elastic."
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="The run directory; by default a new one under observe.directory.",
)
@click.option(
    "--resume",
    metavar="DIR|latest",
    help="Go on from a checkpoint, a run directory, or the latest run: of --output-dir, else of this config.",
)
@click.option("--check", is_flag=True, help="Compare the first step with one process, to the bit.")
@click.option("--overwrite", is_flag=True, help="Remove the run that --output-dir holds, and begin anew.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, alone on standard output.")
@click.option("--print-config", is_flag=True, help="Print the resolved config with comments, and stop.")
def command(
    config: Path,
    scheduler: str | None,
    overrides: tuple[str, ...],
    nproc: int | None,
    elastic: str | None,
    output_dir: Path | None,
    resume: str | None,
    check: bool,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    print_config: bool,
) -> int:
    """Train a model from a config file.

    \b
    Examples:
      vpipe train configs/default.yaml
      vpipe train configs/gpt_small.yaml --scheduler zb-h1 --set training.learning_rate=3e-4
      vpipe train configs/default.yaml --resume latest
      vpipe train configs/default.yaml --quiet --json > summary.json
      vpipe train configs/gpt_1f1b_cpu.yaml --elastic 2:4
      torchrun --nproc_per_node=4 -m vpipe train configs/gpt_small.yaml
      mpirun -n 4 vpipe train configs/gpt_small.yaml
    """
    if nproc is not None:
        overrides = (*overrides, f"parallel.model_parallel_size={nproc}")
    if elastic is not None:
        overrides = (*overrides, f'launch.elastic="{elastic}"')
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # a plugin may print
        loaded = loading.load(config, overrides, scheduler)
    if print_config:
        if as_json:
            raise UserError("--print-config trains nothing, so --json has no summary to print; give one of them")
        click.echo(configs.commented(loaded.config), nl=False)
        if loaded.config.training.parameter_groups:
            from vpipe.train.groups import described  # with torch, which the text above does without
            from vpipe.train.session import gather

            click.echo("\n# parameter_groups, as the parameters fall:")
            for line in described(gather(loaded.config).skeleton):
                click.echo(f"#   {line}")
        return 0
    resume = resume or loaded.config.checkpoint.resume
    if overwrite and resume:
        raise UserError(f"--overwrite removes the run that --resume {resume} would go on from; give one of them")
    rank = loading.launched_as()
    return run(
        loaded.config, rank, loaded.warnings, output_dir, resume, overwrite, loaded.source, quiet, as_json, check
    )


def run(
    config: configs.PipelineConfig,
    rank: int | None,
    warnings: tuple[str, ...],
    output_dir: Path | None,
    resume: str | None,
    overwrite: bool = False,
    source: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
    check: bool = False,
) -> int:
    """Train a checked config here and now, as ``rank`` of a launcher of others' or with ranks of our own."""
    from vpipe.rundir import claim

    if not rank:
        for warning in warnings:
            click.echo(f"vpipe: warning: {warning}", err=True)
    config, resume = _as_started(_on_nodes(config), output_dir, resume)
    elastic = _elastic(config) if "RANK" not in os.environ else None
    if check and elastic is not None:
        raise UserError(
            "--check compares the first step of ranks that stay; give it without launch.elastic (--elastic)"
        )
    start, again = None, resume is not None
    if resume is not None and (not rank or resume != "latest"):
        start, said = to_resume(config, output_dir, resume)
        if said and not rank:
            click.echo(f"vpipe: {said}", err=True)
    arguments: dict[str, Any] = {"resume": str(start) if start else None, "quiet": quiet} | (
        {"check": True} if check else {}
    )
    if rank is not None:
        from vpipe.launch.environment import interface_variables
        from vpipe.train import session, worker

        session.refuse(config)
        os.environ.update(interface_variables(config.launch.interface))
        where = str(output_dir) if output_dir else None
        with summary_alone(as_json) as runs:
            told = None if rank else runs.append
            return worker.run(config, **arguments, output_dir=where, overwrite=overwrite, continues=again, told=told)
    _enter_container(config)
    taken = claim.take(config, config.to_yaml(), output_dir, resume=again, source=start, overwrite=overwrite)
    with taken, summary_alone(as_json) as runs, dashboard.served(config, taken.directory, quiet) as config:
        runs.append(taken)
        arguments |= {"directory": str(taken.directory), "run": taken.run}
        if elastic is not None:
            elastic = replace(elastic, directory=taken.directory)
        try:
            materials = None if _forks(config) else loading.refuse(config, here=not _elsewhere(config))
            return _start(config, taken, arguments, elastic, source, materials)
        except UserError as error:  # the run directory says so too
            _conclude(taken, Ending.of(EndingKind.FAILED, on_one_line(error.sentence), MISTAKE))
            raise


def _elsewhere(config: configs.PipelineConfig) -> bool:
    """Whether the ranks run on other machines."""
    from vpipe.launch.hosts import all_local

    return bool(config.launch.machines) and not all_local(config.launch.machines)


def _forks(config: configs.PipelineConfig) -> bool:
    """Whether the ranks are processes of this machine, which a zygote starts: it checks the config before."""
    return config.parallel.transport != "inprocess" and config.num_ranks > 1 and not _elsewhere(config)


def _on_nodes(config: configs.PipelineConfig) -> configs.PipelineConfig:
    """The config for the nodes of the SLURM job that this runs in, where it takes them for its machines."""
    if config.launch.through != "srun" or "RANK" in os.environ:
        return config
    from vpipe.launch import slurm_nodes
    from vpipe.train.sizes import placed

    nodes = slurm_nodes.names(os.environ)
    found = placed(config, nodes)
    if found.num_ranks != config.num_ranks:
        click.echo(f"vpipe: {len(nodes)} nodes: {found.num_ranks} ranks instead of {config.num_ranks}", err=True)
    return found


def _as_started(
    config: configs.PipelineConfig, output_dir: Path | None, resume: str | None
) -> tuple[configs.PipelineConfig, str | None]:
    """Where another launcher (torchrun's elastic agent, a job that is queued again) decides how many ranks there are:
    the config for so many, which goes on from its newest checkpoint."""
    if config.launch.elastic is None or "RANK" not in os.environ:
        return config, resume
    from vpipe.train.sizes import started

    if output_dir is None and config.checkpoint.directory is None:
        raise UserError(
            "launch.elastic under torchrun, srun or mpirun goes on from the newest checkpoint when ranks are started "
            "again, which must be at a place that they know; give --output-dir or checkpoint.directory"
        )
    return started(config, int(os.environ.get("WORLD_SIZE", "1"))), resume or "latest"


def _elastic(config: configs.PipelineConfig) -> Elastic | None:
    """How many ranks there may be, where the config lets them come and go."""
    if config.launch.elastic is None:
        return None
    from vpipe.launch.epochs import Elastic
    from vpipe.schedule.catalog import get
    from vpipe.train.sizes import bounds

    replaces, asynchronous = config.launch.on_loss == "replace", get(config.parallel.scheduler).asynchronous
    if not replaces and asynchronous:
        click.echo(
            f"vpipe: warning: launch.on_loss is shrink and parallel.scheduler {config.parallel.scheduler}: with fewer "
            "stages an asynchronous run reads other weight versions and does not end with the same bits; "
            "launch.on_loss=replace keeps them",
            err=True,
        )
    by, saves = config.parallel.data_parallel_size, config.checkpoint.on_exit
    return Elastic(*bounds(config), by, replaces, saves=saves, rests=not asynchronous)


def _start(
    config: configs.PipelineConfig,
    taken: Claim,
    arguments: dict[str, Any],
    elastic: Elastic | None,
    source: Path | None,
    materials: Materials | None,
) -> int:
    """All ranks: threads of this process, processes of this machine, or of those of the config."""
    from vpipe.launch.zygote_start import PRELOAD
    from vpipe.rundir import claim

    forks, elsewhere = _forks(config), _elsewhere(config)
    FORM_REGISTRY.create("run record", taken.directory, config, source, forks or elsewhere)
    sys.stdout.flush()
    worker_module = "vpipe.train.worker" if elastic is None else "vpipe.train.elastic"
    target, variables = f"{worker_module}:train", {claim.COMMAND: json.dumps(claim.command())}
    told: dict[str, Any] = {
        "arguments": {"config": config.to_dict(), **arguments},
        "preload": (*PRELOAD, worker_module, *_compiler(config)),
        "log_dir": taken.directory / LOGS,
        "grace": _grace(config, taken.directory),
        "concluded": lambda ending: _conclude(taken, ending),
        "elastic": elastic,
    }
    if elsewhere:
        from vpipe.launch import machines, ssh

        launch = ssh.from_config(config, taken.directory)
        return machines.run(launch, target, config.num_ranks, environment=variables, **told)
    from vpipe.launch import hosts

    devices = hosts.device_variables(config.launch.machines) if config.launch.machines else {}
    if not forks:
        from vpipe.train import worker

        os.environ.update(devices)
        return worker.run(config, **arguments, materials=materials)
    from vpipe.launch import local
    from vpipe.launch.environment import interface_variables

    variables |= interface_variables(config.launch.interface) | devices
    if config.parallel.use_orion_scheduler:
        variables |= FORM_REGISTRY.create("orion", os.environ)
    return local.run(
        target,
        config.num_ranks,
        environment=variables,
        threads=config.launch.threads,
        port=config.launch.master_port,
        check=loading.check(config),
        **told,
    )


def _compiler(config: configs.PipelineConfig) -> list[str]:
    """The compiler, where every rank will import it: for layers that are compiled, or by an optimizer of the user's."""
    from vpipe.launch.local import COMPILER
    from vpipe.registry import OPTIMIZER_REGISTRY

    return [COMPILER] if config.model.compile or OPTIMIZER_REGISTRY.is_own(config.training.optimizer) else []


def _grace(config: configs.PipelineConfig, directory: Path) -> LaunchGrace | float:
    """What the config says, else what the run has measured."""
    from vpipe.launch.stopping import Grace

    return config.launch.grace or Grace(lambda: Beat.patience(directory), lambda: Beat.more_patience(directory))


def _conclude(taken: Claim, ending: Ending) -> str:
    """Write down an ending that no rank could write; what else there is to say."""
    ending = conclude_from_outside(taken.directory, taken.run, ending)
    said = ending.code != MISTAKE and (ending.checkpoint is not None or ending.kind is EndingKind.INTERRUPTED)
    return ending.remedy(taken.directory) if said else ""


def _enter_container(config: configs.PipelineConfig) -> None:
    """Become the same command inside the container, unless this is it, or the ranks are elsewhere."""
    if config.launch.container.kind == "none" or _elsewhere(config):
        return
    from vpipe.launch.container import MARK, Container, command_inside

    container = Container.from_config(config.launch.container)
    words = command_inside(container, sys.argv[1:], str(Path.cwd()), os.environ)
    if words is None:
        return
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, os.environ | {MARK: "1"})
    except OSError as error:
        raise UserError(
            f"{words[0]} cannot be started ({error.strerror}); install it, or set launch.container.kind: none"
        ) from None


@contextmanager
def summary_alone(wanted: bool) -> Iterator[list[Claim]]:
    """Yields a list for the run that is meant: its summary is printed at the end, also of a run that failed.

    What the run, or a print in a user's model, says in the meantime goes to standard error.
    """
    runs: list[Claim] = []
    if not wanted:
        yield runs
        return
    try:
        with redirect_stdout(sys.stderr):
            yield runs
    finally:
        for run in runs:
            found = writing.read(run.directory / SUMMARY)
            if found is not None and found.get("run") == run.run:
                click.echo(json.dumps({"directory": str(run.directory), **found}))
            else:
                click.echo(f"vpipe: {run.directory} has no summary of this run here, so there is no JSON", err=True)
