"""Measuring a config's model, for ``vpipe profile`` and ``vpipe plan``: ranks that measure, and a bar that shows it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from vpipe import config as configs
from vpipe.cli import loading
from vpipe.cli.bar import following
from vpipe.errors import UserError
from vpipe.plan.costs import Profile, load_profile

ROUNDS = 10
"""How often each layer is measured."""
UNQUIET = 0.25
"""Spread of a layer's times above which a profile is not to be trusted."""


def measure(config: configs.PipelineConfig, repeat: int, quiet: bool = False) -> Profile | int:
    """The profile of a config's model, measured here and now; or the exit code of what went wrong, which was said."""
    from vpipe.launch import local
    from vpipe.launch.process import num_cores

    num_ranks = max(2, min(config.num_ranks, num_cores()))
    threads = config.launch.threads or max(1, num_cores() // config.num_ranks)  # as many as in training
    with tempfile.TemporaryDirectory(prefix="vpipe-profile-") as directory:
        with following(Path(directory), "measuring", quiet):
            code = local.run(
                "vpipe.train.measure.profile:profile",
                num_ranks,
                arguments={"config": config.to_dict(), "directory": directory, "repeat": repeat},
                threads=threads,
                preload=(*local.PRELOAD, "vpipe.train.measure.profile"),
                check=loading.check(config, parallel=False),
            )
        if code:
            return code
        found = load_profile(Path(directory) / "profile.json")
    worst = max(found.layers, key=lambda layer: layer.spread)
    if worst.spread > UNQUIET:
        click.echo(
            f"vpipe: warning: the times of {worst.name!r} spread over {worst.spread:.0%} of their median; measure "
            "again when the machine is quiet, or with a larger --repeat",
            err=True,
        )
    return found


def refuse_lost(*paths: Path | None, read: tuple[Path | None, ...] = ()) -> None:
    """Say before a long measurement that its result could not be written, or would replace what it is made from."""
    for path in paths:
        for source in read:
            if path is not None and source is not None and path.resolve() == source.resolve():
                raise UserError(f"{path} is what this reads, and writing there would destroy it; choose another file")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no directory {path.parent}")
