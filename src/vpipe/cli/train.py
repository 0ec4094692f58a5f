"""``vpipe train``: from a config file to a trained model, on as many ranks as the config asks for.

Without a launcher it starts the ranks itself: on this machine, by ssh on those of ``launch.machines``, inside
``launch.container``. Under torchrun, srun or mpirun each process is one rank and runs the same command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vpipe import config as configs
from vpipe.cli import completion, loading
from vpipe.cli.options import plugin_option, set_option
from vpipe.errors import UserError, on_one_line
from vpipe.rundir import lineage, manifest, writing
from vpipe.rundir.claim import CLAIMED, Claim
from vpipe.rundir.journal import MISTAKE, Beat, Ending, EndingKind, conclude_from_outside
from vpipe.rundir.layout import CONFIG, LOGS, SUMMARY

if TYPE_CHECKING:
    from vpipe.launch.elastic import Elastic
    from vpipe.launch.loop import Grace as LaunchGrace
    from vpipe.train.session import Materials


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--scheduler",
    shell_complete=completion.schedules,
    help="The schedule, instead of the config's (see 'vpipe schedules').",
)
@set_option
@plugin_option
@click.option("--nproc", type=click.IntRange(1), help="Ranks of one pipeline: sets parallel.model_parallel_size.")
@click.option(
    "--elastic", metavar="MIN:MAX", help="Go on with MIN to MAX ranks when ranks are lost: sets launch.elastic."
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="The run directory; by default a new one under observe.directory.",
)
@click.option("--resume", metavar="DIR|latest", help="Go on from a checkpoint, a run directory, or the latest run.")
@click.option("--overwrite", is_flag=True, help="Remove the run that --output-dir holds, and begin anew.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, alone on standard output.")
@click.option("--print-config", is_flag=True, help="Print the resolved config with comments, and stop.")
def command(
    config: Path,
    scheduler: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    nproc: int | None,
    elastic: str | None,
    output_dir: Path | None,
    resume: str | None,
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
    overrides = loading.with_plugins(overrides, plugins)
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # a plugin may print
        loaded = loading.load(config, overrides, scheduler)
    if print_config:
        if as_json:
            raise UserError("--print-config trains nothing, so --json has no summary to print; give one of them")
        click.echo(configs.commented(loaded.config), nl=False)
        return 0
    resume = resume or loaded.config.checkpoint.resume
    if overwrite and resume:
        raise UserError(f"--overwrite removes the run that --resume {resume} would go on from; give one of them")
    rank = loading.launched_as()
    return run(loaded.config, rank, loaded.warnings, output_dir, resume, overwrite, loaded.source, quiet, as_json)


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
) -> int:
    """Train a checked config here and now, as ``rank`` of a launcher of others' or with ranks of our own."""
    from vpipe.rundir import claim

    if not rank:
        for warning in warnings:
            click.echo(f"vpipe: warning: {warning}", err=True)
    asked = resume is not None
    config, resume = _as_started(_on_nodes(config), output_dir, resume)
    elastic = _elastic(config) if "RANK" not in os.environ else None
    start, again = _resume_from(config, output_dir, resume, other_runs=asked), resume is not None
    arguments: dict[str, Any] = {"resume": str(start) if start else None, "quiet": quiet}
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
    with taken, summary_alone(as_json) as runs:
        runs.append(taken)
        arguments |= {"directory": str(taken.directory), "run": taken.run}
        if elastic is not None:
            elastic = replace(elastic, directory=taken.directory)
        materials = None if _forks(config) else _refuse(config, taken)
        if _elsewhere(config):
            return _by_ssh(config, taken, start, quiet, arguments, elastic)
        return _here(config, taken, arguments, elastic, source, materials)


def _refuse(config: configs.PipelineConfig, taken: Claim) -> Materials | None:
    """Raise where the config cannot train, and let the run directory say so; what the check has gathered."""
    try:
        return loading.refuse(config, here=not _elsewhere(config))
    except UserError as error:
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
    from vpipe.launch.elastic import Elastic
    from vpipe.schedule.catalog import get
    from vpipe.train.sizes import bounds

    replaces = config.launch.on_loss == "replace"
    if not replaces and get(config.parallel.scheduler).asynchronous:
        click.echo(
            f"vpipe: warning: launch.on_loss is shrink and parallel.scheduler {config.parallel.scheduler}: with fewer "
            "stages an asynchronous run reads other weight versions and does not end with the same bits; "
            "launch.on_loss=replace keeps them",
            err=True,
        )
    rescue = "vpipe.train.rescue:save" if config.checkpoint.on_exit else ""
    return Elastic(*bounds(config), config.parallel.data_parallel_size, replaces, rescue=rescue)


def _here(
    config: configs.PipelineConfig,
    taken: Claim,
    arguments: dict[str, Any],
    elastic: Elastic | None,
    source: Path | None,
    materials: Materials | None,
) -> int:
    """All ranks on this machine: threads of this process, or processes."""
    from vpipe.launch import hosts
    from vpipe.launch.environment import interface_variables, orion_preload
    from vpipe.rundir import claim

    forks = _forks(config)
    taken.keep(config, source, forks)
    devices = hosts.device_variables(config.launch.machines) if config.launch.machines else {}
    if not forks:
        from vpipe.train import worker

        os.environ.update(devices)
        return worker.run(config, **arguments, materials=materials)
    from vpipe.launch import local
    from vpipe.launch.early import PRELOAD

    variables = interface_variables(config.launch.interface) | devices
    variables[claim.COMMAND] = json.dumps(claim.command())
    if config.parallel.use_orion_scheduler:
        variables |= orion_preload(os.environ)
    sys.stdout.flush()
    worker_module = "vpipe.train.worker" if elastic is None else "vpipe.train.elastic"
    return local.run(
        f"{worker_module}:train",
        config.num_ranks,
        arguments={"config": config.to_dict(), **arguments},
        log_dir=taken.directory / LOGS,
        environment=variables,
        threads=config.launch.threads,
        port=config.launch.master_port,
        preload=(*PRELOAD, worker_module, *_compiler(config)),
        grace=_grace(config, taken.directory),
        concluded=lambda ending: _conclude(taken, ending),
        check=loading.check(config) if elastic is None else loading.check_sizes(config),
        elastic=elastic,
    )


def _compiler(config: configs.PipelineConfig) -> list[str]:
    """The compiler, where every rank will import it: for layers that are compiled, or by an optimizer of the user's."""
    from vpipe.launch.local import COMPILER
    from vpipe.registry import OPTIMIZER_REGISTRY

    return [COMPILER] if config.model.compile or OPTIMIZER_REGISTRY.is_own(config.training.optimizer) else []


def _grace(config: configs.PipelineConfig, directory: Path) -> LaunchGrace | float:
    """What the config says, else what the run has measured."""
    from vpipe.launch.loop import Grace

    return config.launch.grace or Grace(lambda: Beat.patience(directory), lambda: Beat.more_patience(directory))


def _conclude(taken: Claim, ending: Ending) -> str:
    """Write down an ending that no rank could write; what else there is to say."""
    ending = conclude_from_outside(taken.directory, taken.run, ending)
    said = ending.code != MISTAKE and (ending.checkpoint is not None or ending.kind is EndingKind.INTERRUPTED)
    return ending.remedy(taken.directory) if said else ""


def _by_ssh(
    config: configs.PipelineConfig,
    taken: Claim,
    start: Path | None,
    quiet: bool,
    arguments: dict[str, Any],
    elastic: Elastic | None,
) -> int:
    """Run on the machines of the config. The ranks read the resolved config."""
    from vpipe.launch import elastic_hosts, ssh
    from vpipe.launch.early import PRELOAD

    words = [str(taken.directory / CONFIG), *(("--resume", str(start)) if start else ()), *(["--quiet"] * quiet)]
    launch = ssh.from_config(config, words, taken.directory, {CLAIMED: taken.run})
    assert launch is not None, "asked only where ranks are elsewhere"
    if elastic is not None:
        target = "vpipe.train.elastic"
        return elastic_hosts.run(
            launch,
            config.num_ranks,
            elastic,
            {
                "target": f"{target}:train",
                "arguments": {"config": config.to_dict(), **arguments},
                "preload": [*PRELOAD, target],
            },
            _grace(config, taken.directory),
            lambda ending: _conclude(taken, ending),
            taken.directory / LOGS,
        )
    return ssh.run(launch, click.echo)


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


def _resume_from(
    config: configs.PipelineConfig, output_dir: Path | None, resume: str | None, other_runs: bool = True
) -> Path | None:
    """The directory to go on from; ``latest`` is the newest run with a checkpoint, of ``other_runs`` too where the user
    has asked for it: who did not ask means the run that was broken off, and no other."""
    if resume is None:
        return None
    if resume != "latest":
        if not Path(resume).exists():
            raise UserError(f"there is nothing at {resume} to resume from; give a checkpoint or a run directory")
        return Path(resume).resolve()
    kept = config.checkpoint.directory
    places = [Path(kept)] if kept else [output_dir] if output_dir else []
    if other_runs and not any(lineage.current(place) for place in places):  # one that a run has used is the one meant
        runs = Path(config.observe.directory)
        places += sorted((path for path in runs.glob("*") if path.is_dir() and not path.is_symlink()), key=_age)
    for place in places:
        with suppress(UserError):
            if manifest.find(place):
                return place.resolve()
    click.echo("vpipe: there is no checkpoint yet; starting anew", err=True)
    return None


def _age(directory: Path) -> tuple[float, str]:
    """Sorts runs, the newest first, by when they began."""
    entry = lineage.current(directory)
    with suppress(ValueError):
        if entry is not None:
            return -datetime.fromisoformat(entry.started).timestamp(), directory.name
    return -directory.stat().st_mtime, directory.name


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
