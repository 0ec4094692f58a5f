"""``parallel.adapt``: measured stage times → planner → move layers, if that pays within the rest of the run.

    every step      times of stages, medians over the last few steps
    something new?  what layers cost, how quick ranks are (``plan.observed``) ─▶ plan ─▶ worth it? ─▶ move | suggest

A step must become shorter by at least ``LEAST_GAIN``, and the seconds saved in the rest of the run must exceed those of
moving ``MARGIN`` times. A partition that has been measured is judged by its measurement and not by its prediction, so
nothing swings to and fro. Rank 0 decides; every decision is told with its reason.

With a cap on the memory of a rank the planner also chooses what is recomputed and swapped, and that changes with the
layout in the same move. A layout that needs more than the cap is left for one that does not, whatever that costs.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Choice
from vpipe.plan.observed import NOTICE, Array, Observed
from vpipe.plan.pipe import Pipe
from vpipe.plan.planner import plan
from vpipe.plan.predict import predict
from vpipe.plan.transfer import measure_swap
from vpipe.plan.units import format_bytes
from vpipe.records import parsed
from vpipe.runtime.moves.moving import Moved
from vpipe.runtime.options import Memory, recomputed_and_swapped
from vpipe.runtime.pipeline import Pipeline
from vpipe.schedule.action import Kind
from vpipe.schedule.placement import Layout

if TYPE_CHECKING:
    from vpipe.train.session import Session

WINDOW = 3
"""Steps whose median is believed; the first step after a move is not among them."""
LEAST_GAIN = 0.04
MARGIN = 2.0
GUESSED_BANDWIDTH, GUESSED_START = 500e6, 0.1
"""Bytes a second and seconds of a move, until one has been measured."""
CHANNEL = {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}
"""Which of forward, input gradient and weight gradient an action counts to; a whole backward is halved."""
WITH_RECOMPUTE = CHANNEL | {Kind.R: (1,)}
"""The same where what is recomputed stays a share of a stage's layers: part of what they cost."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and why."""

    partition: tuple[int, ...]
    moves: bool
    reason: str
    gain: float = 0.0
    """Share of a step that is predicted to be saved."""
    recompute: tuple[int, ...] | None = None
    """Layers that are computed again from now on; ``None``: the shares of the new stages, as before."""
    swap: tuple[int, ...] = ()

    @property
    def memory(self) -> Memory | None:
        """What ``move`` is told."""
        return None if self.recompute is None else Memory(frozenset(self.recompute), frozenset(self.swap))


@dataclass(frozen=True)
class Cap:
    """The most bytes of a rank, and the bytes of the layers."""

    bytes: int
    sizes: Profile


class Adapter:
    """Watches the stages of a pipeline. Every rank calls everything here at the same steps."""

    def __init__(
        self,
        pipeline: Pipeline,
        mode: Literal["suggest", "on"],
        work: Sequence[float],
        layer_bytes: Sequence[int],
        tell: Callable[[Decision, Moved | None], None],
        move: Callable[[Layout, Memory | None], Moved] | None = None,
        cap: Cap | None = None,
    ) -> None:
        self._pipeline, self._mode, self._tell = pipeline, mode, tell
        self._move = move or pipeline.move
        self._bytes = layer_bytes
        self._cap = cap
        self._sizes: Profile | None = None
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
        times = _gathered(self._pipeline, WITH_RECOMPUTE if self._cap is None else CHANNEL)
        if self._skip:
            self._skip -= 1
            return
        self._window.append(times)
        self._seconds.append(seconds)
        if len(self._window) < WINDOW:
            return
        now = np.median(np.array(self._window), axis=0)
        before = now if self._known is None else self._known
        news = np.abs(now.sum(axis=1) / np.maximum(before.sum(axis=1), 1e-12) - 1)
        quiet = self._known is not None and bool(np.all(news < NOTICE))
        word = ""
        if self._pipeline.is_leader and not quiet:
            word = json.dumps(asdict(self._decide(now, steps_left)))
        word = self._pipeline.gather_first(word)
        if not word:
            return
        self._known = now
        decision = parsed(Decision, json.loads(word))
        self._tell(decision, self._carry_out(decision))

    def _carry_out(self, decision: Decision) -> Moved | None:
        if not decision.moves or self._mode != "on":
            return None
        moved = self._move(self._pipeline.layout.with_counts(decision.partition), decision.memory)
        size = sum(self._bytes[transfer.layer] for transfer in moved.difference.transfers)
        self._pace.append((size, moved.seconds))
        self.forget_times()
        return moved

    def forget_times(self) -> None:
        """The layout has changed: what was measured belongs to another one."""
        self._window.clear()
        self._seconds.clear()
        self._skip, self._known = 1, None

    def _decide(self, times: Array, steps_left: int) -> Decision:
        """Rank 0's answer to new times."""
        observed, pipe, layout = self._observed, self._pipe, self._planned()
        observed.learn(layout.counts, times)
        state = tuple(round(float(slow), 1) for slow in observed.slowness)
        here = median(self._seconds)
        self._measured[(layout, state)] = here
        cap = None if self._cap is None else self._cap.bytes
        profile, speed = observed.profile(self._known_sizes()), observed.speed()
        now = predict(profile, layout, pipe, Machine.of(len(speed), cap, speed))
        begin = f"stages take {', '.join(f'{1e3 * float(time):.3g}' for time in times.sum(axis=1))} ms a unit"
        try:
            found = plan(
                profile,
                pipe.num_ranks,
                num_microbatches=pipe.num_microbatches,
                schedule=pipe.entry.name,
                stages_per_rank=pipe.stages_per_rank,
                replicas=pipe.replicas or 1,
                speed=speed,
                memory=cap,
                recompute=cap is not None,
                swap=cap is not None,
                time_limit=2.0,
            )
        except UserError as error:
            return Decision(layout.counts, False, f"{begin}; {list(layout.counts)} stays: {error.sentence}")
        wanted = found.layout
        gain = 1 - found.step_time / now.step_time if now.step_time else 0.0
        if (wanted, state) in self._measured and wanted != layout:
            gain = 1 - self._measured[(wanted, state)] / here
        most = max(range(len(now.rank_memory)), key=lambda rank: now.rank_memory[rank])
        if cap is not None and now.rank_memory[most] > cap and wanted != layout:
            need = f"rank {most} needs {format_bytes(now.rank_memory[most])} of {format_bytes(cap)}"
            return self._decision(wanted, True, f"{begin}; {need}: {_change(layout, wanted)}", gain)
        return self._judged(layout, wanted, gain, begin, here, steps_left)

    def _known_sizes(self) -> Profile | None:
        """The bytes of the layers, where there is a cap: with what the optimizer keeps now that it has stepped, and
        with the swap lane, which is measured once."""
        if self._sizes is None and self._cap is not None:
            held = self._pipeline.weights_of(self._pipeline.rank)
            share = held["optimizer"] / max(1, held["weights"])
            layers = [replace(x, optimizer_bytes=int(share * x.parameter_bytes)) for x in self._cap.sizes.layers]
            bandwidth = measure_swap(1, self._pipeline.devices[0])
            self._sizes = replace(self._cap.sizes, layers=tuple(layers), swap_bandwidth=bandwidth)
        return self._sizes

    def _planned(self) -> PlannedLayout:
        """The layout of now as the planner knows it."""
        pipeline = self._pipeline
        counts, bounds = pipeline.layout.counts, pipeline.layout.bounds
        if self._cap is None:
            return PlannedLayout.of_counts(counts)
        memory = pipeline.memory
        again, out = recomputed_and_swapped(memory.recompute, memory.swap, bounds)
        kinds = [
            Choice.RECOMPUTE if i in again else Choice.SWAP if i in out else Choice.KEEP for i in range(sum(counts))
        ]
        return PlannedLayout.of_counts(counts, [kinds[begin:end] for begin, end in bounds])

    def _decision(self, wanted: PlannedLayout, moves: bool, reason: str, gain: float) -> Decision:
        if self._cap is None:
            return Decision(wanted.counts, moves, reason, gain)
        recompute, swap = (_layers(wanted, choice) for choice in (Choice.RECOMPUTE, Choice.SWAP))
        return Decision(wanted.counts, moves, reason, gain, recompute, swap)

    def _judged(
        self,
        layout: PlannedLayout,
        wanted: PlannedLayout,
        gain: float,
        begin: str,
        seconds: float,
        steps_left: int,
    ) -> Decision:
        if wanted == layout or gain < LEAST_GAIN:
            best = f"is within {LEAST_GAIN:.0%} of {_told(wanted)}"
            other = "is the planner's best" if wanted == layout else best
            return self._decision(layout, False, f"{begin}; {_told(layout)} {other}", max(gain, 0.0))
        saved, cost = gain * seconds * steps_left, self._cost(layout.counts, wanted.counts)
        offer = (
            f"{begin}; {_change(layout, wanted)} is predicted to save {gain:.0%} of a step, {saved:.2g} s in the "
            f"{steps_left} left, and moving takes about {cost:.2g} s"
        )
        if saved < MARGIN * cost:
            return self._decision(wanted, False, f"{offer}: not worth it", gain)
        return self._decision(wanted, True, offer, gain)

    def _cost(self, counts: tuple[int, ...], wanted: tuple[int, ...]) -> float:
        """Seconds of a move: as the slowest so far in proportion to its bytes, or a guess."""
        before = np.repeat(np.arange(len(counts)), counts)
        after = np.repeat(np.arange(len(wanted)), wanted)
        size = sum(self._bytes[int(layer)] for layer in np.flatnonzero(before != after))
        if not self._pace:
            return GUESSED_START + size / GUESSED_BANDWIDTH
        # A change of recomputation alone moves no layer: it tells how long a start takes, and nothing of bytes.
        return max(
            seconds * max(1.0, size / moved) if moved else seconds + size / GUESSED_BANDWIDTH
            for moved, seconds in self._pace
        )


def _plannable(pipeline: Pipeline) -> Pipe:
    """The planner's view of the pipeline; a sentence where it has none, or where times would say nothing."""
    spec = pipeline.spec
    if pipeline.takes_turns:
        raise UserError(
            "parallel.adapt measures stages, but ranks that are threads of one process take turns and their times say "
            "nothing; use transport: auto, or adapt: off"
        )
    placement = pipeline.placement
    copies = [placement.num_replicas(stage) for stage in range(placement.num_stages)]
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


def _layers(layout: PlannedLayout, choice: Choice) -> tuple[int, ...]:
    return tuple(layer for stage in range(layout.num_stages) for layer in layout.layers(stage, choice))


def _told(layout: PlannedLayout) -> str:
    """Layers per stage, and how many of them are not kept."""
    again, out = (len(_layers(layout, choice)) for choice in (Choice.RECOMPUTE, Choice.SWAP))
    told = [f"{number} {word}" for number, word in ((again, "recomputed"), (out, "swapped")) if number]
    return str(list(layout.counts)) + (f" ({', '.join(told)})" if told else "")


def _change(layout: PlannedLayout, wanted: PlannedLayout) -> str:
    return f"{_told(layout)} → {_told(wanted)}"


def _gathered(pipeline: Pipeline, channels: Mapping[Kind, Sequence[int]]) -> Array:
    """(stage, channel) → seconds of a unit in the last step: the median of its units, the mean of its replicas."""
    stages = pipeline.layout.num_stages
    spent: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    held = np.zeros((stages, 1))
    for records in pipeline.trace().records.values():
        for record in records:
            if record.action.kind in channels:
                spent[record.action.stage, record.action.kind].append(record.end - record.ready)
        held[list({record.action.stage for record in records})] += 1
    sums = np.zeros((stages, 3))
    for (stage, kind), times in spent.items():
        for channel in channels[kind]:
            sums[stage, channel] += held[stage, 0] * median(times) / 1e9 / len(channels[kind])
    mine = np.concatenate([sums, held], axis=1).flatten()
    total = np.sum([np.array(each) for each in pipeline.gather_numbers(mine.tolist())], axis=0).reshape(stages, 4)
    found: Array = total[:, :3] / np.maximum(total[:, 3:], 1)
    return found


def adapter_of(
    session: Session, mode: Literal["suggest", "on"], adapted: Callable[..., None], move: Callable[..., Moved]
) -> Adapter:
    """What a run adapts with."""
    sizes = [3 * size for size in session.skeleton.weight_bytes]  # with what optimizers keep, about
    from vpipe.train.measure.profile import memory_cap  # which reads this module

    return Adapter(session.pipeline, mode, session.skeleton.work, sizes, adapted, move, memory_cap(session))


def as_asked(wish: str, layout: Layout, move: Callable[[Layout], Moved]) -> tuple[Decision, Moved]:
    """Move to a layout asked for from outside: ``{"partition": layers per stage, "ranks": their order}``."""
    told = json.loads(wish)
    moved = move(layout.with_counts(told["partition"]).with_ranks(told["ranks"]))
    return Decision(tuple(told["partition"]), True, f"asked for {told['partition']} on ranks {told['ranks']}"), moved
