"""Measuring a config's model, for ``vpipe profile`` and ``vpipe plan``: ranks that measure, and a bar that shows it.

Without a launcher the ranks are processes of this machine, which are alike, and one link stands for all. Under
torchrun, srun or mpirun, and on ``launch.machines``, the ranks measure where they would train, with every link between
two of them.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from vpipe import config as configs
from vpipe.cli import loading
from vpipe.cli.bar import bar, following
from vpipe.errors import UserError
from vpipe.plan.costs import Profile, load_profile, profile_from_json
from vpipe.process import AS_MODULE

ROUNDS = 10
"""How often each layer is measured."""
UNQUIET = 0.25
"""Spread of a layer's times above which a profile is not to be trusted."""


def measure(
    config: configs.PipelineConfig, repeat: int, source: Path, overrides: Sequence[str], quiet: bool = False
) -> Profile | int:
    """The profile of a config's model, measured here and now; or the exit code: of what went wrong, which was said, or
    of a rank that has only helped. The ranks of other machines read ``source`` and ``overrides`` anew."""
    from vpipe.launch.hosts import all_local

    if loading.launched_as() is not None:
        found = _as_rank(config, repeat, quiet)
    elif config.launch.machines and not all_local(config.launch.machines):
        found = _by_ssh(config, repeat, source, overrides)
    else:
        found = _here(config, repeat, quiet)
    if isinstance(found, Profile):
        _warn(found)
    return found


def _here(config: configs.PipelineConfig, repeat: int, quiet: bool) -> Profile | int:
    """On processes of this machine."""
    from vpipe.launch import local
    from vpipe.launch.zygote_start import PRELOAD
    from vpipe.process import num_cores

    num_ranks = max(2, min(config.num_ranks, num_cores()))
    threads = config.launch.threads or max(1, num_cores() // config.num_ranks)  # as many as in training
    with tempfile.TemporaryDirectory(prefix="vpipe-profile-") as directory:
        with following(Path(directory), "measuring", quiet):
            code = local.run(
                "vpipe.train.measure.profile:profile",
                num_ranks,
                arguments={"config": config.to_dict(), "directory": directory, "repeat": repeat},
                threads=threads,
                preload=(*PRELOAD, "vpipe.train.measure.profile"),
                check=loading.check(config, parallel=False),
            )
        return code or load_profile(Path(directory) / "profile.json")


def _as_rank(config: configs.PipelineConfig, repeat: int, quiet: bool) -> Profile | int:
    """As one of the ranks that a launcher has started."""
    from vpipe.launch.environment import interface_variables
    from vpipe.train.measure.profile import measure as measured

    os.environ.update(interface_variables(config.launch.interface))
    loading.refuse(config, parallel=False)
    with bar("measuring", quiet) as show:
        return measured(config.to_dict(), repeat, show, every_link=True) or 0


def _by_ssh(config: configs.PipelineConfig, repeat: int, source: Path, overrides: Sequence[str]) -> Profile | int:
    """On the machines of the config; rank 0 says what was found."""
    from vpipe.launch import machines, ssh

    words = [word for setting in overrides for word in ("--set", setting)]
    command = [AS_MODULE, "vpipe", "profile", str(source), "--repeat", str(repeat), "--json", *words]
    printed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="vpipe-profile-") as directory:
        launch = ssh.from_config(config, Path(directory))
        code = machines.run(launch, command, config.num_ranks, stdout=printed)
    found = [line for line in printed.getvalue().decode().splitlines() if line.startswith('{"format": ')]
    if code or not found:
        return code or 1
    return profile_from_json(json.loads(found[-1]))


def _warn(found: Profile) -> None:
    worst = max(found.layers, key=lambda layer: layer.spread)
    if worst.spread > UNQUIET:
        click.echo(
            f"vpipe: warning: the times of {worst.name!r} spread over {worst.spread:.0%} of their median; measure "
            "again when the machine is quiet, or with a larger --repeat",
            err=True,
        )


def _same(path: Path, source: Path) -> bool:
    """Whether two names are one file, by a link of either kind too."""
    return path.resolve() == source.resolve() or (path.exists() and source.exists() and path.samefile(source))


def refuse_lost(*paths: Path | None, read: tuple[Path | None, ...] = ()) -> None:
    """Say before a long measurement that its result could not be written, or would replace what it is made from. Of
    several ranks only the first writes."""
    if loading.launched_as():
        return
    for path in paths:
        for source in read:
            if path is not None and source is not None and _same(path, source):
                raise UserError(f"{path} is what this reads, and writing there would destroy it; choose another file")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no directory {path.parent}")
