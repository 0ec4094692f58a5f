"""The training loop: read units, step the pipeline, say how it goes, keep checkpoints.

    session ─▶ resume? ─▶ ┌ read ─▶ train_step ─▶ tell ─▶ evaluate? ─▶ checkpoint? ┐ ─▶ summary
                          └────────────────────────────────────────────────────────┘

Every rank runs this loop in the same order.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from signal import Signals
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vpipe.errors import UserError
from vpipe.observe.console import Console
from vpipe.rundir import lineage
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.journal import ENDING, Ending
from vpipe.rundir.manifest import Standing
from vpipe.runtime.job import Stats
from vpipe.runtime.moves.moving import Moved
from vpipe.runtime.options import Memory
from vpipe.schedule.authors.authoring import Chain
from vpipe.schedule.catalog import short_name
from vpipe.schedule.placement import Layout
from vpipe.train.checkpoints.manager import CheckpointManager
from vpipe.train.evaluation import Evaluation
from vpipe.train.feed import Position, Units, accumulated
from vpipe.train.optimizers import learning_rate
from vpipe.train.reporting.clocks import profiled
from vpipe.train.reporting.run_log import Metrics, RunLog, device_name, run_facts
from vpipe.train.session import Session

if TYPE_CHECKING:
    from vpipe.train.adapt import Adapter, Decision
    from vpipe.train.worker import StopRequests

MAX_CHAINED_UNITS = 256
"""Units that an asynchronous schedule runs between two drains at most."""


class Trainer:
    """One run of one session, on this rank."""

    def __init__(
        self,
        session: Session,
        directory: Path,
        stop_requests: StopRequests,
        console: Console | None = None,
        run: str | None = None,
    ) -> None:
        config, pipeline, training = session.config, session.pipeline, session.config.training
        self.session = session
        self.directory = directory
        self.position: Position = (0, 0)
        """The batch that comes next."""
        self.iteration = 0
        most = training.max_iterations
        whole = training.epochs * session.feed.num_batches
        self.num_iterations = whole if most < 0 else min(whole, most)
        self.num_updates = -(-self.num_iterations // training.gradient_accumulation) * pipeline.updates_per_step
        self.rate = learning_rate(training, self.num_updates)
        pipeline.set_learning_rate(self.rate)
        self.run_id = run or lineage.new_id()
        self.log = RunLog(session, directory, self.run_id, console)
        self.checkpoints = CheckpointManager(session, directory, self.run_id, self.log.say, self.log.beat)
        self.evaluation = Evaluation(session) if training.evaluation_interval >= 0 else None
        self.stop_requests = stop_requests
        self.metrics = Metrics(config.num_ranks, training.precision, config.observe.warmup_iterations)
        self.adapter = self._adapter()
        self._last_loss: float | None = None
        self.ended: Ending
        """How the run ended, once it has."""
        self._closed = False
        self._owes_checkpoint = False
        self._asked: Signals | None = None
        self._updates: deque[float] = deque(maxlen=16)
        """Seconds of the latest updates."""
        self._since_update = perf_counter()
        self.updated: Callable[[], None] | None = None
        """Called between two updates, when all that belongs to the one before is done."""
        self.around_move: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is around every move of layers, which may open connections."""
        self._wished = ""
        """A layout that was asked for and whose frozen weights are on their way."""
        self._accumulating: list[Units] = []
        """The iterations of this update that are read but not yet trained on."""

    def resume(self, where: Path) -> None:
        """Go on from the newest whole checkpoint of ``where``."""
        try:
            self._go_on(self.checkpoints.resume(where))
        except BaseException:
            self.close()
            raise

    def restore(self, standing: Standing, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from a copy in memory of this very run."""
        self._go_on(self.checkpoints.restore(standing, tensors))
        self._owes_checkpoint = self._owed()

    def _owed(self) -> bool:
        """Whether the update that was restored asked for a checkpoint, which may have got lost with a rank."""
        interval, step = self.session.config.checkpoint.interval, self.session.config.training.gradient_accumulation
        if interval <= 0:
            return interval == 0 and (self.position[1] < step or self.iteration == self.num_iterations)
        return self._due(interval) or self.iteration // interval != (self.iteration - step) // interval

    def _go_on(self, position: Position) -> None:
        self.position = position
        self.iteration = position[0] * self.session.feed.num_batches + position[1]

    def run(self) -> dict[str, Any]:
        """Train to the end, or until somebody asks to stop; the summary. ``ended`` says how."""
        training = self.session.config.training
        try:
            self.checkpoints.enter()
            self.log.start(self._facts())
            self.log.resumed(self.iteration)
            if training.warmup > self.num_updates:
                self.log.say(
                    f"warning: training.warmup is {training.warmup:g} updates, but the run makes {self.num_updates}: "
                    "the learning rate does not reach its peak"
                )
            if self.evaluation is not None and not self.evaluation.num_batches:
                self.log.say(f"warning: there is no evaluation: {self.evaluation.why_not}")
            if self._owes_checkpoint:
                self.checkpoints.save(self.iteration, self.position)
                self._owes_checkpoint = False
            with self.stop_requests.listening():
                self._since_update = perf_counter()
                while self.iteration < self.num_iterations and not self._stops():
                    self._train()
                    self._evaluate_and_save()
                    if self.updated is not None and self._ends_update(self.iteration):
                        self.updated()
                    if training.exit_after_profile and self._profiles(self.iteration - 1):
                        break
            unsaved = self.checkpoints.end()
            summary = self._summary()
            self.ended = self.log.finish(summary, self._asked, self.iteration, unsaved)
            return summary
        finally:
            self.close()

    def close(self) -> None:
        """End what runs beside: readers of data, recorders, the page, last the heartbeat. Once is enough."""
        if not self._closed:
            self._closed = True
            self.checkpoints.close()
            self.session.close()
            self.log.close()

    def _adapter(self) -> Adapter | None:
        """Who moves layers between ranks, if the config asks for it."""
        session = self.session
        mode = session.config.parallel.adapt
        if mode == "off":
            return None
        from vpipe.train.adapt import Adapter  # with the planner: a run that moves nothing does without
        from vpipe.train.measure.profile import memory_cap

        sizes = [3 * size for size in session.skeleton.weight_bytes]  # with what optimizers keep, about
        cap = memory_cap(session)
        work = session.skeleton.work
        return Adapter(session.pipeline, mode, work, sizes, self._adapted, self._move, cap, self._prepare_move)

    def _move(self, layout: Layout, memory: Memory | None = None) -> Moved:
        with self.around_move():
            return self.session.pipeline.move(layout, memory)

    def _prepare_move(self, layout: Layout) -> bool:
        with self.around_move():
            return self.session.pipeline.prepare_move(layout)

    def _consider_wish(self, wish: str) -> None:
        """Somebody outside wants another layout: ``{"partition": layers per stage, "ranks": their order}``. What
        nothing writes is sent first."""
        told, layout = json.loads(wish), self.session.pipeline.layout
        try:
            wanted = layout.with_counts(told["partition"]).with_ranks(told["ranks"])
            self._wished = wish if self._prepare_move(wanted) else ""
        except UserError:
            self._wished = ""  # moving says why
        if not self._wished:
            self._move_as_asked(wish)

    def _move_as_asked(self, wish: str) -> None:
        told, pipeline = json.loads(wish), self.session.pipeline
        self._wished = ""
        self.checkpoints.settle()
        try:
            moved = self._move(pipeline.layout.with_counts(told["partition"]).with_ranks(told["ranks"]))
        except UserError as error:
            self.log.say(f"iteration {self.iteration}  not moved as asked: {error.sentence}")
            return
        if self.adapter is not None:
            self.adapter.forget_times()
        from vpipe.train.adapt import Decision

        asked = f"asked for {told['partition']} on ranks {told['ranks']}"
        self._adapted(Decision(tuple(told["partition"]), True, asked), moved)

    def _adapt(self, seconds: float) -> None:
        """Between two updates, with no checkpoint under way."""
        if self.adapter is not None and self._ends_update(self.iteration):
            self.checkpoints.settle()
            self.adapter.after_step(seconds, self.num_iterations - self.iteration)

    def _adapted(self, decision: Decision, moved: Moved | None) -> None:
        facts = self._facts() if moved is not None else None
        self.log.adapted(self.iteration, decision, moved, facts)

    def _facts(self) -> RunFacts:
        num_microbatches = self.session.prepare(len(self._chain()))
        return replace(
            run_facts(self.session, num_microbatches),
            run=self.run_id,
            iterations=self.num_iterations,
            iterations_per_epoch=self.session.feed.num_batches,
            directory=str(self.directory),
        )

    def _train(self) -> None:
        """One iteration; an asynchronous schedule chains several, so that it drains rarely."""
        session, pipeline = self.session, self.session.pipeline
        self.log.align_clocks(self.iteration)
        positions = self._chain()
        count = len(positions)
        begin = perf_counter()
        units = self._read(positions) if session.reads_data else None
        watched = self._profiles(self.iteration)
        around = self._profiled() if watched else self.log.counted()
        with around:
            loss = pipeline.train_step(
                units.inputs() if units else None,
                units.targets() if units else None,
                update=self._ends_update(self.iteration + 1) or count > 1,
                num_microbatches=session.prepare(count),
            )
        seconds, stats = perf_counter() - begin, pipeline.stats
        self.iteration += count
        self.position = session.feed.next(positions[-1])
        if units is not None:
            loss = loss / units.part if units.part else loss
        self._last_loss = loss
        tokens, samples = (units.num_tokens, units.num_samples) if units else (0, 0)
        for _ in range(count):
            self.metrics.add(seconds / count, tokens / count, samples / count, counts=not watched)
        if self._ends_update(self.iteration):
            self._updates.append(perf_counter() - self._since_update)
        beat = {"phase": "training", "iteration": self.iteration, "iterations": self.num_iterations}
        beat["update_seconds"] = max(self._updates, default=0.0)
        self.log.iteration(self._line(positions[-1][0], loss, tokens, seconds, count, stats), beat)
        self.checkpoints.poll()
        self._adapt(seconds / count)

    def _read(self, positions: list[Position]) -> Units:
        """The units of these iterations. Where gradients are accumulated, all iterations of the update are read first:
        a unit weighs as much as its share of all their targets."""
        if self.session.config.training.gradient_accumulation == 1:
            return self.session.read(positions)
        if not self._accumulating:
            group, end = [self.position], self.iteration + 1
            while not self._ends_update(end):
                group.append(self.session.feed.next(group[-1]))
                end += 1
            self._accumulating = accumulated([self.session.feed.read([position]) for position in group])
        return self._accumulating.pop(0)

    def _ends_update(self, iteration: int) -> bool:
        """Whether an update follows after that many iterations."""
        return iteration % self.session.config.training.gradient_accumulation == 0 or iteration == self.num_iterations

    def _chain(self) -> list[Position]:
        """The iterations of one program: as many as fit before the next thing that needs a drain."""
        config, feed = self.session.config, self.session.feed
        positions = [self.position]
        chains = self.session.pipeline.spec.chains
        if chains is Chain.NOT or (chains is Chain.BATCHES and config.training.gradient_accumulation > 1):
            return positions
        intervals = [
            config.training.evaluation_interval,
            config.checkpoint.interval,
            config.observe.log_interval,
            config.observe.verbose_interval,
        ]
        most = max(1, MAX_CHAINED_UNITS // (config.training.num_microbatches * self.session.num_replicas))
        while len(positions) < min(most, self.num_iterations - self.iteration):
            done = self.iteration + len(positions)
            following = feed.next(positions[-1])
            if following[1] == 0 or any(interval > 0 and done % interval == 0 for interval in intervals):
                break
            if self._profiles(done) or self._profiles(done - 1):
                break
            positions.append(following)
        return positions

    def _profiled(self) -> AbstractContextManager[Any]:
        name = f"profiler_{short_name(self.session.config.parallel.scheduler)}"
        return profiled(self.session.pipeline, self.directory / name)

    def _profiles(self, iteration: int) -> bool:
        return iteration == self.session.config.training.profile_iteration

    def _line(self, epoch: int, loss: float, tokens: int, seconds: float, count: int, stats: Stats) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "epoch": epoch,
            "update": stats.num_updates,
            "loss": loss,
            "learning_rate": self.rate(max(0, stats.num_updates - 1)),
            "tokens": tokens,
            "seconds": seconds / count,
            "tokens_per_second": tokens / seconds,
            "gradient_norm": stats.gradient_norm,
            "loss_scale": stats.loss_scale,
            "skipped": stats.num_skipped,
        }

    def _evaluate_and_save(self) -> None:
        config = self.session.config
        if self._due(config.training.evaluation_interval):
            self.evaluate()
        self._owes_checkpoint = self._owes_checkpoint or self._due(config.checkpoint.interval)
        if self._owes_checkpoint and self._ends_update(self.iteration):  # half of an update cannot be resumed
            self.checkpoints.save(self.iteration, self.position)
            self._owes_checkpoint = False

    def evaluate(self) -> float | None:
        """The loss on held-out data, told; ``None`` where there are none."""
        if self.evaluation is None or not self.evaluation.num_batches:
            return None
        begin = perf_counter()
        loss = self.evaluation.run()
        self.log.evaluation({"iteration": self.iteration, "loss": loss, "seconds": perf_counter() - begin})
        return loss

    def _due(self, interval: int) -> bool:
        """Never, after each epoch, or every so many iterations; otherwise also at the end of the run."""
        if interval < 0:
            return False
        now = self.position[1] == 0 if interval == 0 else self.iteration % interval == 0
        return now or self.iteration == self.num_iterations

    def _stops(self) -> bool:
        """Whether any rank was asked to stop: all stop together, between two updates, after a checkpoint."""
        if not self._ends_update(self.iteration):
            return False
        self._since_update = perf_counter()
        self._asked = self.stop_requests.agreed()
        if self._asked is None:
            if self.stop_requests.granted:
                self._consider_wish(self.stop_requests.granted)
            elif self._wished and self.session.pipeline.is_prepared():
                self._move_as_asked(self._wished)
            return False
        self.log.say(f"asked to stop ({self._asked.name}) after iteration {self.iteration}")
        self.log.beat(lambda beat: setattr(beat, "phase", ENDING), at_once=True)
        if self.iteration:
            self.checkpoints.save(self.iteration, self.position)
        return True

    def _summary(self) -> dict[str, Any]:
        model, device = self.session.skeleton, device_name(self.session.pipeline.devices[0])
        return self.metrics.summary(model.num_parameters, model.flops_per_token, device) | {
            "final_loss": self._last_loss,
            "iterations_done": self.iteration,
            "stopped": self._asked is not None,
            "scheduler": self.session.config.parallel.scheduler,
        }
