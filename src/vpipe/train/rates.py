"""The course of a run: which iterations go together, and the learning rate, a pure function of progress.

Progress is the part of the examples that the run is to read, from its first epoch to its end, that were read before an
update. With T updates in all, the update at progress p has the rate ``LearningRate`` gives to update u = p · T: the
same at every stage, however often it updates, and after a resume whatever schedule, batches or replicas came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vpipe.data import dataset
from vpipe.registry import DATASET_REGISTRY
from vpipe.runtime.microbatches import mean_loss
from vpipe.schedule.authors.authoring import Chain
from vpipe.train.feed import Position
from vpipe.train.groups import thaws
from vpipe.train.optimizers import learning_rate
from vpipe.train.session import Session, num_replicas
from vpipe.train.units import Counts, Units

MAX_CHAINED_UNITS = 64
"""Units that an asynchronous schedule runs between two drains at most."""


def most_chained(session: Session) -> int:
    """Iterations between two drains at most."""
    return max(1, MAX_CHAINED_UNITS // (session.config.training.num_microbatches * num_replicas(session.config)))


class RunPlan:
    """How far a run goes on from a place, and the rates of its updates."""

    def __init__(self, session: Session, iteration: int, position: Position, lowered: float = 1.0) -> None:
        self._session, self._position, self._lowered = session, position, lowered
        training, feed = session.config.training, session.feed
        epoch, batch = position
        whole = iteration - batch + feed.batches_of(epoch) + (training.epochs - epoch - 1) * feed.num_batches
        most = training.max_iterations
        self.num_iterations = whole if most < 0 else min(whole, most)
        """Iterations of the whole run."""
        self._passes = feed.passes(self._after(max(0, self.num_iterations - iteration))) or 1.0
        per_update = training.gradient_accumulation / self._updates_per_iteration()
        self.num_updates = round(self._passes * feed.num_batches / per_update, 6)
        """What a run with these batches from its beginning makes."""
        self._rate = learning_rate(training, self.num_updates)
        self._first, self._count, self._places = 0, 1, [0.0, 0.0]

    def beyond(self) -> list[str]:
        """Settings that the run is too short for, or that its data set does not read."""
        config = self._session.config
        training, section, found = config.training, config.dataset, []
        late = [f"{place:g}" for place in training.learning_rate_steps if place >= self.num_updates]
        if training.warmup > self.num_updates:
            found.append(
                f"training.warmup is {training.warmup:g} updates, but the run makes {self.num_updates:g}: the learning "
                "rate does not reach its peak"
            )
        if training.learning_rate_policy == "step" and late:
            found.append(f"training.learning_rate_steps has {late[0]}, but the run makes {self.num_updates:g} updates")
        if training.profile_iteration >= self.num_iterations:
            found.append(
                f"training.profile_iteration is {training.profile_iteration}, but the last iteration is "
                f"{self.num_iterations - 1}: nothing is profiled"
            )
        reads = {"path": section.name != "synthetic"}
        if not DATASET_REGISTRY.is_own(section.name):
            reads["test_size"] = "test_size" in dataset.options(section.name)
        for name, is_read in reads.items():
            if not is_read and getattr(section, name) != type(section).model_fields[name].default:
                found.append(f"dataset.{name} has no effect with dataset {section.name}")
        return found

    def chain(self, iteration: int, position: Position) -> list[Position]:
        """The iterations of one program: as many as fit before the next thing that needs a drain."""
        config, feed, chains = self._session.config, self._session.feed, self._session.pipeline.spec.chains
        training, positions = config.training, [position]
        if chains is Chain.NOT or (chains is Chain.BATCHES and training.gradient_accumulation > 1):
            return positions
        intervals = [training.evaluation_interval, config.checkpoint.interval]
        while len(positions) < min(most_chained(self._session), self.num_iterations - iteration):
            done = iteration + len(positions)
            following = feed.next(positions[-1])
            if following[1] == 0 or any(interval > 0 and done % interval == 0 for interval in intervals):
                break
            if training.profile_iteration in (done, done - 1) or done in thaws(training):
                break
            positions.append(following)
        return positions

    def step(self, positions: Sequence[Position], num_microbatches: int, begins_update: bool) -> None:
        """The next step reads these iterations; of several iterations that make one update, the first begins it."""
        pipeline, feed = self._session.pipeline, self._session.feed
        begin = self._place(positions[0]) if begins_update else self._places[0]
        self._places = [begin, *map(self._place, positions[1:]), self._place(feed.next(positions[-1]))]
        self._first, self._count = pipeline.num_updates, pipeline.program(num_microbatches).num_updates

    def rate(self, update: float) -> float:
        """That of an update of this step."""
        at = (update - self._first) / self._count * (len(self._places) - 1)
        number = min(int(at), len(self._places) - 2)
        place = self._places[number] + (at - number) * (self._places[number + 1] - self._places[number])
        return self._lowered * self._rate(place)

    def rate_at(self, position: Position) -> float:
        """That of an update which begins there."""
        return self._lowered * self._rate(self._place(position))

    def updates_after(self, num_iterations: int) -> int:
        """Updates of the run that are made once so many iterations of this step are."""
        return self._first + self._count * num_iterations // (len(self._places) - 1)

    def lines(
        self, iteration: int, positions: Sequence[Position], loss: float, units: Units | None, seconds: float
    ) -> list[dict[str, Any]]:
        """What metrics.jsonl has of each iteration of the step that has ended, and its ``targets`` if it is read."""
        pipeline, count, lines = self._session.pipeline, len(positions), []
        stats, losses = pipeline.stats, list(pipeline.unit_losses.values())
        parts = units.split(count) if units is not None else [None] * count
        for number, (position, part) in enumerate(zip(positions, parts, strict=True), start=1):
            if count > 1:
                own = losses[(number - 1) * len(losses) // count : number * len(losses) // count]
                loss = mean_loss(own) / (sum(share for share, _ in own) or 1.0)
            elif part is not None and part.part:
                loss = loss / part.part
            read = part.counts if part is not None else Counts()
            update = self.updates_after(number)
            line = {
                "iteration": iteration + number,
                "epoch": position[0],
                "update": min(update, stats.num_updates),
                "loss": loss,
                "learning_rate": self.rate(max(self.updates_after(0), update - 1)),
                "tokens": read.num_tokens,
                "samples": read.num_samples,
                "flops": read.flops,
                "seconds": seconds / count,
                "tokens_per_second": read.num_tokens * count / seconds,
                "gradient_norm": stats.gradient_norm,
                "loss_scale": stats.loss_scale,
                "skipped": stats.num_skipped,
            }
            lines.append(line | ({"targets": read.num_targets} if part is not None else {}))
        return lines

    def _place(self, position: Position) -> float:
        return round(self.num_updates * self._session.feed.passes(position) / self._passes, 6)

    def _after(self, num_iterations: int) -> Position:
        """The position so many iterations on."""
        (epoch, batch), feed = self._position, self._session.feed
        left = feed.batches_of(epoch) - batch
        if num_iterations < left:
            return epoch, batch + num_iterations
        epochs, batch = divmod(num_iterations - left, feed.num_batches)
        return epoch + 1 + epochs, batch

    def _updates_per_iteration(self) -> float:
        """Where nothing but the end of an epoch drains an asynchronous schedule."""
        session = self._session
        spec = session.pipeline.spec
        if spec.chains is not Chain.UNITS:
            return session.pipeline.updates_per_step
        count = min(most_chained(session), session.feed.num_batches)
        units = count * session.config.training.num_microbatches * num_replicas(session.config)
        return replace(spec, num_microbatches=units).program.num_updates / count
