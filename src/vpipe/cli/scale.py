"""``vpipe scale``: another number of ranks, or fewer machines, for an elastic run that is going on."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe.errors import UserError


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("ranks", type=click.IntRange(1), required=False)
@click.option("--without", multiple=True, metavar="MACHINE", help="Give this machine, or node, back; again for more.")
def command(directory: Path, ranks: int | None, without: tuple[str, ...]) -> int:
    """Let the elastic run in DIRECTORY go on with RANKS ranks, or without some of its machines.

    Ranks that are added are forked on the run's machines and join when they are ready; those that are too many leave.
    The ranks of a machine that is given back go to spare places, or the others go on without them; a SLURM job gives
    the node back to the cluster. A synchronous run still ends with the same bits.

    \b
    Examples:
      vpipe scale runs/latest 3
      vpipe scale runs/slurm-17 --without node4
    """
    from vpipe.rundir import state
    from vpipe.rundir.roster import Roster, want, want_back

    roster = Roster.read(directory)
    if roster is None:
        raise UserError(f"{directory} holds no elastic run; start one with 'vpipe train CONFIG --elastic MIN:MAX'")
    now = state.of(directory)
    if now.ended:
        raise UserError(f"the run in {directory} has ended ({now.sentence}); start it again to change its ranks")
    if without:
        if ranks is not None:
            raise UserError(f"{ranks} ranks and --without are two wishes; give one after the other")
        want_back(directory, without)
        click.echo(f"asked for {', '.join(without)} back; the run's output says when it is")
        return 0
    if ranks is None:
        raise UserError("give the number of ranks, or --without MACHINE")
    if not roster.least <= ranks <= roster.most:
        raise UserError(
            f"{ranks} ranks are asked for, but the run was started with --elastic {roster.least}:{roster.most}; "
            "give a number between"
        )
    if ranks % roster.by:
        raise UserError(
            f"{ranks} ranks are asked for, but every stage has {roster.by} replicas; give a multiple of {roster.by}"
        )
    want(directory, ranks)
    click.echo(f"asked for {ranks} ranks instead of {roster.wanted}")
    return 0
