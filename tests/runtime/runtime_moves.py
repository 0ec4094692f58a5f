"""Random moves of layers between ranks, against a replay that knows no ranks.

After every move the replay goes on with the same weights and optimizer states by the stages of the new layout. It has
never heard of moving: of its optimizers, those states are carried over parameter by parameter, here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from runtime_models import MODELS, Model, build
from runtime_support import OPTIMIZERS, Case, differing, modules_of, pipeline, replay_of, units_of, weights_of
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.runtime.replay import Replay
from vpipe.schedule import catalog
from vpipe.schedule.placement import Layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo", "pipedream", "pipedream-2bw")


class Odd(torch.optim.Optimizer):
    """An optimizer whose state has every shape: lists, tuples, numbers, words, nested dicts, nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "foreach": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "past": [], "more": {"mean": (torch.zeros_like(p), None)}, "word": "cold"}
                state["count"] += 1
                state["past"] = [*state["past"][-1:], p.grad.clone()]
                mean = state["more"]["mean"][0].mul(group["betas"][0]).add(sum(state["past"]) / state["count"])
                state["more"]["mean"], state["word"] = (mean, None), f"seen {state['count']}"
                p.sub_(mean, alpha=group["lr"])


OPTIMIZERS["odd"] = Odd
OPTIMIZERS["adagrad"] = lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)


@dataclass(frozen=True)
class Moves:
    """A case, and the layouts that it goes through."""

    case: Case
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Before every step after the first: layers per stage, and the new number of every rank of the first layout."""


def random_moves(seed: int, num_steps: int = 3) -> Moves:
    """A case of any kind; those that the runtime refuses are drawn again."""
    chance = random.Random(seed)
    while True:
        schedule = chance.choice(SCHEDULES)
        asynchronous = catalog.get(schedule).mode == "asp"
        model = chance.choice([name for name in MODELS if not (asynchronous and name == "tied")])
        ranks = chance.choice([2, 2, 3, 4])
        replicas: Any = 1
        if ranks == 4 and chance.random() < 0.6:
            replicas = (1, 2, 1) if schedule == "pipedream" else 2
        treatment = chance.choice([(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.3, 0.4)])
        case = Case(
            schedule,
            model,
            ranks,
            8 if asynchronous else 4,
            chance.choice(sorted(OPTIMIZERS)),
            recompute=treatment[0],
            replicas=replicas,
            clip_norm=chance.choice([None, 0.5]),
            num_layers=chance.randint(8, 12),
            num_steps=num_steps,
            more={"swap": treatment[1]} if treatment[1] else {},
        )
        try:
            first = pipeline(case, build(case.model, case.num_layers, case.dropout), ranks).layout
        except UserError:
            continue
        return Moves(case, tuple(_random_layout(chance, first) for _ in range(num_steps - 1)))


def _random_layout(chance: random.Random, first: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cuts = sorted(chance.sample(range(1, first.num_layers), first.num_stages - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, first.num_layers], strict=True)]
    ranks = list(range(first.num_ranks))
    if chance.random() < 0.5:
        chance.shuffle(ranks)
    return tuple(counts), tuple(ranks)


def layout_of(first: Layout, wanted: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout:
    return first.with_counts(wanted[0]).with_ranks(wanted[1])


def moved(replay: Replay, pipe: Pipeline, case: Case, model: Model) -> Replay:
    """The replay, going on by other stages."""
    again = replay_of(pipe, replay.modules, case, model)
    states = {p: state for made in replay._optimizers if made is not None for p, state in made.state.items()}
    for made in again._optimizers:
        for group in made.param_groups if made is not None else ():
            for p in group["params"]:
                if p in states:
                    made.state[p] = states[p]  # type: ignore[union-attr]
    again._num_units = replay._num_units
    return again


def optimizer_states(named: dict[str, nn.Parameter], optimizers: Iterable[Any]) -> dict[str, Any]:
    """Parameter → the state that an optimizer keeps of it."""
    states = {id(p): state for made in optimizers if made is not None for p, state in made.state.items()}
    return {name: states[id(p)] for name, p in named.items() if id(p) in states}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_moves(moves: Moves, before_move: Callable[[Pipeline], None] = lambda pipe: None) -> int:
    """Train with moves and by replay; everything is equal to the bit. How many layers have changed their rank."""
    case, num_moved = moves.case, 0
    model = build(case.model, case.num_layers, case.dropout)
    modules = modules_of(model)
    pipe = pipeline(case, model, case.num_ranks)
    first, replay = pipe.layout, replay_of(pipe, modules, case, model)
    for step in range(case.num_steps):
        if step:
            before_move(pipe)
            done = pipe.move(layout_of(first, moves.layouts[step - 1]))
            num_moved += len(done.difference.transfers)
            replay = moved(replay, pipe, case, model)
        inputs, targets = model.data(case.rows * pipe.programs.num_units, step)
        loss = pipe.train_step(inputs, targets)
        executed = pipe.trace().program()
        expected = replay.run(executed, units_of(pipe, executed, inputs, targets))
        assert loss == expected, f"{moves}: step {step}: the loss is {loss}, replayed {expected}"
    alone = not pipe.placement.has_replicas
    wrong = differing(weights_of(pipe.state_dict(), alone), weights_of(replay.state_dict(), alone))
    assert not wrong, f"{moves}: {wrong[0]} differs"
    found = optimizer_states(pipe.parameters(), pipe.optimizers.values())
    names = {f"{layer}.{name}": p for layer, m in replay.modules.items() for name, p in m.named_parameters()}
    wanted = optimizer_states(names, replay._optimizers)
    frozen = {name for name, p in names.items() if not p.requires_grad}  # the replay gives them to no optimizer
    assert found.keys() - frozen == wanted.keys(), moves
    for name in wanted:
        assert same(found[name], wanted[name]), f"{moves}: the optimizer state of {name} differs"
    pipe.close()
    return num_moved


def move_rank(moves: Moves) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """One rank of a process group that moves: its losses, weights and optimizer states."""
    case = moves.case
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, model)
    first, losses = pipe.layout, []
    for step in range(case.num_steps):
        if step:
            pipe.move(layout_of(first, moves.layouts[step - 1]))
        losses.append(pipe.train_step(*model.data(case.rows * pipe.programs.num_units, step)))
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    states = optimizer_states(pipe.parameters(), pipe.optimizers.values())
    pipe.close()
    return losses, state, states


def check_in_processes(run: Callable[..., list[Any]], moves: Moves, transport: str) -> None:
    """Processes that move end as threads of one process that never do. (Asynchronous schedules: ranks alone move.)"""
    case = moves.case
    there = replace(moves, case=replace(case, more={**case.more, "transport": transport}))
    answers = run(case.num_ranks, move_rank, there)
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, model, case.num_ranks)
    losses = [pipe.train_step(*model.data(case.rows * pipe.programs.num_units, s)) for s in range(case.num_steps)]
    expected, seen = pipe.state_dict(), set()
    states = optimizer_states(pipe.parameters(), pipe.optimizers.values())
    for found, state, kept in answers:
        assert found == losses
        seen |= state.keys()
        wrong = differing(state, {name: expected[name] for name in state})
        assert not wrong, f"{moves}: {wrong[0]} differs"
        for name in kept:
            assert same(kept[name], states[name]), f"{moves}: the optimizer state of {name} differs"
    assert seen == expected.keys()
