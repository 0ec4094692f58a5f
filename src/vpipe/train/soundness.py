"""Whether a run still trains: losses, and gradients, that are not finite, and the layer where that begins; and whether
it still gets better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vpipe.rundir.manifest import Best
from vpipe.train.feed import Position
from vpipe.train.session import Session

LEAST_RATE = 1 / 8
"""The part of its learning rate below which a run that goes back again and again does not get."""


class Soundness:
    """Counts iterations in a row whose loss, or gradient, is not finite; the same on every rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.streak = 0
        self._skipped = session.pipeline.stats.num_skipped
        self._first: tuple[int, Position, str] = (0, (0, 0), "")
        """Where the streak began: iteration, position, and what was not finite."""

    def see(self, lines: Sequence[Mapping[str, Any]], positions: Sequence[Position]) -> str:
        """The iterations of a step have ended; what to tell the user."""
        scaler, pipeline, said = self._session.pipeline.loss_scale, self._session.pipeline, ""
        skipped, self._skipped = self._skipped, lines[-1]["skipped"]
        for line, position in zip(lines, positions, strict=True):
            last, norm = line is lines[-1], line["gradient_norm"]
            wrong = "" if isfinite(line["loss"]) else f"the loss is {line['loss']}"
            if not wrong and last and self._skipped > skipped and scaler.dynamic and line["loss_scale"] > 1:
                said = f"iteration {line['iteration']}  skipped an update; the loss scale is {line['loss_scale']:g} now"
            elif not wrong and last and (self._skipped > skipped or (pipeline.synchronous and not isfinite(norm or 0))):
                wrong = "a gradient is not finite"
            self.streak = self.streak + 1 if wrong else 0
            if self.streak == 1:
                self._first = (line["iteration"], position, wrong)
                done = f"; {self._skipped - skipped} updates skipped" if self._skipped > skipped else ""
                said = f"warning: iteration {line['iteration']}: {wrong}{done}"
        return said

    @property
    def is_lost(self) -> bool:
        """Whether it has been so for too long."""
        training = self._session.config.training
        return training.on_nan != "skip" and self.streak >= training.nan_limit

    def describe(self) -> str:
        """Since when, and where it begins. All ranks call this; it runs the forward of that iteration again."""
        iteration, position, wrong = self._first
        layer = self._first_layer(position)
        names = self._session.skeleton.layer_names
        where = f"layer {layer} ({names[layer]}) is the first with an output that is not" if layer < len(names) else ""
        return f"since iteration {iteration} {wrong}; " + (where or "the outputs of all layers are finite")

    def _first_layer(self, position: Position) -> int:
        session = self._session
        pipeline, found = session.pipeline, [len(session.skeleton.layer_names)]
        session.prepare()

        def look(layer: int, *told: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(told[-1]) if isinstance(leaf, Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                found.append(layer)

        with ExitStack() as hooks:
            for layer, module in pipeline.modules().items():
                hook = module.register_forward_hook(partial(look, layer))
                hooks.callback(hook.remove)
            units = session.feed.read([position]) if session.reads_data else None
            pipeline.evaluate(units.inputs() if units else None, units.targets() if units else None)
        return int(min(numbers[0] for numbers in pipeline.gather_numbers([min(found)])))


class Improvement:
    """Watches the metric of ``checkpoint.best``; the same on every rank."""

    def __init__(self, session: Session, found: Best) -> None:
        self._session = session
        metric = session.config.checkpoint.best or ""
        self.best = found if found.metric == metric else Best(metric)
        self.kind, _, self._name = metric.partition(".")
        """Of which lines of metrics.jsonl it is."""

    def look(self, kind: str, line: Mapping[str, Any], iteration: int, sound: bool) -> bool:
        """Whether it is in a line of this kind, and better than ever. All believe the leader, which reads data."""
        if kind != self.kind:
            return False
        value = line[self._name]
        told = self._session.pipeline.gather_numbers([nan if value is None else value])[0][0]
        self.best = self.best.after(told if sound else nan, iteration)
        return not self.best.since

    def settled(self) -> str:
        """That it has not been better for too long, if so."""
        patience, best = self._session.config.training.patience, self.best
        return f"{best.metric} was not better {best.since} times in a row" if 0 < patience <= best.since else ""
