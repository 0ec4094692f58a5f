"""The only loop: a rank's row of a program, compiled once into a flat list of bound calls.

Each kind of action has one handler. A handler moves values between the transport and a stage; it decides nothing,
because the program has decided everything. Words: docs/glossary.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from vpipe.process import core_wait
from vpipe.runtime.crossing import copied_value
from vpipe.runtime.device import HOST, current, is_host, side_stream
from vpipe.runtime.device_times import DeviceTimes
from vpipe.runtime.flow import Flow, Hop, Pending, Task, Tasks, Value, listed, remote, unlisted
from vpipe.runtime.job import SHARED_CORES, Call, Compiled, Job, Record, Result, annotated
from vpipe.runtime.memory.swap import Passage, Swapper
from vpipe.runtime.memory.swap_device import DeviceSwapper
from vpipe.runtime.prefetch import Prefetch
from vpipe.runtime.region import Run
from vpipe.runtime.stage import Stage, Unit
from vpipe.runtime.surroundings import evaluation_seed
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.updates.replicas import share_among_replicas
from vpipe.runtime.updates.update import Updater
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import num_uses, version_table


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
        device: torch.device = HOST,
    ) -> None:
        self.rank, self.device = transport.rank, device
        self.stages, self.flow = stages, flow
        self.transport, self.updater = transport, updater
        self._seed, self._autocast = seed, autocast
        self._guard: AbstractContextManager[Any] = lock or threading.Lock()  # cheaper than a nullcontext
        self._times = None if is_host(device) else DeviceTimes(device)
        self._events: list[tuple[torch.Event, torch.Event, torch.Event]] = []
        self._swapper: Swapper | DeviceSwapper | None = None
        self._feeding = None if is_host(device) else side_stream(device, "feeding")
        self._feeds: list[Prefetch] = []
        self._moves: dict[Action, Passage] = {}
        self._lanes: dict[Action, tuple[torch.Event, torch.Event]] = {}
        """On a device, when each passage of the swap lane began and ended."""
        self._ready = self._queued = 0
        self._core_wait: Callable[[], int] = int
        """Asked before and after each action where the last program waited for cores; else it says 0."""
        self.annotates = False
        """Whether actions appear under their names in a torch.profiler trace."""
        self.current: Action | None = None
        """What the rank is doing: read by the watchdog."""

    def compile(self, program: Program) -> Compiled:
        """Bind every action of this rank's row to its handler."""
        computing: dict[Kind, Callable[[Task], None]] = {
            Kind.F: self._forward,
            Kind.B: partial(self._backward, defer_weights=False),
            Kind.I: partial(self._backward, defer_weights=True),
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.OUT: self._swap_out,
            Kind.IN: self._swap_in,
            Kind.REDUCE: self._reduce,
            Kind.AGREE: self._agree,
            Kind.STEP: self._step,
        }
        moving: dict[Kind, Callable[[Task], Callable[[], None]]] = {
            Kind.SEND_F: lambda task: partial(self._send_outputs, task, remote(task.outputs)),
            Kind.SEND_B: lambda task: partial(self._send, remote(task.input_gradients)),
            Kind.RECV_F: lambda task: partial(self._post, remote(task.inputs)),
            Kind.RECV_B: lambda task: partial(self._post, remote(task.output_gradients)),
        }
        row = program.rows[self.flow.layout.row(self.rank)]
        versioned = any(stage.options.versioned for stage in self.stages.values())
        versions = version_table(program) if versioned else {}
        uses = num_uses(row, self.stages, versions) if versioned else {}
        tasks = Tasks(program, self.flow, self.rank, self.stages)

        def bound(action: Action) -> Callable[[], None]:
            task = tasks[action.stage, action.microbatch]
            return moving[action.kind](task) if action.kind in moving else partial(computing[action.kind], task)

        calls = [(action, bound(action)) for action in row]
        updates = {stage: program.update_numbers(stage) for stage in self.stages}
        return Compiled(program, calls, tasks, versions, uses, updates)

    def run(self, compiled: Compiled, job: Job) -> Result:
        """Run the row. A failure names the action; the other ranks are told."""
        with current(self.device):
            return self._run(compiled, self._fed(compiled, job))

    def _fed(self, compiled: Compiled, job: Job) -> Job:
        """The job with its data on the device, a unit ahead."""
        if self._feeding is None:
            return job
        last = self.flow.num_stages - 1
        row = compiled.program.rows[self.flow.layout.row(self.rank)]
        orders = [[k for index, kind, k in row if index == stage and kind is Kind.F] for stage in (0, last)]
        self._feeds = [
            Prefetch(get, order, self.device, self._feeding)
            for get, order in zip((job.inputs, job.targets), orders, strict=True)
        ]
        inputs, targets = self._feeds
        return replace(job, inputs=inputs, targets=targets)

    def _form_of_data(self) -> Hashable:
        """What decides the form of the messages that this rank sends, as far as this rank knows."""
        trained = [p.requires_grad for stage in self.stages.values() for p in stage.weights.parameters.values()]
        return (*[feed.forms() for feed in self._feeds], trained)

    def _run(self, compiled: Compiled, job: Job) -> Result:
        self._program, self._versions, self._job = compiled.program, compiled.versions, job
        compiled.tasks.begin(job.step)
        self._even = 1 / compiled.program.num_microbatches
        self._result = Result()
        updates = {stage: [job.first_update + number for number in own] for stage, own in compiled.updates.items()}
        self.updater.begin(self._result.losses, compiled.program.num_microbatches, updates if job.training else {})
        for index, stage in self.stages.items():
            if job.training:
                stage.weights.begin(compiled.uses.get(index, ()))
        try:
            self.transport.begin_program(
                (compiled.program, self.flow.layout, job.training, job.wants_loss), self._form_of_data
            )
            self.transport.begin_step(job.step)
            if self._times is None:
                self._execute(compiled.calls, self._result)
            else:
                self._enqueue(self._times, compiled.calls, self._result.records)
            self._settle(self._result)
            if job.training:
                share_among_replicas(self.stages, self.flow.layout, self.transport, job.step, weights=False)
            self.transport.end_step()
        except BaseException as error:
            action = self.current
            where = f"rank {self.rank}, stage {action.stage}, action {action}" if action else f"rank {self.rank}"
            unit = f", microbatch {action.microbatch}" if action and action.microbatch >= 0 else ""
            error.add_note(f"vpipe: this happened at {where}{unit}, step {job.step}")
            compiled.tasks.clear()
            self._abandon()
            self.transport.fail(error)
            raise
        finally:
            self.current = None
            for stage in self.stages.values():
                if job.training:
                    stage.weights.end()
        return self._result

    def _execute(self, calls: Sequence[Call], result: Result) -> None:
        """Run the row; records are built when they are read."""
        queued = core_wait()
        result.calls, result.times = calls, self._timed(calls)
        took = sum(end - begin for begin, _, end, *_ in result.times)
        self._core_wait = core_wait if core_wait() - queued > SHARED_CORES * took else int

    def _timed(self, calls: Sequence[Call]) -> list[tuple[int, ...]]:
        """The loop: of each call, when it began, had what it needs, and ended; of both parts, the wait for a core."""
        times: list[tuple[int, ...]] = []
        end, queued = perf_counter_ns(), self._core_wait()
        for action, call in annotated(calls) if self.annotates else calls:
            self.current = action
            begin, self._queued = end, queued
            self._ready = begin
            call()
            left, end = self._core_wait(), perf_counter_ns()
            times.append((begin, self._ready, end, self._queued - queued, left - self._queued))
            queued = left
        return times

    def _enqueue(self, times: DeviceTimes, calls: Sequence[Call], records: list[Record]) -> None:
        """The loop on a device: what it writes down is dated when the device has come to the end."""
        times.start()
        self._events.clear()
        begun = time = perf_counter_ns()
        begin = times.mark()
        for action, call in annotated(calls) if self.annotates else calls:
            self.current = action
            self._ready_event = begin
            call()
            end = times.mark()
            self._events.append((begin, self._ready_event, end))
            begun, time = time, perf_counter_ns()
            records.append(Record(action, begun, begun, time, enqueued=time))
            begin = end

    def date(self, result: Result) -> None:
        """Give the records of the last job the device's times; called when the host has read its numbers."""
        if self._times is None:
            return
        records = result.records
        for record, events in zip(records, self._events, strict=True):
            record.begin, record.ready, record.end = map(self._times.at, events)
        for record in records if self._lanes else ():
            if record.action in self._lanes:
                record.ready, record.end = map(self._times.at, self._lanes[record.action])
        self._lanes.clear()

    def _is_ready(self) -> None:
        """The action has what it needs; on a device, will have when its stream comes here."""
        self._ready, self._queued = perf_counter_ns(), self._core_wait()
        if self._times is not None:
            self._ready_event = self._times.mark()

    def _waited(self, since: int) -> None:
        """Everyone has come to a meeting. What the action did before it waited, ``since`` then, is work as well."""
        self._ready += perf_counter_ns() - since
        if self._times is not None:
            self._ready_event = self._times.mark()

    def _settle(self, result: Result) -> None:
        """The swap lane is done: write down when it did what."""
        if not self._moves:
            return
        self._lane.settle()
        for record in result.records:
            if record.action in self._moves:
                move = self._moves[record.action]
                record.ready, record.end, record.bytes = move.begin, move.end, move.bytes
                if move.events is not None:
                    self._lanes[record.action] = move.events
        self._moves.clear()

    def _abandon(self) -> None:
        """Drop what a failed step has left, its gradients too: the next step must not add to half of a batch."""
        self._moves.clear()
        if self._swapper is not None:
            self._swapper.abandon()
        if self._job.training:
            for stage in self.stages.values():
                stage.abandon()

    def _arrive(self, hop: Hop) -> Any:
        """A message from a stage of this rank."""
        payload, hop.payload = hop.payload, None
        return payload

    def _forward(self, task: Task) -> None:
        """Roughly: ``y = stage(x)``."""
        job, stage, microbatch, index = self._job, task.stage, task.microbatch, task.stage.index
        values: dict[Value, Any] = job.inputs(microbatch) if index == 0 else {}
        share = job.share(microbatch) if index == 0 else self._even
        seed = self._seed if job.training else evaluation_seed(self._seed)
        run = Run(seed, job.first_unit + microbatch, job.training, self._autocast)
        targets = job.targets(microbatch) if stage.is_last else None
        unit = Unit(self._versions[index, microbatch] if self._versions else 0, run, targets)
        for hop in task.inputs:  # last, so that everything else happens before the message is there
            told, tied, *found = self._arrive(hop) if hop.is_local else self.transport.take(hop.envelope)
            share = share if told is None else float(told)
            unit.tied.update(tied or ())
            for value, each in zip(hop.values, found, strict=True):
                values[value] = each
        self._is_ready()
        if stage.is_last:
            job.check_share(microbatch, share)
        given: dict[Value, Any]
        with self._guard:
            if job.training:
                weight = share if job.gradient_weights is None else job.gradient_weights[microbatch]
                unit.weight = weight * job.scale * self.updater.scaler.value
                given = stage.forward(microbatch, unit, values)
            else:
                given = stage.evaluate(unit, values, job.wants_loss)
            self._result.note(unit, microbatch, share, len(self.flow.layers))
            if job.checksums is not None and (index == 0 or stage.is_last):
                self._result.note_checksum(microbatch, job.checksums, index == 0, stage.is_last, len(self.flow.layers))
        if stage.is_last and not job.training and not job.wants_loss:
            outputs = [given[value] for value in self.flow.outputs()]
            # A copy, as of all that leaves a stage: a layer may write the next unit's result into the same memory.
            self._result.outputs[microbatch] = copied_value(outputs[0] if len(outputs) == 1 else tuple(outputs))
        # A tensor, so that the layout of messages stays the same.
        told = None if share == self._even else torch.tensor(share, dtype=torch.float64)
        for hop in task.outputs:
            wanted = [given[value] if value in given else values[value] for value in hop.values]
            tied = tuple(value for value in hop.values if value in unit.tied) or None if unit.tied else None
            hop.payload = copied_value((told, tied, *wanted)) if hop.is_local else (told, tied, *wanted)
        if job.training and not task.sends:
            stage.part(microbatch)

    def _backward(self, task: Task, defer_weights: bool) -> None:
        """Roughly: ``dx, dw = backward(dy)``, or ``dx`` alone."""
        pending: Pending = {}
        for hop in task.output_gradients:
            unlisted(hop.values, self._arrive(hop) if hop.is_local else self.transport.take(hop.envelope), pending)
        if self._moves:
            self._await_swap(task)
        self._is_ready()
        with self._guard:
            task.stage.backward(task.microbatch, pending, defer_weights)
        for hop in task.input_gradients:
            payload = listed(hop.values, pending)
            hop.payload = copied_value(payload) if hop.is_local else payload

    def _weight_gradient(self, task: Task) -> None:
        """Roughly: ``dw += what I remembered``."""
        with self._guard:
            task.stage.weight_gradient(task.microbatch)

    def _recompute(self, task: Task) -> None:
        """Roughly: ``y = stage(x)`` once more, keeping the graph."""
        self._await_swap(task)
        self._is_ready()
        with self._guard:
            task.stage.recompute(task.microbatch)

    @property
    def _lane(self) -> Swapper | DeviceSwapper:
        """The swap lane, from the first passage on."""
        if self._swapper is None:
            self._swapper = Swapper() if self._times is None else DeviceSwapper(self.device, self._times)
        return self._swapper

    def _swap_out(self, task: Task) -> None:
        """Roughly: ``host = saved.to(host)``, beside what follows."""
        stage, microbatch, *_ = task
        what = f"rank {self.rank}, stage {stage.index}, microbatch {microbatch} going out"
        self._moves[Action(stage.index, Kind.OUT, microbatch)] = self._lane.out(stage.leave(microbatch), what)

    def _swap_in(self, task: Task) -> None:
        """Roughly: ``saved = host.to(device)``, awaited where it is used."""
        stage, microbatch, *_ = task
        what = f"rank {self.rank}, stage {stage.index}, microbatch {microbatch} coming in"
        self._moves[Action(stage.index, Kind.IN, microbatch)] = self._lane.fetch(stage.come_back(microbatch), what)

    def _await_swap(self, task: Task) -> None:
        """What has been swapped must be back."""
        if (move := self._moves.get(Action(task.stage.index, Kind.IN, task.microbatch))) is not None:
            move.wait()

    def _send(self, hops: Sequence[Hop]) -> None:
        """Roughly: ``isend(y)``."""
        for hop in hops:
            payload, hop.payload = hop.payload, None
            self.transport.send(hop.envelope, hop.peer, payload)

    def _send_outputs(self, task: Task, hops: Sequence[Hop]) -> None:
        """Roughly: ``isend(y)``, and then what the neighbour need not wait for."""
        self._send(hops)
        if self._job.training:
            task.stage.part(task.microbatch)

    def _post(self, hops: Sequence[Hop]) -> None:
        """Roughly: ``irecv(x)``, awaited where it is used."""
        for hop in hops:
            self.transport.post(hop.envelope, hop.peer)

    def _reduce(self, task: Task) -> None:
        """Roughly: ``dw = sum(dw of the stage's replicas)``."""
        self.updater.reduce(task.stage, self._is_ready)

    def _agree(self, task: Task) -> None:
        """Roughly: ``verdict = all_gather(norms of all gradients)``."""
        self.updater.agree(self._waited)

    def _step(self, task: Task) -> None:
        """Roughly: ``optimizer.step()``."""
        self.updater.step(task.stage)

    def retire(self) -> None:
        """Release what the rank holds beside its stages and its ways to the others, which the next engine takes on."""
        if self._swapper is not None:
            self._swapper.close()

    def close(self) -> None:
        self.retire()
        self.transport.close()
