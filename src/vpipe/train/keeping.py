"""When checkpoints are written and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.rundir.state import Beat
from vpipe.runtime.update import LossScale
from vpipe.train import checkpoint
from vpipe.train.checkpoint import Checkpoint, DamagedCheckpoint, Standing
from vpipe.train.feed import Position
from vpipe.train.gathering import first_text
from vpipe.train.session import Session


class Keeper:
    """The checkpoints of one run. ``say`` tells the user a sentence, ``beat`` changes the heartbeat."""

    def __init__(
        self,
        session: Session,
        directory: Path,
        say: Callable[[str], None],
        beat: Callable[[Callable[[Beat], None]], None],
    ) -> None:
        chosen = session.config.checkpoint.directory
        self.directory = Path(chosen) if chosen is not None else directory / "checkpoints"
        self._session = session
        self._say = say
        self._beat = beat
        self._kept: int | None = None

    def save(self, iteration: int, position: Position) -> None:
        """Write a checkpoint; where it cannot be written the run goes on and says so."""
        if iteration == self._kept:
            return
        session, pipeline = self._session, self._session.pipeline
        epoch, batch = position
        updater = pipeline.engines[0].updater
        standing = Standing(
            iteration,
            epoch,
            batch * session.feed.step,
            pipeline.num_units,
            max(updater.num_updates.values()),
            updater.scaler.value,
            updater.scaler.good_steps,
            session.config.training.seed,
            session.config.training.optimizer,
            session.skeleton.fingerprint,
        )
        config = session.config.to_dict()
        if session.model.vocab_size > 0:  # a checkpoint must stand without the data set
            config["model"]["vocab_size"] = session.model.vocab_size
        try:
            begin = perf_counter()
            self._beat(lambda beat: setattr(beat, "phase", "saving"))
            path = checkpoint.save(self.directory, pipeline, standing, config, keep=session.config.checkpoint.keep)
            self._kept = iteration
            self._beat(lambda beat: _saved(beat, iteration, path, perf_counter() - begin))
        except OSError as error:
            self._say(
                f"warning: no checkpoint at iteration {iteration}: {error}; earlier ones are intact and the run goes on"
            )

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
            problem = first_text(self._session.pipeline, problem)  # one rank's damage is everybody's
            if problem or found is None:
                self._say(f"warning: {problem}; trying the checkpoint before it")
                continue
            self._restore(found.standing, tensors)
            position = self._position(found.standing)
            self._say(f"resumed from {path}: epoch {position[0]}, batch {position[1]}")
            self._kept = found.standing.iteration if path.parent == self.directory else None
            self._beat(lambda beat, at=found.standing.iteration, where=path: _saved(beat, at, where, 0.0))  # type: ignore[misc]
            return position
        raise UserError(f"no checkpoint of {where} is whole; start anew, or restore one from a copy")

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
        for engine in pipeline.engines:
            for index, stage in engine.stages.items():
                for layer, module in stage.modules.items():
                    load_layer(tensors[layer], module, engine.updater.optimizers.get(index) if same else None)
            updater = engine.updater
            updater.num_updates = dict.fromkeys(updater.num_updates, standing.num_updates)
            if updater.scaler.dynamic:
                updater.scaler = LossScale(
                    standing.loss_scale, True, updater.scaler.growth_interval, standing.good_steps
                )
        pipeline.num_units, pipeline.num_updates = standing.num_units, standing.num_updates

    def _position(self, standing: Standing) -> Position:
        """The batch that follows; with another batch size or other replicas, the one that begins at or before it."""
        feed = self._session.feed
        batch, rest = divmod(standing.consumed, feed.step)
        if rest:
            self._say(f"warning: the batch size has changed; {rest} examples of epoch {standing.epoch} are read again")
        return (standing.epoch, batch) if batch < feed.num_batches else (standing.epoch + 1, 0)


def _saved(beat: Beat, iteration: int, path: Path, seconds: float) -> None:
    beat.saved, beat.checkpoint, beat.save_seconds = iteration, str(path), max(beat.save_seconds, seconds)


def load_layer(tensors: Mapping[str, Tensor], module: nn.Module, optimizer: Any = None) -> None:
    """Weights and buffers of a layer, and its optimizer state unless there is no optimizer to take it."""
    places: dict[str, Tensor] = {f"param/{name}": p for name, p in module.named_parameters()}
    places |= {f"buffer/{name}": b for name, b in module.named_buffers()}
    parameters = dict(module.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            if kind == "optimizer":
                name, part = name.rsplit("/", 1)
                states.setdefault(name, {})[part] = tensor.clone()
            else:
                places[key].copy_(tensor)
    for name, state in states.items() if hasattr(optimizer, "state") else ():
        optimizer.state[parameters[name]] = state
