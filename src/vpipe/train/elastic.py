"""What every rank of an elastic run does: train, be interrupted, and go on with the ranks that are left.

    ┌▶ order ─▶ meet (store, gloo, shared memory) ─▶ build ─▶ newest whole copy ─▶ train, a copy after each update ─┐
    └───────────────────────── abort: the sockets are shut, all of it is dropped ◀──────────────────────────────────┘

Nothing is mended in place. A pipeline that lost a rank is thrown away with its groups and its step, and the next one
begins from a copy in memory exactly as a resumed run begins from a checkpoint. Resuming is exact: random numbers depend
on (seed, unit, layer), the order of the data on the iteration, and no bit on the partition. So a run with any number of
losses ends as if none had happened. The data set and the process stay.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vpipe.config import PipelineConfig
from vpipe.data.dataset import DataSet
from vpipe.registry import load_plugins
from vpipe.rundir.claim import Claim
from vpipe.rundir.journal import BY_SIGNAL
from vpipe.rundir.layout import CHECKPOINTS
from vpipe.rundir.manifest import Standing, checkpoints
from vpipe.runtime import assembly
from vpipe.runtime.departures import Staging, landed
from vpipe.runtime.device import DEVICES, is_host
from vpipe.runtime.ranks import device_groups, membership
from vpipe.runtime.ranks.control import Aborted, Control, EpochOrder
from vpipe.runtime.ranks.device_groups import NO_WATCHDOG, DeviceLost
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.store import STORE
from vpipe.train import copies_elsewhere
from vpipe.train.copies import SHELVES, Copier, CopyShelf, Fingerprints, Layers, Part, TensorKey
from vpipe.train.copies_elsewhere import Generation, RemoteCopies
from vpipe.train.session import gather, load_data, open_session, schedule_of
from vpipe.train.sizes import resized
from vpipe.train.trainer import Trainer
from vpipe.train.worker import refuse_unseen, trainer_of

CONSEQUENCE = 0.5
"""Seconds within which an error must be explained by an abort; later it is this rank's own."""
CONSEQUENCE_THERE = 5.0
"""The same where ranks are on devices: an error of a transfer there does not say that it is one."""


def train(config: dict[str, Any], directory: str, run: str, resume: str | None = None, quiet: bool = False) -> int:
    """Train as whatever rank the launcher says, again and again; the exit code."""
    checked = PipelineConfig.from_dict(config)
    load_plugins(checked.plugins)
    if checked.launch.threads:
        torch.set_num_threads(checked.launch.threads)
    atexit.register(gc.freeze)  # an interpreter that has loaded torch spends a second on looking for garbage
    return Rank(checked, Claim(Path(directory), run), Path(resume) if resume else None, quiet).live()


class Rank:
    """One process of an elastic run. ``claim`` is its run, ``resume`` where that began."""

    def __init__(self, config: PipelineConfig, claim: Claim, resume: Path | None, quiet: bool) -> None:
        self._config, self._claim, self._resume, self._quiet = config, claim, resume, quiet
        self._control = Control.read(os.environ)
        self._shelves = [CopyShelf(pair) for pair in json.loads(os.environ[SHELVES])]
        self._staging = Staging()
        self._seen = Fingerprints()
        """Of what is frozen, when this epoch's last copy left the device."""
        self._data: DataSet | None = None
        self._remote: RemoteCopies | None = None
        self._copier, self._sending = Copier(), Copier()
        self._code = 0

    def live(self) -> int:
        control = self._control
        for number in BY_SIGNAL:
            signal.signal(number, self._hear)
        self._data = load_data(self._config)
        control.tell(ready=True)
        while (order := control.next()) is not None:
            try:
                with control.epoch(order):
                    self._code = self._attempt(order)
                    control.tell(finished=order.epoch, code=self._code)
                continue
            except Aborted:
                lost = ""
            except Exception as error:
                lost_one = isinstance(error, PeerLost)
                there = device_groups.current().any and not lost_one
                if not control.aborted(CONSEQUENCE_THERE if there else CONSEQUENCE) and not lost_one:
                    raise
                lost = str(error)
            self._part()
            control.tell(**({"lost": order.epoch, "sentence": lost} if lost else {}), ready=True)
        return self._code

    def _hear(self, number: int, _: Any) -> None:
        """Asked to stop between two epochs; within one, the trainer listens."""
        if number == signal.SIGINT and self._control.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self._control.heard = number

    def _part(self) -> None:
        """Drop everything that belongs to the ranks of before; a copy that is on its way becomes whole."""
        self._copier.settle()
        self._seen = Fingerprints()
        self._control.sockets.shut()
        try:
            with suppress(RuntimeError, AssertionError):
                membership.leave()
        except DeviceLost as error:
            sys.stderr.write(f"vpipe: {error}; this process is of no more use\n")
            os.kill(os.getpid(), signal.SIGKILL)  # which the launcher takes for what it is: a lost rank
        gc.collect()

    def _attempt(self, order: EpochOrder) -> int:
        """One epoch: from meeting the others to the end of the run, or to an exception."""
        took = Marks(order)
        if membership.current() is not None:  # it had finished, and another one had not
            self._part()
        os.environ.update(NO_WATCHDOG | _environment(order) | self._device_variables(order))
        with self._control.sockets.noting():
            assembly.join(self._config.parallel.timeout)
            took.mark("met")
            found = copies_elsewhere.agree(self._shelves)
            config = self._config_of(order, found)
            session = open_session(config, gather(config, self._data))
        session.epoch, session.losses = order.epoch, int((order.facts or {}).get("losses", 0))
        took.mark("groups")
        if order.epoch == 1:
            refuse_unseen(session.pipeline, self._claim)
        trainer = trainer_of(session, self._claim, self._quiet)
        try:
            self._restore(trainer, order, found)
            took.mark("state")
            took.iteration = trainer.iteration
            trainer.stop_requests.heard = self._control.heard
            trainer.updated = partial(self._keep, trainer, order, took)
            trainer.around_move = self._around_move
            session.pipeline.each_engine(self._copier.watch)
            self._control.wished = partial(setattr, trainer.stop_requests, "wish")
            trainer.run()
            self._copier.settle()
        finally:
            self._control.heard = trainer.stop_requests.heard or self._control.heard  # the next epoch obeys
            trainer.checkpoints.abandon()
            if self._remote is not None:
                self._remote.close()
                self._remote = None
        return trainer.ended.code

    def _device_variables(self, order: EpochOrder) -> dict[str, str]:
        """A process keeps its device, whichever rank it becomes: that of its place in ``launch.machines``, or of its
        slot."""
        machines, slot = self._config.launch.machines, self._control.slot
        host, _, place = machines[slot].rpartition(":") if machines else ("here", "", str(slot))
        place = place if host and place.isdigit() else "0"
        return {DEVICES: ",".join([place] * order.num_ranks)}

    def _config_of(self, order: EpochOrder, found: Generation | None) -> PipelineConfig:
        """The config of this epoch: its ranks, and the layers where they have moved to, if there are as many stages.
        What a plan of the config says about single layers stays with that plan's partition."""
        config = resized(self._config, order.num_ranks)
        moved = found.partition if found else ()
        if len(moved) != schedule_of(config).placement.num_stages or (
            isinstance(own := config.parallel.partition, str) and own != "auto"
        ):
            return config
        return resized(self._config, order.num_ranks, moved)

    def _restore(self, trainer: Trainer, order: EpochOrder, found: Generation | None) -> None:
        """Go on from the newest copy that is whole, else from the newest checkpoint, else from where the run began."""
        pipeline = trainer.session.pipeline
        if found is not None:
            self._shelves[self._control.slot].keep(found.iteration, found.epoch)
            trainer.restore(found.standing, copies_elsewhere.fetch(pipeline, found))
        elif (start := self._start(order)) is not None:
            trainer.resume(start)
        if (order.facts or {}).get("guest"):
            self._remote = RemoteCopies(order, self._control.slot, self._sending)

    def _start(self, order: EpochOrder) -> Path | None:
        """Where to begin without copies: two machines may be lost at once."""
        section = self._config.checkpoint
        folder = Path(section.directory) if section.directory else self._claim.directory / CHECKPOINTS
        return folder if order.epoch > 1 and checkpoints(folder) else self._resume

    @contextmanager
    def _around_move(self) -> Iterator[None]:
        """A move takes layers away, and may open connections."""
        self._copier.settle()
        with self._control.sockets.noting():
            yield

    def _keep(self, trainer: Trainer, order: EpochOrder, took: Marks) -> None:
        """After an update: copy what it made of this rank's layers, and tell the launcher how far we are."""
        pipeline, kept = trainer.session.pipeline, trainer.checkpoints
        self._copier.settle()
        if self._remote is not None:
            self._remote.settle(pipeline)
        writers = sorted({*map(pipeline.layout.leader, range(pipeline.layout.num_stages))})
        if order.rank in writers:
            frozen = {
                (layer, f"param/{name}")
                for layer, module in pipeline.modules().items()
                for name, parameter in module.named_parameters()
                if not parameter.requires_grad
            }
            part = Part(order.epoch, writers.index(order.rank), len(writers), tuple(pipeline.partition))
            shelf, standing = self._shelves[self._control.slot], kept.standing(trainer.progress)
            with self._control.undisturbed():
                finish, remote = self._begun(shelf, standing, part, kept.layers(), frozen), self._remote

                def whole() -> None:
                    finish()
                    if remote is not None:
                        remote.send(shelf)

                self._copier.begin(whole)
        if took.ends():
            trainer.log.recovered(took.iteration, order.num_ranks, order.facts or {}, took.seconds)
        if trainer.iteration > took.iteration + 1:  # of the step before, all ranks have a whole copy: it is not lost
            self._control.stepped(trainer.iteration)

    def _begun(
        self, shelf: CopyShelf, standing: Standing, part: Part, layers: Layers, frozen: Collection[TensorKey]
    ) -> Callable[[], object]:
        """A copy as far as the training thread must make it; the rest is for the copier. From a device everything
        leaves by a stream of its own, and the copier alone waits until it has come."""
        if all(is_host(tensor.device) for tensors in layers.values() for tensor in tensors.values()):
            return shelf.begin(standing, part, layers, frozen)
        copied, arrivals = self._staging.copy(layers, self._seen.unchanged(layers, frozen))

        def written() -> None:
            landed(arrivals)
            shelf.write(standing, part, copied, frozen)

        return written


class Marks:
    """When this epoch came how far, in seconds after the launcher noticed what it recovers from."""

    def __init__(self, order: EpochOrder) -> None:
        facts = order.facts or {}
        self._last = monotonic() - float(facts.get("since", 0.0))
        self._open = "lost" in facts
        self.iteration = 0
        """From where the run went on."""
        self.seconds: dict[str, float] = {}
        self.mark("agreed")

    def mark(self, name: str) -> None:
        """``name`` took from the mark before until now."""
        now = monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    def ends(self) -> bool:
        """After the first step; whether there is anything to tell."""
        if not self._open:
            return False
        self._open = False
        self.seconds["groups"] += self.seconds.pop("met")
        self.mark("replay")
        return True


def _environment(order: EpochOrder) -> dict[str, str]:
    """What torch and ``membership`` read. The count of restarts names the keys of this epoch in the store. Ranks on
    several machines meet where the first one is."""
    facts = order.facts or {}
    host, port = facts.get("meet", ("", 0))
    return {
        "RANK": str(order.rank),
        "LOCAL_RANK": str(facts.get("local_rank", order.rank)),
        "WORLD_SIZE": str(order.num_ranks),
        "LOCAL_WORLD_SIZE": str(facts.get("local_size", order.num_ranks)),
        "TORCHELASTIC_RESTART_COUNT": str(order.epoch),
    } | ({"MASTER_ADDR": host, STORE: f"{host}:{port}", "GROUP_RANK": str(facts["group_rank"])} if host else {})
