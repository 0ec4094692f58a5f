"""``parallel.adapt``: measured stage times → planner → move layers, if that pays within the rest of the run.

    every step      times of stages, medians over the last few steps
    something new?  what layers cost, how quick ranks are (``plan.observed``) ─▶ plan ─▶ worth it? ─▶ move | suggest

A step must become shorter by at least ``LEAST_GAIN``, and the seconds saved in the rest of the run must exceed those of
moving ``MARGIN`` times. A partition that has been measured is judged by its measurement and not by its prediction, so
nothing swings to and fro. Rank 0 decides; every decision is told with its reason.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from vpipe.errors import UserError
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.machine import Machine
from vpipe.plan.observed import NOTICE, Array, Observed
from vpipe.plan.pipe import Pipe
from vpipe.plan.planner import plan
from vpipe.plan.predict import predict
from vpipe.runtime.moving import Moved
from vpipe.runtime.pipeline import Pipeline
from vpipe.schedule.action import Kind
from vpipe.schedule.layout import Layout

WINDOW = 3
"""Steps whose median is believed; the first step after a move is not among them."""
LEAST_GAIN = 0.04
MARGIN = 2.0
GUESSED_BANDWIDTH, GUESSED_START = 500e6, 0.1
"""Bytes a second and seconds of a move, until one has been measured."""
CHANNEL = {Kind.F: (0,), Kind.I: (1,), Kind.R: (1,), Kind.W: (2,), Kind.B: (1, 2)}
"""Which of forward, input gradient and weight gradient an action counts to; a whole backward is halved."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and why."""

    partition: tuple[int, ...]
    moves: bool
    reason: str
    gain: float = 0.0
    """Share of a step that is predicted to be saved."""


class Adapter:
    """Watches the stages of a pipeline. Every rank calls everything here at the same steps."""

    def __init__(
        self,
        pipeline: Pipeline,
        mode: Literal["suggest", "on"],
        work: Sequence[float],
        layer_bytes: Sequence[int],
        tell: Callable[[Decision, Moved | None], None],
        move: Callable[[Layout], Moved] | None = None,
    ) -> None:
        self._pipeline, self._mode, self._tell = pipeline, mode, tell
        self._move = move or pipeline.move
        self._bytes = layer_bytes
        self._pipe = _plannable(pipeline)
        self._observed = Observed(work, pipeline.placement.ranks_of)
        self._window: deque[Array] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._skip = 1
        self._known: Array | None = None
        """The stage times that the last decision was made for."""
        self._measured: dict[tuple[Any, ...], float] = {}
        self._pace: list[tuple[int, float]] = []
        """(bytes, seconds) of the moves so far."""

    def after_step(self, seconds: float, steps_left: int) -> None:
        """A step has ended that took so long; layers may move now."""
        times = _gathered(self._pipeline)
        if self._skip:
            self._skip -= 1
            return
        self._window.append(times)
        self._seconds.append(seconds)
        if len(self._window) < WINDOW:
            return
        now = np.median(np.array(self._window), axis=0)
        quiet = self._known is not None and bool(np.all(_news(now, self._known) < NOTICE))
        word = ""
        if self._pipeline.is_leader and not quiet:
            word = json.dumps(self._decide(now, steps_left).__dict__)
        word = self._pipeline.gather_first(word)
        if not word:
            return
        self._known = now
        told = json.loads(word)
        decision = Decision(tuple(told["partition"]), told["moves"], told["reason"], told["gain"])
        self._tell(decision, self._carry_out(decision))

    def _carry_out(self, decision: Decision) -> Moved | None:
        if not decision.moves or self._mode != "on":
            return None
        moved = self._move(self._pipeline.layout.with_counts(decision.partition))
        self._pace.append((self._moving_bytes(moved), moved.seconds))
        self.forget_times()
        return moved

    def forget_times(self) -> None:
        """The layout has changed: what was measured belongs to another one."""
        self._window.clear()
        self._seconds.clear()
        self._skip, self._known = 1, None

    def _moving_bytes(self, moved: Moved) -> int:
        return sum(self._bytes[transfer.layer] for transfer in moved.difference.transfers)

    def _decide(self, times: Array, steps_left: int) -> Decision:
        """Rank 0's answer to new times."""
        counts, observed = tuple(self._pipeline.partition), self._observed
        observed.learn(counts, times)
        state = tuple(round(float(slow), 1) for slow in observed.slowness)
        here = median(self._seconds)
        self._measured[(counts, state)] = here
        profile, speed = observed.profile(), observed.speed()
        machine = Machine.of(len(speed), None, speed)
        now = predict(profile, PlannedLayout.of_counts(counts), self._pipe, machine).step_time
        pipe = self._pipe
        found = plan(
            profile,
            pipe.num_ranks,
            num_microbatches=pipe.num_microbatches,
            schedule=pipe.entry.name,
            stages_per_rank=pipe.stages_per_rank,
            replicas=pipe.replicas or 1,
            speed=speed,
            recompute=False,
            swap=False,
            time_limit=2.0,
        )
        wanted = tuple(found.layout.counts)
        gain = 1 - found.step_time / now if now else 0.0
        if (wanted, state) in self._measured and wanted != counts:
            gain = 1 - self._measured[(wanted, state)] / here
        return self._judged(counts, wanted, gain, times, here, steps_left)

    def _judged(
        self,
        counts: tuple[int, ...],
        wanted: tuple[int, ...],
        gain: float,
        times: Array,
        seconds: float,
        steps_left: int,
    ) -> Decision:
        listed = ", ".join(f"{1e3 * float(time):.3g}" for time in times.sum(axis=1))
        begin = f"stages take {listed} ms a unit"
        if wanted == counts or gain < LEAST_GAIN:
            other = "is the planner's best" if wanted == counts else f"is within {LEAST_GAIN:.0%} of {list(wanted)}"
            return Decision(counts, False, f"{begin}; {list(counts)} {other}", max(gain, 0.0))
        saved, cost = gain * seconds * steps_left, self._cost(counts, wanted)
        offer = (
            f"{begin}; {list(counts)} → {list(wanted)} is predicted to save {gain:.0%} of a step, {saved:.2g} s in the "
            f"{steps_left} left, and moving takes about {cost:.2g} s"
        )
        if saved < MARGIN * cost:
            return Decision(wanted, False, f"{offer}: not worth it", gain)
        return Decision(wanted, True, offer, gain)

    def _cost(self, counts: tuple[int, ...], wanted: tuple[int, ...]) -> float:
        """Seconds of a move: as the slowest so far in proportion to its bytes, or a guess."""
        before = np.repeat(np.arange(len(counts)), counts)
        after = np.repeat(np.arange(len(wanted)), wanted)
        size = sum(self._bytes[int(layer)] for layer in np.flatnonzero(before != after))
        if not self._pace:
            return GUESSED_START + size / GUESSED_BANDWIDTH
        return max(seconds * max(1.0, size / max(moved, 1)) for moved, seconds in self._pace)


def _plannable(pipeline: Pipeline) -> Pipe:
    """The planner's view of the pipeline; a sentence where it has none, or where times would say nothing."""
    spec = pipeline.programs.spec
    if pipeline.builder.takes_turns:
        raise UserError(
            "parallel.adapt measures stages, but ranks that are threads of one process take turns and their times say "
            "nothing; use transport: auto, or adapt: off"
        )
    placement = pipeline.placement
    copies = [len(ranks) for ranks in placement.ranks_of]
    width = 1 if not spec.synchronous else copies[0]
    if spec.synchronous:
        num_ranks, replicas = placement.num_ranks // width, (width,) * (placement.num_ranks // width)
    else:
        num_ranks, replicas = placement.num_stages, tuple(copies)
    try:
        pipe = Pipe.of(
            str(spec.entry.name),
            num_ranks,
            spec.num_microbatches,
            placement.num_stages // num_ranks,
            replicas if max(replicas) > 1 else (),
        )
        same = not pipe.entry.two_ways and pipe.program.placement == placement
    except UserError as error:
        raise UserError(f"parallel.adapt cannot plan {spec.describe()}: {error}; use adapt: off") from None
    if not same:
        raise UserError(
            f"parallel.adapt plans schedules of the catalogue as they are, but {spec.describe()} has stages elsewhere; "
            "use adapt: off"
        )
    return pipe


def _news(now: Array, before: Array) -> Array:
    """By what share each stage's time has changed."""
    change: Array = np.abs(now.sum(axis=1) / np.maximum(before.sum(axis=1), 1e-12) - 1)
    return change


def _gathered(pipeline: Pipeline) -> Array:
    """(stage, channel) → seconds of a unit in the last step: the median of its units, the mean of its replicas."""
    stages = pipeline.layout.num_stages
    spent: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    held = np.zeros((stages, 1))
    for records in pipeline.trace().records.values():
        for record in records:
            if record.action.kind in CHANNEL:
                spent[record.action.stage, record.action.kind].append(record.end - record.ready)
        held[list({record.action.stage for record in records})] += 1
    sums = np.zeros((stages, 3))
    for (stage, kind), times in spent.items():
        for channel in CHANNEL[kind]:
            sums[stage, channel] += held[stage, 0] * median(times) / 1e9 / len(CHANNEL[kind])
    mine = np.concatenate([sums, held], axis=1).flatten()
    total = np.sum([np.array(each) for each in pipeline.gather_numbers(mine.tolist())], axis=0).reshape(stages, 4)
    found: Array = total[:, :3] / np.maximum(total[:, 3:], 1)
    return found
