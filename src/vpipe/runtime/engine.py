"""The only loop: a rank's row of a program, compiled once into a flat list of bound calls.

Each kind of action has one handler. A handler moves values between the transport and a stage; it decides nothing,
because the program has decided everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch.profiler import record_function

from vpipe.runtime.flow import Flow, Value
from vpipe.runtime.region import Pending, Run, detached
from vpipe.runtime.stage import Stage, Unit
from vpipe.runtime.swap import Move, Swapper
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.update import Updater
from vpipe.runtime.wire import Envelope
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import WEIGHT_GRADIENT, VersionTable, version_table


@dataclass(frozen=True)
class Job:
    """One execution of a program: its units, and where it stands in the training run."""

    step: int
    first_unit: int
    """How many units all steps before have run: what random numbers count from."""
    inputs: Callable[[int], dict[Value, Any]]
    targets: Callable[[int], Any]
    share: Callable[[int], float]
    """A unit's share of the batch. Stage 0 knows it; it travels with the unit."""
    gradient_weights: Sequence[float] | None = None
    """What the units' gradients are multiplied by, where that is not their share."""
    scale: float = 1.0
    training: bool = True
    wants_loss: bool = True


@dataclass
class Record:
    """When an action began, had what it needed, and ended, in nanoseconds of this rank's clock.

    A swap begins where the rank hands it over, is ready when the swap lane takes it up, and ends there.
    """

    action: Action
    begin: int
    ready: int
    end: int
    bytes: int = 0


@dataclass
class Result:
    """What a rank knows after a job."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """(stage, microbatch) → what the stage contributes to the batch's loss by this unit."""
    outputs: dict[int, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """A program, ready to run on one rank."""

    program: Program
    calls: list[tuple[Action, Callable[[], None]]]
    versions: VersionTable
    uses: dict[int, list[int]]
    """Stage → how many of this rank's units read each version."""


class Engine:
    """One rank."""

    def __init__(
        self,
        stages: dict[int, Stage],
        flow: Flow,
        transport: Transport,
        updater: Updater,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        lock: threading.Lock | None = None,
    ) -> None:
        self.rank = transport.rank
        self.stages = stages
        self.flow = flow
        self.transport = transport
        self.updater = updater
        self._seed = seed
        self._autocast = autocast
        self._guard: AbstractContextManager[Any] = lock or nullcontext()
        self._local: dict[Envelope, Any] = {}
        self._outbox: dict[tuple[Kind, int, int], list[tuple[int, Any]]] = {}
        self._swapper = Swapper()
        self._moves: dict[Action, Move] = {}
        self._ready = 0
        self.annotates = False
        """Whether actions appear under their names in a torch.profiler trace."""
        self.current: Action | None = None
        """What the rank is doing: read by the watchdog."""

    def compile(self, program: Program) -> Compiled:
        """Bind every action of this rank's row to its handler."""
        handlers: dict[Kind, Callable[[Stage, int], None]] = {
            Kind.F: self._forward,
            Kind.B: partial(self._backward, defer_weights=False),
            Kind.I: partial(self._backward, defer_weights=True),
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.OUT: self._swap_out,
            Kind.IN: self._swap_in,
            Kind.SEND_F: partial(self._send, Kind.SEND_F),
            Kind.SEND_B: partial(self._send, Kind.SEND_B),
            Kind.RECV_F: partial(self._post, False),
            Kind.RECV_B: partial(self._post, True),
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._step,
        }
        self._program = program
        row = program.rows[self.rank]
        versions = version_table(program)
        uses: dict[int, list[int]] = {stage: [0] for stage in self.stages}
        for stage, kind, _ in row:
            if kind is Kind.STEP:
                uses[stage].append(0)
        for stage, kind, microbatch in row:
            if kind in WEIGHT_GRADIENT:
                uses[stage][versions[stage, microbatch]] += 1
        calls: list[tuple[Action, Callable[[], None]]] = [
            (action, partial(handlers[action.kind], self.stages[action.stage], action.microbatch)) for action in row
        ]
        return Compiled(program, calls, versions, uses)

    def run(self, compiled: Compiled, job: Job) -> Result:
        """Run the row. A failure names the action; the other ranks are told."""
        self._program, self._versions, self._job = compiled.program, compiled.versions, job
        self._result = Result()
        self.updater.begin(self._result.losses, compiled.program.num_microbatches)
        for index, stage in self.stages.items():
            stage.train(job.training)
            if job.training:
                stage.weights.begin(compiled.uses[index])
        try:
            self.transport.begin_step(job.step)
            self._execute(compiled.calls, self._result.records)
            self._settle(self._result.records)
            self.transport.end_step()
        except BaseException as error:
            action = self.current
            where = f"rank {self.rank}, stage {action.stage}, action {action}" if action else f"rank {self.rank}"
            unit = f", microbatch {action.microbatch}" if action and action.microbatch >= 0 else ""
            error.add_note(f"vpipe: this happened at {where}{unit}, step {job.step}")
            self._abandon()
            self.transport.fail(error)
            raise
        finally:
            self.current = None
            for stage in self.stages.values():
                if job.training:
                    stage.weights.end()
        return self._result

    def _execute(self, calls: Sequence[tuple[Action, Callable[[], None]]], records: list[Record]) -> None:
        """The loop."""
        for action, call in calls:
            self.current = action
            begin = self._ready = perf_counter_ns()
            if self.annotates:
                with record_function(str(action)):
                    call()
            else:
                call()
            records.append(Record(action, begin, self._ready, perf_counter_ns()))

    def _settle(self, records: Sequence[Record]) -> None:
        """The swap lane is done: write down when it did what."""
        self._swapper.settle()
        for record in records if self._moves else ():
            if record.action in self._moves:
                move = self._moves[record.action]
                record.ready, record.end, record.bytes = move.begin, move.end, move.bytes
        self._moves.clear()

    def _abandon(self) -> None:
        """Drop what a failed step has left, its gradients too: the next step must not add to half of a batch."""
        self._local.clear()
        self._outbox.clear()
        self._moves.clear()
        self._swapper.abandon()
        if self._job.training:
            for stage in self.stages.values():
                stage.abandon()

    def _arrive(self, source: int, target: int, microbatch: int, backward: bool) -> Any:
        """A message, from another rank or from a stage of this one."""
        envelope = Envelope(self._job.step, source, target, microbatch, int(backward))
        if self._program.placement.rank(source, microbatch) == self.rank:
            return self._local.pop(envelope)
        return self.transport.take(envelope)

    def _depart(self, source: int, target: int, microbatch: int, backward: bool, payload: Any) -> None:
        """A message, to the outbox of the SEND that follows or to a stage of this rank."""
        if self._program.placement.rank(target, microbatch) == self.rank:
            envelope = Envelope(self._job.step, source, target, microbatch, int(backward))
            self._local[envelope] = payload if backward else detached(payload)
        else:
            kind = Kind.SEND_B if backward else Kind.SEND_F
            self._outbox.setdefault((kind, source, microbatch), []).append((target, payload))

    def _forward(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``y = stage(x)``."""
        job, index = self._job, stage.index
        values: dict[Value, Any] = job.inputs(microbatch) if index == 0 else {}
        even = share = 1 / self._program.num_microbatches
        if index == 0:
            share = job.share(microbatch)
        for source in self._program.writers[index]:
            told, payload = self._arrive(source, index, microbatch, backward=False)
            share = share if told is None else float(told)
            values.update({value: payload[value[0]] for value in self.flow.sent(source, index)})
        run = Run(self._seed, job.first_unit + microbatch, job.training, self._autocast)
        targets = job.targets(microbatch) if stage.is_last else None
        self._ready = perf_counter_ns()
        given: dict[Value, Any]
        with self._guard:
            if job.training:
                weight = share if job.gradient_weights is None else job.gradient_weights[microbatch]
                weight *= job.scale * self.updater.loss_scale
                unit = Unit(self._versions[index, microbatch], run, targets, weight)
                given = stage.forward(microbatch, unit, values)
                parts = [float(value) for _, value in unit.added] + (
                    [float(unit.loss)] if unit.loss is not None else []
                )
            else:
                given, loss = stage.evaluate(values, run, targets, job.wants_loss)
                parts = [float(loss)] if loss is not None else []
        if parts:
            self._result.losses[index, microbatch] = share * sum(parts)
        if stage.is_last and not job.training and not job.wants_loss:
            outputs = [given[value] for value in self.flow.outputs()]
            self._result.outputs[microbatch] = outputs[0] if len(outputs) == 1 else tuple(outputs)
        told = (
            None if share == even else torch.tensor(share, dtype=torch.float64)
        )  # a tensor: the layout stays the same
        for target in self._program.readers[index]:
            wanted = self.flow.sent(index, target)
            payload = {value[0]: given[value] if value in given else values[value] for value in wanted}
            self._depart(index, target, microbatch, False, (told, payload))

    def _backward(self, stage: Stage, microbatch: int, defer_weights: bool) -> None:
        """Roughly: ``dx, dw = backward(dy)``, or ``dx`` alone."""
        index = stage.index
        pending: Pending = {}
        for source in self._program.readers[index]:
            payload = self._arrive(source, index, microbatch, backward=True)
            for value in self.flow.sent(index, source):
                pending.setdefault(value, []).extend((layer, gradients) for layer, gradients in payload[value[0]])
        self._await_swap(stage, microbatch)
        self._ready = perf_counter_ns()
        with self._guard:
            stage.backward(microbatch, pending, defer_weights)
        for target in self._program.writers[index]:
            payload = {
                value[0]: [[layer, gradients] for layer, gradients in pending.get(value, [])]
                for value in self.flow.sent(target, index)
            }
            self._depart(index, target, microbatch, True, payload)

    def _weight_gradient(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``dw += what I remembered``."""
        with self._guard:
            stage.weight_gradient(microbatch)

    def _recompute(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``y = stage(x)`` once more, keeping the graph."""
        self._await_swap(stage, microbatch)
        self._ready = perf_counter_ns()
        with self._guard:
            stage.recompute(microbatch)

    def _swap_out(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``host = saved.to(host)``, beside what follows."""
        parcels = stage.leave(microbatch)
        move = self._swapper.out(parcels, f"rank {self.rank}, stage {stage.index}, microbatch {microbatch} going out")
        self._moves[Action(stage.index, Kind.OUT, microbatch)] = move

    def _swap_in(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``saved = host.to(device)``, awaited where it is used."""
        parcels = stage.come_back(microbatch)
        move = self._swapper.fetch(parcels, f"rank {self.rank}, stage {stage.index}, microbatch {microbatch} coming in")
        self._moves[Action(stage.index, Kind.IN, microbatch)] = move

    def _await_swap(self, stage: Stage, microbatch: int) -> None:
        """What has been swapped must be back."""
        move = self._moves.get(Action(stage.index, Kind.IN, microbatch))
        if move is not None:
            move.done.result()

    def _send(self, kind: Kind, stage: Stage, microbatch: int) -> None:
        """Roughly: ``isend(y)``."""
        for target, payload in self._outbox.pop((kind, stage.index, microbatch)):
            envelope = Envelope(self._job.step, stage.index, target, microbatch, int(kind is Kind.SEND_B))
            self.transport.send(envelope, self._program.placement.rank(target, microbatch), payload)

    def _post(self, backward: bool, stage: Stage, microbatch: int) -> None:
        """Roughly: ``irecv(x)``, awaited where it is used."""
        sources = (self._program.readers if backward else self._program.writers)[stage.index]
        for source in sources:
            rank = self._program.placement.rank(source, microbatch)
            if rank != self.rank:
                self.transport.post(Envelope(self._job.step, source, stage.index, microbatch, int(backward)), rank)

    def _reduce(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``dw = sum(dw of the stage's replicas)``."""
        self.updater.reduce(stage)

    def _step(self, stage: Stage, microbatch: int) -> None:
        """Roughly: ``optimizer.step()``."""
        self.updater.step(stage)

    def close(self) -> None:
        """Release what the rank holds beside its stages."""
        self._swapper.close()
        self.transport.close()
