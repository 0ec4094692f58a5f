"""What every rank of ``vpipe train`` runs: how it is asked to stop, together with all others, and what its end means
for the run, be it an exception or what the watchdog found."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.observe import dashboard
from vpipe.observe.console import Console, QuietConsole
from vpipe.process import under_launcher
from vpipe.registry import load_plugins
from vpipe.rundir import claim
from vpipe.rundir.claim import Claim
from vpipe.rundir.journal import BY_SIGNAL, MISTAKE, MOST_DETAILS, Ending, EndingKind, conclude_from_outside
from vpipe.runtime import assembly
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.failure import Cause, PeerLost
from vpipe.runtime.ranks.membership import Membership
from vpipe.train.session import Materials, Session, open_session
from vpipe.train.trainer import Trainer

SEEN_WITHIN = 5.0


class StopRequests:
    """Requests to stop this run: USR1 (a cluster's warning), TERM, Ctrl-C and HUP end it after the
    update, on all ranks together, with a checkpoint. A second Ctrl-C ends it at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.heard = 0
        self.wish = ""
        """What else this rank was asked for, as text; all ranks hear of it at the same place."""
        self.granted = ""
        self.in_trouble = False
        """Whether the checkpoint that is on its way has failed on some rank."""

    @contextmanager
    def listening(self, to_the_end: bool = False) -> Iterator[None]:
        """Catch the signals while the body runs; where this is not the main thread, they are not ours.
        ``to_the_end``: this process ends with the run, and until it is gone nothing but Ctrl-C ends it earlier. Signals
        reach ranks one after the other: for the last one to hear, the run may be over because others have heard."""
        try:
            before = {number: signal.signal(number, self._hear) for number in BY_SIGNAL}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                # An interpreter that ends gives every handler up, but goes on ignoring what is ignored.
                deaf = to_the_end and number != signal.SIGINT
                signal.signal(number, signal.SIG_IGN if deaf else handler)

    def _hear(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def agreed(self, in_trouble: bool) -> signal.Signals | None:
        """The signal that any rank has heard; ``granted`` is what any has been asked for, ``in_trouble`` whether any
        says so. Every rank calls this."""
        if self._pipeline.in_process:
            self.granted, self.wish, self.in_trouble = self.wish, "", in_trouble
            return signal.Signals(self.heard) if self.heard else None
        wish = self.wish
        told = self._pipeline.gather_numbers([self.heard, bool(wish), in_trouble])
        heard, wished, troubled = (max(int(numbers[at]) for numbers in told) for at in range(3))
        self.granted = self._pipeline.gather_first(wish) if wished else ""
        self.wish = "" if self.granted else self.wish
        self.in_trouble = bool(troubled)
        return signal.Signals(heard) if heard else None


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
    check: bool = False,
    told: Callable[[Claim], object] | None = None,
    materials: Materials | None = None,
) -> int:
    """Train as one of the ranks that a launcher started, or alone; the exit code.

    ``directory`` is the one that our launcher has taken for ``run``; without it rank 0 takes one. ``continues`` allows
    one that a run has used: the user said ``--resume``, even if there was no checkpoint yet. ``check`` compares the
    first step with one process.
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
        if member is not None and not config.launch.threads and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(member.num_own_cores)
    claims = [Claim(Path(directory), run)] if directory and run else []
    with _concluding(claims, rank, member):
        session = open_session(config, materials)
        session.pipeline.num_checks = int(check)
        if not claims:
            resume = session.pipeline.gather_first(resume or "") or None  # rank 0 knows what the latest is
            chosen, source = Path(output_dir) if output_dir else None, Path(resume) if resume else None
            take = partial(
                claim.take, config, config.to_yaml(), chosen, resume=continues, source=source, overwrite=overwrite
            )
            claims.append(_take(session.pipeline, rank, take))
            if told is not None:
                told(claims[0])
        (taken,) = claims
        refuse_unseen(session.pipeline, taken)
        trainer = trainer_of(session, taken, quiet)
        if resume is not None:
            trainer.resume(Path(resume))
        page = dashboard.served(config, taken.directory, quiet) if rank == 0 else nullcontext()
        with trainer.stop_requests.listening(to_the_end=under_launcher()), page:
            trainer.run()
            if trainer.ended.code:
                session.pipeline.gather("")  # a launcher ends the others with the first that ends so: all are ready
        return trainer.ended.code


def trainer_of(session: Session, claim: Claim, quiet: bool) -> Trainer:
    """The trainer of a claimed run; rank 0's speaks."""
    section, kind = session.config.observe, QuietConsole if quiet else Console
    leads = session.pipeline.is_leader
    console = kind(line_format=section.line_format, log_interval=section.log_interval) if leads else None
    return Trainer(session, claim.directory, StopRequests(session.pipeline), console, claim.run)


@contextmanager
def _concluding(claims: Sequence[Claim], rank: int, member: Membership | None) -> Iterator[None]:
    """Around a run: on rank 0 whatever ends it is written down in the directory that it has claimed, also where a
    watchdog ends the process."""

    def write(how: Ending) -> None:
        for claim in claims:
            conclude_from_outside(claim.directory, claim.run, how)

    if member is not None and rank == 0:
        member.watchdog.leaving = lambda cause: write(of_cause(cause))
    try:
        yield
    except BaseException as error:
        if rank == 0:
            write(of_error(error))
        raise
    finally:
        for claim in claims:
            claim.release()


def of_error(error: BaseException) -> Ending:
    """The run ended by an exception of this rank."""
    if isinstance(error, UserError):
        return Ending.of(EndingKind.FAILED, error.sentence, MISTAKE)
    if isinstance(error, KeyboardInterrupt):
        return Ending.of(EndingKind.INTERRUPTED, "interrupted at once")
    if isinstance(error, PeerLost):
        return (
            of_cause(Cause(**error.cause)) if error.cause else Ending.of(EndingKind.LOST, str(error), rank=error.peer)
        )
    told = "".join(traceback.format_exception(error))[-MOST_DETAILS:]
    return Ending.of(EndingKind.FAILED, "".join(traceback.format_exception_only(error)).splitlines()[0], details=told)


def of_cause(cause: Cause) -> Ending:
    """The run ended because of another rank."""
    kind = {
        "gone": EndingKind.KILLED,
        "silent": EndingKind.LOST,
        "missing": EndingKind.LOST,
        "interrupt": EndingKind.INTERRUPTED,
    }
    code = MISTAKE if cause.kind == "user" else None
    return Ending.of(kind.get(cause.kind, EndingKind.FAILED), str(cause), code, rank=cause.rank)


def refuse_unseen(pipeline: Pipeline, claim: Claim) -> None:
    """Every rank must see the run directory that one of them, or their launcher, has made: otherwise checkpoints have
    pieces on several machines, and rank 0 waits for those that it never sees."""
    until = monotonic() + SEEN_WITHIN
    while not (is_seen := claim.is_seen()) and monotonic() < until:
        sleep(0.1)  # a network's file system may show it late
    for rank, host in enumerate(pipeline.gather("" if is_seen else socket.gethostname())):
        if host:
            raise UserError(
                f"rank {rank} on {host} does not see the run directory {claim.directory}, which all ranks write to; "
                "choose one on a file system that all machines share, with --output-dir"
            )


def _take(pipeline: Pipeline, rank: int, take: Callable[[], Claim]) -> Claim:
    """Rank 0 takes the run directory, and tells the others its name."""
    mine = take() if rank == 0 else None
    where = pipeline.gather_first(str(mine.directory) if mine else "")
    run = pipeline.gather_first(mine.run if mine else "")
    return mine or Claim(Path(where), run)
