"""Forwards that begin before their weights are agreed on, and begin again where an update is taken back.

A program may update first and agree afterwards (``schedule.post_validation``). What stands between the two on a rank
are forwards of the next batch; if all ranks agree that the update was wrong, each has the right weights by then
(``updates.attempts``) and runs these forwards once more, as if they had not been run: units and losses are dropped, and
buffers are what they were. Random numbers follow from the unit, so they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vpipe.runtime.job import Call
from vpipe.runtime.stage import Stage
from vpipe.runtime.updates.agreement import Waited
from vpipe.runtime.updates.attempts import AgreeingAfterwards
from vpipe.runtime.updates.repeats import Buffers
from vpipe.schedule.action import Action, Kind

ActionWatch = Callable[[Action], None]
"""Told every action that is run again."""


def with_second_tries(
    calls: list[Call], stages: Mapping[int, Stage], updater: AgreeingAfterwards, watch: ActionWatch, waited: Waited
) -> list[Call]:
    """The calls of a row, each agreement knowing what it may have to repeat."""
    found, begin = list(calls), 0
    for at, (action, _) in enumerate(calls):
        if action.kind is Kind.STEP:
            begin = at + 1
        elif action.kind is Kind.AGREE:
            section = SecondTry(calls[begin:at], stages, updater, watch, waited)
            found[at] = (action, section.agree)
            if begin < at:
                found[begin] = (found[begin][0], section.beginning(found[begin][1]))
    return found


class SecondTry:
    """The calls between an update and its agreement."""

    def __init__(
        self,
        calls: Sequence[Call],
        stages: Mapping[int, Stage],
        updater: AgreeingAfterwards,
        watch: ActionWatch,
        waited: Waited,
    ) -> None:
        self._calls = calls
        self._updater, self._watch, self._waited = updater, watch, waited
        self._units = [(stages[stage], microbatch) for (stage, kind, microbatch), _ in calls if kind is Kind.F]
        self._stages = list({id(stage): stage for stage, _ in self._units}.values())
        self._buffers: Buffers | None = None

    def beginning(self, call: Callable[[], None]) -> Callable[[], None]:
        """The first call, which first takes down what the forwards will change."""

        def first() -> None:
            self._buffers = Buffers(self._stages)
            call()

        return first

    def agree(self) -> None:
        """Roughly: ``if the update was wrong: undo, update rightly, forward again``."""
        if self._updater.settle(self._waited):
            self._undo()
            for action, call in self._calls:
                self._watch(action)
                call()
        self._buffers = None

    def _undo(self) -> None:
        for stage, microbatch in self._units:
            del stage.units[microbatch]
        self._updater.forget_losses({microbatch for _, microbatch in self._units})
        if self._buffers is not None:
            self._buffers.restore()
