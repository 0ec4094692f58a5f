"""The training loop: read units, step the pipeline, say how it goes, keep checkpoints.

    session ─▶ resume? ─▶ ┌ read ─▶ train_step ─▶ tell ─▶ evaluate? ─▶ checkpoint? ┐ ─▶ summary
                          └────────────────────────────────────────────────────────┘

Every rank runs this loop in the same order.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
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
from vpipe.runtime.moves.moving import Moved
from vpipe.runtime.options import Memory
from vpipe.schedule.catalog import short_name
from vpipe.schedule.placement import Layout
from vpipe.train.checkpoints.manager import CheckpointManager
from vpipe.train.evaluation import Evaluation
from vpipe.train.feed import Position, TrainingProgress
from vpipe.train.groups import thaw, thaws
from vpipe.train.rates import RunPlan
from vpipe.train.reporting.clocks import profiled
from vpipe.train.reporting.norms import GradientNorms
from vpipe.train.reporting.peaks import device_name
from vpipe.train.reporting.run_log import Metrics, RunLog, run_facts
from vpipe.train.session import Session
from vpipe.train.soundness import LEAST_RATE, Improvement, Soundness
from vpipe.train.units import Units, accumulated

if TYPE_CHECKING:
    from vpipe.train.adapt import Adapter, Decision
    from vpipe.train.worker import StopRequests


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
        config, training = session.config, session.config.training
        self.session = session
        self._thaws = thaws(training)
        self.directory = directory
        self._go_on(TrainingProgress(0, (0, 0), 0))
        self.run_id = run or lineage.new_id()
        self.log = RunLog(session, directory, self.run_id, console)
        self.checkpoints = CheckpointManager(session, directory, self.run_id, self.log.say, self.log.beat)
        self.evaluation = Evaluation(session) if training.evaluation_interval >= 0 else None
        self.stop_requests = stop_requests
        self.metrics = Metrics(config.num_ranks, training.precision, config.observe.warmup_iterations)
        self.adapter = self._adapter()
        self._norms = GradientNorms(session) if config.observe.gradient_norms else None
        self._line: Mapping[str, Any] = {"loss": None}
        """What there is to say of the latest iteration."""
        self._owes_evaluation = False
        self.ended: Ending
        """How the run ended, once it has."""
        self._closed = False
        self._owes_checkpoint = False
        self._asked: Signals | None = None
        self._fault = ""
        """Why the run ends before its end."""
        self._updates: deque[float] = deque(maxlen=16)
        """Seconds of the latest updates."""
        self._since_update = perf_counter()
        self.updated: Callable[[], None] | None = None
        """Called between two updates, when all that belongs to the one before is done."""
        self.around_move: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is around every move of layers, which may open connections."""
        self._accumulating: list[Units | None] = []
        """The iterations of this update that are read but not yet trained on."""

    def resume(self, where: Path) -> None:
        """Go on from the newest whole checkpoint of ``where``."""
        try:
            self._go_on(self.checkpoints.resume(where))
            if self.checkpoints.changes:
                scale, rate = self.session.pipeline.loss_scale.value, self.plan.rate_at(self.position)
                scaled = f", loss scale {scale:g}" if self.session.config.training.precision == "fp16" else ""
                self.log.say(
                    f"warning: not as in the run that it goes on from: {self.checkpoints.changes}; it goes on with "
                    f"learning rate {rate:.4g}{scaled}"
                )
        except BaseException:
            self.close()
            raise

    def restore(self, standing: Standing, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from a copy in memory of this very run."""
        self._go_on(self.checkpoints.restore(standing, tensors))
        for line in self.checkpoints.trained(self.iteration):
            self.metrics.add(line["seconds"], line["tokens"], line["samples"], line.get("flops", 0.0))
        due = self.checkpoints.last_due(self.progress, self.num_iterations)
        self._owes_checkpoint = self.checkpoints.newest < due
        if self._owes_checkpoint and due < self.iteration:
            self.log.say(f"the checkpoint of iteration {due} was lost on its way; {self.iteration} is saved instead")

    def _go_on(self, progress: TrainingProgress) -> None:
        self.iteration, self.position, self.examples = progress.iteration, progress.position, progress.examples
        self.lowered = progress.lowered
        self.soundness, self.improvement = Soundness(self.session), Improvement(self.session, progress.best)
        self.plan = RunPlan(self.session, self.iteration, self.position, self.lowered)
        self.num_iterations = self.plan.num_iterations
        self.session.pipeline.set_learning_rate(self.plan.rate)
        self._thaw()

    def _thaw(self) -> None:
        thaw((held.module for held in self.session.pipeline.held_layers()), self.iteration)

    @property
    def progress(self) -> TrainingProgress:
        """How far the run has come, for a checkpoint."""
        sound, best = not self.soundness.streak, self.improvement.best
        return TrainingProgress(self.iteration, self.position, self.examples, sound, self.lowered, best)

    def run(self) -> dict[str, Any]:
        """Train to the end, or until a rank is asked to stop; the summary. ``ended`` says how."""
        training = self.session.config.training
        try:
            self.checkpoints.enter()
            self.log.start(self._facts())
            self.log.resumed(self.iteration)
            if self.evaluation is not None and not self.evaluation.num_batches:
                self.log.say(f"warning: there is no evaluation: {self.evaluation.why_not}")
            for note in self.session.data.notes:
                self.log.say(note)
            for sentence in self.plan.beyond():
                self.log.say(f"warning: {sentence}")
            if self._owes_checkpoint:
                self.checkpoints.save(self.progress)
                self._owes_checkpoint = False
            with self.stop_requests.listening():
                self._since_update = perf_counter()
                while self.iteration < self.num_iterations and not self._settles() and not self._stops():
                    self._train()
                    if self.soundness.is_lost and self._ends_update(self.iteration) and not self._goes_back():
                        break
                    self._evaluate_and_save()
                    if self.updated is not None and self._ends_update(self.iteration):
                        self.updated()
                    if training.exit_after_profile and self._profiles(self.iteration - 1):
                        break
            unsaved = self.checkpoints.end()
            summary = self._summary()
            asked, iteration = self._asked, self.iteration
            ending = Ending.finished(iteration) if asked is None else Ending.asked(asked, iteration)
            ending = ending.unsaved(unsaved) if unsaved else ending
            ending = Ending.diverged(self._fault, iteration) if self._fault else ending
            self.ended = self.log.finish(summary, ending)
            return summary
        finally:
            self.close()

    def _goes_back(self) -> bool:
        """Go back to the latest checkpoint with a lower rate, where the config says so and it may help; otherwise the
        run ends."""
        fault, lowered = self.soundness.describe(), self.lowered / 2
        back = self.session.config.training.on_nan == "roll-back" and lowered >= LEAST_RATE
        progress = self.checkpoints.go_back() if back else None
        if progress is None:
            self._fault = fault
            return False
        self._go_on(replace(progress, lowered=lowered))
        self._accumulating.clear()
        self._owes_checkpoint = False
        self.log.resumed(self.iteration)
        self.log.say(f"warning: {fault}; back to iteration {self.iteration}, with {lowered:g} of the learning rate")
        return True

    def close(self) -> None:
        """End what runs beside: readers of data, recorders, the page, last the heartbeat. Once is enough."""
        if not self._closed:
            self._closed = True
            self.checkpoints.close()
            self.session.close()
            self.log.close()

    def _adapter(self) -> Adapter | None:
        """Who moves layers between ranks, if the config asks for it."""
        mode = self.session.config.parallel.adapt
        if mode == "off":
            return None
        from vpipe.train.adapt import adapter_of  # with the planner: a run that moves nothing does without

        return adapter_of(self.session, mode, self._adapted, self._move)

    def _move(self, layout: Layout, memory: Memory | None = None) -> Moved:
        with self.around_move():
            return self.session.pipeline.move(layout, memory)

    def _move_as_asked(self, wish: str) -> None:
        """Take a layout asked for from outside."""
        from vpipe.train.adapt import as_asked

        self.checkpoints.settle()
        try:
            done = as_asked(wish, self.session.pipeline.layout, self._move)
        except UserError as error:
            self.log.say(f"iteration {self.iteration}  not moved as asked: {error.sentence}")
            return
        if self.adapter is not None:
            self.adapter.forget_times()
        self._adapted(*done)

    def _adapted(self, decision: Decision, moved: Moved | None) -> None:
        self.log.adapted(self.iteration, decision, moved, self._facts() if moved is not None else None)

    def _facts(self) -> RunFacts:
        num_microbatches = self.session.prepare(len(self.plan.chain(self.iteration, self.position)))
        return replace(
            run_facts(self.session, num_microbatches),
            run=self.run_id,
            iterations=self.num_iterations,
            iterations_per_epoch=min(self.session.feed.num_batches, self.num_iterations),
            directory=str(self.directory),
        )

    def _train(self) -> None:
        """One iteration; an asynchronous schedule chains several, so that it drains rarely."""
        session, pipeline = self.session, self.session.pipeline
        if self._thaws and self._ends_update(self.iteration):
            self._thaw()
        self.log.align_clocks(self.iteration)
        positions = self.plan.chain(self.iteration, self.position)
        count = len(positions)
        begin = perf_counter()
        units = self._read(positions)
        watched = self._profiles(self.iteration)
        name = f"profiler_{short_name(session.config.parallel.scheduler)}"
        around = profiled(pipeline, self.directory / name) if watched else self.log.counted()
        num_microbatches = session.prepare(count)
        self.plan.step(positions, num_microbatches, self._ends_update(self.iteration))
        with around:
            loss = session.train_step(
                units,
                update=self._ends_update(self.iteration + 1) or count > 1,
                num_microbatches=num_microbatches,
            )
        if pipeline.checked:
            self.log.say(f"step {pipeline.step - 1} is {pipeline.checked}")
            pipeline.checked = ""
        seconds = perf_counter() - begin
        if self._ends_update(self.iteration + count):
            self._updates.append(perf_counter() - self._since_update)
        lines = self._lines(positions, loss, units, seconds, not watched)
        self.iteration += count
        self.position = session.feed.next(positions[-1])
        beat = {"phase": "training", "iteration": self.iteration, "iterations": self.num_iterations}
        beat["update_seconds"] = max(self._updates, default=0.0)
        self.log.step(lines, beat)
        if said := self.soundness.see(lines, positions):
            self.log.say(said)
        self.checkpoints.poll()
        if self.adapter is not None and self._ends_update(self.iteration):  # with no checkpoint under way
            self.checkpoints.settle()
            self.adapter.after_step(seconds / count, self.num_iterations - self.iteration)

    def _read(self, positions: list[Position]) -> Units | None:
        """The units of these iterations. Where gradients are accumulated, all iterations of the update are read first:
        a unit weighs as much as its share of all their targets."""
        if self.session.config.training.gradient_accumulation == 1:
            return self.session.read(positions)
        if not self._accumulating:
            group, end = [self.position], self.iteration + 1
            while not self._ends_update(end):
                group.append(self.session.feed.next(group[-1]))
                end += 1
            parts = [self.session.units(self.session.feed, [position]) for position in group]
            read = [part for part in parts if part is not None]
            self._accumulating = [*accumulated(read)] if read else [None] * len(group)
        return self._accumulating.pop(0)

    def _ends_update(self, iteration: int) -> bool:
        """Whether an update follows after that many iterations."""
        return iteration % self.session.config.training.gradient_accumulation == 0 or iteration == self.num_iterations

    def _profiles(self, iteration: int) -> bool:
        return iteration == self.session.config.training.profile_iteration

    def _lines(
        self, positions: list[Position], loss: float, units: Units | None, seconds: float, counts: bool
    ) -> list[dict[str, Any]]:
        """What there is to say of each iteration of the step that has ended; ``counts`` where its time does."""
        lines = self.plan.lines(self.iteration, positions, loss, units, seconds)
        for line, position in zip(lines, positions, strict=True):
            self.examples += self.session.feed.num_examples(position)
            self.metrics.add(line["seconds"], line["tokens"], line["samples"], line["flops"], counts=counts)
            if not line.pop("targets", 1):
                self.log.say(f"warning: iteration {line['iteration']} has no label that counts: its loss is 0")
        if self._norms is not None:
            lines[-1]["gradient_norms"] = self._norms.told()
        self._line = lines[-1]
        return lines

    def _evaluate_and_save(self) -> None:
        config, better = self.session.config, self.improvement
        self._owes_evaluation = self._owes_evaluation or self._due(config.training.evaluation_interval)
        ends, sound = self._ends_update(self.iteration), not self.soundness.streak
        is_best = False
        if self._owes_evaluation and (ends or better.kind != "evaluation"):
            is_best = better.look("evaluation", {"loss": self.evaluate()}, self.iteration, sound)
            self._owes_evaluation = False
        self._owes_checkpoint = self._owes_checkpoint or self._due(config.checkpoint.interval)
        if self._owes_checkpoint and ends:
            is_best = better.look("train", self._line, self.iteration, sound)
        self._owes_checkpoint = self._owes_checkpoint or is_best
        waits = self.soundness.streak and self.iteration < self.num_iterations  # for a loss that is finite
        if self._owes_checkpoint and self._ends_update(self.iteration) and not waits:  # no half of an update
            self.checkpoints.save(self.progress)
            self._owes_checkpoint = False

    def _settles(self) -> bool:
        """Whether it gets no better, for as long as ``training.patience`` says: the run ends, with a checkpoint."""
        said = self.improvement.settled() if self._ends_update(self.iteration) else ""
        if said:
            self.log.say(f"{said}: the run ends")
            if self.session.config.checkpoint.interval >= 0:
                self.checkpoints.save(self.progress)
        return bool(said)

    def evaluate(self) -> float | None:
        """The loss on held-out data, told; ``None`` where there are none."""
        if self.evaluation is None or not self.evaluation.num_batches:
            return None
        begin = perf_counter()
        loss = self.evaluation.run()
        read = {"examples": self.evaluation.examples, "targets": self.evaluation.targets}
        self.log.evaluation({"iteration": self.iteration, "loss": loss, **read, "seconds": perf_counter() - begin})
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
        self._asked = self.stop_requests.agreed(self.checkpoints.in_trouble)
        if self.stop_requests.in_trouble:
            self.checkpoints.settle(called_off=True)
        if self._asked is None:
            if self.stop_requests.granted:
                self._move_as_asked(self.stop_requests.granted)
            return False
        self.log.say(f"asked to stop ({self._asked.name}) after iteration {self.iteration}")
        self.log.beat(lambda beat: setattr(beat, "phase", ENDING), at_once=True)
        if self.iteration:
            self.checkpoints.save(self.progress)
        return True

    def _summary(self) -> dict[str, Any]:
        model, device = self.session.skeleton, device_name(self.session.pipeline.devices[0])
        return (
            self.metrics.summary(model.num_parameters, model.flops_per_token, device)
            | {
                "final_loss": self._line["loss"],
                "iterations_done": self.iteration,
                "stopped": self._asked is not None,
                "scheduler": self.session.config.parallel.scheduler,
            }
            | ({"ranks_lost": self.session.losses} if self.session.losses else {})
            | ({"best": asdict(self.improvement.best)} if self.improvement.kind else {})
        )
