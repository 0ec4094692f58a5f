"""``Pipeline``: a list of layers, a loss, a schedule; trained as if it were one module on one device.

The same object works in one process, where its ranks are threads, and under ``vpipe run``, torchrun or srun, where
every process is a rank and builds only the layers it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight, as_layers
from vpipe.runtime import assembly
from vpipe.runtime.attitude import evaluating, follow
from vpipe.runtime.engine import Compiled, Engine, Job, Result
from vpipe.runtime.flow import bind_inputs, resolve
from vpipe.runtime.memory.treatment import Chosen, stages_with, treated_layers
from vpipe.runtime.microbatches import check_rows
from vpipe.runtime.modes import Modes
from vpipe.runtime.programs import Programs, ScheduleSpec
from vpipe.runtime.randomness import undisturbed
from vpipe.runtime.steps import check_counts, mean_loss, torn, units_of, without_gradient
from vpipe.runtime.threaded import choose_executor
from vpipe.runtime.trace import Trace
from vpipe.runtime.transport import choice, ondevice
from vpipe.runtime.transport.inprocess import Hub, PeerFailed
from vpipe.runtime.updates.ties import tie_layers
from vpipe.runtime.updates.update import LossScale, UpdateOptions, checked_scale
from vpipe.schedule import catalog
from vpipe.schedule.program import Program

DEFAULT_MICROBATCHES = 4
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Pipeline:
    """A model cut into stages and trained by a schedule.

    ``schedule`` is a name of the catalogue (``vpipe schedules``), a ``Program``, or a CSV file with one, torch's dumps
    included. ``num_microbatches`` is the number of units of one ``train_step``: 4, or what the program has. Without a
    launcher, ``num_ranks`` ranks run as threads of this process.
    ``recompute`` is the part of each stage's layers that is computed again instead of kept (the last ones), one number
    or one a stage, or a set of layer indices; ``swap`` is the part (those before) whose saved tensors wait in a file
    instead of memory, in a temporary directory (``TMPDIR``). ``transport`` between processes: "shm" (shared memory
    where ranks are on one machine), "distributed" (gloo for all), or "auto" (shm if all ranks are on one machine).
    ``executor``: "plain" (a rank's actions one after the other), "threaded" (a worker thread per microbatch, which take
    turns by ``priority``: none, first-hp, fifo or critical-path), or "auto" (threaded for the schedule
    ``async_threaded``). ``device`` is where the ranks compute: "cpu", an accelerator's type ("cuda": a device for every
    rank of a machine), one device for all of them ("cuda:0"), or "auto" (the accelerator where there is one). Between
    processes, tensors go by the device's own backend, or with ``device_messages=False`` through main memory.
    """

    def __init__(
        self,
        layers: Sequence[Layer | nn.Module | Callable[[], nn.Module]],
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        schedule: str | Program = "1f1b",
        num_microbatches: int | None = None,
        optimizer: OptimizerFactory | None = None,
        num_ranks: int | None = None,
        partition: Sequence[int] | None = None,
        stages_per_rank: int | None = None,
        replicas: int | Sequence[int] = 1,
        recompute: Chosen = 0.0,
        swap: Chosen = 0.0,
        tied: Sequence[TiedWeight] = (),
        seed: int = 0,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
        exact_reduction: bool = True,
        fused_weight_grad: bool = False,
        loss_scale: LossScale | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        blocking: bool = False,
        transport: str = "auto",
        executor: str = "auto",
        priority: str = "none",
        device: str = "cpu",
        device_messages: bool = True,
        timeout: float = 1800.0,
        schedule_options: Mapping[str, Any] | None = None,
    ) -> None:
        entry = catalog.find(schedule)
        if num_microbatches is None:
            num_microbatches = entry.num_microbatches or DEFAULT_MICROBATCHES
        self.num_microbatches = num_microbatches
        self.seed = seed
        self._in_process = not assembly.under_launcher()
        world = (num_ranks or 1) if self._in_process else assembly.join(timeout, num_ranks)
        policy = choose_executor(executor, entry.runs_threads(schedule), priority)
        self.devices = assembly.devices_here(device, world, self._in_process, threads=policy is not None)
        transport = choice.check(transport, self._in_process, world, threads=policy is not None)
        blocking = blocking or entry.blocking
        spec = ScheduleSpec(schedule, world, num_microbatches, stages_per_rank, replicas, schedule_options or {})
        loss_scale = checked_scale(loss_scale, spec.synchronous)
        plain = as_layers(layers)
        plain, tied = tie_layers(tied, plain, loss_fn, spec)
        self.partition = spec.partition(len(plain), partition)
        self.flow = resolve(plain, self.partition)
        self.placement = spec.placement
        recomputed, swapped = treated_layers(recompute, swap, self.flow.bounds)
        self.programs = Programs(
            spec, self.flow, stages_with(recomputed, self.flow.bounds), stages_with(swapped, self.flow.bounds)
        )
        self.programs.training()  # a wrong program is refused here, not by the first step
        assembly.agree(self.programs, self.flow, seed)
        options = UpdateOptions(spec.synchronous, clip_norm, skip_nonfinite, exact_reduction)
        pieces = assembly.Pieces(
            plain,
            loss_fn,
            self.flow,
            self.programs,
            recomputed,
            swapped,
            tied,
            optimizer,
            options,
            loss_scale,
            seed,
            fused_weight_grad,
            autocast,
            policy,
            self.devices,
        )
        self._hub = Hub(world, blocking) if self._in_process else None
        self.engines = (
            pieces.engines_in_threads(ondevice.transports(self._hub, self.devices))
            if self._hub is not None
            else [
                pieces.engine_between(
                    choice.between_processes(transport, blocking=blocking, timeout=timeout), device_messages
                )
            ]
        )
        self._compiled: dict[tuple[int, Program], Compiled] = {}
        self.step = 0
        self.num_units = 0
        self.num_updates = 0
        self._trace: Trace | None = None
        self._torn: str | None = None
        self._on_all(lambda engine: assembly.share_initial_weights(engine, self.placement, tied))

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by now; the same on every rank."""
        return self.engines[0].updater.scaler

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage, and with it outputs and targets."""
        return any(stage.is_last for engine in self.engines for stage in engine.stages.values())

    @property
    def is_first(self) -> bool:
        """Whether this process holds the first stage, and with it the inputs."""
        return any(index == 0 for engine in self.engines for index in engine.stages)

    def train_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        update: bool = True,
        weight: float = 1.0,
        num_microbatches: int | None = None,
    ) -> float:
        """Train on one batch (asynchronous schedules: on its units, one after the other, then drain); the mean loss, on
        every rank.

        A process that holds neither the first nor the last stage may give nothing. ``update=False`` only accumulates
        gradients; ``weight`` scales the batch's part of them. ``num_microbatches`` may differ from call to call: an
        asynchronous schedule drains at the end of each, so more units at once mean fewer drains.
        """
        check_counts(num_microbatches, weight)
        program = self.programs.training(update, num_microbatches)
        self._require_optimizer(update)
        self._require_whole()
        job = self._job(inputs, targets, program, training=True, scale=weight)
        self._lead_replicas()
        before = self._updates_made()
        try:
            with undisturbed(self.devices):
                results = self._run(program, job)
        except BaseException:
            self._torn = torn(self.step, before, self._updates_made())
            raise
        losses = self._on_all(lambda engine: engine.updater.gather_losses())[0]
        self.step += 1
        self.num_units += program.num_microbatches
        self.num_updates += self.programs.num_updates(program)
        self._trace = Trace(
            program, {engine.rank: result.records for engine, result in zip(self.engines, results, strict=True)}
        )
        return mean_loss(losses, len(self.flow.layers))

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The mean loss of a batch, without training, on every rank."""
        num_units = self._evaluation_units(inputs, targets)
        program = self.programs.forward(num_units)
        job = self._job(inputs, targets, program, training=False)
        self._require_whole()
        with undisturbed(self.devices), torch.no_grad(), evaluating(self._everything()):
            self._run(program, job)
        losses = self._on_all(lambda engine: engine.updater.gather_losses())[0]
        self.step += 1
        return mean_loss(losses, len(self.flow.layers))

    def forward(self, inputs: Any = None) -> Any:
        """The model's output for a batch, on the process that holds the last stage; elsewhere ``None``."""
        num_units = self._evaluation_units(inputs, None)
        program = self.programs.forward(num_units)
        job = self._job(inputs, None, program, training=False, wants_loss=False)
        self._require_whole()
        with undisturbed(self.devices), torch.no_grad(), evaluating(self._everything()):
            results = self._run(program, job)
        self.step += 1
        outputs = {unit: output for result in results for unit, output in result.outputs.items()}
        return assembly.joined([outputs[unit] for unit in sorted(outputs)]) if outputs else None

    def _evaluation_units(self, inputs: Any, targets: Any) -> int:
        """As many units as training has; every rank must come to the same number."""
        del inputs, targets
        return self.programs.num_units

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
        shares = weights or goal_weights or [1 / num_units] * num_units
        return Job(
            self.step,
            self.num_units,
            lambda unit: dict(bind_inputs(self.flow, without_gradient(units(unit)) if training else units(unit))),
            goals,
            shares.__getitem__,
            self.programs.gradient_weights(program) if training else None,
            scale,
            training,
            wants_loss,
        )

    def _run(self, program: Program, job: Job) -> list[Result]:
        return self._on_all(lambda engine: engine.run(self._compile(engine, program), job))

    def _compile(self, engine: Engine, program: Program) -> Compiled:
        key = (engine.rank, program)
        if key not in self._compiled:
            self._compiled[key] = engine.compile(program)
        return self._compiled[key]

    def _on_all(self, call: Callable[[Engine], Any]) -> list[Any]:
        """Call on every engine of this process; several run as threads. The first failure is the one that is raised."""
        if self._hub is not None and self._hub.failure is not None:
            self._hub.reset()
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

    def _require_optimizer(self, update: bool) -> None:
        if update and not self.engines[0].updater.optimizers:
            raise UserError(
                "the pipeline has no optimizer; "
                "give Pipeline(optimizer=lambda ps: torch.optim.AdamW(ps)), or train_step(update=False)"
            )

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise UserError(self._torn)

    def _updates_made(self) -> dict[int, int]:
        return {stage: number for engine in self.engines for stage, number in engine.updater.num_updates.items()}

    def _everything(self) -> list[nn.Module]:
        """All modules of this process, those of replicas too."""
        return [m for engine in self.engines for stage in engine.stages.values() for m in stage.owned.values()]

    def _lead_replicas(self) -> None:
        """Replicas of this process train as the first does, which is the one that the user sees."""
        for layer, first in self.modules().items() if self.placement.has_replicas and self._in_process else ():
            stages = [stage for engine in self.engines for stage in engine.stages.values() if layer in stage.owned]
            follow(first, [stage.owned[layer] for stage in stages[1:]])

    def set_learning_rate(self, rate_of_update: Callable[[int], float]) -> None:
        """Let update ``n`` use ``rate_of_update(n)``, on every stage."""
        for engine in self.engines:
            engine.updater.learning_rate = rate_of_update

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """Stage → optimizer, of the stages that this process holds (replica 0 of each, where it holds several)."""
        found: dict[int, Optimizer] = {}
        for engine in self.engines:
            for stage, optimizer in engine.updater.optimizers.items():
                found.setdefault(stage, optimizer)
        return dict(sorted(found.items()))

    def modules(self) -> dict[int, nn.Module]:
        """Layer → module, of the layers that this process holds; a loss with parameters comes after the last."""
        found: dict[int, nn.Module] = {}
        for engine in self.engines:
            for stage in engine.stages.values():
                for layer, module in stage.owned.items():
                    found.setdefault(layer, module)
        return dict(sorted(found.items()))

    def state_dict(self) -> dict[str, Tensor]:
        """``"<layer>.<name>"`` → parameter or buffer, of the layers that this process holds."""
        return {
            f"{layer}.{name}": tensor
            for layer, module in self.modules().items()
            for name, tensor in module.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what this process holds; what belongs to other stages is passed over. A pipeline that a failed step has
        left half updated goes on from here, by the count of its last whole step."""
        if self._torn is not None:
            for engine in self.engines:
                engine.updater.num_updates = dict.fromkeys(engine.updater.num_updates, self.num_updates)
            self._torn = None
        for engine in self.engines:
            for stage in engine.stages.values():
                for layer, module in stage.owned.items():
                    prefix = f"{layer}."
                    module.load_state_dict(
                        {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                    )

    def gradients(self) -> dict[str, Tensor]:
        """``"<layer>.<name>"`` → accumulated gradient, of the layers that this process holds."""
        return {
            name: parameter.grad
            for engine in self.engines
            for stage in engine.stages.values()
            for name, parameter in stage.weights.parameters.items()
            if parameter.grad is not None
        }

    def zero_grad(self) -> None:
        for engine in self.engines:
            for stage in engine.stages.values():
                for parameter in stage.weights.parameters.values():
                    parameter.grad = None

    def trace(self) -> Trace:
        """What the last training step did, action by action."""
        if self._trace is None:
            raise UserError("there is no trace yet; call train_step first")
        return self._trace

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
