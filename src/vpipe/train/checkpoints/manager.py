"""When checkpoints are written and how a run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vpipe.data.facts import differences, tokenizer_text
from vpipe.errors import UserError
from vpipe.rundir import changes, lineage, manifest
from vpipe.rundir.claim import Lock, command
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.journal import ENDING, Beat
from vpipe.rundir.layout import CHECKPOINTS, TOKENIZER
from vpipe.rundir.lineage import Line, LineageEntry
from vpipe.rundir.manifest import Best, DamagedCheckpoint, Standing
from vpipe.rundir.reader import RunDirectory
from vpipe.runtime.moves import layer_state
from vpipe.runtime.updates.averages import AVERAGE
from vpipe.runtime.updates.update import LossScale
from vpipe.train.checkpoints.checkpoint import Checkpoint
from vpipe.train.checkpoints.writer import CheckpointPlace, Layers, Save, Saver
from vpipe.train.feed import TrainingProgress
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
        self._noted = -1
        """The iteration of the newest checkpoint that the heartbeat knows."""
        self._unsaved = ""
        """Why the latest checkpoint could not be written, where it could not; the same on all ranks."""
        self._whole: frozenset[int] = frozenset()
        self._settings: dict[str, list[Any]] = {}
        """What the parameter groups were made with."""
        for group in (group for made in pipeline.optimizers.values() for group in made.param_groups):
            for name in group.keys() - {"params"}:
                self._settings.setdefault(name, []).append(group[name])
        self._gone_back_to: set[Path] = set()
        self.newest = 0
        """The iteration of the newest checkpoint that a run has gone on with beside a copy in memory."""
        self.changes = ""
        """What differs from the run that this one goes on from, and does something."""

    def enter(self) -> None:
        """From now on the directories are this run's: it is listed there, with its parent. Rank 0 does it; every rank
        calls this, and reads the same data."""
        self._session.check_data()
        if not self._is_leader:
            return
        own = self.directory == self._run_directory / CHECKPOINTS
        parent = str(self._parent) if self._parent else None
        entry = LineageEntry(self.line, parent, command(), None if own else str(self.directory))
        try:
            if not own:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.directory, self.line.run, " ".join(command()))
                lineage.enter(self.directory, entry)
            lineage.enter(self._run_directory, entry)
            if text := tokenizer_text(self._session.data.tokenizer):
                (self._run_directory / TOKENIZER).write_text(text, encoding="utf-8")
        except OSError as error:
            self._say(f"warning: {error.filename}: {error.strerror}; the run goes on without it")

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint beside what follows; where it cannot be written the run goes on and says so."""
        iteration = progress.iteration
        if iteration == self._kept or iteration in self._whole:
            return
        self.settle()
        session = self._session
        config = session.config.to_dict()
        if session.model.vocab_size > 0:  # a checkpoint must stand without the data set
            config["model"]["vocab_size"] = session.model.vocab_size
        self._beat(_saving)
        if self._saver is None:
            self._warn_of_what_is_left_out()
            self._saver = Saver(self._place, blocking=session.config.checkpoint.blocking)
        trained = {
            held.layer: frozenset(f"param/{name}" for name, p in held.module.named_parameters() if p.requires_grad)
            for held in session.pipeline.held_layers()
        }
        tokenizer = tokenizer_text(session.data.tokenizer)
        self._saver.begin(Save(self.standing(progress), self.line, config, trained, tokenizer), self.layers)
        self._kept, self._pending = iteration, True
        if session.config.checkpoint.blocking:
            self.settle()

    @property
    def in_trouble(self) -> bool:
        """Whether this process could not do its part of the save that is on its way."""
        return self._pending and self._saver is not None and self._saver.in_trouble

    def poll(self) -> None:
        """Note that the save on its way is whole."""
        save = self._saver.save if self._pending and self._saver is not None else None
        if save is not None and save.path is not None and save.standing.iteration != self._noted:
            self._noted = save.standing.iteration
            self._note(self._noted, save.path, save.seconds)

    def _note(self, iteration: int, path: Path, seconds: float = 0.0) -> None:
        """Let the heartbeat tell of the newest checkpoint."""

        def change(beat: Beat) -> None:
            beat.saved, beat.checkpoint, beat.save_seconds = iteration, str(path), max(beat.save_seconds, seconds)

        self._beat(change)

    def settle(self, *, called_off: bool = False) -> None:
        """End the save that is on its way: wait for it, or call it off where some rank failed to do its part
        (``called_off``: which one has). Every rank calls this at the same place."""
        if not self._pending or self._saver is None:
            return
        gather, saver, save = self._session.pipeline.gather_first, self._saver, self._saver.save
        assert save is not None, "one is on its way"
        if called_off:
            saver.call_off()
        problem = gather(self._named(saver.problem()))
        if problem:
            saver.call_off()
        else:
            save.all_written.set()
        last = saver.end()
        self._unsaved = problem or gather(self._named(last))
        self.poll()
        self._pending = False
        if self._unsaved:
            self._kept = -1  # asked again at this iteration, it is tried again
            self._say(
                f"warning: no checkpoint at iteration {save.standing.iteration}: {self._unsaved}; earlier ones are "
                "intact and the run goes on"
            )
        elif save.remark:
            self._say(f"warning: the checkpoint of iteration {save.standing.iteration} is written, but {save.remark}")

    def _named(self, problem: str) -> str:
        pipeline = self._session.pipeline
        return f"rank {pipeline.rank}: {problem}" if problem and not pipeline.in_process else problem

    def end(self) -> str:
        """Wait for the last save; why it could not be written, on whichever rank. Every rank calls this."""
        self.settle()
        return self._unsaved

    def abandon(self) -> None:
        """The ranks part in the middle of whatever they did: none waits for the receipt of another one."""
        if self._saver is not None:
            self._saver.call_off()
            self._saver.end()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def standing(self, progress: TrainingProgress) -> Standing:
        session, pipeline = self._session, self._session.pipeline
        stats = pipeline.stats
        return Standing(
            progress.iteration,
            *progress.position,
            session.feed.read_before(progress.position),
            progress.examples,
            pipeline.num_units,
            stats.num_updates,
            stats.loss_scale,
            stats.good_steps,
            session.config.training.seed,
            session.config.training.optimizer,
            session.skeleton.fingerprint,
            progress.sound,
            progress.lowered,
            json.dumps(dict(session.data_facts)),
            progress.best,
        )

    def _warn_of_what_is_left_out(self) -> None:
        """A file holds what belongs to a layer: not what an optimizer counts for all its weights."""
        for made in self._session.pipeline.optimizers.values():
            for group in made.param_groups:
                for name in sorted(group.keys() - {"params", "lr"}):
                    known = [*self._settings.get(name, ()), made.defaults.get(name, group[name])]
                    value = group[name]
                    if any(value is one or (not isinstance(value, Tensor) and value == one) for one in known):
                        continue
                    self._say(
                        f"warning: {type(made).__name__} has changed {name} of its parameter groups, which checkpoints "
                        "do not hold: a resumed run begins with its first value; keep it in the state of a parameter"
                    )

    def layers(self) -> Layers:
        """The layers of which this process holds the first replica."""
        return {
            held.layer: layer_state.tensors_of(held.module, held.optimizer)
            for held in self._session.pipeline.held_layers()
            if held.is_first
        }

    def resume(self, where: Path) -> TrainingProgress:
        """Go on from the newest whole checkpoint of ``where``."""
        found = self._load(manifest.find(where), where)
        if found is None:
            raise UserError(f"no checkpoint of {where} is whole; start anew, or restore one from a copy")
        path = found.path
        self.changes = changes.told(found.manifest.config, self._session.config.to_dict())
        if path != where and any(lineage.is_damaged(each) for each in (path.parent, path.parent.parent)):
            self._say("warning: lineage.json is damaged and does not say which run came last; the newest is taken")
        self._continue(found)
        progress = self._progress(found.manifest.standing)
        self._say("resumed from {}: epoch {}, batch {}".format(path, *progress.position))
        return progress

    def _load(self, paths: Sequence[Path], named: Path | None = None) -> Checkpoint | None:
        """The first of these that is whole, loaded, and sound unless it was ``named``. Every rank calls this."""
        for path in paths:
            problem, found, tensors = "", None, {}
            try:
                found = Checkpoint.open(path)
                self._check(found)
                if not found.manifest.standing.sound and path != named:
                    problem = f"the loss of {path} was not finite"
                else:
                    tensors = {layer: found.read(layer) for layer in self._session.pipeline.modules()}
            except DamagedCheckpoint as error:
                problem = str(error)
            problem = self._session.pipeline.gather_first(problem)  # one rank's damage is that of all
            if not problem and found is not None:
                self._restore(found.manifest.standing, tensors, found.manifest.config)
                return found
            self._say(f"warning: {problem}; trying the checkpoint before it")
        return None

    def go_back(self) -> TrainingProgress | None:
        """To the newest checkpoint of this run's line that is sound, of which it did not go on already; ``None`` where
        there is none. Every rank calls this at the same place."""
        self.settle()
        kept = manifest.on_line(self.directory, self.line)[::-1] or ([self._parent] if self._parent else [])
        found = self._load([path for path in kept if path not in self._gone_back_to])
        if found is None:
            return None
        self._gone_back_to.add(found.path)
        return self._progress(found.manifest.standing)

    def restore(self, standing: Standing, tensors: Mapping[int, Mapping[str, Tensor]]) -> TrainingProgress:
        """Go on from a copy in memory of this very run."""
        self._restore(standing, tensors)
        entry = lineage.current(self._run_directory)
        if entry is not None and entry.line.run == self.line.run:
            self.line, self._parent = entry.line, Path(entry.checkpoint) if entry.checkpoint else None
        whole: dict[int, Path] = {}
        for path in manifest.checkpoints(self.directory):
            with suppress(DamagedCheckpoint):
                found = Checkpoint.open(path)
                if found.manifest.line.run == self.line.run:
                    whole[found.manifest.standing.iteration] = path
        if whole:
            self._note(max(whole), whole[max(whole)])
        seen = self._session.pipeline.gather_first(json.dumps(sorted(whole)) if self._is_leader else "")
        self._whole = frozenset(json.loads(seen))
        begun = self.line.ancestors[-1].until if self.line.ancestors else 0
        self.newest = max(self._whole, default=begun)
        if standing.best.iteration > begun and standing.best.iteration not in self._whole:  # lost on its way
            standing = replace(standing, best=Best(standing.best.metric))
        return self._progress(standing)

    def last_due(self, progress: TrainingProgress, num_iterations: int) -> int:
        """The iteration of the newest checkpoint that should be there; 0 where there should be none."""
        config, iteration = self._session.config, progress.iteration
        interval, step = config.checkpoint.interval, config.training.gradient_accumulation
        if interval < 0 or iteration == num_iterations:
            return 0 if interval < 0 else iteration
        last = iteration // interval * interval if interval else iteration - progress.position[1]
        return -(-last // step) * step

    def trained(self, until: int) -> list[dict[str, Any]]:
        """The lines of the iterations that this run has trained, where a copy in memory takes it up: its summary is of
        all of them."""
        begun = self.line.ancestors[-1].until if self.line.ancestors else 0
        lines = RunDirectory(self._run_directory, RunFacts()).metrics() if self._is_leader else []
        return [line for line in lines if line.get("kind") == "train" and begun < line["iteration"] <= until]

    def _progress(self, standing: Standing) -> TrainingProgress:
        """Where the run goes on; its data from the very example that comes next, in whatever batches it reads them."""
        position = self._session.feed.begin((standing.epoch, standing.batch), standing.read)
        best = standing.best
        return TrainingProgress(standing.iteration, position, standing.examples, lowered=standing.lowered, best=best)

    def _continue(self, found: Checkpoint) -> None:
        """This run is a child of the one that wrote the checkpoint."""
        iteration, path = found.manifest.standing.iteration, found.path
        self.line = found.manifest.line.child(self.line.run, iteration)
        self._parent = path
        self._kept = iteration if path.parent == self.directory else None
        self._note(iteration, path)
        left = [each.name for each in manifest.checkpoints(path.parent) if _later(each, found)]
        if left:
            self._say(f"later checkpoints stay where they are and are not of this run: {', '.join(left)}")

    def _check(self, found: Checkpoint) -> None:
        """Refuse a checkpoint of another model, or of other data."""
        wanted = self._session.skeleton.fingerprint
        model = found.manifest.standing.model
        if model != wanted:
            raise UserError(
                f"{found.path} is a checkpoint of another model ({model}), not of this one ({wanted}); "
                "resume with its own config"
            )
        differing = differences(json.loads(found.manifest.standing.data), self._session.data_facts)
        if not differing:
            return
        what = f"{found.path} was trained on other data: {', '.join(differing)}"
        if self._session.config.dataset.may_differ:
            self._say(f"warning: {what}")
            return
        own = f", dataset.extra.tokenizer: {found.path / TOKENIZER} to keep its ids" * (
            TOKENIZER in found.manifest.files
        )
        raise UserError(f"{what}; give it its own{own}, or set dataset.may_differ: true to go on with these")

    def _restore(
        self,
        standing: Standing,
        tensors: Mapping[int, Mapping[str, Tensor]],
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """``before`` is the config of the run that wrote it, where it may be another."""
        pipeline, training = self._session.pipeline, self._session.config.training
        same = standing.optimizer == training.optimizer
        for held in pipeline.held_layers():
            found = {k: t for k, t in tensors[held.layer].items() if training.ema or not k.endswith(f"/{AVERAGE}")}
            layer_state.load_into(held.module, held.optimizer if same else None, found)
        keys, config = ("precision", "loss_scale"), training.model_dump()
        told = before.get("training", {}) if before is not None else config
        same = all(told.get(key) == config[key] for key in keys)
        scale = LossScale(standing.loss_scale, good_steps=standing.good_steps) if same else None
        pipeline.resume(standing.num_units, standing.num_updates, scale)


def _saving(beat: Beat) -> None:
    if beat.phase != ENDING:
        beat.phase = "saving"


def _later(path: Path, than: Checkpoint) -> bool:
    """Whether a checkpoint of the same run was written after the one that is resumed."""
    with suppress(DamagedCheckpoint):
        other = Checkpoint.open(path)
        same = other.manifest.line.run in than.manifest.line.runs
        return same and other.manifest.standing.iteration > than.manifest.standing.iteration
    return False
