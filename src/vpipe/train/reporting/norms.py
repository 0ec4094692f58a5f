"""Norms of gradients by layer and by group (``observe.gradient_norms``), as optimizers get them: after clipping."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import sqrt
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from vpipe.runtime.engine import Engine
from vpipe.runtime.updates.agreement import values_of
from vpipe.train.groups import GROUPS
from vpipe.train.session import Session


class GradientNorms:
    """Those of the latest updates. A tied weight counts at each of its owners."""

    def __init__(self, session: Session) -> None:
        self._pipeline, names = session.pipeline, session.skeleton.layer_names
        self._layers = {str(layer): f"{layer} {name}" for layer, name in enumerate(names)}
        self._groups = [f"group {group['match']}" for group in session.config.training.parameter_groups]
        self._squares: dict[int, dict[str, Tensor]] = {}
        """Stage → name of a layer or group → sum of squares."""
        self._pipeline.each_engine(self._watch)

    def _watch(self, engine: Engine) -> None:
        for made in engine.updater.optimizers.values():
            made.register_step_pre_hook(self._note)

    def _note(self, stepped: Optimizer, *_: Any) -> None:
        if (found := self._pipeline.stepped_by(stepped)) is not None:
            self._squares[found[0]] = self._of(found[1])

    def _of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            groups = [self._groups[number] for number in getattr(parameter, GROUPS, ())]
            for key in [self._layers.get(name.split(".", 1)[0], "loss"), *groups]:
                found[key] = found.get(key, 0.0) + values_of(parameter.grad).detach().double().norm() ** 2
        return found

    def told(self) -> dict[str, float]:
        """Name → norm, on every rank; all call this after a step."""
        mine = [{name: float(square) for name, square in found.items()} for found in self._squares.values()]
        self._squares.clear()
        sums: Counter[str] = Counter()
        for found in (each for text in self._pipeline.gather(json.dumps(mine)) for each in json.loads(text)):
            sums.update(found)
        return {name: sqrt(square) for name, square in sums.items()}
