"""``Pipeline``: a list of layers, a loss, a schedule; trained as if it were one module on one device.

The same object works in one process, where its ranks are threads, and under ``vpipe run``, torchrun or srun, where
every process is a rank and builds only the layers it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight
from vpipe.registry import FORM_REGISTRY
from vpipe.runtime import assembly
from vpipe.runtime.builder import prepared
from vpipe.runtime.device import is_host
from vpipe.runtime.engine import Engine
from vpipe.runtime.flow import Flow
from vpipe.runtime.holdings import Holdings
from vpipe.runtime.job import Compiled, Job, Result, Trace
from vpipe.runtime.microbatches import (
    UnitLosses,
    check_counts,
    check_rows,
    copies_of,
    mean_loss,
    torn,
    unit_losses,
    units_of,
    without_gradient,
)
from vpipe.runtime.moves import moving
from vpipe.runtime.moves.moving import Moved, Notice
from vpipe.runtime.objective import Objective
from vpipe.runtime.options import Memory, PipelineOptions, PlainKeywords
from vpipe.runtime.programs import Programs
from vpipe.runtime.proof.check import Checkable, stepped
from vpipe.runtime.surroundings import Modes, OneThread, evaluating
from vpipe.runtime.transport.base import Transport, gather_text
from vpipe.runtime.transport.inprocess import PeerFailed
from vpipe.runtime.updates.agreement import LossKey
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.placement import Layout, Placement
from vpipe.schedule.program import Program


class Pipeline(Holdings, Checkable):
    """A model cut into stages and trained by a schedule.

    ``schedule`` is a name of the catalogue, a ``Program`` or a CSV file; the other keywords (``num_microbatches``,
    ``optimizer``, ``num_ranks``, ``recompute``, …) are the fields of ``runtime.options.PipelineOptions``. ``tied``
    names parameters that are one, ``seed`` what random numbers begin with. The first ``check`` steps are compared with
    one process, as ``check`` does, and their updates too. ``count(targets)`` says over how many labels the loss of a
    unit is a mean, where neither rows nor torch's losses tell (``runtime/objective.py``).

    ``layout`` says who holds what; engines are built from it, and a wrong program is refused before anything is.

    Words: docs/glossary.md.
    """

    layout: Layout
    """Who holds what."""
    flow: Flow
    """Who reads what from whom."""
    placement: Placement
    """Which ranks hold which stage."""
    partition: list[int]
    """Layers per stage."""
    devices: Sequence[torch.device]
    """Of the ranks of this process."""
    ranks: list[int]
    """The ranks of this process."""
    rank: int
    """The first rank of this process: its only one under a launcher."""
    is_leader: bool
    """Whether this process does what only one should: it holds rank 0."""
    in_process: bool
    """Whether all ranks are in this process."""
    spec: ScheduleSpec
    """The schedule that was chosen, with its options and counts."""
    synchronous: bool
    """Whether all units of a batch read the same weights."""
    updates_per_step: int
    """How often one batch of ``num_microbatches`` updates a stage."""
    is_first: bool
    """Whether this process holds the first stage, and with it the inputs."""
    is_last: bool
    """Whether this process holds the last stage, and with it outputs and targets."""

    def __init__(
        self,
        layers: nn.Module | Sequence[Layer | nn.Module | Callable[[], nn.Module]],
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        schedule: str | Program | ScheduleSpec = "1f1b",
        tied: Sequence[TiedWeight] = (),
        seed: int = 0,
        check: int = 0,
        count: Callable[[Any], float] | None = None,
        example: Any = None,
        **plain: Unpack[PlainKeywords],
    ) -> None:
        options = PipelineOptions.of(schedule, seed, plain)
        if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
            layers, shared = FORM_REGISTRY.create("any module", layers, example)
            tied, self.keeps_names = (*tied, *shared), True
        self.builder = prepared(list(cast("Any", layers)), loss_fn, tied, options)
        self.seed = seed
        self.num_checks, self.checked = check, ""
        self._objective = Objective(loss_fn, count)
        self.num_microbatches = self.builder.spec.num_microbatches
        programs = self.builder.programs(self.builder.layout(options.partition))
        self.updates_per_step = programs.training().num_updates  # a wrong program is refused here, not by a step
        if not self.builder.wires.in_process:
            assembly.agree(programs, seed)
        self._hold(programs, self.builder.engines(programs))
        self.rank, self.devices = self.ranks[0], self.builder.wires.devices
        self.is_leader = self.rank == 0
        self.in_process = len(self.ranks) == self.layout.num_ranks
        self._compiled: dict[tuple[int, int], Compiled] = {}
        self._thread = OneThread()
        self.unit_losses: UnitLosses = {}  # of the last training step, the same on every rank
        self.step = self.num_units = self.num_updates = 0
        self._ran: tuple[Program, dict[int, Result]] | None = None
        self._torn: str | None = None
        self._on_all(lambda engine: assembly.share_initial_weights(engine, self.builder.parts.tied))

    def _hold(self, programs: Programs, engines: list[Engine]) -> None:
        """What follows from who holds what: asked often, so it is plain values."""
        self.programs, self.engines = programs, engines
        self.flow, self.layout = programs.flow, programs.flow.layout
        self.placement, self.partition = self.layout.placement, list(self.layout.counts)
        self.spec, self.synchronous = programs.spec, programs.synchronous
        self.ranks = [engine.rank for engine in engines]
        held = {stage for engine in engines for stage in engine.stages}
        self.is_first, self.is_last = 0 in held, self.layout.num_stages - 1 in held

    @property
    def memory(self) -> Memory:
        """What is recomputed and swapped."""
        return self.builder.options.memory

    def program(self, num_microbatches: int | None = None) -> Program:
        """What a training step runs: lowered, with its meetings, verified."""
        return self.programs.training(num_microbatches=num_microbatches)

    def chain(self, num_batches: int) -> None:
        """From now on a step takes so many batches, of a schedule that does not drain between them."""
        self._hold(self.programs.chained(num_batches), self.engines)

    def gradient_weights(self, program: Program) -> list[float] | None:
        """What units' gradients are multiplied by in a program, where that is not their share of the batch."""
        return self.programs.gradient_weights(program)

    @property
    def takes_turns(self) -> bool:
        """Whether the ranks of this process compute one at a time, so that their times say little."""
        return self.builder.takes_turns

    @property
    def has_workers(self) -> bool:
        """Whether more threads than this one compute here: several ranks, or the worker threads of one."""
        return len(self.engines) > 1 or self.builder.parts.workers is not None

    @property
    def transport(self) -> Transport:
        """What joins this process's first rank to the others."""
        return self.engines[0].transport

    def gather(self, text: str) -> list[str]:
        """Every process's text, by rank; the ranks of one process share one. All ranks call this at the same place."""
        return [text] if self.in_process else gather_text(self.transport, text)

    def gather_first(self, text: str) -> str:
        """The first text that is not empty, the same on every rank."""
        return next((each for each in self.gather(text) if each), "")

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """As many numbers of every process, by rank."""
        if self.in_process:
            return [list(numbers)]
        mine, count = torch.tensor(list(numbers), dtype=torch.float64), self.transport.num_ranks
        blocks = self.transport.all_gather(mine, range(count), [len(numbers)] * count)
        return [block.tolist() for block in blocks]

    def each_engine(self, change: Callable[[Engine], None]) -> None:
        """Change every engine of this process, also those that are built later for another layout."""
        self.builder.finish(change)
        for engine in self.engines:
            change(engine)

    def train_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        update: bool = True,
        weight: float = 1.0,
        num_microbatches: int | None = None,
    ) -> float:
        """Train on one batch (an asynchronous schedule: unit by unit, then drain); the mean loss, on every rank.

        A process that holds neither the first nor the last stage may give nothing. ``update=False`` only accumulates
        gradients; ``weight`` scales the batch's part of them. ``num_microbatches`` may differ from call to call: an
        asynchronous schedule drains at the end of each, so more units at once mean fewer drains.
        """
        check_counts(num_microbatches, weight)
        self._require_ready(update)
        return stepped(self, inputs, targets, update, weight, num_microbatches)

    def run_step(self, inputs: Any, targets: Any, update: bool, weight: float, num_microbatches: int | None) -> float:
        program = self.programs.training(update, num_microbatches)
        job = self._job(inputs, targets, program, training=True, scale=weight)
        before = self._updates_made()
        try:
            with self._thread.undisturbed(self.devices):
                results = self._run(program, job)
                losses = self._gather_losses()
                if self.engines[0].updater.must_repeat:
                    self._on_all(lambda engine: engine.updater.take_back())
                    results = self._run(program, job)
                    losses = self._gather_losses()
        except BaseException:
            self._torn = torn(self.step, before, self._updates_made())
            raise
        for engine, result in zip(self.engines, results, strict=True):
            engine.date(result)
        self.step += 1
        self.num_units += program.num_microbatches
        self.num_updates += program.num_updates
        self._ran = (program, {engine.rank: result for engine, result in zip(self.engines, results, strict=True)})
        self.unit_losses = unit_losses(losses, self.layout.num_layers)
        return mean_loss(self.unit_losses.values())

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The mean loss of a batch, without training, on every rank."""
        self._forwards(inputs, targets, wants_loss=True)
        losses = self._gather_losses()
        self.step += 1
        return mean_loss(unit_losses(losses, self.layout.num_layers).values())

    def forward(self, inputs: Any = None) -> Any:
        """The model's output for a batch, on the process that holds the last stage; elsewhere ``None``."""
        results = self._forwards(inputs, None, wants_loss=False)
        self.step += 1
        outputs = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
        return assembly.joined([outputs[microbatch] for microbatch in sorted(outputs)]) if outputs else None

    def _forwards(self, inputs: Any, targets: Any, wants_loss: bool) -> list[Result]:
        """Run the units of a batch without training."""
        program = self.programs.forward(self.programs.num_units)
        job = self._job(inputs, targets, program, training=False, wants_loss=wants_loss)
        self._require_whole()
        modules = [
            each for engine in self.engines for stage in engine.stages.values() for each in stage.called.values()
        ]
        with self._thread.undisturbed(self.devices), torch.no_grad(), evaluating(modules):
            return self._run(program, job)

    def _gather_losses(self) -> dict[LossKey, float]:
        return self._on_all(lambda engine: engine.updater.gather_losses())[0]  # type: ignore[no-any-return]

    def _job(
        self,
        inputs: Any,
        targets: Any,
        program: Program,
        *,
        training: bool,
        scale: float = 1.0,
        wants_loss: bool = True,
    ) -> Job:
        num_units = program.num_microbatches
        units, weights = units_of(inputs, num_units, self.is_first, "inputs")
        goals, goal_weights = units_of(targets, num_units, self.is_last and wants_loss, "targets")
        check_rows(inputs, targets)
        shares = self.shares(inputs, targets, goals, num_units) if wants_loss else None
        counted = shares if self.is_last and not self.is_first else None
        shares = shares or weights or goal_weights or [1 / num_units] * num_units
        if training and not (self.synchronous or is_host(self.devices[0])):  # a step may be made twice
            units = copies_of(units)
        return Job(
            self.step,
            self.num_units,
            lambda microbatch: self.flow.bound(without_gradient(units(microbatch)) if training else units(microbatch)),
            goals,
            shares.__getitem__,
            self.programs.gradient_weights(program) if training else None,
            scale,
            training,
            wants_loss,
            self.num_updates,
            getattr(inputs, "checksums", None) or getattr(targets, "checksums", None),
            counted,
        )

    def shares(self, inputs: Any, targets: Any, units: Callable[[int], Any], num_units: int) -> list[float] | None:
        """What units weigh by what the loss counts, where their targets are known; ``None`` where it is their rows, or
        the caller has said."""
        if targets is None or any(getattr(given, "weights", None) is not None for given in (inputs, targets)):
            return None
        return self._objective.shares(units, num_units)

    def _run(self, program: Program, job: Job) -> list[Result]:
        self._lead_replicas()
        return self._on_all(lambda engine: engine.run(self._compile(engine, program), job))

    def _compile(self, engine: Engine, program: Program) -> Compiled:
        key = (engine.rank, id(program))  # a program is long, and what it is compiled to keeps it
        if key not in self._compiled:
            self._compiled[key] = engine.compile(program)
        return self._compiled[key]

    def _on_all(self, call: Callable[[Engine], Any]) -> list[Any]:
        """Call on every engine of this process; several run as threads. The first failure is the one that is raised."""
        hub = self.builder.wires.hub
        if hub is not None and hub.failure is not None:
            hub.reset()
        if len(self.engines) == 1:
            return [call(self.engines[0])]
        modes = Modes()

        def within(engine: Engine) -> Any:
            with modes.here():
                try:
                    return call(engine)
                except BaseException as error:
                    engine.transport.fail(error)  # the others may wait for this rank
                    raise

        with ThreadPoolExecutor(len(self.engines), "vpipe-rank") as pool:
            futures = [pool.submit(within, engine) for engine in self.engines]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        return [future.result() for future in futures]

    def _require_ready(self, update: bool) -> None:
        self._require_whole()
        if update and not self.engines[0].updater.optimizers:
            raise UserError(
                "the pipeline has no optimizer; "
                "give Pipeline(optimizer=lambda ps: torch.optim.AdamW(ps)), or train_step(update=False)"
            )

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise UserError(self._torn)

    def move(self, layout: Layout, memory: Memory | None = None, *, notice: Notice = lambda step: None) -> Moved:
        """Let other ranks hold the layers, from now on as ``layout`` says; training goes on as if nothing had happened.
        ``memory`` says what is recomputed and swapped there, where that changes too.

        Between two steps, on every rank: an asynchronous schedule has drained then. Where it cannot be done, the old
        layout stays, on all ranks, and a ``UserError`` says why. ``notice`` is told every step of the protocol.
        """
        self._require_whole()
        self._lead_replicas()
        layout = moving.admitted(self.engines, layout)
        with self.builder.with_memory(memory):
            programs = self.builder.programs(layout, self.programs.spec)
            programs.training()
            engines, moved = moving.move(self.builder, self.engines, programs, self.gather, self._on_all, notice)
        self._hold(programs, engines)
        self._compiled.clear()
        return moved

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what this process holds; what belongs to other stages is passed over. A pipeline that a failed step has
        left half updated goes on from here, by the count of its last whole step."""
        if self._torn is not None:
            self.resume(self.num_units, self.num_updates)
        super().load_state_dict(state)

    def resume(self, num_units: int, num_updates: int, scale: LossScale | None = None) -> None:
        """Count from here, as a run did whose weights and optimizer states have been loaded; ``scale`` is its own."""
        self.num_units, self.num_updates, self._torn = num_units, num_updates, None
        for engine in self.engines:
            updater = engine.updater
            updater.num_updates = dict.fromkeys(updater.num_updates, num_updates)
            if scale is not None and updater.scaler.dynamic:
                updater.scaler = LossScale(scale.value, True, updater.scaler.growth_interval, scale.good_steps)

    def trace(self) -> Trace:
        """What the last training step did, action by action."""
        if self._ran is None:
            raise UserError("there is no trace yet; call train_step first")
        program, results = self._ran
        return Trace(program, {rank: result.records for rank, result in results.items()})

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
