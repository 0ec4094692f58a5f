"""What every rank of ``vpipe train`` runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vpipe.config import PipelineConfig
from vpipe.observe.console import Console, QuietConsole
from vpipe.process import under_launcher
from vpipe.registry import load_plugins
from vpipe.rundir import claim
from vpipe.rundir.claim import CLAIMED, Claim
from vpipe.rundir.endings import Ending
from vpipe.runtime import assembly
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.membership import Membership
from vpipe.train import ending
from vpipe.train.session import Materials, open_session
from vpipe.train.trainer import Trainer


def train(config: dict[str, Any], **arguments: Any) -> int:
    """The same for a launcher, which has the config as plain values."""
    return run(PipelineConfig.from_dict(config), **arguments)


def run(
    config: PipelineConfig,
    directory: str | None = None,
    run: str | None = None,
    resume: str | None = None,
    output_dir: str | None = None,
    overwrite: bool = False,
    continues: bool = False,
    quiet: bool = False,
    told: Callable[[Claim], object] | None = None,
    materials: Materials | None = None,
) -> int:
    """Train as one of the ranks that a launcher started, or alone; the exit code.

    ``directory`` is the one that our launcher has taken for ``run``; without it rank 0 takes one. ``continues`` allows
    one that a run has used: the user said ``--resume``, even if there was no checkpoint yet.
    ``told`` is called with the directory that was taken here. ``materials`` are what the check of this process has
    gathered.
    """
    load_plugins(config.plugins)
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    rank, member = 0, None
    if under_launcher():
        assembly.join(config.parallel.timeout)
        rank, member = dist.get_rank(), membership.current()
    taken = Claim(Path(directory), run) if directory and run else None
    with _concluding(taken, rank, member) as conclusion:
        session = open_session(config, materials)
        if taken is None:
            chosen, source = Path(output_dir) if output_dir else None, Path(resume) if resume else None
            take = partial(claim.take, config, chosen, resume=continues, source=source, overwrite=overwrite)
            taken = _take(session.pipeline, chosen, rank, take)
            conclusion.claim = taken
            if told is not None:
                told(taken)
        console = make_console(config, quiet) if rank == 0 else None
        trainer = Trainer(session, taken.directory, console, taken.run)
        if resume is not None:
            trainer.resume(Path(resume))
        with trainer.stop_requests.listening(to_the_end=under_launcher()):
            trainer.run()
            if trainer.ended.code:
                session.pipeline.gather("")  # a launcher ends the others with the first that ends so: all are ready
        return trainer.ended.code


def make_console(config: PipelineConfig, quiet: bool) -> Console:
    """What rank 0 speaks through."""
    kind = QuietConsole if quiet else Console
    return kind(line_format=config.observe.line_format, log_interval=config.observe.log_interval)


class _concluding:
    """Around a run on rank 0: whatever ends it is written down, also where a watchdog ends the process."""

    def __init__(self, taken: Claim | None, rank: int, member: Membership | None) -> None:
        self.claim = taken
        self._rank = rank
        if member is not None and rank == 0:
            member.watchdog.leaving = lambda cause: self._write(ending.of_cause(cause))

    def __enter__(self) -> _concluding:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._rank == 0:
            self._write(ending.of_error(error))
        if self.claim is not None:
            self.claim.release()

    def _write(self, how: Ending) -> None:
        if self.claim is not None:
            with suppress(OSError):
                ending.conclude(self.claim.directory, self.claim.run, how)


def _take(pipeline: Pipeline, output_dir: Path | None, rank: int, take: Callable[[], Claim]) -> Claim:
    """Rank 0 takes the run directory, unless a launcher of ours has, and tells the others its name."""
    mine = None
    told = os.environ.get(CLAIMED)
    if told and output_dir is not None:
        mine = Claim(output_dir, told)
    elif rank == 0:
        mine = take()
    where = pipeline.gather_first(str(mine.directory) if mine else "")
    run = pipeline.gather_first(mine.run if mine else "")
    return mine or Claim(Path(where), run)
