"""When checkpoints are written and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from vpipe.errors import UserError
from vpipe.rundir import lineage
from vpipe.rundir.claim import Lock, command
from vpipe.rundir.journal import ENDING, Beat
from vpipe.rundir.layout import CHECKPOINTS
from vpipe.rundir.lineage import Line, LineageEntry
from vpipe.runtime.updates.update import LossScale
from vpipe.train.checkpoints import checkpoint, layer_file
from vpipe.train.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint, Standing
from vpipe.train.checkpoints.writer import CheckpointPlace, Layers, Save, Saver
from vpipe.train.feed import Position
from vpipe.train.session import Session


class CheckpointManager:
    """The checkpoints of one run. ``say`` tells the user a sentence, ``beat`` changes the heartbeat."""

    def __init__(
        self,
        session: Session,
        directory: Path,
        run: str,
        say: Callable[[str], None],
        beat: Callable[[Callable[[Beat], None]], None],
    ) -> None:
        section, pipeline = session.config.checkpoint, session.pipeline
        self.directory = Path(section.directory).resolve() if section.directory else directory / CHECKPOINTS
        self.line = Line(run)
        self._run_directory = directory
        self._session = session
        self._say = say
        self._beat = beat
        self._kept: int | None = None
        self._parent: Path | None = None
        self._lock: Lock | None = None
        self._is_leader = pipeline.is_leader
        processes = (0, 1) if pipeline.in_process else (pipeline.rank, pipeline.layout.num_ranks)
        self._place = CheckpointPlace(self.directory, *processes, section.keep, session.epoch)
        self._saver: Saver | None = None
        self._pending = False
        self._unsaved = ""
        """Why the latest checkpoint could not be written, where it could not."""
        self._whole: frozenset[int] = frozenset()

    def enter(self) -> None:
        """From now on the directories are this run's: it is listed there, with its parent. Rank 0 does it."""
        if not self._is_leader:
            return
        own = self.directory == self._run_directory / CHECKPOINTS
        parent = str(self._parent) if self._parent else None
        entry = LineageEntry.now(self.line, parent, command(), None if own else str(self.directory))
        try:
            if not own:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.directory, self.line.run, " ".join(command()))
                lineage.enter(self.directory, entry)
            lineage.enter(self._run_directory, entry)
        except OSError as error:
            self._say(f"warning: {error.filename}: {error.strerror}; the run goes on without it")

    def save(self, iteration: int, position: Position) -> None:
        """Write a checkpoint beside what follows; where it cannot be written the run goes on and says so."""
        if iteration == self._kept or iteration in self._whole:
            return
        self.settle()
        session = self._session
        config = session.config.to_dict()
        if session.model.vocab_size > 0:  # a checkpoint must stand without the data set
            config["model"]["vocab_size"] = session.model.vocab_size
        self._beat(_saving)
        self._saver = self._saver or Saver(self._place, blocking=session.config.checkpoint.blocking)
        self._saver.begin(Save(self.standing(iteration, position), self.line, config), self.layers())
        if self._kept is None:
            self._warn_of_groups()
        self._kept, self._pending = iteration, True
        self.poll()

    def poll(self) -> None:
        """Tell of a save that has ended meanwhile."""
        save = self._saver.done() if self._saver is not None else None
        if save is None:
            return
        self._unsaved = save.problem
        if save.path is not None:
            iteration, path, seconds = save.standing.iteration, save.path, save.seconds
            self._beat(lambda beat: _note(beat, iteration, path, seconds))
        elif self._is_leader:
            self._say(
                f"warning: no checkpoint at iteration {save.standing.iteration}: {save.problem}; earlier ones are "
                "intact and the run goes on"
            )

    def settle(self) -> None:
        """Wait for the save that is on its way. Every rank calls this at the same place."""
        if not self._pending or self._saver is None:
            return
        self._pending = False
        troubles = self._session.pipeline.gather_numbers([float(self._saver.trouble())])
        if any(numbers[0] for numbers in troubles):
            self._saver.call_off()
        self._saver.wait()
        self.poll()

    def end(self) -> str:
        """Wait for the last save; why it could not be written, on whichever rank. Every rank calls this."""
        if self._saver is None:  # and on no rank
            return ""
        self.settle()
        return self._session.pipeline.gather_first(self._unsaved)

    def abandon(self) -> None:
        """The ranks part in the middle of whatever they did: nobody waits for another one's receipt."""
        if self._saver is not None:
            self._saver.call_off()
            self._saver.wait()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def standing(self, iteration: int, position: Position) -> Standing:
        session, pipeline = self._session, self._session.pipeline
        epoch, batch = position
        stats = pipeline.stats
        return Standing(
            iteration,
            epoch,
            batch * session.feed.step,
            pipeline.num_units,
            stats.num_updates,
            stats.loss_scale,
            stats.good_steps,
            session.config.training.seed,
            session.config.training.optimizer,
            session.skeleton.fingerprint,
        )

    def _warn_of_groups(self) -> None:
        """A file holds what belongs to a layer. What an optimizer counts for all its weights is in none of them."""
        for made in self._session.pipeline.optimizers.values():
            for group in made.param_groups:
                for name in sorted(group.keys() - {"params", "lr"}):
                    first = made.defaults.get(name, group[name])
                    if group[name] is first or (not isinstance(group[name], Tensor) and group[name] == first):
                        continue
                    self._say(
                        f"warning: {type(made).__name__} has changed {name} of its parameter groups, which checkpoints "
                        "do not hold: a resumed run begins with its first value; keep it in the state of a parameter"
                    )

    def layers(self) -> Layers:
        """The layers of which this process holds the first replica."""
        return {
            held.layer: layer_file.tensors_of(held.module, held.optimizer)
            for held in self._session.pipeline.held_layers()
            if held.is_first
        }

    def resume(self, where: Path) -> Position:
        """Go on from the newest whole checkpoint of ``where``; the position of the next batch."""
        for path in checkpoint.find(where):
            problem, found, tensors = "", None, {}
            try:
                found = Checkpoint.open(path)
                self._check_model(found)
                tensors = {layer: found.read(layer) for layer in self._session.pipeline.modules()}
            except DamagedCheckpoint as error:
                problem = str(error)
            problem = self._session.pipeline.gather_first(problem)  # one rank's damage is everybody's
            if problem or found is None:
                self._say(f"warning: {problem}; trying the checkpoint before it")
                continue
            self._restore(found.standing, tensors)
            if path != where and any(lineage.is_damaged(each) for each in (path.parent, path.parent.parent)):
                self._say("warning: lineage.json is damaged and does not say which run came last; the newest is taken")
            self._continue(found)
            position = self._position(found.standing)
            self._say(f"resumed from {path}: epoch {position[0]}, batch {position[1]}")
            return position
        raise UserError(f"no checkpoint of {where} is whole; start anew, or restore one from a copy")

    def restore(self, standing: Standing, tensors: Mapping[int, Mapping[str, Tensor]]) -> Position:
        """Go on from a copy in memory of this very run; the position of the next batch."""
        self._restore(standing, tensors)
        entry = lineage.current(self._run_directory)
        if entry is not None and entry.line.run == self.line.run:
            self.line, self._parent = entry.line, Path(entry.checkpoint) if entry.checkpoint else None
        whole: dict[int, Path] = {}
        for path in checkpoint.checkpoints(self.directory):
            with suppress(DamagedCheckpoint):
                found = Checkpoint.open(path)
                if found.manifest.line.run == self.line.run:
                    whole[found.standing.iteration] = path
        if whole:
            self._beat(lambda beat: _note(beat, max(whole), whole[max(whole)], 0.0))
        self._whole = frozenset(whole)
        return self._position(standing)

    def _continue(self, found: Checkpoint) -> None:
        """This run is a child of the one that wrote the checkpoint."""
        iteration, path = found.standing.iteration, found.path
        self.line = found.manifest.line.child(self.line.run, iteration)
        self._parent = path
        self._kept = iteration if path.parent == self.directory else None
        self._beat(lambda beat: _note(beat, iteration, path, 0.0))
        left = [each.name for each in checkpoint.checkpoints(path.parent) if _later(each, found)]
        if left:
            self._say(f"later checkpoints stay where they are and are not of this run: {', '.join(left)}")

    def _check_model(self, found: Checkpoint) -> None:
        wanted = self._session.skeleton.fingerprint
        if found.standing.model != wanted:
            raise UserError(
                f"{found.path} is a checkpoint of another model ({found.standing.model}), not of this one ({wanted}); "
                "resume with its own config"
            )

    def _restore(self, standing: Standing, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        pipeline, training = self._session.pipeline, self._session.config.training
        same = standing.optimizer == training.optimizer
        if not same:
            self._say(
                f"warning: the checkpoint was trained by {standing.optimizer}, the config says {training.optimizer}; "
                "its optimizer state is left out"
            )
        if standing.seed != training.seed:
            self._say(
                f"warning: the checkpoint has seed {standing.seed}, the config {training.seed}; "
                "the order of the data and dropout change from here on"
            )
        for held in pipeline.held_layers():
            layer_file.load_into(held.module, held.optimizer if same else None, tensors[held.layer])
        scale = LossScale(standing.loss_scale, good_steps=standing.good_steps)
        pipeline.resume(standing.num_units, standing.num_updates, scale)

    def _position(self, standing: Standing) -> Position:
        """The batch that follows; with another batch size or other replicas, the one that begins at or before it."""
        feed = self._session.feed
        batch, rest = divmod(standing.consumed, feed.step)
        if rest:
            self._say(f"warning: the batch size has changed; {rest} examples of epoch {standing.epoch} are read again")
        return (standing.epoch, batch) if batch < feed.num_batches else (standing.epoch + 1, 0)


def _saving(beat: Beat) -> None:
    if beat.phase != ENDING:
        beat.phase = "saving"


def _note(beat: Beat, iteration: int, path: Path, seconds: float) -> None:
    beat.saved, beat.checkpoint, beat.save_seconds = iteration, str(path), max(beat.save_seconds, seconds)


def _later(path: Path, than: Checkpoint) -> bool:
    """Whether a checkpoint of the same run was written after the one that is resumed."""
    with suppress(DamagedCheckpoint):
        other = Checkpoint.open(path)
        same = other.manifest.line.run in than.manifest.line.runs
        return same and other.standing.iteration > than.standing.iteration
    return False
