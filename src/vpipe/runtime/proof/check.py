"""``pipe.check`` and ``Pipeline(check=N)``: a step beside one plain process, and the first thing that differs.

    every rank   a digest of what each layer takes and gives, unit by unit; of gradients, buffers, weights ─┐
    the leader   copies of all layers as they are before the step, trained by ``plain`` or ``replay`` ──────┴▶ compared

Digests are texts, so ranks in processes send them as texts; before the step the leader gets the layers that it does not
hold, as blocks in which layers move.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime.buffers import generators_of, set_state, state_of
from vpipe.runtime.device import place
from vpipe.runtime.microbatches import units_of
from vpipe.runtime.moves import layer_state
from vpipe.runtime.moves.layer_state import LayerState
from vpipe.runtime.proof.causes import likely
from vpipe.runtime.proof.plain import Plain, PlainUnit, additions
from vpipe.runtime.proof.watch import Digest, Fact, Notes, StepNotes
from vpipe.runtime.replay import Replay, ReplayUnit
from vpipe.runtime.surroundings import follow, undisturbed
from vpipe.runtime.updates.optimizing import set_rate
from vpipe.schedule.program import Program

if TYPE_CHECKING:
    from vpipe.runtime.pipeline import Pipeline

EQUAL = "equal to one process to the bit:"
NEAR = 1e-5
"""Norms that differ by less than this part of them differ in last bits."""


class Recipe(NamedTuple):
    """What one process trains."""

    pipeline: Pipeline
    program: Program
    modules: Mapping[int, nn.Module]
    loss: Callable[[Any, Any], Tensor]
    make: Callable[[Iterable[nn.Parameter]], Optimizer]
    rate: Callable[[float], float] | None
    options: dict[str, Any]


Loop = tuple[Callable[[Sequence[PlainUnit], bool], float], Plain | Replay]
"""What trains on units, with an update or without, and returns their loss; and the model that it trains."""


def one_process(recipe: Recipe, plain: bool) -> Loop:
    """A plain loop, or for weights of several versions their replay."""
    pipeline, program, modules, loss, make, rate, options = recipe
    updates = count()
    if plain:
        layers = pipeline.builder.parts.layers
        loop = Plain(layers, [modules[layer] for layer in range(len(layers))], loss, make, **options)
        sums = additions(program.rows, pipeline.flow.bounds)
        return lambda units, update: loop.step(units, sums, rate(next(updates)) if rate else None, update), loop

    trained = [
        stage
        for stage, bounds in enumerate(pipeline.flow.bounds)
        if any(p.requires_grad for layer in range(*bounds) for p in modules[layer].parameters())
    ]
    stages = iter(trained)

    def with_rates(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made, numbers = make(parameters), program.update_numbers(next(stages))
        updates = (step * program.num_updates + number for step in count() for number in numbers)

        def before_step(chosen: Optimizer, args: Any, kwargs: Any) -> None:
            update = next(updates)
            if rate:
                set_rate(chosen, rate(update))

        made.register_step_pre_hook(before_step)
        return made

    replicas = [program.placement.num_replicas(stage) for stage in range(program.num_stages)]
    replay = Replay(pipeline.flow, modules, loss, with_rates, replicas=replicas, **options)
    weights = pipeline.gradient_weights(program)

    def train(units: Sequence[PlainUnit], update: bool) -> float:
        parts = [unit.share if weights is None else weights[k] for k, unit in enumerate(units)]
        return replay.run(
            program,
            [ReplayUnit(u.inputs, u.targets, part * u.weight, u.share) for u, part in zip(units, parts, strict=True)],
        )

    return train, replay


class Check:
    """One step that is compared."""

    def __init__(self, pipeline: Pipeline, program: Program, update: bool) -> None:
        self._pipeline, self._program, self._update = pipeline, program, update
        self._num_layers = len(pipeline.builder.parts.layers)
        self._states = self._gathered()
        self._modules = self._copies() if pipeline.is_leader else {}
        self._loss = copy.deepcopy(pipeline.builder.parts.loss) if pipeline.is_leader else None

    def _gathered(self) -> dict[int, LayerState]:
        """The state of every layer of the model."""
        pipeline, blocks = self._pipeline, {}
        for held in pipeline.held_layers():
            if held.is_first:
                blocks[held.layer] = layer_state.packed(layer_state.state_of(held.module, held.optimizer))
        if not pipeline.in_process:
            told = [json.loads(text) for text in pipeline.gather(json.dumps({n: len(b) for n, b in blocks.items()}))]
            mine = torch.cat([torch.empty(0, dtype=torch.uint8), *blocks.values()])
            sizes = [sum(each.values()) for each in told]
            together = pipeline.transport.all_gather(mine, range(len(sizes)), sizes)
            for each, whole in zip(told, together, strict=True):
                blocks |= dict(zip(map(int, each), torch.split(whole, list(each.values())), strict=True))
        return {layer: layer_state.unpacked(block) for layer, block in sorted(blocks.items())}

    def _copies(self) -> dict[int, nn.Module]:
        pipeline, held = self._pipeline, self._pipeline.modules()
        found = {}
        generators: dict[int, Any] = {}
        """Copies: one generator may be that of several layers."""
        for layer, state in self._states.items():
            module = held.get(layer)
            source = module or (
                pipeline.builder.parts.layers[layer].build()
                if layer < self._num_layers
                else pipeline.builder.parts.loss
            )
            try:
                assert isinstance(source, nn.Module)
                generators |= {id(g): copy.deepcopy(g) for g in generators_of([source]) if id(g) not in generators}
                made = copy.deepcopy(source, dict(generators))
            except (TypeError, RuntimeError) as error:
                raise UserError(
                    f"layer {layer} ({type(source).__name__}) cannot be copied, which a check needs: {error}; "
                    "give it a __deepcopy__, or train without check"
                ) from error
            found[layer] = place(made, pipeline.devices[0])
            layer_state.put(state, made, pipeline.devices[0])
            if module is not None:
                follow(module, made)  # hooks of parameters too
        return found

    def _optimizers(self, plain: bool) -> list[Optimizer]:
        """Copies for the copies of the layers: one optimizer of all, or one of each stage that is trained."""
        make, made = self._pipeline.builder.options.optimizer, []
        bounds = self._pipeline.flow.bounds if make is not None else []
        for begin, end in [(0, self._num_layers)] if plain and bounds else bounds:
            last = end == self._num_layers
            mine = {n: m for n, m in self._modules.items() if begin <= n < end or (last and n == end)}
            parameters = [p for module in mine.values() for p in module.parameters()]
            if make is not None and any(p.requires_grad for p in parameters):
                made.append(make(parameters))
                layer_state.put_optimizer({n: self._states[n] for n in mine}, mine, made[-1])
        return made

    def _holders(self, layer: int) -> Sequence[int]:
        """Ranks; where they are several, each has statistics of its own units."""
        return self._pipeline.layout.ranks_of(layer)

    @staticmethod
    def _of(name: str, replica: int, ranks: Sequence[int]) -> str:
        return f"{name} of replica {replica}" if len(ranks) > 1 else name

    def found(self, watch: StepNotes, loss: float) -> Notes:
        """What this process's ranks hold after the step, beside what was noted in it."""
        watch.notes[Fact("loss", 0, "")] = (repr(loss), loss)
        for held in self._pipeline.held_layers():
            ranks = self._holders(held.layer)
            for name, parameter in held.module.named_parameters():
                if self._update and held.is_first:
                    watch.note("weight", held.layer, name, parameter)
                elif not self._update and parameter.grad is not None:
                    watch.note("gradient", held.layer, self._of(name, ranks.index(held.rank), ranks), parameter.grad)
            for name, buffer in held.module.named_buffers() if len(ranks) == 1 else ():
                watch.note("buffer", held.layer, name, buffer)
        return watch.notes

    def expected(self, inputs: Any, targets: Any, weight: float) -> Notes:
        """What one process holds after it."""
        pipeline, program, told = self._pipeline, self._program, self._pipeline.builder.options
        num_units = program.num_microbatches
        if inputs is None or targets is None:
            raise UserError("a check needs the whole batch on rank 0; give inputs and targets there, whatever it holds")
        units, weights = units_of(inputs, num_units, True, "inputs")
        goals, goal_weights = units_of(targets, num_units, True, "targets")
        counted = pipeline.shares(inputs, targets, goals, num_units)
        shares = counted or weights or goal_weights or [1 / num_units] * num_units
        plain = pipeline.synchronous
        made = self._optimizers(plain)
        one_by_one = iter([*made, torch.optim.SGD([torch.zeros(1)])])  # the last where nothing is trained
        options = {
            "seed": pipeline.seed, "tied": pipeline.builder.parts.tied, "clip_norm": told.clip_norm,
            "autocast": told.autocast, "first_unit": pipeline.num_units,
        }  # fmt: skip
        if plain:
            options["scale"] = pipeline.loss_scale.value
        rates, done = pipeline.engines[0].updater.learning_rate, pipeline.num_updates
        rate = None if rates is None else lambda number: rates(done + number)
        assert self._loss is not None
        train, loop = one_process(
            Recipe(pipeline, program, self._modules, self._loss, lambda _: next(one_by_one), rate, options), plain
        )
        with StepNotes(pipeline, program) as watch, undisturbed():
            for layer, module in self._modules.items():
                watch.layer(layer, module)
            for each in made:
                watch.optimizer(each)
            loss = train([PlainUnit(units(k), goals(k), shares[k], weight) for k in range(num_units)], self._update)
        watch.notes[Fact("loss", 0, "")] = (repr(loss), loss)
        for layer, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if self._update:
                    watch.note("weight", layer, name, parameter)
                sums = loop.sums[f"{layer}.{name}"] if isinstance(loop, Plain) and not self._update else ()
                for replica, total in enumerate(sums):
                    if total is not None:
                        watch.note("gradient", layer, self._of(name, replica, self._holders(layer)), total)
            for name, buffer in module.named_buffers() if len(self._holders(layer)) == 1 else ():
                watch.note("buffer", layer, name, buffer)
        return watch.notes

    def difference(self, told: Sequence[Notes], expected: Notes) -> str:
        """The first difference and its likely cause, in a sentence."""
        nothing = ("", 0.0)
        wrong: list[tuple[Fact, Digest, Digest]] = []
        for notes in told:
            for fact, seen in notes.items():
                right = expected.get(Fact("gives", *fact[1:]) if fact.kind == "again" else fact, nothing)
                wrong += [(fact, seen, right)] if right[0] != seen[0] else []
        everything = set().union(*told)
        wrong += [(fact, nothing, right) for fact, right in expected.items() if fact not in everything]
        if not wrong:
            return ""
        fact, (here, seen_norm), (there, right_norm) = min(wrong, key=lambda each: each[0].order)
        by = f"differs from that of one process (norm {seen_norm:.9g}, there {right_norm:.9g})"
        if not (here and there):
            by = "is there in one process alone" if there else "is not there in one process"
        near = abs(seen_norm - right_norm) <= NEAR * max(seen_norm, right_norm)
        cause = likely(self._pipeline, fact, self._modules.get(fact.layer), near)
        return f"{self._named(fact)} {by}; likely cause: {cause}"

    def _named(self, fact: Fact) -> str:
        if fact.kind == "loss":
            return "the loss"
        layers = self._pipeline.builder.parts.layers
        name = (layers[fact.layer].name if fact.layer < len(layers) else "") or type(self._modules[fact.layer]).__name__
        where = f"layer {fact.layer} ({name})"
        return {
            "takes": f"what {where} takes of unit {fact.name}",
            "gives": f"what {where} gives for unit {fact.name}",
            "again": f"what {where} gives for unit {fact.name} when it is computed again",
        }.get(fact.kind, f"the {fact.kind} {fact.name} of {where}")


def compared(
    pipeline: Pipeline, inputs: Any, targets: Any, update: bool, weight: float, num_microbatches: int | None
) -> tuple[float, str]:
    """The loss of a step that is compared with one process, and what was equal; raises ``UserError``."""
    program = pipeline.programs.training(update, num_microbatches)
    expected, problem = Notes(), ""
    try:
        check = Check(pipeline, program, update)
        if pipeline.is_leader:
            expected = check.expected(inputs, targets, weight)
    except UserError as error:
        problem = str(error)
    if problem := pipeline.gather_first(problem):
        raise UserError(problem)
    with StepNotes(pipeline, program) as watch:
        for held in pipeline.held_layers():
            watch.layer(held.layer, held.module)
        for engine in pipeline.engines:
            for made in engine.updater.optimizers.values():
                watch.optimizer(made)
        loss = pipeline.run_step(inputs, targets, update, weight, num_microbatches)
    mine = [[*fact, *seen] for fact, seen in check.found(watch, loss).items()]
    told = [
        {Fact(*each[:3]): (each[3], each[4]) for each in json.loads(text)} for text in pipeline.gather(json.dumps(mine))
    ]
    equal = f"{EQUAL} {len(expected)} values of units, gradients, buffers and weights"
    verdict = pipeline.gather_first((check.difference(told, expected) or equal) if pipeline.is_leader else "")
    if not verdict.startswith(EQUAL):
        raise UserError(f"step {pipeline.step - 1} is not equal to one process: {verdict}")
    return loss, verdict


def stepped(
    pipeline: Pipeline, inputs: Any, targets: Any, update: bool, weight: float, num_microbatches: int | None
) -> float:
    """The loss of a step, which is compared if the pipeline is to check it and no gradient waits from before."""
    if not pipeline.num_checks or pipeline.gradients():
        return pipeline.run_step(inputs, targets, update, weight, num_microbatches)
    pipeline.num_checks -= 1
    loss, pipeline.checked = compared(pipeline, inputs, targets, update, weight, num_microbatches)
    return loss


class Checkable:
    """The side of a pipeline that compares its steps."""

    num_checks: int
    """Of the next steps, how many are compared with one process."""
    checked: str
    """What was equal in the last of them."""

    def check(self, inputs: Any = None, targets: Any = None, *, num_microbatches: int | None = None) -> str:
        """Compare a step on this batch with one plain process, to the bit, and undo it. A ``UserError`` names the first
        layer and tensor that differ, and the likely cause. Rank 0 needs the whole batch, and room for another model."""
        pipeline = cast("Pipeline", self)
        if not pipeline.synchronous:
            raise UserError(
                f"{pipeline.spec.describe()} updates within a step, which a check cannot undo; give Pipeline(check=1), "
                "which compares the next step that is trained"
            )
        modules = [held.module for held in pipeline.held_layers()]
        gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
        buffers = [(each, each.clone()) for module in modules for each in module.buffers()]
        generators = [(each, state_of(each)) for each in generators_of(modules)]
        before = pipeline.num_units, pipeline.num_updates
        pipeline.zero_grad()
        try:
            return compared(pipeline, inputs, targets, False, 1.0, num_microbatches)[1]
        finally:
            pipeline.num_units, pipeline.num_updates = before
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            for generator, state in generators:
                set_state(generator, state)
