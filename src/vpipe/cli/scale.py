"""``vpipe scale``: another number of ranks for an elastic run that is going on."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe.errors import UserError


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("ranks", type=click.IntRange(1))
def command(directory: Path, ranks: int) -> int:
    """Let the elastic run in DIRECTORY go on with RANKS ranks.

    Ranks that are added are forked on the run's machine and join when they are ready; those that are too many leave.
    A synchronous run still ends with the same bits.

    \b
    Examples:
      vpipe scale runs/latest 3
    """
    from vpipe.rundir import crew, state

    roster = crew.Roster.read(directory)
    if roster is None:
        raise UserError(f"{directory} holds no elastic run; start one with 'vpipe train CONFIG --elastic MIN:MAX'")
    now = state.of(directory)
    if now.ended:
        raise UserError(f"the run in {directory} has ended ({now.sentence}); start it again to change its ranks")
    if not roster.least <= ranks <= roster.most:
        raise UserError(
            f"{ranks} ranks are asked for, but the run was started with --elastic {roster.least}:{roster.most}; "
            "give a number between"
        )
    if ranks % roster.by:
        raise UserError(
            f"{ranks} ranks are asked for, but every stage has {roster.by} replicas; give a multiple of {roster.by}"
        )
    crew.want(directory, ranks)
    click.echo(f"asked for {ranks} ranks instead of {roster.wanted}")
    return 0
