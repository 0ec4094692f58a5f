"""The training loop: read units, step the pipeline, say how it goes, keep checkpoints.

    session ─▶ resume? ─▶ ┌ read ─▶ train_step ─▶ metrics ─▶ evaluate? ─▶ checkpoint? ┐ ─▶ summary
                          └───────────────────────────────────────────────────────────┘

Every rank runs this loop in the same order. What only one should do (lines, files) the leader does: the process that
holds rank 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Any

import psutil
import torch

from vpipe.errors import UserError
from vpipe.observe.console import Console
from vpipe.observe.recorder import Recorder
from vpipe.runtime.update import LossScale
from vpipe.schedule.semantics import version_table
from vpipe.train import checkpoint
from vpipe.train.checkpoint import DamagedCheckpoint
from vpipe.train.facts import run_facts
from vpipe.train.feed import Feed, Position
from vpipe.train.learning_rate import learning_rate
from vpipe.train.metrics import Metrics
from vpipe.train.profiling import profiled
from vpipe.train.rundir import Journal
from vpipe.train.session import Session

MAX_CHAINED_UNITS = 256
"""Units that an asynchronous schedule runs between two drains at most."""


@dataclass
class Trainer:
    """One run of one session, on this rank."""

    session: Session
    directory: Path
    console: Console | None
    iteration: int = 0
    position: Position = (0, 0)
    stop: int = 0
    _last_loss: float | None = None
    _recorders: list[Recorder] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, pipeline = self.session.config, self.session.pipeline
        training = config.training
        self.is_leader = pipeline.engines[0].rank == 0
        self.num_iterations = _num_iterations(training.epochs, self.session.feed.num_batches, training.max_iterations)
        self.updates_per_iteration = pipeline.programs.num_updates(pipeline.programs.training())
        self.num_updates = self.num_iterations * self.updates_per_iteration // training.gradient_accumulation
        pipeline.set_learning_rate(learning_rate(training, self.num_updates))
        self._rate = learning_rate(training, self.num_updates)
        self.journal = Journal(self.directory) if self.is_leader else None
        self.metrics = Metrics(
            config.num_ranks,
            self.session.model.num_parameters if self.is_leader else 0,
            self.session.model.flops_per_token if self.is_leader else 0.0,
            training.precision,
            config.observe.warmup_iterations,
        )
        if config.observe.trace:
            versions = version_table(pipeline.programs.training())
            self._recorders = [Recorder(self.directory, engine.rank, versions=versions) for engine in pipeline.engines]

    def run(self) -> dict[str, Any]:
        """Train to the end, or until somebody asks to stop; the summary."""
        facts = run_facts(self.session) | {
            "iterations": self.num_iterations,
            "iterations_per_epoch": self.session.feed.num_batches,
            "directory": str(self.directory),
        }
        if self.journal is not None:
            self.journal.facts(facts)
        if self.console is not None:
            self.console.start(facts)
        try:
            with self._catching_signals():
                while self.iteration < self.num_iterations and not self._should_stop():
                    self._train()
                    self._evaluate_and_save()
                    if self.session.config.training.exit_after_profile and self._profiles(self.iteration - 1):
                        break
            return self._finish()
        finally:
            for recorder in self._recorders:
                recorder.close()
            self.session.feed.close()
            if self.console is not None:
                self.console.close()

    def _train(self) -> None:
        """One iteration; an asynchronous schedule chains several, so that it drains rarely."""
        session, training = self.session, self.session.config.training
        positions = self._chain()
        begin = perf_counter()
        units = session.feed.read(positions) if self._reads_data() else None
        updates = (
            self.iteration + 1
        ) % training.gradient_accumulation == 0 or self.iteration + 1 == self.num_iterations
        with profiled(self, self._profiles(self.iteration)):
            loss = session.pipeline.train_step(
                units.inputs() if units else None,
                units.targets() if units else None,
                update=updates,
                weight=1 / training.gradient_accumulation,
                num_microbatches=training.num_microbatches * len(positions),
            )
        seconds = perf_counter() - begin
        first = self.iteration
        self.iteration += len(positions)
        self.position = session.feed.next(positions[-1])
        self._last_loss = loss
        tokens = units.num_tokens if units else 0
        samples = session.config.dataset.batch_size * session.config.parallel.data_parallel_size
        for number in range(first, self.iteration):
            share = len(positions)
            self.metrics.add(seconds / share, tokens // share, samples, counts=not self._profiles(number))
        self._report(positions[-1][0], loss, tokens, seconds, len(positions))

    def _chain(self) -> list[Position]:
        """The iterations of one program: as many as fit before the next thing that needs a drain."""
        config, feed = self.session.config, self.session.feed
        positions = [self.position]
        if self.session.pipeline.programs.synchronous or config.parallel.replicas is not None:
            return positions
        intervals = [config.training.evaluation_interval, config.checkpoint.interval, config.observe.log_interval]
        most = max(1, MAX_CHAINED_UNITS // config.training.num_microbatches)
        while len(positions) < min(most, self.num_iterations - self.iteration):
            done = self.iteration + len(positions)
            following = feed.next(positions[-1])
            if following[1] == 0 or any(interval > 0 and done % interval == 0 for interval in intervals):
                break
            if self._profiles(done) or self._profiles(done - 1):
                break
            positions.append(following)
        return positions

    def _reads_data(self) -> bool:
        return self.session.pipeline.is_first or self.session.pipeline.is_last

    def _profiles(self, iteration: int) -> bool:
        return iteration == self.session.config.training.profile_iteration

    def _report(self, epoch: int, loss: float, tokens: int, seconds: float, num_iterations: int) -> None:
        pipeline = self.session.pipeline
        trace = pipeline.trace()
        for recorder, engine in zip(self._recorders, pipeline.engines, strict=True):
            recorder.record(pipeline.step - 1, self.iteration, trace.records[engine.rank], self._memory(engine))
        if self.journal is None:
            return
        updater = pipeline.engines[0].updater
        update = max(updater.num_updates.values())
        line = {
            "kind": "train",
            "iteration": self.iteration,
            "epoch": epoch,
            "update": update,
            "loss": loss,
            "learning_rate": self._rate(max(0, update - 1)),
            "tokens": tokens,
            "seconds": seconds / num_iterations,
            "tokens_per_second": tokens / seconds,
            "gradient_norm": updater.last_norm,
            "skipped": updater.num_skipped,
            "time": time(),
        }
        self.journal.metrics(line)
        if self.console is not None:
            self.console.iteration(line | {"memory": [psutil.Process().memory_info().rss]})

    def _memory(self, engine: Any) -> dict[str, int]:
        weights = sum(
            p.numel() * p.element_size() for s in engine.stages.values() for p in s.weights.parameters.values()
        )
        versions = max(getattr(stage.weights, "most_versions", 1) for stage in engine.stages.values())
        return {"rss": psutil.Process().memory_info().rss, "weights": weights, "versions": versions}

    def _evaluate_and_save(self) -> None:
        config = self.session.config
        if _due(config.training.evaluation_interval, self.iteration, self.position, self.num_iterations):
            self.evaluate()
        if _due(config.checkpoint.interval, self.iteration, self.position, self.num_iterations):
            self.save()

    def evaluate(self) -> float | None:
        """The loss on held-out data, by tokens; ``None`` where there are none."""
        session, training = self.session, self.session.config.training
        valid = session.data.valid
        if valid is None:
            return None
        try:
            feed = Feed(
                valid,
                num_microbatches=training.num_microbatches,
                num_replicas=session.config.parallel.data_parallel_size,
                batch_size=session.config.dataset.batch_size,
                max_tokens=session.config.dataset.max_tokens,
                shuffle=False,
            )
        except UserError:
            return None  # fewer held-out examples than one batch
        limit = training.evaluation_batches
        count = feed.num_batches if limit < 0 else min(limit, feed.num_batches)
        begin, total, tokens = perf_counter(), 0.0, 0
        for batch in range(count):
            units = feed.read([(0, batch)])
            loss = session.pipeline.evaluate(units.inputs(), units.targets())
            total, tokens = total + loss * units.num_tokens, tokens + units.num_tokens
        mean = total / max(tokens, 1)
        line = {
            "kind": "evaluation",
            "iteration": self.iteration,
            "loss": mean,
            "seconds": perf_counter() - begin,
            "time": time(),
        }
        if self.journal is not None:
            self.journal.metrics(line)
        if self.console is not None:
            self.console.evaluation(line)
        return mean

    @property
    def checkpoints(self) -> Path:
        where = self.session.config.checkpoint.directory
        return Path(where) if where is not None else self.directory / "checkpoints"

    def save(self) -> None:
        """A checkpoint; where it cannot be written the run goes on and says so."""
        pipeline = self.session.pipeline
        scale = pipeline.engines[0].updater.scaler
        position = checkpoint.Position(
            self.iteration,
            *self.position,
            pipeline.num_units,
            max(pipeline.engines[0].updater.num_updates.values()),
            scale.value,
            scale.good_steps,
            self.session.config.training.seed,
            self.session.fingerprint,
        )
        try:
            checkpoint.save(self.checkpoints, pipeline, position, keep=self.session.config.checkpoint.keep)
        except OSError as error:
            self._say(
                f"warning: no checkpoint at iteration {self.iteration}: {error}; "
                "the previous one is intact and the run goes on"
            )

    def resume(self, where: Path) -> None:
        """Go on from the newest whole checkpoint of ``where``."""
        for path in checkpoint.find(where):
            try:
                position = checkpoint.read_position(path, self.session.fingerprint)
                checkpoint.check_files(path)
            except DamagedCheckpoint as error:
                self._say(f"warning: {error}; trying the one before")
                continue
            self._restore(path, position)
            return
        raise UserError(f"no checkpoint of {where} is whole; start anew, or restore one from a copy")

    def _restore(self, path: Path, position: checkpoint.Position) -> None:
        pipeline = self.session.pipeline
        checkpoint.restore(path, pipeline)
        self.iteration, self.position = position.iteration, (position.epoch, position.batch)
        pipeline.num_units = position.num_units
        for engine in pipeline.engines:
            engine.updater.num_updates = dict.fromkeys(engine.updater.num_updates, position.num_updates)
            old = engine.updater.scaler
            engine.updater.scaler = LossScale(
                position.loss_scale, old.dynamic, old.growth_interval, position.good_steps
            )
        self._say(f"resumed from {path} at iteration {position.iteration}")

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.message(text)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """USR1 (a cluster's warning) and TERM end the run after the iteration, with a checkpoint."""

        def heard(number: int, _: Any) -> None:
            self.stop = number

        try:
            old = {number: signal.signal(number, heard) for number in (signal.SIGUSR1, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are somebody else's
            yield
            return
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _should_stop(self) -> bool:
        """Whether any rank was asked to stop: all stop together, after a checkpoint."""
        stop = self.stop
        if len(self.session.pipeline.engines) == 1 and self.session.config.num_ranks > 1:
            transport = self.session.pipeline.engines[0].transport
            flags = transport.all_gather(torch.tensor([stop]), range(transport.num_ranks), [1] * transport.num_ranks)
            stop = max(int(flag) for flag in flags)
        if stop and self.iteration:
            self._say(f"asked to stop ({signal.Signals(stop).name}): saving a checkpoint at iteration {self.iteration}")
            self.save()
        return bool(stop)

    def _finish(self) -> dict[str, Any]:
        summary = self.metrics.summary() | {
            "final_loss": self._last_loss,
            "iterations_done": self.iteration,
            "stopped": self.iteration < self.num_iterations,
            "scheduler": self.session.config.parallel.scheduler,
        }
        if self.journal is not None:
            self.journal.summary(summary)
            self.journal.close()
        if self.console is not None:
            self.console.finish(summary)
        return summary


def _num_iterations(epochs: int, batches: int, most: int) -> int:
    whole = epochs * batches
    return whole if most < 0 else min(whole, most)


def _due(interval: int, iteration: int, position: Position, last: int) -> bool:
    """Never, after each epoch, or every so many iterations; always at the end of the run."""
    if interval < 0:
        return False
    at_epoch_end = position[1] == 0
    return iteration == last or (at_epoch_end if interval == 0 else iteration % interval == 0)
